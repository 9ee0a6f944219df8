"""Layouts: conversions of a candidate's tensor to the shape and axis order of the reference's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

Shape = tuple[int, ...]
#: One conversion: `numpy.transpose` with these axes, the transpose of a matrix, a reshape, a broadcast (one side has
#: a single copy of values that the other side has for every sample), or rows in another order (already exchanged in the
#: records).
LayoutStep = Shape | Literal["transpose", "reshape", "broadcast", "rows"]

# The usual meaning of a permutation of axes.
_MEANINGS: dict[LayoutStep, str] = {
    (0, 2, 1): "channels last against first",
    (1, 0, 2): "sequence first against batch first",
    (0, 3, 1, 2): "channels last against first",
    (0, 2, 3, 1): "channels first against last",
    (0, 2, 1, 3): "heads before the sequence against after it",
    (0, 4, 1, 2, 3): "channels last against first",
    (0, 2, 3, 4, 1): "channels first against last",
    "rows": "rows in another order",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """Conversion of a candidate's tensor to the reference's layout; false if both sides have the same layout.

    `str` returns the steps as text, the form used in reports: ``axes 0,2,3,1 then reshape``.

    Args:
        steps: the conversions of the candidate's tensor, in order.
    """

    steps: tuple[LayoutStep, ...] = ()

    @classmethod
    def from_text(cls, text: str) -> Layout:
        """Return the layout from its text (`str`)."""
        parts = text.split(" then ") if text else []
        axes = (tuple(map(int, part[5:].split(","))) if part.startswith("axes ") else part for part in parts)
        return cls(tuple(axes))  # type: ignore[arg-type]

    @property
    def transposes(self) -> bool:
        """Return True if the layout transposes a matrix."""
        return self.steps.count("transpose") % 2 == 1

    @property
    def in_order(self) -> bool:
        """Return True if the layout only reshapes or transposes a matrix, so that no other axes are permuted."""
        return all(step in ("transpose", "reshape") for step in self.steps)

    def apply(self, candidate: np.ndarray, reference: Shape) -> np.ndarray:
        """Return a candidate's tensor in the reference's layout.

        Args:
            reference: the shape of the reference's tensor.
        """
        for step in self.steps:
            if isinstance(step, tuple):
                candidate = candidate.transpose(step)
            elif step == "transpose":
                candidate = candidate.T
            elif step == "reshape" and candidate.size == math.prod(reference):
                candidate = candidate.reshape(reference)
        return candidate

    def undo(self, reference: np.ndarray, candidate: Shape) -> np.ndarray:
        """Return a reference's tensor in the candidate's layout: the inverse of `apply`.

        Args:
            candidate: the shape of the candidate's tensor.
        """
        shapes = [candidate]
        for step in self.steps:
            shapes.append(Layout((step,)).shape(shapes[-1], reference.shape))
        for step, before in zip(reversed(self.steps), reversed(shapes[:-1])):
            if isinstance(step, tuple):
                reference = reference.transpose(np.argsort(step))
            elif step == "transpose":
                reference = reference.T
            elif step == "reshape":
                reference = reference.reshape(before)
        return reference

    def shape(self, candidate: Shape, reference: Shape) -> Shape:
        """Return the shape of the result of `apply` for a candidate's shape and a reference's shape."""
        return self.apply(np.broadcast_to(np.zeros(()), candidate), reference).shape if self.steps else candidate

    def describe(self) -> str:
        """Return the layout in words."""
        return ", ".join(_MEANINGS.get(step) or _text(step) for step in self.steps)

    def __str__(self) -> str:
        return " then ".join(map(_text, self.steps))

    def __bool__(self) -> bool:
        return bool(self.steps)


def _text(step: LayoutStep) -> str:
    return f"axes {','.join(map(str, step))}" if isinstance(step, tuple) else step


#: The same layout on both sides, a transposed matrix, the same elements in another shape.
SAME, TRANSPOSED, RESHAPED = Layout(), Layout(("transpose",)), Layout(("reshape",))
#: One side lacks the batch axis, or has length 1 there: position embeddings.
BROADCAST = Layout(("broadcast",))
