"""Hypotheses on gradient clipping: by total norm, by tensor, by group or by value, on one side or both."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from padiff.compare.diagnose.hypotheses import parameter_history
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, whole_of
from padiff.compare.diagnose.hypotheses.gradients import (
    AT_MOST,
    Gradients,
    bias_sums,
    gradients_of,
    made_of,
    noise_level,
)
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.compare.diagnose.hypotheses.transforms import ratio_of, scaled
from padiff.errors import PadiffError
from padiff.records import LOOP, SIDES, Both, Figures, Pair, Record, Step, is_of_loss, settings_at

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


# Most other steps whose norms are read, and most bytes to read for them.
_STEPS, _BYTES = 3, 200_000_000


def hypotheses(scene: DiffContext) -> Iterator[Hypothesis]:
    """Yield hypotheses on clipping for a first diff in the gradients that an optimizer received."""
    gradients = gradients_of(scene)
    if gradients.tensors:
        yield from _of_each_backward(scene)
        while_scaled = list(_while_scaled(scene, gradients))
        yield from while_scaled or _by_norm(scene, gradients)
        yield from by_group(scene, gradients)
        yield from by_tensor(scene, gradients)
        yield from _by_value(scene, gradients)


def while_scaled(scene: DiffContext) -> Iterator[Hypothesis]:
    """Yield the hypothesis that a side clips scaled gradients, for a first diff in a loss that a loop scales itself."""
    yield from _while_scaled(scene, gradients_of(scene))


def _of_each_backward(scene: DiffContext) -> Iterator[Hypothesis]:
    """Yield the hypothesis that one side clips with each of several backwards, and so what the ones before left, too.

    The norms that its clipping gave show how often each micro-batch was scaled; biases show the sum.
    """
    steps = scene.sides(scene.number)
    if steps is None:
        return
    norms = steps.map(clipped_norms)
    for side, other in (SIDES.swapped(), SIDES):
        step, own = getattr(steps, side), getattr(norms, side)
        limit = settings_at(getattr(scene.runs, side).info.settings, step.settings).get("clip.limit")
        if not len(getattr(norms, other)) < len(own) == step.micro_batches > 1 or not isinstance(limit, float):
            continue
        early = not own[0]  # gradients are still zero: clipping comes before the backward
        factors = [*(min(1.0, limit / (norm + _TORCH)) for norm in own[early:]), *[1.0] * early]
        shares = np.cumprod(factors[::-1])[::-1]
        rows = [(pair, sorted(getattr(sums, side).items())) for pair, sums in bias_sums(scene, scene.number)]
        if any(len(sums) != len(own) for _, sums in rows):
            continue

        def predict(
            rows: Sequence[tuple[Pair, Sequence[tuple[object, np.ndarray]]]] = rows,
            shares: np.ndarray = shares,
            swap: bool = side == SIDES.reference,
        ) -> Iterator[Prediction]:
            for pair, sums in rows:
                values = whole_of(pair)
                if values is not None:
                    without, actual = (value.ravel() for value in values.swapped(swap))
                    noise = noise_level(scene) * float(np.sqrt(np.mean(np.square(actual)))) or 1.0
                    predicted = np.asarray(sum(share * gradient for share, (_, gradient) in zip(shares, sums)))
                    yield Prediction(pair.anchor.site, actual, predicted, without, noise)

        parts = ", ".join(f"{share:.3g}" for share in shares)
        often = "once, before its optimizer steps" if getattr(norms, other) else "not at all"
        text = (
            f"the {side} clips after each of the {len(own)} backwards of a step, to a norm of {limit:g}, and so again "
            f"what the backwards before left (their gradients count {parts} times); the {other} clips {often}"
        )
        if early:
            text = (
                f"the {side} clips before each of the {len(own)} backwards of a step, to a norm of {limit:g}, and so "
                f"only what the backwards before left (their gradients count {parts} times); the {other} clips {often}"
            )
        name = "clipping after each backward"
        yield Hypothesis("clip_each_backward", name, text, predict, "gradients of biases", tried=2, code=True)


def clipped_norms(step: Step) -> list[float]:
    """Return the norms that a step's calls of clipping gave, in order."""
    records = (r for r in step.records if r.layer == LOOP and r.stage == "grad" and r.slot.startswith("clip_grad_norm"))
    return [float(np.asarray(record.value).reshape(())) for record in records]


# -- by the norm of all --------------------------------------------------------------------------------------------


def _by_norm(scene: DiffContext, gradients: Gradients) -> Iterator[Hypothesis]:
    ratio = ratio_of(gradients.tensors)
    if ratio is None or ratio <= 0 or abs(ratio - 1) < 1e-4:
        return
    norms = gradients.all_norms
    if (
        not all(math.isfinite(norm) and norm > 0 for norm in norms)
        or abs(norms.candidate / norms.reference / ratio - 1) > SAME
    ):
        return
    limits, sure = _limits(scene, norms)
    if limits.reference is None and limits.candidate is None:
        return
    factors = made_of(scene, scene.number).zip(limits).map(lambda side: side[0] if side[1] is None else None)
    is_scaled = any(factor is not None and abs(factor - 1) > AT_MOST for factor in factors)
    for limit, norm in zip(limits, norms.swapped()):
        if None in (*limits,) and limit is not None and norm < limit and not is_scaled:
            return  # gradients below the limit are left as they are: no clipping is missing
    if is_scaled:
        kind, fix, sure = "clip_norm", "", False
        text = (
            "both loops scale their gradients before the optimizer steps, as where they clip by another norm: the "
            f"candidate's have a norm of {norms.candidate:.6g} then, the reference's of {norms.reference:.6g}"
        )
    elif limits.reference is not None and limits.candidate is not None:
        kind = "clip_limit"
        text = (
            f"the candidate clips gradients to a norm of {limits.candidate:.6g}, the reference to "
            f"{limits.reference:.6g}"
        )
        fix = parameter_history.clipping(scene.frameworks.candidate, limits.reference)
    elif limits.reference is not None:
        kind = "clip_missing"
        text = (
            f"the candidate's gradients are not clipped, the reference's are, to a norm of {limits.reference:.6g} (the "
            f"candidate's norm is {norms.candidate:.5g}){_clips_later(scene, norms.candidate)}"
        )
        fix = parameter_history.clipping(scene.frameworks.candidate, limits.reference)
    else:
        kind = "clip_added"
        text = (
            f"the candidate clips gradients to a norm of {limits.candidate:.6g}, the reference does not (its norm is "
            f"{norms.reference:.5g})"
        )
        fix = ""
    # The ratio is not solved for: the two norms give it.
    exact = norms.candidate / norms.reference
    name = "clipping by norm"
    yield Hypothesis(kind, name, text, lambda: scaled(gradients.tensors, exact), "gradients", 0, 3, 1, fix, sure)


def _clips_later(scene: DiffContext, norm: float) -> str:
    """Return text on a call of the candidate that clips too late, or too early; empty if there is none.

    Args:
        norm: the norm of the gradients that the optimizer received.
    """
    clip, step = (scene.runs.candidate.info.lines.get(role) for role in ("@clip", "@step"))
    steps = scene.sides(scene.number)
    if clip is None or step is None or steps is None:
        return ""
    norms = clipped_norms(steps.candidate)
    if norms and not any(norms):
        return f": it clips in line {clip.line}, before its backward, when gradients are still zero"
    if norms and all(abs(each - norm) > SAME * norm for each in norms):
        return ""  # it clips another model
    after = step.file == clip.file and step.line < clip.line
    return f": it clips in line {clip.line}, after its optimizer's step in line {step.line}" if after else ""


def _while_scaled(scene: DiffContext, gradients: Gradients) -> Iterator[Hypothesis]:
    """Yield the hypothesis that one side clips gradients that are still multiplied by the loss scale.

    Their norm is then the limit divided by the scale.
    """
    ratio, sides = ratio_of(gradients.tensors), scene.sides(scene.number)
    if ratio is None or ratio <= 0 or sides is None:
        return
    norms, others = gradients.all_norms, _other_norms(scene)
    measured = next((d.figures for d in scene.step if d.pair.stage == "grad" and is_of_loss(d.pair.anchor)), None)
    for side, other_side, below in ((*SIDES.swapped(), ratio), (*SIDES, 1 / ratio)):
        scale, norm = getattr(sides, side).loss_scale, getattr(norms, side)
        scale = scale if scale != 1 else _written_scale(scene, side)
        if scale <= 1 + SAME or below >= 1 or not 0 < norm < math.inf:
            continue
        limit = norm * scale
        rounded = float(f"{limit:.2g}")
        is_round = abs(limit - rounded) <= SAME * rounded
        again = any(abs(other_norm - norm) <= SAME * norm for other_norm in getattr(others, side))
        clipped = measured is not None and abs(_clip_ratio(measured, side) / scale - 1) <= SAME
        if not clipped and not (is_round and again):
            continue
        text = (
            f"the {side} clips gradients while they are multiplied by the loss scale of {scale:g}, to a norm of "
            f"{rounded if is_round else limit:.6g}: without the scale their norm is {norm:.5g}, the {other_side}'s is "
            f"{getattr(norms, other_side):.5g}"
        )
        by_scaler = getattr(sides, side).loss_scale != 1
        fix = "scaler.unscale_(optimizer)" if by_scaler and side == "candidate" else ""
        # The ratio is not solved for: the two norms give it.
        exact = partial(scaled, gradients.tensors, norms.candidate / norms.reference)
        name = "clipping before unscaling"
        # The norm that clipping measured shows the order in the code.
        yield Hypothesis("clip_scaled", name, text, exact, "gradients", 0, 3, 1, fix, code=clipped)


def _written_scale(scene: DiffContext, side: str) -> float:
    """Return the number that a side's loop multiplies its loss by: all its backward's gradients are one multiple of the
    other side's; 1 if they are not.
    """
    figures = [d.figures for d in scene.diffs("backward") if d.figures is not None and d.figures.reference_l2]
    sides = [Both(each.reference_l2, each.candidate_l2).swapped(side == SIDES.candidate) for each in figures]
    ratios = [each.reference / each.candidate for each in sides if each.candidate]
    is_multiple = ratios and max(ratios) - min(ratios) <= SAME * max(ratios)
    return float(np.median(ratios)) if is_multiple else 1.0


def _clip_ratio(figures: Figures, side: str) -> float:
    """Return the norm that clipping measured on a side, divided by the other side's; 0 if it is not known."""
    sides = Both(figures.reference_l2, figures.candidate_l2)
    first, second = sides if side == "reference" else sides.swapped()
    return first / second if second > 0 and math.isfinite(first) else 0.0


def _limits(scene: DiffContext, norms: Both[float]) -> tuple[Both[float | None], bool]:
    """Return the clipping limit of each side (`None` if it does not clip), and True if the limits are certain."""
    factors = made_of(scene, scene.number)
    others = _other_norms(scene)
    limits: list[float | None] = []
    sure = True
    for norm, factor, step_norms in zip(norms, factors, others):
        rounded = float(f"{norm:.2g}")
        is_round = abs(norm - rounded) <= ROUND * rounded
        again = any(abs(other_norm - norm) <= ROUND * norm for other_norm in step_norms)
        above = any(other_norm > norm * (1 + ROUND) for other_norm in step_norms)
        if factor is not None and abs(factor - 1) <= SAME:
            limits.append(None)  # the optimizer received the backward's gradients
        elif above:
            limits.append(None)
        elif is_round or again or (factor is not None and factor < 1 and not step_norms):
            limits.append(rounded if is_round else norm)
            sure = sure and (is_round or again)
        else:
            limits.append(None)
    return Both(*limits), sure


def _other_norms(scene: DiffContext) -> Both[list[float]]:
    """Return the total gradient norms of a few other steps, for each side."""
    near = sorted((n for n in scene.numbers if n != scene.number), key=lambda n: abs(n - scene.number))
    totals: Both[list[float]] = Both([], [])
    read = 0
    for number in near[:_STEPS]:
        sides = scene.sides(number)
        if sides is None:
            continue
        for norms, step in zip(totals, sides):
            records = [r for r in step.records if r.stage == "grad" and not r.call and r.layer != LOOP]
            read += sum(8 * math.prod(r.shape) for r in records if not r.source.sketched)
            if read > _BYTES:
                return totals
            try:
                squares = [_square(record) for record in records]
            except PadiffError:
                continue
            if squares and all(math.isfinite(square) for square in squares):
                norms.append(math.sqrt(sum(squares)))
    return totals


def _square(record: Record) -> float:
    sketch = record.sketch
    if sketch is not None:
        return sketch.l2**2
    values = record.value
    return float(np.sum(np.square(np.abs(values).astype(np.float64))))


# -- by value ------------------------------------------------------------------------------------------------------


def _by_value(scene: DiffContext, gradients: Gradients) -> Iterator[Hypothesis]:
    with_elements = [tensor for tensor, elements in zip(gradients.tensors, gradients.elements) if elements]
    limits = Both(
        _value_limit([tensor.without for tensor in with_elements]),
        _value_limit([tensor.actual for tensor in with_elements]),
    )
    for clipped, limit in zip(SIDES, limits):
        swapped = clipped == "reference"
        other_limit = limits.swapped(swapped).reference
        # If both sides clip, the side with the lower limit is predicted from the other.
        if limit is None or (other_limit is not None and other_limit < limit):
            continue
        tensors = [swapped_sides(tensor) if swapped else tensor for tensor in with_elements]
        below = [_part(tensor, np.abs(tensor.actual) < limit * (1 - 1e-6)) for tensor in tensors]
        factor = ratio_of(below) or 1.0
        each = [ratio_of([tensor]) or factor for tensor in below]

        def predict(
            tensors: Sequence[Prediction] = tensors,
            limit: float = limit,
            factors: Sequence[float] = [factor] * len(tensors),
        ) -> Iterator[Prediction]:
            for tensor, tensor_factor in zip(tensors, factors):
                yield replace(tensor, predicted=np.clip(tensor_factor * tensor.without, -limit, limit))

        if other_limit is None:
            text = f"the {clipped} clips gradients by value, to {limit:.6g}" + otherwise(clipped, factor)
        else:
            text = (
                f"the candidate clips gradients by value to {limits.candidate:.6g}, the reference to "
                f"{limits.reference:.6g}"
            )
        kind = "clip_value" if other_limit is None else "clip_limit"
        yield Hypothesis(kind, "clipping by value", text, predict, "gradients", free=2, tried=2)
        # The other side may clip each tensor by itself.
        text = f"the {clipped} clips gradients by value, to {limit:.6g}, the other side each tensor in a way of its own"
        many = partial(predict, factors=each)
        free = 1 + len(each)
        yield Hypothesis(kind, "clipping by value", text, many, "gradients", free=free, tried=2, changes=2)


def _value_limit(tensors: Sequence[np.ndarray]) -> float | None:
    """Return the largest absolute value if several elements share it, else `None`."""
    largest = max((float(np.max(np.abs(tensor), initial=0.0)) for tensor in tensors), default=0.0)
    count = sum(int(np.count_nonzero(np.abs(tensor) >= largest * (1 - 1e-6))) for tensor in tensors)
    return rounded_limit(largest) if largest and math.isfinite(largest) and count >= AT_LIMIT else None


def _part(tensor: Prediction, where: np.ndarray) -> Prediction:
    return replace(
        tensor, actual=tensor.actual[where], without=tensor.without[where], predicted=tensor.predicted[where]
    )
