"""Calls of a model on parts of a batch, joined: one loop calls it once with the whole batch, another loop twice."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from padiff.records import LOOP, PARAMETER_STAGES, ROOT, Both, Record, Step
from padiff.records.sources import TensorSource

# Largest relative error of inputs that are the same, and of the norms of sketched ones, which are estimates.
_AGREES, _SKETCHED = 1e-6, 1e-3

#: Inputs of a loop's calls, by path of the layer and number of the call.
_Inputs = dict[str, dict[int, list[Record]]]


@dataclass(frozen=True)
class JoinedCalls:
    """Two steps with as many calls of each model.

    Attributes:
        steps: the steps; records of joined calls hold the rows of all of them.
        rest: records of joined calls that cannot be joined: sketches, and tensors without a row for each sample.
        paths: outermost layers whose calls were joined, of both sides.
    """

    steps: Both[Step]
    rest: Both[list[Record]]
    paths: frozenset[str] = frozenset()

    def leaves_alone(self, record: Record) -> bool:
        """Return True if a record without a partner is no difference: one of a call whose partners are joined."""
        if record.stage in PARAMETER_STAGES or record.layer == LOOP:
            return False
        return any(_is_inside(record.layer, path) for path in self.paths)


@dataclass(frozen=True, slots=True)
class _Rows(TensorSource):
    """Tensor source of the rows of several sources, along one axis."""

    parts: tuple[TensorSource, ...]
    axis: int
    #: Number of each part's call, and its extent along the axis.
    calls: tuple[tuple[int, int], ...] = ()

    @property
    def inside(self) -> Sequence[TensorSource]:
        return self.parts

    def made_of(self, inside: Sequence[TensorSource]) -> TensorSource:
        return replace(self, parts=tuple(inside))

    def read(self) -> np.ndarray:
        return np.concatenate([part.read() for part in self.parts], self.axis)


def calls_of(record: Record) -> tuple[tuple[int, int], ...]:
    """Return the calls whose rows a record holds, with the number of rows of each; empty if the rows are not along the
    first axis.
    """
    source = record.source
    if not isinstance(source, _Rows):
        return ((record.call, record.shape[0] if record.shape else 1),)
    return () if source.axis else source.calls


def joined_calls(steps: Both[Step], pairs: Sequence[tuple[str, str]]) -> JoinedCalls:
    """Join the calls of an outermost layer that the other side calls once, with the inputs of all of them in one batch.

    Args:
        pairs: paths of the paired layers.

    Raises:
        PadiffError: the values of inputs cannot be read.
    """
    rest: Both[list[Record]] = Both([], [])
    inputs = steps.map(_inputs)
    joined: set[str] = set()
    for paths in pairs:
        calls = Both(*(side.get(path, {}) for side, path in zip(inputs, paths)))
        if sorted(map(len, calls))[0] != 1 or max(map(len, calls)) < 2 or not backwards_agree(steps):
            continue
        swapped = len(calls.reference) == 1
        many, few = calls.swapped(swapped)
        (single,) = few.values()
        if not _is_one_batch(list(many.values()), single):
            continue
        path = paths[swapped]
        records, rest_of_side = _join(steps.swapped(swapped).reference, path, many)
        own, other = steps.swapped(swapped)
        steps = Both(replace(own, records=records), other).swapped(swapped)
        rest.swapped(swapped).reference.extend(rest_of_side)
        joined |= {*paths}
    return JoinedCalls(steps, rest, frozenset(joined))


def _inputs(step: Step) -> _Inputs:
    inputs: _Inputs = defaultdict(lambda: defaultdict(list))
    for record in step.records:
        if record.stage == "input" and record.layer != LOOP:
            inputs[record.layer][record.call].append(record)
    return inputs


def backwards_agree(steps: Both[Step]) -> bool:
    """Return True if both loops run one backward for all calls: otherwise the calls are micro-batches."""
    return all(_backwards(step) <= 1 for step in steps)


def _backwards(step: Step) -> int:
    """Return the number of backwards of a step, or of its losses if the step has no trace."""
    if step.trace.functions:
        return sum(call.function == "backward" for call in step.trace.calls)
    return sum(record.layer == LOOP and record.slot == "loss" for record in step.records)


def _is_one_batch(many: list[list[Record]], single: list[Record]) -> bool:
    """Return True if the inputs of several calls, one below the other, are those of a single call."""
    if any(len(call) != len(single) for call in many):
        return False
    return all(_are_rows([call[k] for call in many], record) for k, record in enumerate(single))


def _are_rows(parts: list[Record], whole: Record) -> bool:
    if not whole.shape or any(part.shape[1:] != whole.shape[1:] for part in parts):
        return False
    if sum(part.shape[0] for part in parts) != whole.shape[0]:
        return False
    sketches = [part.source.sketch for part in parts]
    if whole.source.sketch is not None or any(sketch is not None for sketch in sketches):
        if whole.source.sketch is None or any(sketch is None for sketch in sketches):
            return False
        # A sketch shows no rows, but the norms add up.
        size = whole.source.sketch.l2
        total = math.sqrt(sum(sketch.l2**2 for sketch in sketches if sketch is not None))
        return abs(total - size) <= _SKETCHED * size
    rows = np.concatenate([np.asarray(part.value, np.float64) for part in parts])
    expected = np.asarray(whole.value, np.float64)
    return float(np.linalg.norm(rows - expected)) <= _AGREES * float(np.linalg.norm(expected))


def _join(step: Step, path: str, calls: dict[int, list[Record]]) -> tuple[list[Record], list[Record]]:
    """Return the records of a step with the calls of a layer in one, and those that cannot be joined."""
    begins = np.array([min(record.order for record in call) for call in calls.values()])
    sizes = [call[0].shape[0] for call in calls.values()]
    kept: list[Record] = []
    rest: list[Record] = []
    groups: dict[tuple[str, str, str, int], dict[int, Record]] = defaultdict(dict)
    numbers: dict[tuple[str, int], tuple[int, int]] = {}
    counts: dict[tuple[str, int], int] = defaultdict(int)
    for record in sorted(step.records, key=lambda record: record.order):
        if record.stage in PARAMETER_STAGES or record.layer == LOOP or not _is_inside(record.layer, path):
            kept.append(record)
            continue
        site = record.layer, record.call
        if site not in numbers and record.stage in ("input", "forward"):
            call = int(np.searchsorted(begins, record.order, "right")) - 1
            numbers[site] = call, counts[record.layer, call]
            counts[record.layer, call] += 1
        if site in numbers:
            call, nth = numbers[site]
            groups[record.layer, record.stage, record.slot, nth][call] = record
        else:
            kept.append(record)
    for (*_, nth), records in groups.items():
        parts = [records[call] for call in sorted(records)]
        axis = _axis([part.shape for part in parts], sizes) if len(parts) == len(sizes) else None
        if axis is None or any(part.source.sketched or part.part is not None for part in parts):
            rest += parts
            continue
        shape = list(parts[0].shape)
        shape[axis] = sum(part.shape[axis] for part in parts)
        source = _Rows(
            tuple(part.source for part in parts), axis, tuple((part.call, part.shape[axis]) for part in parts)
        )
        kept.append(replace(parts[0], call=nth, shape=tuple(shape), source=source))
    return kept, rest


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
