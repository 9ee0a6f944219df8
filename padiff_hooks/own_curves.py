"""A run's own curves, where there is no other run to compare it with."""

from __future__ import annotations

from pathlib import Path

from padiff.records import Step
from padiff_hooks.event_files import EventFile, ScalarSink
from padiff_hooks.scalars import own_scalars_of
from padiff_hooks.tags import VERDICT


class OwnCurves:
    """Writes a run's loss and learning rate, and its layers' norms if all tags are asked for.

    Args:
        folder: where they go.
        tags: which curves (`padiff_hooks.tags.TAGS`).
        host: a logger that gets loss and learning rate instead; it stays open.
        resumes: whether points that an earlier process wrote go on being true.
    """

    def __init__(self, folder: Path, tags: str, host: ScalarSink | None, resumes: bool) -> None:
        self._folder, self._tags, self._host, self._resumes = folder, tags, host, resumes
        self._own: EventFile | None = None

    def write(self, step: Step) -> None:
        """Write one step's points."""
        for tag, value in own_scalars_of(step, self._tags):
            self._sink(tag, step.number).scalar(tag, value, step.number)
        for sink in (self._host, self._own):
            if sink is not None:
                sink.flush()

    def _sink(self, tag: str, step: int) -> ScalarSink:
        if self._host is not None and tag.startswith(f"{VERDICT}/"):
            return self._host
        if self._own is None:
            self._own = EventFile(self._folder, step if self._resumes else 0)
        return self._own

    def close(self) -> None:
        """Close what was opened here."""
        own, self._own = self._own, None
        if own is not None:
            own.close()
