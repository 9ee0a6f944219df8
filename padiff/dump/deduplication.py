"""Storing once what does not change from step to step: buffers that are tables, and parameters that are frozen."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np

from padiff.dump.files import aside, digest, write_npy
from padiff.dump.format import to_storable
from padiff.dump.remote_path import AnyPath, RemotePath
from padiff.records import Record, RunInfo

#: Where packed steps find what they share; each file is named after its content.
SHARED = "shared"

# Smaller ones are not worth a file of their own.
_SMALLEST = 1 << 12


class Deduplication:
    """Knows what buffers and frozen parameters were when they were last written.

    Trainable parameters are not looked at: they change, and finding that out costs as much as writing them.

    Args:
        info: the run, whose layers tell which tensors these are.
    """

    def __init__(self, info: RunInfo) -> None:
        # By layer and slot: what the content was called, and the file that has it.
        self._known: dict[tuple[str, str], tuple[str, Path | None]] = {}
        # In a store, where to ask whether a file is there takes long: those that this process put.
        self._put: set[str] = set()
        self.follow(info)

    def follow(self, info: RunInfo) -> None:
        """The layers are these from now on."""
        self._fixed = {
            (layer.path, p.slot)
            for layer in info.layers
            for p in layer.parameters
            if p.role == "buffer" or not p.trainable
        }

    def link(self, record: Record, array: np.ndarray, path: Path, final: Path) -> bool:
        """Give a file that holds the same already a second name, instead of writing it again; whether that was done.

        Args:
            path: the new name, for now.
            final: what the new name will be when the step is whole.
        """
        _, file = self._same_as_before(record, array, final)
        if file is None:
            return False
        try:
            os.link(file, path)
        except OSError:  # a file system without links, or the step was taken away
            return False
        return True

    def share(self, record: Record, array: np.ndarray, run: AnyPath) -> str:
        """The name of the file below `SHARED` that holds the same, written if need be; empty if it has changed."""
        name, _ = self._same_as_before(record, array)
        if not name:
            return ""
        path = run / SHARED / f"{name}.npy"
        if isinstance(path, RemotePath):
            if name not in self._put:
                content = io.BytesIO()
                np.save(content, to_storable(array), allow_pickle=False)
                path.write_bytes(content.getvalue())
                self._put.add(name)
            return path.name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            with aside(path) as partial:
                write_npy(partial, array)
        return path.name

    def _same_as_before(self, record: Record, array: np.ndarray, file: Path | None = None) -> tuple[str, Path | None]:
        """The content's name and the file that has it, where it is what it was when last asked.

        From now on, ``file`` has it.
        """
        key = (record.layer, record.slot)
        if record.stage != "weight" or key not in self._fixed or array.nbytes < _SMALLEST:
            return "", None
        name = digest(array)
        before, self._known[key] = self._known.get(key), (name, file)
        return before if before is not None and before[0] == name else ("", None)
