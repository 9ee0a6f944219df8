"""What may be written otherwise in a formula, as a value; and how its places are called."""

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
from padiff.compare.diagnose.computing.writing import CONSTANT
from padiff.compare.diagnose.traced import Graph

# Operations that only look at a tensor in another way.
_LOOKING = frozenset({"getitem", "reshape", "transpose", "expand", "cast"})


@dataclass(frozen=True)
class Edit:
    """Something that may be other in the candidate's code.

    Attributes:
        kind: machine-readable name of the cause that it is.
        name: in a word or two, for the list of what was tried.
        text: the cause, in words.
        changes: to nodes of the formula.
        rank: the plainest first.
        free: how many numbers were solved for.
        at: the node that it is about.
        telling: whether it says why; else it says where, and how the outcome comes about.
    """

    kind: str
    name: str
    text: str
    changes: Mapping[int, Change]
    rank: int = 1
    free: int = 0
    at: int = -1
    telling: bool = True


class Sheet:
    """A formula with what is known of its places.

    Attributes:
        formula: of the tensor that differs.
        graph: whose trace it is of.
        writer: that wrote it.
        end_is_open: whether edits of what comes out as a whole are looked for; elsewhere they are, where its values are
            known.
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
        """The call that a node is of: ``the second add() in `layers.1```."""
        about = self.nodes[node].about
        if about < 0:
            return self.named(node)
        return place_of(self.graph.trace.calls[about], self.graph.trace)

    def function(self, node: int) -> str:
        """The function whose call a node is of; empty: none."""
        about = self.nodes[node].about
        return self.graph.trace.calls[about].function if about >= 0 else ""

    def layer(self, node: int) -> str:
        """The layer in whose code a node is."""
        about = self.nodes[node].about
        return self.graph.trace.calls[about].layer if about >= 0 else ""

    def layer_type(self, node: int) -> str:
        about = self.nodes[node].about
        return self.graph.trace.calls[about].layer_type if about >= 0 else ""

    def named(self, node: int) -> str:
        """What a node's tensor is: a parameter, what a layer gave, or what a call gave."""
        one = self.nodes[node]
        if one.name and one.name != CONSTANT:
            return f"`{one.name}`"
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
        if one.about >= 0:
            return f"what {self.where(node)} gives"
        return "what comes in"

    def may_be_edited(self, node: int) -> bool:
        """Whether a node's tensor as a whole is looked at here."""
        return node != self.formula.end or self.end_is_open

    def is_parameter(self, node: int) -> bool:
        return bool(self.nodes[node].name) and self.nodes[node].name != CONSTANT

    def is_number(self, node: int) -> bool:
        return self.nodes[node].name == CONSTANT

    def is_float(self, node: int) -> bool:
        return self.formula.values[node].dtype.kind == "f"

    def users(self, node: int) -> list[int]:
        """The nodes that a node goes into."""
        return [k for k, one in enumerate(self.nodes) if node in one.given]

    def tensor(self, node: int) -> int | None:
        """The tensor of the trace that a node is."""
        return self._tensors.get(node)

    def below(self, node: int, most: int) -> set[int]:
        """The nodes that come of a node in so many operations at most, with itself."""
        found = {node}
        for _ in range(most):
            found |= {k for k, one in enumerate(self.nodes) if any(g in found for g in one.given)}
        return found

    def feeds(self, node: int, operations: frozenset[str]) -> bool:
        """Whether one of some operations depends on a node."""
        return any(self.nodes[k].operation in operations for k in self.formula.below([node]))

    def turns(self, node: int) -> bool:
        """Whether sines or cosines that were made elsewhere go into what a node is made of."""
        for k in self.formula.above(node, 4):
            call = self.graph.producers.get(self._tensors.get(k, -1))
            if call is not None and call.function in ("sin", "cos"):
                return True
        return False

    def of_operations(self, node: int, operations: frozenset[str], most: int = 12) -> bool:
        """Whether one of some operations is among those that a node depends on."""
        return any(self.nodes[k].operation in operations for k in self.formula.above(node, most))


@dataclass(frozen=True)
class Target:
    """What an edit has to come to.

    Attributes:
        values: the other side's tensor, or the projection that its sketch has.
        shape: of the tensor that is computed.
        look: what is looked at of a tensor: all of it, or its projection.
    """

    values: np.ndarray
    shape: tuple[int, ...]
    look: Callable[[np.ndarray], np.ndarray]

    def off(self, made: np.ndarray) -> float:
        """How far a tensor is off: the root of the mean square."""
        error = self.look(made) - self.values
        return math.sqrt(float(np.mean(np.square(error)))) if error.size else 0.0


def put(value: np.ndarray) -> Change:
    """A node's value is this."""
    return lambda get, own: value


def instead(node: int) -> Change:
    """A node's value is another node's."""
    return lambda get, own: get(node)


def given(sheet: Sheet, k: int, **how: Any) -> Change:
    """An operation given something else."""
    node = sheet.nodes[k]

    def change(get: Callable[[int], np.ndarray], own: Any) -> np.ndarray:
        return np.asarray(OPERATIONS[node.operation](*(get(g) for g in node.given), **{**node.how, **how}))

    return change
