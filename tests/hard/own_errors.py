"""Plants an error in each function of padiff's that runs while a training is recorded, one at a time."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

import padiff

_ROOT = Path(padiff.__file__).parent.parent
# The boundary itself, what stands in the place of the user's functions, and the look-up of padiff's public names.
_BOUNDARY = (
    "padiff/system/guard.py:",
    "padiff/system/lazily.py:",
    "padiff/recorder/session.py:Recorder.__exit__",
    "padiff/frameworks/paddle/optimizers.py:_then",
    "padiff/frameworks/paddle/optimizers.py:_measured",
    "padiff/frameworks/paddle/optimizers.py:hook.<locals>.passed_on",
    "padiff/frameworks/torch/calls.py:_called",
    "padiff_hooks/trainers.py:TrainerEvents._watch.<locals>.guarded",
    "padiff_hooks/trainers.py:TrainerEvents._recorded.<locals>.training_step",
    "padiff_cli/finding.py:ModelFinder._on_top.<locals>.",
)


#: Called with the number of each step as it begins; returns True where the training is to end.
Begin = Callable[[int], bool]


class PlantedError(Exception):
    """The planted error: no error of Python's, so that nothing that expects one of those takes it for it."""


def name_of(code: CodeType) -> str:
    path = Path(code.co_filename)
    return f"{path.relative_to(_ROOT)}:{code.co_qualname}" if path.is_relative_to(_ROOT) else ""


class Planting:
    """Finds the functions that padiff's own functions call in a training, and has one of them fail.

    What the user or the framework calls, hooks and wrappers, is the boundary itself.

    Args:
        folders: of the functions to fail, relative to the project.
    """

    def __init__(self, *folders: str) -> None:
        self._prefix = tuple(f"{_ROOT}/{folder}{'' if folder.endswith('.py') else '/'}" for folder in folders)
        self._padiff = tuple(
            f"{_ROOT}/{folder}/" for folder in ("padiff", "padiff_hooks", "padiff_cli", "integrations")
        )

    def functions(self, train: Callable[[], Any]) -> list[CodeType]:
        """Train; return the functions that padiff called, in the order of their first calls."""
        return list(self.calls(train))

    def calls(self, train: Callable[[], Any]) -> dict[CodeType, int]:
        """Train; return how many times padiff called each function, in the order of their first calls."""
        return self._seen(train)[0]

    def enough(self, train: Callable[[], Any]) -> dict[CodeType, int]:
        """Like `calls`, without the functions that an error of a function that they call passes through: those that
        have neither a `try` nor a `with`. Their own error would be the same one.
        """
        codes, callers = self._seen(train)
        return {code: count for code, count in codes.items() if code not in callers or code.co_exceptiontable}

    def _seen(self, train: Callable[[], Any]) -> tuple[dict[CodeType, int], set[CodeType]]:
        codes: dict[CodeType, int] = {}
        callers: set[CodeType] = set()

        def look(frame: FrameType, event: str, _: Any) -> None:
            if event == "call" and self._counts(frame):
                codes[frame.f_code] = codes.get(frame.f_code, 0) + 1
                callers.add(frame.f_back.f_code)

        _profiled(look, train)
        return {code: count for code, count in codes.items() if not name_of(code).startswith(_BOUNDARY)}, callers

    def fail(self, code: CodeType, train: Callable[[], Any], call: int = 1) -> Any:
        """Train, with a call of a function that fails; return what the training gave."""
        calls = 0

        def look(frame: FrameType, event: str, _: Any) -> None:
            nonlocal calls
            if event == "call" and frame.f_code is code and self._counts(frame):
                calls += 1
                if calls == call:
                    raise PlantedError(name_of(code))

        return _profiled(look, train)

    def sweep(self, codes: Sequence[CodeType], train: Callable[[Begin], Any], expected: Callable[[Begin], Any]) -> str:
        """Train again and again, until each function failed: the first one that is called, and of the rest the first
        one in the step after next, and so on. Return what is wrong, a line for each training.

        A step with an error is left out, and two in a row end a recording: so a whole step lies between two errors.

        Args:
            train: trains with padiff; begins each step with a call of its argument, and ends where that returns True.
            expected: the same without padiff.
        """
        waiting, wrong = set(codes), []
        failed, step, earliest = [""], 0, 0

        def look(frame: FrameType, event: str, _: Any) -> None:
            nonlocal earliest
            if event == "call" and frame.f_code in waiting and step >= earliest and self._counts(frame):
                waiting.discard(frame.f_code)
                failed.append(name_of(frame.f_code))
                earliest = step + 2
                raise PlantedError(failed[-1])

        def begin(number: int) -> bool:
            nonlocal step
            step = number
            sys.setprofile(look if step >= earliest else None)  # an error that it raises takes it off
            return step > max(earliest, 2)

        while failed:
            failed.clear()
            step = earliest = 0
            try:
                with contextlib.redirect_stderr(io.StringIO()):
                    after = _profiled(look, lambda: train(begin))
            except Exception as error:
                wrong.append(f"{failed}: {type(error).__name__} ended the training")
                continue
            if not _same(after, expected(lambda number, steps=step: number == steps)):
                wrong.append(f"{failed}: changed the training, or left hooks on")
        # But for what is remembered from the training before.
        assert len(waiting) <= len(codes) / 20 + 2, list(map(name_of, waiting))
        return "\n".join(wrong)

    def _counts(self, frame: FrameType) -> bool:
        caller = frame.f_back
        return (
            frame.f_code.co_filename.startswith(self._prefix)
            and caller is not None
            and caller.f_code.co_filename.startswith(self._padiff)
        )


def _profiled(look: Callable[..., None], train: Callable[[], Any]) -> Any:
    threading.setprofile(look)  # the writer's thread
    sys.setprofile(look)
    try:
        return train()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def _same(after: Any, expected: Any) -> bool:
    """Compare losses, weights and the number of hooks."""
    return after[0] == expected[0] and np.array_equal(after[1], expected[1]) and not after[2]


def share(codes: Sequence[CodeType], number: int, of: int) -> list[CodeType]:
    """Return every `of`-th function, beginning with a number."""
    return list(codes[number::of])
