"""Pairing steps that are alike: which records answer to each other is worked out once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from padiff.align import Alignment
from padiff.pair.losses import identified_by_values
from padiff.pair.same import order_of_same
from padiff.pair.steps import pair_steps
from padiff.records import SAME, UNSCALED, Both, Pair, Record, Step
from padiff.records.planned import PairColumns, PlannedPairs
from padiff.records.sites import Sites
from padiff.records.structured import AskedError, Structured, called

# Structures of a run that are remembered: most steps of a run have one, or take turns at a few; where parameters are
# spread, each process has one.
_MOST = 256


class _Plan(NamedTuple):
    """What two structures are paired like.

    Attributes:
        structures, names: of either side; kept, so that nothing else takes their identity.
        alignment: by which they are paired.
        pairs: in causal order; `None` where values tell, or where records are made for pairs.
        by_name: whether what the records are called was enough: then the pairs are those of any steps of these names.
    """

    structures: Both[object]
    names: Both[object]
    alignment: Alignment
    pairs: PairColumns | None
    by_name: bool

    def is_of(self, structures: Both[object], alignment: Alignment) -> bool:
        # A structure is equal to itself alone; of several steps put together it is a tuple of theirs.
        return self.structures == structures and self.alignment is alignment


class PairPlans:
    """Pairs steps as `padiff.pair.steps.pair_steps` does, and remembers what steps that are alike are paired like."""

    def __init__(self) -> None:
        self._known: list[_Plan] = []

    def pairs(self, reference: Step, candidate: Step, alignment: Alignment) -> Sequence[Pair]:
        """The pairs of two steps, in causal order."""
        a, b = reference.records, candidate.records
        if not isinstance(a, Structured) or not isinstance(b, Structured):
            return pair_steps(reference, candidate, alignment)
        structures = Both(a.structure, b.structure)
        plan = next((plan for plan in self._known if plan.is_of(structures, alignment)), None)
        made: Sequence[Pair] | None = None
        if plan is None:
            names = Both(a.names, b.names)
            alike = [plan for plan in self._known if plan.names == names and plan.alignment is alignment]
            columns = _of_these(alike) if alike else _planned_by_name(reference, candidate, alignment)
            by_name = columns is not None
            if columns is None:
                made = pair_steps(reference, candidate, alignment)
                columns = _planned(made, Both(a, b))
            plan = _Plan(structures, names, alignment, columns, by_name)
            self._known = [*self._known[1 - _MOST :], plan]
        if plan.pairs is None:
            return pair_steps(reference, candidate, alignment) if made is None else made
        scales = Both(reference.loss_scale, candidate.loss_scale)
        return PlannedPairs(reference.number, Both(a, b), scales, plan.pairs, made or ())


def _of_these(plans: Sequence[_Plan]) -> PairColumns | None:
    """The pairs of steps of the same names as those of some plans; `None` where these do not tell."""
    known = next((plan.pairs for plan in plans if plan.by_name), None)
    return None if known is None else replace(known, facts={})


def _planned_by_name(reference: Step, candidate: Step, alignment: Alignment) -> PairColumns | None:
    """What two steps are paired like, without their records, of which nothing is made; `None` where what they are
    called does not tell: values do, or which records are one tensor, or which are sketches.
    """
    steps = Both(reference, candidate).map(lambda step: replace(step, records=called(step.records)))
    if steps.reference.records is reference.records or steps.candidate.records is candidate.records:
        return None
    if steps.reference.records is steps.candidate.records:
        order = order_of_same(steps, alignment)
        if order is not None:
            return _planned_same(steps.reference.records, order)
    try:
        return _planned(pair_steps(steps.reference, steps.candidate, alignment), steps.map(lambda step: step.records))
    except AskedError:
        return None


def _planned_same(records: Sequence[Record], order: list[int]) -> PairColumns:
    """Each record is paired with the one at its place, in this order."""
    some, places = [records[place] for place in order], list[int | None](order)
    scaled = [record.stage == "backward" for record in some]
    count = len(order)
    return PairColumns(places, places, [SAME] * count, scaled, [False] * count, Sites(some, some))


def _planned(pairs: Sequence[Pair], records: Both[Sequence[Record]]) -> PairColumns | None:
    if any(identified_by_values(side) for side in records):
        return None
    places = records.map(lambda side: {id(record): place for place, record in enumerate(side)})
    found: Both[list[int | None]] = Both([], [])
    for pair in pairs:
        one, other = (known.get(id(record)) for known, record in zip(places, pair.sides))
        if (one is None) != (pair.reference is None) or (other is None) != (pair.candidate is None):
            return None  # a part of a parameter, say
        found.reference.append(one)
        found.candidate.append(other)
    return PairColumns(
        found.reference,
        found.candidate,
        [pair.layout for pair in pairs],
        [pair.scales is not UNSCALED for pair in pairs],
        [pair.optional for pair in pairs],
        Sites.of(pairs),
    )
