"""Measurement of one pair: the distance of its two tensors or sketches, and floors of that distance."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from padiff.compare.judge.limits import COARSENESS, GRAD_FLOOR, LEAST_FLOOR, ROUNDING, UPDATE_FLOOR, coarse
from padiff.compare.measure.operands import Arrays, Sketches, operands
from padiff.compare.measure.sums import CHUNK, Sums, kernel_for, wide
from padiff.pair.merge_ranks import as_held, replicas_of
from padiff.records import (
    LOOP,
    SAME,
    SIDES,
    UNSCALED,
    Both,
    Diff,
    Figures,
    Float64Reference,
    Kind,
    Pair,
    Problem,
    Record,
    Step,
)
from padiff.records.recorded import MEASURED_STAGES, Floors
from padiff.records.step_diffs import StepDiffs
from padiff.sketches.sketch import BUCKETS, ELEMENTS, SPREAD, Sketch

# Smallest size at which a few elements may be left out, and one in how many elements may be left out.
_MANY, _FEW = 1000, 20_000
# Number of groups whose maxima are compared to find the largest elements.
_GROUPS = 1024
_TINY = 5e-324
# One in this many samples may be left out.
_SAMPLES = 8
# Relative L2 error from which on the error without a few elements is measured, which takes as long again. Smaller
# errors are within every limit of float32; float64's limits are smaller.
_BULK_FROM = {"float64": 1e-4}
_BULK_ELSE = 1e-3


def measured(arrays: Arrays, stage: str, dtype: str, elementwise: tuple[float, float] | None) -> Figures:
    """Return the figures of two arrays, as `figures_of`, plus the error of the bulk of their elements where limits
    need it.

    Args:
        stage, dtype: stage and dtype of the records.
    """
    figures = figures_of(arrays, elementwise)
    little = _BULK_FROM.get(dtype, _BULK_ELSE) * figures.reference_l2
    if stage in ("backward", "update") and figures.size >= _MANY and figures.l2 > little:
        figures = replace(figures, bulk_l2=_bulk_l2(arrays, by_sample=stage == "backward"))
    return figures


def _bulk_l2(arrays: Arrays, by_sample: bool) -> float:
    """Return ``||c - r||`` without the largest elements (four, and one in `_FEW`), or without the worst samples.

    Where rounding moves a value across the kink of a ReLU, or to the other of two nearly equal maxima of a pool, single
    elements of the gradient differ completely though both sides are right; and where an element of a gradient is
    rounding noise, an adaptive optimizer makes a full-size update of its sign.
    """
    reference, candidate = arrays.reference, arrays.candidate
    left_out = few(reference.size)
    by_sample = by_sample and reference.shape[0] >= _SAMPLES
    samples = np.zeros(reference.shape[0] if by_sample else 1)
    each = reference.size // len(samples)
    largest, bulk = np.zeros(left_out), 0.0
    with np.errstate(all="ignore"):
        for start, r, c in _chunks(reference, candidate, each if by_sample else 1):
            r, c, _ = wide(r, c, arrays.scales)
            squares = np.square(np.abs(np.subtract(c, r, out=c)) if c.dtype.kind == "c" else np.subtract(c, r, out=c))
            if not math.isfinite(np.add.reduce(squares)):
                # Positions that are not finite are left out, as in the other figures.
                squares[~np.isfinite(squares)] = 0.0
            if by_sample:
                first = start // each
                if squares.size < each:
                    samples[first] += np.add.reduce(squares)
                else:
                    samples[first : first + squares.size // each] = squares.reshape(-1, each).sum(axis=1)
            # The largest squares are added up separately, not subtracted from a sum that they may dwarf.
            large = np.flatnonzero(squares >= max(largest[0], _among_largest(squares, left_out)))
            if large.size:
                largest = np.concatenate([largest, squares[large]])
                squares[large] = 0.0
                largest.partition(large.size)
                bulk += float(np.add.reduce(largest[: large.size]))
                largest = largest[large.size :]
            bulk += float(np.add.reduce(squares))
    if by_sample:
        # A normalisation's backward spreads one such element over its whole sample.
        samples.sort()
        bulk = min(bulk, float(samples[: -(len(samples) // _SAMPLES)].sum()))
    return math.sqrt(bulk)


def few(elements: int) -> int:
    """Return the number of a tensor's elements that may differ completely though both sides are right."""
    return 4 + elements // _FEW


def _among_largest(values: np.ndarray, count: int) -> float:
    """Return a positive number that ``count`` of the values reach, and not many more.

    For few values the smallest positive number is returned, which all other positive values reach.
    """
    rows = values.size // _GROUPS
    if rows == 0 or count > _GROUPS:
        return _TINY
    # Exactly `count` groups have a maximum that reaches the number.
    tops = values[: rows * _GROUPS].reshape(rows, _GROUPS).max(axis=0)
    tops.partition(_GROUPS - count)
    return max(float(tops[_GROUPS - count]), _TINY)


def figures_of(arrays: Arrays, elementwise: tuple[float, float] | None = None) -> Figures:
    """Return the figures of two arrays of the same shape.

    Positions that are not finite on one side or both are left out of norms and means. Equal infinities, and NaN on both
    sides, count as equal; other such positions are counted in ``nonfinite``. Different integers differ even if they are
    equal in float64.

    Args:
        elementwise: ``(atol, rtol)``: count elements with ``|c - r| > atol + rtol * |r|`` (numpy.isclose's formula).
    """
    reference, candidate, scales = arrays.reference, arrays.candidate, arrays.scales
    if reference.size == 0:
        return Figures(size=0)
    shape = reference.shape
    total = _sums(arrays, elementwise)
    index = _index(total.worst, shape)
    return Figures(
        max_abs=total.max_abs,
        max_rel=total.max_rel,
        mean_abs=total.sum_abs / total.finite if total.finite else 0.0,
        mean_reference=total.sum_reference / total.finite if total.finite else 0.0,
        l2=math.sqrt(total.squares),
        reference_l2=math.sqrt(total.reference_squares),
        candidate_l2=math.sqrt(total.candidate_squares),
        size=reference.size,
        index=index,
        values=Both(_scalar(reference[index], scales.reference), _scalar(candidate[index], scales.candidate)),
        mismatched=total.mismatched,
        nonfinite=total.nonfinite,
        overflowed=total.overflowed,
    )


def _index(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the multi-dimensional index of the element at a flat, row-major position."""
    if len(shape) == 1:
        return (place,)
    # numpy.unravel_index takes longer than all the rest of a small tensor's figures.
    index = []
    for extent in reversed(shape):
        place, offset = divmod(place, extent)
        index.append(offset)
    return tuple(reversed(index))


def _sums(arrays: Arrays, elementwise: tuple[float, float] | None) -> Sums:
    reference, candidate, scales = arrays.reference, arrays.candidate, arrays.scales
    plain = elementwise is None and (scales is UNSCALED or scales == UNSCALED)
    kernel = kernel_for(reference, candidate) if plain else None
    if kernel is not None:
        total = Sums(reference.size)
        if reference.flags.c_contiguous and candidate.flags.c_contiguous:
            # Contiguous arrays are one chunk: the compiled loop needs no buffers.
            if total.add_compiled(kernel, reference.reshape(-1), candidate.reshape(-1), 0):
                return total
        elif all(total.add_compiled(kernel, r, c, start) for start, r, c in _chunks(reference, candidate)):
            return total
    total = Sums(reference.size)
    with np.errstate(all="ignore"):
        for start, r, c in _chunks(reference, candidate):
            total.add(start, r, c, elementwise, scales)
    return total


def _chunks(
    reference: np.ndarray, candidate: np.ndarray, each: int = 1, most: int = CHUNK
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield pieces that fit into the cache: the position of the first element, and both sides' elements, row by row.

    Args:
        each: pieces have a whole multiple of this number of elements, or lie within one multiple.
        most: largest number of elements of a piece.
    """
    if reference.size <= most and each == 1:
        yield 0, reference.ravel(), candidate.ravel()
        return
    blocks = [(0, reference, candidate)]
    if not (reference.flags.c_contiguous and candidate.flags.c_contiguous):
        # In slices along the first axis, so that a non-contiguous tensor is never copied as a whole.
        row = reference.size // len(reference)
        rows = max(1, most // row)
        blocks = [(k * row, reference[k : k + rows], candidate[k : k + rows]) for k in range(0, len(reference), rows)]
    length = most // each * each if each <= most else most
    for offset, *block in blocks:
        r, c = (part.ravel() for part in block)
        piece = min(each, r.size) if each > most else r.size
        for begin in range(0, r.size, piece):
            for start in range(begin, min(begin + piece, r.size), length):
                end = min(start + length, begin + piece)
                yield offset + start, r[start:end], c[start:end]


def _scalar(value: np.generic, scale: float) -> float:
    return float(abs(value)) if value.dtype.kind == "c" else float(value) / scale  # type: ignore[arg-type]


# Share of the norm that may differ by chance between samples of one tensor at different places. Norms of outputs of
# convolutions, whose channels differ in size, were measured a third apart, channels first against channels last.
_CHANCE = 0.5


def estimated(sketches: Sketches, elementwise: tuple[float, float] | None) -> Figures:
    """Return the figures of two sketches.

    If both sample the same elements in the same order, the projections estimate the L2 error (``basis`` is
    ``sketches``). Otherwise norms and means bound the error from below (``moments``).
    """
    reference, candidate = sketches.reference, sketches.candidate
    figures = _estimated(sketches, elementwise) if sketches.aligned else _bounded(sketches)
    share = abs(reference.nonfinite - candidate.nonfinite)
    both = min(reference.nonfinite, candidate.nonfinite)
    # Samples at different places have different shares by chance, if both sides have such values.
    by_chance = not sketches.aligned and reference.size > ELEMENTS and both > 0
    count = max(1, round(share * figures.size)) if share > (_CHANCE if by_chance else 0.0) else 0
    overflowed = math.ceil(both * figures.size)
    if not (count or overflowed or figures.nonfinite or figures.overflowed):
        return figures  # a copy takes longer than the measurement
    return replace(figures, nonfinite=count, overflowed=overflowed)


def _estimated(sketches: Sketches, elementwise: tuple[float, float] | None) -> Figures:
    """Return the figures of aligned sketches, from their projections."""
    reference, candidate, scales = sketches.reference, sketches.candidate, sketches.scales
    if reference.size <= BUCKETS:
        # Each number of the projection is one element, up to its sign: nothing is estimated.
        exact = figures_of(Arrays(reference.projection, candidate.projection, scales), elementwise)
        return replace(exact, basis="sketches")
    errors = reference.errors(candidate, *scales)
    l2 = float(np.linalg.norm(errors))
    bulk = float(bulk_of_squares(np.square(errors)))
    return _figures(sketches, l2, bulk, "sketches", SPREAD, elementwise)


def bulk_of_squares(squares: np.ndarray) -> np.ndarray:
    """Return estimates of the L2 norms of errors without a few of their elements.

    The error of a few elements is in a few numbers of the projection, and does not change the numbers' median.

    Args:
        squares: squared errors of projections, one along the last axis; this array is reordered.
    """
    # 0.4549 is the median of a squared normal variable. numpy.median would take much longer.
    squares.partition(BUCKETS // 2, axis=-1)
    return np.asarray(np.sqrt(squares[..., BUCKETS // 2] / 0.4549 * BUCKETS))


def _bounded(sketches: Sketches) -> Figures:
    """Return figures from norms and means, which bound the error from below for any order of the elements."""
    reference, candidate, scales = sketches.reference, sketches.candidate, sketches.scales
    norms = Both(reference.l2 / scales.reference, candidate.l2 / scales.candidate)
    means = abs(reference.mean / scales.reference - candidate.mean / scales.candidate) * math.sqrt(reference.size)
    chance = _CHANCE * max(norms) if reference.size > ELEMENTS else 0.0
    l2 = max(abs(norms.reference - norms.candidate) - chance, means - chance, 0.0)
    return _figures(sketches, l2, l2, "moments", 0.0, None)


def _figures(
    sketches: Sketches,
    l2: float,
    bulk: float,
    basis: str,
    spread: float,
    elementwise: tuple[float, float] | None,
) -> Figures:
    reference, candidate, scales = sketches.reference, sketches.candidate, sketches.scales
    size = reference.size
    root_mean_square = l2 / math.sqrt(size) if size else 0.0
    norm = reference.l2 / scales.reference
    extremes = [abs(c / scales.candidate - r / scales.reference) for r, c in _extremes(reference, candidate)]
    largest = max(abs(reference.minimum), abs(reference.maximum)) / scales.reference
    mismatched = 0
    if elementwise is not None:
        # At least one element has an error of the root mean square or more.
        mismatched = int(root_mean_square > elementwise[0] + elementwise[1] * largest)
    return Figures(
        max_abs=max([root_mean_square, *extremes]) if size else 0.0,
        max_rel=l2 / norm if norm else 0.0,
        mean_abs=root_mean_square,
        mean_reference=reference.mean_abs / scales.reference,
        l2=l2,
        reference_l2=norm,
        candidate_l2=candidate.l2 / scales.candidate,
        size=size,
        bulk_l2=bulk if size > BUCKETS else None,
        mismatched=mismatched,
        basis=basis,
        spread=spread,
    )


def _extremes(reference: Sketch, candidate: Sketch) -> list[tuple[float, float]]:
    # Only if the sketches cover whole tensors or the same elements: other samples have other extremes.
    if reference.size > ELEMENTS and reference.transposed != candidate.transposed:
        return []
    return [(reference.minimum, candidate.minimum), (reference.maximum, candidate.maximum)]


# Factor by which another choice of replicas has to be farther. Two replicas of a gradient that was not reduced are
# equally far from the reduced gradient, and rounding must not decide between them.
_FARTHER = 1.01


def measure_pair(pair: Pair, elementwise: tuple[float, float] | None = None) -> Diff:
    """Measure a pair by its tensors or, if one side recorded only a sketch, by sketches.

    Args:
        pair: the two records; if a side is missing, the other side's norm is still measured.
        elementwise: ``(atol, rtol)``: count elements with ``|c - r| > atol + rtol * |r|`` (numpy.isclose's formula).

    Returns:
        The diff, not judged yet: ``passed`` is false only if ``problem`` states a reason. A pair that can't be
        measured, such as a part of a sketch, passes and has no figures.
    """
    if pair.reference is not None and pair.candidate is not None:
        replicas = Both(replicas_of(pair.reference.source), replicas_of(pair.candidate.source))
        if replicas != Both(1, 1):
            return _farthest(pair, replicas, elementwise)
    return _measured(pair, elementwise)


def _farthest(pair: Pair, replicas: Both[int], elementwise: tuple[float, float] | None) -> Diff:
    """Measure a pair with replicas that differ between processes, by the replicas that are farthest apart."""
    candidates = []
    for choices in product(*map(range, replicas)):
        a, b = (replace(r, source=as_held(r.source, k)) for r, k in zip(pair.sides, choices) if r is not None)
        candidates.append(_measured(replace(pair, reference=a, candidate=b), elementwise))
    worst, *others = candidates
    for diff in others:
        if _apart(diff) > _FARTHER * _apart(worst):
            worst = diff
    return replace(worst, pair=pair)


def _apart(diff: Diff) -> float:
    if diff.problem is not None or diff.figures is None:
        return np.inf
    return diff.figures.l2


def _measured(pair: Pair, elementwise: tuple[float, float] | None) -> Diff:
    if pair.reference is None or pair.candidate is None:
        side = "reference" if pair.reference is None else "candidate"
        return Diff(pair, figures=_lone(pair), problem=Problem(Kind.MISSING, f"missing on the {side}"))
    pair_operands = operands(pair)
    if isinstance(pair_operands, Problem):
        return Diff(pair, passed=pair_operands.kind is not Kind.SHAPES, problem=pair_operands)
    if isinstance(pair_operands, Arrays):
        figures = measured(pair_operands, pair.stage, pair.reference.dtype, elementwise)
    else:
        figures = estimated(pair_operands, elementwise)
    problem = None
    if figures.nonfinite:
        text = f"{figures.nonfinite} of {figures.size} values are NaN or infinite on one side only"
        problem = Problem(Kind.NONFINITE, text)
    return Diff(pair, figures=figures, passed=not problem, problem=problem)


def _lone(pair: Pair) -> Figures | None:
    """Return figures with the norm of a pair's only side; `None` for a part of a sketch."""
    source, scales = pair.anchor.source, pair.scales
    is_reference = pair.reference is not None
    if source.sketched:
        sketch = source.sketch
        if sketch is None:
            return None
        norm = sketch.l2 / (scales.reference if is_reference else scales.candidate)
        size, value, basis = sketch.size, 0.0, "sketches"
    else:
        array = source.read()
        norm_figures = figures_of(Arrays(array, np.broadcast_to(np.zeros((), array.dtype), array.shape), scales))
        size, norm, value, basis = (
            norm_figures.size,
            norm_figures.reference_l2,
            norm_figures.values.reference,
            "tensors",
        )
    norms, values = Both(norm, 0.0), Both(value, 0.0)
    if not is_reference:
        norms, values = norms.swapped(), values.swapped()
    return Figures(size=size, reference_l2=norms.reference, candidate_l2=norms.candidate, values=values, basis=basis)


def with_floors(diffs: StepDiffs, steps: Both[Sequence[Step]]) -> StepDiffs:
    """Return the diffs of a step, with their floors and their distances from float64 where these were measured.

    Floors measured in a finer dtype than the step's dtype on either side are ignored.
    """
    if not any(step.floors is not None for side in steps for step in side):
        return diffs
    all_floors = steps.map(lambda side: side[0].floors if len(side) == 1 else None)
    dtype = _coarsest(record for side in steps for step in side for record in step.records)
    floors = all_floors.map(lambda each: each if each is not None and _as_coarse(each.dtype, dtype) else None)
    # Rounding of a weight limits the precision of the update that was added to the weight.
    rounded = {
        _parameter(d): _rounding(d) * d.figures.reference_l2 for d in diffs if d.figures and d.pair.stage == "weight"
    }
    return diffs.replaced([_with_third(_with_floor(diff, floors, rounded), all_floors) for diff in diffs])


def _parameter(diff: Diff) -> tuple[str, str]:
    return diff.pair.anchor.layer, diff.pair.anchor.slot


def _rounding(diff: Diff) -> float:
    """Return the relative error of rounding one of the pair's numbers, on the coarser side."""
    return max(ROUNDING.get(coarse(record.dtype), 0.0) for record in diff.pair.sides if record is not None)


def _with_floor(diff: Diff, floors: Both[Floors | None], rounded: Mapping[tuple[str, str], float]) -> Diff:
    figures, pair = diff.figures, diff.pair
    if figures is None or not pair.complete or pair.stage not in MEASURED_STAGES:
        return diff
    if pair.stage == "update" and pair.anchor.layer == LOOP:
        return diff  # a learning rate
    sides = [_relative(record, each) for record, each in zip(pair.sides, floors) if record is not None and each]
    measured_floors = [side for side in sides if side is not None]
    if not measured_floors:
        return diff
    floor = max(*measured_floors, LEAST_FLOOR * 2 * _rounding(diff)) * figures.reference_l2
    if pair.stage == "grad":
        floor = max(floor, GRAD_FLOOR * figures.reference_l2)
    if pair.stage == "update":
        floor = math.hypot(max(floor, UPDATE_FLOOR * figures.reference_l2), rounded.get(_parameter(diff), 0.0))
    return replace(diff, figures=replace(figures, floor=floor))


def _with_third(diff: Diff, floors: Both[Floors | None]) -> Diff:
    """Return the diff with both sides' distances from the step in float64, preferably as the candidate's code computed
    it.
    """
    pair, figures = diff.pair, diff.figures
    if figures is None or figures.basis != "tensors" or not pair.complete or pair.stage not in MEASURED_STAGES:
        return diff
    for code, record, each in (*zip(SIDES, pair.sides, floors),)[::-1]:
        source = each.exact.get(record.site) if each is not None and record is not None else None
        if record is None or source is None:
            continue
        exact = replace(record, source=source, dtype="float64")
        scale = getattr(pair.scales, code)
        code_error = _floor_apart(Pair(pair.step, exact, record, SAME, Both(scale, scale)))
        sides = Both(exact, pair.candidate) if code == SIDES.reference else Both(pair.reference, exact)
        opposite_error = _floor_apart(replace(pair, reference=sides.reference, candidate=sides.candidate))
        if code_error is None or opposite_error is None:
            continue
        errors = Both(code_error, opposite_error) if code == SIDES.reference else Both(opposite_error, code_error)
        return replace(diff, figures=replace(figures, third=Float64Reference(errors, code)))
    return diff


def _floor_apart(pair: Pair) -> float | None:
    figures = measure_pair(pair).figures
    return figures.rel_l2 if figures is not None and math.isfinite(figures.rel_l2) else None


def _relative(record: Record, floors: Floors) -> float | None:
    """Return a tensor's floor as a share of the tensor's norm; `None` if unknown or measured for a different size."""
    floor = floors.sites.get(record.site)
    return floor.relative if floor is not None and floor.size == math.prod(record.shape) else None


def _as_coarse(measured: str, dtype: str) -> bool:
    are_ranked = measured in ROUNDING and dtype in ROUNDING
    return are_ranked and COARSENESS.index(measured) >= COARSENESS.index(dtype)


def _coarsest(records: Iterable[Record]) -> str:
    dtypes = {coarse(record.dtype) for record in records}
    return next((dtype for dtype in reversed(COARSENESS) if dtype in dtypes), COARSENESS[0])
