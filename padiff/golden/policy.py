"""Policy of golden runs: a tensor passes if its error is within the rounding noise measured with the golden run."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from padiff.compare import NoisePolicy
from padiff.compare.judge.drift import NONE, Drift
from padiff.compare.judge.policy import ByNoise
from padiff.golden.noise import Errors, errors_between, limits_of, limits_of_first, sketch_of_record, unit_of
from padiff.records import Diff, Figure, Judgement, Pair, Rule
from padiff.records.layout import SAME
from padiff.records.step_diffs import StepDiffs


@dataclass(frozen=True)
class Movement:
    """How far a tensor has moved from the golden run's.

    Attributes:
        step, site, layer, stage: the tensor.
        error: its relative L2 error.
        units: the error in units of rounding noise, as measured.
        share: the largest of its errors as a share of its limit; above 1 rounding does not explain it.
        errors, limits: the errors, and what rounding explains of each.
    """

    step: int
    site: str
    layer: str
    stage: str
    error: float
    units: float
    share: float
    errors: Errors
    limits: Errors


@dataclass(frozen=True)
class GoldenPolicy(ByNoise):
    """Policy that judges tensors by measured noise, and all that has none as `NoisePolicy` does.

    Args:
        noise: by step and site, the errors of the moved runs.
        dtype: the coarsest dtype that the training computes in.
        first: number of the first step.
        unequal: by step, the sites of the tensors that are not equal to the bit.
        is_whole: every tensor was recorded, so that the inputs of the first one that is unequal are equal.

    Attributes:
        moved: the tensors that were judged so and are unequal, in causal order.
        first_sites: by step, the site of the first tensor of all that is unequal; empty for another step.
    """

    noise: Mapping[int, Mapping[str, Errors]]
    dtype: str
    first: int
    unequal: Mapping[int, Container[str]]
    is_whole: bool = True
    moved: list[Movement] = field(default_factory=list)
    first_sites: dict[int, str] = field(default_factory=dict)

    def describe(self) -> str:
        return "rounding noise, measured with the golden run"

    def judge(self, diffs: Sequence[Diff], before: Drift = NONE) -> StepDiffs:
        judged = NoisePolicy().judge(diffs, before)
        number = judged.number
        # A step is judged once as it is; after that, only with what a hypothesis predicts of it.
        is_hypothesis = number is None or number in self.first_sites
        if number is not None and not is_hypothesis:
            moved = self.unequal.get(number, ())
            sites = (diff.pair.anchor.site for diff in judged)
            has_moved = any(site for site in self.first_sites.values())
            self.first_sites[number] = "" if has_moved else next((site for site in sites if site in moved), "")
        result = []
        for diff in judged:
            movement = None if diff.problem is not None else self._movement(diff.pair)
            if movement is not None and not is_hypothesis and movement.site in self.unequal.get(movement.step, ()):
                self.moved.append(movement)
            result.append(_judged(diff, movement))
        return judged.replaced(result)

    def _movement(self, pair: Pair) -> Movement | None:
        golden, now = pair.reference, pair.candidate
        if golden is None or now is None or pair.layout != SAME:
            return None
        noise = self.noise.get(pair.step, {}).get(golden.site)
        if noise is None:
            return None
        before = sketch_of_record(golden)
        errors = errors_between(before, sketch_of_record(now, before.transposed))
        if errors is None:
            return None
        limits = limits_of(noise, self.dtype, golden.stage == "weight" and pair.step == self.first, before.size)
        is_first = self.is_whole and golden.site == self.first_sites.get(pair.step)
        if is_first and golden.stage in ("forward", "loss", "backward"):
            limits = limits_of_first(limits, self.dtype, before.size)
        share = max(error / limit for error, limit in zip(errors, limits))
        units = errors.l2 / unit_of(noise, self.dtype)
        return Movement(pair.step, golden.site, golden.layer, golden.stage, errors.l2, units, share, errors, limits)


def _judged(diff: Diff, movement: Movement | None) -> Diff:
    if movement is None or (diff.judgement is not None and diff.judgement.rule is Rule.SYSTEMATIC):
        return diff
    place = max(range(3), key=lambda place: movement.errors[place] / movement.limits[place])
    figure = Figure.REL_L2 if place == 0 else Figure.RATIO if place == 1 else Figure.MEAN
    judgement = Judgement(figure, movement.errors[place], movement.limits[place], Rule.MEASURED)
    return replace(diff, passed=movement.share <= 1, judgement=judgement)
