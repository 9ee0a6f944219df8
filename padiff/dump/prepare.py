"""Preparation of a run folder for recording, its size limit, messages on missing steps, requests for full tensors."""

from __future__ import annotations

import json
import math
import os
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from padiff.dump.deduplication import SHARED
from padiff.dump.format import FINISHED_FILE, FLOORS, PACKS, RUN_FILE, STEPS, step_folder
from padiff.dump.lock import FolderLock, StoreLock, is_recording
from padiff.dump.medium import incomplete_steps, medium_of, read_text, size_of, write_json
from padiff.dump.read import FolderRun, read_info
from padiff.dump.store import AnyPath, as_local
from padiff.dump.stored_schema import STRUCTURES
from padiff.dump.untrusted import as_int, parse_json
from padiff.errors import PadiffError, RunFolderError, UsageError
from padiff.records import InMemory, Record, Run, RunInfo, Sketched, Step


def prepare(path: AnyPath, info: RunInfo, rank: int, existing: str) -> FolderLock:
    """Create or take over a run folder for one rank, and return its lock. The caller writes ``run.json``.

    Raises:
        RunFolderError: the folder holds a run (with ``error``), another model's run (with ``resume``), or files
            that are no run; or another process records into it.
        OSError: the folder cannot be written to.
    """
    path.mkdir(parents=True, exist_ok=True)
    # First of all: a run that is being recorded must be neither resumed nor overwritten.
    folder = as_local(path)
    lock = (StoreLock if folder is None else FolderLock).acquire(path, rank)
    try:
        if rank == 0:
            _take_over(path, info, existing)
        (path / STEPS).mkdir(exist_ok=True)
        if folder is not None:
            _clear_own(folder, rank)
            if rank == 0:
                _clear_leftovers(folder, info.world_size)
    except BaseException:
        lock.release()
        raise
    return lock


def identity_for(path: AnyPath, existing: str) -> str:
    """Return the identity of the run to record: the existing one if a run is resumed, else a new one."""
    if existing == "resume" and (path / RUN_FILE).exists():
        return read_info(path / RUN_FILE).identity
    return os.urandom(8).hex()


def settings_for(path: AnyPath, existing: str) -> Mapping[str, Any] | None:
    """Return the settings in a resumed run's ``run.json``; `None` if no step refers to them."""
    if existing == "resume" and (path / RUN_FILE).exists() and not _is_hollow(path / STEPS):
        return read_info(path / RUN_FILE).settings
    return None


def remove_without_steps(path: Path) -> None:
    """Remove a run without a step from a local folder, and the folder unless it holds other files."""
    if not _is_hollow(path / STEPS):
        return
    for name in (RUN_FILE, FINISHED_FILE):
        (path / name).unlink(missing_ok=True)
    for name in (STEPS, STRUCTURES, SHARED, PACKS, FLOORS):
        shutil.rmtree(path / name, ignore_errors=True)
    with suppress(OSError):
        path.rmdir()


def _take_over(path: AnyPath, info: RunInfo, existing: str) -> None:
    run_file, steps = path / RUN_FILE, path / STEPS
    if not run_file.exists():
        # A logger's folder may hold other files, and a process killed at its start leaves an empty folder; only files
        # that we would overwrite count.
        if existing != "resume" and medium_of(steps).is_there(steps) and not _is_hollow(steps):
            raise RunFolderError(
                f"{path} has a folder '{STEPS}' but no {RUN_FILE}: it is no run folder. Give an empty one"
            )
        return
    if existing == "error":
        raise RunFolderError(
            f"{path} holds a run already, and nothing of it is overwritten unasked. Give another folder, "
            "or existing='resume' to go on with it, or existing='overwrite' to replace it"
        )
    if existing == "resume":
        _check_same_model(path, info)
    (path / FINISHED_FILE).unlink(missing_ok=True)
    if existing == "overwrite":
        medium_of(path).replace_steps(path, (STRUCTURES, SHARED, PACKS, FLOORS))


def _is_hollow(steps: AnyPath) -> bool:
    return steps.is_dir() and all(entry.name.startswith(".") for entry in steps.iterdir())


def _check_same_model(path: AnyPath, info: RunInfo) -> None:
    before = read_info(path / RUN_FILE)
    if [layer.path for layer in before.layers] != [layer.path for layer in info.layers]:
        raise RunFolderError(
            f"{path} holds the run of another model ({before.layers[0].type}, {len(before.layers)} layers; "
            f"now {info.layers[0].type}, {len(info.layers)} layers), so it can't be resumed. "
            "Give another folder, or existing='overwrite'"
        )


def _clear_own(path: Path, rank: int) -> None:
    """Delete unfinished parts that an earlier process of this rank left when it was killed."""
    for unfinished in (partial for place in (STEPS, PACKS) for partial in (path / place).glob(".*.partial")):
        for name in (f"rank_{rank}", f".rank_{rank}"):
            shutil.rmtree(unfinished / name, ignore_errors=True)


def _clear_leftovers(path: Path, ranks: int) -> None:
    """Delete unfinished files that a killed process left, and restore a step that it was replacing.

    Parts of ranks that record now stay: they may have ended a step before rank 0 prepares the folder.
    """
    at_work = [rank for rank in range(1, ranks) if is_recording(path, rank)]
    for leftover in (hidden for place in (STEPS, PACKS, FLOORS) for hidden in (path / place).glob(".*")):
        if at_work and leftover.name.endswith(".partial") and leftover.is_dir():
            active = {f"{dot}rank_{rank}" for rank in at_work for dot in ("", ".")}
            for part in leftover.iterdir():
                if part.name not in active:
                    shutil.rmtree(part, ignore_errors=True)
            continue
        final = leftover.with_name(leftover.name[1:].removesuffix(".old"))
        if leftover.name.endswith(".old") and not final.exists():
            os.rename(leftover, final)
        else:
            shutil.rmtree(leftover, ignore_errors=True)
    for folder in (path, path / STRUCTURES, path / SHARED):
        for leftover in folder.glob(".*.partial"):
            leftover.unlink(missing_ok=True)
    for leftover in path.glob(f".{STEPS}.*.overwritten"):
        shutil.rmtree(leftover, ignore_errors=True)


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


# Largest number of steps or ranks that a sentence names.
_NAMED = 8


def missing_steps(run: Run) -> dict[int, list[int]]:
    """Return the steps that a rank did not write and will not write any more, by rank.

    Slow ranks do not count: either the rank has written a later step, or its process has ended. (In a store, locks do
    not show if a process has ended; there, the run must be finished.)
    """
    if run.info.world_size < 2 or not isinstance(run, FolderRun):
        return {}
    try:
        return _lost_in(run)
    except (OSError, PadiffError):  # the folder is gone or unreachable: reading the steps reports that
        return {}


def _lost_in(run: FolderRun) -> dict[int, list[int]]:
    ranks = run.info.world_size
    incomplete = {number: set(ranks_of_step) for number, ranks_of_step in incomplete_steps(run.path).items()}
    if not incomplete:
        return {}
    last_complete = max(run.numbers(), default=-1)
    latest: dict[int, int] = defaultdict(lambda: last_complete)
    for number, ranks_of_step in incomplete.items():
        for rank in ranks_of_step:
            latest[rank] = max(latest[rank], number)
    missing: dict[int, list[int]] = {}
    ended: dict[int, bool] = {}
    for number in sorted(incomplete):
        # The recorded number of ranks may be huge in a damaged run, so only some ranks are checked.
        for rank in islice((rank for rank in range(ranks) if rank not in incomplete[number]), _NAMED + 1):
            if rank not in ended:
                ended[rank] = _has_ended(run, rank, latest[rank] >= 0)
            if latest[rank] > number or ended[rank]:
                missing.setdefault(rank, []).append(number)
    # A rank may have written its part between the two checks.
    current = incomplete_steps(run.path) if missing else {}
    confirmed = {
        rank: [n for n in numbers if n in current and rank not in current[n]] for rank, numbers in missing.items()
    }
    return {rank: numbers for rank, numbers in confirmed.items() if numbers}


def _has_ended(run: FolderRun, rank: int, begun: bool) -> bool:
    """Return True if a rank will write no more. A rank without any step may still begin until the run is finished."""
    folder = as_local(run.path)
    if folder is None:
        return run.finished()
    return not is_recording(folder, rank) and (begun or run.finished())


def lost_steps(run: AnyPath) -> tuple[int, str]:
    """Return the number of steps that a finished run could not write to its store, and the reason."""
    try:
        lost = parse_json(read_text(run / FINISHED_FILE)).get("lost", {})
        return as_int(lost.get("count", 0)), str(lost.get("why", ""))
    except (OSError, ValueError, AttributeError, TypeError, OverflowError):
        return 0, ""


def missing_steps_lines(run: Run, whose: str) -> list[str]:
    """Return a sentence for each group of ranks that lack the same steps.

    Args:
        whose: name of the run in the sentence.
    """
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, numbers in missing_steps(run).items():
        groups[tuple(numbers)].append(rank)
    return [
        f"{_listed('rank', of)} of {whose} did not write {_listed('step', numbers)}, so nothing of "
        f"{'it' if len(numbers) == 1 else 'them'} is compared"
        for numbers, of in groups.items()
    ]


def _listed(what: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    named, remaining = [str(number) for number in numbers[:_NAMED]], len(numbers) - _NAMED
    return (
        f"{what}s {', '.join(named)} and {remaining} more"
        if remaining > 0
        else f"{what}s {', '.join(named[:-1])} and {named[-1]}"
    )


ZOOM_FILE = "zoom.json"
SCHEMA_VERSION = 1

# Largest size of a request's file in bytes; a larger file is ignored.
_LARGEST = 1 << 20
# Seconds between two checks of a store.
_BETWEEN = 2.0


@dataclass(frozen=True)
class Zoom:
    """A request for full tensors of some layers.

    Attributes:
        from_step: the request is for the first recorded step from this number on.
        layers: paths of the layers.
    """

    from_step: int
    layers: frozenset[str]


def ask(run: AnyPath, zoom: Zoom) -> bool:
    """Write a request into a run folder; return True if a recorder may still read it.

    Nothing is written if the run has finished, or the folder is not writable.
    """
    if (run / FINISHED_FILE).exists() or not (run / RUN_FILE).exists():
        return False
    content = {"schema_version": SCHEMA_VERSION, "from_step": zoom.from_step, "layers": sorted(zoom.layers)}
    try:
        write_json(run / ZOOM_FILE, content)
    except OSError:
        return False
    return True


class Requests:
    """The requests for one recorder. Checking for a new one costs one file status per recorded step.

    Args:
        run: the run folder.
    """

    def __init__(self, run: AnyPath) -> None:
        self._path = run / ZOOM_FILE
        # An existing request was meant for an earlier recorder.
        self._seen = self._stamp()
        self._waiting: Zoom | None = None

    def due(self, step: int) -> frozenset[str]:
        """Return the layers whose full tensors are requested for this step; each request is returned once."""
        self._look()
        if self._waiting is None or step < self._waiting.from_step:
            return frozenset()
        zoom, self._waiting = self._waiting, None
        return zoom.layers

    def _look(self) -> None:
        stamp = self._stamp()
        if stamp != self._seen:
            self._seen = stamp
            self._waiting = self._read()

    def _stamp(self) -> Any:
        try:
            return medium_of(self._path).stamp(self._path)
        except OSError:
            return None

    def _read(self) -> Zoom | None:
        """Return the request, or `None` if it can't be read: errors must not reach the training."""
        try:
            content = json.loads(read_text(self._path, _LARGEST).decode("utf-8"))
            if content["schema_version"] != SCHEMA_VERSION:
                return None
            return Zoom(int(content["from_step"]), frozenset(str(path) for path in content["layers"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None


class StoreRequests(Requests):
    """The requests for one recorder in a store; they are read on a thread, so that the training does not wait."""

    def __init__(self, run: AnyPath) -> None:
        super().__init__(run)
        self._asking: threading.Thread | None = None
        self._asked = time.monotonic()

    def _look(self) -> None:
        asking = self._asking is not None and self._asking.is_alive()
        if asking or time.monotonic() - self._asked < _BETWEEN:
            return
        self._asked = time.monotonic()
        self._asking = threading.Thread(target=super()._look, name="padiff-zoom", daemon=True)
        self._asking.start()


def requests_of(run: AnyPath) -> Requests:
    """Return the requests for the recorder of a run."""
    return StoreRequests(run) if medium_of(run).is_slow else Requests(run)
