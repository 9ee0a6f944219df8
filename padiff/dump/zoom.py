"""Requests for full tensors: a small file in the run folder, written by a comparison and read by the recorder."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from typing import Any

from padiff.dump.format import FINISHED_FILE, RUN_FILE
from padiff.dump.medium import medium_of, read_text, write_json
from padiff.dump.remote_path import AnyPath

ZOOM_FILE = "zoom.json"
SCHEMA_VERSION = 1

# Largest size of a request's file in bytes; a larger file is ignored.
_LARGEST = 1 << 20
# Seconds between two checks of a store.
_BETWEEN = 2.0


@dataclass(frozen=True)
class Zoom:
    """A request for full tensors of some layers.

    Attributes:
        from_step: the request is for the first recorded step from this number on.
        layers: paths of the layers.
    """

    from_step: int
    layers: frozenset[str]


def ask(run: AnyPath, zoom: Zoom) -> bool:
    """Write a request into a run folder; return True if a recorder may still read it.

    Nothing is written if the run has finished, or the folder is not writable.
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
    """The requests for one recorder. Checking for a new one costs one file status per recorded step.

    Args:
        run: the run folder.
    """

    def __init__(self, run: AnyPath) -> None:
        self._path = run / ZOOM_FILE
        # An existing request was meant for an earlier recorder.
        self._seen = self._stamp()
        self._waiting: Zoom | None = None

    def due(self, step: int) -> frozenset[str]:
        """Return the layers whose full tensors are requested for this step; each request is returned once."""
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
            return medium_of(self._path).stamp(self._path)
        except OSError:
            return None

    def _read(self) -> Zoom | None:
        """Return the request, or `None` if it can't be read: errors must not reach the training."""
        try:
            content = json.loads(read_text(self._path, _LARGEST).decode("utf-8"))
            if content["schema_version"] != SCHEMA_VERSION:
                return None
            return Zoom(int(content["from_step"]), frozenset(str(path) for path in content["layers"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None


class StoreRequests(Requests):
    """The requests for one recorder in a store; they are read on a thread, so that the training does not wait."""

    def __init__(self, run: AnyPath) -> None:
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
    """Return the requests for the recorder of a run."""
    return StoreRequests(run) if medium_of(run).is_slow else Requests(run)
