"""``padiff.golden``: a golden run stored beside the test, and its comparison with a new run."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from padiff.compare import Policy, compare_runs
from padiff.dump import open_run
from padiff.errors import UsageError
from padiff.recorder import Recorder, record
from padiff.recorder.options import RecordOptions, check_names
from padiff.records import Both
from padiff_pytest import WRITTEN
from padiff_pytest.verdict import ShortErrors, failure_text

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
# Options that the golden run sets itself.
_OWN = ("existing", "dir_path", "rank", "world_size", "on_error")


class Kept:
    """The golden run of a name, for comparing or replacing.

    Attributes:
        folder: its folder: ``golden/<test module>/<name>`` beside the test's file.
        update: True if the golden run is replaced.
    """

    def __init__(
        self,
        name: str,
        item: pytest.Item,
        folders: pytest.TempPathFactory,
        update: bool,
        layer_map: Any = None,
        policy: Policy | None = None,
    ) -> None:
        self.name, self.update = name, update
        self._item, self._folders = item, folders
        self._layer_map, self._policy = layer_map, policy
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(
                f"golden: the name becomes a folder's: letters, digits, '_', '-' and '.', beginning with none of the "
                f"last two; got {name!r}"
            )
        self.folder = item.path.parent / "golden" / item.path.stem / name

    def missing(self) -> str:
        """Return a message if the golden run does not exist and is not being written; else an empty text."""
        if self.update or self.folder.is_dir():
            return ""
        return (
            f"there is no golden run {self.name!r} at {self.folder}. If the training is as it should be, write it "
            f"with `pytest --padiff-update {_quoted(self._item.nodeid)}`, and commit the folder"
        )

    def compare(self, taken: Path) -> str:
        """Return the differences of a run from the golden run; empty if there are none."""
        runs = Both(self.folder, taken).map(open_run)
        report = compare_runs(runs.reference, runs.candidate, layer_map=self._layer_map, policy=self._policy)
        numbers = runs.map(lambda run: list(run.numbers()))
        steps = "" if numbers.reference == numbers.candidate else _steps_text(numbers)
        todo = (
            f"The golden run is {self.folder}, the one of now {taken}. If the change is meant, write the golden "
            f"run anew with `pytest --padiff-update {_quoted(self._item.nodeid)}`"
        )
        if report.passed:
            return f"{steps}\n{todo}" if steps else ""
        return failure_text(report, *filter(None, [steps]), todo)

    def write(self, taken: Path) -> None:
        """Replace the golden run by a run."""
        self._claim()
        old = self.folder.is_dir()
        if old:
            shutil.rmtree(self.folder)
        shutil.copytree(taken, self.folder)
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files) / 1e6
        how = "written anew" if old else "written"
        self.remark(f"{self.folder}: {how}, {size:.2f} MB in {len(files)} files")

    def remark(self, text: str) -> None:
        """Add a line to the end of the session's output."""
        self._item.user_properties.append((WRITTEN, text))

    def _claim(self) -> None:
        """Make sure that no other test, in any process, writes the same golden run: one would overwrite the other.

        Raises:
            UsageError: another test writes the same golden run.
        """
        # Each pytest-xdist worker has its own folder below a shared one.
        base = self._folders.getbasetemp()
        shared = base.parent if hasattr(self._item.config, "workerinput") else base
        mark = shared / f"padiff-golden-{hashlib.sha256(str(self.folder).encode()).hexdigest()[:16]}"
        try:
            with mark.open("x", encoding="utf-8") as file:
                file.write(self._item.nodeid)
        except FileExistsError:
            claimant = mark.read_text(encoding="utf-8")
            if claimant != self._item.nodeid:
                raise UsageError(
                    f"golden: {claimant} and {self._item.nodeid} both write {self.folder}. Give each its own name, or "
                    "update with one of them alone"
                ) from None


class Golden:
    """Context manager that records a training, and compares it with the golden run at the end.

    Entering returns the `padiff.Recorder`: ``rec.log_loss(loss)``, ``rec.try_dump()`` at the end of each step.
    """

    def __init__(self, kept: Kept, folder: Path, model: Any, **options: Any) -> None:
        check_names(options, RecordOptions)
        refused = [option for option in _OWN if option in options]
        if refused:
            raise UsageError(f"golden: {refused[0]}= is none of its options: where and how the run is kept is fixed")
        self._kept, self._taken = kept, folder / kept.name
        # With sketches a golden run has some hundred kilobytes, and rounding can still be judged.
        name = kept.name if kept.update else f"{kept.name}, now"
        self._recorder: Recorder = record(model, self._taken, **{"detail": "sketch", "name": name, **options})

    def __enter__(self) -> Recorder:
        __tracebackhide__ = True
        missing = self._kept.missing()
        if missing:
            raise AssertionError(missing)
        with ShortErrors():
            return self._recorder.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        with ShortErrors():
            self._recorder.__exit__(kind, error, trace)
        if kind is None:
            checked(self._kept, self._taken)
            shutil.rmtree(self._taken.parent, ignore_errors=True)  # a run that matches is not needed any more


def checked(kept: Kept, taken: Path) -> None:
    """Compare a run with the golden run, or replace the golden run by it when updating.

    Raises:
        AssertionError: the run differs.
        UsageError: the run has no step, or another test writes the same golden run.
    """
    __tracebackhide__ = True
    with ShortErrors():
        if not open_run(taken).numbers():
            raise UsageError(
                "golden: no step was recorded. Train the model inside of the `with`, and call rec.try_dump() at "
                "the end of each step"
            )
        if kept.update:
            kept.write(taken)
            return
        text = kept.compare(taken)
    if text:
        raise AssertionError(text)


def _steps_text(numbers: Both[list[int]]) -> str:
    texts = numbers.map(lambda some: f"{len(some)} step{'' if len(some) == 1 else 's'} ({some[0]} to {some[-1]})")
    return f"The golden run has {texts.reference}, the one of now {texts.candidate}."


def _quoted(nodeid: str) -> str:
    return f"'{nodeid}'" if re.search(r"[^\w./:-]", nodeid) else nodeid
