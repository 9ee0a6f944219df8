"""A step in one file, read and written: full tensors and sketches of one rank, in the safetensors format."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from padiff.dump import storage
from padiff.dump.deduplication import SHARED, Deduplication, RankDedup, elsewhere
from padiff.dump.format import evaluations_from_json, evaluations_to_json
from padiff.dump.medium import Explained, check_inside
from padiff.dump.safetensors import DTYPES, NAMES, ArrayFile, Fetched, Fetching, Place, write_safetensors
from padiff.dump.store import AnyPath, as_remote
from padiff.dump.stored_schema import (
    NOWHERE,
    OWN,
    SKETCHES,
    TENSOR,
    StoredSchema,
    StoredSchemaReader,
    StoredSchemaWriter,
    trace_from_json,
)
from padiff.dump.tensor_file import TensorFile
from padiff.dump.untrusted import plain
from padiff.errors import TensorFileError
from padiff.records import (
    LazyRecords,
    Record,
    Sketched,
    Step,
    Storable,
    StreamedArray,
    TensorSource,
    settings_from_json,
)
from padiff.records.step_schema import StepSchema, StoredRecords
from padiff.records.traces import regions_from_json, regions_to_json
from padiff.sketches.sketch import ROW

PACK_FILE = "step.safetensors"
SCHEMA_VERSION = 1

#: Name of the table of sketches.
SKETCH_TABLE = "sketches"


def plain_array(array: np.ndarray) -> np.ndarray:
    """Return the array without complex numbers: their real and imaginary parts lie along an additional last axis."""
    if array.dtype.kind == "c":
        return np.ascontiguousarray(array).view(array.real.dtype).reshape(*array.shape, 2)
    return array


@dataclass(frozen=True, slots=True)
class PackedTensor(TensorSource):
    """A tensor source: one tensor of a step's file, read on demand.

    Attributes:
        file: the step's file.
        place: position in the file.
        dtype, shape: dtype and shape of the recorded tensor.
        stored: dtype of the stored values.
        compression: codec; empty: uncompressed.
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
        """Return the shape of the stored array; complex tensors have a last axis for real and imaginary parts."""
        return (*self.shape, 2) if self.dtype.startswith("complex") else self.shape

    def read(self) -> np.ndarray:
        """Return the tensor.

        Raises:
            TensorFileError: the file was changed, or there is too little memory.
        """
        try:
            array = self.file.array(self.place)
            if self.compression:
                array = storage.restored(array, self.compression, self.stored, self.stored_shape)
            if self.dtype.startswith("complex"):
                array = array.view(np.dtype(self.dtype)).reshape(self.shape)
        except (OSError, ValueError, TypeError, OverflowError, MemoryError) as error:
            raise TensorFileError(
                f"{self.file.path}: the tensor at byte {self.place.start} can't be read ({error}): copy the run again"
            ) from error
        return array


def opened(path: AnyPath, recent: deque[ArrayFile], fetching: Fetching | None = None) -> ArrayFile:
    """Return a file of tensors, on disk or in a store."""
    remote = as_remote(path)
    return ArrayFile(path, recent) if remote is None else Fetched(remote, recent, fetching or Fetching())


class PackReader:
    """Reader of the packed steps of one run.

    Args:
        run: the run folder.
        fetching: prefetching of objects, for a run in a store.
    """

    def __init__(self, run: AnyPath, fetching: Fetching | None = None) -> None:
        self._run = run
        self._fetching = fetching or Fetching()
        self._recent: deque[ArrayFile] = deque()
        self._structures = StoredSchemaReader(run)

    def read(self, folder: AnyPath) -> Step:
        """Return a rank's step, read from the rank's folder.

        Raises:
            RunFolderError: a file is missing or damaged.
        """
        path = folder / PACK_FILE
        file = opened(check_inside(path, self._run), self._recent, self._fetching)
        about, places = file.header()
        with Explained(path):
            structure = self._structures.read(about["structure"], file, places)
            others = elsewhere(folder)
            headers: dict[AnyPath, tuple[ArrayFile, Mapping[str, Place]]] = {}
            for where in {where for where, _ in others.values()}:
                other_file = opened(check_inside(where / PACK_FILE, self._run), self._recent, self._fetching)
                headers[where] = other_file, other_file.header()[1]
            outside = {n: (headers[where][0], headers[where][1][tensor]) for n, (where, tensor) in others.items()}
            stored = _Stored(file, places, outside, _rows(file, places), structure.compression, self._run)
            make = partial(_record, stored, structure)
            if structure.rows > len(stored.rows):
                raise ValueError(f"a sketch in row {structure.rows - 1} of {len(stored.rows)}")
            # Records of sketches are created on first access. The others are created now, to detect damage.
            step_records: list[Record | None] = [None] * len(structure.kept)
            for place in np.flatnonzero(structure.sketches.rows < 0).tolist():
                step_records[place] = make(place)
            records: Sequence[Record] = StoredRecords(step_records, structure, make, structure.sketches, stored.rows)
            if not about["structure"]:
                records = tuple(records)  # a step that stores its own structure shares it with no other step
            return Step(
                number=int(about["step"]),
                records=records,
                rank=int(about.get("rank", 0)),
                loss_scale=float(about.get("loss_scale", 1.0)),
                micro_batches=int(about.get("micro_batches", 1)),
                notes=tuple([str(note) for note in json.loads(about.get("notes", "[]"))]),
                settings=settings_from_json(plain(json.loads(about["settings"]))) if "settings" in about else {},
                trace=trace_from_json(structure.trace, stored.source, path),
                evaluations=evaluations_from_json(json.loads(about.get("evaluations", "[]"))),
                regions=regions_from_json(json.loads(about.get("regions", "[]"))),
            )


def _rows(file: ArrayFile, places: Mapping[str, Place]) -> np.ndarray:
    place = places.get(SKETCH_TABLE)
    if place is None:
        return np.zeros((0, ROW))
    if place.dtype != np.float64 or place.shape[1:] != (ROW,):
        raise ValueError(f"sketches of {place.dtype} in a table of {place.shape}")
    return file.array(place)


@dataclass(frozen=True, slots=True)
class _Stored:
    """Tensors and sketches of a rank's step.

    Attributes:
        file: the step's file.
        places: positions of the tensors in it.
        outside: tensors that only another rank's file holds: that file, and the position in it.
        rows: the table of sketches.
        compression: codec of the tensors; empty: uncompressed.
        run: the run folder.
    """

    file: ArrayFile
    places: Mapping[str, Place]
    outside: Mapping[str, tuple[ArrayFile, Place]]
    rows: np.ndarray
    compression: str
    run: AnyPath

    def source(self, kept_as: str, where: Any, dtype: str, shape: tuple[int, ...], site: str = "") -> TensorSource:
        """Return the source of a tensor or sketch, given its kind and position of storage.

        Raises:
            ValueError, KeyError, TypeError, IndexError: the position does not exist, or holds another dtype or shape.
        """
        size = math.prod(shape) * (2 if dtype.startswith("complex") else 1)
        if kept_as == TENSOR:
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


def _record(stored: _Stored, structure: StoredSchema, order: int) -> Record:
    layer, stage, slot, call, layer_type, dtype, shape, recomputed, numbers, part = structure.names.entries[order]
    kept_as, where = structure.kept[order]
    source: TensorSource
    if kept_as in SKETCHES:
        source = Sketched(stored.rows[where], numbers, kept_as == "turned")
    else:
        source = stored.source(kept_as, where, dtype, shape, f"{layer}/{stage}/{slot}")
    return Record(layer, stage, slot, source, dtype, shape, call, order, layer_type, recomputed, part)


# Rows of sketches that are gathered at a time: few enough for the allocator to reuse its memory.
_ROWS = 200


class PackWriter:
    """Writer of the steps of one run, each into one file.

    Args:
        run: the run folder.
        deduplication: storage of tensors that several steps share.
        compression: codec of the tensors (`padiff.dump.storage`); empty: none.
        processes: number of processes that record the run.
    """

    def __init__(self, run: AnyPath, deduplication: Deduplication, compression: str = "", processes: int = 1) -> None:
        self._run, self._deduplication, self._compression = run, deduplication, compression
        self._structures = StoredSchemaWriter(run, compression, processes)
        self._last: _Last | None = None

    def write(self, folder: AnyPath, step: Step, once: RankDedup | None = None) -> None:
        """Write one rank's step into its folder.

        Args:
            once: deduplication between ranks: tensors that another rank has written are left out.
        """
        tensors = self._as_before(step)
        if tensors is not None:
            assert self._last is not None
            structure, inline = self._last.structure, None
        else:
            tensors, places, traced = self._placed(step)
            structure, inline = self._structures.schema_of(step, places, traced)
            self._last = _Last.from_step(step, structure, places, traced) if inline is None else None
        if once is not None:
            arrays = {name: all_of(array) for name, array in tensors.items()}
            tensors = {n: array for n, array in arrays.items() if n == SKETCH_TABLE or not once.elsewhere(n, array)}
            once.write(folder)
        if self._compression:
            tensors = {
                name: storage.compressed(all_of(array), self._compression) if name != SKETCH_TABLE else array
                for name, array in tensors.items()
            }
        if inline is not None:
            tensors[OWN] = inline
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
        if step.evaluations:
            about["evaluations"] = json.dumps(evaluations_to_json(step.evaluations))
        if step.regions:
            about["regions"] = json.dumps(regions_to_json(step.regions))
        write_safetensors(folder / PACK_FILE, tensors, about)

    def _placed(self, step: Step) -> tuple[dict[str, Storable], list[tuple[str, Any]], list[tuple[str, Any]]]:
        """Return the tensors of a step's file, and the storage of each record and of each traced tensor."""
        tensors: dict[str, Storable] = {}
        places_by_source: dict[Hashable, tuple[str, str]] = {}
        rows: list[np.ndarray] = []
        rows_by_source: dict[Hashable, int] = {}

        def put(source: TensorSource, record: Record | None) -> tuple[str, Any]:
            """Add the values of a record or traced tensor to the file's tensors; return their kind and position."""
            if isinstance(source, Sketched):
                row = rows_by_source.setdefault(source.identity, len(rows))
                if row == len(rows):
                    rows.append(source.row)
                return "turned" if source.transposed else "sketch", row
            # Records that share an array (a layer's output that is its parent's too) share a tensor.
            place = places_by_source.get(source.identity)
            if place is None:
                array = source.to_store()
                if isinstance(array, np.ndarray):
                    shared = self._deduplication.share(record, array, self._run) if record is not None else ""
                    if shared:
                        return "shared", shared
                    array = plain_array(array)
                place = (str(len(tensors)), NAMES[array.dtype.name])
                tensors[place[0]] = array
                places_by_source[source.identity] = place
            return "tensor", place

        places = [put(record.source, record) for record in step.records]
        traced = [NOWHERE if t.source is None else put(t.source, None) for t in step.trace.tensors]
        if rows:
            tensors[SKETCH_TABLE] = np.concatenate(rows).reshape(len(rows), -1)
        return tensors, places, traced

    def _as_before(self, step: Step) -> dict[str, Storable] | None:
        """Return the tensors of a step's file if the step has the same structure as the one before, else `None`."""
        last, records, traced = self._last, step.records, step.trace.tensors
        if last is None or not isinstance(records, LazyRecords) or not isinstance(traced, LazyRecords):
            return None
        if not records.pattern is traced.pattern is last.pattern:
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
            tensors[SKETCH_TABLE] = _rows_of(records.samples.table, last.rows)
        return tensors


@dataclass(frozen=True, slots=True, eq=False)
class _Last:
    """The layout of the last written step, reused for further steps of the same pattern.

    Attributes:
        pattern: the pattern of the step's records.
        structure: name of the structure's file.
        rows: sample numbers of the sketches, in stored order.
        others: name and dtype in the step's file of each source that is no sample.
        distinct: number of different names in ``others``.
    """

    pattern: StepSchema
    structure: str
    rows: np.ndarray
    others: Sequence[tuple[str, str]]
    distinct: int

    @classmethod
    def from_step(
        cls, step: Step, structure: str, places: Sequence[tuple[str, Any]], traced: Sequence[tuple[str, Any]]
    ) -> _Last | None:
        """Return the layout of a written step, or `None` if it cannot be reused for the next step.

        A layout cannot be reused if the step has no pattern, or stores weights, which several steps may share.

        Args:
            places, traced: storage of the step's records, and of its traced tensors.
        """
        records, tensors = step.records, step.trace.tensors
        if (
            not isinstance(records, LazyRecords)
            or not isinstance(tensors, LazyRecords)
            or records.pattern is not tensors.pattern
        ):
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


def _rows_of(table: np.ndarray, rows: np.ndarray) -> StreamedArray:
    """Return rows of a table in the given order, as an array that is streamed `_ROWS` rows at a time."""

    def pieces() -> Iterator[np.ndarray]:
        for start in range(0, len(rows), _ROWS):
            yield table[rows[start : start + _ROWS]].reshape(-1)

    return StreamedArray(table.dtype, (len(rows), table.shape[1]), pieces)


def all_of(array: Storable) -> np.ndarray:
    """Return a tensor as one array in memory."""
    if isinstance(array, StreamedArray):
        return np.concatenate([piece.copy() for piece in array.pieces()]).reshape(array.shape)
    return array
