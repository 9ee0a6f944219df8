"""What a callback shows of the training that it recorded."""

from __future__ import annotations

from padiff.records import FirstDiff, Report
from padiff.system.guard import Guard
from padiff_hooks.training import TrainingRecorder


class TrainingResults:
    """The properties that all callbacks have. Who derives sets ``_training``."""

    _training: TrainingRecorder

    @property
    def guard(self) -> Guard:
        """Stops errors of the callback's own."""
        return self._training.guard

    @property
    def first_report(self) -> Report | None:
        """The first report with a diff, or `None`; having a diff, it is false in a condition: ask `first_diff`."""
        return self._training.first_report

    @property
    def first_diff(self) -> FirstDiff | None:
        """Where this training and the reference first part, as far as they were compared; `None` if nowhere."""
        return self._training.first_diff

    @property
    def report(self) -> Report | None:
        """What a replay (``replay=RUN``) came to, once the training is over; `None` where there was none."""
        return self._training.report
