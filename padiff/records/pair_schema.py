"""Descriptions of a step's pairs without values: one object for all steps with the same schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from padiff.records.both import Both
from padiff.records.compared import Pair
from padiff.records.memoization import memoize
from padiff.records.recorded import STAGES, Record

_Fact = TypeVar("_Fact")
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
            values: values of the stage's pairs, in order, along the last axis; NaN is ignored.
        """
        return self._over_layers(np.fmax, stage, values, np.nan)

    def sums_of_layers(self, stage: str, values: np.ndarray) -> np.ndarray:
        """Return, for each pair of a stage, the sum of its layer's values.

        Args:
            values: values of the stage's pairs, in order, along the last axis.
        """
        return self._over_layers(np.add, stage, values, 0.0)

    def _over_layers(self, combine: np.ufunc, stage: str, values: np.ndarray, nothing: float) -> np.ndarray:
        combined = np.full((*values.shape[:-1], self._layer_count), nothing)
        if values.shape[-1]:
            order, starts, layers = self._layer_groups[stage]
            combined[..., layers] = combine.reduceat(np.take(values, order, axis=-1), starts, axis=-1)
        return np.take(combined, self.layer_numbers, axis=-1)

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
