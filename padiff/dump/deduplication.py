"""Deduplication between steps: constant buffers and frozen parameters are stored once."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from padiff.dump.files import digest
from padiff.dump.medium import medium_of
from padiff.dump.remote_path import AnyPath
from padiff.records import Record, RunInfo

#: Folder of the tensors that packed steps share; each file is named after a digest of its content.
SHARED = "shared"

# Smaller tensors, in bytes, are not worth a file of their own.
_SMALLEST = 1 << 12


class Deduplication:
    """Digests of the buffers and frozen parameters that were written last, to store unchanged ones once.

    Trainable parameters are always written: they change, and a digest costs as much as writing them.

    Args:
        info: the run; its layers name the buffers and frozen parameters.
    """

    def __init__(self, info: RunInfo) -> None:
        # (layer, slot) -> digest of the latest content, and the file that holds it.
        self._known: dict[tuple[str, str], tuple[str, Path | None]] = {}
        # Shared files that exist: checking this is slow in a store.
        self._shared: set[str] = set()
        self.follow(info)

    def follow(self, info: RunInfo) -> None:
        """Replace the layers."""
        self._fixed = {
            (layer.path, p.slot)
            for layer in info.layers
            for p in layer.parameters
            if p.role == "buffer" or not p.trainable
        }

    def link(self, record: Record, array: np.ndarray, path: Path, final: Path) -> bool:
        """Create a hard link to an earlier file of the same content; return False if the array has to be written.

        Args:
            path: path of the link now.
            final: path of the link once the step is complete.
        """
        _, file = self._same_as_before(record, array, final)
        if file is None:
            return False
        try:
            os.link(file, path)
        except OSError:  # the file system has no links, or the earlier step was deleted
            return False
        return True

    def share(self, record: Record, array: np.ndarray, run: AnyPath) -> str:
        """Return the name of an unchanged tensor's shared file, written if missing; empty if the tensor changed."""
        name, _ = self._same_as_before(record, array)
        if not name:
            return ""
        path = run / SHARED / f"{name}.npy"
        if name not in self._shared:
            medium_of(path).write_tensor(path, array)
            self._shared.add(name)
        return path.name

    def _same_as_before(self, record: Record, array: np.ndarray, file: Path | None = None) -> tuple[str, Path | None]:
        """Return the digest of an unchanged tensor and the earlier file that holds it, else an empty text and `None`.

        ``file`` is remembered as the file that holds the tensor from now on.
        """
        key = (record.layer, record.slot)
        if record.stage != "weight" or key not in self._fixed or array.nbytes < _SMALLEST:
            return "", None
        name = digest(array)
        before, self._known[key] = self._known.get(key), (name, file)
        return before if before is not None and before[0] == name else ("", None)
