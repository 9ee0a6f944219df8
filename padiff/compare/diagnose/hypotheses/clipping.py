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
from padiff.records import Both, Record

# A norm counts as a limit that somebody wrote if it is a number of two digits to this share of itself: by chance one in
# 500 is.
_ROUND = 2e-5
# Gradients that the backward gave are what the optimizer got, to this.
_SAME = 1e-3
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
    if not all(math.isfinite(norm) and norm > 0 for norm in norms) or abs(norms.candidate / norms.reference / ratio - 1) > _SAME:
        return
    limits = _limits(scene, norms)
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
            f"candidate's is {norms.candidate:.5g})"
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
    yield Hypothesis(kind, name, text, lambda: scaled(gradients.tensors, exact), "gradients", tried=3, fix=fix)


def _limits(scene: Scene, norms: Both[float]) -> Both[float | None]:
    """The limits that either side clips to, as far as it does."""
    factors = made_of(scene, scene.number)
    others = _other_norms(scene)
    found: list[float | None] = []
    for norm, factor, rest in zip(norms, factors, others):
        rounded = float(f"{norm:.2g}")
        is_round = abs(norm - rounded) <= _ROUND * rounded
        again = any(abs(other - norm) <= _ROUND * norm for other in rest)
        above = any(other > norm * (1 + _ROUND) for other in rest)
        if factor is not None and abs(factor - 1) <= _SAME:
            found.append(None)  # it got what the backward gave
        elif above:
            found.append(None)
        elif is_round or again or (factor is not None and factor < 1):
            found.append(rounded if is_round else norm)
        else:
            found.append(None)
    return Both(*found)


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
    for clipped, swapped in (("candidate", False), ("reference", True)):
        norms = [gradients.norms[place].swapped(swapped) for place in gradients.places]
        limit = max((norm.candidate for norm in norms), default=0.0)
        at = [abs(norm.candidate - limit) <= _ROUND * 5 * limit for norm in norms]
        if not limit or sum(at) < min(_AT_LIMIT, max(2, len(at))) or not math.isfinite(limit):
            continue
        tensors = [_swapped(one) if swapped else one for one in gradients.tensors]
        below = [one for one, there in zip(tensors, at) if not there]
        factor = (ratio_of(below) or 1.0) if below else 1.0
        shares = [factor * min(1.0, limit / (factor * n.reference)) if n.reference else 1.0 for n in norms]

        def predict(tensors: Sequence[Prediction] = tensors, shares: Sequence[float] = shares) -> Iterator[Prediction]:
            for one, share in zip(tensors, shares):
                yield replace(one, predicted=share * one.without)

        yield Hypothesis(
            "clip_tensor",
            "clipping by tensor",
            f"the {clipped} clips each tensor's gradient by itself, to a norm of {_rounded(limit):.6g}"
            + _otherwise(clipped, factor),
            predict,
            "gradients",
            free=1 + bool(below),
            tried=2,
        )


# -- by value ------------------------------------------------------------------------------------------------------


def _by_value(scene: Scene, gradients: Gradients) -> Iterator[Hypothesis]:
    for clipped, swapped in (("candidate", False), ("reference", True)):
        tensors = [_swapped(one) if swapped else one for one in gradients.tensors]
        limit = max(float(np.max(np.abs(one.actual))) for one in tensors)
        at = [np.abs(one.actual) >= limit * (1 - 1e-6) for one in tensors]
        if not limit or sum(int(one.sum()) for one in at) < _AT_LIMIT:
            continue
        below = [
            replace(one, actual=one.actual[~there], without=one.without[~there], predicted=one.predicted[~there])
            for one, there in zip(tensors, at)
        ]
        factor = ratio_of(below) or 1.0

        def predict(
            tensors: Sequence[Prediction] = tensors, limit: float = limit, factor: float = factor
        ) -> Iterator[Prediction]:
            for one in tensors:
                yield replace(one, predicted=np.clip(factor * one.without, -limit, limit))

        yield Hypothesis(
            "clip_value",
            "clipping by value",
            f"the {clipped} clips gradients by value, to {_rounded(limit):.6g}" + _otherwise(clipped, factor),
            predict,
            "gradients",
            free=2,
            tried=2,
        )


def _swapped(one: Prediction) -> Prediction:
    """The same with the reference's tensor as the one to predict."""
    return replace(one, actual=one.without, without=one.actual, predicted=one.actual)


def _otherwise(clipped: str, factor: float) -> str:
    other = "reference" if clipped == "candidate" else "candidate"
    if abs(factor - 1) <= _SAME:
        return f", the {other} does not"
    return f"; the {other}'s, where that leaves them alone, are {1 / factor:.5g} times as large: clipped in another way"


def _rounded(limit: float) -> float:
    rounded = float(f"{limit:.2g}")
    return rounded if abs(limit - rounded) <= _ROUND * rounded else limit
