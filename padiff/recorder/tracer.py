"""Writes down the trace of a step: what goes into layers, and the functions that their code calls."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from padiff.frameworks.base import Framework
from padiff.model.nested import flatten, flatten_inputs, flatten_named
from padiff.model.selection import Node
from padiff.recorder.calls import Call
from padiff.recorder.copying import LevelOf
from padiff.recorder.detail import FULL, NOTHING, SKETCH, WITHIN
from padiff.recorder.left_out import Left
from padiff.recorder.plain_arguments import plain_arguments
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.seen_tensors import SeenTensor, SeenTensors
from padiff.recorder.taken import Numbered, Taken
from padiff.records import LOOP, Alike, Operand, Record, Trace, TracedCall, TracedTensor
from padiff.records.alike import TracedSite
from padiff.sketches.sketch import ELEMENTS
from padiff.system.frames import Frame, code_frames
from padiff.system.guard import reraise_from_signal_handler

# Slots, each with the number of its tensor behind it.
_Operands = tuple[Any, ...]

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
    stack: tuple[Frame, ...]


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
        self._tensor_type = framework.tensors.TYPE
        #: Whether in training mode, and a function's call; or of a layer's call its path, number, class and stack, how
        #: long its inputs are, these, and its outputs.
        self._calls: list[tuple[Any, ...]] = []
        self._numbered: list[SeenTensor | Numbered] = []
        #: Of what nothing was copied: what it is.
        self._unknown: dict[int, TracedSite] = {}
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

    def inputs(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Operands | None:
        """What goes into a layer's call; `None` where nothing is kept of the layer."""
        level = self._levels[node.path, "forward"]
        if level == NOTHING:
            return None
        try:
            if len(args) == 1 and not kwargs and isinstance(args[0], self._tensor_type):
                seen = self._tensors.of(args[0])
                if seen.number < 0:
                    self._enter(seen, args[0], level)
                return (self._records.known.first_slot(node.layer.forward), seen.number)
            named = flatten_inputs(node.layer.forward, args, kwargs, self._is_tensor)
            return tuple([part for slot, tensor in named for part in (slot, self._number(tensor, level))])
        except Exception as error:
            _let_go(error)
            return None

    def stack(self) -> tuple[Frame, ...]:
        """Where the layer or function is called that begins now; empty where that is not looked at."""
        if not self.functions:
            return ()
        try:
            return code_frames(self._framework.name)
        except Exception as error:
            _let_go(error)
            return ()

    def layer_ended(self, call: Call, outputs: Sequence[tuple[str, Any, SeenTensor | None]]) -> None:
        """A layer's call has ended; its outputs are recorded already.

        Args:
            outputs: their slots, the tensors, and what is known of each, as far as that is known.
        """
        node = call.node
        try:
            level = self._levels[node.path, "forward"]
            given: list[Any] = []
            for slot, tensor, seen in outputs:
                if seen is None:
                    seen = self._tensors.of(tensor)
                if seen.number < 0:
                    self._enter(seen, tensor, level)
                given += (slot, seen.number)
        except Exception as error:
            _let_go(error)
            given = []
        kind = type(node.layer).__name__
        inputs = call.inputs or ()
        # Flat: one object for each call, and none that leads to others, for the collector to go through.
        self._calls.append((call.training, node.path, call.number, kind, call.stack, len(inputs), *inputs, *given))

    # -- plans ---------------------------------------------------------------------------------------------

    @property
    def last(self) -> tuple[Any, ...]:
        """What was noted of the call that ended last."""
        return self._calls[-1]

    def numbered(self, number: int) -> SeenTensor | Numbered:
        """The tensor of a number."""
        return self._numbered[number]

    def seen(self, number: int) -> SeenTensor:
        """The same, of a step that follows no plan."""
        seen = self._numbered[number]
        assert isinstance(seen, SeenTensor)
        return seen

    def add(self, calls: Sequence[tuple[Any, ...]], numbered: Sequence[Numbered]) -> None:
        """Note calls that have ended, and the tensors that get the next numbers."""
        self._calls += calls
        self._numbered += numbered

    def put_in(self, seen: Mapping[int, SeenTensor]) -> None:
        """From now on tensors are not those of a plan: by their places there, what they are."""
        self._numbered = [seen[each.place] if isinstance(each, Numbered) else each for each in self._numbered]

    # -- functions -----------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether no further function is written down."""
        return len(self._calls) >= MOST

    def function_begins(
        self, name: str, parameters: Sequence[str], inside: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Begun | None:
        """A layer's code calls a function; what goes in is looked at before it may be written over."""
        level = self._levels[inside.node.path, "forward"]
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
        return Begun(name, inside, tuple(operands), arguments, tuple(owned), args[0] if args else None, self.stack())

    def function_ended(self, begun: Begun, output: Any) -> None:
        """The function has given this."""
        inside, name = begun.inside, begun.name
        path, level = inside.node.path, self._levels[inside.node.path, "forward"]
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
            "" if path == LOOP else type(inside.node.layer).__name__,
            begun.stack,
        )
        self._calls.append((inside.training, traced))

    def noted(self, name: str, tensor: Any) -> None:
        """Something was done with a tensor that the trace has: a backward began there, or it was logged as the loss."""
        try:
            number = self._tensors.of(tensor).number
        except Exception as error:
            _let_go(error)
            return
        if number < 0:
            return
        key = LOOP, 0, name, True
        nth, self._nth[key] = self._nth[key], self._nth[key] + 1
        self._calls.append((True, TracedCall(LOOP, 0, name, nth, (Operand("loss", number),))))

    # -- the end of the step -------------------------------------------------------------------------------

    def trace(self, training_only: bool) -> Trace:
        """The trace so far, of a step that follows no plan.

        Args:
            training_only: leave out calls in evaluation mode.
        """
        calls = tuple([_call(each) for each in self._calls if each[0] or not training_only])
        copies = [seen.best for seen in self._numbered if isinstance(seen, SeenTensor)]
        tensors = tuple([_traced(taken, self._unknown.get(place)) for place, taken in enumerate(copies)])
        return Trace(tensors, calls, self.functions)

    def finished(self) -> tuple[tuple[Record, ...] | Alike[Record], Trace]:
        """The records of a whole step, nothing of which is left out, and its trace."""
        made = partial(_calls_of, self._calls)
        records, tensors, calls = self._records.alike(self._copies(), self._unknown, self._calls, made)
        return records, Trace(tensors, calls, self.functions)

    def _copies(self) -> list[Taken | Numbered | None]:
        """The best copy of each numbered tensor."""
        return [seen if isinstance(seen, Numbered) else seen.best for seen in self._numbered]

    def clear(self) -> None:
        """Forget all."""
        self._calls, self._numbered, self._unknown = [], [], {}

    def _number(self, tensor: Any, level: str) -> int:
        """The number of a tensor, a copy of which is made if there is none."""
        seen = self._tensors.of(tensor)
        if seen.number < 0:
            self._enter(seen, tensor, level)
        return seen.number

    def _enter(self, seen: SeenTensor, tensor: Any, level: str) -> None:
        """Give a tensor a number, and make a copy of it if there is none."""
        known = seen.sketched or seen.full or seen.traced
        if known is None:
            if (
                level in (FULL, WITHIN)
                and not self._whole
                and math.prod(self._framework.tensors.shape(tensor)) > ELEMENTS
            ):
                level = SKETCH
            seen.traced = self._records.copier.take(tensor, level)
            if isinstance(seen.traced, Left):  # it can't be copied, but it is known where it went
                self._unknown[len(self._numbered)] = TracedSite(self._framework.tensors.dtype(tensor), (), False)
        elif isinstance(known, Left) and seen.best is None:
            self._unknown[len(self._numbered)] = TracedSite(self._framework.tensors.dtype(tensor), (), False)
        seen.number = len(self._numbered)
        self._numbered.append(seen)


def _calls_of(entries: Sequence[Any]) -> tuple[TracedCall, ...]:
    return tuple([_call(entry) for entry in entries])


def _call(entry: Any) -> TracedCall:
    if len(entry) == 2:
        called: TracedCall = entry[1]
        return called
    _, path, number, kind, stack, length, *operands = entry
    given, gave = (tuple(map(Operand, some[::2], some[1::2])) for some in (operands[:length], operands[length:]))
    return TracedCall(path, number, inputs=given, outputs=gave, layer_type=kind, stack=stack)


def _traced(taken: Taken | None, unknown: TracedSite | None) -> TracedTensor:
    if taken is None:
        return TracedTensor(None, "" if unknown is None else unknown.dtype, ())
    return TracedTensor(taken.source, taken.dtype, tuple(taken.shape))


def _let_go(error: Exception) -> None:
    """Leave out what cannot be looked at; raise the error where memory is short, or where it is the user's."""
    reraise_from_signal_handler(error)
    if isinstance(error, MemoryError):
        raise error
