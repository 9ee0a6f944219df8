"""Diffs of one step as columns: a shared description of the pairs, and numbers for each diff."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from padiff.records.both import SIDES, Both, LazySequence, memoize
from padiff.records.compared import Diff, Figure, Figures, Float64Reference, Judgement, Pair, Problem, Rule
from padiff.records.pair_table import Key, PairSchema

#: Columns of `Figures` that are floats. These may be NaN, for a missing value: `bulk_l2`, `floor`, distances from
#: float64, and a judgement's `value` and `limit`.
FLOATS = (
    "max_abs",
    "max_rel",
    "mean_abs",
    "mean_reference",
    "l2",
    "reference_l2",
    "candidate_l2",
    "bulk_l2",
    "spread",
    "floor",
    "third_reference",
    "third_candidate",
)
_COUNTS = ("size", "mismatched", "nonfinite", "overflowed")
#: Meanings of the numbers in the columns `figure`, `rule`, `basis` and `code`; 0 stands for none.
FIGURES = (None, *Figure)
RULES = (None, *Rule)
BASES = ("", "tensors", "sketches", "moments")
_CODES = ("", *SIDES)
#: The number of each meaning.
FIGURE_NUMBERS = {figure: number for number, figure in enumerate(FIGURES)}
RULE_NUMBERS = {rule: number for number, rule in enumerate(RULES)}
_BASE_NUMBERS = {basis: number for number, basis in enumerate(BASES)}
TENSORS, SKETCHES, MOMENTS = (_BASE_NUMBERS[basis] for basis in BASES[1:])

#: A diff without its pair and its problem. `index` is the flat index of the worst element; `NO_INDEX` for none.
ROW = np.dtype(
    [
        ("figure", np.uint8),
        ("rule", np.uint8),
        ("basis", np.uint8),
        ("code", np.uint8),
        ("passed", np.bool_),
        ("index", np.int64),
        *((name, np.int64) for name in _COUNTS),
        *((name, np.float64) for name in FLOATS),
        ("reference_value", np.float64),
        ("candidate_value", np.float64),
        ("value", np.float64),
        ("limit", np.float64),
    ]
)
NO_INDEX = -1
_NOTHING = (NO_INDEX, *(0,) * len(_COUNTS), *(math.nan,) * (len(FLOATS) + 2))


def empty_rows(count: int) -> np.ndarray:
    """Return rows of diffs that pass, without figures and judgement."""
    return _EMPTY.repeat(count)


def _empty_row() -> np.ndarray:
    row = np.zeros(1, ROW)
    row["passed"], row["index"] = True, NO_INDEX
    for name in (*FLOATS, "reference_value", "candidate_value", "value", "limit"):
        row[name] = math.nan
    return row


_EMPTY = _empty_row()


def row_of(diff: Diff) -> tuple[Any, ...]:
    """Return the row of a diff."""
    figures, judged = diff.figures, diff.judgement
    third = figures.third if figures is not None else None
    about = (
        FIGURE_NUMBERS[judged.figure if judged is not None else None],
        RULE_NUMBERS[judged.rule if judged is not None else None],
        _BASE_NUMBERS[figures.basis] if figures is not None else 0,
        _CODES.index(third.code) if third is not None else 0,
        diff.passed,
    )
    judgement = (judged.value, judged.limit) if judged is not None else (math.nan, math.nan)
    if figures is None:
        return (*about, *_NOTHING, *judgement)
    counts = (figures.size, figures.mismatched, figures.nonfinite, figures.overflowed)
    floats = (
        figures.max_abs,
        figures.max_rel,
        figures.mean_abs,
        figures.mean_reference,
        figures.l2,
        figures.reference_l2,
        figures.candidate_l2,
        _or_nan(figures.bulk_l2),
        figures.spread,
        _or_nan(figures.floor),
        *(third.errors if third is not None else (math.nan, math.nan)),
    )
    return (*about, _flat(figures, diff.pair.anchor.shape), *counts, *floats, *figures.values, *judgement)


def relative_l2(rows: np.ndarray) -> np.ndarray:
    """Return `padiff.records.Figures.rel_l2` of each row; NaN without figures."""
    l2, size = rows["l2"], rows["reference_l2"]
    with np.errstate(divide="ignore", invalid="ignore"):
        relative: np.ndarray = l2 / size
    without = (rows["basis"] != 0) & ~(size > 0)
    if without.any():
        relative[without] = np.where(l2[without] == 0, 0.0, np.inf)
    return relative


def without_floor(rows: np.ndarray, place: int) -> None:
    """Remove a diff's floor."""
    rows["floor"][place] = math.nan


def without_third(rows: np.ndarray, place: int) -> None:
    """Remove the distances of a diff's two sides from float64."""
    rows["code"][place] = 0
    rows["third_reference"][place] = rows["third_candidate"][place] = math.nan


def odd_indexes(diffs: Mapping[int, Diff]) -> dict[int, tuple[int, ...]]:
    """Return the indexes of worst elements that no row can hold, by position: they do not index the anchor's tensor."""
    figures = ((place, diff.figures, diff.pair.anchor.shape) for place, diff in diffs.items())
    return {place: f.index for place, f, shape in figures if f is not None and f.index and not _has_flat(f, shape)}


def measured_and_judged(row: tuple[Any, ...], shape: Sequence[int]) -> tuple[Figures | None, bool, Judgement | None]:
    """Return the figures, `passed`, and the judgement of a diff's row; `None` for missing figures or judgement.

    Args:
        shape: shape of the anchor's tensor.
    """
    figure, rule, basis, code, passed, flat, size, mismatched, nonfinite, overflowed, *floats = row
    *measured, bulk, spread, floor, third, third_other, reference_value, candidate_value, value, limit = floats
    judged = Judgement(FIGURES[figure], value, limit, RULES[rule]) if figure else None  # type: ignore[arg-type]
    if not basis:
        return None, passed, judged
    max_abs, max_rel, mean_abs, mean_reference, l2, reference_l2, candidate_l2 = measured
    figures = Figures(
        max_abs,
        max_rel,
        mean_abs,
        mean_reference,
        l2,
        reference_l2,
        candidate_l2,
        size,
        () if flat == NO_INDEX else _index(flat, shape if basis != SKETCHES else ()),
        Both(reference_value, candidate_value),
        mismatched,
        nonfinite,
        overflowed,
        _or_none(bulk),
        BASES[basis],
        spread,
        _or_none(floor),
        Float64Reference(Both(third, third_other), _CODES[code]) if code else None,
    )
    return figures, passed, judged


def _has_flat(figures: Figures, shape: Sequence[int]) -> bool:
    """Return True if the index of the worst element can be a flat index; the index of a sketch is one already."""
    index = figures.index
    if figures.basis == "sketches":
        return len(index) == 1
    return len(index) == len(shape) and all(i < n for i, n in zip(index, shape))


def _flat(figures: Figures, shape: Sequence[int]) -> int:
    if not figures.index or not _has_flat(figures, shape):
        return NO_INDEX
    flat = 0
    for i, n in zip(figures.index, shape if figures.basis != "sketches" else (0,)):
        flat = flat * n + i
    return flat


def _index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    if not shape:
        return (flat,)
    index = []
    for n in reversed(shape):
        flat, i = divmod(flat, n)
        index.append(i)
    return tuple(reversed(index))


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


_Fact = TypeVar("_Fact")


class StepDiffs(LazySequence[Diff]):
    """Diffs of one process in a step, in causal order. `Diff` objects are created on access; numbers are columns.

    Args:
        pairs: the compared pairs.
        sites: description of the pairs.
        rows: rows of the dtype `ROW`, one for each diff.
        problems: problems by position.
        odd: indexes of worst elements that a row cannot hold, by position.
        facts: cached results of functions of the figures (`figure_fact`).

    Attributes:
        pairs, sites, rows, problems, odd: the arguments of the same names.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        sites: PairSchema,
        rows: np.ndarray,
        problems: Mapping[int, Problem],
        odd: Mapping[int, tuple[int, ...]],
        facts: dict[Any, Any] | None = None,
    ) -> None:
        self.pairs, self.sites, self.rows, self.problems, self.odd = pairs, sites, rows, problems, odd
        self._figure_facts: dict[Any, Any] = {} if facts is None else facts
        self._made: dict[int, Diff] = {}
        self._facts: dict[Any, Any] = {}

    def fact(self, find: Callable[[StepDiffs], _Fact]) -> _Fact:
        """Return the result of a function of these diffs; the function is called once and its result is cached."""
        return memoize(self._facts, find, lambda: self)

    def figure_fact(self, find: Callable[[StepDiffs], _Fact]) -> _Fact:
        """Return the result of a function of the figures alone; cached for these diffs, however they are judged."""
        return memoize(self._figure_facts, find, lambda: self)

    @classmethod
    def from_diffs(cls, diffs: Sequence[Diff], sites: PairSchema | None = None) -> StepDiffs:
        """Return the columns of a sequence of diffs.

        Args:
            sites: description of their pairs. Default: computed from the pairs.
        """
        if isinstance(diffs, StepDiffs):
            return diffs
        pairs = [diff.pair for diff in diffs]
        columns = cls(
            pairs,
            PairSchema.from_pairs(pairs) if sites is None else sites,
            np.array([row_of(diff) for diff in diffs], ROW),
            {place: diff.problem for place, diff in enumerate(diffs) if diff.problem is not None},
            odd_indexes(dict(enumerate(diffs))),
        )
        columns._made.update(enumerate(diffs))
        return columns

    @classmethod
    def joined(cls, some: Sequence[StepDiffs]) -> StepDiffs:
        """Return the diffs of several processes as one object, in the order of the processes."""
        if len(some) == 1:
            return some[0]
        return cls.from_diffs([diff for diffs in some for diff in diffs])

    def split(self, pairs: Sequence[Sequence[Pair]]) -> list[StepDiffs]:
        """Return the diffs of each process, given the pairs of each: the inverse of `joined`."""
        if len(pairs) == 1:
            return [self]
        processes, diffs = [], list(self)
        for part in pairs:
            processes.append(StepDiffs.from_diffs(diffs[: len(part)]))
            diffs = diffs[len(part) :]
        return processes

    @cached_property
    def measured(self) -> np.ndarray:
        """Return a mask of the diffs that have figures."""
        return np.asarray(self.rows["basis"] != 0)

    @cached_property
    def known(self) -> np.ndarray:
        """Return a mask of the diffs that have both sides and figures."""
        return np.asarray(self.sites.complete & self.measured)

    @cached_property
    def troubled(self) -> np.ndarray:
        """Return a mask of the diffs that have a problem."""
        mask = np.zeros(len(self.rows), np.bool_)
        mask[list(self.problems)] = True
        return mask

    @cached_property
    def relative(self) -> np.ndarray:
        """Return the relative L2 error of each diff, as defined by `padiff.records.Figures.rel_l2`."""
        return relative_l2(self.rows)

    def of_stage(self, stage: str, values: np.ndarray) -> np.ndarray:
        """Return the values that belong to the diffs of one stage."""
        return np.asarray(values[self.sites.places[stage]])

    def known_of_stage(self, stage: str, values: np.ndarray, otherwise: float = np.nan) -> np.ndarray:
        """Return the values of one stage's diffs, with `otherwise` for diffs that lack a side or figures."""
        return np.asarray(np.where(self.of_stage(stage, self.known), self.of_stage(stage, values), otherwise))

    @cached_property
    def compared(self) -> np.ndarray:
        """Return a mask of the diffs that were compared, as defined by `Diff.compared`."""
        return np.asarray(self.sites.complete & (self.measured | ~self.rows["passed"]))

    def failing(self, stages: Sequence[str], complete: bool = True) -> Iterator[Diff]:
        """Yield the failed diffs of some stages, in causal order; no other diff is made.

        Args:
            complete: True for pairs that have both sides, False for those that lack one.
        """
        failed = ~self.rows["passed"] & (self.sites.complete == complete)
        places = sorted(place for stage in stages for place in self.sites.places[stage].tolist())
        return (self[place] for place in places if failed[place])

    def known_places(self, stage: str) -> np.ndarray:
        """Return the positions of a stage's diffs that have both sides and figures."""
        places = self.sites.places[stage]
        return np.asarray(places[self.known[places]])

    @cached_property
    def passed(self) -> bool:
        """Return True if all diffs passed."""
        return bool(self.rows["passed"].all())

    @cached_property
    def number(self) -> int | None:
        """Return the number of the step; `None` without diffs."""
        return self.pairs[0].step if len(self.rows) else None

    def keys_of(self, which: np.ndarray) -> set[Key]:
        """Return the layers and slots of the diffs that a mask selects."""
        return {self.sites.keys[place] for place in np.flatnonzero(which).tolist()}

    def judged(self, rows: np.ndarray) -> StepDiffs:
        """Return the same diffs with other judgements.

        Args:
            rows: the new row of each diff.
        """
        return StepDiffs(self.pairs, self.sites, rows, self.problems, self.odd, self._figure_facts)

    def with_failures(self, judged: Mapping[int, tuple[Figure, float, float, Rule]]) -> StepDiffs:
        """Return the diffs with those at some positions failed.

        Args:
            judged: the judged figure, its value, its limit, and the rule, by position of the diff.
        """
        if not judged:
            return self
        rows = self.rows.copy()
        for place, (figure, value, limit, rule) in judged.items():
            rows["passed"][place] = False
            rows["figure"][place], rows["rule"][place] = FIGURE_NUMBERS[figure], RULE_NUMBERS[rule]
            rows["value"][place], rows["limit"][place] = value, limit
        return self.judged(rows)

    def passing(self, places: Sequence[int], passed: bool) -> StepDiffs:
        """Return the diffs with `passed` set at some positions; the judgements stay."""
        if not places:
            return self
        rows = self.rows.copy()
        rows["passed"][places] = passed
        return self.judged(rows)

    def replaced(self, diffs: Sequence[Diff]) -> StepDiffs:
        """Return other diffs of the same pairs in place of these."""
        return StepDiffs.from_diffs(diffs, self.sites)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Diff]:
        if len(self._made) < len(self):
            for place, row in enumerate(self.rows.tolist()):
                if place not in self._made:
                    self._made[place] = self._of_row(place, row)
        return iter([self._made[place] for place in range(len(self))])

    def _at(self, place: int) -> Diff:
        diff = self._made.get(place)
        if diff is None:
            diff = self._made[place] = self._of_row(place, self.rows[place].item())
        return diff

    def _of_row(self, place: int, row: tuple[Any, ...]) -> Diff:
        figures, passed, judged = measured_and_judged(row, self.sites.shapes[place])
        if place in self.odd and figures is not None:
            figures = replace(figures, index=self.odd[place])
        return Diff(self.pairs[place], figures, passed, judged, self.problems.get(place))
