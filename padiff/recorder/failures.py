"""The cost of errors of padiff's own: a part of the recording, a step, or the rest of the run."""

from __future__ import annotations

from padiff.system.guard import Failure

# Parts of a recording that it can go on without, and the modules that only they use.
_PARTS = {
    "replay packs": ("recorder.packing", "recorder.batches", "frameworks.dropouts", "dropouts"),
    "function calls": ("recorder.functions", "hearing"),
    "losses": ("recorder.losses", "frameworks.losses", "losses"),
}
# Steps in a row that may fail; then recording stops. A cause that stays fails each step.
_IN_A_ROW = 2
# Failures that the run names.
_NAMED = 8


class Failures:
    """Counts failures of one recording and decides what goes on.

    Attributes:
        lines: a sentence for each failure, for the run.
        parts: parts that are off.
        stopped: True once nothing more is recorded.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.parts: set[str] = set()
        self.stopped = False
        self._step: int | None = None
        self._row = 0

    def add(self, step: int | None, failure: Failure) -> str:
        """Count a failure in a step; None: before recording began. Return the sentence to print, empty if said before.

        Several failures of a step count as one.
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
        """Count a step that was recorded."""
        self._row = 0


def _passes(failure: Failure, modules: tuple[str, ...]) -> bool:
    return any(name.endswith(f".{module}") for name in failure.modules for module in modules)
