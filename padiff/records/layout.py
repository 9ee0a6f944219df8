"""Layouts: how a tensor of the candidate is brought into the shape and order of the reference's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

Shape = tuple[int, ...]
#: numpy's transpose with these axes, the transpose of a matrix, another shape of the same elements in one order, or
#: one side that has once what the other has for every sample.
LayoutStep = Shape | Literal["transpose", "reshape", "broadcast"]

# What exchanging these axes mostly is.
_MEANINGS = {
    (0, 2, 1): "channels last against first",
    (1, 0, 2): "sequence first against batch first",
    (0, 3, 1, 2): "channels last against first",
    (0, 2, 3, 1): "channels first against last",
    (0, 2, 1, 3): "heads before the sequence against after it",
    (0, 4, 1, 2, 3): "channels last against first",
    (0, 2, 3, 4, 1): "channels first against last",
}


@dataclass(frozen=True, slots=True)
class Layout:
    """How a candidate's tensor is brought into the reference's layout; false where both have the same.

    Its text, which reports hold, is that of its steps: ``axes 0,2,3,1 then reshape``.

    Args:
        steps: what is done to the candidate's tensor, in this order.
    """

    steps: tuple[LayoutStep, ...] = ()

    @classmethod
    def of(cls, text: str) -> Layout:
        """The layout that a text stands for."""
        parts = text.split(" then ") if text else []
        axes = (tuple(map(int, part[5:].split(","))) if part.startswith("axes ") else part for part in parts)
        return cls(tuple(axes))  # type: ignore[arg-type]

    @property
    def transposes(self) -> bool:
        """Whether a matrix is transposed by it."""
        return self.steps.count("transpose") % 2 == 1

    @property
    def in_order(self) -> bool:
        """Whether all elements stay in their order, but for the transpose of a matrix."""
        return all(step in ("transpose", "reshape") for step in self.steps)

    def apply(self, candidate: np.ndarray, reference: Shape) -> np.ndarray:
        """A candidate's tensor as it would lie in the reference's layout."""
        for step in self.steps:
            if isinstance(step, tuple):
                candidate = candidate.transpose(step)
            elif step == "transpose":
                candidate = candidate.T
            elif step == "reshape" and candidate.size == math.prod(reference):
                candidate = candidate.reshape(reference)
        return candidate

    def undo(self, reference: np.ndarray, candidate: Shape) -> np.ndarray:
        """A reference's tensor as it would lie in the candidate's layout: what `apply` would make it from."""
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
        """The shape of what `apply` makes of a tensor."""
        return self.apply(np.broadcast_to(np.zeros(()), candidate), reference).shape if self.steps else candidate

    def describe(self) -> str:
        """The layout in words."""
        words = [_MEANINGS.get(step) or _text(step) if isinstance(step, tuple) else step for step in self.steps]
        return ", ".join(words)

    def __str__(self) -> str:
        return " then ".join(map(_text, self.steps))

    def __bool__(self) -> bool:
        return bool(self.steps)


def _text(step: LayoutStep) -> str:
    return f"axes {','.join(map(str, step))}" if isinstance(step, tuple) else step


#: Of two tensors in one layout, of a transposed matrix, of the same elements in another shape.
SAME, TRANSPOSED, RESHAPED = Layout(), Layout(("transpose",)), Layout(("reshape",))
#: One side has once, or not at all, what the other has for every sample: position embeddings.
BROADCAST = Layout(("broadcast",))
