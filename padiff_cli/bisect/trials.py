"""Trials: the user's command, run under ``padiff run`` until it has recorded enough steps."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from padiff.dump.format import aside
from padiff.errors import UsageError
from padiff_cli.bisect.search import TrialError
from padiff_cli.run.launch import PADIFF_WITH_PARENT, delete_abandoned_claims

# Seconds between two looks at a run folder.
_POLL = 0.05
# Seconds that a process has to end after it was asked to.
_GRACE = 5.0
# Lines of a failed command's output that a message has.
_LAST_LINES = 3
# Seconds that every trial has, and multiple of the longest one so far: one that takes longer hangs.
_LEAST_SECONDS, _LONGEST = 60.0, 5.0
# Share of a trial's time that its steps may take to be called little. Chosen.
_LITTLE = 0.25
# Options of `padiff run` by environment variables, which a trial sets itself or which would end it.
_UNSET = ("DIR", "REFERENCE", "ON_DIFF", "EXISTING", "LOGDIR", "NAME", "START_STEP", "PROCESSES")
_STEP = re.compile(r"\d{8,}")
_VERSION = 1


@dataclass(frozen=True)
class Setup:
    """Settings of how a state is run.

    Attributes:
        command: the command.
        folder: the folder that it is started in.
        python: the interpreter that has padiff.
        environment: the environment variables.
        check: raises a `TrialError` if a recorded run is not one of the state; `None`: nothing is checked.
    """

    command: Sequence[str]
    folder: Path
    python: str
    environment: Mapping[str, str]
    check: Callable[[Path], None] | None = None


@dataclass(frozen=True)
class Trial:
    """A recorded trial.

    Attributes:
        run: the run folder.
        asked: number of steps that it was to record.
        ended: the command ended by itself.
        seconds: how long it took.
    """

    run: Path
    asked: int
    ended: bool
    seconds: float

    @property
    def is_mostly_start(self) -> bool:
        """Return True if the steps take little of the time: to end earlier would save next to nothing."""
        try:
            times = [path.stat().st_mtime for path in (self.run / "steps").iterdir()]
        except OSError:
            return False
        return len(times) > 1 and max(times) - min(times) < _LITTLE * self.seconds


class Trials:
    """Runs the command of each state once, and keeps what it recorded in a folder, from which a bisection goes on.

    Args:
        folder: the folder of the bisection.
        prepare: returns the setup of a state.
        timeout: seconds after which a trial is ended; `None`: five times the longest one before, at least a minute.

    Attributes:
        count: number of trials that were started now.
        seconds: how long each one took.
    """

    def __init__(self, folder: Path, prepare: Callable[[Any], Setup], timeout: float | None = None) -> None:
        self._folder, self._prepare, self._timeout = folder, prepare, timeout
        self.count = 0
        self.seconds: list[float] = []
        self._failures: dict[str, str] = {}
        self._known: dict[str, Trial] = {}

    def record(self, name: str, state: Any, steps: int, enough: int | None = None) -> Trial:
        """Return the trial of a state with at least so many steps; run it if there is none.

        Args:
            name: the name of the trial's folder.
            state: the state.
            steps: number of steps to record.
            enough: number of steps with which a command that fails afterwards counts; `None`: all.

        Raises:
            TrialError: the command failed, hung or recorded nothing.
        """
        if name in self._failures:
            raise TrialError(self._failures[name])
        trial = self._known.get(name) or self._read(name)
        if trial is None or (trial.asked < steps and not trial.ended):
            try:
                trial = self._run(name, state, steps, steps if enough is None else enough)
            except TrialError as error:
                self._failures[name] = str(error)
                raise
        self._known[name] = trial
        return trial

    def has(self, name: str, steps: int) -> bool:
        """Return True if a trial needs not be run again."""
        trial = self._known.get(name) or self._read(name)
        return name in self._failures or (trial is not None and (trial.asked >= steps or trial.ended))

    def _read(self, name: str) -> Trial | None:
        """Return a trial of an earlier bisection; `None` if its file is not there or is no trial."""
        folder = self._folder / name
        try:
            values = json.loads((folder / "trial.json").read_text(encoding="utf-8"))
            asked, ended, seconds = values["steps"], values["ended"], values["seconds"]
        except (OSError, ValueError, TypeError, KeyError):
            return None
        if type(asked) is not int or type(ended) is not bool or type(seconds) not in (int, float):
            return None
        if values.get("schema_version") != _VERSION or recorded(folder / "run") < 0:
            return None
        return Trial(folder / "run", asked, ended, float(seconds))

    def _run(self, name: str, state: Any, steps: int, enough: int) -> Trial:
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.count += 1
        began = time.monotonic()
        setup = self._prepare(state)
        run, output = folder / "run", folder / "output.txt"
        ended = self._execute(setup, name, run, output, steps, enough)
        if setup.check is not None:
            setup.check(run)
        seconds = time.monotonic() - began
        self.seconds.append(seconds)
        trial = Trial(run, steps, ended, seconds)
        values = {"schema_version": _VERSION, "steps": steps, "ended": ended, "seconds": round(seconds, 2)}
        with aside(folder / "trial.json") as partial:
            partial.write_text(json.dumps(values), encoding="utf-8")
        return trial

    def _execute(self, setup: Setup, name: str, run: Path, output: Path, steps: int, enough: int) -> bool:
        """Run the command until it has recorded so many steps. Return True if it ended by itself.

        Raises:
            TrialError: it failed, hung or recorded nothing.
        """
        environment = {name: x for name, x in setup.environment.items() if name not in _unset()}
        command = [
            setup.python,
            "-c",
            PADIFF_WITH_PARENT,
            str(os.getpid()),
            "run",
            "--dir",
            str(run.resolve()),
            "--name",
            name,
            "--",
            *setup.command,
        ]
        timeout = self._timeout
        if timeout is None and self.seconds:
            timeout = max(_LEAST_SECONDS, _LONGEST * max(self.seconds))
        began = time.monotonic()
        with open(output, "wb") as out:
            # A session of its own: it is ended with all that it started, also by Ctrl-C.
            process = subprocess.Popen(  # noqa: TID251 - polled for its steps, and ended below
                command,
                cwd=setup.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                while (code := process.poll()) is None and recorded(run) < steps - 1:
                    if timeout is not None and time.monotonic() - began > timeout:
                        raise TrialError(f"it was ended after {timeout:.0f} s; give more with --timeout")
                    time.sleep(_POLL)
            finally:
                _end(process)
                delete_abandoned_claims()
        last = recorded(run)
        if code is not None and code != 0 and last < enough - 1:
            raise TrialError(f"the command failed with exit code {code}{_last_lines(output)}")
        if last < 0:
            raise TrialError(f"the command recorded no step{_last_lines(output)}")
        return code is not None


def recorded(run: Path) -> int:
    """Return the number of the last step that a run has whole; -1 if there is none."""
    try:
        return max((int(name) for name in os.listdir(run / "steps") if _STEP.fullmatch(name)), default=-1)
    except OSError:
        return -1


def short(value: object) -> str:
    """Return a short name for a value, the same in each process."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:10]


def open_folder(folder: Path, request: Mapping[str, Any]) -> None:
    """Make the folder of a bisection, or go on in it if it holds the same one.

    Raises:
        UsageError: it holds something else.
    """
    path = folder / "bisection.json"
    text = json.dumps(request, indent=1, sort_keys=True)
    if path.is_file():
        if path.read_text(encoding="utf-8", errors="replace") != text:
            raise UsageError(
                f"{folder} holds another bisection: of other states, another command or another script. "
                "Give another --dir, or remove it"
            )
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} is no folder of a bisection: give another --dir")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    with aside(path) as partial:
        partial.write_text(text, encoding="utf-8")


def digest_of_files(words: Sequence[str]) -> dict[str, str]:
    """Return the digests of the files that a command names: a changed script is another bisection."""
    digests = {}
    for word in words:
        with contextlib.suppress(OSError, ValueError):
            if Path(word).suffix in (".py", ".sh", ".json", ".yaml", ".yml", ".toml") and Path(word).is_file():
                digests[word] = hashlib.sha256(Path(word).read_bytes()).hexdigest()[:16]
    return digests


def _unset() -> set[str]:
    return {f"PADIFF_RUN_{name}" for name in _UNSET}


def _last_lines(output: Path) -> str:
    lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f" ({' / '.join(line.strip() for line in lines[-_LAST_LINES:])}); see {output}" if lines else ""


def _end(process: subprocess.Popen[bytes]) -> None:  # noqa: TID251 - the type
    """End a process and all that it started."""
    for number, seconds in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, _GRACE)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
