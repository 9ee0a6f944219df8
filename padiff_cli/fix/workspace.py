"""A copy of the working folder, in which a patched script runs under `padiff run`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from padiff.errors import UsageError
from padiff.system.terminal import printable
from padiff_cli.fix.temporary import temporary_folder
from padiff_cli.run.launch import PADIFF_WITH_PARENT, delete_abandoned_claims

# Most bytes and files of a copy. Chosen: it is made anew for each run.
_MOST_BYTES, _MOST_FILES = 1_000_000_000, 20_000
_LEFT_OUT = frozenset({"__pycache__", "node_modules", "site-packages", "wandb", "mlruns"})
# Seconds that a script has to end by itself after it was asked to.
_PATIENCE = 5.0


@dataclass(frozen=True)
class Trial:
    """A run of the copy.

    Attributes:
        run: the run folder; `None` if nothing was recorded.
        trouble: the error of the script, in words; empty if it had none.
        seconds: how long the run took.
    """

    run: Path | None
    trouble: str
    seconds: float


class Workspace:
    """Copies of a working folder in a temporary folder; the working folder itself is only read.

    Args:
        folder: the working folder.
        command: the command that runs the candidate.
        needed: run folders inside of the working folder that the copy needs.
        own: the run folder of a script that records by itself.
        skipped: names of files and folders that the copy does not need.
    """

    def __init__(
        self, folder: Path, command: Sequence[str], needed: Sequence[Path], own: Path, skipped: Sequence[str] = ()
    ) -> None:
        self.folder = Path(os.path.realpath(folder))
        self._command, self._skipped = list(command), frozenset(skipped)
        self._needed = [Path(os.path.realpath(path)) for path in needed]
        self.files = list(self._files())
        inside = os.path.relpath(os.path.realpath(own), self.folder)
        self._own_run = None if inside.startswith("..") else inside
        self._temporary: Path | None = None
        self._exit = contextlib.ExitStack()
        self._number = 0
        self._check_command()

    def __enter__(self) -> Workspace:
        self._temporary = self._exit.enter_context(temporary_folder())
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def scripts(self) -> list[str]:
        """Return the scripts, modules and configs of the working folder that the command names."""
        paths = []
        for k, word in enumerate(self._command):
            if self._command[k - 1 : k] == ["-m"]:
                path = word.replace(".", os.sep)
                names = [f"{path}.py", os.path.join(path, "__main__.py")]
            else:
                names = [os.path.relpath(os.path.join(self.folder, word.rpartition("=")[2]), self.folder)]
            paths += [name for name in names if name in self.files]
        return paths

    def snapshot(self) -> dict[str, tuple[int, int]]:
        """Return the size and the time of change of each file of the working folder."""
        paths = {}
        for path, entry in _entries(self.folder):
            with contextlib.suppress(OSError):
                state = entry.stat(follow_symlinks=False)
                paths[path] = (state.st_size, state.st_mtime_ns)
        return paths

    def run(self, changed: Mapping[str, bytes], steps: int, every: int, seconds: float) -> Trial:
        """Run the script in a new copy.

        Args:
            changed: new contents of files.
            steps: number of steps after which the training ends.
            every: record every N-th step.
            seconds: the longest time that the run may take.
        """
        work = self._new_copy(changed)
        try:
            return self._record(work, self._command, "run", steps, every, seconds)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def run_both(
        self, changed: Mapping[str, bytes], reference: Sequence[str], steps: int, every: int, seconds: float
    ) -> tuple[Trial, Trial | None]:
        """Run the reference's script in a new copy, and then the candidate's, which finds the new run of the reference
        in the place of the old one; `None` for the second if the first does not run.

        Args:
            changed: new contents of files.
            reference: the command that runs the reference.
            steps: number of steps after which each training ends.
            every: record every N-th step.
            seconds: the longest time that each run may take.
        """
        work = self._new_copy(changed)
        try:
            first = self._record(work, reference, "reference", steps, every, seconds)
            if first.run is None:
                return first, None
            for needed in self._needed:
                inside = os.path.relpath(needed, self.folder)
                if not inside.startswith(".."):
                    shutil.rmtree(work / inside, ignore_errors=True)
                    shutil.copytree(first.run, work / inside)
            return first, self._record(work, self._command, "run", steps, every, seconds)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _new_copy(self, changed: Mapping[str, bytes]) -> Path:
        assert self._temporary is not None
        self._number += 1
        work = self._temporary / str(self._number) / self.folder.name
        work.mkdir(parents=True)
        self._copy(work, changed)
        return work

    def _record(self, work: Path, words: Sequence[str], name: str, steps: int, every: int, seconds: float) -> Trial:
        run, output = work.parent / name, work.parent / f"{name}.txt"
        command = [
            sys.executable,
            "-c",
            PADIFF_WITH_PARENT,
            str(os.getpid()),
            "run",
            "--dir",
            str(run),
            "--every",
            str(every),
        ]
        command += ["--stop-after", str(steps), "--", *(self._moved(word, work) for word in words)]
        environment = {key: self._moved(value, work) for key, value in os.environ.items()}
        began = time.monotonic()
        with open(output, "wb") as out:
            code = _call(command, work, environment, out, seconds)
        spent = time.monotonic() - began
        if self._own_run is not None and (work / self._own_run / "run.json").exists() and not run.exists():
            shutil.move(work / self._own_run, run)  # a script that records by itself
        recorded = (run / "run.json").exists()
        if code is None:
            trouble = f"it was ended after {seconds:.0f} seconds"
        else:
            # A loop that is stopped ends with 1.
            trouble = "" if recorded and code in (0, 1) else _tail(output, code)
        return Trial(run if recorded else None, trouble, spent)

    def discard(self, trial: Trial) -> None:
        """Delete a run folder of a copy."""
        if trial.run is not None:
            shutil.rmtree(trial.run.parent, ignore_errors=True)

    # -- copying ---------------------------------------------------------------------------------------------------

    def _copy(self, work: Path, changed: Mapping[str, bytes]) -> None:
        for name in self.files:
            source, target = self.folder / name, work / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name in changed:
                target.write_bytes(changed[name])
                shutil.copymode(source, target)
            else:
                # The file's content also if it is a link: the script writes to the copy.
                shutil.copy2(source, target)

    def _files(self) -> Iterator[str]:
        """Yield the paths of all files to copy.

        Raises:
            UsageError: they are too many, or too large.
        """
        sizes: dict[str, int] = {}
        count = 0
        for path, entry in _entries(self.folder, self._is_left_out):
            if not stat.S_ISREG(_mode(entry)):
                continue
            size = entry.stat().st_size
            count += 1
            head = path.partition(os.sep)[0]
            sizes[head] = sizes.get(head, 0) + size
            if sum(sizes.values()) > _MOST_BYTES or count > _MOST_FILES:
                largest = max(sizes, key=lambda name: sizes[name])
                raise UsageError(
                    f"the working folder {printable(str(self.folder))} is too large to copy: more than 1 GB or "
                    f"{_MOST_FILES:,} files, most of them in {printable(largest)}. Give --skip with the folders and "
                    "files that the script does not need, or call padiff fix in a smaller folder"
                )
            yield path

    def _is_left_out(self, path: str, entry: os.DirEntry[str]) -> bool:
        if entry.name in self._skipped or path in self._skipped:
            return True
        if not entry.is_dir():
            return False
        if entry.name in _LEFT_OUT or (entry.name.startswith(".") and entry.name not in (".", "..")):
            return True
        if os.path.exists(os.path.join(entry.path, "pyvenv.cfg")):
            return True
        is_run = os.path.exists(os.path.join(entry.path, "run.json"))
        real = Path(os.path.realpath(entry.path))
        return is_run and real not in self._needed

    def _moved(self, text: str, work: Path) -> str:
        """Return a word of the command, or a variable, with the copy's path for the working folder's."""
        head = str(self.folder)
        if (
            text == head
            or f"{head}{os.sep}" in text
            or f"{head}{os.pathsep}" in text
            or text.endswith(f"{os.pathsep}{head}")
        ):
            return text.replace(head, str(work))
        return text

    def _check_command(self) -> None:
        """Check that the command runs a script of the working folder.

        Raises:
            UsageError: it does not.
        """
        for word in self._command:
            if word.endswith(".ipynb"):
                raise UsageError(f"{printable(word)} is a notebook, which fix cannot edit: save its code as a script")
            if word.endswith(".py") and not word.startswith("-"):
                path = os.path.realpath(os.path.join(self.folder, word))
                if not os.path.isfile(path):
                    raise UsageError(
                        f"the working folder {printable(str(self.folder))} has no script {printable(word)}"
                    )
                if os.path.relpath(path, self.folder).startswith(".."):
                    raise UsageError(
                        f"the script {printable(word)} is outside of the working folder "
                        f"{printable(str(self.folder))}, and is not copied. Call padiff fix in the script's folder"
                    )


def _entries(folder: Path, left_out: object = None) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield the files below a folder, in order of their names."""
    waiting = [("", str(folder))]
    seen: set[str] = set()
    while waiting:
        head, path = waiting.pop()
        real = os.path.realpath(path)
        if real in seen:  # a link to a folder above
            continue
        seen.add(real)
        try:
            entries = sorted(os.scandir(path), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            name = os.path.join(head, entry.name)
            if callable(left_out) and left_out(name, entry):
                continue
            if entry.is_dir():
                waiting.append((name, entry.path))
            else:
                yield name, entry


def _mode(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_mode
    except OSError:  # a link to nothing
        return 0


def _call(command: list[str], folder: Path, environment: Mapping[str, str], out: object, seconds: float) -> int | None:
    """Run a command in a group of processes of its own, which ends with it; return its exit code or `None`.

    Args:
        command: the command.
        folder: the working directory.
        environment: the environment.
        out: file for its output.
        seconds: the longest time.
    """
    process = subprocess.Popen(  # noqa: TID251 - ended below, with all processes that it started
        command, cwd=folder, env=dict(environment), stdin=subprocess.DEVNULL, stdout=out, stderr=out,  # type: ignore[call-overload]
        start_new_session=True,
    )  # fmt: skip
    try:
        code: int = process.wait(timeout=max(seconds, 1.0))
        return code
    except subprocess.TimeoutExpired:
        return None
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_PATIENCE)
        delete_abandoned_claims()


def _tail(output: Path, code: int) -> str:
    text = output.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("padiff: recording")]
    return f"{printable(lines[-1])[:300] if lines else 'it wrote nothing'} (exit code {code})"
