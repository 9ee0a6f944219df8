"""Writing a run folder, on a background thread with a bounded queue."""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from padiff.dump.format import (
    FINISHED_FILE,
    FOLDERS,
    RUN_FILE,
    SCHEMA_VERSION,
    STEPS,
    loop_layer,
    record_to_json,
    step_folder,
    to_storable,
    tree_to_json,
)
from padiff.dump.read import read_info
from padiff.errors import RunFolderError, UsageError, WriterError
from padiff.records import LOOP, InMemory, Record, RunInfo, Step

#: Steps that may wait for the disk; the loop waits when it is further ahead, so memory stays bounded.
QUEUED_STEPS = 2

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")


class RunWriter:
    """Writes steps into a run folder while the training goes on.

    Args:
        path: the run folder; made if need be.
        info: what holds for all steps.
        rank: which process this is; rank 0 also writes ``run.json``.
        existing: ``error``, ``resume`` or ``overwrite`` a run that is there already.
        on_written: called on the writer's thread after each written step.
        on_done: called there with each step once nothing looks at it any more, written or not.

    Raises:
        UsageError: ``existing`` is none of the three.
        RunFolderError: the folder holds a run (with ``error``), another model's run (with ``resume``), or files
            that are no run.
    """

    def __init__(
        self,
        path: Path,
        info: RunInfo,
        *,
        rank: int = 0,
        existing: str = "error",
        on_written: Callable[[Step], None] | None = None,
        on_done: Callable[[Step], None] | None = None,
    ) -> None:
        if existing not in ("error", "resume", "overwrite"):
            raise UsageError(f"existing is 'error', 'resume' or 'overwrite', got {existing!r}")
        self.path = Path(path)
        self._info = info
        self._rank = rank
        self._replace = existing != "error"
        self._on_written = on_written
        self._on_done = on_done
        self._error: BaseException | None = None
        self._queue: queue.Queue[Step | None] = queue.Queue(maxsize=QUEUED_STEPS)
        try:
            self._prepare(existing)
        except OSError as error:
            if isinstance(error, RunFolderError):
                raise
            raise RunFolderError(f"cannot make the run folder {self.path}: {error}") from error
        # The thread knows the queue, and the writer only weakly: a recorder that is dropped without being closed (a
        # host that told its callback of no exception) is freed, and its thread ends.
        work = (weakref.ref(self), self._queue)
        self._thread = threading.Thread(target=_work, args=work, name="padiff-writer", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._queue.put, None).atexit = False

    # -- called by the training loop -----------------------------------------------------------------------

    def put(self, step: Step) -> None:
        """Queue a step for writing; waits only while `QUEUED_STEPS` others are still being written.

        Raises:
            WriterError: an earlier step could not be written, or this one was recorded already.
        """
        self._raise_error()
        if not self._replace and self._step_path(step.number).exists():
            raise WriterError(
                f"step {step.number} stands in {self.path} already: two recorders write into one run folder, or a "
                "step was ended twice. Give each run a folder of its own, or existing='resume' to replace steps"
            )
        self._queue.put(step)

    def flush(self) -> None:
        """Wait until every queued step is written."""
        self._queue.join()
        self._raise_error()

    def close(self, finished: bool = True) -> None:
        """Write what is queued and end the thread; ``finished`` says that no further step will come."""
        self._queue.put(None)
        self._thread.join()
        self._raise_error()
        if finished and self._rank == 0:
            _write_json(self.path / FINISHED_FILE, {"schema_version": SCHEMA_VERSION})

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise WriterError(
                f"a step could not be written to {self.path}: {error}. The steps before it are whole. "
                "Free the disk or give another folder; on_error='warn' lets the training go on without recording"
            ) from error

    # -- the folder ----------------------------------------------------------------------------------------

    def _prepare(self, existing: str) -> None:
        run_file = self.path / RUN_FILE
        if self._rank == 0 and run_file.exists():
            if existing == "error":
                raise RunFolderError(
                    f"{self.path} holds a run already, and nothing of it is overwritten unasked. Give another folder, "
                    "or existing='resume' to go on with it, or existing='overwrite' to replace it"
                )
            if existing == "resume":
                self._check_same_model(run_file)
            if existing == "overwrite":
                shutil.rmtree(self.path / STEPS, ignore_errors=True)
            (self.path / FINISHED_FILE).unlink(missing_ok=True)
        elif self._rank == 0 and self.path.is_dir() and any(self.path.iterdir()) and existing != "resume":
            foreign = sorted(entry.name for entry in self.path.iterdir())
            # A logger's own folder may hold runs' files beside ours; only what we would write over counts.
            if STEPS in foreign:
                raise RunFolderError(
                    f"{self.path} has a folder '{STEPS}' but no {RUN_FILE}: it is no run folder. Give an empty one"
                )
        (self.path / STEPS).mkdir(parents=True, exist_ok=True)
        if self._rank == 0:
            self._clear_leftovers()
            _write_json(run_file, run_to_json(self._info))

    def _clear_leftovers(self) -> None:
        """Put away what a process left that died while it wrote; a step that it was replacing comes back."""
        for left in (self.path / STEPS).glob(".*"):
            final = left.with_name(left.name[1:].removesuffix(".old"))
            if left.name.endswith(".old") and not final.exists():
                os.rename(left, final)
            else:
                shutil.rmtree(left, ignore_errors=True)

    def _check_same_model(self, run_file: Path) -> None:
        before = read_info(run_file)
        if [layer.path for layer in before.layers] != [layer.path for layer in self._info.layers]:
            raise RunFolderError(
                f"{self.path} holds the run of another model ({before.layers[0].type}, {len(before.layers)} layers; "
                f"now {self._info.layers[0].type}, {len(self._info.layers)} layers), so it can't be resumed. "
                "Give another folder, or existing='overwrite'"
            )

    def _step_path(self, number: int) -> Path:
        return self.path / STEPS / step_folder(number)

    # -- the thread ----------------------------------------------------------------------------------------

    def _handle(self, step: Step) -> None:
        try:
            if self._error is None:
                self._write(step)
                if self._on_written is not None:
                    self._on_written(step)
        except BaseException as error:  # it reaches the loop at its next call
            self._error = error
        finally:
            if self._on_done is not None:
                self._on_done(step)

    def _write(self, step: Step) -> None:
        """Write aside, then rename: a step is whole or absent."""
        final = self._step_path(step.number)
        partial = final.with_name(f".{final.name}.partial")
        aside = partial / f".rank_{step.rank}"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            write_dump(aside, self._info, step)
            os.rename(aside, partial / f"rank_{step.rank}")
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        if len(list(partial.glob("rank_*"))) < self._info.world_size:
            return
        # All ranks are there. Two that come last together both get here: one takes the step, the other finds it taken.
        taken = final.with_name(f".{final.name}.rank_{step.rank}.taken")
        try:
            os.rename(partial, taken)
        except FileNotFoundError:
            return
        if final.exists():
            # A folder can't be renamed onto a full one; the old step goes first, aside.
            old = final.with_name(f".{final.name}.old")
            shutil.rmtree(old, ignore_errors=True)
            os.rename(final, old)
            os.rename(taken, final)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(taken, final)


def _work(owner: weakref.ref[RunWriter], steps: queue.Queue[Step | None]) -> None:
    while True:
        step = steps.get()
        writer = owner()
        try:
            if step is None or writer is None:
                return
            writer._handle(step)
        finally:
            del step, writer
            steps.task_done()


def write_dump(folder: Path, info: RunInfo, step: Step, places: Mapping[str, tuple[str, str]] = FOLDERS) -> None:
    """Write one rank's records of one step: JSON trees and the tensors' files.

    ``places`` says, by stage, which JSON file and which folder of tensors; records of other stages are left out.
    """
    files: dict[int, str] = {}
    entries: dict[str, dict[str, list[dict[str, Any]]]] = {name: defaultdict(list) for name, _ in places.values()}
    for sub in {sub for _, sub in places.values()}:
        (folder / sub).mkdir(exist_ok=True)
    for record in step.records:
        place = places.get("loss" if record.layer == LOOP else record.stage)
        if place is None:
            continue
        json_file, sub = place
        # Records that share an array (a layer's output that is its parent's too) share a file.
        key = id(record.source.array) if isinstance(record.source, InMemory) else None
        name = files.get(key) if key is not None else None
        if name is None or not name.startswith(f"{sub}/"):
            name = f"{sub}/{_file_name(record)}"
            write_npy(folder / name, record.value)
            if key is not None:
                files[key] = name
        entries[json_file][record.layer].append(record_to_json(record, name))
    for json_file, by_layer in entries.items():
        _write_json(
            folder / json_file,
            {
                "schema_version": SCHEMA_VERSION,
                "step": step.number,
                "rank": step.rank,
                "loss_scale": step.loss_scale,
                "micro_batches": step.micro_batches,
                "notes": list(step.notes),
                "framework": {"name": info.framework, "version": info.framework_version},
                "name": info.name,
                "layer_map": list(info.layer_map),
                "loop": {**loop_layer(), "records": by_layer.get(LOOP, [])},
                "tree": tree_to_json(info.layers, by_layer),
            },
        )


def write_npy(path: Path, array: np.ndarray) -> None:
    """Write one tensor as ``.npy``."""
    array = to_storable(array)
    # Not np.save(path): it buffers through a Python file; unbuffered, the array's memory goes out in one write.
    with open(path, "wb", buffering=0) as file:
        header = np.lib.format.header_data_from_array_1_0(np.ascontiguousarray(array).reshape(array.shape))
        np.lib.format.write_array_header_1_0(file, header)
        if array.size:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            written = 0
            while written < len(data):
                written += file.write(data[written:])


def run_to_json(info: RunInfo) -> dict[str, Any]:
    """The content of ``run.json``."""
    return {
        "schema_version": SCHEMA_VERSION,
        "framework": {"name": info.framework, "version": info.framework_version},
        "name": info.name,
        "world_size": info.world_size,
        "recording": dict(info.recording),
        "layer_map": list(info.layer_map),
        "tree": tree_to_json(info.layers),
    }


def _file_name(record: Record) -> str:
    # The order makes it unique, the rest is for people; a name of 255 bytes is too long for file systems.
    text = _UNSAFE.sub("_", f"{record.stage}-{record.layer}-{record.slot}-{record.call}")
    return f"{record.order:06d}-{text[:120]}.npy"


def _write_json(path: Path, content: Any) -> None:
    # Aside, then renamed: run.json is never seen half-written either.
    aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    aside.write_text(json.dumps(content), encoding="utf-8")
    os.replace(aside, path)
