"""Conventions of each framework, by its name: a run on disk stores only the name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Conventions:
    """Conventions of a framework.

    Attributes:
        layer: the framework's word for a layer.
        layout: the layout of the matrix ``weight`` of a linear layer: ``out_in`` or ``in_out``.
        counts_ignored: True if the mean of a cross-entropy counts rows with an ignored label, too, where the ignored
            label is negative and the classes have no weights. Soft labels are then weighted per row, not per class.
        pads_with_zeros: True if an embedding returns zeros for its padding index, whatever its weight contains.
        pools_without_padding: True if average pooling excludes padding from the mean by default.
        pads_first_axis_first: True if a list of paddings of every axis begins with the first axis.
        heads_third: True if the heads in the inputs of attention are the third of four axes, not the second.
        classes_last: True if the classes of a cross-entropy are the last axis, for any number of axes.
        smooth_undivided: True if the smooth L1 loss is not divided by its beta.
        gathers_rows: True if ``gather`` selects whole rows.
        splits_into: True if the number passed to ``split`` is the number of parts, not the length of a part.
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
    "torch": Conventions("module", "out_in"),
    "paddle": Conventions(
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
_OTHER = Conventions("layer", "in_out")


def conventions_of(framework: str) -> Conventions:
    """Return the conventions of a framework; for an unknown framework, defaults without any special convention."""
    return FRAMEWORKS.get(framework, _OTHER)


def usual_layout(framework: str, slot: str) -> str:
    """Return the usual layout (``out_in`` or ``in_out``) of a matrix whose layer is not known to be linear."""
    return conventions_of(framework).layout if slot == "weight" else "in_out"
