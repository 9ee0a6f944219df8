"""TensorBoard runs that padiff writes: folders of event files, which may also hold other programs' event files."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

#: Suffix of the names of padiff's event files.
SUFFIX = ".padiff"


class ScalarSink(Protocol):
    """Writer of the scalars, texts and pictures of one TensorBoard run."""

    def scalar(self, tag: str, value: float, step: int) -> None: ...

    def add_text(self, tag: str, text: str, step: int) -> None: ...

    def image(self, tag: str, pixels: np.ndarray, step: int) -> None: ...

    def write_out(self) -> None: ...

    def close(self) -> None: ...


class EventFile:
    """A TensorBoard run that padiff writes: a folder with an event file.

    Points that a killed process left at or after `first_step` are dropped. They are removed from the files, and an
    event tells a running TensorBoard to purge the points that it has read already.

    Args:
        folder: the run's folder.
        first_step: the first step that will be written.
        unnamed: True if event files without padiff's suffix were written by an older padiff.
    """

    def __init__(self, folder: Path, first_step: int, unnamed: bool = False) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        files = [file for file in folder.glob("events.out.tfevents.*") if unnamed or file.name.endswith(SUFFIX)]
        if files:
            for file in files:
                _drop_from(file, first_step)
            _wait_for_next_second(files)
        self._writer = EventFileWriter(str(folder), max_queue_size=1000, flush_secs=1, filename_suffix=SUFFIX)
        # Also written into the first file: TensorBoard purges only from the second START event of a run on.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=first_step, session_log=start))

    def scalar(self, tag: str, value: float, step: int) -> None:
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb

        self._add(scalar_pb(tag, value), step)

    def add_text(self, tag: str, text: str, step: int) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._add(text_pb(tag, text), step)

    def image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        from PIL import Image
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.image.metadata import create_summary_metadata
        from tensorboard.util.tensor_util import make_tensor_proto

        content = io.BytesIO()
        Image.fromarray(pixels).save(content, "PNG", optimize=True)
        size = [str(length).encode() for length in (pixels.shape[1], pixels.shape[0])]
        about = create_summary_metadata(display_name=None, description="")
        summary = Summary()
        summary.value.add(tag=tag, metadata=about, tensor=make_tensor_proto([*size, content.getvalue()]))
        self._add(summary, step)

    def _add(self, summary: Any, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def write_out(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _drop_from(path: Path, first_step: int) -> None:
    """Remove the points at or after a step from an event file."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    events = [Event.FromString(data) for data in RawEventFileLoader(str(path)).Load()]
    remaining = [event for event in events if not event.HasField("summary") or event.step < first_step]
    if len(remaining) == len(events):
        return
    aside = path.with_name(f".{path.name}.partial")
    with open(aside, "wb") as file:
        writer = RecordWriter(file)
        for event in remaining:
            writer.write(event.SerializeToString())
    os.replace(aside, path)


def _wait_for_next_second(files: list[Path]) -> None:
    """Wait until a new event file gets a later time in its name than the files that exist.

    TensorBoard reads event files in the order of their names, which begin with the second of creation.
    """
    seconds = [file.name.split(".")[3] for file in files]
    newest = max((int(second) for second in seconds if second.isdecimal()), default=0)
    while newest == int(time.time()):
        time.sleep(0.02)
