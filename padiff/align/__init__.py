"""Alignment of two models: pairs of layers and pairs of parameters."""

from padiff.align.alignment import Alignment, LayerPair, SplitPair, resolved
from padiff.align.layers import align, is_mapped
from padiff.align.slices import NOTHING_SEEN, Ambiguity, ParameterPair, RuntimeEvidence, Slice

__all__ = [
    "NOTHING_SEEN",
    "Alignment",
    "Ambiguity",
    "LayerPair",
    "ParameterPair",
    "Slice",
    "RuntimeEvidence",
    "SplitPair",
    "align",
    "is_mapped",
    "resolved",
]
