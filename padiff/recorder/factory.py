"""Creation of recorders: plain ones, or the doctor's in a process started by `padiff doctor`."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from padiff.dump.format import digest
from padiff.dump.lock import register_fork_cleanup
from padiff.dump.store import AnyPath
from padiff.errors import PadiffError, WriterError
from padiff.frameworks.base import UncopiedError
from padiff.frameworks.hooking import Handle
from padiff.recorder.failures import Failures
from padiff.recorder.options import Identity, RecordOptions, Scope, Target, check_names, group
from padiff.recorder.output import MemoryRun
from padiff.recorder.session import InertRecorder, Recorder
from padiff.records import RunInfo, Step
from padiff.records.traces import Pack
from padiff.system.guard import Failure
from padiff.system.terminal import say

if TYPE_CHECKING:
    from typing_extensions import Unpack


#: The environment variable that holds a `Plan`; set in the processes that the doctor starts, and nowhere else.
VARIABLE = "PADIFF_DOCTOR"

# Number of times a script may catch `StopScript` and continue.
_PATIENCE = 3

# Numbers the recorders of a script, so that a recorder has the same number in each of the doctor's runs.
_NUMBERS = itertools.count()


@dataclass(frozen=True)
class Plan:
    """Instructions of the doctor for one run of a script.

    Attributes:
        folder: folder for the logs and the run folders.
        record: True to record, False to log only.
        steps: number of steps after which the script ends.
    """

    folder: str
    record: bool
    steps: int

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Plan:
        return cls(**json.loads(os.environ[VARIABLE]))


class StopScript(SystemExit):
    """Raised to end a script after the planned steps.

    A `SystemExit` ends the script without a traceback, passes ``except Exception``, and runs the hosts' clean-up.
    """

    code = 0


class DoctorRecorder(Recorder):
    """A `Recorder` that also logs each step's losses, parameters, and gradients used by the optimizers."""

    watched = True

    def __init__(
        self, model: Any, scope: Scope, target: Target, identity: Identity, replay_of: str | None = None
    ) -> None:
        self._plan = Plan.from_environment()
        self._number = next(_NUMBERS)
        folder = None if target.dir_path is None else Path(self._plan.folder) / f"run_{self._number}"
        # Live comparison and scalars would write into the user's folders.
        super().__init__(model, scope, replace(target, dir_path=folder, on_written=None), identity, replay_of)
        self._log: StepLog | None = None
        self._seen = self._caught = 0

    def _move(self, dir_path: str | Path) -> None:
        # The folder that the script names belongs to the user: nothing is written there.
        if self._plan.record:
            super()._move(Path(self._plan.folder) / f"run_{self._number}")

    def open(self) -> None:
        if self._plan.record:
            super().open()
        else:
            self._output.sink = NullSink()
            self._output.run = MemoryRun(self.info) if self._output.folder is None else None
            register_fork_cleanup(self)
        self._log = StepLog(self, Path(self._plan.folder) / f"notes_{self._number}_rank_{self._description.rank}.jsonl")

    def attach(self) -> None:
        if self._plan.record:
            super().attach()

    def log_loss(self, loss: Any) -> None:
        if self._log is not None:
            self._log.loss(loss)
        super().log_loss(loss)

    def end_step(self, *args: Any, **options: Any) -> bool:
        due, step = self.due, self.step
        if self._log is not None:
            self._log.check()
        written = super().end_step(*args, **options)
        if self._log is not None:
            self._log.end(step, due)
        self._seen += 1
        if self._seen >= self._plan.steps:
            self._enough()
        return written or (due and not self._plan.record)

    def close(self, *args: Any, **options: Any) -> None:
        super().close(*args, **options)
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def leave_in_fork(self) -> None:
        super().leave_in_fork()
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def _enough(self) -> None:
        self._caught += 1
        with contextlib.suppress(WriterError):
            self.close()
        if self._caught > _PATIENCE:
            os._exit(0)  # the script catches `SystemExit`, and would train to its end
        raise StopScript


class NullSink:
    """A sink that discards all steps."""

    def add_step(self, step: Step, pack: Pack | None = None) -> None:
        pass

    def set_info(self, info: RunInfo) -> None:
        pass

    def flush(self) -> None:
        pass

    def close(self, finished: bool = True) -> None:
        pass


class StepLog:
    """Log of a recorder's steps: digests and times, one line of JSON per step. Times exclude the logging itself."""

    def __init__(self, recorder: Recorder, path: Path) -> None:
        self._framework, self._nodes = recorder._framework, recorder._layers.nodes
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed in close()
        self._losses: list[tuple[str, float]] = []
        self._gradients: dict[str, str] = {}
        self._parameters: dict[str, str] = {}
        self._names: dict[int, str] = {}
        self._times: Counter[str] = Counter()
        self._owned()
        self._handles: list[Handle] = []
        for optimizer in recorder._optimizers:
            self._handles += self._framework.optimizers.hook(optimizer, self._consumed, lambda: None)
        self._own = 0.0
        self._began = time.perf_counter()

    def loss(self, value: Any) -> None:
        start = time.perf_counter()
        with contextlib.suppress(UncopiedError):
            array = (
                self._framework.tensors.copy(value) if self._framework.tensors.is_tensor(value) else np.asarray(value)
            )
            self._losses.append((digest(array), float(array.astype(np.float64).mean())))
        self._own += time.perf_counter() - start

    def check(self) -> None:
        """Compute the digests of the parameters, and of the gradients if there are no optimizers, at a step's end."""
        tensors = self._owned()
        with contextlib.suppress(UncopiedError, ValueError):
            # On a GPU, queued work is part of the step; copying the smallest tensor waits for this work.
            self._framework.tensors.copy(min((tensor for _, tensor in tensors), key=self._size))
        start = time.perf_counter()
        self._parameters = {name: self._digest(tensor) for name, tensor in tensors}
        if not self._handles:
            for name, tensor in tensors:
                if tensor.grad is not None:
                    self._gradients[name] = self._digest(tensor.grad)
        self._own += time.perf_counter() - start

    def end(self, step: int, due: bool) -> None:
        """Write the step's line."""
        line = {
            "step": step,
            "due": due,
            "seconds": time.perf_counter() - self._began - self._own,
            "losses": self._losses,
            "gradients": self._gradients,
            "parameters": self._parameters,
            "peak": peak_memory(),
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._losses, self._gradients, self._own = [], {}, 0.0
        self._times.clear()
        self._began = time.perf_counter()

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._file.close()

    def _consumed(self, parameters: Sequence[Any], gradients: Sequence[Any]) -> None:
        start = time.perf_counter()
        for parameter, gradient in zip(parameters, gradients):
            name = self._names.get(id(parameter))
            if name is not None and gradient is not None:
                repeats = self._times[name]
                self._times[name] += 1
                key = f"{name}#{repeats}" if repeats else name
                self._gradients[key] = self._digest(gradient)
        self._own += time.perf_counter() - start

    def _digest(self, tensor: Any) -> str:
        """Return the digest of a tensor's values, or "" for a tensor without values, with and without recording."""
        try:
            return digest(self._framework.tensors.copy(tensor))
        except UncopiedError:
            return ""

    def _owned(self) -> list[tuple[str, Any]]:
        """Return the parameters and buffers with their names; a shared tensor appears once."""
        tensors: dict[int, tuple[str, Any]] = {}
        for node in self._nodes:
            for slot, tensor, _ in self._framework.layers.parameters(node.layer):
                tensors.setdefault(id(tensor), (f"{node.path}/{slot}", tensor))
        self._names = {key: name for key, (name, _) in tensors.items()}
        return list(tensors.values())

    def _size(self, tensor: Any) -> int:
        return int(np.prod(self._framework.tensors.shape(tensor)))


def peak_memory() -> int:
    """Return the peak memory use of this process in bytes, or 0 if unknown."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as file:
        # Not getrusage(): its value is inherited from the parent process.
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(ImportError):
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return 0


def record(model: Any, dir_path: str | AnyPath | None = None, **options: Unpack[RecordOptions]) -> Recorder:
    """Record a training loop: ``with padiff.record(model, "runs/torch", optimizer=optimizer) as rec: ...``

    Args:
        model: a torch Module, a paddle Layer, or the result of ``create_model``, whose lists and layer map are the
            defaults of this call. Several models of one loop are a mapping of names to models.
        dir_path: the run folder, or a location in a store (``s3://bucket/run``); None keeps the steps in memory, as
            ``rec.run``.
        options: see `padiff.recorder.options.RecordOptions`.

    Raises:
        UsageError: the model belongs to neither framework, an item of a list matches no layer, or an argument is wrong.
        OptionError: an option does not exist.
    """
    try:
        check_names(options, RecordOptions)
        return recorder_of(model, dir_path, **options)
    except PadiffError:
        raise
    except Exception as error:
        if options.get("on_error") == "raise":
            raise
        say(Failures().add(None, Failure.from_error(error)), alarming=True)
        return InertRecorder(options.get("start_step", 0))


def recorder_of(
    model: Any, dir_path: str | AnyPath | None = None, replay_of: str | None = None, **options: Any
) -> Recorder:
    """Return a recorder; see `record`.

    Args:
        replay_of: identity of the run whose packed steps are replayed; None for a training.
    """
    # A replay always gets a plain recorder: the doctor's would write the records to another folder.
    if replay_of is None:
        for leave in list(Recorder.leaving):
            leave()
    else:
        options.setdefault("detail", "full")  # a replayed step is compared in full, one step at a time
    kind = DoctorRecorder if VARIABLE in os.environ and replay_of is None else Recorder
    target = group(Target, options, dir_path=dir_path)
    return kind(model, group(Scope, options), target, group(Identity, options), replay_of)
