"""Two traces side by side: what a tensor was computed from, and which tensors of the two runs agree."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import Enum
from functools import cached_property

import numpy as np

from padiff.compare.judge.drift import RELATIVE
from padiff.compare.judge.limits import SURE
from padiff.compare.judge.policy import Policy
from padiff.compare.measure.pairs import measure_pair
from padiff.pair.layouts import layout_between, square_layout
from padiff.records import (
    RESHAPED,
    SAME,
    Both,
    Diff,
    Figure,
    Kind,
    Layer,
    Pair,
    Record,
    Rule,
    Sketched,
    Trace,
    TracedCall,
)
from padiff.sketches.sketch import ELEMENTS, sketch_of

# A value this large stands for infinity: additive masks are filled with such, beside which nothing else shows.
_INFINITE = 5e3
# How many times larger a diff may become in the code between two layers.
_AMPLIFIED = 100
#: Tensors of a trace that are looked at on the way back from one, at most.
MOST = 400


class Relation(Enum):
    """How two tensors that should be the same stand to each other."""

    AGREE = "they agree"
    DIFFER = "they differ"
    UNKNOWN = "it is not known"


class Graph:
    """What each tensor of a trace was computed from.

    Args:
        trace: the trace.
        layers: of the run.

    Attributes:
        trace: the trace; calls of layers have their settings as arguments.
        producers: by tensor, the innermost call that gave it.
    """

    def __init__(self, trace: Trace, layers: Iterable[Layer] = ()) -> None:
        settings = {layer.path: layer.settings for layer in layers}
        calls = [
            call if call.function else replace(call, arguments=settings.get(call.layer, {})) for call in trace.calls
        ]
        self.trace = replace(trace, calls=calls)
        self.producers: dict[int, TracedCall] = {}
        for call in calls:
            given = {operand.tensor for operand in call.inputs}
            for operand in call.outputs:
                if operand.tensor not in given:  # handed on, it is what it was
                    self.producers.setdefault(operand.tensor, call)

    @cached_property
    def layers(self) -> dict[tuple[str, int], TracedCall]:
        """The calls of layers, by path and number of the call."""
        return {(call.layer, call.call): call for call in self.trace.calls if not call.function}

    @cached_property
    def places(self) -> dict[int, int]:
        """By identity, where in the trace a call is."""
        return {id(call): place for place, call in enumerate(self.trace.calls)}

    def of_record(self, record: Record) -> TracedCall | None:
        """The layer's call that a record is of."""
        return self.layers.get((record.layer, record.call))

    def tensor_of(self, record: Record) -> int | None:
        """The number of a layer's output in the trace."""
        call = self.of_record(record)
        found = () if call is None else call.outputs
        return next((operand.tensor for operand in found if operand.slot == record.slot), None)

    @cached_property
    def by_size(self) -> dict[int, list[int]]:
        """The tensors, by how many elements they have."""
        found: dict[int, list[int]] = {}
        for tensor in range(len(self.trace.tensors)):
            found.setdefault(self.size(tensor), []).append(tensor)
        return found

    def size(self, tensor: int) -> int:
        """How many elements a tensor has."""
        return math.prod(self.trace.tensors[tensor].shape)

    def back(self, start: int, stop: Callable[[int], bool]) -> list[TracedCall]:
        """The calls that a tensor was computed by, in their order.

        Args:
            stop: which tensors are not followed further.
        """
        seen, waiting = {start}, deque([start])
        calls: dict[int, TracedCall] = {}
        while waiting and len(seen) < MOST:
            tensor = waiting.popleft()
            call = self.producers.get(tensor)
            if call is None or stop(tensor):
                continue
            calls[self.places[id(call)]] = call
            for operand in call.inputs:
                if operand.tensor not in seen:
                    seen.add(operand.tensor)
                    waiting.append(operand.tensor)
        return [calls[place] for place in sorted(calls)]

    def record(self, tensor: int, like: Record) -> Record | None:
        """A tensor as a record of another one's layer; `None` where nothing was kept of it."""
        traced = self.trace.tensors[tensor]
        if traced.source is None:
            return None
        return replace(like, source=traced.source, dtype=traced.dtype, shape=traced.shape)


class Relations:
    """Which tensors of two traces agree: judged no stricter than the output that is known to differ.

    Args:
        first: the diff of that output.
        graphs: the traces.
        policy: judges where the output was not judged by its relative error.
    """

    def __init__(self, first: Diff, graphs: Both[Graph], policy: Policy) -> None:
        self._first, self._graphs, self._policy = first, graphs, policy
        self._known: dict[tuple[int, int, bool], Relation] = {}
        #: Tensors as they are looked at when nothing has to be exact.
        self._small: Both[dict[int, Record | None]] = Both({}, {})
        self._found: dict[bool, dict[int, bool]] = {True: {}, False: {}}
        judged, figures = first.judgement, first.figures
        #: What is beyond this differs; `None`: what the policy says.
        self._limit: float | None = None
        if judged is not None and judged.figure in RELATIVE and figures is not None:
            # What is off by far less does not explain it.
            far = figures.rel_l2 / _AMPLIFIED
            self._limit = max(judged.limit, far if math.isfinite(far) else 0.0)

    def between(self, reference: int, candidate: int, exact: bool = False) -> Relation:
        """How a tensor of the reference and one of the candidate stand to each other.

        Args:
            exact: look at all of large tensors, not at samples of them.
        """
        key = reference, candidate, exact
        if key not in self._known:
            self._known[key] = self._related(*self._records(reference, candidate, exact))
        return self._known[key]

    def diff(self, reference: int, candidate: int, slots: Both[str]) -> Diff:
        """The judged diff of two tensors that differ, as what goes into the layer whose output differs."""
        sides = self._records(reference, candidate, True).zip(slots).map(lambda side: _in_slot(*side))
        one, other = sides
        assert one is not None and other is not None
        diff = measure_pair(self._pair(one, other), self._policy.elementwise)
        figures, judged = diff.figures, self._first.judgement
        if diff.problem is not None or figures is None:
            return replace(diff, passed=False)
        if self._limit is None or judged is None:
            return replace(self._policy.judge([diff])[0], passed=False)
        if figures.reference_l2 > 0:
            return diff.judged(False, Figure.REL_L2, figures.rel_l2, judged.limit, judged.rule)
        return diff.judged(False, Figure.L2, figures.l2, 0.0, Rule.EQUAL)

    def is_found(self, tensor: int, of_reference: bool) -> bool:
        """Whether the other side has a tensor that agrees with one, wherever it has it."""
        known = self._found[of_reference]
        if tensor not in known:
            known[tensor] = self._look_for(tensor, of_reference)
        return known[tensor]

    def _look_for(self, tensor: int, of_reference: bool) -> bool:
        own, other = self._graphs if of_reference else self._graphs.swapped()
        for number in other.by_size.get(own.size(tensor), ()):
            pair = (tensor, number) if of_reference else (number, tensor)
            if self.between(*pair) is Relation.AGREE:
                return True
        return False

    def _records(self, reference: int, candidate: int, exact: bool) -> Both[Record | None]:
        """The tensors as records of the layer whose output differs; large ones as sketches where that will do."""
        found = []
        for graph, small, tensor, like in zip(
            self._graphs, self._small, (reference, candidate), self._first.pair.sides
        ):
            if not exact and tensor in small:
                found.append(small[tensor])
                continue
            assert like is not None
            record = graph.record(tensor, like)
            if not exact and record is not None and not record.source.sketched and math.prod(record.shape) > ELEMENTS:
                sketch = sketch_of(record.value)
                record = replace(record, source=Sketched(sketch.row(), sketch.size))
            if not exact:
                small[tensor] = record
            found.append(record)
        return Both(*found)

    def _pair(self, one: Record, other: Record) -> Pair:
        usual = self._first.pair.layout
        if math.prod(one.shape) != math.prod(other.shape):
            layout = SAME
        elif one.shape == other.shape:
            layout = square_layout(one.shape, [usual]) if usual else SAME
        else:
            layout = layout_between(one.shape, other.shape) or RESHAPED
        return Pair(self._first.pair.step, one, other, layout)

    def _related(self, one: Record | None, other: Record | None) -> Relation:
        if one is None or other is None or _kind(one) != _kind(other):
            return Relation.UNKNOWN
        if math.prod(one.shape) != math.prod(other.shape):
            return Relation.DIFFER
        diff = measure_pair(self._pair(one, other), self._policy.elementwise)
        figures = diff.figures
        if figures is None or figures.size == 0:
            return Relation.UNKNOWN
        if _stands_for_infinity(one) or _stands_for_infinity(other):
            return self._masked(one, other)
        if diff.problem is not None:
            return Relation.DIFFER if diff.problem.kind is Kind.NONFINITE else Relation.UNKNOWN
        if not self._passes(diff):
            # Of other shapes, the axes may be in another order.
            sure = one.shape == other.shape or layout_between(one.shape, other.shape)
            return Relation.DIFFER if sure else Relation.UNKNOWN
        return Relation.UNKNOWN if figures.basis == "moments" else Relation.AGREE

    def _masked(self, one: Record, other: Record) -> Relation:
        """Of tensors with values that stand for infinity: whether they agree where neither has any."""
        if one.source.sketched or other.source.sketched or one.shape != other.shape:
            return Relation.UNKNOWN
        reference, candidate = (np.asarray(record.value, np.float64) for record in (one, other))
        with np.errstate(all="ignore"):
            plain = [np.isfinite(values) & (np.abs(values) < _INFINITE) for values in (reference, candidate)]
        if not np.array_equal(plain[0], plain[1]):
            return Relation.DIFFER
        rest = [values[plain[0]] for values in (reference, candidate)]
        norm, error = float(np.linalg.norm(rest[0])), float(np.linalg.norm(rest[1] - rest[0]))
        limit = self._limit if self._limit is not None else 1e-4
        return Relation.AGREE if error <= limit * norm else Relation.DIFFER

    def _passes(self, diff: Diff) -> bool:
        figures = diff.figures
        assert figures is not None
        if figures.l2 == 0:
            return True
        if _kind(diff.pair.anchor) != "f":
            return False
        if self._limit is None:
            return self._policy.judge([diff])[0].passed
        return figures.rel_l2 <= self._limit * (1 + SURE * figures.spread)


def _in_slot(record: Record | None, slot: str) -> Record | None:
    return None if record is None else replace(record, slot=slot)


def _kind(record: Record) -> str:
    """Whether a tensor is of numbers, integers, or truths."""
    if record.dtype.startswith(("float", "bfloat", "complex")):
        return "f"
    return "b" if record.dtype.startswith("bool") else "i"


def _stands_for_infinity(record: Record) -> bool:
    """Whether some values are so large that they can only mean that a place does not count."""
    sketch = record.sketch
    if sketch is not None:
        return max(abs(sketch.minimum), abs(sketch.maximum)) >= _INFINITE or sketch.nonfinite > 0
    if _kind(record) != "f":
        return False
    values = np.asarray(record.value, np.float64)
    with np.errstate(all="ignore"):
        return bool((~np.isfinite(values) | (np.abs(values) >= _INFINITE)).any())
