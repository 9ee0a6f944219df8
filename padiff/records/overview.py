"""Counts and worst diffs of many diffs, stage by stage, computed without an object for each diff."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np

from padiff.records.compared import Diff, Pair
from padiff.records.diff_rows import ROW, relative_l2, row_of
from padiff.records.pair_schema import stage_numbers
from padiff.records.recorded import STAGES


@dataclass(slots=True)
class StageCounts:
    """Counts and worst diff of one stage.

    Attributes:
        compared, alone: number of pairs that count, and of pairs without anything to compare with.
        differ: number of diffs that did not pass.
        worst: the compared diff with the largest multiple of its limit; `None` if no diff has figures.
        excess: that multiple.
    """

    compared: int = 0
    alone: int = 0
    differ: int = 0
    worst: Diff | None = None
    excess: float = -1.0


class Table(NamedTuple):
    """Columns of several diffs in causal order, with an element for each diff.

    Attributes:
        stages: number of the stage in `STAGES`.
        complete: True if both sides are present.
        rows: rows of the dtype `padiff.records.diff_rows.ROW`.
        diff: a function that returns the diff at a position.
        step: number of the step; -1 for several steps.
    """

    stages: np.ndarray
    complete: np.ndarray
    rows: np.ndarray
    diff: Callable[[int], Diff]
    step: int = -1


def tables_of(diffs: Sequence[Diff]) -> Iterator[Table]:
    """Yield the table of each step of a report's diffs; several tables of a step with several ranks."""
    tables: Iterable[Table] | None = getattr(diffs, "tables", None)
    if tables is not None:
        yield from tables
        return
    for step, group in groupby(diffs, lambda diff: diff.pair.step):
        yield table_of(list(group))._replace(step=step)


def table_of(diffs: Sequence[Diff]) -> Table:
    """Return the table of a sequence of diffs."""
    pairs: list[Pair] = [diff.pair for diff in diffs]
    complete = np.array([pair.complete for pair in pairs], np.bool_)
    rows = np.array([row_of(diff) for diff in diffs], ROW)
    return Table(stage_numbers(pair.stage for pair in pairs), complete, rows, diffs.__getitem__)


class Overview:
    """Counts of diffs by stage, and the worst diff.

    Args:
        tables: tables of the diffs.

    Attributes:
        stages: counts of each stage, in order of the stages' first occurrence.
    """

    def __init__(self, tables: Iterable[Table]) -> None:
        self.stages: dict[str, StageCounts] = {}
        self._worst: list[Diff | None] = [None, None]
        self._largest = [-1.0, -1.0]
        for table in tables:
            self._add(table)

    @property
    def worst(self) -> Diff | None:
        """Return the compared diff with the largest relative L2 error, or `None` if no diff has figures.

        Diffs that are rounding noise throughout (their limit is above 1) are considered only if there are no others.
        """
        return self._worst[0] or self._worst[1]

    def _add(self, table: Table) -> None:
        rows = table.rows
        passed, measured, judged = rows["passed"], rows["basis"] != 0, rows["figure"] != 0
        compared = table.complete & (measured | ~passed)
        errors, excess = relative_l2(rows), _excess(rows)
        looked_at = compared & measured & np.isfinite(errors)
        noise = passed & judged & (rows["limit"] > 1)
        for kind, mask in enumerate((looked_at & ~noise, looked_at & noise)):
            self._worst[kind], self._largest[kind] = _larger(
                table, np.flatnonzero(mask), errors, self._worst[kind], self._largest[kind]
            )
        numbers, first = np.unique(table.stages, return_index=True)
        for number in numbers[first.argsort()].tolist():
            places = np.flatnonzero(table.stages == number)
            stage = self.stages.setdefault(STAGES[number], StageCounts())
            count = int(np.count_nonzero(compared[places] | ~passed[places]))
            stage.compared += count
            stage.alone += len(places) - count
            stage.differ += int(np.count_nonzero(~passed[places]))
            stage.worst, stage.excess = _larger(table, places[looked_at[places]], excess, stage.worst, stage.excess)


def _larger(
    table: Table, places: np.ndarray, values: np.ndarray, worst: Diff | None, largest: float
) -> tuple[Diff | None, float]:
    """Return the diff at `places` with the largest value and that value, or `worst` and `largest` if no value exceeds
    it.
    """
    chosen = values[places]
    chosen = np.where(np.isnan(chosen), -np.inf, chosen)
    if not chosen.size or not chosen.max() > largest:
        return worst, largest
    most = int(chosen.argmax())
    return table.diff(int(places[most])), float(chosen[most])


def _excess(rows: np.ndarray) -> np.ndarray:
    """Return `Diff.excess` of each row."""
    value, limit = rows["value"], rows["limit"]
    with np.errstate(all="ignore"):
        judged = np.where(limit == 0, np.where(value == 0, 0.0, np.inf), value / limit)
    return np.where(rows["figure"] != 0, judged, np.where(rows["passed"], 0.0, np.inf))
