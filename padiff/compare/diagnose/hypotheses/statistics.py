"""Hypotheses on a normalisation's running statistics: how far a step moves them, or that it does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.compare.diagnose.hypotheses.scene import Scene, alike, rounding_of
from padiff.compare.judge.limits import is_running
from padiff.model import equivalents
from padiff.records import Both

# What two right implementations' statistics of a batch are off by, in units of rounding.
_ROUNDINGS = 32.0
# How near a share has to be to one that somebody wrote, relative to it.
_NEAR = 1e-4


@dataclass(frozen=True)
class _Statistic:
    """A running statistic before and after the step that led to the first diff.

    Attributes:
        momentum: what share of a batch's statistic the reference's layer takes, if its settings say.
        mean: whether it is a mean; of variances torch takes the unbiased estimate, paddle the biased one.
    """

    site: str
    layer: str
    before: Both[np.ndarray]
    after: Both[np.ndarray]
    noise: float
    momentum: float | None
    mean: bool


def hypotheses(scene: Scene) -> Iterator[Hypothesis]:
    """Of a first diff in a running statistic, where the step before it is recorded."""
    if not is_running(scene.diff.pair.anchor.slot):
        return
    known = list(_statistics(scene))
    means = [one for one in known if one.mean]
    wrong = {d.pair.anchor.layer for d in scene.step if d.pair.stage == "weight" and not d.passed}
    # Layers whose statistics agree are not concerned.
    means = [one for one in means if one.layer in wrong] or means
    known = [one for one in known if one.layer in wrong] or known
    if not means:
        return
    for side, other in (("candidate", "reference"), ("reference", "candidate")):
        text = (
            f"the {side}'s running statistics do not move, the {other}'s do: eval mode, or momentum 0 (torch's count)"
        )
        yield Hypothesis(
            "running_statistics_frozen",
            "running statistics that stay",
            text,
            lambda side=side, other=other: _kept(known, side, other),  # type: ignore[misc]
            "running statistics",
            tried=2,
        )
    factor = _factor(means)
    if factor is None:
        return
    momentum = next((one.momentum for one in means if one.momentum), None)
    yield Hypothesis(
        "running_momentum",
        "momentum of running statistics",
        _text(factor, momentum),
        lambda: _moved(means, factor),
        "running means",
        free=1,
        telling=momentum is not None,
    )


def _statistics(scene: Scene) -> Iterator[_Statistic]:
    layers = {layer.path: layer for layer in scene.runs.reference.info.layers}
    earlier = scene.pairs(scene.number - 1, "weight")
    for place, pair in scene.pairs(scene.number, "weight").items():
        if not is_running(pair.anchor.slot) or place not in earlier:
            continue
        before, after = alike((earlier[place], pair))
        if before is None or after is None or before.reference.shape != after.reference.shape:
            continue
        layer = layers.get(pair.anchor.layer)
        momentum = layer.settings.get("momentum") if layer is not None else None
        size = max(float(np.sqrt(np.mean(np.square(side)))) for side in (*before, *after))
        noise = max(_ROUNDINGS * rounding_of(pair) * size, 1e-300)
        share = float(momentum) if isinstance(momentum, (int, float)) else None
        mean = equivalents.slot(pair.anchor.slot) == "running_mean"
        yield _Statistic(pair.anchor.site, pair.anchor.layer, before, after, noise, share, mean)


def _kept(known: Sequence[_Statistic], side: str, other: str) -> Iterator[Prediction]:
    for one in known:
        yield Prediction(
            one.site, getattr(one.after, side), getattr(one.before, side), getattr(one.after, other), one.noise
        )


def _moved(means: Sequence[_Statistic], factor: float) -> Iterator[Prediction]:
    for one in means:
        step = one.after.reference - one.before.reference
        yield Prediction(
            one.site, one.after.candidate, one.before.candidate + factor * step, one.before.candidate + step, one.noise
        )


def _factor(means: Sequence[_Statistic]) -> float | None:
    """How many times as far the candidate's statistics move as the reference's."""
    steps = [(one.after.zip(one.before).map(lambda side: side[0] - side[1]), one.noise) for one in means]
    square = sum(float(np.sum(np.square(step.reference / noise))) for step, noise in steps)
    product = sum(float(np.sum(step.reference * step.candidate / noise**2)) for step, noise in steps)
    factor = product / square if square else 0.0
    return factor if np.isfinite(factor) and factor > 0 and abs(factor - 1) > _NEAR else None


def _text(factor: float, momentum: float | None) -> str:
    if momentum is None:
        return (
            f"the candidate's running statistics move {factor:.5g} times as far in a step as the reference's: momentum"
        )
    if abs(factor - (2 - momentum)) <= _NEAR * factor:
        return (
            "the candidate's running statistics take in each batch twice (its forward runs twice in a step), or their "
            f"momentum is {factor * momentum:.4g} for {momentum:.4g}"
        )
    own = factor * momentum
    own = float(f"{own:.2g}") if abs(float(f"{own:.2g}") - own) <= _NEAR * own else own
    text = (
        f"the candidate's running statistics take {own:.4g} of each batch's, the reference's {momentum:.4g}: momentum, "
        "counted as torch does"
    )
    return f"{text} (paddle's own is 1 minus it)" if abs(own + momentum - 1) <= _NEAR else text
