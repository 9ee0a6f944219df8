"""Storing once what does not change from step to step: buffers that are tables, and parameters that are frozen."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from padiff.records import Record, RunInfo

#: Where packed steps find what they share; each file is named after its content.
SHARED = "shared"

# Smaller ones are not worth a file of their own.
_SMALLEST = 1 << 12


class Unchanged:
    """Knows what buffers and frozen parameters were when they were last written.

    Trainable parameters are not looked at: they change, and finding that out costs as much as writing them.

    Args:
        info: the run, whose layers tell which tensors these are.
    """

    def __init__(self, info: RunInfo) -> None:
        self._fixed = {
            (layer.path, p.slot)
            for layer in info.layers
            for p in layer.parameters
            if p.role == "buffer" or not p.trainable
        }
        self._known: dict[tuple[str, str], tuple[str, Path | None]] = {}

    def same_as_before(self, record: Record, array: np.ndarray) -> tuple[str, Path | None] | None:
        """The content's name, and the file that it was linked as, where it is what it was when last asked."""
        key = (record.layer, record.slot)
        if record.stage != "weight" or key not in self._fixed or array.nbytes < _SMALLEST:
            return None
        content = hashlib.blake2b(np.ascontiguousarray(array).view(np.uint8).data, digest_size=8)
        content.update(repr((record.dtype, array.shape)).encode())
        name = content.hexdigest()
        known = self._known.get(key)
        if known is not None and known[0] == name:
            return known
        self._known[key] = (name, None)
        return None

    def link(self, record: Record, array: np.ndarray, path: Path, final: Path) -> bool:
        """Give a file that holds the same already a second name, instead of writing it again; whether that was done.

        Args:
            path: the new name, for now.
            final: what the new name will be when the step is whole.
        """
        known = self.same_as_before(record, array)
        linked = False
        if known is not None and known[1] is not None:
            try:
                os.link(known[1], path)
                linked = True
            except OSError:  # a file system without links, or the step was taken away
                linked = False
        key = (record.layer, record.slot)
        if key in self._known:
            self._known[key] = (self._known[key][0], final)
        return linked

    def share(self, record: Record, array: np.ndarray, run: Path, write: Callable[[Path, np.ndarray], None]) -> str:
        """The name of the file below `SHARED` that holds the same, written if need be; empty if it has changed."""
        known = self.same_as_before(record, array)
        if known is None:
            return ""
        path = run / SHARED / f"{known[0]}.npy"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            aside = path.with_name(f".{path.name}.{os.getpid()}.partial")
            write(aside, array)
            os.replace(aside, path)
        return path.name
