"""What a step is expected to do: the calls of layers, the tensors and the gradients of one that was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from padiff.frameworks.base import Framework
from padiff.frameworks.hooking import GradientHook
from padiff.recorder.calls import Call
from padiff.recorder.known import OutputSite
from padiff.recorder.left_out import Left
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.seen_tensors import SeenTensor
from padiff.recorder.taken import Numbered, Sampled, Taken
from padiff.recorder.tracer import Tracer
from padiff.records.alike import Site
from padiff.sketches.cuts import Form, Kind


class Course:
    """Which step follows a plan now; `None`: none does."""

    __slots__ = ("following",)

    def __init__(self) -> None:
        self.following: Any = None


class Copy:
    """A sample that is taken.

    Attributes:
        dtype, shape: of the tensor.
        form: how it is looked at where it is contiguous on the CPU; `None`: that is not known.
        number: of the sample, among those of the plan.
    """

    __slots__ = ("dtype", "form", "number", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], form: Form | None) -> None:
        self.dtype, self.shape, self.form, self.number = dtype, shape, form, -1


class Operand:
    """A tensor that goes into a call or comes out of it.

    Attributes:
        place: which of the step's tensors it is.
        fresh: whether it is met for the first time.
        copy: the sample that is taken of it now; `None`: none.
        given: whether that sample is of an output.
        follow: whether a hook on its gradient is asked for now.
        site: where its gradient is recorded from now on; `None`: at no further place.
        number: in the trace, where it gets one now, else -1.
    """

    __slots__ = ("copy", "follow", "fresh", "given", "number", "place", "site")

    def __init__(self, place: int, fresh: bool) -> None:
        self.place, self.fresh = place, fresh
        self.given = self.follow = False
        self.copy: Copy | None = None
        self.site: OutputSite | None = None
        self.number = -1


class Event:
    """The beginning or the end of a call, or a gradient.

    Attributes:
        key: of the layer whose call begins, the complement of the one whose call ends; 0 of a gradient.
        call: the call.
        slots, operands: what goes in or comes out; `None`: that is not looked at.
        place: whose gradient it is; -1: of none.
        copy: the sample of the gradient.
    """

    __slots__ = ("call", "copy", "key", "operands", "place", "slots")

    def __init__(
        self,
        key: int,
        call: Call | None = None,
        slots: tuple[str, ...] = (),
        operands: tuple[Operand | None, ...] | None = None,
        place: int = -1,
        copy: Copy | None = None,
    ) -> None:
        self.key, self.call, self.slots, self.operands = key, call, slots, operands
        self.place, self.copy = place, copy


#: How long what the trace has of a layer's call is before its inputs (`padiff.recorder.tracer.Tracer`).
_HEAD = 6
#: How much was written down before an event: records, calls of the trace, its tensors, and counts of calls.
Mark = tuple[int, int, int, int]
#: What an event wrote: the records' sites and samples, calls of the trace, numbers of its tensors, counts of calls.
_Written = tuple[list[Site], list[int], list[tuple[Any, ...]], list[int], list[tuple[tuple[str, bool], int]]]


class Plan:
    """What a step is expected to do, in order, and what is written down of it.

    Attributes:
        about: what has to be the same for a step to follow it (`padiff.recorder.step_observer.StepObserver`).
        events: what happens; one more at the end that never does.
        history: of each of the step's tensors the events, by number, and its operands there.
        kinds: samples of each kind, in the order of their numbers; and how many there are besides, which come last.
        sites, numbers: of the records: what they are, and their samples.
        calls, numbered: of the trace.
        counted: what calls are counted by, with the number of the next one.
        marks: before each event, and after the last.
        hooks: by tensor, what was put on its gradient by a step that followed the plan.
        course: tells which step does.
    """

    def __init__(self, about: tuple[Any, ...], events: list[Event], tensors: int) -> None:
        self.about, self.events = about, events
        self.kinds: list[tuple[Kind, int]] = []
        self.others = 0
        self.sites: list[Site] = []
        self.numbers: list[int] = []
        self.calls: list[tuple[Any, ...]] = []
        self.numbered: list[Numbered] = []
        self.counted: list[tuple[tuple[str, bool], int]] = []
        self.marks: list[Mark] = []
        self.hooks: list[GradientHook | None] = [None] * tensors
        self.course = Course()
        self.history: list[list[tuple[int, Operand]]] = [[] for _ in range(tensors)]
        for number, event in enumerate(events):
            for operand in event.operands or ():
                if operand is not None:
                    self.history[operand.place].append((number, operand))

    def fits(self, about: tuple[Any, ...]) -> bool:
        """Whether a step may follow it."""
        return all(one is other for one, other in zip(self.about, about))

    @property
    def mark(self) -> Mark:
        """How much is written down of it so far."""
        return len(self.sites), len(self.calls), len(self.numbered), len(self.counted)

    def number(self, copies: Sequence[Copy]) -> None:
        """Give the samples numbers: those of a kind follow each other, so that their rows can be taken together."""
        kinds: dict[Kind, list[Copy]] = {}
        others: list[Copy] = []
        for copy in copies:
            (others if copy.form is None else kinds.setdefault(copy.form.kind, [])).append(copy)
        for number, copy in enumerate([*(copy for some in kinds.values() for copy in some), *others]):
            copy.number = number
        self.kinds, self.others = [(kind, len(some)) for kind, some in kinds.items()], len(others)


class Draft:
    """Writes down what a step does, to make a plan of it. What it holds of the step is let go when that is made.

    Args:
        about: as `Plan` has it.
        records, tracer: the step's, as they are when each event is noted.
    """

    def __init__(self, about: tuple[Any, ...], framework: Framework, records: RecordBuffer, tracer: Tracer) -> None:
        self._about, self._form = about, framework.tensors.form
        self._records, self._tracer = records, tracer
        self._events: list[Event] = []
        self._written: list[_Written] = []
        self._seen: list[SeenTensor] = []
        self._places: dict[int, int] = {}
        self._followed: set[int] = set()
        self._numbered: set[int] = set()
        self._copies: dict[int, Copy | None] = {}
        self._fits = True

    def begun(self, key: int, call: Call, outermost: bool) -> None:
        """A layer's call has begun, and what goes in was looked at."""
        if not self._fits:
            return
        slots, numbers = (call.inputs or ())[::2], (call.inputs or ())[1::2]
        before = len(self._numbered)
        operands = tuple([self._operand(self._tracer.seen(number), outermost) for number in numbers])
        event = Event(key, call, slots, None if call.inputs is None else operands)
        # What the model itself is called with is written down as ever.
        numbered = [] if outermost else [n for n in numbers if n >= before]
        counted = [] if outermost else [((call.node.path, call.training), call.number + 1)]
        self._note(event, ([], [], [], list(dict.fromkeys(numbered)), counted))

    def ended(self, key: int, call: Call, outputs: Sequence[tuple[str, SeenTensor | None]], first: int) -> None:
        """A layer's call has ended, and what it gave was looked at; ``first`` is its first record."""
        if not self._fits:
            return
        before = len(self._numbered)
        if call.inputs is not None:  # the trace knows those, too, that are no output
            given = self._tracer.last[_HEAD + len(call.inputs) :]
            self._fits = len(given) == 2 * len(outputs)
            outputs = [(slot, self._tracer.seen(number)) for slot, number in zip(given[::2], given[1::2])]
        operands: list[Operand | None] = []
        node = call.node
        for slot, seen in outputs:
            if seen is None:
                operands.append(None)
                continue
            operand = self._operand(seen, False)
            site = self._records.known.output(node.path, type(node.layer).__name__, slot, call.number, call.training)
            operand.site = site if site in seen.sites else None
            operands.append(operand)
        event = Event(~key, call, tuple([slot for slot, _ in outputs]), tuple(operands))
        calls = [] if call.inputs is None else [self._tracer.last]
        sites, numbers = self._records.since(first)
        self._note(event, (sites, numbers, calls, list(range(before, len(self._numbered))), []))

    def gradient(self, seen: SeenTensor, taken: Sequence[Taken | Left], first: int) -> None:
        """A gradient was recorded; ``first`` is its first record."""
        if not self._fits:
            return
        copies = [copy for copy in map(self._copy, taken) if copy is not None]
        if id(seen) not in self._places or len(copies) != 1:
            self._fits = False
            return
        sites, numbers = self._records.since(first)
        self._note(Event(0, place=self._places[id(seen)], copy=copies[0]), (sites, numbers, [], [], []))

    def plan(self) -> Plan | None:
        """The plan, once the step is over; `None` where steps can't follow it."""
        if not self._fits or self._records.left_out:
            return None
        plan = Plan(self._about, [*self._events, Event(0)], len(self._seen))
        plan.number([copy for copy in self._copies.values() if copy is not None])
        for sites, numbers, calls, numbered, counted in self._written:
            plan.marks.append(plan.mark)
            plan.sites += sites
            plan.calls += calls
            plan.counted += counted
            for number in numbers:
                copy = self._copies.get(number)
                if copy is None:
                    return None
                plan.numbers.append(copy.number)
            for number in numbered:
                seen = self._tracer.seen(number)
                best = seen.best
                copy = self._copies.get(best.number) if isinstance(best, Sampled) else None
                if copy is None:
                    return None
                plan.numbered.append(Numbered(self._places[id(seen)], copy.dtype, copy.shape, copy.number))
        plan.marks.append(plan.mark)
        return plan

    def _note(self, event: Event, written: _Written) -> None:
        self._events.append(event)
        self._written.append(written)

    def _operand(self, seen: SeenTensor, outside: bool) -> Operand:
        """A tensor as it goes in or comes out now; ``outside``: what is copied of it is none of the plan's."""
        place = self._places.setdefault(id(seen), len(self._seen))
        fresh = place == len(self._seen)
        if fresh:
            self._seen.append(seen)
        operand = Operand(place, fresh)
        # Of one that is written by ways that are not counted it can't be said whether it is what it was.
        self._fits = self._fits and seen.version >= 0 and seen.full is None
        for taken in (seen.sketched, seen.traced):
            if isinstance(taken, Sampled) and taken.number in self._copies:
                continue
            if outside and isinstance(taken, Sampled):
                self._copies[taken.number] = None
            elif taken is not None:
                operand.copy, operand.given = self._copy(taken), taken is seen.sketched
        operand.follow = seen.followed and place not in self._followed
        if operand.follow:
            self._followed.add(place)
        if seen.number >= 0 and seen.number not in self._numbered:
            self._numbered.add(seen.number)
            operand.number = seen.number
        return operand

    def _copy(self, taken: Taken | Left) -> Copy | None:
        """What was copied, if steps can copy it by a plan."""
        if not isinstance(taken, Sampled) or taken.part is not None or taken.transposed:
            self._fits = False
            return None
        copy = self._copies[taken.number] = Copy(taken.dtype, taken.shape, self._form(taken.dtype, taken.shape))
        return copy
