"""Model pairs with a known map: ``PAIRS`` compute the same function, ``DIFFERENT`` do not."""

from __future__ import annotations

from . import (
    backwards,
    beits,
    branches,
    convnets,
    decoders,
    different,
    encoders,
    llamas,
    odd,
    recurrent,
    scales,
    scrambled,
    translators,
    vits,
)
from .pair import ROOT, Pair

PAIRS: tuple[Pair, ...] = (
    *convnets.PAIRS,
    *branches.PAIRS,
    *scales.PAIRS,
    *encoders.PAIRS,
    *vits.PAIRS,
    *beits.PAIRS,
    *decoders.PAIRS,
    *llamas.PAIRS,
    *translators.PAIRS,
    *recurrent.PAIRS,
    *odd.PAIRS,
    *scrambled.PAIRS,
    *backwards.PAIRS,
    *different.BOTH,
)
DIFFERENT: tuple[Pair, ...] = different.PAIRS

__all__ = ["DIFFERENT", "PAIRS", "ROOT", "Pair"]
