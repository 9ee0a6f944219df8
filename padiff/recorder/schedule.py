"""Schedules of the steps to record."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from padiff.errors import UsageError

# Maximum number of steps that a run's description lists one by one.
_FEW = 100


@dataclass(frozen=True)
class Schedule:
    """A schedule of the steps to record.

    Args:
        every: interval between recorded steps; 1 means every step.
        first: first step that may be recorded.
        last: last step that may be recorded; `None` for no end.
        steps: exactly these steps; ``every`` is then ignored.

    Raises:
        UsageError: a number is negative, or ``every`` is below 1.
    """

    every: int = 1
    first: int = 0
    last: int | None = None
    steps: Collection[int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise UsageError(f"every_n_steps has to be a whole number of at least 1, got {self.every!r}")
        if self.first < 0 or (self.last is not None and self.last < self.first):
            raise UsageError(f"a schedule needs 0 <= first <= last, got first={self.first}, last={self.last}")
        if self.steps is not None:
            wrong = [s for s in self.steps if not isinstance(s, int) or s < 0]
            if wrong:
                raise UsageError(f"steps to record are whole numbers of at least 0, got {wrong[0]!r}")
            object.__setattr__(self, "steps", frozenset(self.steps))

    @classmethod
    def from_argument(cls, every_n_steps: int | Schedule) -> Schedule:
        """Return the schedule for an ``every_n_steps`` option: a number, or a schedule."""
        return every_n_steps if isinstance(every_n_steps, Schedule) else cls(every=every_n_steps)

    def due(self, step: int) -> bool:
        """Return True if this step is to be recorded."""
        if step < self.first or (self.last is not None and step > self.last):
            return False
        return step in self.steps if self.steps is not None else (step - self.first) % self.every == 0

    def count(self, begin: int, end: int) -> int:
        """Return the number of steps to record from ``begin`` (included) to ``end`` (excluded)."""
        if self.steps is not None:
            return sum(begin <= step < end and self.due(step) for step in self.steps)
        last = end - 1 if self.last is None else min(self.last, end - 1)
        first = self.first + max(0, -(-(begin - self.first) // self.every)) * self.every
        return max(0, (last - first) // self.every + 1)

    def described(self) -> int | list[int] | dict[str, int | None]:
        """Return the schedule for a run's description: the interval, the list of steps, or the fields that are set."""
        if self.steps is not None:
            few = len(self.steps) <= _FEW
            return sorted(self.steps) if few else {"steps": len(self.steps), "first": min(self.steps)}
        if not self.first and self.last is None:
            return self.every
        return {"every": self.every, "first": self.first, "last": self.last}
