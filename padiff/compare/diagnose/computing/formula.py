"""Formulas: the operations that computed a tensor of a trace, which can be computed again, and their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from padiff.compare.diagnose.computing.operations import OPERATIONS

#: Returns the value of a node.
Get = Callable[[int], np.ndarray]
#: Returns the new value of a node. The first argument returns the value of a node with all changes, the second the
#: result of a node's unchanged operation.
Change = Callable[[Get, Get], np.ndarray]


class UnknownError(Exception):
    """A tensor can't be computed: a function is not supported, or a value was not recorded."""


@dataclass(frozen=True)
class Node:
    """One operation of a formula, or a leaf.

    Attributes:
        operation: the name of the operation; empty for a leaf.
        given: the input nodes.
        how: the keyword arguments of the operation.
        about: the position, in the trace, of the call that the node belongs to; -1 if there is none.
        name: the name of a leaf: ``layer/slot`` of a parameter; else empty.
    """

    operation: str
    given: tuple[int, ...] = ()
    how: Mapping[str, Any] = field(default_factory=dict)
    about: int = -1
    name: str = ""


class Formula:
    """Nodes in an order in which they can be computed, and the value of each."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.values: list[np.ndarray] = []
        #: The node whose value the formula computes.
        self.end = -1
        #: A cache of `below`, and the number of nodes that the cache is valid for.
        self._depending: tuple[int, dict[frozenset[int], set[int]]] = 0, {}

    def leaf(self, value: np.ndarray, name: str = "") -> int:
        """Append a leaf with a value and return its number."""
        self.nodes.append(Node("", name=name))
        self.values.append(_wide(value))
        return len(self.nodes) - 1

    def add(self, operation: str, *given: int, about: int = -1, **how: Any) -> int:
        """Append an operation on nodes, compute its value and return its number.

        Args:
            operation: the name of the operation.
            given: the input nodes.
            about: the position, in the trace, of the call that the node belongs to; -1 if there is none.
            how: the keyword arguments of the operation.

        Raises:
            UnknownError: the operation can't be computed.
        """
        node = Node(operation, given, how, about)
        with np.errstate(all="ignore"):
            value = computed(node, lambda k: self.values[k])
        self.nodes.append(node)
        self.values.append(value)
        return len(self.nodes) - 1

    def below(self, nodes: Iterable[int]) -> set[int]:
        """Return the nodes that depend on some nodes, including these."""
        if self._depending[0] != len(self.nodes):
            self._depending = len(self.nodes), {}
        key, cache = frozenset(nodes), self._depending[1]
        if key not in cache:
            dependent = cache[key] = set(key)
            for k, node in enumerate(self.nodes):
                if not dependent.isdisjoint(node.given):
                    dependent.add(k)
        return cache[key]

    def above(self, node: int, most: int = 10_000) -> dict[int, int]:
        """Return the nodes that a node depends on, with the number of operations in between, up to `most`."""
        distances, waiting = {node: 0}, [node]
        for k in waiting:
            for before in self.nodes[k].given:
                if before not in distances and distances[k] < most:
                    distances[before] = distances[k] + 1
                    waiting.append(before)
        return distances

    def changed(
        self, changes: Mapping[int, Change], end: int | None = None, base: Get | None = None
    ) -> np.ndarray | None:
        """Return the value of the end with changes to some nodes; `None` if it can't be computed.

        Args:
            changes: the changes, by node.
            end: the node to compute. Default: the end of the formula.
            base: gives the values of nodes that do not depend on the changes. Default: their recorded values.
        """
        try:
            with np.errstate(all="ignore"):  # entered once: it costs as much as an operation on some dozen numbers
                value = self.getter(changes, base)(self.end if end is None else end)
                return value if np.isfinite(value).all() else None
        except (UnknownError, ValueError, IndexError, RecursionError, ZeroDivisionError):
            return None

    def getter(
        self, changes: Mapping[int, Change], base: Get | None = None, known: dict[int, np.ndarray] | None = None
    ) -> Get:
        """Return a function that computes the values of nodes with changes to some nodes.

        Args:
            changes: the changes, by node.
            base: gives the values of nodes that do not depend on the changes. Default: their recorded values.
            known: values that are already computed with these changes; new values are added.
        """
        return _Changed(self, changes, self.values.__getitem__ if base is None else base, known).get


class _Changed:
    """The values of a formula with changes to some nodes, each computed once.

    (Two functions that call each other would form a reference cycle, and hundreds of thousands of cycles slow down the
    garbage collector.)
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
    """Return the value of an operation, from the values of its input nodes. The caller silences numpy's warnings.

    Raises:
        UnknownError: the operation can't be computed.
    """
    try:
        return np.asarray(OPERATIONS[node.operation](*[get(k) for k in node.given], **node.how))
    except (KeyError, TypeError) as error:
        raise UnknownError(f"{node.operation}: {error}") from error


def _wide(value: np.ndarray) -> np.ndarray:
    """Return floating point values in float64; integers and booleans unchanged."""
    if value.dtype.kind in "fV" or value.dtype.name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        return np.asarray(value, np.float64)
    return value


_MISSING = object()
# Positions of operands, by parameter name.
_PLACES = {
    "input": 0, "x": 0, "self": 0, "query": 0, "other": 1, "y": 1, "key": 1, "value": 2, "weight": 1, "bias": 2,
    "mask": 1, "attn_mask": 3, "condition": 0,
}  # fmt: skip
_IN_FUNCTION = {
    "where": {"condition": 0, "input": 1, "x": 1, "other": 2, "y": 2},
    "layer_norm": {"weight": 1, "bias": 2},
    "rms_norm": {"weight": 1, "bias": 2, "norm_weight": 1, "norm_bias": 2},
    "group_norm": {"weight": 1, "bias": 2},
    "embedding": {"weight": 1},
    "batch_norm": {"running_mean": 1, "running_var": 2, "weight": 3, "bias": 4},
    "masked_fill": {"mask": 1, "value": 2},
    "cross_entropy": {"target": 1, "label": 1, "weight": 2},
    "nll_loss": {"target": 1, "label": 1, "weight": 2},
    "binary_cross_entropy": {"target": 1, "label": 1, "weight": 2},
    "binary_cross_entropy_with_logits": {"logit": 0, "target": 1, "label": 1, "weight": 2, "pos_weight": 3},
}
# Parameters of an index, one operand for each axis that is indexed by a tensor.
_INDICES = frozenset({"key", "item"})


@dataclass(frozen=True)
class KnownInputs:
    """The inputs of a function call.

    Attributes:
        function: the common name of the function.
        nodes: the operands as nodes of a formula, by position.
        arguments: the other arguments, by parameter name or position.
    """

    function: str
    nodes: Mapping[int, int]
    arguments: Mapping[str, Any]

    @property
    def first(self) -> int:
        return self.node(0)

    def node(self, place: int) -> int:
        """Return the operand at a position.

        Raises:
            UnknownError: there is no operand at this position.
        """
        if place not in self.nodes:
            raise UnknownError(f"{self.function} has no operand in place {place}")
        return self.nodes[place]

    @property
    def all(self) -> list[int]:
        """The operands, in order."""
        return [self.nodes[k] for k in sorted(self.nodes)]

    def argument(self, names: Sequence[str], place: int = -1, default: Any = _MISSING) -> Any:
        """Return an argument by one of its names or by its position.

        Args:
            names: the possible names of the parameter.
            place: the position.
            default: the value to return if the call does not have the argument.

        Raises:
            UnknownError: the call does not have the argument, and there is no default.
        """
        for name in (*names, str(place)):
            if name in self.arguments:
                return self.arguments[name]
        if default is _MISSING:
            raise UnknownError(f"{self.function} without {names[0]}")
        return default

    def numbers(self, names: Sequence[str], place: int) -> list[int]:
        """Return a list of numbers, passed as one argument or as positional arguments from a position on.

        Args:
            names: the possible names of the parameter.
            place: the position of the first number.

        Raises:
            UnknownError: the call does not have the argument.
        """
        value = self.argument(names, place, None)
        if isinstance(value, list):
            return value
        if value is None and not any(name in self.arguments for name in names):
            raise UnknownError(f"{self.function} without {names[0]}")
        numbers: list[int] = []
        while str(place + len(numbers)) in self.arguments:
            numbers.append(self.arguments[str(place + len(numbers))])
        return numbers or [value]


def placed(function: str, slots: Sequence[tuple[str, int]], parameters: Sequence[int]) -> dict[int, int]:
    """Return operands by position, from their slots; parameters fill the remaining positions.

    Args:
        function: the common name of the function.
        slots: the slot and the node of each operand.
        parameters: the nodes of the parameters, in order.
    """
    positions = {**_PLACES, **_IN_FUNCTION.get(function, {})}
    operands: dict[int, int] = {}
    for slot, node in slots:
        head, _, tail = slot.partition(".")
        if function == "getitem" and head in _INDICES:
            place = 1 + int(tail or 0)
        elif head.isdecimal():
            place = int(head) if not tail.isdecimal() else int(tail)
        elif tail.isdecimal():
            place = int(tail)
        else:
            place = positions.get(head, len(operands))
        operands[place if place not in operands else max(operands) + 1] = node
    # The equation of an einsum stands in front of positional operands.
    place = int(function == "einsum" and all(slot.isdecimal() for slot, _ in slots))
    for node in parameters:
        while place in operands:
            place += 1
        operands[place] = node
    return operands


#: Adds an operation to a formula and returns its node.
Add = Callable[..., int]
#: The node of a function's output; a list if the function has several outputs.
Made = int | list[int]
#: Adds a function call to a formula, for a run's framework.
Writing = Callable[[Add, Formula, KnownInputs, str], Made]

#: The names of an axis argument.
AXIS = ("dim", "axis")
#: The name of a leaf that is a number in the code.
CONSTANT = "(number)"
#: The name of a leaf that the code makes of numbers: zeros, a range, a unit matrix.
MADE = "(made)"


def constant(number: float) -> np.ndarray:
    """Return a number of the code as the value of a leaf."""
    return np.asarray(number, np.float64)


def swapped(formula: Formula, node: int) -> list[int]:
    """Return the order of a node's axes with the last two swapped."""
    order = list(range(formula.values[node].ndim))
    order[-1], order[-2] = order[-2], order[-1]
    return order
