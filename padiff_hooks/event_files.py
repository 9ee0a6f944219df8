"""TensorBoard runs of our own: folders with event files, which others may lie beside."""

from __future__ import annotations

import io
import os
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

#: What the names of our event files end with.
SUFFIX = ".padiff"


class ScalarSink(Protocol):
    """Where scalars, texts and pictures of one TensorBoard run go."""

    def scalar(self, tag: str, value: float, step: int) -> None: ...

    def text(self, tag: str, text: str, step: int) -> None: ...

    def image(self, tag: str, pixels: np.ndarray, step: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class EventFile:
    """A TensorBoard run of our own: a folder with an event file.

    Args:
        folder: the run's folder.
        first_step: the first step that will be written; points that an earlier process left at or after it
            (it was killed in the middle of a step) are dropped: from the files for readers to come, and by an
            event that makes a TensorBoard purge them that has read them already.
        unnamed: whether event files whose names don't say whose they are were written by an older padiff.
    """

    def __init__(self, folder: Path, first_step: int, unnamed: bool = False) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        own = [file for file in folder.glob("events.out.tfevents.*") if unnamed or file.name.endswith(SUFFIX)]
        if own:
            for file in own:
                _drop_from(file, first_step)
            _wait_for_next_second(own)
        self._writer = EventFileWriter(str(folder), max_queue_size=1000, flush_secs=1, filename_suffix=SUFFIX)
        # In the first file, too: TensorBoard purges at the second such event that it reads of a run.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=first_step, session_log=start))

    def scalar(self, tag: str, value: float, step: int) -> None:
        from tensorboard.plugins.scalar.summary_v2 import scalar_pb

        self._add(scalar_pb(tag, value), step)

    def text(self, tag: str, text: str, step: int) -> None:
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

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _drop_from(path: Path, first_step: int) -> None:
    """Rewrite an event file that holds points at or after a step, without them."""
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.record_writer import RecordWriter

    events = [Event.FromString(data) for data in RawEventFileLoader(str(path)).Load()]
    kept = [event for event in events if not event.HasField("summary") or event.step < first_step]
    if len(kept) == len(events):
        return
    aside = path.with_name(f".{path.name}.partial")
    with open(aside, "wb") as file:
        writer = RecordWriter(file)
        for event in kept:
            writer.write(event.SerializeToString())
    os.replace(aside, path)


def _wait_for_next_second(files: list[Path]) -> None:
    """TensorBoard reads event files in the order of their names, which begin with the second they were made in."""
    made = [file.name.split(".")[3] for file in files]
    newest = max((int(second) for second in made if second.isdecimal()), default=0)
    while newest == int(time.time()):
        time.sleep(0.02)
