"""Records the processes below `padiff run`: ranks into one run, processes without a rank into ``DIR-worker-N``."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import zlib
from multiprocessing.process import parent_process
from typing import Any

from padiff.dump.store import AnyPath, run_folder
from padiff.system.terminal import say
from padiff_cli.run.hosts import HostWatch
from padiff_cli.run.launch import Launch, numbered, of_workers
from padiff_cli.run.loop import LoopFinder
from padiff_cli.run.recording import Recording
from padiff_cli.run.startup import contained

# What launchers set, the most specific first. Lightning starts its processes with a local rank.
_RANKS = ("RANK", "PADDLE_TRAINER_ID", "LOCAL_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
# Before the finalizers of others in a process of multiprocessing, which stop what a run may need to be finished.
_PRIORITY = 1000


class ProcessRecording(Recording):
    """The recording of one process of a launch. The process gets its folder when a training begins.

    Args:
        launch: the `padiff run`.
        is_main: the process is the one that `padiff run` was started as.
        is_fork: the process is a fork of another one that watches.
    """

    def __init__(self, launch: Launch, is_main: bool = False, is_fork: bool = False) -> None:
        self._launch, self._is_main, self._is_fork = launch, is_main, is_fork
        self._folder: AnyPath | None = None
        self._claim = ""
        super().__init__(launch.script, run_folder(launch.dir_path, "--dir"), dict(launch.options))

    @property
    def dir_path(self) -> AnyPath:
        """The run folder of this process."""
        if self._folder is None:
            self._folder = self._claim_folder()
        return self._folder

    @dir_path.setter
    def dir_path(self, path: AnyPath) -> None:
        pass  # the launch's, which other processes may have

    def announce(self, what: str) -> None:
        super().announce(what)
        _end_with_process()

    def may_try(self) -> bool:
        return rank_of_process(self._is_fork) is None and super().may_try()

    def try_out(self) -> None:
        _end_with_process()

    def undo(self) -> None:
        super().undo()
        self._launch.release(self._claim)
        self._folder = None

    def withdraw(self) -> None:
        if self._is_main:
            super().withdraw()
        self._said = True

    def say_of_nothing(self, *reasons: Any) -> None:
        if self._is_main and not self._launch.claims_of(""):
            super().say_of_nothing(*reasons)

    def silence(self) -> None:
        """Say nothing any more."""
        self._said, self.attached, self._is_main = True, False, False

    def restart_in_fork(self) -> None:
        """Begin anew, as the recording of a fork."""
        ProcessRecording.__init__(self, self._launch, is_fork=True)

    def _say(self, text: str) -> None:
        # Workers that are alike say the same.
        if not rank_of_process(self._is_fork) and self._launch.claim(f"said-{zlib.crc32(text.encode()):08x}"):
            say(text)

    def _claim_folder(self) -> AnyPath:
        launch, rank = self._launch, rank_of_process(self._is_fork)
        is_worker = rank is None and not self._is_main and (not launch.is_command or _is_child(self._is_fork))
        # A run that was there before the launch stays, unless the options say otherwise. A rank that its launcher
        # started as a `padiff run` of its own shares no claims: rank 0 has looked, and may have begun the run.
        joins = launch.options.get("existing", "error") != "error" or (self._is_main and rank)
        for folder in (of_workers if is_worker else numbered)(launch.dir_path):
            path = run_folder(folder, "--dir")
            name = f"{zlib.crc32(path.name.encode()):08x}-"
            is_free = joins or launch.claims_of(name)
            if (is_free or not (path / "run.json").exists()) and launch.claim(f"{name}{rank or 0}"):
                self._claim = f"{name}{rank or 0}"
                return path
        raise AssertionError("there is always a next folder")


class ProcessWatch:
    """Watches for the training of this process.

    Args:
        launch: the `padiff run`.
        is_main, is_fork: as `ProcessRecording` has them.
    """

    def __init__(self, launch: Launch, is_main: bool = False, is_fork: bool = False) -> None:
        global _watch
        self._launch = launch
        self.recording = ProcessRecording(launch, is_main, is_fork)
        self.loop = LoopFinder(self.recording)
        self.hosts = HostWatch(self.recording, self.loop)
        if _watch is None:
            os.register_at_fork(after_in_child=_in_fork)
        _watch = self

    def stop(self, failed: bool) -> None:
        """End what is recorded, and put everything back. May be called twice."""
        if failed:
            self.loop.fail()
        else:
            self.loop.end_script()
        self.hosts.remove()

    def restart_in_fork(self) -> None:
        """Watch for the training of a fork; what the process records that was forked is left to that."""
        self.loop.follow_fork()
        if self.hosts.is_attached:
            self.recording.silence()  # the callback of a trainer that forks its ranks records in these
        elif self.loop.model is None and not self.loop.gone:
            self.recording.restart_in_fork()
        else:
            self.recording.silence()
            self.stop(failed=True)
            ProcessWatch(self._launch, is_fork=True).loop.follow_fork(self.loop)


_watch: ProcessWatch | None = None


def record_process(is_main: bool, is_fork: bool) -> None:
    """Watch for the training of this process: the script that `padiff run` became, or one below."""
    ProcessWatch(Launch.from_environment(), is_main, is_fork)


def rank_of_process(is_fork: bool = False) -> int | None:
    """Return the rank of this process: of its process group, or as its launcher says. None if it has none."""
    for name in ("torch", "paddle"):
        if name in sys.modules:
            with contextlib.suppress(Exception):  # half imported, or a stand-in of that name
                distributed = sys.modules[name].distributed
                if distributed.is_initialized() and distributed.get_world_size() > 1:
                    return int(distributed.get_rank())
    if not _is_child(is_fork):  # which has the variables of the process that started it
        for variable in _RANKS:
            if os.environ.get(variable, "").isdigit():
                return int(os.environ[variable])
    return None


def _is_child(is_fork: bool) -> bool:
    return is_fork or parent_process() is not None


def _end_with_process() -> None:
    atexit.register(end_process)
    if parent_process() is not None:  # it ends without `atexit`
        from multiprocessing.util import Finalize

        Finalize(None, end_process, exitpriority=_PRIORITY)


def end_process() -> None:
    """End what is recorded of this process, and say why nothing is."""
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    failed = error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))
    if _watch is not None:
        with contained("its run is not finished"):
            _watch.stop(failed)
            if not failed:
                _watch.recording.say_of_nothing(_watch.loop.learned and not _watch.loop.stepped)


def _in_fork() -> None:
    if _watch is not None:
        with contained():
            _watch.restart_in_fork()
