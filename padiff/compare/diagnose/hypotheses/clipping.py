"""Hypotheses on clipping: by the norm of all gradients, by each tensor's norm, by value; on either side, or missing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from padiff.compare.diagnose.hypotheses import mending
from padiff.compare.diagnose.hypotheses.clip_parts import (
    AT_LIMIT,
    ROUND,
    SAME,
    by_group,
    by_tensor,
    otherwise,
    rounded_limit,
    swapped_sides,
)
from padiff.compare.diagnose.hypotheses.held import is_frozen
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.compare.diagnose.hypotheses.ratios import ratio_of, scaled
from padiff.compare.diagnose.hypotheses.scene import Scene
from padiff.compare.diagnose.hypotheses.step_gradients import Gradients, gradients_of, made_of
from padiff.errors import PadiffError
from padiff.records import LOOP, SIDES, Both, Record
from padiff.system.naming import first_few

# Other steps whose norms are looked at, and bytes that are read for it.
_STEPS, _BYTES = 3, 200_000_000


def hypotheses(scene: Scene) -> Iterator[Hypothesis]:
    """Of a first diff in the gradients that an optimizer got."""
    gradients = gradients_of(scene)
    if gradients.tensors:
        yield from _of_fewer(scene, gradients)
        yield from _by_norm(scene, gradients)
        yield from by_group(scene, gradients)
        yield from by_tensor(scene, gradients)
        yield from _by_value(scene, gradients)


def _of_fewer(scene: Scene, gradients: Gradients) -> Iterator[Hypothesis]:
    """Both clip by the norm of all gradients, and on one side some parameters have none."""
    norms = gradients.all_norms
    for side, other in (("candidate", "reference"), ("reference", "candidate")):
        lone = [
            d
            for d in scene.step
            if d.pair.stage == "grad" and getattr(d.pair, side) is None and d.figures is not None and not d.passed
        ]
        missing = sum(max(d.figures.reference_l2, d.figures.candidate_l2) ** 2 for d in lone if d.figures is not None)
        whole = getattr(norms, other) ** 2
        if not 0 < missing < whole:
            continue
        # What is left is scaled up to the same norm.
        ratio = math.sqrt(whole / (whole - missing)) ** (1 if side == "candidate" else -1)
        names = [f"{d.pair.anchor.layer}/{d.pair.anchor.slot}" for d in lone]
        frozen = all(is_frozen(scene, d.pair, side) for d in lone)
        why = "frozen there" if frozen else "detached, unused, or not in the optimizer"
        yield Hypothesis(
            "frozen" if frozen else "no_gradient",
            "gradients that are missing in the norm",
            f"{first_few(names, 3)} ha{'ve' if len(names) > 1 else 's'} no gradient on the {side} ({why}), so "
            f"that the others are clipped to {ratio:.5g} times the reference's",
            partial(scaled, gradients.tensors, ratio),
            "gradients",
            tried=2,
            telling=frozen,
        )


# -- by the norm of all --------------------------------------------------------------------------------------------


def _by_norm(scene: Scene, gradients: Gradients) -> Iterator[Hypothesis]:
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
    if limits.reference is not None and limits.candidate is not None:
        kind = "clip_limit"
        text = (
            f"the candidate clips gradients to a norm of {limits.candidate:.6g}, the reference to "
            f"{limits.reference:.6g}"
        )
        fix = mending.clipping(scene.frameworks.candidate, limits.reference)
    elif limits.reference is not None:
        kind = "clip_missing"
        text = (
            f"the candidate's gradients are not clipped, the reference's are, to a norm of {limits.reference:.6g} (the "
            f"candidate's norm is {norms.candidate:.5g})"
        )
        fix = mending.clipping(scene.frameworks.candidate, limits.reference)
    else:
        kind = "clip_added"
        text = (
            f"the candidate clips gradients to a norm of {limits.candidate:.6g}, the reference does not (its norm is "
            f"{norms.reference:.5g})"
        )
        fix = ""
    # The ratio is not solved for: it is that of the two norms.
    exact = norms.candidate / norms.reference
    name = "clipping by norm"
    yield Hypothesis(kind, name, text, lambda: scaled(gradients.tensors, exact), "gradients", 0, 3, 1, fix, sure)


def _limits(scene: Scene, norms: Both[float]) -> tuple[Both[float | None], bool]:
    """The limits that either side clips to, as far as it does; and whether it is sure that these are limits."""
    factors = made_of(scene, scene.number)
    others = _other_norms(scene)
    found: list[float | None] = []
    sure = True
    for norm, factor, rest in zip(norms, factors, others):
        rounded = float(f"{norm:.2g}")
        is_round = abs(norm - rounded) <= ROUND * rounded
        again = any(abs(other - norm) <= ROUND * norm for other in rest)
        above = any(other > norm * (1 + ROUND) for other in rest)
        if factor is not None and abs(factor - 1) <= SAME:
            found.append(None)  # it got what the backward gave
        elif above:
            found.append(None)
        elif is_round or again or (factor is not None and factor < 1 and not rest):
            found.append(rounded if is_round else norm)
            sure = sure and (is_round or again)
        else:
            found.append(None)
    return Both(*found), sure


def _other_norms(scene: Scene) -> Both[list[float]]:
    """The norms of all gradients in a few other steps."""
    near = sorted((n for n in scene.numbers if n != scene.number), key=lambda n: abs(n - scene.number))
    found: Both[list[float]] = Both([], [])
    read = 0
    for number in near[:_STEPS]:
        sides = scene.sides(number)
        if sides is None:
            continue
        for norms, step in zip(found, sides):
            records = [r for r in step.records if r.stage == "grad" and not r.call and r.layer != LOOP]
            read += sum(8 * math.prod(r.shape) for r in records if not r.source.sketched)
            if read > _BYTES:
                return found
            try:
                squares = [_square(record) for record in records]
            except PadiffError:
                continue
            if squares and all(math.isfinite(square) for square in squares):
                norms.append(math.sqrt(sum(squares)))
    return found


def _square(record: Record) -> float:
    sketch = record.sketch
    if sketch is not None:
        return sketch.l2**2
    values = record.value
    return float(np.sum(np.square(np.abs(values).astype(np.float64))))


# -- by value ------------------------------------------------------------------------------------------------------


def _by_value(scene: Scene, gradients: Gradients) -> Iterator[Hypothesis]:
    known = [one for one, elements in zip(gradients.tensors, gradients.elements) if elements]
    limits = Both(_value_limit([one.without for one in known]), _value_limit([one.actual for one in known]))
    for clipped, limit in zip(SIDES, limits):
        swapped = clipped == "reference"
        other = limits.swapped(swapped).reference
        # Of two that clip, the one with the lower limit follows from the other.
        if limit is None or (other is not None and other < limit):
            continue
        tensors = [swapped_sides(one) if swapped else one for one in known]
        below = [_part(one, np.abs(one.actual) < limit * (1 - 1e-6)) for one in tensors]
        factor = ratio_of(below) or 1.0
        each = [ratio_of([one]) or factor for one in below]

        def predict(
            tensors: Sequence[Prediction] = tensors,
            limit: float = limit,
            factors: Sequence[float] = [factor] * len(tensors),
        ) -> Iterator[Prediction]:
            for one, own in zip(tensors, factors):
                yield replace(one, predicted=np.clip(own * one.without, -limit, limit))

        if other is None:
            text = f"the {clipped} clips gradients by value, to {limit:.6g}" + otherwise(clipped, factor)
        else:
            text = (
                f"the candidate clips gradients by value to {limits.candidate:.6g}, the reference to "
                f"{limits.reference:.6g}"
            )
        kind = "clip_value" if other is None else "clip_limit"
        yield Hypothesis(kind, "clipping by value", text, predict, "gradients", free=2, tried=2)
        # The other side's tensors may be clipped one by one.
        text = f"the {clipped} clips gradients by value, to {limit:.6g}, the other side each tensor in a way of its own"
        many = partial(predict, factors=each)
        free = 1 + len(each)
        yield Hypothesis(kind, "clipping by value", text, many, "gradients", free=free, tried=2, changes=2)


def _value_limit(tensors: Sequence[np.ndarray]) -> float | None:
    """The size that several elements have, and none is above; `None` where there is none such."""
    largest = max((float(np.max(np.abs(one), initial=0.0)) for one in tensors), default=0.0)
    count = sum(int(np.count_nonzero(np.abs(one) >= largest * (1 - 1e-6))) for one in tensors)
    return rounded_limit(largest) if largest and math.isfinite(largest) and count >= AT_LIMIT else None


def _part(one: Prediction, where: np.ndarray) -> Prediction:
    return replace(one, actual=one.actual[where], without=one.without[where], predicted=one.predicted[where])
