"""Detect systematic errors: one ratio in many tensors, weights that all shrink equally, a whole stage that is off.

Each tensor may be within its own limit; all together exclude chance. No tensor is read for this: the candidate is
``1 + a`` times the reference plus a remainder, and the three measured norms give
``a = (||c||^2 - ||r||^2 - ||c - r||^2) / (2 ||r||^2)``.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

import numpy as np

from padiff.compare.judge import limits
from padiff.compare.judge.drift import Drift
from padiff.compare.judge.scale_errors import ScaleErrors, ratios_of, scale_errors
from padiff.compare.judge.site_facts import SiteFacts
from padiff.records import Figure, Rule
from padiff.records.step_diffs import StepDiffs

_NOWHERE = np.zeros(0, np.intp)


def agreeing(found: ScaleErrors, floor: float) -> tuple[np.ndarray, float]:
    """Return the indices of the tensors that share a ratio above ``floor``, and the ratio.

    There are no indices unless most tensors of the stage share the ratio.
    """
    ratio = found.typical_ratio
    if len(found.places) < 2 or abs(ratio) <= floor:
        return _NOWHERE, ratio
    alike = found.mostly_ratio & (np.abs(found.ratio - ratio) <= limits.ALIKE * abs(ratio))
    return (found.places[alike] if alike.sum() >= limits.MOST_OF_THEM * len(found.places) else _NOWHERE), ratio


class Decay(NamedTuple):
    """Common relative growth of weights on one side.

    Attributes:
        places: indices of the weights.
        ratio: the relative growth.
        limit: growth that chance explains.
    """

    places: np.ndarray
    ratio: float
    limit: float


def common_growth(found: ScaleErrors, floor: float) -> Decay | None:
    """Return a common growth of the weights that chance does not explain, or `None`.

    The standard error of each weight's growth is its error over the root of its number of elements; the best common
    growth is the mean weighted by these. A different weight decay causes such a growth; rounding and different
    gradients do not.
    """
    # The mean can't exceed the largest ratio.
    if not len(found.places) or np.abs(found.ratio).max() <= floor:
        return None
    found = found.where(found.error > 0)
    if len(found.places) < limits.FEWEST:
        return None
    sigma = found.error / np.sqrt(found.size) + limits.NORMS
    total = float((sigma**-2).sum())
    ratio = float((found.ratio / sigma**2).sum()) / total
    # If the values scatter more than their standard errors say, the mean is less certain, too.
    squares = float((((found.ratio - ratio) / sigma) ** 2).sum())
    scatter = max(1.0, math.sqrt(squares / (len(found.places) - 1)))
    limit = max(floor, limits.DECAY_SURE * scatter / math.sqrt(total))
    alike = np.abs(found.ratio - ratio) <= np.maximum(limits.SURE * sigma, abs(ratio) / 2)
    if abs(ratio) <= limit or alike.sum() < limits.MOST_OF_THEM * len(found.places):
        return None
    return Decay(found.places[alike & (found.ratio * ratio > 0)], ratio, limit)


def failed(diffs: StepDiffs, places: np.ndarray, limit: float) -> StepDiffs:
    """Return the diffs, with those at the given indices failed for their common ratio."""
    if not len(places):
        return diffs
    places = places[(diffs.rows["passed"] & diffs.measured)[places]]
    ratios = np.abs(ratios_of(diffs.rows[places]))
    return diffs.with_failures(
        {place: (Figure.RATIO, ratio, limit, Rule.SYSTEMATIC) for place, ratio in zip(places.tolist(), ratios.tolist())}
    )


class Start(NamedTuple):
    """Facts about a step that the search for systematic errors needs.

    Attributes:
        factor: multiplier of all limits.
        noise: mask of the diffs of parameters whose gradients are rounding noise.
        inherited: relative error at the start of the step.
        before: drift at the step before.
    """

    factor: float
    noise: np.ndarray
    inherited: float
    before: Drift


def without_systematic(diffs: StepDiffs, start: Start) -> StepDiffs:
    """Return a step's judged diffs, with diffs that share a systematic error failed."""
    if not (diffs.rows["passed"] & diffs.measured & (diffs.rows["l2"] != 0)).any():
        return diffs
    dtypes = diffs.sites.fact(SiteFacts).coarsest
    result = _apart_alike(_grown_alike(diffs, start), start)
    if start.inherited < limits.MOST:
        result = _outputs(result, start, dtypes["forward"])
    larger, explained = 0.0, limits.OF_OUTPUTS * _last_error(result)
    # Steps that were not compared move the losses apart, and with them all gradients alike.
    gap = max(1, (diffs.number or 0) - start.before.step) if start.before.step >= 0 else 1
    for stage in ("backward", "grad", "update"):
        stage_offs = scale_errors(result, stage, start.noise)
        # The ratio of earlier stages, and of momentum from earlier steps, is not new in this stage.
        inherited_ratio = max(explained, 2 * larger, 2 * start.before.ratio if stage == "update" else 0.0)
        floor = start.factor * (min(gap, limits.MOST_GAP) * limits.ratio_floor(dtypes[stage]) + inherited_ratio)
        alike, ratio = agreeing(stage_offs, floor)
        result = failed(result, alike, floor)
        larger = max(larger, abs(ratio))
        if len(stage_offs.places):
            # Clipping by a norm hands the norm's error on to all gradients as one ratio.
            explained = limits.OF_NORM * stage_offs.typical_error if start.inherited else 0.0
    return result


def _apart_alike(diffs: StepDiffs, start: Start) -> StepDiffs:
    """Fail weights that, over uncompared steps, mostly moved further apart than updates of such a run can explain.

    A single weight may do so: in some step a value crosses a kink, or a few elements of an adaptive optimizer's update
    flip. If most weights do so at once, the updates differ.
    """
    before, step, rows, keys = start.before, diffs.number or 0, diffs.rows, diffs.sites.keys
    if before.step < 0 or step - before.step < 2:
        return diffs
    places = diffs.sites.places["update"]
    places = places[diffs.known[places]]
    sizes = dict(zip([keys[place] for place in places.tolist()], rows["reference_l2"][places].tolist()))
    shares: dict[int, tuple[float, float, float]] = {}
    weight_offs = scale_errors(diffs, "weight", start.noise)
    errors = rows["l2"][weight_offs.places] / (1 + limits.SURE * weight_offs.spread)
    for place, error in zip(weight_offs.places.tolist(), errors.tolist()):
        key = keys[place]
        update = before.updates.get(key)
        if update is None or key not in before.weights:
            continue
        explained, size = before.weights[key] + update.error, max(update.size, sizes.get(key, 0.0))
        if size > 0:
            shares[place] = max(error - explained, 0.0) / size, explained, size
    if len(shares) < limits.FEWEST:
        return diffs
    most = start.factor * before.typical_gap(step)
    if statistics.median(share for share, _, _ in shares.values()) <= most:
        return diffs
    apart = {}
    for place, (share, explained, size) in shares.items():
        if rows["passed"][place] and share > most:
            reference = float(rows["reference_l2"][place])
            value, limit = float(rows["l2"][place]) / reference, (explained + most * size) / reference
            apart[place] = Figure.REL_L2, value, limit, Rule.SYSTEMATIC
    return diffs.with_failures(apart)


def _outputs(diffs: StepDiffs, start: Start, dtype: str) -> StepDiffs:
    """Fail outputs that are a multiple of the reference's outputs, beyond rounding and the error at the start."""
    floor = start.factor * (limits.ratio_floor(dtype) + limits.GAIN["forward"] * start.inherited)
    output_offs = scale_errors(diffs, "forward")
    # A limit of 1 or more means that the tensor is rounding noise.
    rounding = diffs.rows["limit"][output_offs.places] >= 1
    return failed(
        diffs, output_offs.places[output_offs.mostly_ratio & (np.abs(output_offs.ratio) > floor) & ~rounding], floor
    )


def _last_error(diffs: StepDiffs) -> float:
    """Return the relative error of the step's last output, the input of the loss and of the loss's gradient."""
    places = diffs.sites.places["forward"]
    places = places[diffs.known[places]]
    error = float(diffs.relative[places[-1]]) if len(places) else 0.0
    return error if math.isfinite(error) else 0.0


def _grown_alike(diffs: StepDiffs, start: Start) -> StepDiffs:
    """Fail weights that grew or shrank by a common share on one side; matrices and vectors are checked separately."""
    if not diffs.number:
        return diffs
    weight_offs = scale_errors(diffs, "weight", start.noise)
    are_vectors = diffs.sites.fact(SiteFacts).vectors[weight_offs.places]
    result = diffs
    for which in (~are_vectors, are_vectors):
        subset = weight_offs.where(which)
        decay = common_growth(subset, start.factor * _growth_floor(diffs, subset, start))
        if decay is not None:
            result = failed(result, decay.places, decay.limit)
    return result


def _growth_floor(diffs: StepDiffs, weights: ScaleErrors, start: Start) -> float:
    """Return the common growth that rounding explains.

    Causes are the rounding of the decay factor in each step, and updates with a common ratio on growing weights.
    """
    before = start.before
    explained = 2 * (diffs.number or 0) * float(diffs.sites.fact(SiteFacts).rounding[weights.places].max(initial=0.0))
    if not before.ratio:
        return explained
    keys = diffs.sites.keys
    sizes = zip(weights.places.tolist(), diffs.rows["reference_l2"][weights.places].tolist())
    grown = [(size, before.began.get(keys[place], 0.0)) for place, size in sizes]
    logs = [abs(math.log(size / began)) for size, began in grown if began > 0]
    return explained + limits.OF_GROWTH * before.ratio * (statistics.median(logs) if logs else 0.0)
