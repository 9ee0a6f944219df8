"""A step that follows a plan: its hooks look whether what comes is what is expected, and copy its samples, no more.

What the plan says is written down in bulk, before anything else is. Once something else comes, all is made known that
the step would know without a plan, and it goes on without one.
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
from padiff.recorder.plan import Copy, Course, Event, Operand, Plan
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.seen_tensors import SeenTensor
from padiff.recorder.taken import Sampled
from padiff.recorder.tracer import Tracer
from padiff.sketches.cuts import move
from padiff.system.guard import reraise_from_signal_handler


def _references() -> int:
    hooks = [object()]
    before = hooks[0]
    return sys.getrefcount(before)


#: How many references are counted to a hook that nothing but a list has, counted as `Following` does.
_FREE = _references()


class _Callback:
    """What is called with the gradients of one of a plan's tensors, in whichever step follows the plan.

    Attributes:
        course: tells which that is; `None`: none any more, as a graph of an earlier step still has this.
    """

    __slots__ = ("course", "place")

    def __init__(self, course: Course, place: int) -> None:
        self.course: Course | None = course
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


class Following:
    """A step, as far as it follows a plan.

    Args:
        plan: what is expected.
        records, tracer, calls, activations: the step's. Nothing was recorded yet.

    Attributes:
        left: whether something else has come.
        running: the calls that are under way, the outermost first.
        guard, interrupts: stop errors, and keep Ctrl-C, where a gradient comes.
        aside: the context in which a gradient is looked at (`Hooking.aside`).
    """

    def __init__(
        self,
        plan: Plan,
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
        #: How many events have come, and of how many all is written down.
        self._at = self._written = 0
        #: The tensors, as long as the training has them; how often they had been written; and by their identities,
        #: their places.
        self._alive: list[weakref.ref[Any] | None] = [None] * len(plan.history)
        self._versions = [0] * len(plan.history)
        self._places: dict[int, int] = {}
        #: What is known of some of them, and as of how many events.
        self._seen: dict[int, tuple[SeenTensor, int]] = {}
        #: Of which a hook is on the gradient, as far as it is known.
        self._followed: set[int] = set()
        self._ended = self.left = False
        self._course = Course()
        self._course.following = plan.course.following = self
        records.following = activations.tensors.following = self

    @property
    def whole(self) -> bool:
        """Whether all has come that was expected."""
        return not self.left and self._at == len(self._events) - 1

    # -- what comes ------------------------------------------------------------------------------------------

    def model_begins(self, key: int, call: Call) -> bool:
        """The outermost layer is called, and what goes in was looked at. Whether that was expected."""
        event = self._events[self._at]
        planned = event.call
        if event.key != key or planned is None or call.inputs != planned.inputs:
            return False
        if call.number != planned.number or call.training is not planned.training:
            return False
        for operand, number in zip(event.operands or (), (call.inputs or ())[1::2]):
            seen = self._tracer.numbered(number)
            if operand is None or not isinstance(seen, SeenTensor):
                continue  # it was given by a layer, and is known
            self._alive[operand.place], self._versions[operand.place] = seen.alive, seen.version
            self._places[id(seen.alive())] = operand.place
            self._seen[operand.place] = seen, self._at + 1
        self._at += 1
        return True

    # What follows is done for each layer and each gradient, when what the training works with has driven all of this
    # out of the processor's cache: so it is few functions, and long ones.

    def begins(self, key: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """A layer is called inside of it. Whether that was expected."""
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
            except Exception as error:  # without a plan it is said what that means
                reraise_from_signal_handler(error)
                return False
        self.running.append(event.call)  # type: ignore[arg-type]
        self._at += 1
        return True

    def ends(self, key: int, output: Any) -> bool:
        """A layer's call has ended. Whether that was expected."""
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
            except Exception as error:  # likewise
                reraise_from_signal_handler(error)
                return False
        self._at += 1
        return True

    def gradient(self, place: int, gradient: Any) -> None:
        """The gradient of a tensor has come."""
        if self._ended or gradient is None:
            return
        if not self.left:
            event = self._events[self._at]
            if event.place == place and event.copy is not None and self._copied(event.copy, gradient):
                self._at += 1
                return
            self.leave()
        if place in self._followed:
            self._activations.see_gradient(self._seen[place][0], gradient)

    def _all_met(self, event: Event, named: Sequence[tuple[str, Any]]) -> bool:
        """Look at tensors that go in or come out; whether they are those that were expected."""
        operands = event.operands or ()
        if tuple([slot for slot, _ in named]) != event.slots:
            return False
        return all(self._meets(operand, tensor) for operand, (_, tensor) in zip(operands, named))

    def _meets(self, operand: Operand | None, tensor: Any) -> bool:
        """Look at a tensor that goes in or comes out; whether it is the one that was expected."""
        if operand is None:
            return True
        place, known = operand.place, self._places.get(id(tensor))
        # Of one without a version, of which this is an error, it can't be said whether it is what it was.
        version = self._version(tensor)
        if known is not None:
            alive = self._alive[known]
            if version != self._versions[known] or alive is None or alive() is not tensor:
                known = None
        if known != (None if operand.fresh else place):
            return False
        if operand.copy is not None and not self._copied(operand.copy, tensor):
            return False
        if operand.follow:
            hook = self._hooks[place]
            # One that a graph has still may be called with gradients of an earlier step.
            if hook is None or sys.getrefcount(hook) > _FREE or not hook.put(tensor):
                self._follow(place, tensor)
        if operand.fresh:
            self._alive[place], self._places[id(tensor)] = weakref.ref(tensor), place
            self._versions[place] = version
        return True

    def _copied(self, copy: Copy, tensor: Any) -> bool:
        """Copy the sample of a tensor; whether it has the dtype and the shape that were expected."""
        form = copy.form
        start = 0 if form is None else self._address(tensor, form)
        if form is None or not start:
            return self._copier.fill(copy.number, tensor, copy.dtype, copy.shape)
        if form.direct:
            move(self._addresses[copy.number], start, form.nbytes)
        else:
            form.copy(start, self._row(copy.number))
        return True

    def _follow(self, place: int, tensor: Any) -> None:
        """Put a new hook on the gradient of a tensor."""
        hooks = self._hooks
        before = hooks[place]
        if before is not None:
            before.callback.course = None
        hook = hooks[place] = self._hook(_Callback(self._plan.course, place))
        if hook is None or not hook.put(tensor):
            hooks[place] = None
            # A graph that is kept must not keep more of this step than that.
            self._activations.hook(tensor, _Callback(self._course, place))

    # -- what is written down --------------------------------------------------------------------------------

    def write(self) -> None:
        """Write down what has come."""
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
        """Have it known what is known of a tensor, and of so many of the last ones."""
        known = self._places.get(id(tensor))
        alive = None if known is None else self._alive[known]
        if known is not None and alive is not None and alive() is tensor:
            self._bring(known)
        if last:
            for place in [place for place, alive in enumerate(self._alive) if alive is not None][-last:]:
                self._bring(place)

    def leave(self) -> None:
        """Something else has come: have all known that the step would know without a plan."""
        if self.left:
            return
        self.write()
        self.left = True
        self._records.following = self._activations.tensors.following = None
        for place, history in enumerate(self._plan.history):
            if history[0][0] < self._at:
                self._bring(place)
        self._at, at = len(self._events) - 1, self._at  # from now on nothing is as expected
        self._tracer.put_in({place: seen for place, (seen, _) in self._seen.items()})
        for number, event in enumerate(self._events[:at]):
            for before, operand in self._plan.history[event.place] if event.place >= 0 else ():
                if before < number and operand.site is not None:
                    self._activations.again(operand.site)

    def end(self) -> None:
        """The step is over."""
        self._ended, self._course.following = True, None
        if self._plan.course.following is self:
            self._plan.course.following = None
        self._records.following = self._activations.tensors.following = None

    def _bring(self, place: int) -> None:
        """Have it known what is known of a tensor as of now."""
        alive, at = self._alive[place], self._at
        assert alive is not None
        seen, start = self._seen.get(place) or (SeenTensor(alive, self._versions[place]), 0)
        for number, operand in self._plan.history[place]:
            if start <= number < at:
                self._apply(operand, seen)
        self._seen[place] = seen, at
        self._activations.tensors.know(seen)

    def _apply(self, operand: Operand, seen: SeenTensor) -> None:
        copy = operand.copy
        if copy is not None:
            taken = Sampled(copy.dtype, copy.shape, self._copier.samples, copy.number)
            if operand.given:
                seen.sketched = taken
            else:
                seen.traced = taken
        if operand.site is not None:
            seen.sites = seen.sites + operand.site.alone
        if operand.follow:
            seen.followed = True
            self._followed.add(operand.place)
        if operand.number >= 0:
            seen.number = operand.number
