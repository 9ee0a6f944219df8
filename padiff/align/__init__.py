"""Which layer and which parameter answers to which."""

from padiff.align.alignment import (
    NOTHING_SEEN,
    Alignment,
    Doubt,
    LayerPair,
    ParameterPair,
    Part,
    Seen,
    SplitPair,
    unzipped,
)
from padiff.align.layers import align
from padiff.align.resolve import settled

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
