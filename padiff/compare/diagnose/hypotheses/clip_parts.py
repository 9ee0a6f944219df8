"""Hypotheses on clipping in parts: each tensor by its own norm, or each parameter group by its own norm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.compare.diagnose.hypotheses.ratios import ratio_of
from padiff.compare.diagnose.hypotheses.step_gradients import Gradients
from padiff.records import SIDES, Both

#: Largest relative difference of a norm from a number of two digits, for the norm to count as a clipping limit: by
#: chance one in 500 is.
ROUND = 2e-5
#: Largest relative difference of equal norms: of the backward's gradients and of those that the optimizer received.
SAME = 1e-3
#: Least count of elements or tensors at a limit.
AT_LIMIT = 3
# torch adds this number to the norm that it divides by.
_TORCH = 1e-6
# Largest relative difference of the ratios of two tensors of one group, and the most groups that are tried.
_ONE_RATIO, _GROUPS = 5e-5, 8


def by_tensor(scene: DiffContext, gradients: Gradients) -> Iterator[Hypothesis]:
    """Yield hypotheses that one or both sides clip each tensor's gradient by its own norm."""
    norms = _whole_norms(scene, gradients)
    limits = Both(*(_limit([getattr(norm, side) for norm in norms]) for side in SIDES))
    for clipped, limit in zip(SIDES, limits):
        swapped = clipped == "reference"
        if limit is None or (swapped and limits.candidate is not None):
            continue
        other_limit = limits.swapped(swapped).reference
        if other_limit is not None:
            yield _limit_of_each(gradients, norms, limit, other_limit)
            return
        sides = [norm.swapped(swapped) for norm in norms]
        tensors = [swapped_sides(tensor) if swapped else tensor for tensor in gradients.tensors]
        # Tensors below the limit show the other ratio of the two sides.
        free = [tensor for tensor, norm in zip(tensors, sides) if not _at(norm.candidate, limit)]
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


def by_group(scene: DiffContext, gradients: Gradients) -> Iterator[Hypothesis]:
    """Yield hypotheses that a side clips each parameter group by its own norm, as paddle does for several groups."""
    ratios = [ratio_of([tensor]) for tensor in gradients.tensors]
    groups = _groups([ratio if ratio is not None else math.nan for ratio in ratios])
    if not 2 <= len(groups) <= _GROUPS:
        return
    norms = [gradients.norms[place] for place in gradients.places]
    sums = [Both(*(math.sqrt(sum(getattr(norms[k], side) ** 2 for k in group)) for side in SIDES)) for group in groups]
    for clipped in SIDES:
        side_norms = [getattr(norm, clipped) for norm in sums]
        limit = rounded_limit(max(side_norms))
        at = [_at(norm, limit) for norm in side_norms]
        if sum(at) < 2 or not limit:
            continue
        shares = dict.fromkeys(range(len(ratios)), 1.0)
        for group, norm in zip(groups, sums):
            shares.update(dict.fromkeys(group, norm.candidate / norm.reference if norm.reference else 1.0))
        other_side = "reference" if clipped == "candidate" else "candidate"
        yield Hypothesis(
            "clip_group",
            "clipping by group",
            f"the {clipped} clips the gradients of each parameter group by itself, to a norm of {limit:.6g} each, the "
            f"{other_side} does not",
            partial(_shared, gradients.tensors, [shares[k] for k in range(len(ratios))]),
            "gradients",
            free=len(groups),
            tried=2,
            changes=2,
        )


def _groups(ratios: Sequence[float]) -> list[list[int]]:
    """Return the indices of equal ratios, in groups."""
    groups: list[list[int]] = []
    last = math.nan
    for k in sorted((k for k, ratio in enumerate(ratios) if math.isfinite(ratio)), key=lambda k: ratios[k]):
        if groups and abs(ratios[k] - last) <= _ONE_RATIO * abs(last):
            groups[-1].append(k)
        else:
            groups.append([k])
        last = ratios[k]
    return groups


def _whole_norms(scene: DiffContext, gradients: Gradients) -> list[Both[float]]:
    """Return the norm of each gradient's whole parameter: for a part of a fused weight, the norm of all parts."""
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
    """Return the largest norm if many gradients share it or if it is a round number, else `None`."""
    largest = max(norms, default=0.0)
    if not largest or not math.isfinite(largest):
        return None
    rounded = rounded_limit(largest)
    many = sum(_at(norm, largest) for norm in norms) >= min(AT_LIMIT, max(2, len(norms)))
    return rounded if many or rounded == float(f"{largest:.2g}") else None


def _at(norm: float, limit: float) -> bool:
    return abs(norm - limit) <= 5 * ROUND * limit


def _limit_of_each(
    gradients: Gradients, norms: Sequence[Both[float]], limit: float, reference_limit: float
) -> Hypothesis:
    """Return the hypothesis that both sides clip each tensor, to different limits; only tensors at a limit differ."""
    clipped = [_at(norm.candidate, limit) or _at(norm.reference, reference_limit) for norm in norms]
    shares = [n.candidate / n.reference if is_clipped and n.reference else 1.0 for n, is_clipped in zip(norms, clipped)]
    return Hypothesis(
        "clip_limit",
        "another limit of clipping by tensor",
        f"the candidate clips each tensor's gradient to a norm of {limit:.6g}, the reference to {reference_limit:.6g}",
        partial(_shared, gradients.tensors, shares),
        "gradients",
        free=len(gradients.tensors),
        tried=2,
        telling=not _at(limit, reference_limit),
    )


def _shared(tensors: Sequence[Prediction], shares: Sequence[float]) -> Iterator[Prediction]:
    for tensor, share in zip(tensors, shares):
        yield replace(tensor, predicted=share * tensor.without)


def swapped_sides(one: Prediction) -> Prediction:
    """Return the prediction with swapped sides, so that the reference's tensor is the one to predict."""
    return replace(one, actual=one.without, without=one.actual, predicted=one.actual)


def otherwise(clipped: str, factor: float) -> str:
    """Return text on the side that does not clip in this way."""
    other_side = "reference" if clipped == "candidate" else "candidate"
    if abs(factor - 1) <= SAME:
        return f", the {other_side} does not"
    return (
        f"; the {other_side}'s, where that leaves them alone, are {1 / factor:.5g} times as large: "
        "clipped in another way"
    )


def rounded_limit(limit: float) -> float:
    """Return the number of two digits close to the limit, or the limit itself."""
    rounded = float(f"{limit:.2g}")
    return rounded if abs(limit - rounded) <= 5 * ROUND * rounded else limit
