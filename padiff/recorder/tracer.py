"""Collect the trace of a step: the inputs of layers, and the functions that the code of the layers calls."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from padiff.dump.lock import register_fork_cleanup
from padiff.frameworks.base import Framework
from padiff.frameworks.catalog import CONSUMED, KEEPING
from padiff.frameworks.hooking import Hearing
from padiff.frameworks.losses import LossObserver
from padiff.model.nested import flatten, flatten_inputs, flatten_named
from padiff.model.selection import Node
from padiff.recorder.calls import CHOOSING, Call, Seen, picked, plain_arguments, seen
from padiff.recorder.copying import COPYING, EVERYTHING, Copier, LevelOf, own_calls
from padiff.recorder.layers import TrackedLayers
from padiff.recorder.options import FULL, NOTHING, SKETCH, WITHIN
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.tensor_copy import SeenTensor, SeenTensors, TemplateSlot, TensorCopy
from padiff.records import LOOP, Choice, LazyRecords, Operand, Record, Trace, TracedCall, TracedTensor
from padiff.records.step_schema import TracedSite
from padiff.sketches.sketch import ELEMENTS
from padiff.system.frames import Frame, code_frames
from padiff.system.guard import Guard, reraise_from_signal_handler

# Slots and the numbers of their tensors, in turn: (slot, number, slot, number, ...).
_Operands = tuple[Any, ...]

#: Maximum number of calls in the trace of one step: a loop over a long sequence may call any number of functions.
MOST = 5000
# Maximum number of calls that wait before the model's first call, and number of elements of the tensors that they copy.
_MOST_WAITING, _MOST_ELEMENTS = 1000, 1 << 24
# Maximum number of losses and backwards that wait before the model is known: a step has a few.
_MOST_EVENTS = 100
# Maximum number of calls before the model's first call of which anything is copied: less than two seconds.
_MOST_HEARD = 20_000
# Number of the loop's pseudo-call in the trace: before the model's first call of a step and after a backward, and after
# a call of the model.
_BEFORE, _AFTER = 1, 0
# Largest number of elements of weights of what a layer chose that are copied in full.
_MOST_WEIGHTS = 1 << 15

# Functions that change their first argument and return nothing.
_CHANGING = frozenset({"copy", "setitem"})


class Begun(NamedTuple):
    """A function call that has not returned yet."""

    name: str
    inside: Call
    inputs: tuple[tuple[str, SeenTensor], ...]
    arguments: Mapping[str, Any]
    parameters: tuple[str, ...]
    given: Any
    stack: tuple[Frame, ...]
    seen: Seen | None
    cut: bool


class Ended(NamedTuple):
    """A function call that has returned, with its place among the calls that the loop made before the model's."""

    place: int
    begun: Begun
    outputs: tuple[tuple[str, SeenTensor], ...]


class Tracer:
    """Collector of the trace of one step. An error in a call leaves that call out of the trace, and not the training.

    Args:
        records: record buffer whose copier copies the tensors.
        levels: recording level of each layer and stage. At level full, inputs of more than `ELEMENTS` elements are
            sketched unless ``whole`` is set; at level nothing, the layer is not traced.
        tensors: cache of the tensors seen so far. A tensor that was recorded as an output is not copied again.
        functions: True to trace function calls, too. Otherwise only those that choose, in the layers whose code did so
            in a traced step.
        whole: True to store all inputs in full for layers whose outputs are stored in full.
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
        #: For a function call: (training mode, `TracedCall`). For a layer call: training mode, path, number, class,
        #: stack, length of the inputs, inputs, outputs.
        self._calls: list[tuple[Any, ...]] = []
        self._numbered: list[SeenTensor | TemplateSlot] = []
        #: Descriptions of the tensors that were not copied, by number.
        self._unknown: dict[int, TracedSite] = {}
        self._nth: Counter[tuple[str, int, str, bool]] = Counter()
        #: Calls of the loop before the model's first call, or after a backward: those that a later call, or a further
        #: backward, needs are added to the trace.
        self.waiting: list[Ended] = []
        self._waiting_elements = self._heard = 0
        self._parameters: dict[int, str] = {}
        self._shapes: frozenset[tuple[int, ...]] = frozenset()
        #: Numbers of the tensors that functions have returned.
        self._returned: set[int] = set()
        #: True after the step's first backward.
        self.has_learned = False
        #: By path of a layer, the functions that are heard in a step that traces no others: those that choose, in
        #: layers whose code hands on places. Values alone lead to no other rows.
        self.choosing = {path: names for path, names in records.known.choosing.items() if any(names.values())}

    def know_parameters(self, nodes: Sequence[Node]) -> None:
        """Note the names of the parameters, so that traced functions refer to a parameter by name, without a copy."""
        owned = self._framework.layers.parameters
        self._parameters = {
            id(tensor): f"{node.path}/{slot}"
            for node in reversed(nodes)
            for slot, tensor, role in owned(node.layer)
            if role == "parameter"
        }
        shape, shapes = self._framework.tensors.shape, set()
        for tensor in (tensor for node in nodes for _, tensor, _ in owned(node.layer)):
            with suppress(Exception):  # a nested tensor has none
                shapes.add(tuple(shape(tensor)))
        self._shapes = frozenset(shapes)
        for ended in self.waiting:  # calls from before the parameters were known
            self._name_parameters(ended)

    def _name_parameters(self, ended: Ended) -> None:
        """Replace a waiting call by one that refers to its parameters by name."""
        names = [self._parameters.get(id(entry.alive())) for _, entry in ended.begun.inputs]
        if not any(names):
            return
        inputs = tuple([item for item, name in zip(ended.begun.inputs, names) if name is None])
        owned = (*ended.begun.parameters, *(name for name in names if name is not None))
        renamed = ended._replace(begun=ended.begun._replace(inputs=inputs, parameters=owned))
        self.waiting[ended.place] = renamed
        for _, entry in ended.outputs:
            if entry.maker is ended:
                entry.maker = renamed

    # -- layers --------------------------------------------------------------------------------------------

    def inputs(self, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Operands | None:
        """Return the input slots of a layer call with their tensor numbers, or None if the layer is not recorded."""
        level = self._levels[node.path, "forward"]
        if level == NOTHING:
            return None
        try:
            if len(args) == 1 and not kwargs and isinstance(args[0], self._tensor_type):
                entry = self._tensors.lookup(args[0])
                if entry.number < 0:
                    self._enter(entry, args[0], level)
                return (self._records.known.first_slot(node.layer.forward), entry.number)
            named = flatten_inputs(node.layer.forward, args, kwargs, self._is_tensor)
            return tuple([part for slot, tensor in named for part in (slot, self._number(tensor, level))])
        except Exception as error:
            _let_go(error)
            return None

    def stack(self) -> tuple[Frame, ...]:
        """Return the user's stack at the call that begins now; empty if functions are not traced."""
        if not self.functions:
            return ()
        try:
            return code_frames(self._framework.name)
        except Exception as error:
            _let_go(error)
            return ()

    def layer_ended(self, call: Call, outputs: Sequence[tuple[str, Any, SeenTensor | None]]) -> None:
        """Add a layer call that has returned, and whose outputs are recorded.

        Args:
            outputs: slot, tensor and cache entry of each output; the entry is None if it has to be looked up.
        """
        node = call.node
        try:
            level = self._levels[node.path, "forward"]
            slots: list[Any] = []
            for slot, tensor, entry in outputs:
                if entry is None:
                    entry = self._tensors.lookup(tensor)
                if entry.number < 0:
                    self._enter(entry, tensor, level)
                slots += (slot, entry.number)
        except Exception as error:
            _let_go(error)
            slots = []
        kind = type(node.layer).__name__
        inputs = call.inputs or ()
        # A flat tuple: the garbage collector then visits one object for each call.
        self._calls.append((call.training, node.path, call.number, kind, call.stack, len(inputs), *inputs, *slots))

    # -- plans ---------------------------------------------------------------------------------------------

    @property
    def last(self) -> tuple[Any, ...]:
        """Return the entry of the call that returned last."""
        return self._calls[-1]

    @property
    def count(self) -> int:
        """Return the number of tensors that have a number."""
        return len(self._numbered)

    @property
    def length(self) -> int:
        """Return the number of calls that have returned."""
        return len(self._calls)

    def numbered(self, number: int) -> SeenTensor | TemplateSlot:
        """Return the tensor with a number, as a cache entry or as a tensor of a plan."""
        return self._numbered[number]

    def seen(self, number: int) -> SeenTensor:
        """Return the cache entry of the tensor with a number, in a step that follows no plan."""
        entry = self._numbered[number]
        assert isinstance(entry, SeenTensor)
        return entry

    def add(self, calls: Sequence[tuple[Any, ...]], numbered: Sequence[TemplateSlot]) -> None:
        """Add calls that have returned, and the tensors that get the next numbers."""
        self._calls += calls
        self._numbered += numbered

    def put_in(self, seen: Mapping[int, SeenTensor]) -> None:
        """Replace the tensors of a plan by their cache entries, which ``seen`` holds by place in the plan."""
        self._numbered = [seen[each.place] if isinstance(each, TemplateSlot) else each for each in self._numbered]

    # -- functions -----------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Return True if the trace takes no further function calls."""
        return len(self._calls) >= MOST

    def _wait(self, begun: Begun, outputs: Sequence[tuple[str, SeenTensor]]) -> None:
        """Keep a call of the loop until a call that is traced needs it; calls that waited too long are forgotten."""
        made = Ended(len(self.waiting), begun._replace(given=None), tuple(outputs))  # keeps no tensor alive
        for _, entry in outputs:
            if entry.number < 0 and all(entry is not given for _, given in begun.inputs):
                entry.maker = made
        self.waiting.append(made)
        self._waiting_elements += sum(
            math.prod(entry.best.shape) for _, entry in (*begun.inputs, *outputs) if entry.best is not None
        )
        if len(self.waiting) >= _MOST_WAITING or self._waiting_elements > _MOST_ELEMENTS:
            for each in self.waiting:
                for _, entry in each.outputs:
                    entry.maker = None
            self.waiting, self._waiting_elements = [], 0

    def _add_makers(self, entry: SeenTensor) -> None:
        """Add the calls that have made a tensor before the model's first call, in the order in which they ran."""
        needed, left = {}, [entry]
        while left:
            made = left.pop().maker
            if made is not None:
                needed[made.place] = made
                for _, output in made.outputs:
                    output.maker = None
                left += [given for _, given in made.begun.inputs if given.number < 0]
        for _, made in sorted(needed.items()):
            self._add_function(made.begun, made.outputs)

    def function_begins(
        self, name: str, parameters: Sequence[str], inside: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Begun | None:
        """Return the entry of a function call that begins, or None if the call is not traced.

        The inputs are read before the function runs, as it may overwrite them.
        """
        level = self._levels[inside.node.path, "forward"]
        if level == NOTHING or self.full or not (self.functions or name in self.choosing.get(inside.node.path, ())):
            return None
        if _before(inside):
            self._heard += 1
            if self._heard > _MOST_HEARD:
                return None
        try:
            inputs = {parameters[k] if k < len(parameters) else str(k): value for k, value in enumerate(args)} | {
                **kwargs
            }
            arguments = plain_arguments(inputs)
            before, chooses = None, name in CHOOSING and not _before(inside)
            if inside.node.path == LOOP and not self.functions:  # of the loop, only what the loss is made of
                nth = self._nth[LOOP, inside.number, name, inside.training]
                chooses = chooses and (name, nth) in self._records.known.loop_choices
            if chooses:
                with own_calls(), self._framework.tensors.without_grad():
                    before = seen(self._framework.tensors, name, inputs, arguments, level not in (FULL, WITHIN))
            if before is None and not self.functions:
                # Counted, as the choices of later calls have their numbers.
                self._nth[inside.node.path, inside.number, name, inside.training] += 1
                return None
            operands, owned = [], []
            for slot, tensor in flatten_named(inputs, self._is_tensor):
                parameter = self._parameters.get(id(tensor))
                if parameter is None:
                    whole = before is not None and tensor is before.scores
                    operands.append((slot, self._taken(tensor, FULL if whole else level, inside, chosen=whole)))
                else:
                    owned.append(parameter)
            if _before(inside) and _brings_data(name, operands, arguments):
                return None
        except Exception as error:
            _let_go(error)
            return None
        given = args[0] if args else None
        cut = not self._framework.hooks.learning() and any(
            self._framework.tensors.trainable(tensor) for _, tensor in flatten_named(inputs, self._is_tensor)
        )
        return Begun(name, inside, tuple(operands), arguments, tuple(owned), given, self.stack(), before, cut)

    def _choice(self, begun: Begun, before: Seen, output: Any) -> Choice | None:
        """Return what a call chose, with copies of the scores; `None` if it returned no places."""
        tensors, path, name, given = self._framework.tensors, begun.inside.node.path, begun.name, begun.given
        with own_calls(), tensors.without_grad():
            outputs = [tensor for _, tensor in flatten(output, "", self._is_tensor)]
            chosen = picked(tensors, before, outputs)
            # Bounds that hold nothing back need not be heard in later steps.
            acts = before.rows or not bool((before.scores > 0).all())
        if chosen is None:
            return None
        # The loop also chooses for metrics: see `noted`.
        if path != LOOP and name in CHOOSING and acts:
            hands_on = (before.rows and before.ranks is None) or any(
                tensors.dtype(each).startswith("int") for each in outputs
            )
            known = self._records.known.choosing[path]
            known[name] = known.get(name, False) or hands_on
        scores, picks = (self._whole_number(table, (given, *outputs)) for table in (before.scores, chosen))
        places = scores if before.places is None else self._whole_number(before.places)
        count = 0
        if before.ranks is not None:  # of windows, as many as the call returns
            count = before.ranks.chosen or self._framework.tensors.shape(chosen)[1]
        return Choice(count, before.rows, before.every, scores, places, picks)

    def _whole_number(self, tensor: Any, operands: Sequence[Any] = ()) -> int:
        """Return the number of a copy in full: for an operand of a call, that of the operand if the copy is its own."""
        is_own = any(tensor is each for each in operands)
        entry = self._tensors.lookup(tensor) if is_own else SeenTensor(weakref.ref(tensor), -1)
        if entry.best is not None and entry.best.level != FULL:
            entry = SeenTensor(weakref.ref(tensor), -1)
        if entry.number < 0:
            self._enter(entry, tensor, FULL, whole=True)
        return entry.number

    def function_ended(self, begun: Begun, output: Any) -> None:
        """Add a function call that has returned ``output``."""
        inside, name = begun.inside, begun.name
        path, level = inside.node.path, self._levels[inside.node.path, "forward"]
        try:
            result = begun.given if output is None and name in _CHANGING else output
            if output is None and result is not None:
                self._tensors.forget(result)  # paddle's set_value leaves the version as it was
            chosen = any(self._records.known.choosing.get(path, {}).values())
            choice = None
            before = begun.seen or self._truncated(begun, result, level)
            if before is not None:
                with suppress(TypeError, ValueError, IndexError, RuntimeError):  # an unknown form of the function
                    choice = self._choice(begun, before, result)
            outputs = tuple(
                [
                    (slot, self._taken(tensor, level, inside, self._may_be_gradient(tensor, inside), chosen))
                    for slot, tensor in flatten(result, "output", self._is_tensor)
                ]
            )
            if _before(inside):
                self._wait(begun, outputs)
                return
        except Exception as error:
            _let_go(error)
            return
        if outputs:
            self._add_function(begun, outputs, choice)

    def _add_function(
        self, begun: Begun, outputs: Sequence[tuple[str, SeenTensor]], choice: Choice | None = None
    ) -> None:
        inside, path = begun.inside, begun.inside.node.path
        key = path, inside.number, begun.name, inside.training
        nth, self._nth[key] = self._nth[key], self._nth[key] + 1
        for _, entry in (*begun.inputs, *outputs):
            if entry.number < 0:
                self._give_number(entry)
        self._returned.update(entry.number for _, entry in outputs)
        traced = TracedCall(
            path,
            inside.number,
            begun.name,
            nth,
            tuple([Operand(slot, entry.number) for slot, entry in begun.inputs]),
            tuple([Operand(slot, entry.number) for slot, entry in outputs]),
            begun.arguments,
            begun.parameters,
            "" if path == LOOP else type(inside.node.layer).__name__,
            begun.stack,
            choice,
            begun.cut,
        )
        self._calls.append((inside.training, traced))

    def _truncated(self, begun: Begun, output: Any, level: str) -> Seen | None:
        """Return what a cast of real numbers to integers is about to choose from: it cuts off decimals."""
        tensors = self._framework.tensors
        if (
            begun.name != "cast"
            or _before(begun.inside)
            or not self._is_tensor(output)
            or not tensors.dtype(output).startswith("int")
        ):
            return None
        with own_calls(), tensors.without_grad():
            return seen(tensors, "trunc", {"input": begun.given}, {}, level not in (FULL, WITHIN))

    def noted(self, name: str, tensor: Any) -> None:
        """Add a pseudo-call on a traced tensor: a backward began at the tensor, or it was logged as the loss."""
        try:
            entry = self._tensors.lookup(tensor)
            if entry.number < 0 and entry.maker is not None:
                self._enter(entry, tensor, FULL)
            number = entry.number
        except Exception as error:
            _let_go(error)
            return
        self.has_learned = self.has_learned or name == "backward"
        if number < 0:
            return
        if self.functions:
            self._keep_choices(number)
        key = LOOP, 0, name, True
        nth, self._nth[key] = self._nth[key], self._nth[key] + 1
        self._calls.append((True, TracedCall(LOOP, 0, name, nth, (Operand("loss", number),))))

    def consumed(self, parameters: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Add a pseudo-call on the gradients that an optimizer takes and that the loop has computed itself, with what
        computed them: clipping, projections and norms that are written by hand.
        """
        try:
            operands = []
            for parameter, gradient in zip(parameters, gradients):
                name = self._parameters.get(id(parameter))
                entry = None if name is None or gradient is None else self._computed(gradient)
                if name is not None and entry is not None:
                    if entry.number < 0:
                        self._enter(entry, gradient, FULL)
                    operands.append(Operand(name, entry.number))
        except Exception as error:
            _let_go(error)
            return
        if operands:
            key = LOOP, 0, CONSUMED, True
            nth, self._nth[key] = self._nth[key], self._nth[key] + 1
            self._calls.append((True, TracedCall(LOOP, 0, CONSUMED, nth, tuple(operands))))

    def _computed(self, gradient: Any) -> SeenTensor | None:
        """Return the entry of a gradient that a waiting call has computed; `None` if there is none.

        Paddle gives each reader of a gradient a tensor of its own: then the values tell.
        """
        entry = self._tensors.lookup(gradient)
        if entry.maker is not None or entry.number in self._returned:
            return entry
        shape = tuple(self._framework.tensors.shape(gradient))
        written = [
            (each, each.best.source)
            for made in self.waiting
            for _, each in (*made.outputs, *(made.begun.inputs[-1:] if made.begun.name == "copy" else ()))
            if each.best is not None and tuple(each.best.shape) == shape and each.best.level == FULL
        ]
        if not written:
            return None
        values = self._records.copier.copy(gradient)
        return next((each for each, source in reversed(written) if np.array_equal(source.read(), values)), None)

    def _keep_choices(self, loss: int) -> None:
        """Drop the choices of the loop that a loss does not depend on: those of metrics."""
        calls = [(k, e[1]) for k, e in enumerate(self._calls) if len(e) == 2 and e[1].layer == LOOP]
        needed = {loss}
        for place, call in reversed(calls):
            if any(operand.tensor in needed for operand in call.outputs):
                needed.update(operand.tensor for operand in call.inputs)
                if call.choice is not None:
                    self._records.known.choosing[LOOP][call.function] = True
                    self._records.known.loop_choices.add((call.function, call.nth))
            elif call.choice is not None and (call.function, call.nth) not in self._records.known.loop_choices:
                self._calls[place] = (self._calls[place][0], replace(call, choice=None))

    # -- the end of the step -------------------------------------------------------------------------------

    def trace(self, training_only: bool) -> Trace:
        """Return the trace so far of a step that follows no plan.

        Args:
            training_only: True to leave out calls in evaluation mode.
        """
        calls = tuple([_call(each) for each in self._calls if each[0] or not training_only])
        copies = [entry.best for entry in self._numbered if isinstance(entry, SeenTensor)]
        tensors = tuple([_traced(copy, self._unknown.get(place)) for place, copy in enumerate(copies)])
        return Trace(tensors, calls, self.functions)

    def finished(self) -> tuple[tuple[Record, ...] | LazyRecords[Record], Trace]:
        """Return the records and the trace of a step from which no call is left out."""
        make_calls = partial(_calls_of, self._calls)
        records, tensors, calls = self._records.alike(self._copies(), self._unknown, self._calls, make_calls)
        return records, Trace(tensors, calls, self.functions)

    def _copies(self) -> list[TensorCopy | TemplateSlot | None]:
        """Return the best copy of each numbered tensor, in order; None for a tensor without a copy."""
        return [entry if isinstance(entry, TemplateSlot) else entry.best for entry in self._numbered]

    def clear(self) -> None:
        """Remove all entries."""
        self._calls, self._numbered, self._unknown, self.waiting = [], [], {}, []

    def _number(self, tensor: Any, level: str) -> int:
        """Return the number of a tensor, which is copied and numbered if it is new."""
        entry = self._tensors.lookup(tensor)
        if entry.number < 0:
            self._enter(entry, tensor, level)
        return entry.number

    def _taken(self, tensor: Any, level: str, inside: Call, given: bool = True, chosen: bool = False) -> SeenTensor:
        """Return the entry of an operand of a function, copied, and numbered unless the call only waits.

        Args:
            given: True for an input, which is copied even if the call only waits.
            chosen: True for what a function computes in a layer that has chosen: the weights of what it chose are
                copied in full, if they are not large.
        """
        entry = self._tensors.lookup(tensor)
        if entry.number < 0:
            size = math.prod(self._framework.tensors.shape(tensor))
            if not _before(inside):
                self._enter(entry, tensor, level, chosen and size <= _MOST_WEIGHTS)
            elif given and size <= _MOST_ELEMENTS:
                self._copy(entry, tensor, level)
            else:
                entry.skipped = TracedSite(self._framework.tensors.dtype(tensor), (), False)
        return entry

    def _may_be_gradient(self, tensor: Any, inside: Call) -> bool:
        """Return True if what a call of the loop gives after a backward may become the gradient of a parameter."""
        if not self.has_learned or not _before(inside):
            return False
        return tuple(self._framework.tensors.shape(tensor)) in self._shapes

    def _enter(self, entry: SeenTensor, tensor: Any, level: str, whole: bool = False) -> None:
        """Assign the next number to a tensor, and copy the tensor if it has no copy yet.

        Args:
            whole: True to copy an input of any size in full at level full.
        """
        self._copy(entry, tensor, level, whole)
        self._give_number(entry)

    def _copy(self, entry: SeenTensor, tensor: Any, level: str, whole: bool = False) -> None:
        if entry.sketched is None and entry.full is None and entry.traced is None:
            if (
                level in (FULL, WITHIN)
                and not (whole or self._whole)
                and math.prod(self._framework.tensors.shape(tensor)) > ELEMENTS
            ):
                level = SKETCH
            entry.traced = self._records.copier.copy_at_level(tensor, level)
        if entry.best is None:  # not copied, but the trace shows where it went
            entry.skipped = TracedSite(self._framework.tensors.dtype(tensor), (), False)

    def _give_number(self, entry: SeenTensor) -> None:
        if entry.maker is not None:
            self._add_makers(entry)
            if entry.number >= 0:
                return
        entry.number = len(self._numbered)
        if entry.best is None and entry.skipped is not None:
            self._unknown[entry.number] = entry.skipped
        self._numbered.append(entry)


def _brings_data(name: str, operands: Sequence[tuple[str, SeenTensor]], arguments: Mapping[str, Any]) -> bool:
    """Return True for a call of the loop that computes nothing: it makes a tensor, or keeps the values of one."""
    if operands:
        return name in KEEPING and all(entry.maker is None and entry.number < 0 for _, entry in operands)
    return not any(type(each) in (int, float) for each in arguments.values())


def _before(inside: Call) -> bool:
    """Return True for calls of the loop before the model's first call of the step, or after a backward."""
    return inside.number == _BEFORE and inside.node.path == LOOP


def _calls_of(entries: Sequence[Any]) -> tuple[TracedCall, ...]:
    return tuple([_call(entry) for entry in entries])


def _call(entry: Any) -> TracedCall:
    if len(entry) == 2:
        called: TracedCall = entry[1]
        return called
    _, path, number, kind, stack, length, *operands = entry
    inputs, outputs = (tuple(map(Operand, flat[::2], flat[1::2])) for flat in (operands[:length], operands[length:]))
    return TracedCall(path, number, inputs=inputs, outputs=outputs, layer_type=kind, stack=stack)


def _traced(copy: TensorCopy | None, unknown: TracedSite | None) -> TracedTensor:
    if copy is None:
        return TracedTensor(None, "" if unknown is None else unknown.dtype, ())
    return TracedTensor(copy.source, copy.dtype, tuple(copy.shape))


def _let_go(error: Exception) -> None:
    """Drop an error of tracing; raise it again if it is a MemoryError or comes from the user's signal handler."""
    reraise_from_signal_handler(error)
    if isinstance(error, MemoryError):
        raise error


def _shows_functions(layer: Any) -> bool:
    """Return True for a layer of a framework whose functions are traced: a loss, which is a formula of what it is
    given, and a pooling layer that returns from where each maximum comes.
    """
    returns_places = getattr(layer, "return_indices", False) or getattr(layer, "return_mask", False)
    return bool(returns_places or type(layer).__name__.endswith("Loss"))


class Functions:
    """Listener that passes function calls to the tracer, but only those made by the user's code.

    Args:
        running: stack of the running layer calls, the outermost first.
        watched: the layers; functions are traced inside of calls of the chosen layers.
    """

    def __init__(
        self, framework: Framework, tracer: Tracer, running: Sequence[Call], watched: TrackedLayers, guard: Guard
    ) -> None:
        self.guard = guard
        self._hooks, self._layers = framework.hooks, framework.layers
        self._tracer, self._running, self._watched = tracer, running, watched
        self._hearing: Hearing | None = None
        self._listens = False
        #: Plan of the step; the numbers of calls and tensors in the trace before the function call that runs.
        self.planning: Any = None
        self._before = 0, 0
        #: The loop as a caller of functions, after the model's call and before backward; None otherwise.
        self._in_loop: Call | None = None

    @property
    def attached(self) -> bool:
        """Return True if the framework's functions are hooked."""
        return self._hearing is not None

    def hook(self) -> None:
        """Hook the framework's functions, if the tracer records functions, or those that choose."""
        if (self._tracer.functions or self._tracer.choosing) and self._hearing is None:
            self._hearing = self._hooks.hear_functions(self)

    def remove(self) -> None:
        """Unhook the framework's functions."""
        if self._hearing is not None:
            self._hearing.remove()
        self._hearing = self._in_loop = None

    def pause(self) -> None:
        """Stop listening: the next functions are not called by the model's code."""
        if self._hearing is not None and self._listens:
            self._hearing.listen(False)
            self._listens = False

    def resume(self) -> None:
        """Listen again if the innermost running layer is recorded and runs the user's own code."""
        if self._hearing is not None and self._running:
            inside = self._running[-1]
            path = inside.node.path
            if not (self._tracer.functions or path in self._tracer.choosing):
                return
            if (
                path in self._watched.chosen
                and not inside.recomputed
                and not inside.transformed
                and not self._tracer.full
                and (not self._layers.is_builtin(inside.node.layer) or _shows_functions(inside.node.layer))
            ):
                self._hearing.listen(True)
                self._listens = True

    def enter_loop(self, before: bool = False) -> None:
        """Listen to the loop after the outermost call: functions before backward may compute the loss.

        Args:
            before: True before the model's first call of the step, or after a backward: functions there may compute its
                inputs, or a further loss.
        """
        if self._hearing is None or not (self._tracer.functions or (LOOP in self._tracer.choosing and not before)):
            return
        if before and not self._hearing.ends_for_compilers:
            return
        self._in_loop = Call(Node(LOOP, None), _BEFORE if before else _AFTER, True, False)
        if not self._tracer.full:
            self._hearing.listen_outside(True)
            self._listens = True

    def leave_loop(self) -> None:
        """Stop listening to the loop: the model is called, or backward or an optimizer's step begins."""
        if self._hearing is not None and self._in_loop is not None:
            self._hearing.listen_outside(False)
        self._in_loop = None

    # -- function calls -------------------------------------------------------------------------------------

    @property
    def only(self) -> Collection[str] | None:
        return None if self._tracer.functions else frozenset().union(*self._tracer.choosing.values())

    def function_begins(
        self, name: str, parameters: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Begun | None:
        """Handle the beginning of a function call; return the traced call, or None if the call is not traced."""
        inside = self._running[-1] if self._running else self._in_loop
        if COPYING.now or inside is None or self._hooks.transforming():
            return None
        if not self._tracer.functions:
            self.planning.write()
            self._before = self._tracer.length, self._tracer.count
        return self._tracer.function_begins(name, parameters, inside, args, kwargs)

    def function_ended(self, begun: Begun, output: Any) -> None:
        """Handle the output of a traced function call."""
        self._tracer.function_ended(begun, output)
        if not self._tracer.functions:
            calls, tensors = self._before
            if self._tracer.length == calls + 1:
                self.planning.chose(self._tracer.last, tensors)
            elif self._tracer.count != tensors:
                self.planning.abandon()


class _LossEvents:
    """A `LossObserver` that keeps what it is told of, for another one that comes later.

    Attributes:
        guard: handler of errors.
        waiting: the losses and backwards, in their order, each as a function of the other observer. They keep the
            tensors alive; an optimizer's first step ends this.
    """

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.waiting: list[Callable[[LossObserver], None]] = []

    def is_listening(self) -> bool:
        """Return True while few losses and backwards have come."""
        return not COPYING.now and len(self.waiting) < _MOST_EVENTS

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.waiting.append(lambda observer: getattr(observer, name)(*arguments))


class Prelude:
    """Listener to a loop whose model is not known yet: the first step takes what it needs of the functions, and the
    losses and backwards of tensors that belong to no layer.
    """

    def __init__(self, framework: Framework, guard: Guard) -> None:
        self.guard, self.only, self._transforming = guard, None, framework.hooks.transforming
        self._tensors = SeenTensors(framework)
        records = RecordBuffer(Copier(framework))
        self._tracer = Tracer(records, framework, EVERYTHING, self._tensors, functions=True)
        self._loop = Call(Node(LOOP, None), _BEFORE, True, False)
        self._events: Any = _LossEvents(guard)
        self._hearing: Hearing | None = framework.hooks.hear_functions(self)
        if self._hearing.ends_for_compilers:
            self._hearing.companions.append(framework.hooks.on_losses(self._events))
            self._hearing.listen_outside(True)
        register_fork_cleanup(self)

    def function_begins(
        self, name: str, parameters: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Begun | None:
        """Handle the beginning of a function call; return the call, or None if it is not traced."""
        if COPYING.now or self._transforming():
            return None
        return self._tracer.function_begins(name, parameters, self._loop, args, kwargs)

    def function_ended(self, begun: Begun, output: Any) -> None:
        """Handle the output of a function call."""
        self._tracer.function_ended(begun, output)

    def hand_over(self) -> tuple[SeenTensors, list[Ended], list[Callable[[LossObserver], None]]]:
        """Stop listening, and return the tensors, the calls, and the losses and backwards so far."""
        self.remove()
        events = self._events.waiting
        self._events.waiting = []
        return self._tensors, self._tracer.waiting, events

    def remove(self) -> None:
        """Stop listening."""
        if self._hearing is not None:
            self._hearing.listen_outside(False)
            self._hearing.remove()
            self._hearing = None

    def leave_in_fork(self) -> None:
        """Stop listening in a forked process."""
        self.remove()
