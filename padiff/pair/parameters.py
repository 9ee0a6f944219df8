"""Pairing the records of parameters, by rows where one side holds several in one tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from padiff.align import Alignment, ParameterPair, Slice, SplitPair
from padiff.align.matching.parameter_units import tie_targets, without_ones
from padiff.records import PARAMETER_STAGES, SAME, TRANSPOSED, Layer, Layout, Record, TensorSource

#: Records by layer and stage.
Index = dict[tuple[str, str], list[Record]]
#: Two records, one of which may be missing, and the view of the candidate's.
Found = list[tuple["Record | None", "Record | None", Layout]]
_Key = tuple[str, str, str, int]

_FUSED = "[query, key, value]"


class _Made(TensorSource):
    """A tensor source: what is made of others."""

    __slots__ = ()
    whole: TensorSource

    @property
    def sketched(self) -> bool:
        return self.whole.sketched


@dataclass(frozen=True, slots=True)
class _Rows(_Made):
    """Some rows of another's parameter."""

    whole: TensorSource
    part: Slice

    def read(self) -> np.ndarray:
        return self.part.take(self.whole.read())


@dataclass(frozen=True, slots=True)
class _Columns(_Made):
    """Some features of another's output."""

    whole: TensorSource
    axis: int
    part: Slice

    def read(self) -> np.ndarray:
        array = self.whole.read()
        return np.take(array, self.part.rows(array.shape[self.axis]), axis=self.axis)


@dataclass(frozen=True, slots=True)
class _Flat(_Made):
    """Another's values in another shape."""

    whole: TensorSource
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        return self.whole.read().reshape(self.shape)


@dataclass(frozen=True, slots=True)
class _Sum(TensorSource):
    """Several added up."""

    terms: tuple[TensorSource, ...]

    @property
    def sketched(self) -> bool:
        return any(term.sketched for term in self.terms)

    def read(self) -> np.ndarray:
        arrays = [term.read() for term in self.terms]
        return np.asarray(np.sum(arrays, axis=0, dtype=arrays[0].dtype))


class _Side:
    """One side's records of parameters; one that is tied to another is found as that one."""

    def __init__(self, index: Index, layers: Iterable[Layer]) -> None:
        self._records: dict[_Key, Record] = {
            (r.layer, r.stage, r.slot, r.call): r
            for (_, stage), records in index.items()
            if stage in PARAMETER_STAGES
            for r in records
        }
        self._homes = tie_targets(layers)
        self.calls = {key[3] for key in self._records}
        self.used: set[int] = set()

    def find(self, part: Slice, stage: str, call: int) -> Record | None:
        layer, slot = self._homes.get((part.layer, part.slot), (part.layer, part.slot))
        return self._records.get((layer, stage, slot, call))

    def taken_out(self, index: Index) -> None:
        for key in list(index):
            index[key] = [record for record in index[key] if id(record) not in self.used]


def pair_parameters(left: Index, right: Index, alignment: Alignment) -> Found:
    """Take the records of parameters that answer to each other out of two indexes, paired."""
    sides = _Side(left, alignment.layers.reference), _Side(right, alignment.layers.candidate)
    pairs: Found = []
    for parameters in alignment.parameters:
        for stage in PARAMETER_STAGES:
            for call in sorted(sides[0].calls | sides[1].calls):
                pairs += _pair(parameters, sides, stage, call)
    for side, index in zip(sides, (left, right)):
        side.taken_out(index)
    return pairs


def _pair(parameters: ParameterPair, sides: tuple[_Side, _Side], stage: str, call: int) -> Found:
    both = parameters.reference, parameters.candidate
    records: list[list[Record]] = []
    for side, parts in zip(sides, both):
        there = [record for part in parts if (record := side.find(part, stage, call)) is not None]
        if len(there) < len(parts):
            return []
        records.append(there)
    known = [all(id(r) in side.used for r in found) for side, found in zip(sides, records)]
    if all(known) and all(part.whole for parts in both for part in parts):
        return []  # tied on both sides: compared where they were first seen
    for side, found in zip(sides, records):
        side.used.update(id(record) for record in found)
    together = _together(both, records)
    if together is not None:
        return [] if all(known) else [together]
    if len(both[0]) == len(both[1]) == 1:
        return [_one(both[0][0], both[1][0], records[0][0], records[1][0])]
    if stage == "grad":
        # What is added up has one gradient, which each of them gets.
        return [(a, b, SAME) for a in _cut(both[0], records[0], both[1]) for b in _cut(both[1], records[1], both[0])]
    added = [_added(_cut(both[k], records[k], both[1 - k])) for k in (0, 1)]
    return [(added[0], added[1], SAME)]


def _together(
    both: tuple[Sequence[Slice], Sequence[Slice]], records: Sequence[Sequence[Record]]
) -> tuple[Record, Record, Layout] | None:
    """Query, key and value that both sides have in one, where sketches are all there is: they can't be taken apart."""
    parts = [parts[0] for parts in both]
    if not all(part.label for part in parts) or parts[0].groups != parts[1].groups:
        return None
    whole = [record[0] for record in records]
    if not all(record.source.sketched for record in whole):
        return None
    a, b = (replace(record, slot=record.slot + _FUSED) for record in whole)
    return a, b, TRANSPOSED if _turned(parts[0]) != _turned(parts[1]) else SAME


def is_fused(slot: str) -> bool:
    """Whether a slot is that of query, key and value in one, which are otherwise compared one by one."""
    return slot.endswith(_FUSED)


def _one(ours: Slice, theirs: Slice, a: Record, b: Record) -> tuple[Record, Record, Layout]:
    if without_ones(ours.size) != without_ones(theirs.size) and math.prod(ours.size) == math.prod(theirs.size):
        # A convolution over patches and the linear layer that it is, a picture and its places.
        return _as(ours, a, ours.size), _as(theirs, b, ours.size), SAME
    if ours.whole and theirs.whole:
        return a, b, TRANSPOSED if _turned(ours) != _turned(theirs) else SAME
    return _cut([ours], [a], [theirs])[0], _cut([theirs], [b], [ours])[0], SAME


def _as(part: Slice, record: Record, shape: tuple[int, ...]) -> Record:
    """A parameter in the shape of its partner."""
    return replace(record, shape=shape, source=_Flat(_Rows(record.source, part), shape))


def _turned(part: Slice) -> bool:
    return part.layout == "in_out"


def _cut(parts: Sequence[Slice], records: Sequence[Record], others: Sequence[Slice]) -> list[Record]:
    """Records of rows, named by the layer on the other side that they answer to."""
    cut = []
    for part, record in zip(parts, records):
        slot = record.slot if part.whole else f"{record.slot}[{part.label or _short(others[0])}]"
        cut.append(replace(record, slot=slot, shape=part.size, source=_Rows(record.source, part)))
    return cut


def _short(part: Slice) -> str:
    name = part.layer.rpartition(".")[2]
    return f"{name}.{part.slot}[{part.rows_text}]" if not part.whole else name


def _added(records: Sequence[Record]) -> Record:
    if len(records) == 1:
        return records[0]
    source = _Sum(tuple(record.source for record in records))
    return replace(records[0], slot=" + ".join(record.slot for record in records), source=source)


def pair_split_outputs(split: SplitPair, parameters: Sequence[ParameterPair], left: Index, right: Index) -> Found:
    """Compare a fused layer's output, and its gradient, with those of the layers that are its parts."""
    turned = len(split.candidate) == 1
    whole, several = (split.candidate[0], split.reference) if turned else (split.reference[0], split.candidate)
    index, others = (right, left) if turned else (left, right)
    pieces = _pieces(whole, several, parameters, turned)
    if len(pieces) < len(several):
        return []
    pairs: Found = []
    for stage in ("forward", "backward"):
        kept = []
        for record in index.get((whole.path, stage), []):
            parts = [_same_call(others.get((layer.path, stage), []), record) for layer in several]
            axis = _feature_axis(record, parts, [pieces[layer.path] for layer in several])
            if axis is None:
                kept.append(record)
                continue
            for layer, other in zip(several, parts):
                assert other is not None
                part = pieces[layer.path]
                shape = (*record.shape[:axis], part.size[0], *record.shape[axis + 1 :])
                slot = f"{record.slot}[{layer.path.rpartition('.')[2]}]"
                piece = replace(record, slot=slot, shape=shape, source=_Columns(record.source, axis, part))
                pairs.append((other, piece, SAME) if turned else (piece, other, SAME))
                others[layer.path, stage] = [r for r in others[layer.path, stage] if r is not other]
        if (whole.path, stage) in index:
            index[whole.path, stage] = kept
    return pairs


def _pieces(
    whole: Layer, several: Sequence[Layer], parameters: Sequence[ParameterPair], turned: bool
) -> Mapping[str, Slice]:
    """For each of the several layers, its part of the whole's weight."""
    pieces: dict[str, Slice] = {}
    paths = {layer.path for layer in several}
    for pair in parameters:
        if len(pair.reference) == len(pair.candidate) == 1:
            one, other = (pair.candidate[0], pair.reference[0]) if turned else (pair.reference[0], pair.candidate[0])
            if one.layer == whole.path and not one.whole and other.layer in paths:
                pieces.setdefault(other.layer, one)
    return pieces


def _same_call(records: Sequence[Record], record: Record) -> Record | None:
    return next((r for r in records if (r.slot, r.call) == (record.slot, record.call)), None)


def _feature_axis(record: Record, parts: Sequence[Record | None], pieces: Sequence[Slice]) -> int | None:
    """The axis along which the parts' outputs lie beside each other in the whole's."""
    rows = sum(piece.size[0] for piece in pieces)
    for axis in dict.fromkeys((len(record.shape) - 1, 1)):
        if (
            0 <= axis < len(record.shape)
            and record.shape[axis] == rows
            and all(
                part is not None and part.shape == (*record.shape[:axis], piece.size[0], *record.shape[axis + 1 :])
                for part, piece in zip(parts, pieces)
            )
        ):
            return axis
    return None
