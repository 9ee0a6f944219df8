"""What rounding never is: one ratio through many tensors, weights that all shrink alike, a whole stage that is off.

Each tensor by itself is within its limit, or may be; together they are no chance. Nothing is read for it: that the
candidate is ``1 + a`` times the reference and something else shows in the three norms that were measured,
``a = (||c||^2 - ||r||^2 - ||c - r||^2) / (2 ||r||^2)``.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

import numpy as np

from padiff.compare.judge import limits
from padiff.compare.judge.drift import Drift
from padiff.compare.judge.siblings import Offs, offs, ratios_of
from padiff.compare.judge.site_facts import SiteFacts
from padiff.records import Figure, Rule
from padiff.records.step_diffs import StepDiffs

_NOWHERE = np.zeros(0, np.intp)


def agreeing(found: Offs, floor: float) -> tuple[np.ndarray, float]:
    """The places of the tensors that one ratio beyond ``floor`` goes through, if it goes through most of a stage; and
    that ratio.
    """
    ratio = found.typical_ratio
    if len(found.places) < 2 or abs(ratio) <= floor:
        return _NOWHERE, ratio
    alike = found.mostly_ratio & (np.abs(found.ratio - ratio) <= limits.ALIKE * abs(ratio))
    return (found.places[alike] if alike.sum() >= limits.MOST_OF_THEM * len(found.places) else _NOWHERE), ratio


class Decay(NamedTuple):
    """One share by which weights are larger on one side.

    Attributes:
        places: of those that it goes through.
        ratio: the share.
        limit: what it may be by chance.
    """

    places: np.ndarray
    ratio: float
    limit: float


def common_growth(found: Offs, floor: float) -> Decay | None:
    """Whether weights are larger, on one side, by one share that chance does not explain.

    Each weight's share is known to its error over the root of its number of elements; the best common one is their
    mean, weighted by that. Weight decay, or its lack, is such a share; rounding, and other gradients, are not.
    """
    # A mean is no larger than the largest.
    if not len(found.places) or np.abs(found.ratio).max() <= floor:
        return None
    found = found.where(found.error > 0)
    if len(found.places) < limits.FEWEST:
        return None
    sigma = found.error / np.sqrt(found.size) + limits.NORMS
    total = float((sigma**-2).sum())
    ratio = float((found.ratio / sigma**2).sum()) / total
    # Where they scatter more than their own errors say, the mean is less sure, too.
    squares = float((((found.ratio - ratio) / sigma) ** 2).sum())
    scatter = max(1.0, math.sqrt(squares / (len(found.places) - 1)))
    limit = max(floor, limits.DECAY_SURE * scatter / math.sqrt(total))
    alike = np.abs(found.ratio - ratio) <= np.maximum(limits.SURE * sigma, abs(ratio) / 2)
    if abs(ratio) <= limit or alike.sum() < limits.MOST_OF_THEM * len(found.places):
        return None
    return Decay(found.places[alike & (found.ratio * ratio > 0)], ratio, limit)


def failed(diffs: StepDiffs, places: np.ndarray, limit: float) -> StepDiffs:
    """The diffs, with those at some places failed for what they have in common."""
    if not len(places):
        return diffs
    places = places[(diffs.rows["passed"] & diffs.measured)[places]]
    ratios = np.abs(ratios_of(diffs.rows[places]))
    return diffs.failed(
        {place: (Figure.RATIO, ratio, limit, Rule.SYSTEMATIC) for place, ratio in zip(places.tolist(), ratios.tolist())}
    )


class Start(NamedTuple):
    """What has to be known of a step to tell what is systematic.

    Attributes:
        factor: of all limits.
        noise: which diffs are of parameters whose gradients are rounding.
        inherited: relative error that the step starts with.
        before: the step before.
    """

    factor: float
    noise: np.ndarray
    inherited: float
    before: Drift


def without_systematic(diffs: StepDiffs, start: Start) -> StepDiffs:
    """The judged diffs of a step; where many agree in what no rounding makes, these fail."""
    if not (diffs.rows["passed"] & diffs.measured & (diffs.rows["l2"] != 0)).any():
        return diffs
    dtypes = diffs.sites.fact(SiteFacts).coarsest
    found = _apart_alike(_grown_alike(diffs, start), start)
    if start.inherited < limits.MOST:
        found = _outputs(found, start, dtypes["forward"])
    larger, explained = 0.0, limits.OF_OUTPUTS * _last_error(found)
    for stage in ("backward", "grad", "update"):
        own = offs(found, stage, start.noise)
        # What the stage before was off by, and what momentum remembers, are not new here.
        known = max(explained, 2 * larger, 2 * start.before.ratio if stage == "update" else 0.0)
        floor = start.factor * (limits.ratio_floor(dtypes[stage]) + known)
        alike, ratio = agreeing(own, floor)
        found = failed(found, alike, floor)
        larger = max(larger, abs(ratio))
        if len(own.places):
            # A norm that gradients are clipped by is off as they are, and hands that on to all of them alike.
            explained = limits.OF_NORM * own.typical_error if start.inherited else 0.0
    return found


def _apart_alike(diffs: StepDiffs, start: Start) -> StepDiffs:
    """Weights that most came further apart, over steps that were not compared, than updates of such a run do.

    By itself each may: in some step a value crosses a kink, or a few elements of an adaptive optimizer's update turn
    over. That most of them do so at once, it takes another update.
    """
    before, step, rows, keys = start.before, diffs.number or 0, diffs.rows, diffs.sites.keys
    if before.step < 0 or step - before.step < 2:
        return diffs
    places = diffs.sites.places["update"]
    places = places[diffs.known[places]]
    sizes = dict(zip([keys[place] for place in places.tolist()], rows["reference_l2"][places].tolist()))
    shares: dict[int, tuple[float, float, float]] = {}
    own = offs(diffs, "weight", start.noise)
    errors = rows["l2"][own.places] / (1 + limits.SURE * own.spread)
    for place, error in zip(own.places.tolist(), errors.tolist()):
        key = keys[place]
        update = before.updates.get(key)
        if update is None or key not in before.weights:
            continue
        known, size = before.weights[key] + update.error, max(update.size, sizes.get(key, 0.0))
        if size > 0:
            shares[place] = max(error - known, 0.0) / size, known, size
    if len(shares) < limits.FEWEST:
        return diffs
    most = start.factor * before.typical_gap(step)
    if statistics.median(share for share, _, _ in shares.values()) <= most:
        return diffs
    apart = {}
    for place, (share, known, size) in shares.items():
        if rows["passed"][place] and share > most:
            reference = float(rows["reference_l2"][place])
            value, limit = float(rows["l2"][place]) / reference, (known + most * size) / reference
            apart[place] = Figure.REL_L2, value, limit, Rule.SYSTEMATIC
    return diffs.failed(apart)


def _outputs(diffs: StepDiffs, start: Start, dtype: str) -> StepDiffs:
    """Outputs that are the reference's, times a constant, in a step that starts from equal weights."""
    floor = start.factor * (limits.ratio_floor(dtype) + limits.GAIN["forward"] * start.inherited)
    own = offs(diffs, "forward")
    # A tensor that may be off by all of itself is rounding.
    rounding = diffs.rows["limit"][own.places] >= 1
    return failed(diffs, own.places[own.mostly_ratio & (np.abs(own.ratio) > floor) & ~rounding], floor)


def _last_error(diffs: StepDiffs) -> float:
    """Relative error of the step's last output: what the loss, and its gradient, are made of."""
    places = diffs.sites.places["forward"]
    places = places[diffs.known[places]]
    error = float(diffs.relative[places[-1]]) if len(places) else 0.0
    return error if math.isfinite(error) else 0.0


def _grown_alike(diffs: StepDiffs, start: Start) -> StepDiffs:
    """Weights that became larger, or smaller, by one share on one side: matrices, and apart from them vectors."""
    if not diffs.number:
        return diffs
    own = offs(diffs, "weight", start.noise)
    are_vectors = diffs.sites.fact(SiteFacts).vectors[own.places]
    found = diffs
    for which in (~are_vectors, are_vectors):
        some = own.where(which)
        decay = common_growth(some, start.factor * _growth_floor(diffs, some, start))
        if decay is not None:
            found = failed(found, decay.places, decay.limit)
    return found


def _growth_floor(diffs: StepDiffs, weights: Offs, start: Start) -> float:
    """What of a common growth rounding explains: of the factor that decay multiplies by, in each step; and what updates
    that are all larger by the same do to weights that grow."""
    before = start.before
    explained = 2 * (diffs.number or 0) * float(diffs.sites.fact(SiteFacts).rounding[weights.places].max(initial=0.0))
    if not before.ratio:
        return explained
    keys = diffs.sites.keys
    sizes = zip(weights.places.tolist(), diffs.rows["reference_l2"][weights.places].tolist())
    grown = [(size, before.began.get(keys[place], 0.0)) for place, size in sizes]
    logs = [abs(math.log(size / began)) for size, began in grown if began > 0]
    return explained + limits.OF_GROWTH * before.ratio * (statistics.median(logs) if logs else 0.0)
