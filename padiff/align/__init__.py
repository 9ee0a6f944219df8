"""Which layer and which parameter answers to which."""

from padiff.align.alignment import Alignment, LayerPair, SplitPair, unzipped
from padiff.align.layers import align
from padiff.align.resolve import settled
from padiff.align.seen import NOTHING_SEEN, Seen
from padiff.align.slices import Doubt, ParameterPair, Part

__all__ = [
    "NOTHING_SEEN",
    "Alignment",
    "Doubt",
    "LayerPair",
    "ParameterPair",
    "Part",
    "Seen",
    "SplitPair",
    "align",
    "settled",
    "unzipped",
]
