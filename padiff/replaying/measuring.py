"""Floors from the runs of a step: how far off each of its tensors was when weights and inputs were moved."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from padiff.compare.judge.limits import COARSENESS, coarse
from padiff.records import InMemory, Record, Step, TensorSource
from padiff.records.floors import MEASURED_STAGES, Floor, Floors
from padiff.records.pack import Pack
from padiff.replaying.doing import Doing
from padiff.replaying.moving import SEED, Move, is_floating, moves
from padiff.replaying.step import ReplayStep

#: Free memory that a step in float64 has to find, in multiples of what was recorded of it: twice the bytes, of the
#: model, of the graph and of the record. Chosen.
FREE = 8.0


def computed_in(step: Step, environment: Mapping[str, Any] | None = None) -> str:
    """The coarsest dtype that a recorded step computes in: also what an autocast computes in, and gives as another."""
    seen = {coarse(record.dtype) for record in step.records} | {str((environment or {}).get("autocast.dtype"))}
    return next((dtype for dtype in reversed(COARSENESS) if dtype in seen), "float32")


class Measuring:
    """Puts a step's floors together.

    Args:
        step: it as it was recorded, not moved.
        environment: of its run.
    """

    def __init__(self, step: Step, environment: Mapping[str, Any]) -> None:
        self._base = {r.site: r for r in step.records if r.stage in MEASURED_STAGES and not r.source.sketched}
        self._number, self._dtype = step.number, computed_in(step, environment)
        self._floors: dict[str, Floor] = {}
        self._lost: set[str] = set()
        self._units: list[int] = []
        self._exact: dict[str, TensorSource] = {}
        self._notes: list[str] = []
        self._given_up = False

    def steps(self, doing: Doing, pack: Pack, runs: int, exact: bool) -> Iterator[ReplayStep | None]:
        """The step, to be done so many times more; `give_up` says that the one given last could not be.

        Before each comes `None`: the one before has ended, and nothing has begun yet.
        """
        if exact and not self._has_room():
            self.note("not run in float64: there is too little memory")
            exact = False
        for move in moves(runs, self._dtype, exact):
            self._given_up = whole = False
            yield None
            try:
                yield doing.begin(pack, move)
                whole = True
            finally:
                if not whole or self._given_up:
                    doing.discard()
            if not self._given_up:
                self.add(doing.take(), move)

    def give_up(self, why: str) -> None:
        """The run under way could not be done."""
        self._given_up = True
        self.note(why)

    def _has_room(self) -> bool:
        recorded = sum(math.prod(r.shape) * np.dtype(np.float64).itemsize for r in self._base.values())
        with suppress(AttributeError, OSError, ValueError):  # not known: tried
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >= FREE / 2 * recorded
        return True

    def add(self, step: Step | None, move: Move) -> None:
        """A run of it, moved; `None`: nothing was recorded."""
        records = {record.site: record for record in step.records} if step is not None else {}
        if move.exact:
            self._add_exact(records)
            return
        self._units.append(move.units)
        for site, base in self._base.items():
            found = _change(base, records.get(site))
            if found is None:
                self._lost.add(site)
                continue
            error, norm, size = found
            before = self._floors.get(site)
            self._floors[site] = Floor(max(error / move.units, before.error if before else 0.0), norm, size)

    def note(self, note: str) -> None:
        """Say what could not be measured."""
        self._notes.append(note)

    def _add_exact(self, records: dict[str, Record]) -> None:
        outputs = [record for record in records.values() if record.stage == "forward"]
        if not any(record.dtype == "float64" for record in outputs):
            self._notes.append("run in float64, the step computes in another dtype all the same (autocast)")
            return
        for site, base in self._base.items():
            record = records.get(site)
            if record is None or record.dtype != "float64" or record.shape != base.shape:
                continue
            values = record.value
            if np.isfinite(values).all():
                self._exact[site] = InMemory(values)

    def floors(self) -> Floors:
        """The floors; of what a run lacks, or has in another shape or not finite, there are none."""
        return Floors(
            step=self._number,
            runs=len(self._units),
            units=tuple(self._units),
            dtype=self._dtype,
            seed=SEED,
            sites={site: floor for site, floor in self._floors.items() if site not in self._lost},
            exact=self._exact,
            notes=tuple(self._notes),
        )


def _change(base: Record, moved: Record | None) -> tuple[float, float, int] | None:
    """L2 norm of the change, of the tensor, and its size."""
    if moved is None or moved.shape != base.shape or moved.source.sketched:
        return None
    one, other = base.value, moved.value
    if not is_floating(one) or not is_floating(other):
        return None
    wide = one.astype(np.float64)
    error, norm = float(np.linalg.norm(other.astype(np.float64) - wide)), float(np.linalg.norm(wide))
    return (error, norm, one.size) if math.isfinite(error) and math.isfinite(norm) else None
