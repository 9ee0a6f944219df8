"""The slopes of a loss's formula: by how much the loss changes along some directions of what the model gave.

A loss is one number, which many formulas give. Along a direction its slope is what the gradient that was recorded of
the model's output says, so that a formula is held against some dozens of numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from padiff.compare.diagnose.computing.formula import Change, Formula, Get, Node

#: How many numbers of a formula moved along directions are kept for the next change: 64 MB of float64.
_KEPT = 8_000_000


@dataclass(frozen=True)
class Leaf:
    """A tensor that the model gave.

    Attributes:
        node: of the formula.
        directions: in which it is moved, as far as it is.
    """

    node: int
    directions: Sequence[np.ndarray]


class Sloped(Formula):
    """A formula whose end is a row of numbers: the loss itself, where it is known, and its slopes.

    Args:
        formula: of the loss.
        leaves: along whose directions it is looked at; all have as many.
        value: the node of the loss as it was recorded; `None` where it was not.
        few: how many slopes an end has; `row` gives as many as are asked for.
        scales: what the loss, and the slopes, are divided by.
    """

    def __init__(
        self, formula: Formula, leaves: Sequence[Leaf], value: int | None, few: int, scales: tuple[float, float]
    ) -> None:
        super().__init__()
        self.nodes, self.values = [*formula.nodes], [*formula.values]
        self.loss, self._leaves, self._value = formula.end, leaves, value
        self._scales, self.few = scales, few
        size = sum(value.size for value in self.values)
        self._keeps = 2 * size * max((len(leaf.directions) for leaf in leaves), default=0) <= _KEPT
        #: By direction and sign, what gives the values where the leaves are moved and nothing else is changed.
        self._moved: dict[tuple[int, float], Get] = {}
        self.nodes.append(Node("slopes", (self.loss,)))
        self.values.append(np.zeros(0))
        self.end = len(self.nodes) - 1
        made = self.row({}, few)
        self.values[self.end] = np.zeros(0) if made is None else made

    def row(self, changes: Mapping[int, Change], count: int) -> np.ndarray | None:
        """The loss and so many of its slopes, with changes to some nodes; `None` where that can't be computed."""
        found: list[float] = []
        if self._value is not None:
            value = super().changed(changes, self._value)
            if value is None or value.size != 1:
                return None
            found.append(float(value.reshape(())) / self._scales[0])
        for k in range(count):
            ends = []
            for sign in (1.0, -1.0):
                end = self._end(changes, k, sign)
                if end is None or end.size != 1:
                    return None
                ends.append(float(end.reshape(())))
            found.append((ends[0] - ends[1]) / 2 / self._scales[1])
        return np.array(found)

    def changed(
        self, changes: Mapping[int, Change], end: int | None = None, base: Get | None = None
    ) -> np.ndarray | None:
        if end is None or end == self.end:
            return self.row(changes, self.few)
        return super().changed(changes, end, base)

    def _end(self, changes: Mapping[int, Change], k: int, sign: float) -> np.ndarray | None:
        """The loss with changes to some nodes and the leaves moved; `None` where that can't be computed."""
        if self._keeps and all(leaf.node not in changes for leaf in self._leaves):
            # Only what depends on the changes is computed anew, which come late in a formula as a rule.
            if (k, sign) not in self._moved:
                self._moved[k, sign] = self.getter(self._steps({}, k, sign))
            return super().changed(changes, self.loss, self._moved[k, sign])
        return super().changed({**changes, **self._steps(changes, k, sign)}, self.loss)

    def _steps(self, changes: Mapping[int, Change], k: int, sign: float) -> dict[int, Change]:
        """The leaves' changes: what is done to them besides, and the step along a direction."""
        return {
            leaf.node: _moved(changes.get(leaf.node), leaf.node, sign * leaf.directions[k]) for leaf in self._leaves
        }


def _moved(change: Change | None, node: int, by: np.ndarray) -> Change:
    """A tensor's value, changed or its own, and something more."""
    return lambda get, own: np.asarray((own(node) if change is None else change(get, own)) + by)
