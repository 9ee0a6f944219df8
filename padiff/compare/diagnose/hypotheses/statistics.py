"""Hypotheses on a normalisation's running statistics: frozen, or moved by another share in each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, alike, rounding_of
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.compare.judge.limits import is_running
from padiff.model import equivalents
from padiff.records import Both

# Difference of a batch's statistics between two correct implementations, in rounding units.
_ROUNDINGS = 32.0
# Largest relative difference of a share from a round number.
_NEAR = 1e-4


@dataclass(frozen=True)
class _Statistic:
    """A running statistic before and after the step that led to the first diff.

    Attributes:
        momentum: weight of a batch's statistic in the reference's layer, if recorded (torch's convention).
        mean: True for a mean, False for a variance (torch uses the unbiased estimate, paddle the biased one).
    """

    site: str
    layer: str
    before: Both[np.ndarray]
    after: Both[np.ndarray]
    noise: float
    momentum: float | None
    mean: bool


def hypotheses(scene: DiffContext) -> Iterator[Hypothesis]:
    """Yield hypotheses on a first diff in a running statistic, if the step before is recorded."""
    if not is_running(scene.diff.pair.anchor.slot):
        return
    statistics = list(_statistics(scene))
    means = [statistic for statistic in statistics if statistic.mean]
    wrong = {d.pair.anchor.layer for d in scene.step if d.pair.stage == "weight" and not d.passed}
    # Layers whose statistics agree are left out.
    means = [statistic for statistic in means if statistic.layer in wrong] or means
    statistics = [statistic for statistic in statistics if statistic.layer in wrong] or statistics
    if not means:
        return
    for side, partner in (("candidate", "reference"), ("reference", "candidate")):
        text = (
            f"the {side}'s running statistics do not move, the {partner}'s do: eval mode, or momentum 0 (torch's count)"
        )
        yield Hypothesis(
            "running_statistics_frozen",
            "running statistics that stay",
            text,
            lambda side=side, partner=partner: _kept(statistics, side, partner),  # type: ignore[misc]
            "running statistics",
            tried=2,
        )
    factor = _factor(means)
    if factor is None:
        return
    momentum = next((statistic.momentum for statistic in means if statistic.momentum), None)
    yield Hypothesis(
        "running_momentum",
        "momentum of running statistics",
        _text(factor, momentum),
        lambda: _moved(means, factor),
        "running means",
        free=1,
        telling=momentum is not None,
    )


def _statistics(scene: DiffContext) -> Iterator[_Statistic]:
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


def _kept(statistics: Sequence[_Statistic], side: str, partner: str) -> Iterator[Prediction]:
    for statistic in statistics:
        yield Prediction(
            statistic.site,
            getattr(statistic.after, side),
            getattr(statistic.before, side),
            getattr(statistic.after, partner),
            statistic.noise,
        )


def _moved(means: Sequence[_Statistic], factor: float) -> Iterator[Prediction]:
    for statistic in means:
        step = statistic.after.reference - statistic.before.reference
        yield Prediction(
            statistic.site,
            statistic.after.candidate,
            statistic.before.candidate + factor * step,
            statistic.before.candidate + step,
            statistic.noise,
        )


def _factor(means: Sequence[_Statistic]) -> float | None:
    """Return the candidate's change of the statistics divided by the reference's; `None` if about 1 or not positive."""
    steps = [
        (statistic.after.zip(statistic.before).map(lambda side: side[0] - side[1]), statistic.noise)
        for statistic in means
    ]
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
    share = factor * momentum
    share = float(f"{share:.2g}") if abs(float(f"{share:.2g}") - share) <= _NEAR * share else share
    text = (
        f"the candidate's running statistics take {share:.4g} of each batch's, the reference's {momentum:.4g}: "
        "momentum, counted as torch does"
    )
    return f"{text} (paddle's own is 1 minus it)" if abs(share + momentum - 1) <= _NEAR else text
