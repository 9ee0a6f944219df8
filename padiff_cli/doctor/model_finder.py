"""Recording of a script without a recorder of its own, for ``padiff doctor``.

The finder only watches the first step; recording begins with the second step.
"""

from __future__ import annotations

from pathlib import Path

from padiff.recorder import Recorder, record
from padiff.recorder.factory import Plan, StopScript
from padiff_cli.finding import ModelFinder

#: Name of the file into which the finder writes the reason when it gives up.
REFUSED = "refused.txt"


class DoctorFinder(ModelFinder):
    """Watcher that records the first model of the script, unless the script opens a recorder of its own."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        super().__init__()

    def _begin(self) -> None:
        recorder = record(self.model, "found", optimizer=self.optimizers, start_step=1)
        recorder.open()
        recorder.attach()
        self._recorder = recorder

    def _end_step(self) -> None:
        if self._recorder is not None:
            self._recorder.try_dump()

    def _end(self) -> None:
        if self._recorder is not None:
            self._recorder.close()

    def _refuse(self, why: str) -> None:
        self.stop()
        (Path(Plan.from_environment().folder) / REFUSED).write_text(why, encoding="utf-8")
        raise StopScript
