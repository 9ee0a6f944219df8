"""What the records of packed steps are called.

It is the same in most steps, and so lies beside them in ``structures/<name>.json``, named after its content. Where
there are `MOST` of these (batches of ever other shapes), a further step says it in its own file, compressed: then
nothing is left behind by steps that are taken away, and no other process's step can lose what it refers to.
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

from padiff.dump.files import write_text
from padiff.dump.headers import DTYPES, NAMES, Place
from padiff.dump.remote_path import AnyPath
from padiff.dump.safetensors import ArrayFile
from padiff.dump.traces import StoredTrace, trace_key, trace_to_json, without_trace
from padiff.dump.untrusted import LARGEST_JSON, check_inside, read_text, shape_of
from padiff.errors import RunFolderError
from padiff.records import STAGES, Record, Step, Trace
from padiff.records.alike import numbers_of
from padiff.records.dtypes import known_dtype
from padiff.records.parts import Part
from padiff.records.structured import Name, Names, Sketches

STRUCTURES = "structures"
SCHEMA_VERSION = 1
#: Where a record is a part of a tensor: its entry has one field more, and sketches are of the whole tensor with zeros
#: where others' elements are.
WITH_PARTS = 2

_FIELDS = ["layer", "stage", "slot", "call", "type", "dtype", "shape", "recomputed", "kept_as", "place"]

#: Files of structures that the folder of a run of one process holds, and of several one more for each process more:
#: where parameters are spread, each has a structure of its own. (Processes that write at the same time may make a few
#: more.)
MOST = 16

# Structures of a run that a reader remembers: as many as a step of so many processes needs, at 2 MB each for a model of
# 70 billion parameters. Taking them up again costs ten times what the rest of reading a step does.
_REMEMBERED = 256

# Digits of a structure's name, which are the first ones of its content's digest.
_NAME = 16

#: The tensor that holds the structure of a step that says it itself.
OWN = "structure"


class StructureWriter:
    """Says what the records of one run's steps are called.

    Args:
        run: the run folder.
        compression: how the steps' tensors are compressed.
        processes: how many record the run.
    """

    def __init__(self, run: AnyPath, compression: str, processes: int = 1) -> None:
        self._run, self._compression = run, compression
        self._most = MOST + processes - 1
        self._known: dict[Any, tuple[str, np.ndarray | None]] = {}

    def of(
        self, step: Step, places: list[tuple[str, Any]], traced: list[tuple[str, Any]]
    ) -> tuple[str, np.ndarray | None]:
        """The name of the file that says it, written where there is none yet; or no name, and what the step is to hold.

        Args:
            places: of each record, how it is kept and where.
            traced: likewise of each tensor of the trace.
        """
        entries = [
            (r.layer, r.stage, r.slot, r.call, r.layer_type, r.dtype, r.shape, r.recomputed, *place, *_part(r))
            for r, place in zip(step.records, places)
        ]
        key = (tuple(entries), *trace_key(step.trace, traced))
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= 64:  # sequences of ever other lengths
                self._known.clear()
            found = self._known[key] = self._described(entries, step.trace, traced)
        return found

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
            write_text(path, text)  # ranks write the same content: whichever comes last replaces it by itself
        return name, None


#: How the step's file keeps a record, and where.
Kept: TypeAlias = tuple[str, Any]

#: How a sketch is kept: of a tensor, or of the transposed matrix.
SKETCHES = ("sketch", "turned")
#: How a tensor of the step's file is.
TENSOR = "tensor"


@dataclass(eq=False)
class Structure:
    """What the records of a step are called, and how they are kept: one object for all steps that refer to files of the
    same content.

    Attributes:
        compression: how its tensors are compressed.
        records: an entry for each, as JSON has it.
        trace: its trace; `None` where it has none.
    """

    compression: str
    records: list[Any]
    trace: StoredTrace | None

    @cached_property
    def sketches(self) -> Sketches:
        """Which records are sketches, and where.

        Raises:
            ValueError: one of them is nowhere.
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
        """How many rows the step's table of sketches has at least."""
        return int(self.sketches.rows.max(initial=-1)) + 1

    @cached_property
    def tensors(self) -> dict[int, tuple[str, np.dtype[Any], tuple[int, ...]]]:
        """The records that are tensors of the step's file, by their places: what each is called there, and what it is
        if it is not compressed. (Not complex ones, which are stored as real numbers.)
        """
        found = {}
        for place, ((kept_as, where), name) in enumerate(zip(self.kept, self.names.entries)):
            _, _, _, _, _, dtype, shape, *_ = name
            if kept_as == TENSOR and where[1] == NAMES.get(dtype):
                found[place] = where[0], DTYPES[where[1]], shape
        return found

    @cached_property
    def others(self) -> list[int]:
        """The places of the records that are neither these nor sketches."""
        known = self.tensors
        return [place for place in np.flatnonzero(self.sketches.rows < 0).tolist() if place not in known]

    @property
    def names(self) -> Names:
        """What the records are called; checked once.

        Raises:
            ValueError, TypeError, AttributeError, OverflowError: one of them is damaged.
        """
        return self._checked[0]

    @property
    def kept(self) -> list[Kept]:
        """How each record is kept, and where.

        Raises:
            ValueError, TypeError, AttributeError, OverflowError: likewise.
        """
        return self._checked[1]

    @cached_property
    def _checked(self) -> tuple[Names, list[Kept]]:
        entries = [_name(entry) for entry in self.records]
        kept = [(entry[_KEPT_AS], _plain(entry[_KEPT_AS + 1])) for entry in self.records]
        self.records = []
        return _names_of(entries), kept


_KEPT_AS = _FIELDS.index("kept_as")


def _plain(where: Any) -> Any:
    """Where a record is kept; not as a list, which the garbage collector would look at again and again."""
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


#: Those that somebody uses, by their hash: of most runs the steps differ in how they are kept, if at all.
_NAMED: WeakValueDictionary[int, Names] = WeakValueDictionary()


def _names_of(entries: list[Name]) -> Names:
    key = hash(tuple(entries))
    found = _NAMED.get(key)
    if found is None or found.entries != entries:
        found = _NAMED[key] = Names(entries)
    return found


def _part(record: Record) -> tuple[Part, ...]:
    return () if record.part is None else (record.part,)


def _as_json(entry: tuple[Any, ...]) -> tuple[Any, ...]:
    return entry if len(entry) == len(_FIELDS) else (*entry[:-1], entry[-1].to_json())


#: Those that somebody uses, by their content: runs of one model have the same.
_IN_USE: WeakValueDictionary[str, Structure] = WeakValueDictionary()


class StructureReader:
    """Reads what the records of one run's steps are called.

    Args:
        run: the run folder.
    """

    def __init__(self, run: AnyPath) -> None:
        self._run = run
        self._known: dict[str, Structure] = {}

    def read(self, name: str, file: ArrayFile, places: Mapping[str, Place]) -> Structure:
        """What a step's records are called, given the name and the step's file.

        Raises:
            RunFolderError: the structure's file is missing or damaged.
            ValueError, KeyError, TypeError: what the step's file says of it is.
        """
        if not name:
            return _parsed(_unpacked(file.array(places[OWN])))
        if name not in self._known:
            if not re.fullmatch(f"[0-9a-f]{{{_NAME}}}", name):
                raise ValueError(f"{name!r} is no name of a structure")
            if len(self._known) >= _REMEMBERED:  # the same for most steps of a run
                self._known.clear()
            self._known[name] = _read(self._run / STRUCTURES / f"{name}.json", self._run)
        return self._known[name]


def _read(path: AnyPath, run: AnyPath) -> Structure:
    try:
        text = read_text(check_inside(path, run))
        content = hashlib.sha256(text).hexdigest()
        if content[:_NAME] != path.stem:
            raise ValueError("its content is not what it is named after")
        found = _IN_USE.get(content)
        if found is None:
            found = _IN_USE[content] = _parsed(text)
        return found
    except RunFolderError:
        raise
    except FileNotFoundError:
        raise RunFolderError(
            f"{path} is missing: it names what the steps' files hold. Copy the whole run folder"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunFolderError(f"{path} is damaged ({error}): copy the run again") from error


def _parsed(text: bytes) -> Structure:
    content, trace = without_trace(text)
    if content["schema_version"] not in (SCHEMA_VERSION, WITH_PARTS):
        raise ValueError(
            f"schema version {content['schema_version']!r}; this padiff reads {SCHEMA_VERSION} and {WITH_PARTS}"
        )
    return Structure(str(content["compression"]), list(content["records"]), trace)


def _unpacked(data: np.ndarray) -> bytes:
    """The text of a structure that a step's file holds; never more of it than of one that is a file."""
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
