"""Reading of steps in many files: JSON trees with the records, and one file per tensor."""

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
from padiff.dump.json_files import Explained, read_json
from padiff.dump.rank_dedup import elsewhere
from padiff.dump.remote_path import AnyPath
from padiff.dump.stored_schema import MOST
from padiff.dump.tensor_file import TensorFile
from padiff.dump.traces import trace_from_json
from padiff.dump.untrusted import as_int, plain, shape_of
from padiff.errors import RunFolderError
from padiff.records import LOOP, NO_TRACE, STAGES, Record, Sketched, Step, TensorSource, Trace, settings_from_json
from padiff.records.dtypes import known_dtype
from padiff.records.parts import Part
from padiff.records.regions import regions_from_json
from padiff.records.stored_records import StoredRecords
from padiff.sketches.sketch import ROW

_Others = Mapping[str, tuple[AnyPath, str]]


# The JSON entry of a record: file, site (for messages), layer, stage, slot, dtype, shape, call, order, layer type,
# recomputed, part. A plain tuple, which the garbage collector stops tracking.
_Entry: TypeAlias = tuple[str, str, str, str, str, str, tuple[int, ...], int, int, str, bool, Part | None]
_ORDER = 8
# Content of each JSON file as far as it concerns records: path, layer tree, the loop's node.
_Said: TypeAlias = list[tuple[Path, Any, Any]]


class _Structure:
    """Identity of a step structure, as a weak key of caches: it does not keep the records alive.

    Attributes:
        facts: cached results computed from the records (`padiff.records.stored_records.StoredRecords.fact`).
    """

    def __init__(self) -> None:
        self.facts: dict[Any, Any] = {}


class _Known:
    """The parsed entries of a rank's latest step, reused for further steps with the same entries.

    Attributes:
        said: the content of the JSON files from which the entries were parsed.
        entries: the entry of each record, in recorded order.
        structure: identity of the structure; `None` if the run has too many structures.
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
        return [content[1:] for content in self.said] == [content[1:] for content in said]


class FileReader:
    """Reader of one run's unpacked steps; entries of successive steps with the same structure are parsed once."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._structures: Counter[str] = Counter()

    def read(
        self, folder: Path, files: Sequence[str] = (REPORT_FILE, PARAMS_FILE)
    ) -> tuple[Step, list[tuple[Path, Any]]]:
        """Return one rank's step, and path and content of the JSON files that it was read from.

        Raises:
            RunFolderError: none of the files exists, or one of them is damaged.
        """
        contents = [(folder / name, _read_json(folder / name)) for name in files if (folder / name).exists()]
        if not contents:
            raise RunFolderError(f"{folder} holds neither {' nor '.join(files)}: it is no dump folder")
        others = elsewhere(folder)
        parsed = self._called(folder.name, contents)
        records = _records(folder, parsed.entries, others)
        path, content = contents[-1]
        with Explained(path):
            step = Step(
                number=as_int(content["step"]),
                # Tensors that another rank stores for one step may be stored differently for the next.
                records=tuple(records)
                if others or parsed.structure is None
                else StoredRecords(records, parsed.structure),
                rank=as_int(content.get("rank", 0)),
                loss_scale=_scale(content.get("loss_scale", 1.0)),
                micro_batches=as_int(content.get("micro_batches", 1)),
                notes=tuple(str(note) for note in content.get("notes", ())),
                settings=settings_from_json(plain(content.get("settings", {}))),
                trace=next((_trace(folder, others, *each) for each in contents if each[1].get("trace")), NO_TRACE),
                evaluations=evaluations_from_json(content.get("evaluations", ())),
                regions=regions_from_json(content.get("regions", ())),
            )
        return step, contents

    def _called(self, rank: str, contents: Sequence[tuple[Path, Any]]) -> _Known:
        trees = []
        for path, content in contents:
            with Explained(path):
                trees.append((path, content["tree"], content.get("loop", {})))
        parsed = self._known.get(rank)
        with Explained(path):
            if parsed is None or not parsed.is_of(trees):
                self._structures[rank] += 1
                # As many as a run of packed steps has structure files.
                structure = _Structure() if self._structures[rank] <= MOST else None
                parsed = self._known[rank] = _Known(trees, structure)
        return parsed


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
            table_entry = trace["sketches"]
            rows = (as_int(table_entry["rows"]), ROW)
            table.append(
                np.array(TensorFile(folder, str(table_entry["file"]), "float64", rows, "sketches").read(), np.float64)
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
    # Interned, as the same texts occur in every step of a long comparison.
    layer, layer_type = intern(layer), intern(layer_type)
    for entry in said:
        stage, slot, call = intern(str(entry["stage"])), intern(str(entry["slot"])), as_int(entry["call"])
        if stage not in STAGES:
            raise ValueError(f"unknown stage {stage!r}")
        site = intern(f"{layer}/{stage}/{slot}")
        dtype, shape, order = known_dtype(entry["dtype"], site), _shape(tuple(entry["shape"])), as_int(entry["order"])
        file = intern(str(entry["file"]))
        part = Part.of_json(entry["part"], shape) if "part" in entry else None
        recomputed = bool(entry.get("recomputed"))
        yield file, site, layer, stage, slot, dtype, shape, call, order, layer_type, recomputed, part


def _records(folder: Path, entries: Iterable[_Entry], others: _Others) -> Iterator[Record]:
    for file, site, layer, stage, slot, dtype, shape, call, order, layer_type, recomputed, part in entries:
        where, name = others.get(file, (folder, file)) if others else (folder, file)
        source = TensorFile(where, name, dtype, shape, site)
        yield Record(layer, stage, slot, source, dtype, shape, call, order, layer_type, recomputed, part)


_shape = lru_cache(maxsize=4096)(shape_of)
