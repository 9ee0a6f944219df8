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
        pools_without_padding: whether the mean of average pooling leaves padding out, where nothing else is said.
        pads_first_axis_first: whether what to pad every axis by begins with the first axis.
        heads_third: whether the heads that attention is given are the third axis of four, not the second.
        classes_last: whether a cross-entropy's classes are the last axis of however many.
        smooth_undivided: whether the smooth L1 loss is not divided by its beta.
        gathers_rows: whether ``gather`` takes whole rows.
        splits_into: whether the number that ``split`` is given says into how many parts, not how long they are.
    """

    layer: str
    layout: str
    counts_ignored: bool = False
    pads_with_zeros: bool = False
    pools_without_padding: bool = False
    pads_first_axis_first: bool = False
    heads_third: bool = False
    classes_last: bool = False
    smooth_undivided: bool = False
    gathers_rows: bool = False
    splits_into: bool = False


FRAMEWORKS = {
    "torch": Known("module", "out_in"),
    "paddle": Known(
        "layer",
        "in_out",
        counts_ignored=True,
        pads_with_zeros=True,
        pools_without_padding=True,
        pads_first_axis_first=True,
        heads_third=True,
        classes_last=True,
        smooth_undivided=True,
        gathers_rows=True,
        splits_into=True,
    ),
}
_OTHER = Known("layer", "in_out")


def known(framework: str) -> Known:
    """What is known of a framework; of another one, that it does nothing in a way of its own."""
    return FRAMEWORKS.get(framework, _OTHER)


def usual_layout(framework: str, slot: str) -> str:
    """How a matrix lies as a rule, where it is not known to be of a linear layer."""
    return known(framework).layout if slot == "weight" else "in_out"
