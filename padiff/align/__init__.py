"""Which layer and which parameter answers to which."""

from padiff.align.alignment import Alignment, Doubt, LayerPair, ParameterPair, Part, Seen, SplitPair
from padiff.align.layers import align
from padiff.align.resolve import settled

__all__ = [
    "Alignment",
    "Doubt",
    "LayerPair",
    "ParameterPair",
    "Part",
    "Seen",
    "SplitPair",
    "align",
    "settled",
]
