"""Hypotheses on clipping: by the norm of all gradients, by each tensor's norm, by value; on either side, or missing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from padiff.compare.diagnose.hypotheses import mending
from padiff.compare.diagnose.hypotheses.gradients import Gradients, gradients_of, made_of
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.compare.diagnose.hypotheses.ratios import ratio_of, scaled
from padiff.compare.diagnose.hypotheses.scene import Scene
from padiff.errors import PadiffError
from padiff.records import SIDES, Both, Record

# A norm counts as a limit that somebody wrote if it is a number of two digits to this share of itself: by chance one in
# 500 is.
_ROUND = 2e-5
# Gradients that the backward gave are what the optimizer got, to this.
_SAME = 1e-3
# torch adds this to a norm that it divides by.
_TORCH = 1e-6
# How many elements or tensors have to be at a limit.
_AT_LIMIT = 3
# Other steps whose norms are looked at, and bytes that are read for it.
_STEPS, _BYTES = 3, 200_000_000


def hypotheses(scene: Scene) -> Iterator[Hypothesis]:
    """Of a first diff in the gradients that an optimizer got."""
    gradients = gradients_of(scene)
    if gradients.tensors:
        yield from _by_norm(scene, gradients)
        yield from _by_tensor(scene, gradients)
        yield from _by_value(scene, gradients)


# -- by the norm of all --------------------------------------------------------------------------------------------


def _by_norm(scene: Scene, gradients: Gradients) -> Iterator[Hypothesis]:
    ratio = ratio_of(gradients.tensors)
    if ratio is None or ratio <= 0 or abs(ratio - 1) < 1e-4:
        return
    norms = gradients.all_norms
    if (
        not all(math.isfinite(norm) and norm > 0 for norm in norms)
        or abs(norms.candidate / norms.reference / ratio - 1) > _SAME
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
        is_round = abs(norm - rounded) <= _ROUND * rounded
        again = any(abs(other - norm) <= _ROUND * norm for other in rest)
        above = any(other > norm * (1 + _ROUND) for other in rest)
        if factor is not None and abs(factor - 1) <= _SAME:
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
            records = [r for r in step.records if r.stage == "grad" and not r.call]
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


# -- by each tensor's norm -----------------------------------------------------------------------------------------


def _by_tensor(scene: Scene, gradients: Gradients) -> Iterator[Hypothesis]:
    norms = [gradients.norms[place] for place in gradients.places]
    limits = Both(*(_norm_limit([getattr(norm, side) for norm in norms]) for side in SIDES))
    for clipped, limit in zip(SIDES, limits):
        swapped = clipped == "reference"
        if limit is None or (swapped and limits.candidate is not None):
            continue
        sides = [norm.swapped(swapped) for norm in norms]
        tensors = [_swapped(one) if swapped else one for one in gradients.tensors]
        other = limits.swapped(swapped).reference
        # What neither clips shows the ratio of the two, if anything is left.
        free = [
            one
            for one, norm in zip(tensors, sides)
            if not _at(norm.candidate, limit) and (other is None or not _at(norm.reference, other))
        ]
        factor = ratio_of(free) or 1.0
        if other is not None and not swapped:
            yield _limit_of_each(gradients, norms, limit, other)
            return
        variants = [
            [factor * min(1.0, limit / (factor * n.reference + more)) if n.reference else 1.0 for n in sides]
            for more in (0.0, _TORCH)
        ]
        for shares in variants:

            def predict(
                tensors: Sequence[Prediction] = tensors, shares: Sequence[float] = shares
            ) -> Iterator[Prediction]:
                for one, share in zip(tensors, shares):
                    yield replace(one, predicted=share * one.without)

            yield Hypothesis(
                "clip_tensor",
                "clipping by tensor",
                f"the {clipped} clips each tensor's gradient by itself, to a norm of {limit:.6g}"
                + _otherwise(clipped, factor),
                predict,
                "gradients",
                free=1 + bool(free),
                tried=2,
            )


def _norm_limit(norms: Sequence[float]) -> float | None:
    """The norm that many tensors' gradients have, and none is above; `None` where there is none such."""
    largest = max(norms, default=0.0)
    if not largest or not math.isfinite(largest):
        return None
    return (
        _rounded(largest) if sum(_at(norm, largest) for norm in norms) >= min(_AT_LIMIT, max(2, len(norms))) else None
    )


def _at(norm: float, limit: float) -> bool:
    return abs(norm - limit) <= _ROUND * 5 * limit


def _limit_of_each(gradients: Gradients, norms: Sequence[Both[float]], limit: float, other: float) -> Hypothesis:
    """That both clip each tensor by itself, to other limits: only those at a limit can differ."""

    def predict() -> Iterator[Prediction]:
        for one, norm in zip(gradients.tensors, norms):
            clipped = _at(norm.candidate, limit) or _at(norm.reference, other)
            share = norm.candidate / norm.reference if clipped and norm.reference else 1.0
            yield replace(one, predicted=share * one.without)

    return Hypothesis(
        "clip_limit",
        "another limit of clipping by tensor",
        f"the candidate clips each tensor's gradient to a norm of {limit:.6g}, the reference to {other:.6g}",
        predict,
        "gradients",
        free=len(gradients.tensors),
        tried=2,
    )


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
        tensors = [_swapped(one) if swapped else one for one in known]
        below = [_part(one, np.abs(one.actual) < limit * (1 - 1e-6)) for one in tensors]
        factor = ratio_of(below) or 1.0

        def predict(
            tensors: Sequence[Prediction] = tensors, limit: float = limit, factor: float = factor
        ) -> Iterator[Prediction]:
            for one in tensors:
                yield replace(one, predicted=np.clip(factor * one.without, -limit, limit))

        if other is None:
            text = f"the {clipped} clips gradients by value, to {limit:.6g}" + _otherwise(clipped, factor)
        else:
            text = (
                f"the candidate clips gradients by value to {limits.candidate:.6g}, the reference to "
                f"{limits.reference:.6g}"
            )
        yield Hypothesis(
            "clip_value" if other is None else "clip_limit",
            "clipping by value",
            text,
            predict,
            "gradients",
            free=2,
            tried=2,
        )


def _value_limit(tensors: Sequence[np.ndarray]) -> float | None:
    """The size that several elements have, and none is above; `None` where there is none such."""
    largest = max((float(np.max(np.abs(one), initial=0.0)) for one in tensors), default=0.0)
    count = sum(int(np.count_nonzero(np.abs(one) >= largest * (1 - 1e-6))) for one in tensors)
    return _rounded(largest) if largest and math.isfinite(largest) and count >= _AT_LIMIT else None


def _part(one: Prediction, where: np.ndarray) -> Prediction:
    return replace(one, actual=one.actual[where], without=one.without[where], predicted=one.predicted[where])


def _swapped(one: Prediction) -> Prediction:
    """The same with the reference's tensor as the one to predict."""
    return replace(one, actual=one.without, without=one.actual, predicted=one.actual)


def _otherwise(clipped: str, factor: float) -> str:
    other = "reference" if clipped == "candidate" else "candidate"
    if abs(factor - 1) <= _SAME:
        return f", the {other} does not"
    return f"; the {other}'s, where that leaves them alone, are {1 / factor:.5g} times as large: clipped in another way"


def _rounded(limit: float) -> float:
    """A limit as somebody wrote it."""
    rounded = float(f"{limit:.2g}")
    return rounded if abs(limit - rounded) <= 5 * _ROUND * rounded else limit
