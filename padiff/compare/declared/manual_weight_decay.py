"""Detect weight decay that one run declares and the other applies by hand: the weights agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from padiff.compare.judge.limits import ROUNDING, coarse
from padiff.records import LOOP, Diff, Difference
from padiff.records.pair_schema import PairSchema
from padiff.records.step_diffs import StepDiffs

#: Rules whose weights are larger by the share ``rate * decay`` after a step without decay.
_LINEAR = frozenset({"AdamW", "SGD"})
#: Largest remaining share of a decay's effect on the weights that proves compensation by hand; and least multiple of
#: rounding that the effect must have. Chosen: a missing decay leaves the whole effect, one of half the size half of it.
_LEFT, _BEYOND = 0.1, 10.0


def manual_weight_decay(difference: Difference, diffs: Sequence[Diff], rates: Mapping[int, float]) -> bool:
    """Return True if the weights of a later step show that the other run compensates a declared weight decay.

    Args:
        diffs: diffs of a step after the first step with the difference.
        rates: learning rate of each step so far, the smallest of the groups' rates.
    """
    by = difference.values
    if difference.name != "weight_decay" or difference.about not in _LINEAR:
        return False
    if not all(isinstance(value, (int, float)) for value in by):
        return False
    stepped = _stepped(rates, difference.step, max((d.pair.step for d in diffs), default=0))
    if stepped <= 0:
        return False
    share = stepped * abs(by.reference - by.candidate)
    concerned = frozenset(difference.parameters.reference)
    remaining_shares = []
    for diff in diffs:
        anchor, figures = diff.pair.anchor, diff.figures
        if diff.pair.stage != "weight" or anchor.layer == LOOP or figures is None or not diff.compared:
            continue
        if concerned and f"{anchor.layer}/{anchor.slot.partition('[')[0]}" not in concerned:
            continue
        if figures.reference_l2 > 0 and share > _BEYOND * ROUNDING.get(coarse(anchor.dtype), 1.0):
            remaining_shares.append(figures.rel_l2 / share)
    # The median, because a bias driven by noise differs for other reasons.
    return bool(remaining_shares) and median(remaining_shares) <= _LEFT


def _stepped(rates: Mapping[int, float], first: int, last: int) -> float:
    """Return the sum of the learning rates of the steps from ``first`` up to, but without, ``last``.

    Between two recorded steps the smaller of their rates counts.
    """
    numbers = sorted(number for number in rates if first <= number <= last)
    return sum(
        rates[earlier] if later - earlier == 1 else (later - earlier) * min(rates[earlier], rates[later])
        for earlier, later in pairwise(numbers)
    )


def _rate_places(sites: PairSchema) -> list[int]:
    return [place for place, slot in enumerate(sites.slots) if slot.startswith("learning_rate")]


def rate_of(ranks: Sequence[StepDiffs]) -> float | None:
    """Return the reference's smallest learning rate in a step; `None` if none was compared."""
    rate_diffs = [diffs[place] for diffs in ranks for place in diffs.sites.fact(_rate_places)]
    return min((diff.figures.values.reference for diff in rate_diffs if diff.figures), default=None)


def without_manual_weight_decay(found: Sequence[Difference], known: Mapping[object, int]) -> tuple[Difference, ...]:
    """Return the differences, with those marked as harmless that the other run compensates by hand.

    Args:
        found: the differences.
        known: by a difference's key, the step whose weights prove the compensation.
    """
    return tuple(
        replace(
            difference,
            changes=False,
            note=f"the weights of step {known[difference.key]} show that it is made up for by hand",
        )
        if difference.key in known
        else difference
        for difference in found
    )
