"""Which layer, which parameter and which record answers to which."""

from padiff.align.found import Alignment, Doubt, LayerPair, ParameterPair, Part, Seen, SplitPair
from padiff.align.layers import align
from padiff.align.pairs import pair_steps
from padiff.align.settle import settled

__all__ = [
    "Alignment",
    "Doubt",
    "LayerPair",
    "ParameterPair",
    "Part",
    "Seen",
    "SplitPair",
    "align",
    "pair_steps",
    "settled",
]
