"""What is known of each framework by its name: that is all that a run on disk has of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """What is known of a framework.

    Attributes:
        layer: what it calls a layer.
        layout: how the matrix ``weight`` of a linear layer lies.
    """

    layer: str
    layout: str


FRAMEWORKS = {"torch": Known("module", "out_in"), "paddle": Known("layer", "in_out")}


def usual_layout(framework: str, slot: str) -> str:
    """How a matrix lies as a rule, where it is not known to be of a linear layer."""
    known = FRAMEWORKS.get(framework)
    return known.layout if known is not None and slot == "weight" else "in_out"
