"""Size limit of a run folder: the first, the worst and the latest steps stay, others are deleted."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import numpy as np

from padiff.dump.format import PACKS, STEPS, step_folder
from padiff.dump.medium import size_of
from padiff.dump.remote_path import AnyPath
from padiff.errors import UsageError
from padiff.records import InMemory, Record, Sketched, Step

#: Number of worst steps that are kept.
WORST = 3

# Bytes of a record besides its values: its JSON entry, and the header of its file.
_PER_RECORD = 700
# Bytes of a record's entry in a structure file, which most packed steps share.
_NAMES = 250


class Budget:
    """Size limit of a run folder, which chooses the steps to delete. Only rank 0 uses it, for all ranks.

    The oldest step goes first, except the first step of the run and the `WORST` worst ones; if only these are left, the
    least bad of them.

    Args:
        path: the run folder; its existing steps count.
        max_bytes: largest size of the folder in bytes.
        ranks: number of processes that write into it.
    """

    def __init__(self, path: AnyPath, max_bytes: float, ranks: int = 1) -> None:
        self._path, self._limit, self._ranks = path, int(max_bytes), ranks
        self._sizes: dict[int, int] = {}
        #: Steps whose size on disk was measured with all ranks' parts, as ranks store equal tensors only once.
        self._measured: set[int] = set()
        self._severity: dict[int, float] = {}
        self._overhead, self._per_record = 0, 0.0
        self._lock = threading.Lock()
        for folder in (*(path / STEPS).glob("*"), *(path / PACKS).glob("*")):
            if folder.name.isdecimal():
                self._sizes[int(folder.name)] = self._sizes.get(int(folder.name), 0) + size_of(folder)

    def mark(self, number: int, severity: float) -> None:
        """Set a step's severity: the worst diff as a multiple of its limit, infinity for NaN. The maximum counts."""
        with self._lock:
            self._severity[number] = max(severity, self._severity.get(number, 0.0))

    def make_room(self, step: Step, drop: Callable[[int], None], more: int = 0) -> None:
        """Delete steps until the next one fits.

        Args:
            step: the step that will be written.
            drop: deletes the step of a number.
            more: bytes that are written with the step.

        Raises:
            UsageError: the step does not fit even without the others.
        """
        needed = (self._values(step) + self._others(len(step.records)) + more) * self._ranks
        fixed = sum(size_of(entry) for entry in self._path.iterdir() if entry.name not in (STEPS, PACKS))
        # Other ranks may be ahead: count their parts of incomplete steps.
        prefix = f".{step_folder(step.number)}."
        places = (self._path / STEPS, self._path / PACKS)
        ahead = [entry for place in places for entry in place.glob(".*") if not entry.name.startswith(prefix)]
        fixed += sum(map(size_of, ahead))
        self._measure()
        while fixed + sum(self._sizes.values()) + needed > self._limit:
            number = self._next(step.number)
            if number is None:
                raise UsageError(
                    f"max_bytes={self._limit:,} is too small: the first step, the one to be written and the run's "
                    f"other files need {fixed + sum(self._sizes.values()) + needed:,} bytes. Allow more, or record "
                    "less (detail, white_list, replay_every_n_steps)"
                )
            drop(number)
            del self._sizes[number]
            self._measured.discard(number)

    def _measure(self) -> None:
        for number in {*self._sizes} - self._measured if self._ranks > 1 else ():
            places = [self._path / place / step_folder(number) for place in (STEPS, PACKS)]
            if places[0].exists():  # all ranks have written it
                self._sizes[number] = sum(map(size_of, places))
                self._measured.add(number)

    def written(self, step: Step, size: int, more: int = 0) -> None:
        """Register a written step; the parts of other ranks are assumed to be as large.

        Args:
            size: bytes of this rank's part.
            more: bytes that were written with it (its pack).
        """
        self._sizes[step.number] = (size + more) * self._ranks
        self._measured.discard(step.number)
        # One part grows with the number of records, another (the layer tree) is constant.
        more = max(size - self._values(step), 0)
        self._overhead = max(self._overhead, more)
        self._per_record = max(self._per_record, more / max(len(step.records), 1))
        if any(_nonfinite(record) for record in step.records):
            self.mark(step.number, float("inf"))

    def _next(self, number: int) -> int | None:
        """Return the step to delete next so that step ``number`` can be written; `None` if only the first is left.

        An older version of step ``number`` goes last, so it stays until it is replaced if there is room for both.
        """
        with self._lock:
            present = [n for n in sorted(self._sizes)[1:] if n != number]
            worst = sorted((n for n in present if n in self._severity), key=lambda n: (-self._severity[n], n))[:WORST]
        for candidate in present:
            if candidate not in worst:
                return candidate
        return worst[-1] if worst else number if number in self._sizes else None

    @staticmethod
    def _values(step: Step) -> int:
        arrays = {id(r.source.array): r.source.array.nbytes for r in step.records if isinstance(r.source, InMemory)}
        others = [r for r in step.records if not isinstance(r.source, InMemory)]
        return sum(arrays.values()) + sum(_bytes(record) for record in others)

    def _others(self, records: int) -> int:
        """Return an estimate of a step's bytes besides its values, with its structure file."""
        if self._overhead:
            return max(self._overhead, math.ceil(records * self._per_record)) + _NAMES * records
        return _PER_RECORD * records + 4 * size_of(self._path / "run.json")


def _bytes(record: Record) -> int:
    if isinstance(record.source, Sketched):
        return int(record.source.row.nbytes)
    width = 16 if "128" in record.dtype else 8 if "64" in record.dtype else 4
    return int(np.prod(record.shape, dtype=np.int64)) * width


def _nonfinite(record: Record) -> bool:
    """Return True if a sketch or loss has infinities or NaN; other full tensors are not searched."""
    if isinstance(record.source, Sketched):
        return record.source.sketch.nonfinite > 0
    return record.stage == "loss" and not bool(np.isfinite(record.value).all())
