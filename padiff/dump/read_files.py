"""Reading steps whose tensors lie in files of their own, beside JSON trees that say what they are called."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from sys import intern
from typing import Any, TypeAlias

import numpy as np

from padiff.dump.format import PARAMS_FILE, REPORT_FILE, SCHEMA_VERSION, evaluations_from_json, nodes_from_json
from padiff.dump.held_once import elsewhere
from padiff.dump.json_files import Explained, read_json
from padiff.dump.remote_path import AnyPath
from padiff.dump.structures import MOST
from padiff.dump.tensor_file import TensorFile
from padiff.dump.traces import trace_from_json
from padiff.dump.untrusted import plain, shape_of, whole
from padiff.errors import RunFolderError
from padiff.records import LOOP, NO_TRACE, STAGES, Record, Sketched, Step, TensorSource, Trace, settings_from_json
from padiff.records.dtypes import known_dtype
from padiff.records.parts import Part
from padiff.records.structured import Structured
from padiff.sketches.sketch import ROW

_Others = Mapping[str, tuple[AnyPath, str]]


# What the JSON says of a record: its file, what messages call it, and what `Record` has: layer, stage, slot, dtype,
# shape, call, order, layer type, whether it is recomputed, and which part it is. A plain tuple, as in `structures`.
_Entry: TypeAlias = tuple[str, str, str, str, str, str, tuple[int, ...], int, int, str, bool, Part | None]
_ORDER = 8
# What each JSON file says of records: the tree, and what is the loop's.
_Said: TypeAlias = list[tuple[Path, Any, Any]]


class _Structure:
    """Stands for what the records of steps are called where pairs are remembered, without keeping it.

    Attributes:
        facts: what was found out from the records (`padiff.records.structured.Structured.fact`).
    """

    def __init__(self) -> None:
        self.facts: dict[Any, Any] = {}


class _Known:
    """What the records of a rank's latest step are called, and of all steps before it that were alike.

    Attributes:
        said: by the JSON files, of their records.
        entries: one for each record, in their order.
        structure: stands for it; `None` where these are too many.
    """

    __slots__ = ("entries", "said", "structure")

    def __init__(self, said: _Said, structure: _Structure | None) -> None:
        self.said, self.structure = said, structure
        entries: list[_Entry] = []
        for path, tree, loop in said:
            with Explained(path):
                for node in nodes_from_json(tree):
                    entries += _entries(str(node["path"]), str(node["type"]), node.get("records", ()))
                entries += _entries(LOOP, "", loop.get("records", ()))
        self.entries = sorted(entries, key=itemgetter(_ORDER))

    def is_of(self, said: _Said) -> bool:
        return [one[1:] for one in self.said] == [one[1:] for one in said]


class FileReader:
    """Reads steps of one run. What their records are called is worked out once for those that are alike."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._structures: Counter[str] = Counter()

    def read(
        self, folder: Path, files: Sequence[str] = (REPORT_FILE, PARAMS_FILE)
    ) -> tuple[Step, list[tuple[Path, Any]]]:
        """One rank's records, without the tree that they hang in; and the JSON files that they come from.

        Raises:
            RunFolderError: none of the files is there, or one of them is damaged.
        """
        contents = [(folder / name, _read_json(folder / name)) for name in files if (folder / name).exists()]
        if not contents:
            raise RunFolderError(f"{folder} holds neither {' nor '.join(files)}: it is no dump folder")
        others = elsewhere(folder)
        known = self._called(folder.name, contents)
        records = _records(folder, known.entries, others)
        path, content = contents[-1]
        with Explained(path):
            step = Step(
                number=whole(content["step"]),
                # What another rank has in one step it need not have in the next.
                records=tuple(records) if others or known.structure is None else Structured(records, known.structure),
                rank=whole(content.get("rank", 0)),
                loss_scale=_scale(content.get("loss_scale", 1.0)),
                micro_batches=whole(content.get("micro_batches", 1)),
                notes=tuple(str(note) for note in content.get("notes", ())),
                settings=settings_from_json(plain(content.get("settings", {}))),
                trace=next((_trace(folder, others, *each) for each in contents if each[1].get("trace")), NO_TRACE),
                evaluations=evaluations_from_json(content.get("evaluations", ())),
            )
        return step, contents

    def _called(self, rank: str, contents: Sequence[tuple[Path, Any]]) -> _Known:
        said = []
        for path, content in contents:
            with Explained(path):
                said.append((path, content["tree"], content.get("loop", {})))
        known = self._known.get(rank)
        with Explained(path):
            if known is None or not known.is_of(said):
                self._structures[rank] += 1
                # No more of them than packed steps have files that say so.
                structure = _Structure() if self._structures[rank] <= MOST else None
                known = self._known[rank] = _Known(said, structure)
        return known


def _read_json(path: Path) -> Any:
    return read_json(path, path.parent, SCHEMA_VERSION, f"{path.parent} is no run folder, or a part of one")


def _trace(folder: Path, others: _Others, path: Path, content: Mapping[str, Any]) -> Trace:
    trace = content["trace"]
    table: list[np.ndarray] = []

    def source(kept_as: str, place: Any, dtype: str, shape: tuple[int, ...]) -> TensorSource:
        if kept_as == "file":
            where, file = others.get(str(place), (folder, str(place)))
            return TensorFile(where, file, dtype, shape, "trace")
        if kept_as not in ("sketch", "turned") or place < 0:
            raise ValueError(f"kept as {kept_as!r} at {place!r}")
        if not table:
            kept = trace["sketches"]
            rows = (whole(kept["rows"]), ROW)
            table.append(
                np.array(TensorFile(folder, str(kept["file"]), "float64", rows, "sketches").read(), np.float64)
            )
        size = math.prod(shape) * (2 if dtype.startswith("complex") else 1)
        return Sketched(table[0][place], size, kept_as == "turned")

    return trace_from_json(trace, source, path)


def _scale(value: Any) -> float:
    scale = float(value)
    if not 0 < scale < math.inf:
        raise ValueError(f"a loss scale of {scale}")
    return scale


def _entries(layer: str, layer_type: str, said: Iterable[dict[str, Any]]) -> Iterator[_Entry]:
    # The same words in every step: a long comparison keeps one of each.
    layer, layer_type = intern(layer), intern(layer_type)
    for one in said:
        stage, slot, call = intern(str(one["stage"])), intern(str(one["slot"])), whole(one["call"])
        if stage not in STAGES:
            raise ValueError(f"unknown stage {stage!r}")
        site = intern(f"{layer}/{stage}/{slot}")
        dtype, shape, order = known_dtype(one["dtype"], site), _shape(tuple(one["shape"])), whole(one["order"])
        file = intern(str(one["file"]))
        part = Part.of_json(one["part"], shape) if "part" in one else None
        recomputed = bool(one.get("recomputed"))
        yield file, site, layer, stage, slot, dtype, shape, call, order, layer_type, recomputed, part


def _records(folder: Path, entries: Iterable[_Entry], others: _Others) -> Iterator[Record]:
    for file, site, layer, stage, slot, dtype, shape, call, order, layer_type, recomputed, part in entries:
        where, name = others.get(file, (folder, file)) if others else (folder, file)
        source = TensorFile(where, name, dtype, shape, site)
        yield Record(layer, stage, slot, source, dtype, shape, call, order, layer_type, recomputed, part)


_shape = lru_cache(maxsize=4096)(shape_of)
