"""Hypotheses on weights that changed outside of the optimizer's recorded step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from padiff.compare.diagnose.hypotheses import transforms
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, Place, alike, is_elements, rounding_of
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.records import Both, Cause

# Most steps before this one whose weights are compared, and most elements of each weight.
_BEFORE, _ELEMENTS = 8, 1024
# Rounding error of the sum of a weight and its update, in rounding units.
_ADDED = 4.0


@dataclass(frozen=True)
class _Weight:
    """A parameter's weight in consecutive steps.

    Attributes:
        now: the weights of both sides in the step of the first diff.
        before: the weights of both sides in the steps before, the latest first.
        expected: the sum of the weights and updates of the step before.
        elements: True for elements, False for projections.
    """

    place: Place
    now: Both[np.ndarray]
    before: tuple[Both[np.ndarray], ...]
    expected: Both[np.ndarray]
    noise: float
    elements: bool
    limit: float


def hypotheses(scene: DiffContext) -> Iterator[Hypothesis]:
    """Yield hypotheses on a first diff in a weight of a later step, if the step before is recorded."""
    if scene.number - 1 not in scene.numbers:
        return
    steps = [n for n in reversed(scene.numbers) if n < scene.number][:_BEFORE]
    weights = list(_weights(scene, steps))
    if not weights:
        return
    for side in ("candidate", "reference"):
        if not _left_alone(weights, side):
            yield from _changed(scene, weights, steps, side)


def unrecorded(scene: DiffContext) -> Iterator[Cause]:
    """Yield the cause "unknown" for a first diff in a weight after a gap in the recorded steps, naming the gap."""
    last = max((n for n in scene.numbers if n < scene.number), default=None)
    if last is None or last == scene.number - 1:
        return
    gap = f"{last + 1} to {scene.number - 1}" if last + 2 < scene.number else str(last + 1)
    yield Cause(
        "unknown",
        f"unknown; the weights differ by more than the update of step {last} explains: the cause is in step {gap}, of "
        "which nothing is recorded: record every step from there on",
    )


def _weights(scene: DiffContext, steps: Sequence[int]) -> Iterator[_Weight]:
    for place, update in scene.pairs(scene.number - 1, "update").items():
        pair = scene.pairs(scene.number, "weight").get(place)
        rows = [scene.pairs(number, "weight").get(place) for number in steps]
        values = alike((pair, update, *rows), _ELEMENTS)
        now, added, *before = values
        earlier = [sides for sides in before if sides is not None]
        if pair is None or now is None or added is None or before[0] is None or len(earlier) != len(before):
            continue
        if any(sides.reference.shape != now.reference.shape for sides in (added, *earlier)):
            continue
        expected = earlier[0].zip(added).map(lambda side: np.asarray(side[0] + side[1]))
        root = max(float(np.sqrt(np.mean(np.square(side)))) for side in now)
        noise = max(_ADDED * rounding_of(pair) * root, 1e-300)
        yield _Weight(place, now, tuple(earlier), expected, noise, is_elements(pair), scene.limit(pair))


def _left_alone(weights: Sequence[_Weight], side: str) -> bool:
    """Return True if a side's weights are the sums of the weights and updates of the step before."""
    return all(
        np.sqrt(np.mean(np.square(getattr(weight.now, side) - getattr(weight.expected, side)))) <= 3 * weight.noise
        for weight in weights
    )


def _changed(scene: DiffContext, weights: Sequence[_Weight], steps: Sequence[int], side: str) -> Iterator[Hypothesis]:
    """Yield hypotheses on the origin of weights that differ from the sum of the side's weights and updates."""
    head = (
        f"between steps {scene.number - 1} and {scene.number} something else than the {side}'s optimizer changed its "
        "weights: they are"
    )
    for k, number in enumerate(steps):
        yield Hypothesis(
            "weights_reloaded",
            f"weights of step {number}",
            f"{head} those of the start of step {number} again (a checkpoint was loaded, or the step undone)",
            partial(_predicted, weights, side, partial(_earlier, side=side, back=k)),
            "weights",
            tried=len(steps),
        )
    with_elements = [weight for weight in weights if weight.elements]
    largest = max((float(np.max(np.abs(getattr(weight.now, side)))) for weight in with_elements), default=0.0)
    if largest:
        limit = transforms.round_limit(largest)
        yield Hypothesis(
            "weights_clamped",
            "clamped weights",
            f"{head} clamped to {limit:.6g}",
            partial(_predicted, with_elements, side, partial(_clamped, side=side, limit=limit)),
            "weights",
            free=1,
        )
    for count in range(len(steps) + 1):
        parts = _fitted(weights, side, count)
        if parts is None:
            continue
        shares = ", ".join(f"{part:.3g}" for part in parts)
        many = "the step before" if count == 1 else f"the {count} steps before"
        if count:
            text = f"{head} an average of what they would be and of the weights of {many} (shares {shares})"
        else:
            text = f"{head} {float(parts[0]):.6g} times what its updates come to"
        yield Hypothesis(
            "weights_averaged" if count else "weights_scaled",
            "averaged weights" if count else "scaled weights",
            text,
            partial(_predicted, weights, side, partial(_mixed, side=side, parts=parts)),
            "weights",
            free=count + 1,
            tried=len(steps) + 1,
            changes=1 + count,
        )


def _predicted(weights: Sequence[_Weight], side: str, make: Callable[[_Weight], np.ndarray]) -> Iterator[Prediction]:
    for weight in weights:
        now, expected = getattr(weight.now, side), getattr(weight.expected, side)
        yield Prediction(
            f"{weight.place[0]}/weight/{weight.place[1]}", now, make(weight), expected, weight.noise, weight.limit
        )


def _earlier(weight: _Weight, side: str, back: int) -> np.ndarray:
    return np.asarray(getattr(weight.before[back], side))


def _clamped(weight: _Weight, side: str, limit: float) -> np.ndarray:
    return np.asarray(np.clip(getattr(weight.expected, side), -limit, limit))


def _columns(weight: _Weight, side: str, count: int) -> list[np.ndarray]:
    """Return the expected weights, and the weights of the last ``count`` steps before."""
    return [getattr(weight.expected, side), *(getattr(before, side) for before in weight.before[:count])]


def _mixed(weight: _Weight, side: str, parts: np.ndarray) -> np.ndarray:
    return np.asarray(np.stack(_columns(weight, side, len(parts) - 1), axis=1) @ parts)


def _fitted(weights: Sequence[_Weight], side: str, count: int) -> np.ndarray | None:
    """Return the factors of `_columns`, equal for all parameters, that fit a side's weights; `None` if not finite."""
    rows = [np.stack(_columns(weight, side, count), axis=1) / weight.noise for weight in weights]
    target = np.concatenate([getattr(weight.now, side) / weight.noise for weight in weights])
    factors = np.linalg.lstsq(np.concatenate(rows), target, rcond=1e-10)[0]
    return np.asarray(factors) if np.isfinite(factors).all() else None
