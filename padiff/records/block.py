"""What was measured of steps that are alike, in one table: what has to be known of each is worked out at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from padiff.records.facts import once
from padiff.records.judgement import Problem
from padiff.records.rows import relative_l2
from padiff.records.sites import Sites

_Fact = TypeVar("_Fact")


class Block:
    """The measured diffs of one or several steps. Of all arrays the first axis is the step, the second the diff.

    Args:
        sites: what the pairs of each step are.
        rows: of `padiff.records.rows.ROW`. What is judged of them is not looked at.
        problems: of each step, those that there are, by place.

    Attributes:
        sites, rows: likewise.
    """

    def __init__(self, sites: Sites, rows: np.ndarray, problems: Sequence[Mapping[int, Problem]]) -> None:
        self.sites, self.rows, self._problems = sites, rows, problems
        self._facts: dict[Any, Any] = {}

    def fact(self, find: Callable[[Block], _Fact]) -> _Fact:
        """What a function finds out from the steps; it is called once."""
        return once(self._facts, find, lambda: self)

    @cached_property
    def measured(self) -> np.ndarray:
        """Which have figures."""
        return np.asarray(self.rows["basis"] != 0)

    @cached_property
    def known(self) -> np.ndarray:
        """Which are compared, and have figures."""
        return np.asarray(self.sites.complete & self.measured)

    @cached_property
    def all_known(self) -> bool:
        """Whether all are."""
        return bool(self.known.all())

    @cached_property
    def troubled(self) -> np.ndarray:
        """Which have a problem."""
        found = np.zeros(self.rows.shape, np.bool_)
        for number, problems in enumerate(self._problems):
            found[number, list(problems)] = True
        return found

    @cached_property
    def relative(self) -> np.ndarray:
        """The relative L2 error of each, as `padiff.records.Figures.rel_l2` says."""
        return relative_l2(self.rows)

    def of_stage(self, stage: str, values: np.ndarray) -> np.ndarray:
        """Those of the values that are of a stage's diffs."""
        return np.take(values, self.sites.places[stage], axis=-1)

    def known_of_stage(self, stage: str, values: np.ndarray, otherwise: float = np.nan) -> np.ndarray:
        """The same, with something else where a diff is not compared, or has no figures."""
        found = self.of_stage(stage, values)
        return found if self.all_known else np.where(self.of_stage(stage, self.known), found, otherwise)
