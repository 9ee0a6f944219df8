"""Learning rates of processes that train the same parameters: they have to be equal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from padiff.records import LOOP, Record, Step

# Of two processes' parameters, so large a share is held by both where they train the same ones, or shards of them.
_MOST = 0.5


def own_rates(
    steps: Sequence[Step], weights: Mapping[tuple[str, str], Mapping[int, Record]]
) -> Iterator[tuple[int, list[int], str]]:
    """Processes whose rates are not those of most that train the same: one of most, these, and the rates in words.

    Args:
        weights: by layer and slot, what each process has of a parameter.
    """
    held: dict[int, set[tuple[str, str]]] = defaultdict(set)
    for key, records in weights.items():
        for rank in records:
            held[rank].add(key)
    rates = {step.rank: tuple(_rates(step).items()) for step in steps}
    partners: list[list[Step]] = []
    for step in steps:
        own = held[step.rank]
        for group in partners:
            partner = held[group[0].rank]
            if own and len(own & partner) >= _MOST * max(len(own), len(partner)):
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
    """The first rate that another process has otherwise, in words; empty where there is none."""
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
