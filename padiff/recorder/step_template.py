"""Templates of steps: the layer calls, tensors and gradients of a recorded step, which later steps should repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from padiff.frameworks.base import Framework
from padiff.recorder.calls import Call
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.tensor_copy import OutputSite, Sampled, SeenTensor, SkippedTensor, TemplateSlot, TensorCopy
from padiff.recorder.tracer import Tracer
from padiff.records.step_schema import Site
from padiff.sketches.sketch import Form, Kind


class ActiveMatcher:
    """Reference to the step that follows a plan now; ``following`` is `None` if there is none."""

    __slots__ = ("following",)

    def __init__(self) -> None:
        self.following: Any = None


class Copy:
    """Description of a sample that each step of a plan copies.

    Attributes:
        dtype, shape: dtype and shape of the tensor.
        form: layout of the sample if the tensor is contiguous on the CPU; `None` if it is unknown.
        number: number of the sample in the plan; -1 before `StepTemplate.number`.
    """

    __slots__ = ("dtype", "form", "number", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], form: Form | None) -> None:
        self.dtype, self.shape, self.form, self.number = dtype, shape, form, -1


class Operand:
    """A tensor that is an input or an output of a call.

    Attributes:
        place: index of the tensor among the tensors of the step.
        fresh: True if this is the first event with the tensor.
        copy: sample that is copied at this event; `None` if there is none.
        given: True if the sample is a record of an output, False if only the trace needs it.
        follow: True if a hook is put on the gradient of the tensor at this event.
        site: output site that this event adds to the records of the gradient; `None` if it adds none.
        number: number in the trace if the tensor gets one at this event, else -1.
    """

    __slots__ = ("copy", "follow", "fresh", "given", "number", "place", "site")

    def __init__(self, place: int, fresh: bool) -> None:
        self.place, self.fresh = place, fresh
        self.given = self.follow = False
        self.copy: Copy | None = None
        self.site: OutputSite | None = None
        self.number = -1


class Event:
    """The beginning of a call, the end of a call, a gradient, or a call of a function that chooses.

    Attributes:
        key: key of the layer whose call begins; its complement (``~key``) if the call ends; 0 for a gradient; the entry
            of the trace for a function.
        call: the call of a layer; else `None`.
        slots, operands: slots and tensors of the inputs or outputs. ``operands`` is `None` if inputs are not recorded,
            and a single operand is `None` if that output is not recorded.
        place: index of the tensor whose gradient it is; -1 if the event is no gradient.
        copy: sample of the gradient.
    """

    __slots__ = ("call", "copy", "key", "operands", "place", "slots")

    def __init__(
        self,
        key: Any,
        call: Call | None = None,
        slots: tuple[str, ...] = (),
        operands: tuple[Operand | None, ...] | None = None,
        place: int = -1,
        copy: Copy | None = None,
    ) -> None:
        self.key, self.call, self.slots, self.operands = key, call, slots, operands
        self.place, self.copy = place, copy


#: Number of fields before the inputs in the tracer's entry of a layer call (`padiff.recorder.tracer.Tracer`).
_HEAD = 6
#: Numbers of records, traced calls, traced tensors and call counts that were written before an event.
Mark = tuple[int, int, int, int]
#: Output of one event: sites and samples of records, traced calls, numbers of traced tensors, counts of calls.
_Written = tuple[list[Site], list[int], list[tuple[Any, ...]], list[int], list[tuple[tuple[str, bool], int]]]


class StepTemplate:
    """Expected events of a step, in order, and the records and trace that these events produce.

    Attributes:
        about: objects that must be identical for a step to follow the plan
            (`padiff.recorder.step_observer.StepObserver`).
        events: expected events, and a last one that never occurs.
        history: for each tensor of the step, numbers of the events with the tensor, and its operands there.
        kinds: kinds of samples and their counts, in the order of the sample numbers.
        others: number of samples without a kind; these come last.
        sites, numbers: sites and sample numbers of the records.
        calls, numbered: calls and tensors of the trace.
        counted: path and mode of calls, with the number of the next call.
        marks: marks before each event and after the last one.
    """

    def __init__(self, about: tuple[Any, ...], events: list[Event], tensors: int) -> None:
        self.about, self.events = about, events
        self.kinds: list[tuple[Kind, int]] = []
        self.others = 0
        self.sites: list[Site] = []
        self.numbers: list[int] = []
        self.calls: list[tuple[Any, ...]] = []
        self.numbered: list[TemplateSlot] = []
        self.counted: list[tuple[tuple[str, bool], int]] = []
        self.marks: list[Mark] = []
        self.history: list[list[tuple[int, Operand]]] = [[] for _ in range(tensors)]
        for number, event in enumerate(events):
            for operand in event.operands or ():
                if operand is not None:
                    self.history[operand.place].append((number, operand))

    def fits(self, about: tuple[Any, ...]) -> bool:
        """Return True if a step with these objects may follow the plan."""
        return all(expected is actual for expected, actual in zip(self.about, about))

    @property
    def mark(self) -> Mark:
        """Return the current lengths of sites, calls, numbered and counted."""
        return len(self.sites), len(self.calls), len(self.numbered), len(self.counted)

    def number(self, copies: Sequence[Copy]) -> None:
        """Number the samples; those of one kind get consecutive numbers, so that their rows are allocated together."""
        kinds: dict[Kind, list[Copy]] = {}
        others: list[Copy] = []
        for copy in copies:
            (others if copy.form is None else kinds.setdefault(copy.form.kind, [])).append(copy)
        for number, copy in enumerate([*(copy for group in kinds.values() for copy in group), *others]):
            copy.number = number
        self.kinds, self.others = [(kind, len(group)) for kind, group in kinds.items()], len(others)


class TemplateBuilder:
    """Builder of a plan from the events of a step. It is dropped after `plan`, as it holds data of the step.

    Args:
        about: objects that must be identical for a step to follow the plan.
        records, tracer: record buffer and tracer of the step, whose state is read at each event.
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
        #: Tensors that are copied with a choice, in each step.
        self._chosen: set[int] = set()
        self._fits = True

    def begun(self, key: int, call: Call, outermost: bool) -> None:
        """Add the beginning of a layer call whose inputs are traced already."""
        if not self._fits:
            return
        slots, numbers = (call.inputs or ())[::2], (call.inputs or ())[1::2]
        before = len(self._numbered)
        operands = tuple([self._operand(self._tracer.seen(number), outermost) for number in numbers])
        event = Event(key, call, slots, None if call.inputs is None else operands)
        # The inputs of the model itself are recorded in every step, without the plan.
        numbered = [] if outermost else [n for n in numbers if n >= before]
        counted = [] if outermost else [((call.node.path, call.training), call.number + 1)]
        self._note(event, ([], [], [], list(dict.fromkeys(numbered)), counted))

    def ended(self, key: int, call: Call, outputs: Sequence[tuple[str, SeenTensor | None]], first: int) -> None:
        """Add the end of a layer call whose outputs are recorded; ``first`` is the index of its first record."""
        if not self._fits:
            return
        before = len(self._numbered)
        if call.inputs is not None:  # the trace also has outputs that are not recorded
            traced = self._tracer.last[_HEAD + len(call.inputs) :]
            self._fits = len(traced) == 2 * len(outputs)
            outputs = [(slot, self._tracer.seen(number)) for slot, number in zip(traced[::2], traced[1::2])]
        operands: list[Operand | None] = []
        node = call.node
        for slot, entry in outputs:
            if entry is None:
                operands.append(None)
                continue
            operand = self._operand(entry, False)
            site = self._records.known.output(node.path, type(node.layer).__name__, slot, call.number, call.training)
            operand.site = site if site in entry.sites else None
            operands.append(operand)
        event = Event(~key, call, tuple([slot for slot, _ in outputs]), tuple(operands))
        calls = [] if call.inputs is None else [self._tracer.last]
        sites, numbers = self._records.since(first)
        self._note(event, (sites, numbers, calls, list(range(before, len(self._numbered))), []))

    def chose(self, entry: tuple[Any, ...], start: int) -> None:
        """Add a function that chooses, which each step traces anew; ``start`` is the number of tensors before it."""
        if self._fits:
            self._note(Event(entry), ([], [], [], [], []))
            self._fits = start == len(self._numbered)
            for number in range(start, self._tracer.count):
                self._numbered.add(number)
                self._chosen.add(id(self._tracer.seen(number)))

    def gradient(self, seen: SeenTensor, taken: Sequence[TensorCopy | SkippedTensor], first: int) -> None:
        """Add a recorded gradient; ``first`` is the index of its first record."""
        if not self._fits:
            return
        copies = [copy for copy in map(self._copy, taken) if copy is not None]
        if id(seen) not in self._places or len(copies) != 1:
            self._fits = False
            return
        sites, numbers = self._records.since(first)
        self._note(Event(0, place=self._places[id(seen)], copy=copies[0]), (sites, numbers, [], [], []))

    def plan(self) -> StepTemplate | None:
        """Return the plan after the end of the step, or None if a step cannot follow one."""
        if not self._fits or self._records.left_out:
            return None
        plan = StepTemplate(self._about, [*self._events, Event(0)], len(self._seen))
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
                entry = self._tracer.seen(number)
                best = entry.best
                copy = self._copies.get(best.number) if isinstance(best, Sampled) else None
                if copy is None:
                    return None
                plan.numbered.append(TemplateSlot(self._places[id(entry)], copy.dtype, copy.shape, copy.number))
        plan.marks.append(plan.mark)
        return plan

    def _note(self, event: Event, written: _Written) -> None:
        self._events.append(event)
        self._written.append(written)

    def _operand(self, entry: SeenTensor, outside: bool) -> Operand:
        """Return the operand of a tensor at this event; with ``outside=True`` its copies are not part of the plan."""
        place = self._places.setdefault(id(entry), len(self._seen))
        fresh = place == len(self._seen)
        if fresh:
            self._seen.append(entry)
        operand = Operand(place, fresh)
        # Without a count of writes (version < 0) a later step could not tell if the tensor is unchanged.
        self._fits = self._fits and entry.version >= 0 and entry.full is None
        for sample in (entry.sketched, None if id(entry) in self._chosen else entry.traced):
            if isinstance(sample, Sampled) and sample.number in self._copies:
                continue
            if outside and isinstance(sample, Sampled):
                self._copies[sample.number] = None
            elif sample is not None:
                operand.copy, operand.given = self._copy(sample), sample is entry.sketched
        operand.follow = entry.followed and place not in self._followed
        if operand.follow:
            self._followed.add(place)
        if entry.number >= 0 and entry.number not in self._numbered:
            self._numbered.add(entry.number)
            operand.number = entry.number
        return operand

    def _copy(self, sample: TensorCopy | SkippedTensor) -> Copy | None:
        """Return the description of a copy, or None if a step cannot make that copy by a plan."""
        if not isinstance(sample, Sampled) or sample.part is not None or sample.transposed:
            self._fits = False
            return None
        copy = self._copies[sample.number] = Copy(sample.dtype, sample.shape, self._form(sample.dtype, sample.shape))
        return copy
