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
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import numpy as np

from padiff.dump.files import write_text
from padiff.dump.remote_path import AnyPath
from padiff.dump.safetensors import ArrayFile, Place
from padiff.dump.traces import StoredTrace, trace_key, trace_to_json, without_trace
from padiff.dump.untrusted import LARGEST_JSON, read_text, shape_of
from padiff.errors import RunFolderError
from padiff.records import STAGES, Record, Step, Trace
from padiff.records.alike import numbers_of
from padiff.records.parts import Part

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


#: What a record is called, as `padiff.records.Record` has it (layer, stage, slot, call, layer type, dtype, shape,
#: whether it is recomputed), and where it is kept: how many numbers it has, of a part the whole (a complex one is two),
#: how and where the step's file has it, and which part it is. A plain tuple, which the garbage collector need not look
#: at again and again: they are kept, and of many layers they are many.
Entry: TypeAlias = tuple[str, str, str, int, str, str, tuple[int, ...], bool, int, str, Any, Part | None]

#: How a sketch is kept: of a tensor, or of the transposed matrix.
SKETCHES = ("sketch", "turned")


@dataclass(eq=False)
class Structure:
    """What the records of a step are called: one object for all steps that refer to files of the same content.

    Attributes:
        compression: how its tensors are compressed.
        records: an entry for each, as JSON has it.
        trace: its trace; `None` where it has none.
    """

    compression: str
    records: list[Any]
    trace: StoredTrace | None
    _entries: list[Entry] | None = field(default=None, init=False)
    _sketches: np.ndarray | None = field(default=None, init=False)
    #: What was found out from the records (`padiff.records.structured.Structured.fact`).
    facts: dict[Any, Any] = field(default_factory=dict, init=False)

    @property
    def sketches(self) -> np.ndarray:
        """Where each record's sketch is in the step's table; -1 where it is kept otherwise.

        Raises:
            ValueError: one of them is nowhere.
        """
        if self._sketches is None:
            rows = [where if kept_as in SKETCHES else None for *_, kept_as, where, _ in self.entries]
            if any(row is not None and row < 0 for row in rows):
                raise ValueError("a sketch in a row before the first")
            self._sketches = np.array([-1 if row is None else row for row in rows], np.intp)
        return self._sketches

    @cached_property
    def rows(self) -> int:
        """How many rows the step's table of sketches has at least."""
        return int(self.sketches.max(initial=-1)) + 1

    @cached_property
    def others(self) -> list[int]:
        """The places of the records that are no sketches."""
        found: list[int] = np.flatnonzero(self.sketches < 0).tolist()
        return found

    @property
    def entries(self) -> list[Entry]:
        """An entry for each record; checked once.

        Raises:
            ValueError, TypeError, AttributeError, OverflowError: one of them is damaged.
        """
        if self._entries is None:
            self._entries = [_entry(entry) for entry in self.records]
            self.records = []
        return self._entries


def _entry(entry: Any) -> Entry:
    layer, stage, slot, call, layer_type, dtype, shape, recomputed, kept_as, where, *more = entry
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
        str(dtype),
        shape,
        bool(recomputed),
        numbers_of(dtype, shape, part),
        kept_as,
        where,
        part,
    )


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
            self._known[name] = _read(self._run / STRUCTURES / f"{name}.json")
        return self._known[name]


def _read(path: AnyPath) -> Structure:
    try:
        text = read_text(path)
        content = hashlib.sha256(text).hexdigest()
        if content[:_NAME] != path.stem:
            raise ValueError("its content is not what it is named after")
        found = _IN_USE.get(content)
        if found is None:
            found = _IN_USE[content] = _parsed(text)
        return found
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
