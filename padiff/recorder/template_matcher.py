"""Fast recording of a step that repeats the planned events of an earlier step.

The hooks of such a step only check that each event is the planned one, and copy the samples. The records are written in
bulk, from the plan. At the first unexpected event the step's full state is restored, and recording goes on without a
plan.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import Any

from padiff.frameworks.base import Framework
from padiff.model.nested import flatten, flatten_inputs
from padiff.recorder.activations import Activations
from padiff.recorder.calls import Call, Calls
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.seen_tensors import SeenTensor
from padiff.recorder.step_template import ActiveMatcher, Copy, Event, Operand, StepTemplate
from padiff.recorder.tensor_copy import Sampled
from padiff.recorder.tracer import Tracer
from padiff.sketches.cuts import move
from padiff.system.guard import reraise_from_signal_handler


def _references() -> int:
    hooks = [object()]
    before = hooks[0]
    return sys.getrefcount(before)


#: Reference count of a hook to which only a list refers, counted in the same way as `TemplateMatcher` does.
_FREE = _references()


class _Callback:
    """Gradient hook of one of a plan's tensors; passes gradients to the step that currently follows the plan.

    Attributes:
        course: holder of the current step; None once the hook is out of use, though a graph of an earlier step may
            still call the hook.
        place: index of the tensor in the plan.
    """

    __slots__ = ("course", "place")

    def __init__(self, course: ActiveMatcher, place: int) -> None:
        self.course: ActiveMatcher | None = course
        self.place = place

    def __call__(self, gradient: Any) -> None:
        course = self.course
        following = None if course is None else course.following
        if following is None or following.guard.tripped:
            return
        try:
            with following.aside():
                following.gradient(self.place, gradient)
        except KeyboardInterrupt:
            following.interrupts.keep()
        except Exception as error:
            following.guard.catch(error)


class TemplateMatcher:
    """Matcher of a step's events against a plan.

    Args:
        plan: the expected events.
        records, tracer, calls, activations: recorders of the step, still empty.

    Attributes:
        left: True once an unexpected event has come.
        running: stack of the running layer calls, the outermost first.
        guard, interrupts: handlers of errors and of Ctrl-C in gradient hooks.
        aside: the context in which gradients are inspected (`Hooking.aside`).
    """

    def __init__(
        self,
        plan: StepTemplate,
        framework: Framework,
        records: RecordBuffer,
        tracer: Tracer,
        calls: Calls,
        activations: Activations,
    ) -> None:
        tensors = framework.tensors
        self._type, self._is_tensor = tensors.TYPE, tensors.is_tensor
        self._version, self._address = tensors.WRITTEN, tensors.address
        self._hook, self.aside = framework.hooks.gradient_hook, framework.hooks.aside
        self.guard, self.interrupts = activations.guard, activations.interrupts
        self._transforming, self._recomputing = framework.hooks.transforming, framework.hooks.recomputing
        self._plan, self._events = plan, plan.events
        self._hooks = plan.hooks
        self._records, self._tracer, self._calls, self._activations = records, tracer, calls, activations
        self.running, self._copier = calls.running, records.copier
        self._addresses = self._copier.samples.lay(plan.kinds, plan.others)
        self._row = self._copier.samples.row
        #: Number of events so far, and number of events whose records are written.
        self._at = self._written = 0
        #: By place in the plan: weak references to the tensors, and their versions. Places by ``id()`` of the tensor.
        self._alive: list[weakref.ref[Any] | None] = [None] * len(plan.history)
        self._versions = [0] * len(plan.history)
        self._places: dict[int, int] = {}
        #: By place: the state of a tensor, and the number of events that the state includes.
        self._seen: dict[int, tuple[SeenTensor, int]] = {}
        #: Places of the tensors whose gradient hook is part of their state.
        self._followed: set[int] = set()
        self._ended = self.left = False
        self._course = ActiveMatcher()
        self._course.following = plan.course.following = self
        records.following = activations.tensors.following = self

    @property
    def whole(self) -> bool:
        """Return True if exactly the expected events have come."""
        return not self.left and self._at == len(self._events) - 1

    # -- events ----------------------------------------------------------------------------------------------

    def model_begins(self, key: int, call: Call) -> bool:
        """Handle a call of the outermost layer, after its inputs were traced; return True if the call was expected."""
        event = self._events[self._at]
        planned = event.call
        if event.key != key or planned is None or call.inputs != planned.inputs:
            return False
        if call.number != planned.number or call.training is not planned.training:
            return False
        for operand, number in zip(event.operands or (), (call.inputs or ())[1::2]):
            entry = self._tracer.numbered(number)
            if operand is None or not isinstance(entry, SeenTensor):
                continue  # the output of a layer, which the plan knows
            self._alive[operand.place], self._versions[operand.place] = entry.alive, entry.version
            self._places[id(entry.alive())] = operand.place
            self._seen[operand.place] = entry, self._at + 1
        self._at += 1
        return True

    # The next methods run for each layer and each gradient, when the training's own data has driven this code out of
    # the processor's cache: so these methods are few and long.

    def begins(self, key: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Handle a call of a layer inside of the outermost one; return True if the call was expected."""
        event = self._events[self._at]
        if event.key != key or not self.running or self._transforming() or self._recomputing():
            return False
        operands = event.operands
        if operands is not None:
            try:
                if len(args) == 1 and not kwargs and len(operands) == 1 and isinstance(args[0], self._type):
                    if not self._meets(operands[0], args[0]):
                        return False
                elif not self._all_met(event, list(flatten_inputs(layer.forward, args, kwargs, self._is_tensor))):
                    return False
            except MemoryError:
                raise
            except Exception as error:  # recording without a plan reports the error
                reraise_from_signal_handler(error)
                return False
        self.running.append(event.call)  # type: ignore[arg-type]
        self._at += 1
        return True

    def ends(self, key: int, output: Any) -> bool:
        """Handle the end of a layer's call; return True if the end and the output were expected."""
        event = self._events[self._at]
        if event.key != ~key:
            return False
        operands = event.operands
        if operands:
            try:
                if len(operands) == 1 and isinstance(output, self._type):
                    if not self._meets(operands[0], output):
                        return False
                elif not self._all_met(event, list(flatten(output, "output", self._is_tensor))):
                    return False
            except MemoryError:
                raise
            except Exception as error:  # recording without a plan reports the error
                reraise_from_signal_handler(error)
                return False
        self._at += 1
        return True

    def gradient(self, place: int, gradient: Any) -> None:
        """Handle the gradient of a tensor of the plan."""
        if self._ended or gradient is None:
            return
        if not self.left:
            event = self._events[self._at]
            if event.place == place and event.copy is not None and self._copied(event.copy, gradient):
                self._at += 1
                return
            self.abandon()
        if place in self._followed:
            self._activations.see_gradient(self._seen[place][0], gradient)

    def _all_met(self, event: Event, named: Sequence[tuple[str, Any]]) -> bool:
        """Check the inputs or outputs of a call; return True if they are the expected tensors."""
        operands = event.operands or ()
        if tuple([slot for slot, _ in named]) != event.slots:
            return False
        return all(self._meets(operand, tensor) for operand, (_, tensor) in zip(operands, named))

    def _meets(self, operand: Operand | None, tensor: Any) -> bool:
        """Check one input or output of a call and copy its sample; return True if it is the expected tensor."""
        if operand is None:
            return True
        place, position = operand.place, self._places.get(id(tensor))
        # Raises for a tensor without a version: the plan can't be followed, as changes of such a tensor go unnoticed.
        version = self._version(tensor)
        if position is not None:
            alive = self._alive[position]
            if version != self._versions[position] or alive is None or alive() is not tensor:
                position = None
        if position != (None if operand.fresh else place):
            return False
        if operand.copy is not None and not self._copied(operand.copy, tensor):
            return False
        if operand.follow:
            hook = self._hooks[place]
            # A hook that is still part of a graph may be called with gradients of an earlier step.
            if hook is None or sys.getrefcount(hook) > _FREE or not hook.register(tensor):
                self._follow(place, tensor)
        if operand.fresh:
            self._alive[place], self._places[id(tensor)] = weakref.ref(tensor), place
            self._versions[place] = version
        return True

    def _copied(self, copy: Copy, tensor: Any) -> bool:
        """Copy the sample of a tensor; return True if the tensor has the expected dtype and shape."""
        form = copy.form
        start = 0 if form is None else self._address(tensor, form)
        if form is None or not start:
            return self._copier.fill(copy.number, tensor, copy.dtype, copy.shape)
        if form.direct:
            move(self._addresses[copy.number], start, form.nbytes)
        else:
            form.copy_sample(start, self._row(copy.number))
        return True

    def _follow(self, place: int, tensor: Any) -> None:
        """Register a new hook on the gradient of a tensor."""
        hooks = self._hooks
        before = hooks[place]
        if before is not None:
            before.callback.course = None
        hook = hooks[place] = self._hook(_Callback(self._plan.course, place))
        if hook is None or not hook.register(tensor):
            hooks[place] = None
            # A graph that lives on then holds this callback only, not the rest of the step.
            self._activations.hook(tensor, _Callback(self._course, place))

    # -- records ---------------------------------------------------------------------------------------------

    def write(self) -> None:
        """Write the records, calls and counts of the events so far."""
        start, end, plan = self._written, self._at, self._plan
        if self.left or start == end:
            return
        self._written = end
        marks = zip(plan.marks[start], plan.marks[end])
        records, calls, numbered, counted = [slice(*each) for each in marks]
        self._records.write_all(plan.sites[records], plan.numbers[records])
        self._tracer.add(plan.calls[calls], plan.numbered[numbered])
        self._calls.count(plan.counted[counted])

    def show(self, tensor: Any, last: int = 0) -> None:
        """Update the state of a tensor in `SeenTensors`.

        Args:
            last: also update this number of the tensors that came last.
        """
        position = self._places.get(id(tensor))
        alive = None if position is None else self._alive[position]
        if position is not None and alive is not None and alive() is tensor:
            self._bring(position)
        if last:
            for place in [place for place, alive in enumerate(self._alive) if alive is not None][-last:]:
                self._bring(place)

    def abandon(self) -> None:
        """Stop following: give the recorders the state that the step would have without a plan."""
        if self.left:
            return
        self.write()
        self.left = True
        self._records.following = self._activations.tensors.following = None
        for place, history in enumerate(self._plan.history):
            if history[0][0] < self._at:
                self._bring(place)
        self._at, at = len(self._events) - 1, self._at  # the last event never comes: nothing matches from now on
        self._tracer.put_in({place: entry for place, (entry, _) in self._seen.items()})
        for number, event in enumerate(self._events[:at]):
            for before, operand in self._plan.history[event.place] if event.place >= 0 else ():
                if before < number and operand.site is not None:
                    self._activations.again(operand.site)

    def end(self) -> None:
        """End the step: gradients that come later are ignored."""
        self._ended, self._course.following = True, None
        if self._plan.course.following is self:
            self._plan.course.following = None
        self._records.following = self._activations.tensors.following = None

    def _bring(self, place: int) -> None:
        """Bring the state of a tensor up to the current event, and store the state in `SeenTensors`."""
        alive, at = self._alive[place], self._at
        assert alive is not None
        entry, start = self._seen.get(place) or (SeenTensor(alive, self._versions[place]), 0)
        for number, operand in self._plan.history[place]:
            if start <= number < at:
                self._apply(operand, entry)
        self._seen[place] = entry, at
        self._activations.tensors.know(entry)

    def _apply(self, operand: Operand, entry: SeenTensor) -> None:
        copy = operand.copy
        if copy is not None:
            sample = Sampled(copy.dtype, copy.shape, self._copier.samples, copy.number)
            if operand.given:
                entry.sketched = sample
            else:
                entry.traced = sample
        if operand.site is not None:
            entry.sites = entry.sites + operand.site.alone
        if operand.follow:
            entry.followed = True
            self._followed.add(operand.place)
        if operand.number >= 0:
            entry.number = operand.number
