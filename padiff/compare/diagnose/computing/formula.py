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
        value = self._computed(node, lambda k: self.values[k])
        self.nodes.append(node)
        self.values.append(value)
        return len(self.nodes) - 1

    def below(self, nodes: Iterable[int]) -> set[int]:
        """The nodes that depend on some, with these."""
        found = set(nodes)
        for k, node in enumerate(self.nodes):
            if any(one in found for one in node.given):
                found.add(k)
        return found

    def above(self, node: int, most: int = 10_000) -> dict[int, int]:
        """The nodes that a node depends on, with how many operations lie between."""
        found, waiting = {node: 0}, [node]
        for one in waiting:
            for before in self.nodes[one].given:
                if before not in found and found[one] < most:
                    found[before] = found[one] + 1
                    waiting.append(before)
        return found

    def changed(self, changes: Mapping[int, Change], end: int | None = None) -> np.ndarray | None:
        """The value of the end with changes to some nodes; `None` where that can't be computed."""
        affected = self.below(changes)
        known: dict[int, np.ndarray] = {}
        end = self.end if end is None else end

        def get(k: int) -> np.ndarray:
            if k not in affected:
                return self.values[k]
            if k not in known:
                known[k] = changes[k](get, own) if k in changes else own(k)
            return known[k]

        def own(k: int) -> np.ndarray:
            return self._computed(self.nodes[k], get) if self.nodes[k].operation else self.values[k]

        try:
            value = get(end)
        except (UnknownError, ValueError, IndexError, RecursionError, ZeroDivisionError):
            return None
        return value if np.isfinite(value).all() else None

    @staticmethod
    def _computed(node: Node, get: Get) -> np.ndarray:
        try:
            with np.errstate(all="ignore"):
                return np.asarray(OPERATIONS[node.operation](*(get(k) for k in node.given), **node.how))
        except (KeyError, TypeError) as error:
            raise UnknownError(f"{node.operation}: {error}") from error


def _wide(value: np.ndarray) -> np.ndarray:
    """Numbers in float64; integers and truths as they are."""
    if value.dtype.kind in "fV" or value.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        return np.asarray(value, np.float64)
    return value
