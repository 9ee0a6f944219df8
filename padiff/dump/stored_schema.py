"""Structures of packed steps: names, dtypes and shapes of the records, and the storage of each.

Most steps have the same structure, so it is stored beside the steps in ``structures/<name>.json``, named after a digest
of its content. Once a run has `MOST` such files (batches of ever new shapes), a further step holds its structure in its
own file, compressed: then deleted steps leave no files behind, and no step refers to a file that another process may
delete.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import numpy as np

from padiff.dump.headers import DTYPES, NAMES, Place
from padiff.dump.medium import check_inside, read_text, write_text
from padiff.dump.remote_path import AnyPath
from padiff.dump.safetensors import ArrayFile
from padiff.dump.traces import StoredTrace, trace_key, trace_to_json, without_trace
from padiff.dump.untrusted import LARGEST_JSON, shape_of
from padiff.errors import RunFolderError
from padiff.records import STAGES, Record, Step, Trace
from padiff.records.dtypes import known_dtype
from padiff.records.parts import Part
from padiff.records.step_schema import numbers_of
from padiff.records.stored_records import Name, Names, Sketches

STRUCTURES = "structures"
SCHEMA_VERSION = 1
#: Schema version if a record is a part of a tensor: its entry has one more field, and sketches are of the full tensor,
#: with zeros for the elements of other ranks.
WITH_PARTS = 2

_FIELDS = ["layer", "stage", "slot", "call", "type", "dtype", "shape", "recomputed", "kept_as", "place"]

#: Limit on the structure files of a run of one process. Each further process adds one, as each has its own structure if
#: parameters are sharded. (Processes that write at the same time may exceed the limit by a few.)
MOST = 16

# Structures that a reader caches: enough for a step of this many processes, at 2 MB each for a model of 70 billion
# parameters. Parsing one again takes ten times as long as the rest of reading a step.
_REMEMBERED = 256

# Length of a structure's name: the first hex digits of the digest of its content.
_NAME = 16

#: Name of the tensor that holds a step's structure if the step's own file stores it.
OWN = "structure"


class StoredSchemaWriter:
    """Writer of the structures of one run's steps.

    Args:
        run: the run folder.
        compression: codec of the steps' tensors; empty: uncompressed.
        processes: number of processes that record the run.
    """

    def __init__(self, run: AnyPath, compression: str, processes: int = 1) -> None:
        self._run, self._compression = run, compression
        self._most = MOST + processes - 1
        self._known: dict[Any, tuple[str, np.ndarray | None]] = {}

    def schema_of(
        self, step: Step, places: list[tuple[str, Any]], traced: list[tuple[str, Any]]
    ) -> tuple[str, np.ndarray | None]:
        """Return the name of the step's structure, whose file is written if it does not exist.

        Once the run has its maximum of structure files, return an empty name, and the compressed structure as an array
        that the step's own file has to hold.

        Args:
            places: kind and position of storage of each record.
            traced: kind and position of storage of each tensor of the trace.
        """
        entries = [
            (r.layer, r.stage, r.slot, r.call, r.layer_type, r.dtype, r.shape, r.recomputed, *place, *_part(r))
            for r, place in zip(step.records, places)
        ]
        key = (tuple(entries), *trace_key(step.trace, traced))
        description = self._known.get(key)
        if description is None:
            if len(self._known) >= 64:  # batches of ever new shapes
                self._known.clear()
            description = self._known[key] = self._described(entries, step.trace, traced)
        return description

    def _described(
        self, entries: list[Any], trace: Trace, traced: list[tuple[str, Any]]
    ) -> tuple[str, np.ndarray | None]:
        content = {
            "schema_version": WITH_PARTS if any(len(entry) > len(_FIELDS) for entry in entries) else SCHEMA_VERSION,
            "compression": self._compression,
            "fields": _FIELDS,
            "records": [_as_json(entry) for entry in entries],
            **({"trace": trace_to_json(trace, traced)} if trace.calls else {}),
        }
        text = json.dumps(content)
        name = hashlib.sha256(text.encode()).hexdigest()[:_NAME]
        folder = self._run / STRUCTURES
        path = folder / f"{name}.json"
        if not path.exists():
            folder.mkdir(exist_ok=True)
            if sum(1 for _ in folder.glob("[!.]*.json")) >= self._most:
                return "", np.frombuffer(zlib.compress(text.encode()), np.uint8)
            write_text(path, text)  # ranks write the same content, so a second write changes nothing
        return name, None


#: Storage of a record: kind (`SKETCHES`, `TENSOR` or ``shared``) and position.
Kept: TypeAlias = tuple[str, Any]

#: Kinds of storage of a sketch: of the tensor, or of the transposed matrix.
SKETCHES = ("sketch", "turned")
#: Kind of storage of a full tensor in the step's file.
TENSOR = "tensor"


@dataclass(eq=False)
class StoredSchema:
    """Names, dtypes, shapes and storage of a step's records. Steps with the same structure share one object.

    Attributes:
        compression: codec of the tensors; empty: uncompressed.
        records: the JSON entry of each record; emptied once the entries are checked.
        trace: the step's trace; `None` if it has none.
    """

    compression: str
    records: list[Any]
    trace: StoredTrace | None

    @cached_property
    def sketches(self) -> Sketches:
        """Return the row, size, orientation and shape of each record's sketch; row -1 for records without one.

        Raises:
            ValueError: a row is negative.
        """
        rows = [where if kept_as in SKETCHES else None for kept_as, where in self.kept]
        if any(row is not None and row < 0 for row in rows):
            raise ValueError("a sketch in a row before the first")
        return Sketches(
            np.array([-1 if row is None else row for row in rows], np.intp),
            np.array([numbers for *_, numbers, _ in self.names.entries], np.int64),
            np.array([kept_as == "turned" for kept_as, _ in self.kept], np.bool_),
            [shape for *_, shape, _, _, _ in self.names.entries],
        )

    @cached_property
    def rows(self) -> int:
        """Return the smallest number of rows that the step's table of sketches must have."""
        return int(self.sketches.rows.max(initial=-1)) + 1

    @cached_property
    def tensors(self) -> dict[int, tuple[str, np.dtype[Any], tuple[int, ...]]]:
        """Return name, dtype and shape of the records stored as tensors of the step's file, by record index.

        Complex tensors are left out, as the file stores them as real numbers.
        """
        tensors = {}
        for place, ((kept_as, where), name) in enumerate(zip(self.kept, self.names.entries)):
            _, _, _, _, _, dtype, shape, *_ = name
            if kept_as == TENSOR and where[1] == NAMES.get(dtype):
                tensors[place] = where[0], DTYPES[where[1]], shape
        return tensors

    @cached_property
    def others(self) -> list[int]:
        """Return the indices of the records that are neither sketches nor in `tensors`."""
        tensors = self.tensors
        return [place for place in np.flatnonzero(self.sketches.rows < 0).tolist() if place not in tensors]

    @property
    def names(self) -> Names:
        """Return the names, dtypes and shapes of the records; they are checked once.

        Raises:
            ValueError, TypeError, AttributeError, OverflowError: an entry is damaged.
        """
        return self._checked[0]

    @property
    def kept(self) -> list[Kept]:
        """Return kind and position of storage of each record.

        Raises:
            ValueError, TypeError, AttributeError, OverflowError: an entry is damaged.
        """
        return self._checked[1]

    @cached_property
    def _checked(self) -> tuple[Names, list[Kept]]:
        entries = [_name(entry) for entry in self.records]
        storage = [(entry[_KEPT_AS], _plain(entry[_KEPT_AS + 1])) for entry in self.records]
        self.records = []
        return _names_of(entries), storage


_KEPT_AS = _FIELDS.index("kept_as")


def _plain(where: Any) -> Any:
    """Return a position with lists turned into tuples, which the garbage collector stops tracking."""
    return tuple(where) if isinstance(where, list) else where


def _name(entry: Any) -> Name:
    layer, stage, slot, call, layer_type, dtype, shape, recomputed, _, _, *more = entry
    if stage not in STAGES:
        raise ValueError(f"unknown stage {stage!r}")
    shape = shape_of(shape)
    part = Part.of_json(more[0], shape) if more and more[0] is not None else None
    return (
        str(layer),
        stage,
        str(slot),
        int(call),
        str(layer_type),
        known_dtype(dtype, f"{layer}/{stage}/{slot}"),
        shape,
        bool(recomputed),
        numbers_of(dtype, shape, part),
        part,
    )


#: Names in use, by their hash: steps of one run mostly differ in their storage, if at all.
_NAMED: WeakValueDictionary[int, Names] = WeakValueDictionary()


def _names_of(entries: list[Name]) -> Names:
    key = hash(tuple(entries))
    names = _NAMED.get(key)
    if names is None or names.entries != entries:
        names = _NAMED[key] = Names(entries)
    return names


def _part(record: Record) -> tuple[Part, ...]:
    return () if record.part is None else (record.part,)


def _as_json(entry: tuple[Any, ...]) -> tuple[Any, ...]:
    return entry if len(entry) == len(_FIELDS) else (*entry[:-1], entry[-1].to_json())


#: Structures in use, by the digest of their content: runs of one model have the same.
_IN_USE: WeakValueDictionary[str, StoredSchema] = WeakValueDictionary()


class StoredSchemaReader:
    """Reader of the structures of one run's steps, with a cache.

    Args:
        run: the run folder.
    """

    def __init__(self, run: AnyPath) -> None:
        self._run = run
        self._known: dict[str, StoredSchema] = {}

    def read(self, name: str, file: ArrayFile, places: Mapping[str, Place]) -> StoredSchema:
        """Return a step's structure.

        Args:
            name: name of the structure; empty: the step's own file holds it.
            file, places: the step's file, and the positions of its arrays.

        Raises:
            RunFolderError: the structure's file is missing or damaged.
            ValueError, KeyError, TypeError: the name, or the structure in the step's file, is damaged.
        """
        if not name:
            return _parsed(_unpacked(file.array(places[OWN])))
        if name not in self._known:
            if not re.fullmatch(f"[0-9a-f]{{{_NAME}}}", name):
                raise ValueError(f"{name!r} is no name of a structure")
            if len(self._known) >= _REMEMBERED:  # most steps of a run share one
                self._known.clear()
            self._known[name] = _read(self._run / STRUCTURES / f"{name}.json", self._run)
        return self._known[name]


def _read(path: AnyPath, run: AnyPath) -> StoredSchema:
    try:
        text = read_text(check_inside(path, run))
        content = hashlib.sha256(text).hexdigest()
        if content[:_NAME] != path.stem:
            raise ValueError("its content is not what it is named after")
        structure = _IN_USE.get(content)
        if structure is None:
            structure = _IN_USE[content] = _parsed(text)
        return structure
    except RunFolderError:
        raise
    except FileNotFoundError:
        raise RunFolderError(
            f"{path} is missing: it names what the steps' files hold. Copy the whole run folder"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunFolderError(f"{path} is damaged ({error}): copy the run again") from error


def _parsed(text: bytes) -> StoredSchema:
    content, trace = without_trace(text)
    if content["schema_version"] not in (SCHEMA_VERSION, WITH_PARTS):
        raise ValueError(
            f"schema version {content['schema_version']!r}; this padiff reads {SCHEMA_VERSION} and {WITH_PARTS}"
        )
    return StoredSchema(str(content["compression"]), list(content["records"]), trace)


def _unpacked(data: np.ndarray) -> bytes:
    """Return the JSON text of a structure that a step's file holds, of at most `LARGEST_JSON` bytes."""
    if data.dtype != np.uint8 or data.ndim != 1:
        raise ValueError(f"a structure of {data.dtype} {data.shape}")
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(data.tobytes(), LARGEST_JSON)
    except zlib.error as error:
        raise ValueError(f"its structure can't be unpacked: {error}") from error
    if not unpacking.eof:
        raise ValueError("its structure is cut off, or too large")
    return text
