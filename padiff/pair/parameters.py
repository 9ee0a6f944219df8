"""Pairing of parameter records, by rows if one side fuses several parameters into one tensor."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from padiff.align import Alignment, ParameterPair, Slice, SplitPair
from padiff.align.matching.parameter_units import tie_targets, without_ones
from padiff.records import PARAMETER_STAGES, SAME, TRANSPOSED, Both, Layer, Layout, Record, TensorSource

#: Records by layer and stage.
Index = dict[tuple[str, str], list[Record]]
#: Stage and call.
_When = tuple[str, int]

_FUSED = "[query, key, value]"


@dataclass(frozen=True, slots=True)
class RecordPair(Both["Record | None"]):
    """Two paired records, one of which may be missing, and the layout of the candidate's record."""

    layout: Layout = SAME


def alone(records: Both[Iterable[Record]]) -> list[RecordPair]:
    """Return pairs with one side for records without a partner."""
    return [RecordPair(a, None) for a in records.reference] + [RecordPair(None, b) for b in records.candidate]


class DerivedSource(TensorSource):
    """Tensor source computed from another source."""

    __slots__ = ()
    whole: TensorSource

    @property
    def sketched(self) -> bool:
        return self.whole.sketched

    @property
    def inside(self) -> Sequence[TensorSource]:
        return (self.whole,)

    def made_of(self, inside: Sequence[TensorSource]) -> TensorSource:
        return replace(self, whole=inside[0])  # type: ignore[type-var]


@dataclass(frozen=True, slots=True)
class _Rows(DerivedSource):
    """Tensor source of some rows of another source's parameter."""

    whole: TensorSource
    slice_: Slice

    def read(self) -> np.ndarray:
        return self.slice_.read(self.whole.read())


@dataclass(frozen=True, slots=True)
class _Columns(DerivedSource):
    """Tensor source of some features of another source's output."""

    whole: TensorSource
    axis: int
    slice_: Slice

    def read(self) -> np.ndarray:
        array = self.whole.read()
        return np.take(array, self.slice_.rows(array.shape[self.axis]), axis=self.axis)


@dataclass(frozen=True, slots=True)
class _Flat(DerivedSource):
    """Tensor source of another source's values in another shape."""

    whole: TensorSource
    shape: tuple[int, ...]

    def read(self) -> np.ndarray:
        return self.whole.read().reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Sum(TensorSource):
    """Tensor source of the sum of several sources of one shape."""

    terms: tuple[TensorSource, ...]

    @property
    def sketched(self) -> bool:
        return any(term.sketched for term in self.terms)

    @property
    def inside(self) -> Sequence[TensorSource]:
        return self.terms

    def made_of(self, inside: Sequence[TensorSource]) -> TensorSource:
        return replace(self, terms=tuple(inside))

    def read(self) -> np.ndarray:
        arrays = [term.read() for term in self.terms]
        return np.asarray(np.sum(arrays, axis=0, dtype=arrays[0].dtype))


class _Side:
    """Parameter records of one side; a tied parameter is found under its target."""

    def __init__(self, index: Index, layers: Iterable[Layer]) -> None:
        self._records: dict[tuple[str, str], dict[_When, Record]] = defaultdict(dict)
        for (_, stage), records in index.items():
            if stage in PARAMETER_STAGES:
                for record in records:
                    self._records[record.layer, record.slot][stage, record.call] = record
        self._homes = tie_targets(layers)
        self.used: set[int] = set()

    def records(self, slice_: Slice) -> dict[_When, Record]:
        """Return the records of a parameter, by stage and call."""
        key = slice_.layer, slice_.slot
        return self._records.get(self._homes.get(key, key), _NONE)


_NONE: dict[_When, Record] = {}


def pair_parameters(indexes: Both[Index], alignment: Alignment) -> list[RecordPair]:
    """Remove the records of paired parameters from two indexes, and return their pairs."""
    sides = indexes.zip(alignment.layers).map(lambda side: _Side(*side))
    pairs: list[RecordPair] = []
    for parameters in alignment.parameters:
        layout = whole_layout(parameters)
        if layout is not None:
            pairs += _pair_whole(parameters, layout, sides)
        else:
            pairs += _pair_rows(parameters, sides)
    for side, index in zip(sides, indexes):
        for key, records in index.items():
            if key[1] in PARAMETER_STAGES:
                index[key] = [record for record in records if id(record) not in side.used]
    return pairs


def _pair_whole(parameters: ParameterPair, layout: Layout, sides: Both[_Side]) -> Iterator[RecordPair]:
    """Yield the pairs of two whole parameters."""
    others = sides.candidate.records(parameters.candidate[0])
    used, others_used = sides.reference.used, sides.candidate.used
    for when, record in sides.reference.records(parameters.reference[0]).items():
        partner = others.get(when)
        if partner is None or (id(record) in used and id(partner) in others_used):
            continue  # tied on both sides: compared at their first site
        used.add(id(record))
        others_used.add(id(partner))
        yield RecordPair(record, partner, layout)


def whole_layout(parameters: ParameterPair) -> Layout | None:
    """Return the layout between two whole parameters of one shape that are not fused; `None` for others."""
    if not len(parameters.reference) == len(parameters.candidate) == 1:
        return None
    slices = Both(parameters.reference[0], parameters.candidate[0])
    if not (slices.reference.whole and slices.candidate.whole) or all(slice_.label for slice_ in slices):
        return None
    return _layout(slices) if slices.reference.result_shape == slices.candidate.result_shape else None


def _pair_rows(parameters: ParameterPair, sides: Both[_Side]) -> Iterator[RecordPair]:
    """Yield the pairs of parameters that are fused, or differ in shape from their partners."""
    records_by_side = Both(
        [sides.reference.records(slice_) for slice_ in parameters.reference],
        [sides.candidate.records(slice_) for slice_ in parameters.candidate],
    )
    for when in records_by_side.reference[0]:
        if all(when in by_time for side in records_by_side for by_time in side):
            records = Both(
                [by_time[when] for by_time in records_by_side.reference],
                [by_time[when] for by_time in records_by_side.candidate],
            )
            yield from _pair(parameters, sides, records, when[0])


def _pair(parameters: ParameterPair, sides: Both[_Side], records: Both[list[Record]], stage: str) -> list[RecordPair]:
    all_used = all(id(record) in side.used for side, side_records in zip(sides, records) for record in side_records)
    if all_used and all(slice_.whole for slices in parameters for slice_ in slices):
        return []  # tied on both sides: compared at their first site
    for side, side_records in zip(sides, records):
        side.used.update([id(record) for record in side_records])
    if len(parameters.reference) == len(parameters.candidate) == 1:
        pair = (
            Both(parameters.reference[0], parameters.candidate[0]),
            Both(records.reference[0], records.candidate[0]),
        )
        fused = _fused(*pair)
        if fused is not None:
            return [] if all_used else [fused]
        unsliced = _unsliced(*pair)
        if unsliced is not None:
            return [unsliced]
    sliced = Both(*map(_sliced, parameters, records, parameters.swapped()))
    if stage == "grad":
        # The terms of a sum all have the same gradient.
        return [RecordPair(a, b) for a, b in product(*sliced)]
    return [RecordPair(*sliced.map(_added))]


def _fused(slices: Both[Slice], records: Both[Record]) -> RecordPair | None:
    """Return the pair of a query, key and value that both sides fuse and record as sketches, which can't be split."""
    labelled = all(slice_.label for slice_ in slices) and slices.reference.groups == slices.candidate.groups
    if not labelled or not all(record.source.sketched for record in records):
        return None
    a, b = (replace(record, slot=record.slot + _FUSED) for record in records)
    return RecordPair(a, b, _layout(slices))


def is_fused(slot: str) -> bool:
    """Return True if a slot holds query, key and value in one, which are otherwise compared one by one."""
    return slot.endswith(_FUSED)


def _unsliced(slices: Both[Slice], records: Both[Record]) -> RecordPair | None:
    """Return the pair of two parameters with all their rows, or in different shapes; `None` for rows."""
    shape, candidate_size = slices.reference.result_shape, slices.candidate.result_shape
    if without_ones(shape) != without_ones(candidate_size) and math.prod(shape) == math.prod(candidate_size):
        # A convolution over patches and an equivalent linear layer, or an image and its positions in a row.
        sources = (_Flat(_Rows(record.source, slice_), shape) for record, slice_ in zip(records, slices))
        a, b = (replace(record, shape=shape, source=source) for record, source in zip(records, sources))
        return RecordPair(a, b)
    if slices.reference.whole and slices.candidate.whole:
        return RecordPair(records.reference, records.candidate, _layout(slices))
    return None


def _layout(slices: Both[Slice]) -> Layout:
    return SAME if (slices.reference.layout == "in_out") == (slices.candidate.layout == "in_out") else TRANSPOSED


def _sliced(slices: Sequence[Slice], records: Sequence[Record], others: Sequence[Slice]) -> list[Record]:
    """Return records of rows, named after their partner layer on the other side."""
    result = []
    for slice_, record in zip(slices, records):
        element = "" if slice_.element is None else f"[{slice_.element}]"
        slot = record.slot if slice_.whole else f"{record.slot}{element}[{slice_.label or _short(others[0])}]"
        result.append(replace(record, slot=slot, shape=slice_.result_shape, source=_Rows(record.source, slice_)))
    return result


def _short(slice_: Slice) -> str:
    name = slice_.layer.rpartition(".")[2]
    return f"{name}.{slice_.slot}[{slice_.rows_text}]" if not slice_.whole else name


def _added(records: Sequence[Record]) -> Record:
    if len(records) == 1:
        return records[0]
    source = Sum(tuple(record.source for record in records))
    return replace(records[0], slot=" + ".join(record.slot for record in records), source=source)


def pair_split_outputs(split: SplitPair, parameters: Sequence[ParameterPair], indexes: Both[Index]) -> list[RecordPair]:
    """Pair a fused layer's output, and its gradient, with the outputs of the layers that are its parts."""
    swapped = len(split.candidate) == 1
    (fused,), parts = split.swapped() if swapped else split
    index, others = indexes.swapped() if swapped else indexes
    slices = _slices(fused, parts, parameters, swapped)
    if len(slices) < len(parts):
        return []
    pairs: list[RecordPair] = []
    for stage in ("forward", "backward"):
        unpaired = []
        for record in index.get((fused.path, stage), []):
            outputs = [_same_call(others.get((layer.path, stage), []), record) for layer in parts]
            axis = _feature_axis(record, outputs, [slices[layer.path] for layer in parts])
            if axis is None:
                unpaired.append(record)
                continue
            for layer, output in zip(parts, outputs):
                slice_ = slices[layer.path]
                shape = (*record.shape[:axis], slice_.result_shape[0], *record.shape[axis + 1 :])
                slot = f"{record.slot}[{layer.path.rpartition('.')[2]}]"
                columns = replace(record, slot=slot, shape=shape, source=_Columns(record.source, axis, slice_))
                pairs.append(RecordPair(output, columns) if swapped else RecordPair(columns, output))
                others[layer.path, stage] = [r for r in others[layer.path, stage] if r is not output]
        if (fused.path, stage) in index:
            index[fused.path, stage] = unpaired
    return pairs


def _slices(
    fused_layer: Layer, parts: Sequence[Layer], parameters: Sequence[ParameterPair], swapped: bool
) -> Mapping[str, Slice]:
    """Return the rows of the fused weight that belong to each part."""
    by_path: dict[str, Slice] = {}
    paths = {layer.path for layer in parts}
    for pair in parameters:
        if len(pair.reference) == len(pair.candidate) == 1:
            (slice_,), (part_slice,) = pair.swapped() if swapped else pair
            if slice_.layer == fused_layer.path and not slice_.whole and part_slice.layer in paths:
                by_path.setdefault(part_slice.layer, slice_)
    return by_path


def _same_call(records: Sequence[Record], record: Record) -> Record | None:
    return next((r for r in records if (r.slot, r.call) == (record.slot, record.call)), None)


def _feature_axis(record: Record, outputs: Sequence[Record | None], slices: Sequence[Slice]) -> int | None:
    """Return the axis along which the parts' outputs are concatenated in the fused output."""
    rows = sum(slice_.result_shape[0] for slice_ in slices)
    for axis in dict.fromkeys((len(record.shape) - 1, 1)):
        if (
            0 <= axis < len(record.shape)
            and record.shape[axis] == rows
            and all(
                output is not None
                and output.shape == (*record.shape[:axis], slice_.result_shape[0], *record.shape[axis + 1 :])
                for output, slice_ in zip(outputs, slices)
            )
        ):
            return axis
    return None
