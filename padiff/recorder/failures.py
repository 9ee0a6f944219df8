"""Handling of padiff's internal errors and of Ctrl-C: each costs a part of the recording, and never the training."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from padiff.system.guard import Failure

# Optional parts of a recording, and the modules that only these parts use.
_PARTS = {
    "replay packs": ("recorder.packing", "recorder.batches", "frameworks.dropouts", "dropouts"),
    "function calls": ("recorder.functions", "hearing"),
    "losses": ("recorder.losses", "frameworks.losses", "losses"),
}
# Number of consecutive failing steps after which recording stops: a lasting cause fails each step.
_IN_A_ROW = 2
# Largest number of failures that the run's description names.
_NAMED = 8


class Failures:
    """Counter of the failures of one recording, which decides what recording continues with.

    Attributes:
        lines: a sentence for each failure, for the run's description.
        parts: names of the parts that are switched off.
        stopped: True once nothing more is recorded.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.parts: set[str] = set()
        self.stopped = False
        self._step: int | None = None
        self._row = 0

    def add(self, step: int | None, failure: Failure) -> str:
        """Count a failure and return the sentence to print, or "" if a failure of this step was reported before.

        Several failures of a step count as one.

        Args:
            step: number of the step; None before the recording begins.
            failure: the error.
        """
        if self.stopped or (step is not None and step == self._step):
            return ""
        self._step = step
        part = next((part for part, modules in _PARTS.items() if _passes(failure, modules)), None)
        if step is None:
            self.stopped, loss = True, "Nothing is recorded"
        elif part is not None and part not in self.parts:
            self.parts.add(part)
            loss = f"Step {step} is not recorded. Later steps are recorded without {part}"
        else:
            self._row += 1
            self.stopped = self._row >= _IN_A_ROW
            loss = f"Step {step} is not recorded{', and recording stops' if self.stopped else ''}"
        line = f"{loss}: an error of padiff's own, {failure.text}"
        if len(self.lines) < _NAMED:
            self.lines.append(line)
        return f"{line}. The training goes on"

    def recorded(self) -> None:
        """Note that a step was recorded without failure."""
        self._row = 0


def _passes(failure: Failure, modules: tuple[str, ...]) -> bool:
    return any(name.endswith(f".{module}") for name in failure.modules for module in modules)


class Interrupts:
    """Handler that defers a Ctrl-C in backward, if the framework would turn the exception into another error.

    Args:
        raised_as_they_are: True if the framework passes exceptions of hooks on unchanged
            (`padiff.frameworks.hooking.Hooking`); nothing is deferred then.
    """

    def __init__(self, raised_as_they_are: bool) -> None:
        self._at_once, self._kept = raised_as_they_are, False

    def keep(self) -> None:
        """Defer a `KeyboardInterrupt`, or raise it again at once. Call this in the ``except`` block."""
        if self._at_once:
            raise
        self._kept = True

    def raise_kept(self) -> None:
        """Raise the deferred `KeyboardInterrupt`, if any."""
        if self._kept:
            self._kept = False
            raise KeyboardInterrupt


_Method = TypeVar("_Method", bound=Callable[..., Any])


def aside(method: _Method) -> _Method:
    """Decorate a method to run outside of the user's modes (`Hooking.aside`).

    The object of the method must have an attribute ``_framework``.
    """

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._framework.hooks.aside():
            return method(self, *args, **kwargs)

    return cast(_Method, call)
