"""Parameters that one framework packs into one tensor and the other keeps in layers of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from padiff import equivalents
from padiff.align.layers import LayerPair
from padiff.records import PARAMETER_STAGES, ROOT, Layer, Record, TensorSource

#: Records by layer and stage.
Index = dict[tuple[str, str], list[Record]]

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_PACKED = ("in_proj_weight", "in_proj_bias")


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor source: one of so many equal parts of another's rows."""

    whole: TensorSource
    part: int
    parts: int

    def read(self) -> np.ndarray:
        return np.split(self.whole.read(), self.parts)[self.part]


@dataclass(frozen=True, slots=True)
class _Transposed:
    """A tensor source: another's matrix, transposed."""

    matrix: TensorSource

    def read(self) -> np.ndarray:
        return self.matrix.read().T


def take_apart(layers: LayerPair, left: Index, right: Index) -> None:
    """Bring two attentions of different layout into one form: projections, as parameters of the attention itself.

    torch has the three matrices below each other in ``in_proj_weight``, each (out, in), or ``q_proj_weight`` and so on;
    paddle has layers ``q_proj``, ``k_proj`` and ``v_proj``, with (in, out).
    """
    ours, theirs = layers.reference, layers.candidate
    composite = equivalents.kind(ours) in equivalents.COMPOSITE and equivalents.kind(theirs) in equivalents.COMPOSITE
    if not composite or {p.slot for p in ours.parameters} == {p.slot for p in theirs.parameters}:
        return
    for layer, index in ((ours, left), (theirs, right)):
        for stage in PARAMETER_STAGES:
            found = [part for record in index.pop((layer.path, stage), []) for part in _parts(record)]
            for name in _PROJECTIONS:
                inside = index.pop((name if layer.path == ROOT else f"{layer.path}.{name}", stage), [])
                found += [_as_own(record, layer, name) for record in inside]
            if found:
                index[layer.path, stage] = found


def _parts(record: Record) -> Iterator[Record]:
    if record.slot in _PACKED:
        kind = record.slot.removeprefix("in_proj_")
        shape = (record.shape[0] // 3, *record.shape[1:])
        for position, name in enumerate(_PROJECTIONS):
            yield replace(record, slot=f"{name}.{kind}", shape=shape, source=_Part(record.source, position, 3))
    elif record.slot.removesuffix("_weight") in _PROJECTIONS:
        yield replace(record, slot=f"{record.slot.removesuffix('_weight')}.weight")
    else:
        yield record


def _as_own(record: Record, layer: Layer, name: str) -> Record:
    own = replace(record, layer=layer.path, layer_type=layer.type, slot=f"{name}.{record.slot}")
    if record.slot != "weight":
        return own
    # Only paddle has these as layers, and its matrices are (in, out).
    return replace(own, shape=record.shape[::-1], source=_Transposed(record.source))
