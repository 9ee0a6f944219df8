"""Measurements of several steps with the same schema, as one array."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from padiff.records.diff_rows import relative_l2
from padiff.records.judgement import Problem
from padiff.records.memoization import memoize
from padiff.records.pair_schema import PairSchema

_Fact = TypeVar("_Fact")


class StepBatch:
    """Measured diffs of one or several steps. The first axis of all arrays is the step, the second the diff.

    Args:
        sites: the schema of the pairs, the same for each step.
        rows: rows of the dtype `padiff.records.diff_rows.ROW`; the columns of judgements are not used.
        problems: the problems of each step, by position of the diff.

    Attributes:
        sites, rows: the arguments of the same names.
    """

    def __init__(self, sites: PairSchema, rows: np.ndarray, problems: Sequence[Mapping[int, Problem]]) -> None:
        self.sites, self.rows, self._problems = sites, rows, problems
        self._facts: dict[Any, Any] = {}

    def fact(self, find: Callable[[StepBatch], _Fact]) -> _Fact:
        """Return the result of a function of this block; the function is called once and its result is cached."""
        return memoize(self._facts, find, lambda: self)

    @cached_property
    def measured(self) -> np.ndarray:
        """Return a mask of the diffs that have figures."""
        return np.asarray(self.rows["basis"] != 0)

    @cached_property
    def known(self) -> np.ndarray:
        """Return a mask of the diffs that have both sides and figures."""
        return np.asarray(self.sites.complete & self.measured)

    @cached_property
    def all_known(self) -> bool:
        """Return True if all diffs have both sides and figures."""
        return bool(self.known.all())

    @cached_property
    def troubled(self) -> np.ndarray:
        """Return a mask of the diffs that have a problem."""
        mask = np.zeros(self.rows.shape, np.bool_)
        for number, problems in enumerate(self._problems):
            mask[number, list(problems)] = True
        return mask

    @cached_property
    def relative(self) -> np.ndarray:
        """Return the relative L2 error of each diff, as defined by `padiff.records.Figures.rel_l2`."""
        return relative_l2(self.rows)

    def of_stage(self, stage: str, values: np.ndarray) -> np.ndarray:
        """Return the values that belong to the diffs of one stage."""
        return np.take(values, self.sites.places[stage], axis=-1)

    def known_of_stage(self, stage: str, values: np.ndarray, otherwise: float = np.nan) -> np.ndarray:
        """Return the values of one stage's diffs, with `otherwise` for diffs that lack a side or figures."""
        chosen = self.of_stage(stage, values)
        return chosen if self.all_known else np.where(self.of_stage(stage, self.known), chosen, otherwise)
