"""What the pairs of a step are but for their values: the same for all steps that are alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from padiff.records.both import Both
from padiff.records.compared import Pair
from padiff.records.facts import once
from padiff.records.recorded import STAGES, Record

_Fact = TypeVar("_Fact")
#: A parameter: its layer and slot.
Key = tuple[str, str]


class Sites:
    """What the pairs of a step are but for their values, in their order: the same object for all steps that are alike.

    Args:
        references, candidates: both sides of the pairs of one of the steps; none of these records is kept.

    Attributes:
        layers, slots, stages, calls, types, shapes: of each pair's anchor.
        dtypes: of both sides; `None` where a side is missing.
        anchor_dtypes: of each anchor.
        candidates: layer, slot and layer type of each candidate's record; empty where it is missing.
        complete: where both sides are there.
        places: the places of a stage's pairs; of every stage.
    """

    def __init__(self, references: Sequence[Record | None], candidates: Sequence[Record | None]) -> None:
        anchors: list[Any] = [one if one is not None else other for one, other in zip(references, candidates)]
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
        both = [one is not None and other is not None for one, other in zip(references, candidates)]
        self.complete = np.array(both, np.bool_)
        stages = stage_numbers(self.stages)
        self.places = {stage: np.flatnonzero(stages == number) for number, stage in enumerate(STAGES)}
        self._facts: dict[Any, Any] = {}

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Sites:
        """What the pairs of a step are."""
        return cls([pair.reference for pair in pairs], [pair.candidate for pair in pairs])

    def __len__(self) -> int:
        return len(self.layers)

    def fact(self, find: Callable[[Sites], _Fact]) -> _Fact:
        """What a function finds out from the sites; it is called once."""
        return once(self._facts, find, lambda: self)

    @cached_property
    def keys(self) -> list[Key]:
        """Layer and slot of each pair."""
        return list(zip(self.layers, self.slots))

    def largest_of_stages(self, values: np.ndarray) -> dict[str, float]:
        """The largest of each stage that there is."""
        stages, order, starts = self._stage_groups
        return dict(zip(stages, np.maximum.reduceat(values[order], starts).tolist())) if stages else {}

    @cached_property
    def _stage_groups(self) -> tuple[list[str], np.ndarray, np.ndarray]:
        """The stages that there are, the pairs in their order, and where each stage begins in it."""
        stages = [stage for stage, places in self.places.items() if len(places)]
        counts = [len(self.places[stage]) for stage in stages]
        return stages, np.concatenate(list(self.places.values())), np.cumsum([0, *counts])[:-1]

    def largest_of_layers(self, stage: str, values: np.ndarray) -> np.ndarray:
        """The largest of each pair's layer; NaN where it has none.

        Args:
            values: of the pairs of a stage, in their order, along the last axis; what is NaN counts for nothing.
        """
        return self._over_layers(np.fmax, stage, values, np.nan)

    def sums_of_layers(self, stage: str, values: np.ndarray) -> np.ndarray:
        """The sum over each pair's layer, of values of the pairs of a stage, along the last axis."""
        return self._over_layers(np.add, stage, values, 0.0)

    def _over_layers(self, combine: np.ufunc, stage: str, values: np.ndarray, nothing: float) -> np.ndarray:
        found = np.full((*values.shape[:-1], self._layer_count), nothing)
        if values.shape[-1]:
            order, starts, layers = self._layer_groups[stage]
            found[..., layers] = combine.reduceat(np.take(values, order, axis=-1), starts, axis=-1)
        return np.take(found, self.layer_numbers, axis=-1)

    @cached_property
    def _layer_groups(self) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Of each stage, an order of its pairs by layers, where each layer begins in it, and which layers these are."""
        found = {}
        for stage, places in self.places.items():
            numbers = self.layer_numbers[places]
            order = numbers.argsort(kind="stable")
            layers, starts = np.unique(numbers[order], return_index=True)
            found[stage] = order, starts, layers
        return found

    @cached_property
    def layer_numbers(self) -> np.ndarray:
        """A number for each pair's layer."""
        return _numbers(self.layers)

    @cached_property
    def _layer_count(self) -> int:
        """How many layers there are."""
        return int(self.layer_numbers.max(initial=-1)) + 1

    @cached_property
    def key_count(self) -> int:
        """How many layers and slots there are."""
        return int(self.key_numbers.max(initial=-1)) + 1

    @cached_property
    def key_numbers(self) -> np.ndarray:
        """A number for each pair's layer and slot."""
        return _numbers(self.keys)


_NOTHING = ("", "", "")
_STAGE = {stage: number for number, stage in enumerate(STAGES)}


def stage_numbers(stages: Iterable[str]) -> np.ndarray:
    """The numbers of stages in `STAGES`."""
    return np.array([_STAGE[stage] for stage in stages], np.int8)


def _numbers(things: Sequence[Any]) -> np.ndarray:
    known: dict[Any, int] = {}
    return np.array([known.setdefault(thing, len(known)) for thing in things], np.intp)
