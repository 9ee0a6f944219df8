"""Parameters that processes hold parts of, as whole ones: shards side by side, replicas one, terms added up."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from padiff.errors import SketchOnlyError
from padiff.records import LOOP, PARAMETER_STAGES, Record, Step, TensorSource
from padiff.records.parts import PARTIAL, Part
from padiff.records.structured import Structured, fact_of
from padiff.sketches.parts import Own, own_of, whole_sketch
from padiff.sketches.sketch import Sketch, sketch_of_sample

# How many parameters a note names.
_NAMED = 3
_Key = tuple[str, str, str, int]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one process recorded of a tensor.

    Attributes:
        rank: of the process.
        record: its record.
        part: which part of the tensor it is.
    """

    rank: int
    record: Record
    part: Part

    @property
    def place(self) -> tuple[Hashable, ...]:
        """Equal for those that hold the same elements."""
        return self.part.offset, self.record.shape

    def within(self, whole: np.ndarray) -> np.ndarray:
        """The elements of a whole tensor that the piece holds."""
        if self.part.is_range(self.record.shape):
            start = self.part.offset[0]
            return whole.reshape(-1)[start : start + self.record.shape[0]]
        index = tuple(slice(start, start + n) for start, n in zip(self.part.offset, self.record.shape))
        return whole[index]


@dataclass(frozen=True, slots=True, eq=False)
class Pieces(TensorSource):
    """A tensor source: a tensor of which processes hold parts, put together when it is read.

    Attributes:
        shape: of the whole.
        pieces: each place of the whole is held by at least one.
        choice: which replica of each part is taken.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    choice: int = 0

    @property
    def replicas(self) -> int:
        """How many replicas there are of a part, if any of them differs from the first one; else one."""
        found = [_copies(group) for group in self._places()]
        if not any(_differ(copies[0], other) for copies in found for other in copies[1:]):
            return 1
        return max(map(len, found))

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
        whole: np.ndarray = np.empty(self.shape, np.result_type(*(each.dtype for each in values)))
        for group, each in zip(groups, values):
            group[0].within(whole)[...] = each
        return whole

    def _places(self) -> list[list[Piece]]:
        groups: dict[Hashable, list[Piece]] = defaultdict(list)
        for piece in self.pieces:
            if math.prod(piece.record.shape) or not math.prod(self.shape):
                groups[piece.place].append(piece)
        return list(groups.values())


def _own(piece: Piece, transposed: bool) -> Own:
    return own_of(piece.part.shape, piece.part.offset, piece.record.shape, transposed)


def _sketch(piece: Piece, transposed: bool) -> Sketch:
    """A piece's sketch; made now, where this process kept all of it and others did not."""
    kept = piece.record.source.sketch
    if kept is not None:
        return kept
    own = _own(piece, transposed)
    taken = np.zeros(own.length, piece.record.source.read().dtype)
    taken[own.places] = piece.record.source.read().reshape(-1)[own.elements]
    made = sketch_of_sample(taken, piece.part.size, transposed)
    there = taken[own.places].astype(np.float64)
    there = there[np.isfinite(there)]
    extremes = (float(there.min()), float(there.max())) if there.size else (0.0, 0.0)
    return replace(made, minimum=extremes[0], maximum=extremes[1])


def _partial(pieces: Iterable[Piece]) -> bool:
    return any(piece.part.kind == PARTIAL for piece in pieces)


def _copies(group: Sequence[Piece]) -> list[list[Piece]]:
    """Pieces of one place, those whose sum is what stands there together."""
    if not _partial(group):
        return [[piece] for piece in group]
    copies: dict[int, list[Piece]] = defaultdict(list)
    for piece in group:
        copies[piece.part.copy].append(piece)
    return list(copies.values())


def _added(terms: Sequence[Piece]) -> np.ndarray:
    """What stands at one place, as one of the replicas has it: terms added up."""
    arrays = [piece.record.source.read() for piece in terms]
    return arrays[0] if len(arrays) == 1 else np.asarray(np.sum(arrays, axis=0, dtype=arrays[0].dtype))


def _one(terms: Sequence[Piece], transposed: bool) -> Sketch:
    """`_added`, of sketches."""
    sketches = [_sketch(piece, transposed) for piece in terms]
    if len(sketches) == 1:
        return sketches[0]
    return replace(sketches[0], projection=np.sum([sketch.projection for sketch in sketches], axis=0))


def _differ(one: Sequence[Piece], other: Sequence[Piece]) -> bool:
    """Whether two replicas differ, in a bit."""
    if _is_sketched((*one, *other)):
        transposed = _transposed((*one, *other))
        a, b = (_one(terms, transposed).projection for terms in (one, other))
    else:
        a, b = _added(one), _added(other)
    return not np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")


def _transposed(pieces: Iterable[Piece]) -> bool:
    """Whether the sketches among these are of the transposed matrix."""
    return next(s.transposed for piece in pieces if (s := piece.record.source.sketch) is not None)


def _is_sketched(pieces: Iterable[Piece]) -> bool:
    return any(piece.record.source.sketched for piece in pieces)


def replicas_of(source: TensorSource) -> int:
    """How many replicas a tensor has that are to be looked at: one, where all processes hold the same."""
    if isinstance(source, Pieces):
        return source.replicas
    inside = source.inside
    return max(map(replicas_of, inside)) if inside else 1


def as_held(source: TensorSource, choice: int) -> TensorSource:
    """A tensor as one of its replicas has it; any other one itself."""
    if isinstance(source, Pieces):
        return replace(source, choice=choice)
    inner = source.inside
    return source.made_of([as_held(one, choice) for one in inner]) if inner else source


def spread(steps: Iterable[Step]) -> bool:
    """Whether processes recorded parts of parameters."""
    return any(fact_of(step.records, _has_parts) for step in steps)


def _has_parts(records: Sequence[Record]) -> bool:
    return any(record.part is not None and _is_parameter(record) for record in records)


def shared_out(steps: Sequence[Step]) -> bool:
    """Whether the optimizer is shared out: each gradient is consumed by one process alone, which sends the others what
    it made of the parameter. Of a gradient that only some of the processes lack, this is not so.
    """
    if len(steps) < 2:
        return False
    own = [{r.site for r in step.records if r.stage == "grad" and _is_parameter(r)} for step in steps]
    return sum(map(bool, own)) > 1 and sum(map(len, own)) == len(set().union(*own))


def layout_of(steps: Sequence[Step]) -> Hashable:
    """How parameters are spread over processes; equal for steps whose parameters lie alike."""
    alone = shared_out(steps)
    return tuple(
        sorted(
            (step.rank, record.site, record.part.offset if record.part is not None else (), record.shape)
            for step in steps
            for record in step.records
            if _is_parameter(record) and (record.part is not None or (alone and record.stage == "grad"))
        )
    )


def united(steps: Sequence[Step]) -> list[Step]:
    """A step's processes, each parameter whole and with the first of them; the others have none.

    So are those of an optimizer that is shared out, of which each process records its own.

    What can't be put together, as parts are missing, has no record, and the first process's notes say so. Steps without
    parts are as they were.
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
    made: list[Record] = []
    for key, pieces in groups.items():
        whole = _whole(pieces)
        if whole is None:
            lacking[f"{key[0]}/{key[2]}"] = None
        else:
            made.append(whole)
    others = [[record for record in step.records if not _is_parameter(record)] for step in ordered]
    first, *rest = (replace(step, records=_like(own, step, "others")) for step, own in zip(ordered, others))
    records = _like(_in_order(ordered[0].records, made), first, "united", ordered)
    notes = first.notes
    if lacking:
        named = ", ".join(list(lacking)[:_NAMED]) + (", ..." if len(lacking) > _NAMED else "")
        notes = (*notes, f"parts of {len(lacking)} parameter(s) are not recorded ({named}): they can't be put together")
    layout = layout_of(ordered)
    return [replace(step, spread=layout) for step in (replace(first, records=records, notes=notes), *rest)]


def _like(records: Iterable[Record], step: Step, what: str, of: Sequence[Step] = ()) -> Sequence[Record]:
    """Records that are made of a step's, which are alike where the steps are that they are made of."""
    structures = [getattr(one.records, "structure", None) for one in of or [step]]
    return tuple(records) if None in structures else Structured(records, (what, *structures))


def replicas(steps: Sequence[Step]) -> dict[str, TensorSource]:
    """By site, what all processes hold of the parameters that each of them has whole."""
    found: dict[str, list[Piece]] = {}
    for step in steps:
        for record in step.records:
            if _is_parameter(record):
                found.setdefault(record.site, []).append(Piece(step.rank, record, _replica(record)))
    return {
        site: Pieces(same[0].record.shape, tuple(same))
        for site, same in found.items()
        if len(same) > 1 and all(_alike(one.record, same[0].record) for one in same)
    }


def _alike(one: Record, other: Record) -> bool:
    return one.shape == other.shape and one.source.sketched == other.source.sketched


def _replica(record: Record) -> Part:
    return Part(record.shape, (0,) * len(record.shape), "replica")


def _is_parameter(record: Record) -> bool:
    return record.stage in PARAMETER_STAGES and record.layer != LOOP


def _whole(pieces: Sequence[Piece]) -> Record | None:
    """The record of a whole tensor; `None` where the pieces do not make it up."""
    shape = pieces[0].part.shape
    if any(piece.part.shape != shape for piece in pieces):
        return None
    places = {piece.place: math.prod(piece.record.shape) for piece in pieces}
    if sum(places.values()) != math.prod(shape) or _overlap(pieces, shape):
        return None
    source = Pieces(shape, tuple(pieces))
    return replace(pieces[0].record, shape=shape, source=source, part=None)


def _overlap(pieces: Sequence[Piece], shape: tuple[int, ...]) -> bool:
    """Whether pieces at different places hold an element in common, some of them leave some out, or reach outside."""
    blocks = {piece.place: piece for piece in pieces if math.prod(piece.record.shape)}
    found = list(blocks.values())
    if any(piece.part.is_range(piece.record.shape) for piece in found):
        ends = sorted((piece.part.offset[0], piece.part.offset[0] + piece.record.shape[0]) for piece in found)
        return any(end > start for (_, end), (start, _) in pairwise(ends))
    # In their order along the axis that splits most, so that a piece is held against its neighbours alone.
    splits = [len({piece.part.offset[axis] for piece in found}) for axis in range(len(shape))]
    axis = splits.index(max(splits)) if splits else 0
    found.sort(key=lambda piece: piece.part.offset[axis : axis + 1])
    for number, one in enumerate(found):
        for other in found[number + 1 :]:
            sides = zip(one.part.offset, one.record.shape, other.part.offset, other.record.shape)
            if all(a < b + n and b < a + m for a, m, b, n in sides):
                return True
            if splits and other.part.offset[axis] >= one.part.offset[axis] + one.record.shape[axis]:
                break
    return False


def _in_order(records: Sequence[Record], made: Sequence[Record]) -> tuple[Record, ...]:
    """The first process's records, with whole tensors where parts stood; what it holds nothing of comes at the end of
    its stage.
    """
    whole = {record.site: record for record in made}
    found = [whole.pop(record.site, None) if _is_parameter(record) else record for record in records]
    kept = [record for record in found if record is not None]
    for record in whole.values():
        place = max((k for k, other in enumerate(kept) if other.stage == record.stage), default=len(kept) - 1)
        kept.insert(place + 1, record)
    return tuple(replace(record, order=order) for order, record in enumerate(kept))
