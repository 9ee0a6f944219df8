"""The writer of packed steps, which `padiff.dump.pack` reads."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from padiff.dump import codecs
from padiff.dump.deduplication import Deduplication
from padiff.dump.format import evaluations_to_json
from padiff.dump.headers import NAMES
from padiff.dump.pack import PACK_FILE, SCHEMA_VERSION, SKETCH_TABLE, plain_array
from padiff.dump.rank_dedup import RankDedup
from padiff.dump.remote_path import AnyPath
from padiff.dump.safetensors import write_safetensors
from padiff.dump.stored_schema import OWN, StoredSchemaWriter
from padiff.dump.traces import NOWHERE
from padiff.records import LazyRecords, Record, Sketched, Step, Storable, StreamedArray, TensorSource
from padiff.records.regions import regions_to_json
from padiff.records.step_schema import StepSchema

# Rows of sketches that are gathered at a time: few enough for the allocator to reuse its memory.
_ROWS = 200


class PackWriter:
    """Writer of the steps of one run, each into one file.

    Args:
        run: the run folder.
        deduplication: storage of tensors that several steps share.
        compression: codec of the tensors (`padiff.dump.codecs`); empty: none.
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
                name: codecs.compressed(all_of(array), self._compression) if name != SKETCH_TABLE else array
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

    def renumbered(self, pattern: StepSchema) -> _Last | None:
        """Return this layout for a pattern that differs only in the numbers of the samples, else `None`."""
        numbers = self.pattern.new_numbers(pattern)
        if numbers is None:
            return None
        rows = np.array([numbers[row] for row in self.rows.tolist()], np.intp)
        return replace(self, pattern=pattern, rows=rows)


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
