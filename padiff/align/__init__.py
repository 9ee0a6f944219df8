"""Alignment of two models: pairs of layers and pairs of parameters."""

from padiff.align.alignment import Alignment, LayerPair, SplitPair
from padiff.align.layers import align, is_mapped
from padiff.align.resolve import resolved
from padiff.align.seen import NOTHING_SEEN, Seen
from padiff.align.slices import Ambiguity, ParameterPair, Slice

__all__ = [
    "NOTHING_SEEN",
    "Alignment",
    "Ambiguity",
    "LayerPair",
    "ParameterPair",
    "Slice",
    "Seen",
    "SplitPair",
    "align",
    "is_mapped",
    "resolved",
]
