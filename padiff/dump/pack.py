"""A step in one file: full tensors and sketches of one rank, in the safetensors format.

Tensors are called ``0``, ``1``, ...; ``sketches`` has a row for each sketch. What the records are called is beside the
steps (`padiff.dump.structures`), and what does not change at all is in ``shared/``.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from padiff.dump import codecs
from padiff.dump.deduplication import SHARED, Deduplication
from padiff.dump.fetching import Fetched, Fetching
from padiff.dump.held_once import HeldOnce, elsewhere
from padiff.dump.json_files import Explained
from padiff.dump.remote_path import AnyPath, RemotePath
from padiff.dump.safetensors import DTYPES, NAMES, ArrayFile, Place, write_safetensors
from padiff.dump.structures import OWN, SKETCHES, Entry, StructureReader, StructureWriter
from padiff.dump.tensor_file import TensorFile
from padiff.dump.traces import NOWHERE
from padiff.dump.untrusted import check_inside, plain
from padiff.errors import TensorFileError
from padiff.records import (
    NO_TRACE,
    Alike,
    Record,
    Room,
    Sketched,
    Step,
    Storable,
    TensorSource,
    Unread,
    settings_from_json,
)
from padiff.records.alike import Pattern
from padiff.records.frozen import quickly_made
from padiff.records.structured import Structured
from padiff.sketches.sketch import BUCKETS, FIGURES
from padiff.system.memory import new_memory

PACK_FILE = "step.safetensors"
SCHEMA_VERSION = 1

_SKETCHES = "sketches"


class PackWriter:
    """Writes steps of one run, each into one file.

    Args:
        run: the run folder.
        deduplication: what was written before, and is shared by steps.
        compression: how tensors are compressed, as `padiff.dump.codecs` names it; empty: not.
        processes: how many record the run.
    """

    def __init__(self, run: AnyPath, deduplication: Deduplication, compression: str = "", processes: int = 1) -> None:
        self._run, self._deduplication, self._compression = run, deduplication, compression
        self._structures = StructureWriter(run, compression, processes)
        self._last: _Last | None = None

    def write(self, folder: AnyPath, step: Step, once: HeldOnce | None = None) -> None:
        """Write one rank's step into its folder.

        Args:
            once: what other ranks have written, and need not be written again.
        """
        tensors = self._as_before(step)
        if tensors is not None:
            assert self._last is not None
            structure, own = self._last.structure, None
        else:
            tensors, places, traced = self._placed(step)
            structure, own = self._structures.of(step, places, traced)
            self._last = _Last.of(step, structure, places, traced) if own is None else None
        if once is not None:
            arrays = {name: all_of(array) for name, array in tensors.items()}
            tensors = {n: array for n, array in arrays.items() if n == _SKETCHES or not once.elsewhere(n, array)}
            once.write(folder)
        if self._compression:
            tensors = {
                name: codecs.compressed(all_of(array), self._compression) if name != _SKETCHES else array
                for name, array in tensors.items()
            }
        if own is not None:
            tensors[OWN] = own
        about = {
            "schema_version": str(SCHEMA_VERSION),
            "step": str(step.number),
            "rank": str(step.rank),
            "loss_scale": repr(step.loss_scale),
            "micro_batches": str(step.micro_batches),
            "notes": json.dumps(list(step.notes)),
            "structure": structure,
        }
        if step.settings:
            about["settings"] = json.dumps(dict(step.settings))
        write_safetensors(folder / PACK_FILE, tensors, about)

    def _placed(self, step: Step) -> tuple[dict[str, Storable], list[tuple[str, Any]], list[tuple[str, Any]]]:
        """The tensors of a step's file, and the place there of each record and of each tensor of the trace."""
        tensors: dict[str, Storable] = {}
        known: dict[Hashable, tuple[str, str]] = {}
        rows: list[np.ndarray] = []
        kept: dict[Hashable, int] = {}

        def put(source: TensorSource, record: Record | None) -> tuple[str, Any]:
            """Where the values of a record go, or of a tensor of the trace."""
            if isinstance(source, Sketched):
                row = kept.setdefault(source.identity, len(rows))
                if row == len(rows):
                    rows.append(source.row)
                return "turned" if source.transposed else "sketch", row
            # Records that share an array (a layer's output that is its parent's too) share a tensor.
            place = known.get(source.identity)
            if place is None:
                array = source.to_store()
                if isinstance(array, np.ndarray):
                    shared = self._deduplication.share(record, array, self._run) if record is not None else ""
                    if shared:
                        return "shared", shared
                    array = plain_array(array)
                place = (str(len(tensors)), NAMES[array.dtype.name])
                tensors[place[0]] = array
                known[source.identity] = place
            return "tensor", place

        places = [put(record.source, record) for record in step.records]
        traced = [NOWHERE if t.source is None else put(t.source, None) for t in step.trace.tensors]
        if rows:
            tensors[_SKETCHES] = np.concatenate(rows).reshape(len(rows), -1)
        return tensors, places, traced

    def _as_before(self, step: Step) -> dict[str, Storable] | None:
        """The tensors of the file of a step that is like the one before; `None` where it is not."""
        last, records, traced = self._last, step.records, step.trace.tensors
        if last is None or not isinstance(records, Alike) or not isinstance(traced, Alike):
            return None
        if records.pattern is traced.pattern and records.pattern.like is last.pattern:
            last = self._last = last.renumbered(records.pattern)
        if last is None or not records.pattern is traced.pattern is last.pattern:
            return None
        tensors: dict[str, Storable] = {}
        sources = [*records.others.values(), *traced.others.values()]
        names = {source.identity: name for source, (name, _) in zip(sources, last.others)}
        if len(sources) != len(last.others) or len(names) != last.distinct:
            return None
        for source, (name, stored) in zip(sources, last.others):
            if names[source.identity] != name:
                return None
            array = source.to_store()
            if isinstance(array, np.ndarray):
                array = plain_array(array)
            if NAMES.get(array.dtype.name) != stored:
                return None
            tensors[name] = array
        if len(last.rows):
            tensors[_SKETCHES] = records.samples.table[last.rows]
        return tensors


@dataclass(frozen=True, slots=True, eq=False)
class _Last:
    """How a step was written that further ones may be like.

    Attributes:
        pattern: what it is like.
        structure: the name of the file that says so.
        rows: numbers of the samples, in the order in which their sketches are stored.
        others: of what is more than a sample, what it is called in the step's file, and its dtype there.
        distinct: how many different ones these are.
    """

    pattern: Pattern
    structure: str
    rows: np.ndarray
    others: Sequence[tuple[str, str]]
    distinct: int

    @classmethod
    def of(
        cls, step: Step, structure: str, places: Sequence[tuple[str, Any]], traced: Sequence[tuple[str, Any]]
    ) -> _Last | None:
        """Given where records and the trace's tensors went; `None` where that may be elsewhere for a step that is
        alike: what is stored once for several steps.
        """
        records, tensors = step.records, step.trace.tensors
        if not isinstance(records, Alike) or not isinstance(tensors, Alike) or records.pattern is not tensors.pattern:
            return None
        pattern = records.pattern
        if any(pattern.sites[place].stage == "weight" for place in records.others):
            return None
        rows: dict[int, int] = {}
        for numbers, where in ((pattern.numbers, places), (pattern.traced_numbers, traced)):
            for number, (kept_as, row) in zip(numbers, where):
                if kept_as in ("sketch", "turned"):
                    rows[row] = number
        others = [*(places[k][1] for k in records.others), *(traced[k][1] for k in tensors.others)]
        order = np.array([rows[row] for row in range(len(rows))], np.intp)
        return cls(pattern, structure, order, others, len({name for name, _ in others}))

    def renumbered(self, pattern: Pattern) -> _Last | None:
        """The same, of a pattern in which samples have other numbers; `None` where that is not all."""
        numbers = self.pattern.new_numbers(pattern)
        if numbers is None:
            return None
        rows = np.array([numbers[row] for row in self.rows.tolist()], np.intp)
        return replace(self, pattern=pattern, rows=rows)


def all_of(array: Storable) -> np.ndarray:
    """All elements of a tensor in memory."""
    if isinstance(array, Unread):
        return np.concatenate([piece.copy() for piece in array.pieces()]).reshape(array.shape)
    return array


def plain_array(array: np.ndarray) -> np.ndarray:
    """The array as the format can hold it: a complex one with real and imaginary parts along a last axis."""
    if array.dtype.kind == "c":
        return np.ascontiguousarray(array).view(array.real.dtype).reshape(*array.shape, 2)
    return array


@quickly_made
@dataclass(frozen=True, slots=True)
class PackedTensor(TensorSource):
    """A tensor source: one tensor of a step's file, read when asked.

    Attributes:
        file: the step's file.
        place: where in it.
        dtype, shape: of the tensor as it was recorded.
        stored: the dtype that its values are stored in.
        compression: how it is compressed; empty: it is not.
    """

    file: ArrayFile
    place: Place
    dtype: str
    shape: tuple[int, ...]
    stored: np.dtype[Any]
    compression: str = ""

    @property
    def refetchable(self) -> bool:
        return True

    @property
    def identity(self) -> Hashable:
        return self.file.path, self.place.start

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that is stored; real and imaginary parts lie along a last axis of their own."""
        return (*self.shape, 2) if self.dtype.startswith("complex") else self.shape

    def read(self) -> np.ndarray:
        """The tensor.

        Raises:
            TensorFileError: the file was changed, or there is too little memory.
        """
        return self.read_into(new_memory)

    def read_into(self, room: Room) -> np.ndarray:
        """`read`, into memory of the room where it is not compressed and that is large enough.

        Raises:
            TensorFileError: as there.
        """
        try:
            array = self.file.array(self.place, new_memory if self.compression else room)
            if self.compression:
                array = codecs.restored(array, self.compression, self.stored, self.stored_shape)
            if self.dtype.startswith("complex"):
                array = array.view(np.dtype(self.dtype)).reshape(self.shape)
        except (OSError, ValueError, TypeError, OverflowError, MemoryError) as error:
            raise TensorFileError(
                f"{self.file.path}: the tensor at byte {self.place.start} can't be read ({error}): copy the run again"
            ) from error
        return array


def opened(path: AnyPath, recent: deque[ArrayFile], fetching: Fetching | None = None) -> ArrayFile:
    """A file of tensors, to be read from the disk, or fetched from its store."""
    return Fetched(path, recent, fetching or Fetching()) if isinstance(path, RemotePath) else ArrayFile(path, recent)


class PackReader:
    """Reads the steps of one run that lie in one file each.

    Args:
        run: the run folder.
        fetching: of a run in a store, what is read before it is asked for.
    """

    def __init__(self, run: AnyPath, fetching: Fetching | None = None) -> None:
        self._run = run
        self._fetching = fetching or Fetching()
        self._recent: deque[ArrayFile] = deque()
        self._structures = StructureReader(run)

    def read(self, folder: AnyPath) -> Step:
        """Read one rank's step, given its folder.

        Raises:
            RunFolderError: a file is missing or damaged.
        """
        path = folder / PACK_FILE
        check_inside(path, self._run)
        file = opened(path, self._recent, self._fetching)
        about, places = file.header()
        with Explained(path):
            structure = self._structures.read(about["structure"], file, places)
            others = elsewhere(folder)
            headers: dict[AnyPath, tuple[ArrayFile, Mapping[str, Place]]] = {}
            for where in {where for where, _ in others.values()}:
                beside = opened(where / PACK_FILE, self._recent, self._fetching)
                headers[where] = beside, beside.header()[1]
            outside = {n: (headers[where][0], headers[where][1][other]) for n, (where, other) in others.items()}
            stored = _Stored(file, places, outside, _rows(file, places), structure.compression, self._run)
            make = partial(_record, stored, structure.entries)
            if structure.rows > len(stored.rows):
                raise ValueError(f"a sketch in row {structure.rows - 1} of {len(stored.rows)}")
            # A record of a sketch is made when it is looked at; all others show now that they can be.
            made: list[Record | None] = [None] * len(structure.entries)
            for place in structure.others:
                made[place] = make(place)
            records: Sequence[Record] = Structured(made, structure, make, structure.sketches, stored.rows)
            file.forget()
            if not about["structure"]:
                records = tuple(records)  # a step that says itself what its records are called is like no other one
            return Step(
                number=int(about["step"]),
                records=records,
                rank=int(about.get("rank", 0)),
                loss_scale=float(about.get("loss_scale", 1.0)),
                micro_batches=int(about.get("micro_batches", 1)),
                notes=tuple([str(note) for note in json.loads(about.get("notes", "[]"))]),
                settings=settings_from_json(plain(json.loads(about["settings"]))) if "settings" in about else {},
                trace=NO_TRACE if structure.trace is None else structure.trace.read(stored.source, path),
            )


def _rows(file: ArrayFile, places: Mapping[str, Place]) -> np.ndarray:
    place = places.get(_SKETCHES)
    if place is None:
        return np.zeros((0, len(FIGURES) + BUCKETS))
    if place.dtype != np.float64 or place.shape[1:] != (len(FIGURES) + BUCKETS,):
        raise ValueError(f"sketches of {place.dtype} in a table of {place.shape}")
    return file.view(place)


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a step's file holds, and where.

    Attributes:
        file: the file.
        places: of its tensors.
        outside: of those that another rank has, its file, and where in that.
        rows: the sketches.
        compression: how tensors are compressed; empty: they are not.
        run: the run folder.
    """

    file: ArrayFile
    places: Mapping[str, Place]
    outside: Mapping[str, tuple[ArrayFile, Place]]
    rows: np.ndarray
    compression: str
    run: AnyPath

    def source(self, kept_as: str, where: Any, dtype: str, shape: tuple[int, ...], site: str = "") -> TensorSource:
        """The source of a tensor that is kept somewhere.

        Raises:
            ValueError, KeyError, TypeError, IndexError: there is none.
        """
        size = math.prod(shape) * (2 if dtype.startswith("complex") else 1)
        if kept_as == "tensor":
            name, stored = where
            file, place = self.outside[name] if name in self.outside else (self.file, self.places[name])
            source = PackedTensor(file, place, dtype, shape, DTYPES[stored], self.compression)
            if not self.compression and (place.dtype != source.stored or place.shape != source.stored_shape):
                raise ValueError(f"tensor {name!r} is {place.dtype} {place.shape}, but {dtype} {shape} was recorded")
            return source
        if kept_as == "shared":
            return TensorFile(self.run, f"{SHARED}/{where}", dtype, shape, site)
        if kept_as in ("sketch", "turned"):
            if where < 0:
                raise ValueError(f"no sketch {where}")
            return Sketched(self.rows[where], size, kept_as == "turned")
        raise ValueError(f"kept as {kept_as!r}")


def _record(stored: _Stored, entries: Sequence[Entry], order: int) -> Record:
    layer, stage, slot, call, layer_type, dtype, shape, recomputed, numbers, kept_as, where, part = entries[order]
    source: TensorSource
    if kept_as in SKETCHES:
        source = Sketched(stored.rows[where], numbers, kept_as == "turned")
    else:
        source = stored.source(kept_as, where, dtype, shape, f"{layer}/{stage}/{slot}")
    return Record(layer, stage, slot, source, dtype, shape, call, order, layer_type, recomputed, part)
