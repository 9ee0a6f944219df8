"""Diffs as rows of a structured array: figures and judgement as numbers, without objects."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from padiff.records.both import SIDES, Both
from padiff.records.compared import Diff, Figures, Float64Reference
from padiff.records.judgement import Figure, Judgement, Rule

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
