"""Calls of two loops: joined where they take parts of a batch, told by their inputs, and layouts of their tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import NamedTuple

import numpy as np

from padiff.align.matching.parameter_units import without_ones
from padiff.pair.parameters import DerivedSource, Sum
from padiff.records import (
    BROADCAST,
    LOOP,
    PARAMETER_STAGES,
    RESHAPED,
    ROOT,
    SAME,
    Both,
    Layout,
    Record,
    Step,
    is_functional,
)
from padiff.records.sources import Shape, TensorSource

# Largest relative error of inputs that are the same, and of the norms of sketched ones, which are estimates.
_AGREES, _SKETCHED = 1e-6, 1e-3
# Largest relative error of outputs that are computed from the same data; those of other data are about 1.4 apart.
_SAME_DATA = 0.5

# Most calls of a layer that are compared with each other.
_MOST_CALLS = 64

#: Inputs of a loop's calls, by path of the layer and number of the call.
_Inputs = dict[str, dict[int, list[Record]]]


@dataclass(frozen=True)
class JoinedCalls:
    """Two steps with as many calls of each model.

    Attributes:
        steps: the steps; records of joined calls hold the rows of all of them.
        rest: records of joined calls that cannot be joined: sketches, and tensors without a row for each sample.
        paths: outermost layers whose calls were joined, of both sides.
        losses: True if the calls are micro-batches of one loop, each with a loss of its own.
    """

    steps: Both[Step]
    rest: Both[list[Record]]
    paths: frozenset[str] = frozenset()
    losses: bool = False

    def leaves_alone(self, record: Record) -> bool:
        """Return True if a record without a partner is no difference: one of a call whose partners are joined."""
        if record.layer == LOOP:
            return self.losses and record.slot == "loss"
        if record.stage in PARAMETER_STAGES:
            return False
        return any(_is_inside(record.layer, path) for path in self.paths)


@dataclass(frozen=True, slots=True)
class _Rows(TensorSource):
    """Tensor source of the rows of several sources, along one axis."""

    parts: tuple[TensorSource, ...]
    axis: int
    #: Number of axes; a part with one less is stacked.
    axes: int
    #: Number of each part's call, and its extent along the axis.
    calls: tuple[tuple[int, int], ...] = ()

    @property
    def inside(self) -> Sequence[TensorSource]:
        return self.parts

    def made_of(self, inside: Sequence[TensorSource]) -> TensorSource:
        return replace(self, parts=tuple(inside))

    def read(self) -> np.ndarray:
        values = [part.read() for part in self.parts]
        return np.concatenate([v if v.ndim == self.axes else np.expand_dims(v, self.axis) for v in values], self.axis)


def is_joined(record: Record) -> bool:
    """Return True if a record holds the tensors of several calls."""
    return isinstance(record.source, _Rows)


def calls_of(record: Record) -> tuple[tuple[int, int], ...]:
    """Return the calls whose rows a record holds, with the number of rows of each; empty if the rows are not along the
    first axis.
    """
    source = record.source
    if not isinstance(source, _Rows):
        return ((record.call, record.shape[0] if record.shape else 1),)
    return () if source.axis else source.calls


def joined_calls(steps: Both[Step], pairs: Sequence[tuple[str, str]]) -> JoinedCalls:
    """Join the calls of a layer that the other side calls once, with the inputs of all of them in one tensor.

    Args:
        pairs: paths of the paired layers, the outer ones first. Layers with as many calls on both sides stay.

    Raises:
        PadiffError: the values of inputs cannot be read.
    """
    rest: Both[list[Record]] = Both([], [])
    joined: set[str] = set()
    one_loss = backwards_agree(steps)
    if one_loss and not any(step.evaluations for step in steps):  # a call may be left out, as it is in evaluation mode
        indexes = steps.map(lambda step: _outputs(step, ()))
        for paths in pairs:
            steps = _with_repeats_merged(steps, paths, indexes, rest, joined)
    inputs = steps.map(_inputs)
    outputs = steps.zip(inputs).map(lambda side: _outputs(side[0], side[1]))
    for paths in pairs:
        calls = Both(*(side.get(path, {}) for side, path in zip(inputs, paths)))
        agrees = _AGREES
        if one_loss and not calls.reference and not calls.candidate:
            calls, agrees = Both(*(side.get(path, {}) for side, path in zip(outputs, paths))), _SAME_DATA
        uneven = len(calls.reference) != len(calls.candidate)
        if not uneven or any(_is_inside(path, outer) for path in paths for outer in joined):
            continue
        swapped = len(calls.reference) < len(calls.candidate)
        many, few = calls.swapped(swapped)
        axis, parts = _parts(list(many.values()), list(few.values()), agrees)
        if not parts:
            continue
        path = paths[swapped]
        records, rest_of_side = _join(steps.swapped(swapped).reference, path, list(many.values()), parts, axis)
        own, other = steps.swapped(swapped)
        steps = Both(replace(own, records=records), other).swapped(swapped)
        rest.swapped(swapped).reference.extend(rest_of_side)
        joined |= {*paths}
    if not joined or one_loss:
        return JoinedCalls(steps, rest, frozenset(joined))
    for side in rest.zip(steps):
        side[0].extend(record for record in side[1].records if (record.layer, record.slot) == (LOOP, "loss"))
    steps = steps.map(
        lambda step: replace(step, records=[r for r in step.records if (r.layer, r.slot) != (LOOP, "loss")])
    )
    return JoinedCalls(steps, rest, frozenset(joined), True)


def _with_repeats_merged(
    steps: Both[Step], paths: tuple[str, str], indexes: Both[_Inputs], left_alone: Both[list[Record]], merged: set[str]
) -> Both[Step]:
    """Merge calls of a layer by which a loop computes the same again, where the loops make other numbers of calls.

    An actor and a critic that share layers are called one after the other, or at once. The gradients of such calls add
    up. Calls that only one loop makes are left alone if no gradient comes to them.

    Args:
        indexes: the outputs of all layers of each step.
        left_alone, merged: get the records that are left alone, and the paths.
    """
    outputs = Both(*(_without_functions(index.get(path, {})) for index, path in zip(indexes, paths)))
    if not all(0 < len(side) <= _MOST_CALLS for side in outputs):
        return steps
    calls = outputs.map(lambda side: {call: [_Output(r, _norm(r)) for r in records] for call, records in side.items()})
    reference, candidate = calls.map(_repeats)
    numbers: Both[dict[int, int]] = Both({}, {})
    # Of calls that repeat others the nearest is the partner, too: later steps of two runs drift apart.
    least = _SAME_DATA if any(len(side) > 1 for side in chain(reference.values(), candidate.values())) else 0.0
    for first, repeats in reference.items():
        partner = _partner(calls.reference[first], {call: calls.candidate[call] for call in candidate}, least)
        if partner is not None:
            numbers.reference.update(dict.fromkeys(repeats, first))
            numbers.candidate.update(dict.fromkeys(candidate.pop(partner), first))
    if all(renumbered == {call: call for call in side} for renumbered, side in zip(numbers, outputs)):
        return steps
    records = steps.zip(Both(*paths)).map(lambda side: [r for r in side[0].records if r.layer == side[1]])
    learning = records.map(lambda side: {r.call for r in side if r.stage == "backward"})
    if not numbers.reference or not all(side <= renumbered.keys() for side, renumbered in zip(learning, numbers)):
        return steps
    merged |= {*paths}
    return Both(
        *(
            _merged(step, path, renumbered, alone)
            for step, path, renumbered, alone in zip(steps, paths, numbers, left_alone)
        )
    )


def _merged(step: Step, path: str, numbers: dict[int, int], left_alone: list[Record]) -> Step:
    """Return a step with calls of a layer merged and renumbered; what is left of them goes to ``left_alone``."""
    records_of_step: list[Record] = []
    groups: dict[tuple[str, str, int], list[Record]] = defaultdict(list)
    for record in step.records:
        if record.layer != path or record.stage in PARAMETER_STAGES or is_functional(record.slot):
            records_of_step.append(record)
        elif record.call in numbers:
            groups[record.stage, asked_output(record), numbers[record.call]].append(record)
        else:
            left_alone.append(record)
    for (stage, slot, number), records in groups.items():
        if any("@" in record.slot for record in records):  # gradients of several backwards do not all add up
            records.sort(key=lambda record: record.order)
            names = [f"{slot}@{nth}" if nth else slot for nth in range(len(records))]
            records_of_step += [replace(record, call=number, slot=name) for record, name in zip(records, names)]
            continue
        adds = stage == "backward" and len(records) > 1
        if adds and any(record.source.sketched for record in records):
            left_alone += records  # sketches do not add up
            continue
        source = Sum(tuple(record.source for record in records)) if adds else records[0].source
        records_of_step.append(replace(records[0], call=number, source=source))
        left_alone += [] if adds else records[1:]
    return replace(step, records=records_of_step)


def asked_output(record: Record) -> str:
    """Return the slot of the output that a gradient is of, without the number of a further gradient."""
    return record.slot.partition("@")[0]


class _Output(NamedTuple):
    """An output of a call, with its norm: most outputs have different norms."""

    record: Record
    norm: float

    def agrees(self, other: _Output) -> bool:
        return self.is_near(other) and inputs_agree(self.record, other.record)

    def is_near(self, other: _Output) -> bool:
        """Return True if the norms agree."""
        return abs(self.norm - other.norm) <= _SKETCHED * max(self.norm, other.norm)


def _norm(record: Record) -> float:
    """Return the norm of a tensor; NaN if there is only a sketch of the tensor that contains it."""
    if record.source.sketched:
        return math.nan if record.source.sketch is None else record.source.sketch.l2
    return float(np.linalg.norm(np.asarray(record.value, np.float64)))


def _repeats(calls: dict[int, list[_Output]]) -> dict[int, list[int]]:
    """Return the calls that give the same outputs, by the first of them."""
    groups: dict[int, list[int]] = {}
    for call, outputs in calls.items():
        first = next((k for k in groups if _same_outputs(calls[k], outputs)), call)
        groups.setdefault(first, []).append(call)
    return groups


def _without_functions(calls: Mapping[int, list[Record]]) -> dict[int, list[Record]]:
    """Return the outputs of a layer's calls without those of functions that it calls, which are numbered apart."""
    outputs = {call: [record for record in side if not is_functional(record.slot)] for call, side in calls.items()}
    return {call: records for call, records in outputs.items() if records}


def _same_outputs(first: list[_Output], second: list[_Output]) -> bool:
    return len(first) == len(second) and all(map(_Output.agrees, first, second))


def _partner(outputs: list[_Output], calls: Mapping[int, list[_Output]], least: float) -> int | None:
    """Return the call with the same outputs, or that with the nearest if their relative error is below `least`."""
    same = next((call for call, others in calls.items() if _same_outputs(outputs, others)), None)
    if same is not None:
        return same
    distances = {
        call: max(relative_error(output.record, other.record) for output, other in zip(outputs, others))
        for call, others in calls.items()
        if len(others) == len(outputs)
    }
    nearest = min(distances, key=distances.__getitem__, default=None)
    if nearest is not None and distances[nearest] < least:
        return nearest
    # Of sketches in another order of axes, the norm is known.
    alike = [
        call for call, others in calls.items() if len(others) == len(outputs) and all(map(_is_moved, outputs, others))
    ]
    return alike[0] if len(alike) == len(calls) == 1 else None


def _is_moved(output: _Output, partner: _Output) -> bool:
    """Return True if two sketched outputs may hold the same in another order of axes."""
    sketched = output.record.source.sketched and partner.record.source.sketched
    return sketched and output.is_near(partner) and sorted(output.record.shape) == sorted(partner.record.shape)


def _parts(many: list[list[Record]], few: list[list[Record]], agrees: float) -> tuple[int, list[range]]:
    """Return an axis and, for each of a few calls, the calls that take its parts along the axis; no ranges if none do.

    The calls follow each other in both loops, and their extents add up. Of a tensor in parts, one part has to agree.
    """
    shapes = [call[0].shape for call in many]
    for axis in range(max((len(call[0].shape) for call in few), default=0)):
        parts: list[range] = []
        for whole in few:
            start = end = parts[-1].stop if parts else 0
            shape = whole[0].shape
            missing = shape[axis] if axis < len(shape) else 0
            while end < len(many) and 0 < (extent := _extent(shapes[end], shape, axis)) <= missing:
                missing -= extent
                end += 1
            if missing or start == end or (end > start + 1 and not _is_one_batch(many[start:end], whole, axis, agrees)):
                break
            parts.append(range(start, end))
        if len(parts) == len(few) and parts and parts[-1].stop == len(many) > len(few):
            return axis, parts
    return 0, []


def _extent(part: Shape, whole: Shape, axis: int) -> int:
    """Return the extent of a part of a tensor along an axis: 1 if it lacks the axis, and 0 if it is no part."""
    others = whole[:axis] + whole[axis + 1 :]
    if part == others:
        return 1
    return part[axis] if len(part) == len(whole) and part[:axis] + part[axis + 1 :] == others else 0


def _inputs(step: Step) -> _Inputs:
    inputs: _Inputs = defaultdict(lambda: defaultdict(list))
    for record in step.records:
        if record.stage == "input" and record.layer != LOOP:
            inputs[record.layer][record.call].append(record)
    return inputs


def _outputs(step: Step, called: Collection[str]) -> _Inputs:
    """Return the outputs of layers that others call, of which no inputs are recorded; `called`: by the loop."""
    outputs: _Inputs = defaultdict(lambda: defaultdict(list))
    for record in step.records:
        if record.stage == "forward" and record.layer not in called:
            outputs[record.layer][record.call].append(record)
    return outputs


def backwards_agree(steps: Both[Step]) -> bool:
    """Return True if both loops run one backward for all calls: otherwise the calls are micro-batches."""
    return all(_backwards(step) <= 1 for step in steps)


def _backwards(step: Step) -> int:
    """Return the number of backwards of a step, or of its losses if the step has no trace."""
    if step.trace.functions:
        return step.trace.backwards
    return sum(record.layer == LOOP and record.slot == "loss" for record in step.records)


def _is_one_batch(many: list[list[Record]], single: list[Record], axis: int, agrees: float) -> bool:
    """Return True if tensors of several calls, one after the other along an axis, are those of a single call."""
    if any(len(call) != len(single) for call in many):
        return False
    return all(_are_rows([call[k] for call in many], record, axis, agrees) for k, record in enumerate(single))


def _are_rows(parts: list[Record], whole: Record, axis: int, agrees: float) -> bool:
    """Return True if tensors have the shapes of the parts of another one, and the values of one part agree."""
    extents = [_extent(part.shape, whole.shape, axis) for part in parts]
    if axis >= len(whole.shape) or 0 in extents or sum(extents) != whole.shape[axis]:
        return False
    sketches = [part.source.sketch for part in parts]
    if whole.source.sketch is not None or any(sketch is not None for sketch in sketches):
        if whole.source.sketch is None or any(sketch is None for sketch in sketches):
            return False
        # A sketch shows no rows, but the norms add up.
        size = whole.source.sketch.l2
        total = math.sqrt(sum(sketch.l2**2 for sketch in sketches if sketch is not None))
        return abs(total - size) <= max(agrees, _SKETCHED) * size
    expected = np.asarray(whole.value, np.float64)
    for part, rows in zip(parts, np.split(expected, np.cumsum(extents)[:-1], axis)):
        distance = float(np.linalg.norm(np.asarray(part.value, np.float64).reshape(rows.shape) - rows))
        if distance <= agrees * float(np.linalg.norm(rows)):
            return True
    return False


def _join(
    step: Step, path: str, calls: list[list[Record]], parts_of: list[range], along: int
) -> tuple[list[Record], list[Record]]:
    """Return the records of a step with calls of a layer joined, and those that cannot be joined.

    Args:
        calls: the inputs of each call.
        parts_of: for each call of the other side, the calls that take its parts.
        along: axis of the inputs along which they are parts.
    """
    begins = np.array([min(record.order for record in call) for call in calls])
    axes = max(len(call[0].shape) for call in calls)
    sizes = [call[0].shape[along] if len(call[0].shape) == axes else 1 for call in calls]
    stacked = along or any(len(call[0].shape) < axes for call in calls)
    kept: list[Record] = []
    rest: list[Record] = []
    inside: list[Record] = []
    for record in step.records:
        outside = record.stage in PARAMETER_STAGES or record.layer == LOOP or not _is_inside(record.layer, path)
        (kept if outside else inside).append(record)
    groups, others = records_by_call(inside, begins, ("input", "forward"))
    kept += others
    #: Calls of each layer, inside of the calls before.
    before: dict[str, int] = defaultdict(int)
    for numbers in parts_of:
        counts: dict[str, int] = defaultdict(int)
        for (layer, *_, nth), records in groups.items():
            parts = [records[number] for number in numbers if number in records]
            if not parts:
                continue
            counts[layer] = max(counts[layer], nth + 1)
            extents = [sizes[number] for number in numbers]
            shapes = [part.shape for part in parts]
            axis = None
            if len(parts) == len(extents):
                axis = _inner_axis(shapes, extents, along) if stacked else _axis(shapes, extents)
            if len(parts) == len(numbers) == 1 and parts[0].call == before[layer] + nth:
                kept += parts
            elif axis is None or any(part.source.sketched or part.part is not None for part in parts):
                rest += parts
            else:
                kept.append(_joined(parts, axis, before[layer] + nth))
        for layer, count in counts.items():
            before[layer] += count
    return kept, rest


def _joined(parts: list[Record], axis: int, call: int) -> Record:
    axes = max(len(part.shape) for part in parts)
    shape = next(list(part.shape) for part in parts if len(part.shape) == axes)
    extents = [part.shape[axis] if len(part.shape) == axes else 1 for part in parts]
    shape[axis] = sum(extents)
    calls = tuple((part.call, extent) for part, extent in zip(parts, extents))
    source = _Rows(tuple(part.source for part in parts), axis, axes, calls)
    # Calls of a loop's later turns depend on what earlier turns gave: the whole is there after the last of them.
    complete = max if parts[0].stage != "backward" else min
    order = complete(part.order for part in parts)
    return replace(parts[0], call=call, order=order, shape=tuple(shape), source=source)


def records_by_call(
    records: Iterable[Record], begins: np.ndarray, stages: Collection[str]
) -> tuple[dict[tuple[str, str, str, int], dict[int, Record]], list[Record]]:
    """Group the records of layers by the calls of the model that contain them.

    Args:
        records: the records.
        begins: place in the step's order at which each call of the model begins, ascending.
        stages: stages whose first record begins a call of a layer.

    Returns:
        The records by number of the model's call, for each layer, stage, slot and number of the layer's call within
        the model's; and records of calls that do not begin here.
    """
    groups: dict[tuple[str, str, str, int], dict[int, Record]] = defaultdict(dict)
    others: list[Record] = []
    numbers: dict[tuple[str, int], tuple[int, int]] = {}
    counts: dict[tuple[str, int], int] = defaultdict(int)
    for record in sorted(records, key=lambda record: record.order):
        site = record.layer, record.call
        if site not in numbers and record.stage in stages:
            call = int(np.searchsorted(begins, record.order, "right")) - 1
            numbers[site] = call, counts[record.layer, call]
            counts[record.layer, call] += 1
        if site in numbers:
            call, nth = numbers[site]
            groups[record.layer, record.stage, record.slot, nth][call] = record
        else:
            others.append(record)
    return groups, others


def _is_inside(layer: str, path: str) -> bool:
    return path == ROOT or layer == path or layer.startswith(f"{path}.")


def _axis(shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> int | None:
    """Return the axis with the samples: its extent is that of the batch, or the same multiple of it, in each call."""
    if len({len(shape) for shape in shapes}) != 1:
        return None
    for axis in range(len(shapes[0])):
        others = {shape[:axis] + shape[axis + 1 :] for shape in shapes}
        multiples = {divmod(shape[axis], size) for shape, size in zip(shapes, sizes)}
        if len(others) == 1 and len(multiples) == 1 and next(iter(multiples))[1] == 0 and shapes[0][axis]:
            return axis
    return None


def _inner_axis(shapes: Sequence[Shape], extents: Sequence[int], axis: int) -> int | None:
    """Return the axis along which the inputs are parts, if the tensors are such parts, too."""
    axes = max(map(len, shapes))
    whole = next(shape for shape in shapes if len(shape) == axes)
    return axis if all(_extent(shape, whole, axis) == n for shape, n in zip(shapes, extents)) else None


@dataclass(frozen=True, slots=True)
class _First(DerivedSource):
    """Tensor source of the first places of another one's sequences."""

    whole: TensorSource
    #: Number of places of a sequence in the source, and here.
    lengths: tuple[int, int]
    #: Axes of the places; empty if the first axis has the places of all sequences, one after the other.
    axes: Shape

    def read(self) -> np.ndarray:
        return self.cut(self.whole.read())

    def cut(self, values: np.ndarray) -> np.ndarray:
        """Return the first places of the sequences of a tensor of the source's shape."""
        length, count = self.lengths
        for axis in self.axes:
            values = np.take(values, np.arange(count), axis)
        if not self.axes:
            values = values.reshape(-1, length, *values.shape[1:])[:, :count].reshape(-1, *values.shape[1:])
        return values


def without_evaluations(steps: Both[Step]) -> tuple[Both[Step], Both[list[Record]], dict[int, Record]]:
    """Leave out calls without gradients that the other loop makes in evaluation mode, in which none are recorded.

    A loop that does not switch its model to evaluation mode is compared all the same: its mode is a difference of its
    own, and changes the values only if layers draw or keep statistics.

    Returns:
        The steps, the records left out, and the original of each record whose call has another number now, by id.
    """
    left_out: Both[list[Record]] = Both([], [])
    originals: dict[int, Record] = {}
    for swapped in (False, True):
        step, partner_step = steps.swapped(swapped)
        evaluated = sum(e.calls for e in partner_step.evaluations) - sum(e.calls for e in step.evaluations)
        if not step.number and not evaluated:  # a recording begins with the first call in training mode
            evaluated = _calls_by_loop(step) - _calls_by_loop(partner_step)
        if evaluated <= 0:
            continue
        learned = {(r.layer, r.call) for r in step.records if r.stage == "backward" and r.layer != LOOP}
        calls: dict[str, set[int]] = defaultdict(set)
        for record in step.records:
            if record.stage in ("input", "forward") and record.layer != LOOP:
                calls[record.layer].add(record.call)
        idle = {
            layer: {call for call in numbers if (layer, call) not in learned}
            for layer, numbers in calls.items()
            if any((layer, call) in learned for call in numbers)
        }
        called = {r.layer for r in step.records if r.stage == "input"}
        if sum(len(idle.get(layer, ())) for layer in called) != evaluated:
            continue
        left_inputs = [r for r in step.records if r.stage == "input" and r.call in idle.get(r.layer, ())]
        partners = [record for record in partner_step.records if record.stage == "input"]
        if all(any(inputs_agree(record, partner) for partner in partners) for record in left_inputs):
            continue  # calls of this batch: one loop computes again what the other one keeps
        remaining: list[Record] = []
        for record in step.records:
            idle_calls = idle.get(record.layer, ()) if record.stage not in PARAMETER_STAGES else ()
            if record.call in idle_calls:
                left_out.swapped(swapped).reference.append(record)
                continue
            before = sum(call < record.call for call in idle_calls)
            remaining.append(replace(record, call=record.call - before) if before else record)
            if before:
                originals[id(remaining[-1])] = record
        steps = Both(replace(step, records=remaining), partner_step).swapped(swapped)
    return steps, left_out, originals


def _calls_by_loop(step: Step) -> int:
    """Return the number of calls that a step's loop makes."""
    return len({(r.layer, r.call) for r in step.records if r.stage == "input" and r.layer != LOOP})


def with_equal_lengths(steps: Both[Step], pairs: Sequence[tuple[str, str]]) -> tuple[Both[Step], Both[list[Record]]]:
    """Cut the tensors of one loop to the places of the other, if its model is given longer sequences that begin alike.

    One author gives a language model all tokens and leaves the last scores out of the loss, another one leaves the last
    token out. A loss that is of the last places, too, makes a difference: the first gradient, or the labels, show it.

    Args:
        pairs: paths of the paired layers.

    Returns:
        The steps, and the records that cannot be cut, as there are only sketches of them, with their partners.
    """
    left_alone: Both[list[Record]] = Both([], [])
    lengths = _lengths(steps, pairs)
    if lengths is None:
        return steps, left_alone
    swapped = lengths.reference < lengths.candidate
    (longer, shorter), (length, count) = steps.swapped(swapped), lengths.swapped(swapped)
    partners = {both.reference: both.candidate for both in (Both(*paths).swapped(swapped) for paths in pairs)}
    others = {(r.layer, r.stage, r.slot, r.call): r for r in shorter.records}
    uncut: list[set[int]] = [set(), set()]
    cut: list[Record] = []
    is_seen = False
    for record in sorted(longer.records, key=lambda record: record.order):
        partner = others.get((partners.get(record.layer, ""), record.stage, record.slot, record.call))
        is_inside = record.layer != LOOP and record.stage not in PARAMETER_STAGES
        axes = _axes_of_places(record, partner, length, count) if is_inside else None
        if axes is None:
            cut.append(record)
        elif record.source.sketched or record.part is not None:
            uncut[0].add(id(record))
            uncut[1].update([] if partner is None else [id(partner)])
        else:
            begin = _begin(record, (length, count), axes)
            if record.stage == "backward" and not is_seen:
                if not math.isclose(_norm(record), _norm(begin), rel_tol=_AGREES):
                    return steps, left_alone  # the loss is of all places
                is_seen = True
            cut.append(begin)
    if not is_seen and not _has_labels(steps, count):
        return steps, left_alone
    alone = left_alone.swapped(swapped)
    alone.reference.extend(record for record in longer.records if id(record) in uncut[0])
    alone.candidate.extend(record for record in shorter.records if id(record) in uncut[1])
    kept = [record for record in shorter.records if id(record) not in uncut[1]]
    return Both(replace(longer, records=cut), replace(shorter, records=kept)).swapped(swapped), left_alone


def _begin(record: Record, lengths: tuple[int, int], axes: Shape) -> Record:
    """Return the first places of a tensor's sequences; `lengths` and `axes` as in `_First`."""
    length, count = lengths
    shape = tuple(count if k in axes else extent for k, extent in enumerate(record.shape))
    shape = shape if axes else (shape[0] // length * count, *shape[1:])
    return replace(record, shape=shape, source=_First(record.source, lengths, axes))


def cut_of(record: Record | None) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return the function that cuts a tensor of a record's whole sequences; `None` if the record was not cut."""
    return record.source.cut if record is not None and isinstance(record.source, _First) else None


def lengths_of(like: Both[Record | None]) -> Both[int]:
    """Return the numbers of places of both sides' sequences, of which one was cut; ones if none was cut."""
    for swapped in (False, True):
        sample = like.swapped(swapped).reference
        if sample is not None and isinstance(sample.source, _First):
            return Both(*sample.source.lengths).swapped(swapped)
    return Both(1, 1)


def with_places_of(records: Both[Record], like: Both[Record | None]) -> Both[Record]:
    """Cut a tensor of a trace to the places of the other side's tensor, if the recorded tensors of its side were cut.

    Args:
        like: recorded tensors of both sides.
    """
    lengths = lengths_of(like)
    swapped = lengths.reference < lengths.candidate
    (record, partner), (length, count) = records.swapped(swapped), lengths.swapped(swapped)
    if length == count or record.shape == partner.shape or record.source.sketched:
        return records
    axes = _axes_of_places(record, partner, length, count)
    return records if axes is None else Both(_begin(record, (length, count), axes), partner).swapped(swapped)


def _has_labels(steps: Both[Step], count: int) -> bool:
    """Return True if the loss functions of both steps get as many labels, one for each place of the shorter sequences.

    Args:
        count: number of places of a shorter sequence.
    """
    numbers = steps.map(
        lambda step: sorted(
            math.prod(record.shape)
            for record in step.records
            if record.layer == LOOP and record.stage == "loss" and record.slot.endswith((".labels", ".target"))
        )
    )
    integers = (record for step in steps for records in _integers(step).values() for record in records)
    sizes = {math.prod(record.shape) for record in integers}
    return numbers.reference == numbers.candidate and any(k in sizes and k % count == 0 for k in numbers.reference)


def _lengths(steps: Both[Step], pairs: Sequence[tuple[str, str]]) -> Both[int] | None:
    """Return the lengths of integer sequences that begin alike, of which one is longer; `None` if there are none."""
    integers = steps.map(_integers)
    for paths in pairs if all(integers) else ():
        for reference, candidate in product(*(side.get(path, ()) for side, path in zip(integers, paths))):
            differing = [k for k, extents in enumerate(zip(reference.shape, candidate.shape)) if len({*extents}) > 1]
            if len(reference.shape) != len(candidate.shape) or len(differing) != 1:
                continue
            lengths = Both(reference.shape[differing[0]], candidate.shape[differing[0]])
            if reference.source.sketched or candidate.source.sketched:
                return lengths if _has_labels(steps, min(lengths)) else None
            places = np.arange(min(lengths))
            begins = [np.take(np.asarray(record.value), places, differing[0]) for record in (reference, candidate)]
            if len(places) > 1 and np.array_equal(begins[0], begins[1]):
                return lengths
    return None


def _integers(step: Step) -> dict[str, list[Record]]:
    """Return the inputs of layers that are integers, by path of the layer."""
    integers: dict[str, list[Record]] = defaultdict(list)
    for record in step.records:
        if record.stage == "input" and record.layer != LOOP and "int" in record.dtype:
            integers[record.layer].append(record)
    return integers


def _axes_of_places(record: Record, partner: Record | None, length: int, count: int) -> Shape | None:
    """Return the axes of a tensor along which it has the places of longer sequences, where its partner has fewer.

    Returns:
        No axes if the first one has the places of all sequences, one after the other; `None` if nothing is to be cut.
    """
    shape = None if partner is None else partner.shape
    if shape is None and not (record.stage == "input" and "int" in record.dtype):
        return None
    if shape is not None and len(shape) == len(record.shape) and shape != record.shape:
        if all(extent == other or (extent, other) == (length, count) for extent, other in zip(record.shape, shape)):
            return tuple(k for k, extent in enumerate(shape) if extent != record.shape[k])
        if (record.shape[0] // length * count, *record.shape[1:]) == shape and record.shape[0] % length == 0:
            return ()
    axes = tuple(k for k, extent in enumerate(record.shape) if extent == length)
    cut = sorted(count if extent == length else extent for extent in record.shape)
    return axes if axes and (shape is None or cut == sorted(shape)) else None


# Channels first and last, sequence and batch first, heads before and after the sequence.
_AXES: dict[int, tuple[Shape, ...]] = {
    3: ((0, 2, 1), (1, 0, 2)),
    4: ((0, 3, 1, 2), (0, 2, 3, 1), (0, 2, 1, 3)),
    5: ((0, 4, 1, 2, 3), (0, 2, 3, 4, 1)),
}


def layout_between(reference: Shape, candidate: Shape) -> Layout:
    """Return the only layout that brings a candidate's tensor into the reference's shape; `SAME` if none is
    needed or certain.
    """
    if reference == candidate:
        return SAME
    if len(reference) == len(candidate):
        swapped = [axes for axes in _AXES.get(len(candidate), ()) if _after(candidate, axes) == reference]
        if swapped:
            return Layout((swapped[0],)) if len(swapped) == 1 else SAME
    if math.prod(reference) != math.prod(candidate):
        return BROADCAST if _same_for_all(reference, candidate) else SAME
    if without_ones(reference) == without_ones(candidate):
        return RESHAPED
    if len(reference) == len(candidate):
        return SAME
    ways = set(_flattened(reference, candidate))
    return ways.pop() if len(ways) == 1 else SAME


def square_layout(shape: Shape, usual: Iterable[Layout]) -> Layout:
    """Return the layout of a tensor whose swapped axes are equally long: the layout of the run's other tensors."""
    candidates = [
        layout
        for layout in set(usual)
        for axes in layout.steps
        if len(layout.steps) == 1 and isinstance(axes, tuple) and _after(shape, axes) == shape
    ]
    return candidates[0] if len(candidates) == 1 else SAME


def _same_for_all(reference: Shape, candidate: Shape) -> bool:
    few, many = sorted((reference, candidate), key=lambda shape: (len(shape), math.prod(shape)))
    if len(few) == len(many):
        return len(few) > 1 and few[0] == 1 and few[1:] == many[1:]
    return len(few) > 0 and few == many[1:]


def _flattened(reference: Shape, candidate: Shape) -> Iterable[Layout]:
    """Yield layouts between a picture and its flattened form: (N, C, H, W) against (N, H * W, C), or (N, C * H * W)."""
    if len(candidate) == 4 and len(reference) == 3:
        n, c, h, w = candidate
        if reference == (n, h * w, c):
            yield Layout(((0, 2, 3, 1), "reshape"))
        if reference == (n, c, h * w):
            yield RESHAPED
    elif len(candidate) == 3 and len(reference) == 4:
        n, c, h, w = reference
        if candidate == (n, h * w, c):
            yield Layout(((0, 2, 1), "reshape"))
        if candidate == (n, c, h * w):
            yield RESHAPED
    if candidate[-1] == reference[-1]:
        yield RESHAPED  # (batch, height, width, features) against (batch, places, features), or all in one row
    if candidate[0] == reference[0] and 2 in (len(candidate), len(reference)):
        yield RESHAPED  # (batch, ...) against (batch, all the rest)


def _after(shape: Shape, axes: Shape) -> Shape:
    return tuple(shape[axis] for axis in axes) if len(axes) == len(shape) else ()


# Largest relative error of two inputs that are the same: more than rounding of one step, less than other samples.
_INPUTS_AGREES = 1e-3


def inputs_agree(reference: Record, candidate: Record) -> bool:
    """Return True if two inputs of models are the same but for rounding.

    Raises:
        PadiffError: the values can no longer be read.
    """
    return relative_error(reference, candidate) <= _INPUTS_AGREES


def relative_error(reference: Record, candidate: Record) -> float:
    """Return the norm of the difference of two tensors over that of the first; infinite if they are no partners.

    Raises:
        PadiffError: the values can no longer be read.
    """
    if sorted(reference.shape) != sorted(candidate.shape) or reference.source.sketched != candidate.source.sketched:
        return math.inf
    sketches = reference.source.sketch, candidate.source.sketch
    if sketches[0] is not None and sketches[1] is not None:
        if sketches[0].size != sketches[1].size or sketches[0].transposed != sketches[1].transposed:
            return math.inf
        error, size = float(np.linalg.norm(sketches[0].errors(sketches[1]))), sketches[0].l2
    else:
        layout = layout_between(reference.shape, candidate.shape)
        values = np.asarray(layout.apply(candidate.value, reference.shape), np.float64)
        expected = np.asarray(reference.value, np.float64)
        if values.shape != expected.shape or not np.isfinite(values).all():
            return math.inf
        error, size = float(np.linalg.norm(values - expected)), float(np.linalg.norm(expected))
    return error / size if size else math.inf if error else 0.0
