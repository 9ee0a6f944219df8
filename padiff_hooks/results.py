"""Result properties that all callbacks share."""

from __future__ import annotations

from padiff.records import FirstDiff, Report
from padiff.system.guard import Guard
from padiff_hooks.training import TrainingRecorder


class TrainingResults:
    """Properties of all callbacks; a derived class sets ``_training``."""

    _training: TrainingRecorder

    @property
    def guard(self) -> Guard:
        """Return the guard that keeps errors of the callback from the training."""
        return self._training.guard

    @property
    def first_report(self) -> Report | None:
        """Return the first report with a diff, or `None`.

        A report with a diff is false in a condition: test `first_diff` instead.
        """
        return self._training.first_report

    @property
    def first_diff(self) -> FirstDiff | None:
        """Return the first difference between this training and the reference; `None` if none was found so far."""
        return self._training.first_diff

    @property
    def report(self) -> Report | None:
        """Return the report of a replay (``replay=RUN``) once the training is over; `None` without a replay."""
        return self._training.report
