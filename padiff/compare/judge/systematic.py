"""What rounding never is: one ratio through many tensors, weights that all shrink alike, a whole stage that is off.

Each tensor by itself is within its limit, or may be; together they are no chance. Nothing is read for it: that the
candidate is ``1 + a`` times the reference and something else shows in the three norms that were measured,
``a = (||c||^2 - ||r||^2 - ||c - r||^2) / (2 ||r||^2)``.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from padiff.compare.judge import limits
from padiff.compare.judge.drift import Drift
from padiff.compare.judge.siblings import Key, Off, key_of, offs, ratio_of, typical_error, typical_ratio
from padiff.records import Diff, Figure, Rule


def agreeing(found: Sequence[Off], floor: float) -> tuple[list[Off], float]:
    """The tensors that one ratio beyond ``floor`` goes through, if it goes through most of a stage; and that ratio."""
    ratio = typical_ratio(found)
    if len(found) < 2 or abs(ratio) <= floor:
        return [], ratio
    alike = [off for off in found if off.mostly_ratio and abs(off.ratio - ratio) <= limits.ALIKE * abs(ratio)]
    return (alike if len(alike) >= limits.MOST_OF_THEM * len(found) else []), ratio


class Decay(NamedTuple):
    """One share by which weights are larger on one side.

    Attributes:
        alike: those that it goes through.
        ratio: the share.
        limit: what it may be by chance.
    """

    alike: list[Off]
    ratio: float
    limit: float


def common_growth(found: Sequence[Off], floor: float) -> Decay | None:
    """Whether weights are larger, on one side, by one share that chance does not explain.

    Each weight's share is known to its error over the root of its number of elements; the best common one is their
    mean, weighted by that. Weight decay, or its lack, is such a share; rounding, and other gradients, are not.
    """
    weights = [(off, off.error / math.sqrt(off.size) + limits.NORMS) for off in found if off.error > 0]
    if len(weights) < limits.FEWEST:
        return None
    total = math.fsum(sigma**-2 for _, sigma in weights)
    ratio = math.fsum(off.ratio / sigma**2 for off, sigma in weights) / total
    # Where they scatter more than their own errors say, the mean is less sure, too.
    squares = math.fsum(((off.ratio - ratio) / sigma) ** 2 for off, sigma in weights)
    scatter = max(1.0, math.sqrt(squares / (len(weights) - 1)))
    limit = max(floor, limits.DECAY_SURE * scatter / math.sqrt(total))
    alike = [off for off, sigma in weights if abs(off.ratio - ratio) <= max(limits.SURE * sigma, abs(ratio) / 2)]
    if abs(ratio) <= limit or len(alike) < limits.MOST_OF_THEM * len(weights):
        return None
    return Decay([off for off in alike if off.ratio * ratio > 0], ratio, limit)


def failed(diffs: Sequence[Diff], places: Collection[int], limit: float, figure: Figure = Figure.RATIO) -> list[Diff]:
    """The diffs, with those at some places failed for what they have in common."""
    found = list(diffs)
    for place in places:
        diff = diffs[place]
        if diff.passed and diff.figures is not None:
            found[place] = diff.judged(False, figure, abs(ratio_of(diff.figures)), limit, Rule.SYSTEMATIC)
    return found


class Start(NamedTuple):
    """What has to be known of a step to tell what is systematic.

    Attributes:
        factor: of all limits.
        dtypes: the coarsest up to each stage.
        noise: parameters whose gradients are rounding.
        inherited: relative error that the step starts with.
        before: the step before.
        places: of the step's diffs, as `padiff.compare.judge.siblings.by_stage` gives them.
    """

    factor: float
    dtypes: Mapping[str, str]
    noise: Collection[Key]
    inherited: float
    before: Drift
    places: Mapping[str, Sequence[int]]


def without_systematic(diffs: Sequence[Diff], start: Start) -> list[Diff]:
    """The judged diffs of a step; where many agree in what no rounding makes, these fail."""
    found = list(diffs)
    if not any(diff.passed and diff.figures is not None and diff.figures.l2 for diff in found):
        return found
    found = _apart_alike(_grown_alike(found, start), start)
    if start.inherited < limits.MOST:
        found = _outputs(found, start)
    larger, explained = 0.0, limits.OF_OUTPUTS * _last_error(found, start)
    for stage in ("backward", "grad", "update"):
        own = offs(found, start.places, stage, start.noise)
        # What the stage before was off by, and what momentum remembers, are not new here.
        known = max(explained, 2 * larger, 2 * start.before.ratio if stage == "update" else 0.0)
        floor = start.factor * (limits.ratio_floor(start.dtypes[stage]) + known)
        alike, ratio = agreeing(own, floor)
        found = failed(found, [off.place for off in alike], floor)
        larger = max(larger, abs(ratio))
        if own:
            # A norm that gradients are clipped by is off as they are, and hands that on to all of them alike.
            explained = limits.OF_NORM * typical_error(own) if start.inherited else 0.0
    return found


def _apart_alike(diffs: Sequence[Diff], start: Start) -> list[Diff]:
    """Weights that most came further apart, over steps that were not compared, than updates of such a run do.

    By itself each may: in some step a value crosses a kink, or a few elements of an adaptive optimizer's update turn
    over. That most of them do so at once, it takes another update.
    """
    before, step = start.before, diffs[0].pair.step if diffs else 0
    if before.step < 0 or step - before.step < 2:
        return list(diffs)
    sizes = {key_of(d): d.figures.reference_l2 for d in diffs if d.pair.stage == "update" and d.compared and d.figures}
    shares: dict[int, tuple[float, float, float]] = {}
    for off in offs(diffs, start.places, "weight", start.noise):
        figures, key = diffs[off.place].figures, key_of(diffs[off.place])
        update = before.updates.get(key)
        if figures is None or update is None or key not in before.weights:
            continue
        known, size = before.weights[key] + update.error, max(update.size, sizes.get(key, 0.0))
        if size > 0:
            shares[off.place] = max(figures.l2 / (1 + limits.SURE * off.spread) - known, 0.0) / size, known, size
    if len(shares) < limits.FEWEST:
        return list(diffs)
    most = start.factor * before.typical_gap(step)
    if statistics.median(share for share, _, _ in shares.values()) <= most:
        return list(diffs)
    found = list(diffs)
    for place, (share, known, size) in shares.items():
        diff, figures = diffs[place], diffs[place].figures
        if diff.passed and share > most and figures is not None:
            limit = (known + most * size) / figures.reference_l2
            found[place] = diff.judged(False, Figure.REL_L2, figures.rel_l2, limit, Rule.SYSTEMATIC)
    return found


def _outputs(diffs: Sequence[Diff], start: Start) -> list[Diff]:
    """Outputs that are the reference's, times a constant, in a step that starts from equal weights."""
    floor = limits.ratio_floor(start.dtypes["forward"]) + limits.GAIN["forward"] * start.inherited
    scaled = [
        off.place
        for off in offs(diffs, start.places, "forward", ())
        if off.mostly_ratio and abs(off.ratio) > start.factor * floor and not _is_rounding(diffs[off.place])
    ]
    return failed(diffs, scaled, start.factor * floor)


def _is_rounding(diff: Diff) -> bool:
    """Whether a tensor may be off by all of itself."""
    return diff.judgement is not None and diff.judgement.limit >= 1


def _last_error(diffs: Sequence[Diff], start: Start) -> float:
    """Relative error of the step's last output: what the loss, and its gradient, are made of."""
    backwards = (diffs[place] for place in reversed(start.places["forward"]))
    error = next((d.figures.rel_l2 for d in backwards if d.compared and d.figures is not None), 0.0)
    return error if math.isfinite(error) else 0.0


def _grown_alike(diffs: Sequence[Diff], start: Start) -> list[Diff]:
    """Weights that became larger, or smaller, by one share on one side: matrices, and apart from them vectors."""
    found = list(diffs)
    step = diffs[0].pair.step if diffs else 0
    if not step:
        return found
    own = offs(found, start.places, "weight", start.noise)
    for vectors in (False, True):
        some = [off for off in own if (len(diffs[off.place].pair.anchor.shape) < 2) is vectors]
        decay = common_growth(some, start.factor * _growth_floor(diffs, some, start))
        if decay is not None:
            found = failed(found, [off.place for off in decay.alike], decay.limit)
    return found


def _growth_floor(diffs: Sequence[Diff], weights: Sequence[Off], start: Start) -> float:
    """What of a common growth rounding explains: of the factor that decay multiplies by, in each step; and what updates
    that are all larger by the same do to weights that grow."""
    step, before = diffs[0].pair.step, start.before
    rounding = max(
        (limits.ROUNDING.get(limits.coarse(diffs[w.place].pair.anchor.dtype), 0.0) for w in weights), default=0.0
    )
    grown = [
        abs(math.log(figures.reference_l2 / began))
        for figures, began in ((diffs[w.place].figures, before.began.get(key_of(diffs[w.place]), 0.0)) for w in weights)
        if figures is not None and began > 0
    ]
    return 2 * step * rounding + limits.OF_GROWTH * before.ratio * (statistics.median(grown) if grown else 0.0)
