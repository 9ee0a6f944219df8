"""What several ranks hold alike is stored once: the lowest of them has the tensor, the others a digest of it.

Nothing is said between processes for it: a collective of ours could meet the training's own in another order, and both
would wait for ever. Ranks meet in the folder of the step instead, which comes into being when all have written:

* A rank that writes leaves the digests of its tensors beside them (of activations where layers are split: elsewhere no
  two ranks have the same), and does not write what a rank before
  it has written already.
* Ranks write at about the same time, so that is seldom all. The last to come is alone with what all have written: by
  the digests, it takes away what a rank before has, too. What differs in a bit stays, whole.

``same.json`` of a rank says where its tensors are: ``{"tensors": {"weights/0.npy": [0, "weights/0.npy", "5e1f.."]}}``
names the rank that has it, what it is called there, and the digest of its values.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from padiff.dump.files import digest, write_json
from padiff.dump.json_files import Explained, read_json
from padiff.dump.lock import is_recording
from padiff.dump.names import rank_names
from padiff.dump.remote_path import AnyPath, RemotePath
from padiff.dump.safetensors import ArrayFile, write_safetensors
from padiff.dump.untrusted import check_inside, whole
from padiff.dump.whole import names_in

SAME_FILE = "same.json"
#: A rank's step in one file.
PACKED_FILE = "step.safetensors"
#: What a rank's step needs to be done again, in one file.
REPLAY_FILE = "pack.safetensors"
#: There until all ranks have written.
_DIGESTS_FILE = "digests.json"
SCHEMA_VERSION = 1
#: Bytes of a digest: by chance, two of 10 ** 12 different tensors share one once in 10 ** 14 runs.
_DIGEST = 16

#: Of a tensor that another rank has: that rank, and what the tensor is called there.
Elsewhere = tuple[int, str]


class HeldOnce:
    """One rank's tensors of one step, while they are written.

    Args:
        run: the run folder.
        step: the folder in which ranks put their parts of the step.
        rank: whose part it is.
        form: the file that all tensors are in (of a step, or of a pack); empty: each has one. In another form they have
            other names.
    """

    def __init__(self, run: Path, step: Path, rank: int, form: str) -> None:
        self._form = form
        self._own: dict[str, str] = {}
        self._same: dict[str, tuple[int, str, str]] = {}
        self._others: dict[str, Elsewhere] = {}
        for other in _ranks(step):
            # A part may be left of a process that was killed, whose rank has not begun anew yet, and will replace it.
            if other < rank and is_recording(run, other):
                for name, known in _digests(step / f"rank_{other}", form).items():
                    self._others.setdefault(known, (other, name))

    def elsewhere(self, name: str, array: np.ndarray) -> bool:
        """Whether a rank before this one has written a tensor of the same values, so that it need not be written."""
        known = digest(array, _DIGEST)
        found = self._others.get(known)
        if found is None:
            self._own[name] = known
            return False
        self._same[name] = (*found, known)
        return True

    def write(self, folder: AnyPath) -> None:
        """Say what was written, and what is elsewhere."""
        assert isinstance(folder, Path)
        write_json(folder / _DIGESTS_FILE, {"form": self._form, "tensors": self._own})
        if self._same:
            _write_same(folder, self._same)


def fold(step: Path) -> None:
    """Take away what a rank has that a rank before it has, too.

    Args:
        step: a step that all ranks have written, and nobody else looks at.
    """
    known: dict[tuple[str, str], Elsewhere] = {}
    try:
        for rank in _ranks(step):
            folder = step / f"rank_{rank}"
            form = _form(folder)
            # Who was found to have it may have lost it just now to a rank before.
            referred = {name: d for name, (_, _, d) in _read_same(folder).items()}
            same = {name: (*known[form, d], d) for name, d in referred.items() if (form, d) in known}
            again: list[str] = []
            for name, own in _digests(folder, form).items():
                found = known.setdefault((form, own), (rank, name))
                if found != (rank, name) and found[0] != rank:
                    same[name] = (*found, own)
                    again.append(name)
            if same or referred:
                _write_same(folder, same)  # before they go: whatever happens then, nothing is missing
            _take_away(folder, form, again)
        for rank in _ranks(step):
            (step / f"rank_{rank}" / _DIGESTS_FILE).unlink(missing_ok=True)
    except OSError:  # it is stored twice, and whole
        return


def elsewhere(folder: AnyPath) -> Mapping[str, tuple[AnyPath, str]]:
    """Of a rank's tensors, those that another rank of the step has: that rank's folder, and what it calls them.

    Raises:
        RunFolderError: the file is damaged, or names a place outside of the step.
    """
    if folder.name == "rank_0":
        return {}  # the lowest rank has all of its tensors
    if isinstance(folder, RemotePath):
        if not (folder / SAME_FILE).exists():  # of a run that was recorded into a folder and copied
            return {}
    elif not os.path.lexists(os.path.join(folder, SAME_FILE)):
        return {}
    path = folder / SAME_FILE
    content = read_json(path, folder, SCHEMA_VERSION, f"{folder} is no part of a run folder")
    with Explained(path):
        found = {str(name): (whole(rank), str(other)) for name, (rank, other, _) in content["tensors"].items()}
    folders = {rank: _folder_of(folder, rank) for rank in {rank for rank, _ in found.values()}}
    return {name: (folders[rank], other) for name, (rank, other) in found.items()}


def _folder_of(folder: AnyPath, rank: int) -> AnyPath:
    """Where another rank's part of the same step is.

    Raises:
        RunFolderError: it lies outside of the step.
    """
    other = folder.parent / f"rank_{rank}"
    if isinstance(other, RemotePath) or os.path.lexists(other):
        check_inside(other, folder.parent)
    return other


def _take_away(folder: Path, form: str, names: list[str]) -> None:
    if not form:
        for name in names:
            (folder / name).unlink(missing_ok=True)
    elif names:
        path = folder / form
        file = ArrayFile(path, deque())
        about, places = file.header()
        kept = {name: file.array(place) for name, place in places.items() if name not in set(names)}
        smaller = path.with_name(f".{path.name}.smaller")
        write_safetensors(smaller, kept, about)
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


def _write_same(folder: Path, same: Mapping[str, tuple[int, str, str]]) -> None:
    write_json(folder / SAME_FILE, {"schema_version": SCHEMA_VERSION, "tensors": same})


def _content(path: Path) -> dict[str, Any]:
    """What a rank of this recording wrote; nothing where it is not there (any more)."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
