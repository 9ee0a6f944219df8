"""Hypotheses on weights that something other than the optimizer's recorded step changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from padiff.compare.diagnose.hypotheses import transforms
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.compare.diagnose.hypotheses.scene import Place, Scene, is_elements, rounding_of, values_of
from padiff.records import Both

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


def _weights(scene: Scene, steps: Sequence[int]) -> Iterator[_Weight]:
    for place, update in scene.pairs(scene.number - 1, "update").items():
        pair = scene.pairs(scene.number, "weight").get(place)
        rows = [scene.pairs(number, "weight").get(place) for number in steps]
        values = [values_of(one, _ELEMENTS) if one is not None else None for one in (pair, update, *rows)]
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
        np.sqrt(np.mean(np.square(getattr(one.now, side) - getattr(one.expected, side)))) <= 3 * one.noise for one in weights
    )


def _changed(scene: Scene, weights: Sequence[_Weight], steps: Sequence[int], side: str) -> Iterator[Hypothesis]:
    """What the side's weights are, instead of what its own updates come to."""

    def hypothesis(
        kind: str, name: str, text: str, make: Callable[[_Weight], np.ndarray], free: int = 0, tried: int = 1,
        linear: bool = True,
    ) -> Hypothesis:  # fmt: skip
        def predict() -> Iterator[Prediction]:
            for one in weights:
                if linear or one.elements:
                    now, expected = getattr(one.now, side), getattr(one.expected, side)
                    yield Prediction(f"{one.place[0]}/weight/{one.place[1]}", now, make(one), expected, one.noise, one.limit)

        return Hypothesis(kind, name, text, predict, "weights", free, tried)

    head = f"between steps {scene.number - 1} and {scene.number} something else than the {side}'s optimizer changed its weights:"
    for k, number in enumerate(steps):
        text = f"{head} they are those of the start of step {number} again (a checkpoint was loaded, or the step undone)"
        yield hypothesis("weights_reloaded", f"weights of step {number}", text, lambda one, k=k: getattr(one.before[k], side), tried=len(steps))  # type: ignore[misc]  # fmt: skip
    largest = max(float(np.max(np.abs(getattr(one.now, side)))) for one in weights if one.elements) if any(one.elements for one in weights) else 0.0
    if largest:
        written = transforms.round_limit(largest)
        text = f"{head} they are clamped to {written:.6g}"
        yield hypothesis("weights_clamped", "clamped weights", text, lambda one: np.clip(getattr(one.expected, side), -written, written), 1, linear=False)  # fmt: skip
    factor = _fitted(weights, side, lambda one: [getattr(one.expected, side)])
    if factor is not None:
        text = f"{head} they are {float(factor[0]):.6g} times what its updates come to"
        yield hypothesis("weights_scaled", "scaled weights", text, lambda one: factor[0] * getattr(one.expected, side), 1)
    for count in range(1, len(steps) + 1):
        parts = _fitted(weights, side, lambda one, count=count: [getattr(one.expected, side), *(getattr(b, side) for b in one.before[:count])])  # type: ignore[misc]  # fmt: skip
        if parts is None:
            continue
        shares = ", ".join(f"{part:.3g}" for part in parts)
        text = f"{head} they are an average of the weights of this and the {count} steps before (shares {shares})"
        yield hypothesis(
            "weights_averaged",
            "averaged weights",
            text,
            lambda one, parts=parts, count=count: sum(  # type: ignore[misc]
                part * values
                for part, values in zip(parts, [getattr(one.expected, side), *(getattr(b, side) for b in one.before[:count])])
            ),
            count + 1,
            len(steps),
        )


def _fitted(
    weights: Sequence[_Weight], side: str, columns: Callable[[_Weight], Sequence[np.ndarray]]
) -> np.ndarray | None:
    """The shares of some tensors, the same for all parameters, that make the side's weights."""
    rows = [np.stack([column / one.noise for column in columns(one)], axis=1) for one in weights]
    target = np.concatenate([getattr(one.now, side) / one.noise for one in weights])
    found = np.linalg.lstsq(np.concatenate(rows), target, rcond=1e-10)[0]
    return found if np.isfinite(found).all() else None
