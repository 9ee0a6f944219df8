"""Floors of a step's diffs: the errors that rounding alone causes, as measured on one side or both."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from padiff.compare.judge.limits import COARSENESS, GRAD_FLOOR, LEAST_FLOOR, ROUNDING, UPDATE_FLOOR, coarse
from padiff.compare.measure.pairs import measure_pair
from padiff.records import LOOP, SAME, SIDES, Both, Diff, Float64Reference, Pair, Record, Step
from padiff.records.floors import MEASURED_STAGES, Floors
from padiff.records.step_diffs import StepDiffs


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
        code_error = _apart(Pair(pair.step, exact, record, SAME, Both(scale, scale)))
        sides = Both(exact, pair.candidate) if code == SIDES.reference else Both(pair.reference, exact)
        opposite_error = _apart(replace(pair, reference=sides.reference, candidate=sides.candidate))
        if code_error is None or opposite_error is None:
            continue
        errors = Both(code_error, opposite_error) if code == SIDES.reference else Both(opposite_error, code_error)
        return replace(diff, figures=replace(figures, third=Float64Reference(errors, code)))
    return diff


def _apart(pair: Pair) -> float | None:
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
