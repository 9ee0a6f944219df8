"""Detect processes that train the same parameters with different learning rates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from padiff.records import LOOP, Record, Step

# Smallest share of common parameters at which two processes count as training the same model, or shards of it.
_MOST = 0.5


def differing_learning_rates(
    steps: Sequence[Step], weights: Mapping[tuple[str, str], Mapping[int, Record]]
) -> Iterator[tuple[int, list[int], str]]:
    """Yield a rank of the majority, the ranks whose learning rates differ from the majority's, and the rates in words.

    Args:
        weights: by layer and slot, each process's record of a parameter.
    """
    parameters: dict[int, set[tuple[str, str]]] = defaultdict(set)
    for key, records in weights.items():
        for rank in records:
            parameters[rank].add(key)
    rates = {step.rank: tuple(_rates(step).items()) for step in steps}
    partners: list[list[Step]] = []
    for step in steps:
        keys = parameters[step.rank]
        for group in partners:
            partner = parameters[group[0].rank]
            if keys and len(keys & partner) >= _MOST * max(len(keys), len(partner)):
                group.append(step)
                break
        else:
            partners.append([step])
    for group in partners:
        alike: dict[object, list[Step]] = defaultdict(list)
        for step in group:
            if rates[step.rank]:
                alike[rates[step.rank]].append(step)
        if len(alike) < 2:
            continue
        most, *others = sorted(alike.values(), key=lambda same: (-len(same), same[0].rank))
        for same in others:
            text = rates_text(most[0], same[0])
            if text:
                yield most[0].rank, [step.rank for step in same], text


def rates_text(one: Step, other: Step) -> str:
    """Return the first learning rate that differs between two processes, in words; empty if all are equal."""
    first, second = _rates(one), _rates(other)
    for site, rate in first.items():
        if second.get(site, rate) != rate:
            return f" (learning rate {second[site]:.6g} against {rate:.6g})"
    return ""


def _rates(step: Step) -> dict[str, float]:
    return {
        r.site: float(r.value)
        for r in step.records
        if r.layer == LOOP and r.slot.startswith("learning_rate") and not r.shape
    }
