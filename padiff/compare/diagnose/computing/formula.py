"""A formula: what a tensor of a trace was computed by, step by step, so that a step can be computed otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from padiff.compare.diagnose.computing.operations import OPERATIONS

#: Gives the value of a node.
Get = Callable[[int], np.ndarray]
#: Makes the value of a node otherwise, given a node's changed value, and its own operation's.
Change = Callable[[Get, Get], np.ndarray]


class UnknownError(Exception):
    """Something can't be computed: its function is not known here, or a tensor was not kept."""


@dataclass(frozen=True)
class Node:
    """One operation of a formula.

    Attributes:
        operation: name of an operation; empty for a tensor that is given.
        given: the nodes that go in.
        how: what else the operation is given.
        about: the traced call that it is of: its place among the trace's calls; -1: none.
        name: of a tensor that is given, what it is: ``layer/slot`` of a parameter, or empty.
    """

    operation: str
    given: tuple[int, ...] = ()
    how: Mapping[str, Any] = field(default_factory=dict)
    about: int = -1
    name: str = ""


class Formula:
    """Nodes, in an order in which they can be computed, and their values."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.values: list[np.ndarray] = []
        #: The node that is computed for.
        self.end = -1
        #: What was found to depend on some nodes, of so many nodes.
        self._depending: tuple[int, dict[frozenset[int], set[int]]] = 0, {}

    def leaf(self, value: np.ndarray, name: str = "") -> int:
        """A tensor that is given."""
        self.nodes.append(Node("", name=name))
        self.values.append(_wide(value))
        return len(self.nodes) - 1

    def add(self, operation: str, *given: int, about: int = -1, **how: Any) -> int:
        """An operation on nodes.

        Raises:
            UnknownError: it can't be computed.
        """
        node = Node(operation, given, how, about)
        with np.errstate(all="ignore"):
            value = computed(node, lambda k: self.values[k])
        self.nodes.append(node)
        self.values.append(value)
        return len(self.nodes) - 1

    def below(self, nodes: Iterable[int]) -> set[int]:
        """The nodes that depend on some, with these."""
        if self._depending[0] != len(self.nodes):
            self._depending = len(self.nodes), {}
        asked, known = frozenset(nodes), self._depending[1]
        if asked not in known:
            found = known[asked] = set(asked)
            for k, node in enumerate(self.nodes):
                if not found.isdisjoint(node.given):
                    found.add(k)
        return known[asked]

    def above(self, node: int, most: int = 10_000) -> dict[int, int]:
        """The nodes that a node depends on, with how many operations lie between."""
        found, waiting = {node: 0}, [node]
        for one in waiting:
            for before in self.nodes[one].given:
                if before not in found and found[one] < most:
                    found[before] = found[one] + 1
                    waiting.append(before)
        return found

    def changed(
        self, changes: Mapping[int, Change], end: int | None = None, base: Get | None = None
    ) -> np.ndarray | None:
        """The value of the end with changes to some nodes; `None` where that can't be computed.

        Args:
            base: gives the values of nodes that do not depend on these. Default: as they were recorded.
        """
        try:
            with np.errstate(all="ignore"):  # once: an operation on some dozen numbers takes no longer than this
                value = self.getter(changes, base)(self.end if end is None else end)
                return value if np.isfinite(value).all() else None
        except (UnknownError, ValueError, IndexError, RecursionError, ZeroDivisionError):
            return None

    def getter(
        self, changes: Mapping[int, Change], base: Get | None = None, known: dict[int, np.ndarray] | None = None
    ) -> Get:
        """What computes nodes' values with changes to some; as `changed`.

        Args:
            known: values that were computed so, and takes those that are.
        """
        return _Changed(self, changes, self.values.__getitem__ if base is None else base, known).get


class _Changed:
    """A formula's values with changes to some nodes, each computed once.

    (Two functions that call each other would be a cycle, and hundred thousands of these keep the collector busy.)
    """

    __slots__ = ("_affected", "_changes", "_nodes", "_unchanged", "_values")

    def __init__(
        self, formula: Formula, changes: Mapping[int, Change], unchanged: Get, known: dict[int, np.ndarray] | None
    ) -> None:
        self._nodes, self._affected = formula.nodes, formula.below(changes)
        self._changes, self._unchanged = changes, unchanged
        self._values: dict[int, np.ndarray] = {} if known is None else known

    def get(self, k: int) -> np.ndarray:
        if k not in self._affected:
            return self._unchanged(k)
        value = self._values.get(k)
        if value is None:
            change = self._changes.get(k)
            value = self._values[k] = self.own(k) if change is None else change(self.get, self.own)
        return value

    def own(self, k: int) -> np.ndarray:
        node = self._nodes[k]
        return computed(node, self.get) if node.operation else self._unchanged(k)


def computed(node: Node, get: Get) -> np.ndarray:
    """The value of an operation, given its nodes'. Divisions by zero give no warning.

    Raises:
        UnknownError: it can't be computed.
    """
    try:
        return np.asarray(OPERATIONS[node.operation](*[get(k) for k in node.given], **node.how))
    except (KeyError, TypeError) as error:
        raise UnknownError(f"{node.operation}: {error}") from error


def _wide(value: np.ndarray) -> np.ndarray:
    """Numbers in float64; integers and truths as they are."""
    if value.dtype.kind in "fV" or value.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        return np.asarray(value, np.float64)
    return value
