"""Which layer, and which record, answers to which."""

from padiff.align.layers import Alignment, LayerPair, align
from padiff.align.pairs import pair_steps

__all__ = ["Alignment", "LayerPair", "align", "pair_steps"]
