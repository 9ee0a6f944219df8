"""What many diffs come to, stage by stage, without an object for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from padiff.records.compared import Diff, Pair
from padiff.records.recorded import STAGES
from padiff.records.rows import ROW, relative_l2, row_of
from padiff.records.sites import stage_numbers


@dataclass(slots=True)
class StageCounts:
    """What the diffs of a stage come to.

    Attributes:
        compared, alone: how many pairs were compared, and how many have nothing to be compared with.
        differ: how many did not pass.
        worst: the compared diff that is the most times its limit; `None` where none has figures.
        excess: how many times.
    """

    compared: int = 0
    alone: int = 0
    differ: int = 0
    worst: Diff | None = None
    excess: float = -1.0


class Table(NamedTuple):
    """Some diffs, in causal order, an element for each.

    Attributes:
        stages: the number of its stage in `STAGES`.
        complete: whether both sides are there.
        rows: of `padiff.records.rows.ROW`.
        diff: gives one of them, by its place.
    """

    stages: np.ndarray
    complete: np.ndarray
    rows: np.ndarray
    diff: Callable[[int], Diff]


def table_of(diffs: Sequence[Diff]) -> Table:
    """The table of some diffs."""
    pairs: list[Pair] = [diff.pair for diff in diffs]
    complete = np.array([pair.complete for pair in pairs], np.bool_)
    rows = np.array([row_of(diff) for diff in diffs], ROW)
    return Table(stage_numbers(pair.stage for pair in pairs), complete, rows, diffs.__getitem__)


class Overview:
    """What diffs come to.

    Args:
        tables: they.

    Attributes:
        stages: what those of each stage come to, in the order in which these come first.
    """

    def __init__(self, tables: Iterable[Table]) -> None:
        self.stages: dict[str, StageCounts] = {}
        self._worst: list[Diff | None] = [None, None]
        self._largest = [-1.0, -1.0]
        for table in tables:
            self._add(table)

    @property
    def worst(self) -> Diff | None:
        """The compared diff with the largest relative L2 error, or `None` where nothing has figures.

        What is rounding noise throughout (its limit is above 1) is passed over while there is anything else.
        """
        return self._worst[0] or self._worst[1]

    def _add(self, table: Table) -> None:
        rows = table.rows
        passed, measured, judged = rows["passed"], rows["basis"] != 0, rows["figure"] != 0
        compared = table.complete & (measured | ~passed)
        errors, excess = relative_l2(rows), _excess(rows)
        looked_at = compared & measured & np.isfinite(errors)
        noise = passed & judged & (rows["limit"] > 1)
        for kind, own in enumerate((looked_at & ~noise, looked_at & noise)):
            self._worst[kind], self._largest[kind] = _larger(
                table, np.flatnonzero(own), errors, self._worst[kind], self._largest[kind]
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
    """The first diff of those at some places that has the largest value, if that is larger than what there was."""
    own = values[places]
    own = np.where(np.isnan(own), -np.inf, own)
    if not own.size or not own.max() > largest:
        return worst, largest
    most = int(own.argmax())
    return table.diff(int(places[most])), float(own[most])


def _excess(rows: np.ndarray) -> np.ndarray:
    """`Diff.excess` of each."""
    value, limit = rows["value"], rows["limit"]
    with np.errstate(all="ignore"):
        judged = np.where(limit == 0, np.where(value == 0, 0.0, np.inf), value / limit)
    return np.where(rows["figure"] != 0, judged, np.where(rows["passed"], 0.0, np.inf))
