"""Hypotheses on clipping part by part: each tensor by its norm, or each parameter group by its own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.compare.diagnose.hypotheses.ratios import ratio_of
from padiff.compare.diagnose.hypotheses.scene import Scene
from padiff.compare.diagnose.hypotheses.step_gradients import Gradients
from padiff.records import SIDES, Both

#: A norm counts as a limit that somebody wrote if it is a number of two digits to this share of itself: by chance one
#: in 500 is.
ROUND = 2e-5
#: Gradients that the backward gave are what the optimizer got, to this.
SAME = 1e-3
#: How many elements or tensors have to be at a limit.
AT_LIMIT = 3
# torch adds this to a norm that it divides by.
_TORCH = 1e-6
# Two tensors of one group have one ratio, to this; and groups that are distinguished, at most.
_ONE_RATIO, _GROUPS = 5e-5, 8


def by_tensor(scene: Scene, gradients: Gradients) -> Iterator[Hypothesis]:
    """Each tensor's gradient is clipped to a norm of its own."""
    norms = _whole_norms(scene, gradients)
    limits = Both(*(_limit([getattr(norm, side) for norm in norms]) for side in SIDES))
    for clipped, limit in zip(SIDES, limits):
        swapped = clipped == "reference"
        if limit is None or (swapped and limits.candidate is not None):
            continue
        other = limits.swapped(swapped).reference
        if other is not None:
            yield _limit_of_each(gradients, norms, limit, other)
            return
        sides = [norm.swapped(swapped) for norm in norms]
        tensors = [swapped_sides(one) if swapped else one for one in gradients.tensors]
        # What is not clipped shows the ratio of the two sides otherwise.
        free = [one for one, norm in zip(tensors, sides) if not _at(norm.candidate, limit)]
        factor = ratio_of(free) or 1.0
        for more in (0.0, _TORCH):
            shares = [
                factor * min(1.0, limit / (factor * n.reference + more)) if factor * n.reference > 0 else 1.0
                for n in sides
            ]
            yield Hypothesis(
                "clip_tensor",
                "clipping by tensor",
                f"the {clipped} clips each tensor's gradient by itself, to a norm of {limit:.6g}"
                + otherwise(clipped, factor),
                partial(_shared, tensors, shares),
                "gradients",
                free=1 + bool(free),
                tried=2,
            )


def by_group(scene: Scene, gradients: Gradients) -> Iterator[Hypothesis]:
    """Each parameter group is clipped to a norm of its own, as paddle does where an optimizer has several."""
    ratios = [ratio_of([one]) for one in gradients.tensors]
    groups = _groups([ratio if ratio is not None else math.nan for ratio in ratios])
    if not 2 <= len(groups) <= _GROUPS:
        return
    norms = [gradients.norms[place] for place in gradients.places]
    sums = [Both(*(math.sqrt(sum(getattr(norms[k], side) ** 2 for k in group)) for side in SIDES)) for group in groups]
    for clipped in SIDES:
        own = [getattr(norm, clipped) for norm in sums]
        limit = rounded_limit(max(own))
        at = [_at(norm, limit) for norm in own]
        if sum(at) < 2 or not limit:
            continue
        shares = dict.fromkeys(range(len(ratios)), 1.0)
        for group, norm in zip(groups, sums):
            shares.update(dict.fromkeys(group, norm.candidate / norm.reference if norm.reference else 1.0))
        other = "reference" if clipped == "candidate" else "candidate"
        yield Hypothesis(
            "clip_group",
            "clipping by group",
            f"the {clipped} clips the gradients of each parameter group by itself, to a norm of {limit:.6g} each, the "
            f"{other} does not",
            partial(_shared, gradients.tensors, [shares[k] for k in range(len(ratios))]),
            "gradients",
            free=len(groups),
            tried=2,
            changes=2,
        )


def _groups(ratios: Sequence[float]) -> list[list[int]]:
    """Which have one ratio."""
    found: list[list[int]] = []
    last = math.nan
    for k in sorted((k for k, ratio in enumerate(ratios) if math.isfinite(ratio)), key=lambda k: ratios[k]):
        if found and abs(ratios[k] - last) <= _ONE_RATIO * abs(last):
            found[-1].append(k)
        else:
            found.append([k])
        last = ratios[k]
    return found


def _whole_norms(scene: Scene, gradients: Gradients) -> list[Both[float]]:
    """The norms of the whole tensors that each gradient is of: of query, key and value in one, of all three."""
    pairs = scene.pairs(scene.number, "grad")
    names = []
    for place in gradients.places:
        sides = pairs[place].sides
        names.append(sides.map(lambda r: (r.layer, r.slot.partition("[")[0], r.call) if r is not None else ("", "", 0)))
    norms = [gradients.norms[place] for place in gradients.places]
    totals: Both[dict[tuple[str, str, int], float]] = Both({}, {})
    for name, norm in zip(names, norms):
        for side, key, value in zip(totals, name, norm):
            side[key] = side.get(key, 0.0) + value**2
    return [name.zip(totals).map(lambda side: math.sqrt(side[1][side[0]])) for name in names]


def _limit(norms: Sequence[float]) -> float | None:
    """The norm that many tensors' gradients have, or that somebody wrote, and none is above; else `None`."""
    largest = max(norms, default=0.0)
    if not largest or not math.isfinite(largest):
        return None
    rounded = rounded_limit(largest)
    many = sum(_at(norm, largest) for norm in norms) >= min(AT_LIMIT, max(2, len(norms)))
    return rounded if many or rounded == float(f"{largest:.2g}") else None


def _at(norm: float, limit: float) -> bool:
    return abs(norm - limit) <= 5 * ROUND * limit


def _limit_of_each(gradients: Gradients, norms: Sequence[Both[float]], limit: float, other: float) -> Hypothesis:
    """That both clip each tensor by itself, to other limits: only those at a limit can differ."""
    clipped = [_at(norm.candidate, limit) or _at(norm.reference, other) for norm in norms]
    shares = [n.candidate / n.reference if there and n.reference else 1.0 for n, there in zip(norms, clipped)]
    return Hypothesis(
        "clip_limit",
        "another limit of clipping by tensor",
        f"the candidate clips each tensor's gradient to a norm of {limit:.6g}, the reference to {other:.6g}",
        partial(_shared, gradients.tensors, shares),
        "gradients",
        free=len(gradients.tensors),
        tried=2,
        telling=not _at(limit, other),
    )


def _shared(tensors: Sequence[Prediction], shares: Sequence[float]) -> Iterator[Prediction]:
    for one, share in zip(tensors, shares):
        yield replace(one, predicted=share * one.without)


def swapped_sides(one: Prediction) -> Prediction:
    """The same with the reference's tensor as the one to predict."""
    return replace(one, actual=one.without, without=one.actual, predicted=one.actual)


def otherwise(clipped: str, factor: float) -> str:
    """What the side does that does not clip so, in words."""
    other = "reference" if clipped == "candidate" else "candidate"
    if abs(factor - 1) <= SAME:
        return f", the {other} does not"
    return f"; the {other}'s, where that leaves them alone, are {1 / factor:.5g} times as large: clipped in another way"


def rounded_limit(limit: float) -> float:
    """A limit as somebody wrote it."""
    rounded = float(f"{limit:.2g}")
    return rounded if abs(limit - rounded) <= 5 * ROUND * rounded else limit
