"""Pairs of a step whose pairing is reused, and their description without values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from padiff.records.both import Both, LazySequence, memoize
from padiff.records.compared import UNSCALED, Pair
from padiff.records.recorded import STAGES, Record
from padiff.records.sources import Layout
from padiff.records.step_schema import StoredRecords

#: A parameter: its layer and slot.
Key = tuple[str, str]


class PairSchema:
    """Descriptions of a step's pairs, in order, without values: one object for all steps with the same schema.

    Args:
        references, candidates: both sides of the pairs of one of the steps; the records are not stored.
        derived: mask of the derived inputs (`Pair.derived`). Default: none.

    Attributes:
        layers, slots, stages, calls, types, shapes: fields of each pair's anchor.
        dtypes: dtypes of both sides; `None` for a missing side.
        anchor_dtypes: dtype of each anchor.
        candidates: layer, slot and layer type of each candidate's record; empty texts for a missing one.
        complete: mask of the pairs that have both sides.
        derived: mask of the derived inputs.
        places: positions of each stage's pairs, for every stage.
    """

    def __init__(
        self,
        references: Sequence[Record | None],
        candidates: Sequence[Record | None],
        derived: Sequence[bool] | None = None,
    ) -> None:
        anchors: list[Any] = [r if r is not None else c for r, c in zip(references, candidates)]
        self.layers = [record.layer for record in anchors]
        self.slots = [record.slot for record in anchors]
        self.stages = [record.stage for record in anchors]
        self.calls = [record.call for record in anchors]
        self.types = [record.layer_type for record in anchors]
        self.shapes = [record.shape for record in anchors]
        self.dtypes = Both(
            [record.dtype if record is not None else None for record in references],
            [record.dtype if record is not None else None for record in candidates],
        )
        self.anchor_dtypes = [record.dtype for record in anchors]
        self.candidates = [
            (record.layer, record.slot, record.layer_type) if record is not None else _NOTHING for record in candidates
        ]
        both = [r is not None and c is not None for r, c in zip(references, candidates)]
        self.complete = np.array(both, np.bool_)
        self.derived = np.zeros(len(anchors), np.bool_) if derived is None else np.array(derived, np.bool_)
        stages = stage_numbers(self.stages)
        self.places = {stage: np.flatnonzero(stages == number) for number, stage in enumerate(STAGES)}
        self._facts: dict[Any, Any] = {}

    @classmethod
    def from_pairs(cls, pairs: Sequence[Pair]) -> PairSchema:
        """Return the description of a sequence of pairs."""
        return cls(*([getattr(pair, name) for pair in pairs] for name in ("reference", "candidate", "derived")))

    def __len__(self) -> int:
        return len(self.layers)

    def fact(self, find: Callable[[PairSchema], _Fact]) -> _Fact:
        """Return the result of a function of these sites; the function is called once and its result is cached."""
        return memoize(self._facts, find, lambda: self)

    @cached_property
    def keys(self) -> list[Key]:
        """Return layer and slot of each pair."""
        return list(zip(self.layers, self.slots))

    def largest_of_stages(self, values: np.ndarray) -> dict[str, float]:
        """Return the largest value of each stage that has pairs."""
        stages, order, starts = self._stage_groups
        return dict(zip(stages, np.maximum.reduceat(values[order], starts).tolist())) if stages else {}

    @cached_property
    def _stage_groups(self) -> tuple[list[str], np.ndarray, np.ndarray]:
        """Return the stages that have pairs, the pairs' positions ordered by stage, and each stage's start in that
        order.
        """
        stages = [stage for stage, places in self.places.items() if len(places)]
        counts = [len(self.places[stage]) for stage in stages]
        return stages, np.concatenate(list(self.places.values())), np.cumsum([0, *counts])[:-1]

    def largest_of_layers(self, stage: str, values: np.ndarray) -> np.ndarray:
        """Return, for each pair of a stage, the largest value of its layer's pairs; NaN if all of these are NaN.

        Args:
            values: values of the stage's pairs, in order; NaN is ignored.
        """
        return self._over_layers(np.fmax, stage, values, np.nan)

    def sums_of_layers(self, stage: str, values: np.ndarray) -> np.ndarray:
        """Return, for each pair of a stage, the sum of its layer's values.

        Args:
            values: values of the stage's pairs, in order.
        """
        return self._over_layers(np.add, stage, values, 0.0)

    def _over_layers(self, combine: np.ufunc, stage: str, values: np.ndarray, nothing: float) -> np.ndarray:
        combined = np.full(self._layer_count, nothing)
        if len(values):
            order, starts, layers = self._layer_groups[stage]
            combined[layers] = combine.reduceat(values[order], starts)
        return np.asarray(combined[self.layer_numbers])

    @cached_property
    def _layer_groups(self) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Return for each stage: its pairs' positions ordered by layer, each layer's start in that order, and the
        layers.
        """
        groups = {}
        for stage, places in self.places.items():
            numbers = self.layer_numbers[places]
            order = numbers.argsort(kind="stable")
            layers, starts = np.unique(numbers[order], return_index=True)
            groups[stage] = order, starts, layers
        return groups

    @cached_property
    def layer_numbers(self) -> np.ndarray:
        """Return the number of each pair's layer."""
        return _numbers(self.layers)

    @cached_property
    def _layer_count(self) -> int:
        """Return the number of different layers."""
        return int(self.layer_numbers.max(initial=-1)) + 1

    @cached_property
    def key_count(self) -> int:
        """Return the number of different keys (layer and slot)."""
        return int(self.key_numbers.max(initial=-1)) + 1

    @cached_property
    def key_numbers(self) -> np.ndarray:
        """Return the number of each pair's key (layer and slot)."""
        return _numbers(self.keys)


_NOTHING = ("", "", "")
_STAGE = {stage: number for number, stage in enumerate(STAGES)}


def stage_numbers(stages: Iterable[str]) -> np.ndarray:
    """Return the numbers of stages in `STAGES`."""
    return np.array([_STAGE[stage] for stage in stages], np.int8)


def _numbers(things: Sequence[Any]) -> np.ndarray:
    numbers: dict[Any, int] = {}
    return np.array([numbers.setdefault(thing, len(numbers)) for thing in things], np.intp)


_Fact = TypeVar("_Fact")


@dataclass(eq=False, slots=True)
class PairColumns:
    """The pairs that steps of two schemas share, as columns. (An object per pair would cost much memory for many
    layers.)

    Attributes:
        references, candidates: positions of the two records in their steps; `None` if that side has none.
        layouts, optional, derived: the fields of `Pair`, one element for each pair.
        scaled: True if both sides are divided by their steps' loss scales.
        sites: description of the pairs.
        facts: cached results of functions of the pairs (`PairTable.fact`).
    """

    references: list[int | None]
    candidates: list[int | None]
    layouts: list[Layout]
    scaled: list[bool]
    optional: list[bool]
    derived: list[bool]
    sites: PairSchema
    facts: dict[Any, Any] = field(default_factory=dict)


class PairTable(LazySequence[Pair]):
    """The pairs of a step. Each `Pair` is created on first access.

    Args:
        step: the step's number.
        records: records of both sides.
        scales: loss scale of each side.
        columns: the pairing.
        made: the pairs, if they exist already.

    Attributes:
        records, columns: the arguments of the same names.
        unscaled: True if no pair is divided by a scale.
    """

    def __init__(
        self,
        step: int,
        records: Both[StoredRecords],
        scales: Both[float],
        columns: PairColumns,
        made: Iterable[Pair] = (),
    ) -> None:
        self._step, self.records, self.columns = step, records, columns
        self._scales = UNSCALED if scales == UNSCALED else scales
        self.unscaled = self._scales is UNSCALED or not any(columns.scaled)
        self._made: list[Pair | None] = list(made) or [None] * len(columns.optional)

    @property
    def sites(self) -> PairSchema:
        """Return the description of the pairs."""
        return self.columns.sites

    @property
    def tabled(self) -> bool:
        """Return True if the sketches of both sides are in tables; False for a step that was joined from several
        ranks.
        """
        return all(side.table is not None for side in self.records)

    def fact(self, find: Callable[[PairTable], _Fact]) -> _Fact:
        """Return the result of a function of the pairs that does not read values; cached for all steps with this
        pairing.
        """
        return memoize(self.columns.facts, find, lambda: self)

    def _scales_of(self, scaled: bool) -> Both[float]:
        return self._scales if scaled else UNSCALED

    def _at(self, place: int) -> Pair:
        pair = self._made[place]
        if pair is None:
            columns, (a, b) = self.columns, self.records
            reference, candidate = columns.references[place], columns.candidates[place]
            pair = self._made[place] = Pair(
                self._step,
                a[reference] if reference is not None else None,
                b[candidate] if candidate is not None else None,
                columns.layouts[place],
                self._scales_of(columns.scaled[place]),
                columns.optional[place],
                columns.derived[place],
            )
        return pair

    def __len__(self) -> int:
        return len(self._made)


def pair_schema_of(pairs: Sequence[Pair]) -> PairSchema:
    """Return the description of pairs."""
    return pairs.sites if isinstance(pairs, PairTable) else PairSchema.from_pairs(pairs)


def layouts_of(pairs: Sequence[Pair]) -> Sequence[Layout]:
    """Return the layouts of pairs."""
    return pairs.columns.layouts if isinstance(pairs, PairTable) else [pair.layout for pair in pairs]


def fact_of_pairs(pairs: Sequence[Pair], find: Callable[[Sequence[Pair]], _Fact]) -> _Fact:
    """Return the result of a function of the pairs that does not read values; cached for steps with the same
    pairing.
    """
    return pairs.fact(find) if isinstance(pairs, PairTable) else find(pairs)


def records_of(pairs: PairTable) -> Both[np.ndarray]:
    """Return the positions of both sides' records in their steps; -1 if a side has none."""
    columns = pairs.columns
    return Both(columns.references, columns.candidates).map(
        lambda side: np.array([-1 if place is None else place for place in side], np.intp)
    )


def sketch_rows(pairs: PairTable) -> Both[np.ndarray]:
    """Return the rows of both sides' sketches in their steps' tables; -1 if a side has none."""

    def rows(side: tuple[np.ndarray, StoredRecords]) -> np.ndarray:
        places, records = side
        assert records.sketches is not None
        numbers, present = np.full(len(places), -1, np.intp), places >= 0
        numbers[present] = records.sketches.rows[places[present]]
        return numbers

    return pairs.fact(records_of).zip(pairs.records).map(rows)
