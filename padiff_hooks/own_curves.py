"""Curves of a single run that is not compared with another one."""

from __future__ import annotations

from pathlib import Path

from padiff.records import Step
from padiff_hooks.event_files import EventFile, ScalarSink
from padiff_hooks.scalars import own_scalars_of
from padiff_hooks.tags import VERDICT


class OwnCurves:
    """Writer of a run's loss and learning rate, and of its layers' norms with ``tags="all"``.

    Args:
        folder: folder of the TensorBoard run.
        tags: which curves are written (`padiff_hooks.tags.TAGS`).
        host: a logger that gets the loss and the learning rate instead; it stays open.
        resumes: True if points that an earlier process wrote stay valid.
    """

    def __init__(self, folder: Path, tags: str, host: ScalarSink | None, resumes: bool) -> None:
        self._folder, self._tags, self._host, self._resumes = folder, tags, host, resumes
        self._own: EventFile | None = None

    def write(self, step: Step) -> None:
        """Write the points of one step."""
        for tag, value in own_scalars_of(step, self._tags):
            self._sink(tag, step.number).scalar(tag, value, step.number)
        for sink in (self._host, self._own):
            if sink is not None:
                sink.write_out()

    def _sink(self, tag: str, step: int) -> ScalarSink:
        if self._host is not None and tag.startswith(f"{VERDICT}/"):
            return self._host
        if self._own is None:
            self._own = EventFile(self._folder, step if self._resumes else 0)
        return self._own

    def close(self) -> None:
        """Close the event file; the host's logger stays open."""
        event_file, self._own = self._own, None
        if event_file is not None:
            event_file.close()
