"""Structures of packed steps (names, dtypes, shapes, storage) and of traces, as JSON."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from sys import intern
from typing import Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from padiff.dump.medium import check_inside, read_text, write_text
from padiff.dump.safetensors import ArrayFile, Place
from padiff.dump.store import AnyPath
from padiff.dump.untrusted import LARGEST_JSON, as_int, parse_json, plain, shape_of
from padiff.errors import RunFolderError
from padiff.records import (
    NO_TRACE,
    STAGES,
    Choice,
    Operand,
    Record,
    Step,
    TensorSource,
    Trace,
    TracedCall,
    TracedTensor,
)
from padiff.records.recorded import Part
from padiff.records.sources import known_dtype
from padiff.records.step_schema import Name, Names, Sketches, numbers_of
from padiff.system.frames import Frame

_Thing = TypeVar("_Thing")

#: Storage of a traced tensor: kind and position; both are empty if its values were not recorded.
TracePlace = tuple[str, Any]
NOWHERE: TracePlace = ("", "")
#: ``source(kept_as, place, dtype, shape)``: the tensor source at a place.
SourceAt = Callable[[str, Any, str, tuple[int, ...]], TensorSource]


def trace_to_json(trace: Trace, places: Sequence[TracePlace]) -> dict[str, Any]:
    """Return a trace as JSON, with the storage of each of its tensors."""
    frames: dict[Frame, int] = {}
    calls = [_call_to_json(call, frames) for call in trace.calls]
    return {
        "functions": trace.functions,
        "tensors": [[t.dtype, list(t.shape), *place] for t, place in zip(trace.tensors, places)],
        "calls": calls,
        **({"frames": [[*frame] for frame in frames]} if frames else {}),
    }


def _call_to_json(call: TracedCall, frames: dict[Frame, int]) -> dict[str, Any]:
    """Return a call as JSON; its stack is a list of indices into ``frames``, to which new frames are added."""
    return {
        "layer": call.layer,
        "type": call.layer_type,
        "call": call.call,
        **({"function": call.function, "nth": call.nth} if call.function else {}),
        "inputs": [[*operand] for operand in call.inputs],
        "outputs": [[*operand] for operand in call.outputs],
        **({"arguments": dict(call.arguments)} if call.arguments else {}),
        **({"parameters": list(call.parameters)} if call.parameters else {}),
        **({"choice": [*call.choice]} if call.choice is not None else {}),
        **({"cut": True} if call.cut else {}),
        **({"stack": [frames.setdefault(frame, len(frames)) for frame in call.stack]} if call.stack else {}),
    }


def trace_key(trace: Trace, places: Sequence[TracePlace]) -> tuple[Any, ...]:
    """Return a key that is equal for traces with the same JSON."""
    if not trace.calls:
        return ()
    calls = [
        (
            *(c.layer, c.call, c.function, c.nth, c.inputs, c.outputs, _said(c.arguments), c.parameters, c.stack),
            *(c.choice, c.cut),
        )
        for c in trace.calls
    ]
    return tuple(calls), tuple([(t.dtype, t.shape, *place) for t, place in zip(trace.tensors, places)])


def _said(arguments: Mapping[str, Any]) -> str:
    return repr(arguments) if arguments else ""


def trace_from_json(content: Any, source: SourceAt, where: object) -> Trace:
    """Return the trace of its JSON; it is decoded on first access, as most traces are never read.

    Args:
        content: the JSON of the trace; `NO_TRACE` is returned if it is empty.
        source: creates the tensor source at a position.
        where: the file of the trace, for error messages.
    """
    if not content:
        return NO_TRACE
    tensors = _Later(lambda: [_tensor(entry, source) for entry in content["tensors"]], where)
    return Trace(tensors, _Later(lambda: _calls(content), where), bool(content.get("functions")))


class _Later(Sequence[_Thing]):
    """A sequence that is decoded on first access.

    Raises:
        RunFolderError: on first access, if the content is damaged.
    """

    def __init__(self, make: Callable[[], list[_Thing]], where: object) -> None:
        self._make, self._where = make, where
        self._made: list[_Thing] | None = None

    @property
    def _all(self) -> list[_Thing]:
        if self._made is None:
            try:
                self._made = self._make()
            except (
                KeyError,
                TypeError,
                ValueError,
                AttributeError,
                IndexError,
                OverflowError,
                RecursionError,
            ) as error:
                raise RunFolderError(
                    f"the trace in {self._where} is damaged: {type(error).__name__}: {error}. It was edited, or only "
                    "half copied"
                ) from error
        return self._made

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, key: Any) -> Any:
        return self._all[key]


def _tensor(entry: Any, source: SourceAt) -> TracedTensor:
    dtype, shape, kept_as, place = entry
    shape = shape_of(shape)
    dtype = known_dtype(dtype, "a tensor of the trace")
    values = source(str(kept_as), place, dtype, shape) if kept_as else None
    return TracedTensor(values, dtype, shape)


def _calls(content: Mapping[str, Any]) -> list[TracedCall]:
    frames = [
        Frame(str(file), as_int(line), str(function), str(code))
        for file, line, function, code in content.get("frames", ())
    ]
    return [_call(entry, len(content["tensors"]), frames) for entry in content["calls"]]


def _call(entry: Mapping[str, Any], tensors: int, frames: Sequence[Frame]) -> TracedCall:
    return TracedCall(
        intern(str(entry["layer"])),
        as_int(entry["call"]),
        intern(str(entry.get("function", ""))),
        as_int(entry.get("nth", 0)),
        _operands(entry["inputs"], tensors),
        _operands(entry["outputs"], tensors),
        dict(plain(entry.get("arguments", {}))),
        tuple(str(site) for site in entry.get("parameters", ())),
        intern(str(entry.get("type", ""))),
        tuple([frames[as_int(number)] for number in entry.get("stack", ())]),
        _choice(entry.get("choice"), tensors),
        entry.get("cut") is True,
    )


def _choice(entry: Any, tensors: int) -> Choice | None:
    if entry is None:
        return None
    choice = Choice(*map(as_int, entry))
    if min(choice) < 0 or choice.every < 1 or max(choice.scores, choice.places, choice.picked) >= tensors:
        raise ValueError("a choice of a tensor that is not there")
    return choice


def _operands(entries: Any, tensors: int) -> tuple[Operand, ...]:
    operands = tuple(Operand(intern(str(slot)), as_int(number)) for slot, number in entries)
    if any(not 0 <= operand.tensor < tensors for operand in operands):
        raise ValueError("a tensor that is not there")
    return operands


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
        trace: the JSON of the step's trace; `None` if it has none.
    """

    compression: str
    records: list[Any]
    trace: Any

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
    content = parse_json(text)
    if content["schema_version"] not in (SCHEMA_VERSION, WITH_PARTS):
        raise ValueError(
            f"schema version {content['schema_version']!r}; this padiff reads {SCHEMA_VERSION} and {WITH_PARTS}"
        )
    return StoredSchema(str(content["compression"]), list(content["records"]), content.get("trace"))


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
