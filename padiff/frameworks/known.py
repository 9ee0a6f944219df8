"""What is known of each framework by its name: that is all that a run on disk has of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """What is known of a framework.

    Attributes:
        layer: what it calls a layer.
        layout: how the matrix ``weight`` of a linear layer lies.
        counts_ignored: whether the mean of a cross-entropy is over all rows, those with a label that is ignored, too,
            where that label is negative and classes have no weights. Soft labels are then weighed as a row, not class
            by class.
        pads_with_zeros: whether an embedding gives zeros for the index of padding, whatever its weight says.
    """

    layer: str
    layout: str
    counts_ignored: bool = False
    pads_with_zeros: bool = False


FRAMEWORKS = {
    "torch": Known("module", "out_in"),
    "paddle": Known("layer", "in_out", counts_ignored=True, pads_with_zeros=True),
}


def usual_layout(framework: str, slot: str) -> str:
    """How a matrix lies as a rule, where it is not known to be of a linear layer."""
    known = FRAMEWORKS.get(framework)
    return known.layout if known is not None and slot == "weight" else "in_out"
