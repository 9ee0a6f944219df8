"""Weight decay that one run declares and the other does by hand: the weights show that it comes to the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median

from padiff.compare.judge.limits import ROUNDING, coarse
from padiff.records import LOOP, Diff, Difference
from padiff.records.sites import Sites
from padiff.records.step_diffs import StepDiffs

#: Rules of which a step without decay leaves the weights ``rate * decay`` of themselves larger.
_LINEAR = frozenset({"AdamW", "SGD"})
#: What is left of the effect where it is made up for, at most, and how far beyond rounding it has to be to be reported.
#: Chosen: a decay that is missing leaves all of it, one of half the size a half.
_LEFT, _BEYOND = 0.1, 10.0


def made_up(difference: Difference, diffs: Sequence[Diff], rates: Mapping[int, float]) -> bool:
    """Whether the weights of a later step show that a declared weight decay is made up for.

    Args:
        diffs: the diffs of a step after the first one that the difference holds in.
        rates: the learning rate of each step so far, the smallest of its groups'.
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
    left = []
    for diff in diffs:
        anchor, figures = diff.pair.anchor, diff.figures
        if diff.pair.stage != "weight" or anchor.layer == LOOP or figures is None or not diff.compared:
            continue
        if concerned and f"{anchor.layer}/{anchor.slot.partition('[')[0]}" not in concerned:
            continue
        if figures.reference_l2 > 0 and share > _BEYOND * ROUNDING.get(coarse(anchor.dtype), 1.0):
            left.append(figures.rel_l2 / share)
    # Of most: a bias that noise drives is elsewhere for reasons of its own.
    return bool(left) and median(left) <= _LEFT


def _stepped(rates: Mapping[int, float], first: int, last: int) -> float:
    """The learning rates of all steps from one to before another, added up; of those between two recorded ones the
    smaller rate counts.
    """
    numbers = sorted(number for number in rates if first <= number <= last)
    return sum(
        rates[one] if other - one == 1 else (other - one) * min(rates[one], rates[other])
        for one, other in pairwise(numbers)
    )


def _rate_places(sites: Sites) -> list[int]:
    return [place for place, slot in enumerate(sites.slots) if slot.startswith("learning_rate")]


def rate_of(ranks: Sequence[StepDiffs]) -> float | None:
    """The smallest learning rate of a step; `None` where it records none."""
    found = [diffs[place] for diffs in ranks for place in diffs.sites.fact(_rate_places)]
    return min((diff.figures.values.reference for diff in found if diff.figures), default=None)


def without_made_up(found: Sequence[Difference], known: Mapping[object, int]) -> tuple[Difference, ...]:
    """The differences; those that are made up for, by their keys and the step that shows it, change nothing."""
    return tuple(
        replace(one, changes=False, note=f"the weights of step {known[one.key]} show that it is made up for by hand")
        if one.key in known
        else one
        for one in found
    )
