"""Alignment of two models: pairs of layers and pairs of parameters."""

from padiff.align.alignment import Alignment, LayerPair, SplitPair
from padiff.align.layers import align, is_mapped
from padiff.align.resolve import resolved
from padiff.align.runtime_evidence import NOTHING_SEEN, RuntimeEvidence
from padiff.align.slices import Ambiguity, ParameterPair, Slice

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
