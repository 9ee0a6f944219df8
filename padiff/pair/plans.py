"""Pairing of equally structured steps: the pairing is computed once for all of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from padiff.align import Alignment
from padiff.align.call_order import InputSite, calls_differ, is_derived
from padiff.pair.identity_pairing import identity_pairing
from padiff.pair.losses import identified_by_values
from padiff.pair.steps import pair_steps
from padiff.records import SAME, UNSCALED, Both, Pair, Record, Step
from padiff.records.pair_schema import PairSchema
from padiff.records.pair_table import PairColumns, PairTable
from padiff.records.stored_records import StoredRecords, ValuesNotLoadedError, without_values

# Most cached pairings. The steps of most runs have one structure, or alternate between a few; with sharded parameters
# each process has its own.
_MOST = 256


class _Plan(NamedTuple):
    """Pairing of two step structures.

    Attributes:
        structures, names: structure and names of either side; referenced here so that their ids stay unique.
        alignment: the alignment that paired the steps.
        pairs: pairs in causal order; `None` if the pairing depends on values, or needs computed records.
        by_name: True if the records' names determine the pairing: then it holds for all steps with these names.
    """

    structures: Both[object]
    names: Both[object]
    alignment: Alignment
    pairs: PairColumns | None
    by_name: bool

    def is_of(self, structures: Both[object], alignment: Alignment) -> bool:
        # A structure equals only itself; merged steps have a tuple of structures.
        return self.structures == structures and self.alignment is alignment


class PairPlans:
    """Pairing as by `padiff.pair.steps.pair_steps`, with a cache for equally structured steps."""

    def __init__(self) -> None:
        self._known: list[_Plan] = []

    def pairs(self, reference: Step, candidate: Step, alignment: Alignment) -> Sequence[Pair]:
        """Return the pairs of two steps, in causal order."""
        a, b = reference.records, candidate.records
        if not isinstance(a, StoredRecords) or not isinstance(b, StoredRecords):
            return pair_steps(reference, candidate, alignment)
        structures = Both(a.structure, b.structure)
        plan = next((plan for plan in self._known if plan.is_of(structures, alignment)), None)
        computed: Sequence[Pair] | None = None
        if plan is None:
            names = Both(a.names, b.names)
            alike = [plan for plan in self._known if plan.names == names and plan.alignment is alignment]
            columns = _of_these(alike) if alike else _planned_by_name(reference, candidate, alignment)
            by_name = columns is not None
            if columns is None:
                computed = pair_steps(reference, candidate, alignment)
                columns = _planned(computed, Both(a, b))
            plan = _Plan(structures, names, alignment, columns, by_name)
            self._known = [*self._known[1 - _MOST :], plan]
        if plan.pairs is None:
            return pair_steps(reference, candidate, alignment) if computed is None else computed
        scales = Both(reference.loss_scale, candidate.loss_scale)
        return PairTable(reference.number, Both(a, b), scales, plan.pairs, computed or ())


def _of_these(plans: Sequence[_Plan]) -> PairColumns | None:
    """Return the cached pairs for steps with the same names; `None` if the names do not determine the pairs."""
    named_pairs = next((plan.pairs for plan in plans if plan.by_name), None)
    return None if named_pairs is None else replace(named_pairs, facts={})


def _planned_by_name(reference: Step, candidate: Step, alignment: Alignment) -> PairColumns | None:
    """Return the pairing of two steps by names alone, without creating records.

    Returns `None` if names do not determine the pairing: it depends on values, on shared tensors, or on sketches.
    """
    steps = Both(reference, candidate).map(lambda step: replace(step, records=without_values(step.records)))
    if steps.reference.records is reference.records or steps.candidate.records is candidate.records:
        return None
    if steps.reference.records is steps.candidate.records:
        order = identity_pairing(steps, alignment)
        if order is not None:
            return _planned_same(steps.reference.records, order, alignment.derived.reference)
    try:
        return _planned(pair_steps(steps.reference, steps.candidate, alignment), steps.map(lambda step: step.records))
    except ValuesNotLoadedError:
        return None


def _planned_same(records: Sequence[Record], order: list[int], derived: Collection[InputSite]) -> PairColumns:
    """Return the pairing of each record with the record at the same index, in the given order."""
    ordered, places = [records[place] for place in order], list[int | None](order)
    scaled = [record.stage == "backward" for record in ordered]
    count, marks = len(order), [is_derived(record, derived) for record in ordered]
    sites = PairSchema(ordered, ordered, marks)
    return PairColumns(places, places, [SAME] * count, scaled, [False] * count, marks, sites)


def _planned(pairs: Sequence[Pair], records: Both[Sequence[Record]]) -> PairColumns | None:
    if any(identified_by_values(side) for side in records) or calls_differ(records):
        return None
    places = records.map(lambda side: {id(record): place for place, record in enumerate(side)})
    places_by_side: Both[list[int | None]] = Both([], [])
    for pair in pairs:
        reference_place, candidate_place = (
            place_by_id.get(id(record)) for place_by_id, record in zip(places, pair.sides)
        )
        if (reference_place is None) != (pair.reference is None) or (candidate_place is None) != (
            pair.candidate is None
        ):
            return None  # a computed record, such as a part of a parameter
        places_by_side.reference.append(reference_place)
        places_by_side.candidate.append(candidate_place)
    return PairColumns(
        places_by_side.reference,
        places_by_side.candidate,
        [pair.layout for pair in pairs],
        [pair.scales is not UNSCALED for pair in pairs],
        [pair.optional for pair in pairs],
        [pair.derived for pair in pairs],
        PairSchema.from_pairs(pairs),
    )
