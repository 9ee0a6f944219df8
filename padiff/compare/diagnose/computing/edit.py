"""Edits of a formula, and the formula together with the trace that names its nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from padiff.compare.diagnose.call_words import place_of
from padiff.compare.diagnose.computing.formula import Change, Node
from padiff.compare.diagnose.computing.operations import OPERATIONS
from padiff.compare.diagnose.computing.writer import Writer
from padiff.compare.diagnose.computing.writing import CONSTANT, MADE
from padiff.compare.diagnose.traced import Graph
from padiff.system.frames import Frame

# Operations that only rearrange, select or cast values.
#: What a tensor is called that no call gives.
UNNAMED = "what comes in"
_LOOKING = frozenset({"getitem", "reshape", "transpose", "expand", "cast", "detach"})


@dataclass(frozen=True)
class Argument:
    """An argument of a function with another value in the candidate's call.

    Attributes:
        names: the argument's name in each framework.
        right, wrong: the values of the reference's and of the candidate's call.
        usual: the value of a call without the argument.
        axis: True if the value is an axis.
    """

    names: Mapping[str, str]
    right: Any
    wrong: Any
    usual: Any
    axis: bool = False

    def is_wrong_in(self, arguments: Mapping[str, Any], framework: str, axes: int) -> bool:
        """Return True if a call has the candidate's value.

        Args:
            arguments: the arguments of the call.
            framework: the framework of the call.
            axes: the number of axes of the call's first tensor.
        """
        value = arguments.get(self.names[framework], self.usual)
        if self.axis and isinstance(value, int) and axes:
            value %= axes
        return type(value) is type(self.wrong) and bool(value == self.wrong)


@dataclass(frozen=True)
class Edit:
    """A possible change of the candidate's code, as changes to nodes of a formula.

    Attributes:
        kind: the machine-readable kind of the cause.
        name: a name of one or two words, for the list of tried edits.
        text: the cause in words.
        changes: the changes, by node of the formula.
        rank: the priority among edits that explain the same; the simplest edit has the lowest rank.
        free: the number of values that were solved for.
        at: the node that the edit is about.
        telling: True if the edit names the reason; False if the edit only says where and how the output changes.
        argument: the argument of a function that the edit changes, if that is all it changes.
        other: the node of the candidate's formula that belongs to `at`; -1 if not known.
    """

    kind: str
    name: str
    text: str
    changes: Mapping[int, Change]
    rank: int = 1
    free: int = 0
    at: int = -1
    telling: bool = True
    argument: Argument | None = None
    other: int = -1


class FormulaView:
    """A formula together with the trace that it was written from, which gives names and places to the nodes.

    Attributes:
        formula: the formula of the tensor that differs.
        graph: the graph of the trace.
        writer: the writer of the formula.
        end_is_open: True to try edits of the whole output, too; other tensors are always edited.
    """

    def __init__(self, writer: Writer, graph: Graph, end_is_open: bool = True) -> None:
        self.end_is_open = end_is_open
        self.writer, self.formula, self.graph = writer, writer.formula, graph
        self._tensors = {node: tensor for tensor, node in reversed(list(writer.nodes.items()))}

    @property
    def nodes(self) -> list[Node]:
        return self.formula.nodes

    def shape(self, node: int) -> tuple[int, ...]:
        return self.formula.values[node].shape

    def where(self, node: int) -> str:
        """Return the call that a node belongs to as text, e.g. ``the second add() in `layers.1` ``."""
        about = self.nodes[node].about
        if about < 0:
            return self.named(node)
        return place_of(self.graph.trace.calls[about], self.graph.trace)

    def line(self, node: int) -> Frame | None:
        """Return the line of the user's code that makes a node's call; `None` if not recorded."""
        about = self.nodes[node].about
        return self.graph.trace.calls[about].line if about >= 0 else None

    @property
    def last(self) -> int:
        """Return the last node that belongs to a call; -1 if there is none."""
        return max((k for k, node in enumerate(self.nodes) if node.about >= 0), default=-1)

    def function(self, node: int) -> str:
        """Return the function whose call a node belongs to; empty if there is none."""
        about = self.nodes[node].about
        return self.graph.trace.calls[about].function if about >= 0 else ""

    def layer(self, node: int) -> str:
        """Return the path of the layer whose code contains a node; empty if there is none."""
        about = self.nodes[node].about
        return self.graph.trace.calls[about].layer if about >= 0 else ""

    def layer_type(self, node: int) -> str:
        about = self.nodes[node].about
        return self.graph.trace.calls[about].layer_type if about >= 0 else ""

    def named(self, node: int) -> str:
        """Return a text for a node's tensor: a parameter, or the output of a layer or call."""
        item = self.nodes[node]
        if self.is_parameter(node):
            return f"`{item.name}`"
        source = node
        while self.nodes[source].operation in _LOOKING:
            source = self.nodes[source].given[0]
        if source != node and self.is_parameter(source):
            return f"`{self.nodes[source].name}`"
        tensor = self._tensors.get(node)
        calls = [c for c in self.graph.trace.calls if any(o.tensor == tensor for o in c.outputs)]
        layers = [call for call in calls if not call.function]
        if layers:
            return f"what `{layers[0].layer}` gives"
        if calls:
            return f"what {place_of(calls[0], self.graph.trace)} gives"
        if item.about >= 0:
            return f"what {self.where(node)} gives"
        return UNNAMED

    def may_be_edited(self, node: int) -> bool:
        """Return True if edits of a node's whole tensor are tried."""
        return node != self.formula.end or self.end_is_open

    def is_parameter(self, node: int) -> bool:
        return self.nodes[node].name not in ("", CONSTANT, MADE)

    def is_number(self, node: int) -> bool:
        return self.nodes[node].name == CONSTANT

    def is_float(self, node: int) -> bool:
        return self.formula.values[node].dtype.kind == "f"

    def users(self, node: int) -> list[int]:
        """Return the nodes that have a node as an input."""
        return [k for k, item in enumerate(self.nodes) if node in item.given]

    def tensor(self, node: int) -> int | None:
        """Return the number of a node's tensor in the trace; `None` if it is not traced."""
        return self._tensors.get(node)

    def below(self, node: int, most: int) -> set[int]:
        """Return a node and the nodes that depend on it through at most the given number of operations.

        Args:
            most: the number of operations.
        """
        nodes = {node}
        for _ in range(most):
            nodes |= {k for k, item in enumerate(self.nodes) if any(g in nodes for g in item.given)}
        return nodes

    def feeds(self, node: int, operations: frozenset[str]) -> bool:
        """Return True if any node with one of the operations depends on a node."""
        return any(self.nodes[k].operation in operations for k in self.formula.below([node]))

    def turns(self, node: int) -> bool:
        """Return True if a node depends on sines or cosines that other calls computed."""
        for k in self.formula.above(node, 4):
            call = self.graph.producers.get(self._tensors.get(k, -1))
            if call is not None and call.function in ("sin", "cos"):
                return True
        return False

    def of_operations(self, node: int, operations: frozenset[str], most: int = 12) -> bool:
        """Return True if a node depends on a node with one of the operations.

        Args:
            most: the largest number of operations between the two nodes.
        """
        return any(self.nodes[k].operation in operations for k in self.formula.above(node, most))


@dataclass(frozen=True)
class Target:
    """The tensor that an edit has to reproduce.

    Attributes:
        values: the other side's tensor, or the projection of its sketch.
        shape: the shape of the tensor that the formula computes.
        look: maps a computed tensor to the values to compare: the tensor itself, or its projection.
    """

    values: np.ndarray
    shape: tuple[int, ...]
    look: Callable[[np.ndarray], np.ndarray]

    def off(self, made: np.ndarray) -> float:
        """Return the root mean square error of a computed tensor."""
        error = self.look(made) - self.values
        return math.sqrt(float(np.mean(np.square(error)))) if error.size else 0.0


def put(value: np.ndarray) -> Change:
    """Return a change that sets a node to a value."""
    return lambda get, own: value


def instead(node: int) -> Change:
    """Return a change that replaces a node's value with another node's value."""
    return lambda get, own: get(node)


def given(sheet: FormulaView, k: int, **how: Any) -> Change:
    """Return a change that computes a node's operation with other keyword arguments.

    Args:
        k: the node.
        how: the keyword arguments to replace.
    """
    node = sheet.nodes[k]

    def change(get: Callable[[int], np.ndarray], own: Any) -> np.ndarray:
        return np.asarray(OPERATIONS[node.operation](*(get(g) for g in node.given), **{**node.how, **how}))

    return change
