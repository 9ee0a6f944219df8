"""Merge the parts of distributed tensors into whole tensors: join shards, choose a replica, add up terms."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from padiff.errors import SketchOnlyError
from padiff.records import LOOP, PARAMETER_STAGES, Record, Step, TensorSource
from padiff.records.recorded import PARTIAL, Part
from padiff.records.step_schema import StoredRecords, fact_of
from padiff.sketches.sketch import Own, Sketch, own_of, sketch_of_sample, whole_sketch

# How many parameters a note names.
_NAMED = 3
_Key = tuple[str, str, str, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a tensor, as one process recorded it.

    Attributes:
        rank: rank of the process.
        record: record of the part.
        part: position of the part in the tensor.
    """

    rank: int
    record: Record
    part: Part

    @property
    def place(self) -> tuple[Hashable, ...]:
        """Return a key of the elements that the piece holds, equal for replicas."""
        return self.part.offset, self.record.shape

    def within(self, whole: np.ndarray) -> np.ndarray:
        """Return the elements of the whole tensor that the piece holds."""
        if self.part.is_range(self.record.shape):
            start = self.part.offset[0]
            return whole.reshape(-1)[start : start + self.record.shape[0]]
        index = tuple(slice(start, start + n) for start, n in zip(self.part.offset, self.record.shape))
        return whole[index]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces(TensorSource):
    """Tensor source of a tensor whose parts lie in several processes; the parts are joined on reading.

    Attributes:
        shape: shape of the whole tensor.
        pieces: the parts, which cover the whole tensor; several pieces may be replicas of one place.
        choice: index of the replica to read for each part.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    choice: int = 0

    @property
    def replicas(self) -> int:
        """Return the largest number of replicas of a part, or 1 if all replicas of each part are equal."""
        replica_groups = [_copies(group) for group in self._places()]
        if not any(_differ(copies[0], replica) for copies in replica_groups for replica in copies[1:]):
            return 1
        return max(map(len, replica_groups))

    def _chosen(self) -> list[list[Piece]]:
        copies = [_copies(group) for group in self._places()]
        return [each[min(self.choice, len(each) - 1)] for each in copies]

    @property
    def sketched(self) -> bool:
        return _is_sketched(self.pieces)

    @property
    def sketch(self) -> Sketch | None:
        if not self.sketched:
            return None
        groups = self._chosen()
        transposed = _transposed(self.pieces)
        sketches = [_one(group, transposed) for group in groups]
        if len(groups) == 1 and not _partial(self.pieces):
            return sketches[0]
        owned = [len(_own(group[0], transposed).places) for group in groups]
        return whole_sketch(sketches, owned)

    def read(self) -> np.ndarray:
        if self.sketched:
            raise SketchOnlyError(
                "of this tensor sketches were recorded, not its values: record it with detail='full' to look at them"
            )
        groups = self._chosen()
        values = [_added(group) for group in groups]
        if len(groups) == 1 and values[0].shape == self.shape:
            return values[0]
        joined: np.ndarray = np.empty(self.shape, np.result_type(*(each.dtype for each in values)))
        for group, each in zip(groups, values):
            group[0].within(joined)[...] = each
        return joined

    def _places(self) -> list[list[Piece]]:
        groups: dict[Hashable, list[Piece]] = defaultdict(list)
        for piece in self.pieces:
            if math.prod(piece.record.shape) or not math.prod(self.shape):
                groups[piece.place].append(piece)
        return list(groups.values())


def _own(piece: Piece, transposed: bool) -> Own:
    return own_of(piece.part.shape, piece.part.offset, piece.record.shape, transposed)


def _sketch(piece: Piece, transposed: bool) -> Sketch:
    """Return a piece's sketch, computed now if this process recorded the full tensor and others did not."""
    sketch = piece.record.source.sketch
    if sketch is not None:
        return sketch
    sample = _own(piece, transposed)
    sampled = np.zeros(sample.length, piece.record.source.read().dtype)
    sampled[sample.places] = piece.record.source.read().reshape(-1)[sample.elements]
    computed = sketch_of_sample(sampled, piece.part.size, transposed)
    finite = sampled[sample.places].astype(np.float64)
    finite = finite[np.isfinite(finite)]
    extremes = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    return replace(computed, minimum=extremes[0], maximum=extremes[1])


def _partial(pieces: Iterable[Piece]) -> bool:
    return any(piece.part.kind == PARTIAL for piece in pieces)


def _copies(group: Sequence[Piece]) -> list[list[Piece]]:
    """Return the replicas of one place, each as the list of pieces whose sum is the value."""
    if not _partial(group):
        return [[piece] for piece in group]
    copies: dict[int, list[Piece]] = defaultdict(list)
    for piece in group:
        copies[piece.part.copy].append(piece)
    return list(copies.values())


def _added(terms: Sequence[Piece]) -> np.ndarray:
    """Return the value of one place from one of the replicas, with terms added up."""
    arrays = [piece.record.source.read() for piece in terms]
    return arrays[0] if len(arrays) == 1 else np.asarray(np.sum(arrays, axis=0, dtype=arrays[0].dtype))


def _one(terms: Sequence[Piece], transposed: bool) -> Sketch:
    """Return the sketch of one place from one of the replicas, with terms added up."""
    sketches = [_sketch(piece, transposed) for piece in terms]
    if len(sketches) == 1:
        return sketches[0]
    return replace(sketches[0], projection=np.sum([sketch.projection for sketch in sketches], axis=0))


def _differ(first: Sequence[Piece], second: Sequence[Piece]) -> bool:
    """Return True if two replicas differ in any bit."""
    if _is_sketched((*first, *second)):
        transposed = _transposed((*first, *second))
        a, b = (_one(terms, transposed).projection for terms in (first, second))
    else:
        a, b = _added(first), _added(second)
    return not np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")


def _transposed(pieces: Iterable[Piece]) -> bool:
    """Return True if the sketches among these sources are of the transposed matrix."""
    return next(s.transposed for piece in pieces if (s := piece.record.source.sketch) is not None)


def _is_sketched(pieces: Iterable[Piece]) -> bool:
    return any(piece.record.source.sketched for piece in pieces)


def replicas_of(source: TensorSource) -> int:
    """Return the number of a tensor's replicas to examine: 1 if all processes hold equal values."""
    if isinstance(source, Pieces):
        return source.replicas
    inside = source.inside
    return max(map(replicas_of, inside)) if inside else 1


def as_held(source: TensorSource, choice: int) -> TensorSource:
    """Return a tensor source that reads one chosen replica; other sources are returned unchanged."""
    if isinstance(source, Pieces):
        return replace(source, choice=choice)
    inner = source.inside
    return source.made_of([as_held(source_inside, choice) for source_inside in inner]) if inner else source


def spread(steps: Iterable[Step]) -> bool:
    """Return True if processes recorded parts of parameters."""
    return any(fact_of(step.records, _has_parts) for step in steps)


def _has_parts(records: Sequence[Record]) -> bool:
    return any(record.part is not None and _is_parameter(record) for record in records)


def shared_out(steps: Sequence[Step]) -> bool:
    """Return True if the optimizer is sharded: a single process consumes each gradient and sends the update on.

    The result is False if two processes consume the same gradient, or only one process consumes any.
    """
    if len(steps) < 2:
        return False
    gradient_sites = [{r.site for r in step.records if r.stage == "grad" and _is_parameter(r)} for step in steps]
    return sum(map(bool, gradient_sites)) > 1 and sum(map(len, gradient_sites)) == len(set().union(*gradient_sites))


def layout_of(steps: Sequence[Step]) -> Hashable:
    """Return a key of the distribution of parameters over processes, equal for steps with the same distribution."""
    alone = shared_out(steps)
    return tuple(
        sorted(
            (step.rank, record.site, record.part.offset if record.part is not None else (), record.shape)
            for step in steps
            for record in step.records
            if _is_parameter(record) and (record.part is not None or (alone and record.stage == "grad"))
        )
    )


def merge_ranks(steps: Sequence[Step]) -> list[Step]:
    """Return the step's records by process, with whole parameters in the first process and none in the others.

    Records of a sharded optimizer, which each process records for its own parameters, are merged in the same way. A
    parameter with missing parts has no record, and the first process's notes say so. Steps without parts are unchanged.
    """
    if not spread(steps) and not shared_out(steps):
        return list(steps)
    ordered = sorted(steps, key=lambda step: step.rank)
    groups: dict[_Key, list[Piece]] = {}
    for step in ordered:
        for record in step.records:
            if _is_parameter(record):
                part = record.part if record.part is not None else _replica(record)
                key = record.layer, record.stage, record.slot, record.call
                groups.setdefault(key, []).append(Piece(step.rank, record, part))
    lacking: dict[str, None] = {}
    merged: list[Record] = []
    for key, pieces in groups.items():
        tensor = _whole(pieces)
        if tensor is None:
            lacking[f"{key[0]}/{key[2]}"] = None
        else:
            merged.append(tensor)
    others = [[record for record in step.records if not _is_parameter(record)] for step in ordered]
    first, *later = (
        replace(step, records=_like(process_records, step, "others")) for step, process_records in zip(ordered, others)
    )
    records = _like(_in_order(ordered[0].records, merged), first, "united", ordered)
    notes = first.notes
    if lacking:
        named = ", ".join(list(lacking)[:_NAMED]) + (", ..." if len(lacking) > _NAMED else "")
        notes = (*notes, f"parts of {len(lacking)} parameter(s) are not recorded ({named}): they can't be put together")
    layout = layout_of(ordered)
    return [replace(step, spread=layout) for step in (replace(first, records=records, notes=notes), *later)]


def _like(records: Iterable[Record], step: Step, what: str, of: Sequence[Step] = ()) -> Sequence[Record]:
    """Return records made from a step's records, with a shared structure for steps of equal structure."""
    structures = [getattr(source_step.records, "structure", None) for source_step in of or [step]]
    return tuple(records) if None in structures else StoredRecords(records, (what, *structures))


def replicas(steps: Sequence[Step]) -> dict[str, TensorSource]:
    """Return by site a source of all processes' replicas, for parameters that each process holds whole."""
    by_site: dict[str, list[Piece]] = {}
    for step in steps:
        for record in step.records:
            if _is_parameter(record):
                by_site.setdefault(record.site, []).append(Piece(step.rank, record, _replica(record)))
    return {
        site: Pieces(same[0].record.shape, tuple(same))
        for site, same in by_site.items()
        if len(same) > 1 and all(_alike(piece.record, same[0].record) for piece in same)
    }


def _alike(first: Record, second: Record) -> bool:
    return first.shape == second.shape and first.source.sketched == second.source.sketched


def _replica(record: Record) -> Part:
    return Part(record.shape, (0,) * len(record.shape), "replica")


def _is_parameter(record: Record) -> bool:
    return record.stage in PARAMETER_STAGES and record.layer != LOOP


def _whole(pieces: Sequence[Piece]) -> Record | None:
    """Return the record of a whole tensor; `None` if the pieces do not cover the tensor."""
    shape = pieces[0].part.shape
    if any(piece.part.shape != shape for piece in pieces):
        return None
    places = {piece.place: math.prod(piece.record.shape) for piece in pieces}
    if sum(places.values()) != math.prod(shape) or _overlap(pieces, shape):
        return None
    source = Pieces(shape, tuple(pieces))
    return replace(pieces[0].record, shape=shape, source=source, part=None)


def _overlap(pieces: Sequence[Piece], shape: tuple[int, ...]) -> bool:
    """Return True if pieces at different places overlap."""
    blocks = {piece.place: piece for piece in pieces if math.prod(piece.record.shape)}
    extents = list(blocks.values())
    if any(piece.part.is_range(piece.record.shape) for piece in extents):
        ends = sorted((piece.part.offset[0], piece.part.offset[0] + piece.record.shape[0]) for piece in extents)
        return any(end > start for (_, end), (start, _) in pairwise(ends))
    # Sorted along the axis with the most parts, so that a piece is compared with its neighbours only.
    splits = [len({piece.part.offset[axis] for piece in extents}) for axis in range(len(shape))]
    axis = splits.index(max(splits)) if splits else 0
    extents.sort(key=lambda piece: piece.part.offset[axis : axis + 1])
    for number, extent in enumerate(extents):
        for later_extent in extents[number + 1 :]:
            sides = zip(extent.part.offset, extent.record.shape, later_extent.part.offset, later_extent.record.shape)
            if all(a < b + n and b < a + m for a, m, b, n in sides):
                return True
            if splits and later_extent.part.offset[axis] >= extent.part.offset[axis] + extent.record.shape[axis]:
                break
    return False


def _in_order(records: Sequence[Record], merged: Sequence[Record]) -> tuple[Record, ...]:
    """Return the first process's records, with whole tensors in place of parts.

    Tensors that the first process does not hold come at the end of their stage.
    """
    tensors_by_site = {record.site: record for record in merged}
    ordered = [tensors_by_site.pop(record.site, None) if _is_parameter(record) else record for record in records]
    result = [record for record in ordered if record is not None]
    for record in tensors_by_site.values():
        place = max((k for k, earlier in enumerate(result) if earlier.stage == record.stage), default=len(result) - 1)
        result.insert(place + 1, record)
    return tuple(replace(record, order=order) for order, record in enumerate(result))
