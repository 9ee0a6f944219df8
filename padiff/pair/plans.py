"""Pairing steps that are alike: which records answer to each other is worked out once for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from padiff.align import Alignment
from padiff.pair.losses import told_by_values
from padiff.pair.steps import pair_steps
from padiff.records import UNSCALED, Both, Layout, Pair, Step
from padiff.records.structured import Structured

# Structures of a run that are remembered: most steps of a run have one, or take turns at a few; where parameters are
# spread, each process has one.
_MOST = 256


@dataclass(frozen=True, slots=True, eq=False)
class _Planned:
    """A pair, but for the step that it is of; equal to itself alone.

    Attributes:
        reference, candidate: places of the two records in their steps; `None` where that side has none.
        layout, optional: as `Pair` has them.
        scaled: whether both sides are divided by their steps' loss scales.
    """

    reference: int | None
    candidate: int | None
    layout: Layout
    scaled: bool
    optional: bool


class _Plan(NamedTuple):
    """What two structures are paired like.

    Attributes:
        structures: they; kept, so that nothing else takes their identity.
        alignment: by which they are paired.
        pairs: in causal order; `None` where values tell, or where records are made for pairs.
    """

    structures: Both[object]
    alignment: Alignment
    pairs: list[_Planned] | None

    def is_of(self, structures: Both[object], alignment: Alignment) -> bool:
        own = self.structures
        # A structure is equal to itself alone; of several steps put together it is a tuple of theirs.
        return own == structures and self.alignment is alignment


class PairPlans:
    """Pairs steps as `padiff.pair.steps.pair_steps` does, and remembers what steps that are alike are paired like."""

    def __init__(self) -> None:
        self._known: list[_Plan] = []

    def pairs(self, reference: Step, candidate: Step, alignment: Alignment) -> list[Pair]:
        """The pairs of two steps, in causal order."""
        a, b = reference.records, candidate.records
        if not isinstance(a, Structured) or not isinstance(b, Structured):
            return pair_steps(reference, candidate, alignment)
        structures = Both(a.structure, b.structure)
        plan = next((plan for plan in self._known if plan.is_of(structures, alignment)), None)
        if plan is not None and plan.pairs is not None:
            number, scales = reference.number, Both(reference.loss_scale, candidate.loss_scale)
            return [
                Pair(
                    number,
                    a[own.reference] if own.reference is not None else None,
                    b[own.candidate] if own.candidate is not None else None,
                    own.layout,
                    scales if own.scaled else UNSCALED,
                    own.optional,
                    own,
                )
                for own in plan.pairs
            ]
        pairs = pair_steps(reference, candidate, alignment)
        if plan is None:
            self._known = [*self._known[1 - _MOST :], _Plan(structures, alignment, _planned(pairs, Both(a, b)))]
        return pairs


def _planned(pairs: list[Pair], records: Both[Structured]) -> list[_Planned] | None:
    if any(told_by_values(side) for side in records):
        return None
    places = records.map(lambda side: {id(record): place for place, record in enumerate(side)})
    found = []
    for pair in pairs:
        one, other = (known.get(id(record)) for known, record in zip(places, pair.sides))
        if (one is None) != (pair.reference is None) or (other is None) != (pair.candidate is None):
            return None  # a part of a parameter, say
        found.append(_Planned(one, other, pair.layout, pair.scales is not UNSCALED, pair.optional))
    return found
