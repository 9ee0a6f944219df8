"""Hypotheses on weights that something other than the optimizer's recorded step changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from padiff.compare.diagnose.hypotheses import transforms
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.compare.diagnose.hypotheses.scene import Place, Scene, alike, is_elements, rounding_of
from padiff.records import Both, Cause

# Steps before this one whose weights are looked at, and elements of each weight.
_BEFORE, _ELEMENTS = 8, 1024
# What a weight and its update add up to is rounded once or twice.
_ADDED = 4.0


@dataclass(frozen=True)
class _Weight:
    """A parameter's weight in a row of steps.

    Attributes:
        now: both sides, in the step of the first diff.
        before: the weights of the steps before, the latest first; both sides.
        expected: what the weights of the step before and its updates add up to.
        elements: whether these are elements; else projections.
    """

    place: Place
    now: Both[np.ndarray]
    before: tuple[Both[np.ndarray], ...]
    expected: Both[np.ndarray]
    noise: float
    elements: bool
    limit: float


def hypotheses(scene: Scene) -> Iterator[Hypothesis]:
    """Of a first diff in a weight of a later step, where the step before it is recorded."""
    if scene.number - 1 not in scene.numbers:
        return
    steps = [n for n in reversed(scene.numbers) if n < scene.number][:_BEFORE]
    weights = list(_weights(scene, steps))
    if not weights:
        return
    for side in ("candidate", "reference"):
        if not _left_alone(weights, side):
            yield from _changed(scene, weights, steps, side)


def unrecorded(scene: Scene) -> Iterator[Cause]:
    """Of a first diff in a weight, where the steps before it are not recorded: which these are."""
    last = max((n for n in scene.numbers if n < scene.number), default=None)
    if last is None or last == scene.number - 1:
        return
    gap = f"{last + 1} to {scene.number - 1}" if last + 2 < scene.number else str(last + 1)
    yield Cause(
        "unknown",
        f"unknown; the weights come apart by more than the update of step {last} explains, so it is in step {gap}, of "
        "which nothing is recorded: record every step from there on",
    )


def _weights(scene: Scene, steps: Sequence[int]) -> Iterator[_Weight]:
    for place, update in scene.pairs(scene.number - 1, "update").items():
        pair = scene.pairs(scene.number, "weight").get(place)
        rows = [scene.pairs(number, "weight").get(place) for number in steps]
        values = alike((pair, update, *rows), _ELEMENTS)
        now, added, *before = values
        known = [one for one in before if one is not None]
        if pair is None or now is None or added is None or before[0] is None or len(known) != len(before):
            continue
        if any(one.reference.shape != now.reference.shape for one in (added, *known)):
            continue
        expected = known[0].zip(added).map(lambda side: np.asarray(side[0] + side[1]))
        root = max(float(np.sqrt(np.mean(np.square(side)))) for side in now)
        noise = max(_ADDED * rounding_of(pair) * root, 1e-300)
        yield _Weight(place, now, tuple(known), expected, noise, is_elements(pair), scene.limit(pair))


def _left_alone(weights: Sequence[_Weight], side: str) -> bool:
    """Whether a side's weights are what those of the step before and its updates add up to."""
    return all(
        np.sqrt(np.mean(np.square(getattr(one.now, side) - getattr(one.expected, side)))) <= 3 * one.noise
        for one in weights
    )


def _changed(scene: Scene, weights: Sequence[_Weight], steps: Sequence[int], side: str) -> Iterator[Hypothesis]:
    """What the side's weights are, instead of what its own updates come to."""
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
    known = [one for one in weights if one.elements]
    largest = max((float(np.max(np.abs(getattr(one.now, side)))) for one in known), default=0.0)
    if largest:
        limit = transforms.round_limit(largest)
        yield Hypothesis(
            "weights_clamped",
            "clamped weights",
            f"{head} clamped to {limit:.6g}",
            partial(_predicted, known, side, partial(_clamped, side=side, limit=limit)),
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
    for one in weights:
        now, expected = getattr(one.now, side), getattr(one.expected, side)
        yield Prediction(f"{one.place[0]}/weight/{one.place[1]}", now, make(one), expected, one.noise, one.limit)


def _earlier(one: _Weight, side: str, back: int) -> np.ndarray:
    return np.asarray(getattr(one.before[back], side))


def _clamped(one: _Weight, side: str, limit: float) -> np.ndarray:
    return np.asarray(np.clip(getattr(one.expected, side), -limit, limit))


def _columns(one: _Weight, side: str, count: int) -> list[np.ndarray]:
    """What the weights should be, and what they were in some steps before."""
    return [getattr(one.expected, side), *(getattr(before, side) for before in one.before[:count])]


def _mixed(one: _Weight, side: str, parts: np.ndarray) -> np.ndarray:
    return np.asarray(np.stack(_columns(one, side, len(parts) - 1), axis=1) @ parts)


def _fitted(weights: Sequence[_Weight], side: str, count: int) -> np.ndarray | None:
    """The shares, the same for all parameters, of which a side's weights are made."""
    rows = [np.stack(_columns(one, side, count), axis=1) / one.noise for one in weights]
    target = np.concatenate([getattr(one.now, side) / one.noise for one in weights])
    found = np.linalg.lstsq(np.concatenate(rows), target, rcond=1e-10)[0]
    return np.asarray(found) if np.isfinite(found).all() else None
