"""Asking recorders for full tensors: a small file in the run folder, written by who compares, read by who records."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

from padiff.dump.files import write_json
from padiff.dump.format import FINISHED_FILE, RUN_FILE
from padiff.dump.remote_path import AnyPath, RemotePath
from padiff.dump.untrusted import read_text

ZOOM_FILE = "zoom.json"
SCHEMA_VERSION = 1

# Larger than any request; what is larger is none.
_LARGEST = 1 << 20
# Seconds between two looks into a store.
_BETWEEN = 2.0


@dataclass(frozen=True)
class Zoom:
    """A request for full tensors of some layers.

    Attributes:
        from_step: the first due step from this one on is meant.
        layers: paths of the layers.
    """

    from_step: int
    layers: frozenset[str]


def ask(run: AnyPath, zoom: Zoom) -> bool:
    """Leave a request in a run folder; returns whether a recorder may still see it.

    A folder that has ended, or that can't be written to, is left alone.
    """
    if (run / FINISHED_FILE).exists() or not (run / RUN_FILE).exists():
        return False
    content = {"schema_version": SCHEMA_VERSION, "from_step": zoom.from_step, "layers": sorted(zoom.layers)}
    try:
        write_json(run / ZOOM_FILE, content)
    except OSError:
        return False
    return True


class Requests:
    """The requests that reach one recorder. Looking for one costs a file status in each due step.

    Args:
        run: the run folder.
    """

    def __init__(self, run: AnyPath) -> None:
        self._path = run / ZOOM_FILE
        # What lies there already was meant for a recorder before this one.
        self._seen = self._stamp()
        self._waiting: Zoom | None = None

    def due(self, step: int) -> frozenset[str]:
        """Layers whose full tensors are asked for in this due step; each request is answered once."""
        self._look()
        if self._waiting is None or step < self._waiting.from_step:
            return frozenset()
        zoom, self._waiting = self._waiting, None
        return zoom.layers

    def _look(self) -> None:
        stamp = self._stamp()
        if stamp != self._seen:
            self._seen = stamp
            self._waiting = self._read()

    def _stamp(self) -> Any:
        try:
            if isinstance(self._path, RemotePath):
                return self._path.store.version(self._path.key)
            status = os.stat(self._path, follow_symlinks=False)
        except OSError:
            return (0, 0)
        return status.st_mtime_ns, status.st_ino

    def _read(self) -> Zoom | None:
        """The request; what can't be read is none: the training must not suffer from it."""
        try:
            content = json.loads(read_text(self._path, _LARGEST).decode("utf-8"))
            if content["schema_version"] != SCHEMA_VERSION:
                return None
            return Zoom(int(content["from_step"]), frozenset(str(path) for path in content["layers"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None


class StoreRequests(Requests):
    """The requests that reach a recorder through a store, which is asked on a thread: the training does not wait."""

    def __init__(self, run: RemotePath) -> None:
        super().__init__(run)
        self._asking: threading.Thread | None = None
        self._asked = time.monotonic()

    def _look(self) -> None:
        asking = self._asking is not None and self._asking.is_alive()
        if asking or time.monotonic() - self._asked < _BETWEEN:
            return
        self._asked = time.monotonic()
        self._asking = threading.Thread(target=super()._look, name="padiff-zoom", daemon=True)
        self._asking.start()


def requests_of(run: AnyPath) -> Requests:
    """The requests that reach the recorder of a run."""
    return StoreRequests(run) if isinstance(run, RemotePath) else Requests(run)
