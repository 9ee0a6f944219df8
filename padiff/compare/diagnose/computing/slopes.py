"""Slopes of a loss's formula: the change of the loss along directions of the model's outputs.

A loss is one number, which many formulas give. The slope along a direction follows from the recorded gradient of the
model's output, so a formula can be compared with several dozen numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from padiff.compare.diagnose.computing.formula import Change, Formula, Get, Node, UnknownError
from padiff.compare.diagnose.computing.loss_terms import Term

#: The most values of formulas with moved leaves that are cached: 64 MB of float64.
_KEPT = 8_000_000


@dataclass(frozen=True)
class Leaf:
    """An output of the model in the formula of a loss.

    Attributes:
        node: the node of the output.
        directions: the directions of the output along which slopes are computed.
    """

    node: int
    directions: Sequence[np.ndarray]


class Sloped(Formula):
    """A formula whose end is a row of numbers: the loss, if it was recorded, and its slopes.

    Args:
        formula: the formula of the loss.
        leaves: the outputs of the model, all with the same number of directions.
        value: the node of the recorded loss; `None` if it was not recorded.
        few: the number of slopes at the end; `row` computes any number of slopes.
        scales: the divisors of the loss and of the slopes.
    """

    def __init__(
        self, formula: Formula, leaves: Sequence[Leaf], value: int | None, few: int, scales: tuple[float, float]
    ) -> None:
        super().__init__()
        self._formula = formula
        self.nodes, self.values = [*formula.nodes], [*formula.values]
        self.loss, self.leaves, self.value = formula.end, leaves, value
        self._scales, self.few = scales, few
        self._detached = [k for k, node in enumerate(self.nodes) if node.operation == "detach"]
        size = sum(value.size for value in self.values)
        self._keeps = 2 * size * max((len(leaf.directions) for leaf in leaves), default=0) <= _KEPT
        #: By direction and sign, a function that returns node values with moved leaves and no other changes.
        self._moved: dict[tuple[int, float], Get] = {}
        self.nodes.append(Node("slopes", (self.loss,)))
        self.values.append(np.zeros(0))
        self.end = len(self.nodes) - 1
        row = self.row({}, few)
        self.values[self.end] = np.zeros(0) if row is None else row

    def with_leaves(self, leaves: Sequence[Leaf]) -> Sloped:
        """Return the formula with slopes along other leaves, in the units of the loss."""
        return Sloped(self._formula, leaves, None, 0, (1.0, 1.0))

    def along(self, leaves: Sequence[Leaf]) -> Sloped:
        """Return the formula with slopes along other leaves, in the same units."""
        return Sloped(self._formula, leaves, self.value, self.few, self._scales)

    def row(self, changes: Mapping[int, Change], count: int) -> np.ndarray | None:
        """Return the loss and some slopes, with changes to some nodes; `None` if they can't be computed.

        Args:
            changes: the changes, by node.
            count: the number of slopes.
        """
        numbers: list[float] = []
        if self.value is not None:
            value = super().changed(changes, self.value)
            if value is None or value.size != 1:
                return None
            numbers.append(float(value.reshape(())) / self._scales[0])
        changes = {**self._held(changes), **changes}
        for k in range(count):
            ends = []
            for sign in (1.0, -1.0):
                end = self._end(changes, k, sign)
                if end is None or end.size != 1:
                    return None
                ends.append(float(end.reshape(())))
            numbers.append((ends[0] - ends[1]) / 2 / self._scales[1])
        return np.array(numbers)

    def columns(self, terms: Sequence[Term], count: int) -> np.ndarray | None:
        """Return the loss and some slopes of each term, one term a column; `None` if they can't be computed.

        Args:
            terms: the terms of the loss.
            count: the number of slopes.
        """
        try:
            with np.errstate(all="ignore"):
                rows = [[_number(term.share(self.values[term.node])) / self._scales[0] for term in terms]]
                held = self._held({})
                for k in range(count):
                    gets = [self.getter({**held, **self._steps(held, k, sign)}) for sign in (1.0, -1.0)]
                    ends = [[_number(term.share(get(term.node))) for term in terms] for get in gets]
                    rows.append([(up - down) / 2 / self._scales[1] for up, down in zip(*ends)])
        except (UnknownError, ValueError, IndexError):
            return None
        columns = np.array(rows)
        return columns if np.isfinite(columns).all() else None

    def changed(
        self, changes: Mapping[int, Change], end: int | None = None, base: Get | None = None
    ) -> np.ndarray | None:
        if end is None or end == self.end:
            return self.row(changes, self.few)
        return super().changed(changes, end, base)

    def _end(self, changes: Mapping[int, Change], k: int, sign: float) -> np.ndarray | None:
        """Return the loss with changes to some nodes and moved leaves; `None` if it can't be computed."""
        if self._keeps and all(leaf.node not in changes for leaf in self.leaves):
            # Only nodes that depend on the changes are computed again; changes usually come late in a formula.
            if (k, sign) not in self._moved:
                self._moved[k, sign] = self.getter(self._steps({}, k, sign))
            return super().changed(changes, self.loss, self._moved[k, sign])
        return super().changed({**changes, **self._steps(changes, k, sign)}, self.loss)

    def _steps(self, changes: Mapping[int, Change], k: int, sign: float) -> dict[int, Change]:
        """Return the changes of the leaves: an existing change, followed by the step along a direction."""
        return {leaf.node: _moved(changes.get(leaf.node), leaf.node, sign * leaf.directions[k]) for leaf in self.leaves}

    def _held(self, changes: Mapping[int, Change]) -> dict[int, Change]:
        """Return the changes that keep detached nodes at their values without steps."""
        if not self._detached:
            return {}
        get = self.getter(changes)
        held = {k: get(k) for k in self._detached if k not in changes}
        return {k: lambda get, own, value=value: value for k, value in held.items()}  # type: ignore[misc]


def _moved(change: Change | None, node: int, by: np.ndarray) -> Change:
    """Return a change that adds a step to a node's value, after another change of the node if there is one."""
    return lambda get, own: np.asarray((own(node) if change is None else change(get, own)) + by)


def _number(value: np.ndarray) -> float:
    """Return the only element of an array.

    Raises:
        ValueError: the array has several.
    """
    return float(value.reshape(()))
