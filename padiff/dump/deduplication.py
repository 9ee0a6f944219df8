"""Deduplication between steps and between ranks: a tensor that is there already is stored once."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from padiff.dump.format import digest, rank_names
from padiff.dump.lock import is_recording
from padiff.dump.medium import Explained, check_inside, medium_of, names_in, read_json, write_json
from padiff.dump.safetensors import ArrayFile, write_safetensors
from padiff.dump.store import AnyPath
from padiff.dump.untrusted import as_int
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


SAME_FILE = "same.json"
#: A rank's step in one file.
PACKED_FILE = "step.safetensors"
#: The tensors to replay a rank's step, in one file.
REPLAY_FILE = "pack.safetensors"
#: Digests of a rank's tensors; deleted once all ranks have written.
_DIGESTS_FILE = "digests.json"
SCHEMA_VERSION = 1
#: Bytes of a digest: by chance, two of 10 ** 12 different tensors share one once in 10 ** 14 runs.
_DIGEST = 16

#: A tensor that another rank stores: that rank, and the tensor's name there.
Elsewhere = tuple[int, str]


class RankDedup:
    """Deduplication of one rank's tensors of one step while they are written.

    Args:
        run: the run folder.
        step: the folder with the parts of all ranks.
        rank: the rank that writes.
        form: name of the file that holds all tensors (of a step or pack); empty: each tensor has its own file. Tensor
            names differ between forms.
    """

    def __init__(self, run: Path, step: Path, rank: int, form: str) -> None:
        self._form = form
        self._own: dict[str, str] = {}
        self._same: dict[str, tuple[int, str, str]] = {}
        self._others: dict[str, Elsewhere] = {}
        for lower in _ranks(step):
            # The part of a rank that does not record now may be from a killed process, and be replaced later.
            if lower < rank and is_recording(run, lower):
                for name, value_digest in _digests(step / f"rank_{lower}", form).items():
                    self._others.setdefault(value_digest, (lower, name))

    def elsewhere(self, name: str, array: np.ndarray) -> bool:
        """Return True if a lower rank has already written a tensor of the same values; note this tensor's digest."""
        value_digest = digest(array, _DIGEST)
        duplicate = self._others.get(value_digest)
        if duplicate is None:
            self._own[name] = value_digest
            return False
        self._same[name] = (*duplicate, value_digest)
        return True

    def write(self, folder: AnyPath) -> None:
        """Write the digests of this rank's tensors, and the list of those that other ranks store."""
        write_json(folder / _DIGESTS_FILE, {"form": self._form, "tensors": self._own})
        if self._same:
            _write_same(folder, self._same)


def fold(step: Path) -> None:
    """Delete tensors of a rank that a lower rank stores too, and list them in ``same.json``.

    Args:
        step: folder of a step that all ranks have written, and no other process reads yet.
    """
    owners: dict[tuple[str, str], Elsewhere] = {}
    try:
        for rank in _ranks(step):
            folder = step / f"rank_{rank}"
            form = _form(folder)
            # The rank named in ``same.json`` may itself have just lost the tensor to a lower rank.
            referred = {name: d for name, (_, _, d) in _read_same(folder).items()}
            same = {name: (*owners[form, d], d) for name, d in referred.items() if (form, d) in owners}
            duplicates: list[str] = []
            for name, value_digest in _digests(folder, form).items():
                first = owners.setdefault((form, value_digest), (rank, name))
                if first != (rank, name) and first[0] != rank:
                    same[name] = (*first, value_digest)
                    duplicates.append(name)
            if same or referred:
                _write_same(folder, same)  # before the deletion: after a crash in between, no tensor is missing
            _take_away(folder, form, duplicates)
        for rank in _ranks(step):
            (step / f"rank_{rank}" / _DIGESTS_FILE).unlink(missing_ok=True)
    except OSError:  # tensors stay stored twice, and complete
        return


def elsewhere(folder: AnyPath) -> Mapping[str, tuple[AnyPath, str]]:
    """Return the tensors of a rank that another rank stores: name -> that rank's folder, and the name there.

    Raises:
        RunFolderError: the file is damaged, or names a place outside of the step.
    """
    if folder.name == "rank_0":
        return {}  # the lowest rank stores all of its tensors
    path = folder / SAME_FILE
    if not medium_of(path).is_there(path):
        return {}
    content = read_json(path, folder, SCHEMA_VERSION, f"{folder} is no part of a run folder")
    with Explained(path):
        entries = {str(name): (as_int(rank), str(tensor)) for name, (rank, tensor, _) in content["tensors"].items()}
    folders = {rank: _folder_of(folder, rank) for rank in {rank for rank, _ in entries.values()}}
    return {name: (folders[rank], tensor) for name, (rank, tensor) in entries.items()}


def _folder_of(folder: AnyPath, rank: int) -> AnyPath:
    """Return the folder of another rank's part of the same step.

    Raises:
        RunFolderError: the folder lies outside of the step.
    """
    rank_folder = folder.parent / f"rank_{rank}"
    check_inside(rank_folder, folder.parent)
    return rank_folder


def _take_away(folder: Path, form: str, names: list[str]) -> None:
    if not form:
        for name in names:
            (folder / name).unlink(missing_ok=True)
    elif names:
        path = folder / form
        file = ArrayFile(path, deque())
        about, places = file.header()
        arrays = {name: file.array(place) for name, place in places.items() if name not in set(names)}
        smaller = path.with_name(f".{path.name}.smaller")
        write_safetensors(smaller, arrays, about)
        os.replace(smaller, path)


def _ranks(step: Path) -> list[int]:
    return [int(name[5:]) for name in rank_names(names_in(step))]


def _form(folder: Path) -> str:
    form = str(_content(folder / _DIGESTS_FILE).get("form", ""))
    return form if form in ("", PACKED_FILE, REPLAY_FILE) else ""


def _digests(folder: Path, form: str) -> dict[str, str]:
    content = _content(folder / _DIGESTS_FILE)
    return dict(content["tensors"]) if content.get("form") == form else {}


def _read_same(folder: Path) -> dict[str, tuple[int, str, str]]:
    return {
        name: (entry[0], entry[1], entry[2]) for name, entry in _content(folder / SAME_FILE).get("tensors", {}).items()
    }


def _write_same(folder: AnyPath, same: Mapping[str, tuple[int, str, str]]) -> None:
    write_json(folder / SAME_FILE, {"schema_version": SCHEMA_VERSION, "tensors": same})


def _content(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file that a rank of this recording wrote; empty if the file does not exist."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
