"""Writes down the trace of a step: what goes into layers, and the functions that their code calls."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from padiff.frameworks.base import Framework
from padiff.model.nested import flatten, flatten_inputs, flatten_named
from padiff.model.selection import Node
from padiff.recorder.activations import Call
from padiff.recorder.detail import FULL, NOTHING, SKETCH
from padiff.recorder.plain_arguments import plain_arguments
from padiff.recorder.record_buffer import LevelOf, RecordBuffer
from padiff.recorder.seen_tensors import SeenTensor, SeenTensors
from padiff.recorder.stacks import users_lines
from padiff.records import Operand, Trace, TracedCall, TracedTensor
from padiff.sketches.sketch import ELEMENTS

#: Calls of functions that are written down of a step: a loop over a long sequence may make any number of them.
MOST = 5000

# Functions whose work is what they do to what they are given.
_CHANGING = frozenset({"setitem"})


class Begun(NamedTuple):
    """A function's call that is under way."""

    name: str
    inside: Call
    inputs: tuple[Operand, ...]
    arguments: Mapping[str, Any]
    parameters: tuple[str, ...]
    given: Any


class Tracer:
    """Collects the trace of one step. Whatever goes wrong is left out: the training goes on.

    Args:
        records: copies the tensors.
        levels: how much is kept of a layer's tensors. Where outputs are kept in full, only what is as small as a sample
            is kept in full of what goes in; where nothing is kept of them, nothing is traced.
        tensors: those that were seen so far. What is recorded as an output already is not copied again.
        functions: whether functions are looked at.
        whole: whether all that goes into layers is kept in full, where what they give is.
    """

    def __init__(
        self,
        records: RecordBuffer,
        framework: Framework,
        levels: LevelOf,
        tensors: SeenTensors,
        functions: bool,
        whole: bool = False,
    ) -> None:
        self._whole = whole
        self._records, self._framework, self._levels = records, framework, levels
        self._is_tensor, self._tensors = framework.tensors.is_tensor, tensors
        self.functions = functions
        self._calls: list[tuple[TracedCall, bool]] = []
        self._numbered: list[tuple[SeenTensor, TracedTensor | None]] = []
        self._nth: Counter[tuple[str, int, str, bool]] = Counter()
        self._parameters: dict[int, str] = {}

    def know_parameters(self, nodes: Sequence[Node]) -> None:
        """Parameters go into functions by name; they are recorded where they are owned."""
        owned = self._framework.layers.parameters
        self._parameters = {
            id(tensor): f"{node.path}/{slot}"
            for node in reversed(nodes)
            for slot, tensor, role in owned(node.layer)
            if role == "parameter"
        }

    # -- layers --------------------------------------------------------------------------------------------

    def inputs(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Operand, ...] | None:
        """What goes into a layer's call; `None` where nothing is kept of the layer."""
        level = self._levels(node.path, "forward")
        if level == NOTHING:
            return None
        try:
            named = flatten_inputs(node.layer.forward, args, kwargs, self._is_tensor)
            return tuple([Operand(slot, self._number(tensor, level)) for slot, tensor in named])
        except Exception as error:
            _let_go(error)
            return None

    def layer_ended(self, call: Call, outputs: Sequence[tuple[str, Any]]) -> None:
        """A layer's call has ended; its outputs are recorded already."""
        try:
            level = self._levels(call.node.path, "forward")
            given = tuple([Operand(slot, self._number(tensor, level)) for slot, tensor in outputs])
        except Exception as error:
            _let_go(error)
            given = ()
        traced = TracedCall(
            call.node.path,
            call.number,
            inputs=call.inputs or (),
            outputs=given,
            layer_type=type(call.node.layer).__name__,
            stack=users_lines() if self.functions else (),
        )
        self._calls.append((traced, call.training))

    # -- functions -----------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether no further function is written down."""
        return len(self._calls) >= MOST

    def function_begins(
        self, name: str, parameters: Sequence[str], inside: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Begun | None:
        """A layer's code calls a function; what goes in is looked at before it may be written over."""
        level = self._levels(inside.node.path, "forward")
        if level == NOTHING or self.full:
            return None
        try:
            given = {parameters[k] if k < len(parameters) else str(k): value for k, value in enumerate(args)} | {
                **kwargs
            }
            operands, owned = [], []
            for slot, tensor in flatten_named(given, self._is_tensor):
                parameter = self._parameters.get(id(tensor))
                if parameter is None:
                    operands.append(Operand(slot, self._number(tensor, level)))
                else:
                    owned.append(parameter)
            arguments = plain_arguments(given)
        except Exception as error:
            _let_go(error)
            return None
        return Begun(name, inside, tuple(operands), arguments, tuple(owned), args[0] if args else None)

    def function_ended(self, begun: Begun, output: Any) -> None:
        """The function has given this."""
        inside, name = begun.inside, begun.name
        path, level = inside.node.path, self._levels(inside.node.path, "forward")
        try:
            given = begun.given if output is None and name in _CHANGING else output
            outputs = tuple(
                [
                    Operand(slot, self._number(tensor, level))
                    for slot, tensor in flatten(given, "output", self._is_tensor)
                ]
            )
        except Exception as error:
            _let_go(error)
            return
        if not outputs:
            return
        key = path, inside.number, name, inside.training
        nth, self._nth[key] = self._nth[key], self._nth[key] + 1
        traced = TracedCall(
            path,
            inside.number,
            name,
            nth,
            begun.inputs,
            outputs,
            begun.arguments,
            begun.parameters,
            type(inside.node.layer).__name__,
            users_lines(),
        )
        self._calls.append((traced, inside.training))

    # -- the end of the step -------------------------------------------------------------------------------

    def trace(self, training_only: bool) -> Trace:
        """The trace so far.

        Args:
            training_only: leave out calls in evaluation mode.
        """
        calls = tuple([call for call, training in self._calls if training or not training_only])
        return Trace(tuple([_traced(*each) for each in self._numbered]), calls, self.functions)

    def clear(self) -> None:
        """Forget all."""
        self._calls.clear()
        self._numbered.clear()

    def _number(self, tensor: Any, level: str) -> int:
        """The number of a tensor, a copy of which is made if there is none."""
        seen = self._tensors.of(tensor)
        if seen.number < 0:
            known = None
            if not seen.sources and seen.traced is None:
                tensors = self._framework.tensors
                small = level == FULL and (self._whole or math.prod(tensors.shape(tensor)) <= ELEMENTS)
                seen.traced = self._records.take(tensor, FULL if small else SKETCH)
            if seen.best is None:  # it can't be copied, but it is known where it went
                known = TracedTensor(None, self._framework.tensors.dtype(tensor), ())
            seen.number = len(self._numbered)
            self._numbered.append((seen, known))
        return seen.number


def _traced(seen: SeenTensor, known: TracedTensor | None) -> TracedTensor:
    taken = seen.best
    if taken is None:
        return known or TracedTensor(None, "", ())
    return TracedTensor(taken.source, taken.dtype, tuple(taken.shape))


def _let_go(error: Exception) -> None:
    """What can't be looked at is left out; but where memory is short, the training is to know."""
    if isinstance(error, MemoryError):
        raise error
