"""Weights that are averages of other weights: moving averages (EMA), momentum encoders, target networks.

Such a weight has no optimizer. It changes by a share of its distance to its source, which is that of this step or of
the step before: ``copy' = copy + a (source - copy)``. The decay is ``1 - a``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import partial
from itertools import chain, product

import numpy as np

from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, PairPlace, alike, place_of, rounding_of
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.compare.judge.limits import allowed, is_running
from padiff.errors import PadiffError
from padiff.model import equivalents
from padiff.records import SIDES, Both, Diff, Pair

# Rounding error of a moved weight, in rounding units of the weight: a product, a difference and a sum on each side.
_ROUNDINGS = 4.0
# Least size of a change of the reference, in rounding errors, from which its share is known.
_KNOWN = 16.0
# Smallest relative difference of two shares that is no rounding, and multiple of the error of a share. Chosen.
_SAME, _SURE = 1e-3, 8.0
# The same of running statistics, which are means over a batch besides.
_BUFFER_ROUNDINGS = 32.0
# Most steps in which a share is looked for that differs more clearly.
_LATER = 16
# Most weights that are tried as sources.
_SOURCES = 8
# Least count of values of a weight, and of a weight with two shares.
_FEWEST, _MANY = 4, 16


@dataclass(frozen=True)
class Average:
    """How a side's weight follows its source.

    Attributes:
        share: the share of the distance to the source, 1 less the decay; 0 if the weight was not moved.
        error: error of the share.
        late: True if the source is that of this step: after its optimizer's step.
        kept: the share of the weight itself: 1 less the other share, unless the code is wrong.
    """

    share: float
    error: float
    late: bool
    kept: float

    def moved(self, before: np.ndarray, sources: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """Return the weight that follows sources of this step and of the one before in this way."""
        return np.asarray(self.kept * before + self.share * sources[0 if self.late else 1])

    @property
    def is_mean(self) -> bool:
        """Return True if both shares together are 1."""
        return abs(self.kept + self.share - 1) <= _SAME


@dataclass(frozen=True)
class Averages:
    """How a weight of both sides follows its source.

    Attributes:
        source: the source.
        now, before: the weight in this step and in the one before.
        sources: the source in this step and in the one before.
        sides: how each side follows it.
    """

    source: PairPlace
    now: Both[np.ndarray]
    before: Both[np.ndarray]
    sources: Both[tuple[np.ndarray, np.ndarray]]
    sides: Both[Average]
    noise: float

    @property
    def differ(self) -> bool:
        """Return True if the sides follow the source by other shares, or other versions of it."""
        reference, candidate = self.sides
        if candidate.share and reference.late is not candidate.late:
            return True
        return self.are_apart(reference, candidate)

    @staticmethod
    def are_apart(first: Average, second: Average) -> bool:
        """Return True if two shares differ by more than rounding."""
        if first.is_mean is not second.is_mean:
            return True
        apart = abs(first.share - second.share)
        return apart > _SAME * abs(first.share) + _SURE * (first.error + second.error)

    @property
    def is_clear(self) -> bool:
        """Return True if the sides' shares differ by so much that the weights show it beyond rounding."""
        reference, candidate = (side.moved(self.before.candidate, self.sources.candidate) for side in self.sides)
        return _root(reference - candidate, 0.0) >= _KNOWN * self.noise


def sources_of(place: PairPlace, owned: Mapping[PairPlace, Pair], pair: Pair) -> list[PairPlace]:
    """Return the trained weights that a weight may be an average of: of the same shape, slot and end of the path.

    The one whose path is most like the weight's comes first.

    Args:
        owned: the pairs of the trained weights.
    """
    layer, slot, _ = place
    names = layer.split(".")
    by_length: dict[int, list[PairPlace]] = {}
    for other in owned:
        if other[1] != slot or owned[other].anchor.shape != pair.anchor.shape:
            continue
        others = other[0].split(".")
        common = 0
        while common < min(len(names), len(others)) and names[-1 - common] == others[-1 - common]:
            common += 1
        if common:
            by_length.setdefault(common, []).append(other)
    longest = by_length[max(by_length)] if by_length else []
    return sorted(longest, key=lambda other: -SequenceMatcher(None, layer, other[0]).ratio())[:_SOURCES]


def averages(scene: DiffContext, place: PairPlace) -> Averages | None:
    """Return how a weight without an optimizer follows its source on both sides; `None` if it is no average."""
    number = scene.number
    weights, before = scene.pairs(number, "weight"), scene.pairs(number - 1, "weight")
    trained = {*scene.pairs(number, "update")} | {*scene.pairs(number - 1, "update")}
    pair = weights.get(place)
    if pair is None or place in trained:
        return None
    owned = {other: each for other, each in weights.items() if other in trained}
    if is_running(place[1]):
        # Running statistics, which no optimizer trains, follow those of a layer whose weights one does.
        owned = _statistics_trained(scene)
        if place in owned:
            return None
    fits = (
        _average(pair, before[place], other, owned[other], before[other])
        for other in sources_of(place, owned, pair)
        if {place, other} <= before.keys()
    )
    return next((each for each in fits if each is not None), None)


def _statistics_trained(scene: DiffContext) -> dict[PairPlace, Pair]:
    """Return the running statistics of the layers whose weights an optimizer trains, in this step or in the last."""
    updates = chain(scene.pairs(scene.number, "update"), scene.pairs(scene.number - 1, "update"))
    layers = {layer for layer, _, _ in updates}
    weights = scene.pairs(scene.number, "weight")
    return {other: each for other, each in weights.items() if other[0] in layers and is_running(other[1])}


def _average(pair: Pair, before: Pair, source: PairPlace, late: Pair, early: Pair) -> Averages | None:
    """Return how a weight follows a source on both sides; `None` if it does not."""
    try:
        now, was, after, earlier = alike((pair, before, late, early))
    except PadiffError:
        return None
    if now is None or was is None or after is None or earlier is None:
        return None
    shapes = {side.shape for both in (now, was, after, earlier) for side in both}
    if len(shapes) != 1 or now.reference.size < _FEWEST or now.reference.dtype.kind == "c":
        return None
    size = max(float(np.sqrt(np.mean(np.square(side)))) for side in now)
    noise = max(_ROUNDINGS * rounding_of(pair) * size, 1e-300)
    sources = after.zip(earlier)
    sides = now.zip(was).zip(sources).map(lambda side: _follows(*side[0], *side[1], noise))
    if sides.reference is None or sides.candidate is None:
        return None
    known = Both(sides.reference, sides.candidate)
    moved = max(known, key=lambda side: side.share)
    if not moved.share or moved.share < _KNOWN * moved.error:
        return None
    return Averages(source, now, was, sources, known, noise)


def _follows(now: np.ndarray, before: np.ndarray, late: np.ndarray, early: np.ndarray, noise: float) -> Average | None:
    """Return how a weight follows its source; `None` if it does not."""
    change = now - before
    if np.sqrt(np.mean(np.square(change))) <= noise:
        return Average(0.0, noise / _root(late - before, noise), True, 1.0)
    shares = []
    for is_late, source in ((True, late), (False, early)):
        apart = source - before
        square = float(np.vdot(apart, apart))
        if not square:
            continue
        share = float(np.vdot(apart, change)) / square
        off = float(np.sqrt(np.mean(np.square(change - share * apart))))
        if off <= _SURE * noise and 0 < share <= 1 + _SAME:
            error = noise / _root(apart, noise) / math.sqrt(apart.size)
            shares.append((off, Average(share, error, is_late, 1.0 - share)))
            continue
        columns = np.stack([before.ravel(), source.ravel()], 1)
        kept, share = (float(each) for each in np.linalg.lstsq(columns, now.ravel(), rcond=None)[0])
        off = float(np.sqrt(np.mean(np.square(columns @ (kept, share) - now.ravel()))))
        # Two numbers fit a few values by chance.
        if off <= _SURE * noise and min(kept, share) > 0 and now.size >= _MANY and abs(kept + share - 1) > _SAME:
            shares.append((off, Average(share, noise / _root(apart, noise) / math.sqrt(apart.size), is_late, kept)))
    return min(shares, key=lambda each: each[0])[1] if shares else None


def _root(values: np.ndarray, least: float) -> float:
    return max(float(np.sqrt(np.mean(np.square(values)))), least)


def hypotheses(scene: DiffContext) -> Iterator[Hypothesis]:
    """Yield the hypothesis that the candidate averages a weight otherwise."""
    running = is_running(scene.diff.pair.anchor.slot)
    if running:
        yield from _of_buffers(scene)
    average = averages(scene, place_of(scene.diff.pair))
    if average is None or not average.differ:
        return
    later, next_average = _later(scene, average)
    changes = average.sides.zip(next_average.sides).map(lambda side: Averages.are_apart(*side))
    number = scene.number
    if not average.is_clear:
        scene, average = later, next_average
    reference, candidate = average.sides
    source = f"`{average.source[0]}`" if average.source[0] else "the model"
    if running:
        source = f"the running statistics of {source}"
    early = reference.share and (not candidate.share or (reference.late and not candidate.late))
    is_moved = early or not reference.share or (candidate.late and not reference.late)
    if is_moved and not running and _gives_the_same(scene, number):
        inside, outside = SIDES.swapped() if early else SIDES
        text = (
            f"the {inside} averages {source} after the step's weights are recorded, in a forward, the {outside} "
            "before: what the layer gives in this step agrees, so that both train with the same average"
        )
        predict = partial(_predicted, scene, average)
        yield Hypothesis("average_order", "an average", text, predict, "averages", free=1, telling=False)
        return
    if not reference.share:
        text = f"the candidate updates this average of {source} in this step, the reference does not"
        yield Hypothesis("average_missing", "an average", text, partial(_predicted, scene, average), "averages", free=1)
        return
    if not candidate.share:
        yield from _not_moved(scene, average, source)
        return
    if reference.late is not candidate.late and _close(reference, candidate):
        when = ["after" if side.late else "before" for side in average.sides]
        kind = "average_order"
        text = f"the candidate averages {source} {when[1]} the optimizer's step, the reference {when[0]} it"
    else:
        kind = "average_decay"
        decays = average.sides.map(_decay)
        text = f"the average of {source} has a decay of {decays.candidate} for the reference's {decays.reference}"
        if scene.number != number:
            text += f" in step {scene.number}"
        if changes.reference != changes.candidate:
            text += f": only the {'reference' if changes.reference else 'candidate'}'s changes from step to step"
        for side, other in (SIDES, SIDES.swapped()):
            if float(getattr(decays, side)) == 0:
                text = f"the {side} copies {source}, the {other} averages it with a decay of {getattr(decays, other)}"
    values = None if kind == "average_order" else average.sides.map(lambda side: float(_decay(side)))
    if not (reference.is_mean and candidate.is_mean):
        kept, other_kept = (f"{side.kept:.4g}" for side in (candidate, reference))
        share, other_share = (f"{side.share:.4g}" for side in (candidate, reference))
        text = (
            f"the candidate's average of {source} takes {kept} of itself and {share} of its source, the reference's "
            f"{other_kept} and {other_share}: together they have to be 1"
        )
        values = Both(float(other_share), float(share))
    predict = partial(_predicted, scene, average)
    yield Hypothesis(kind, "an average", text, predict, "averages", free=1, values=values)


def _gives_the_same(scene: DiffContext, number: int) -> bool:
    """Return True if the layer of a weight gives the same in its step, up to the rounding of equal weights."""
    layer = scene.diff.pair.anchor.layer
    outputs = [d for d in scene.diffs("forward") if d.pair.anchor.layer == layer and scene.number == number]
    figures = [diff.figures for diff in outputs]
    most = allowed("float32", "forward")
    return bool(figures) and all(each is not None and each.rel_l2 <= most for each in figures)


def _later(scene: DiffContext, average: Averages) -> tuple[DiffContext, Averages]:
    """Return the next step in which the shares clearly differ, of a few, with the average there; else those given.

    A share that follows a schedule differs little at first. Each side's weights are computed from its own.
    """
    place = place_of(scene.diff.pair)
    for number in [number for number in scene.numbers if number > scene.number][:_LATER]:
        pair = scene.pairs(number, "weight").get(place)
        if pair is not None:
            pairs = (each for stage in ("weight", "update") for each in scene.pairs(number, stage).values())
            later = replace(scene, diff=Diff(pair), step=[Diff(each) for each in pairs], _pairs={}, _sides={})
            next_average = averages(later, place)
            if next_average is not None and next_average.differ and next_average.is_clear:
                return later, next_average
    return scene, average


def within_step(scene: DiffContext) -> Iterator[Hypothesis]:
    """Yield the hypotheses on an output of a layer without an optimizer whose weights the model itself averages.

    A momentum encoder that is averaged in the forward differs in its outputs before its weights are recorded again.
    """
    layer, number = scene.diff.pair.anchor.layer, scene.number
    if scene.diff.pair.anchor.stage != "forward" or any(place[0] == layer for place in scene.pairs(number, "update")):
        return
    for place, pair in scene.pairs(number + 1, "weight").items():
        if place[0] == layer and place in scene.pairs(number, "weight") and not is_running(place[1]):
            yield from hypotheses(replace(scene, diff=Diff(pair)))


def _not_moved(scene: DiffContext, found: Averages, source: str) -> Iterator[Hypothesis]:
    """Yield the hypotheses on an average that the candidate left as it was in this step.

    A copy that equals its source does not move before the optimizer's step: the next step shows which it is.
    """
    missing = f"the candidate does not update this average of {source}"
    order = f"the candidate averages {source} before the optimizer's step, the reference after it"
    now, before = found.now.candidate, found.before.candidate
    equal = _root(found.sources.candidate[1] - before, 0.0) <= found.noise
    next_step = next((number for number in scene.numbers if number > scene.number), None)
    later = None if next_step != scene.number + 1 else _moved_next(scene, found, now)
    kinds = [("average_missing", missing)]
    if later is not None:
        if later.share and not later.late and equal:
            kinds = [("average_order", order)]
        elif later.share:
            text = f"the candidate does not update this average of {source} in this step, and does in the next one"
            kinds = [("average_missing", text)]
    elif equal and found.sides.reference.late:
        kinds.append(("average_order", order))
    for kind, text in kinds:
        yield Hypothesis(kind, "an average", text, partial(_predicted, scene, found), "averages", free=1)


def _moved_next(scene: DiffContext, found: Averages, now: np.ndarray) -> Average | None:
    """Return how the candidate's average follows its source in the next step; `None` if that is not recorded."""
    place, weights = place_of(scene.diff.pair), scene.pairs(scene.number + 1, "weight")
    if place not in weights or found.source not in weights:
        return None
    values = alike((weights[place], weights[found.source]))
    if values[0] is None or values[1] is None or values[0].candidate.shape != now.shape:
        return None
    return _follows(values[0].candidate, now, values[1].candidate, found.sources.candidate[0], found.noise)


def _close(reference: Average, candidate: Average) -> bool:
    return abs(reference.share - candidate.share) <= 0.02 * reference.share


def _decay(side: Average) -> str:
    digits = max(1, min(8, math.floor(-math.log10(max(_SURE * side.error, 1e-9)))))
    return f"{round(1 - side.share, digits):g}" if digits < 6 else f"{round(1 - side.share, digits)}"


def _predicted(scene: DiffContext, found: Averages) -> Iterator[Prediction]:
    for place in scene.pairs(scene.number, "weight"):
        each = averages(scene, place)
        if each is None or not each.differ:
            continue  # another copy may be averaged alike
        # The share of the first one, with the others' own values.
        without, predicted = (side.moved(each.before.candidate, each.sources.candidate) for side in found.sides)
        yield Prediction(f"{place[0]}/weight/{place[1]}", each.now.candidate, predicted, without, each.noise)


def _of_buffers(scene: DiffContext) -> Iterator[Hypothesis]:
    """Yield the hypotheses that one side averages running statistics, too, and the other only parameters.

    The share is that of the parameters of the same layer; what a batch makes of the statistics is the other side's.
    """
    for (side, other), early in product((SIDES.swapped(), SIDES), (False, True)):
        predictions = list(_averaged_buffers(scene, side, early))
        if not predictions:
            continue
        sources = " and ".join(dict.fromkeys(f"`{layer}`" for layer, _ in predictions))
        text = (
            f"the {side}'s average of {sources} takes in the running statistics, too, the {other}'s only parameters "
            "(paddle counts them among the parameters of a layer, torch among its buffers)"
        )
        yield Hypothesis(
            "average_buffers",
            "averaged buffers",
            text,
            partial(iter, [prediction for _, prediction in predictions]),
            "running means",
            free=int(early),
            tried=4,
        )


def _averaged_buffers(scene: DiffContext, side: str, early: bool) -> Iterator[tuple[str, Prediction]]:
    """Yield the layers whose running statistics are averaged, with the candidate's statistics if ``side`` averages.

    Args:
        scene: the first difference.
        side: the side that averages.
        early: True if it averages before the batch moves the statistics, False if after.
    """
    weights, earlier = scene.pairs(scene.number, "weight"), scene.pairs(scene.number - 1, "weight")
    for place, pair in weights.items():
        layer, slot, call = place
        # A variance is the frameworks' own: biased in paddle, unbiased in torch.
        if equivalents.slot(slot) != "running_mean":
            continue
        if early:
            trained = _statistics_trained(scene)
            sources = [] if place in trained else sources_of(place, trained, pair)[:1]
        else:
            siblings = (each for each in weights if each[0] == layer and not is_running(each[1]))
            follows = next((average for each in siblings if (average := averages(scene, each)) is not None), None)
            share = 0.0 if follows is None else getattr(follows.sides, side).share
            sources = [(follows.source[0], slot, call)] if follows is not None and 0 < share < 1 else []
        source = weights.get(sources[0]) if sources else None
        before = earlier.get(place) if early else pair
        if source is None or before is None:
            continue
        now, other, was = alike((pair, source, before))
        if now is None or other is None or was is None or now.reference.shape != other.reference.shape:
            continue
        size = max(float(np.sqrt(np.mean(np.square(values)))) for values in now)
        noise = max(_BUFFER_ROUNDINGS * rounding_of(pair) * size, 1e-300)
        if early:
            # The batch moves the averaged statistics on by its own share, so that less of the average is left.
            moved = getattr(other, side) - getattr(was, side)
            apart = now.candidate - now.reference
            left = float(np.vdot(apart, moved)) / max(float(np.vdot(moved, moved)), 1e-300)
            if not 0 < (left if side == "candidate" else -left) < 1 or now.reference.size < _FEWEST:
                continue
            predicted = now.reference + left * moved
        elif side == "candidate":
            predicted = now.reference + share * (other.candidate - now.reference)
        else:
            predicted = (now.reference - share * other.reference) / (1 - share)
        site = f"{layer}/weight/{slot}"
        yield sources[0][0] or "the model", Prediction(site, now.candidate, predicted, now.reference, noise)


def failing(scene: DiffContext, places: Sequence[int], diffs: Sequence[Diff]) -> dict[int, Averages]:
    """Return those of some diffs whose weight follows its source otherwise on the candidate's side."""
    failed = {}
    for place in places:
        average = averages(scene, place_of(diffs[place].pair))
        if average is not None and average.differ:
            failed[place] = average
    return failed
