"""A layer tree from the names of tensors alone: what a file of weights has in the place of one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from padiff.model import equivalents
from padiff.records import ROOT, Layer, Parameter, TensorSource

_NUMBER = re.compile(r"(\d+)")
# The last word of a path that says that a matrix is looked up, row by row.
_LOOKED_UP = re.compile(r"(?:^|_)(?:emb\w*|wte|wpe|lookup|shared|tok\w*|relative_attention_bias)$|embeddings?$", re.I)
# Rows of a recurrent layer's matrix for each number of its state.
_RECURRENT = {1: "simplernn", 3: "gru", 4: "lstm"}


def tree_of(tensors: Mapping[str, TensorSource]) -> tuple[tuple[Layer, ...], dict[tuple[str, str], str]]:
    """The layers that dotted names tell of, and each tensor's name by path and slot.

    Order is that of the names, with numbers as numbers: files sort them as text. What kind a layer is, is said as far
    as shapes and names tell; how a matrix lies is left to the alignment, but of a table that rows are taken from.
    """
    owned: dict[str, list[tuple[str, str]]] = {}
    for name in sorted(tensors, key=_natural):
        path, _, slot = name.rpartition(".")
        owned.setdefault(path or ROOT, []).append((slot, name))
    paths = list(dict.fromkeys(above for path in owned for above in _with_above(path)))
    children = dict.fromkeys(paths, 0)
    for path in paths:
        if path != ROOT:
            children[path.rpartition(".")[0] or ROOT] += 1
    layers = tuple(_layer(path, owned.get(path, ()), tensors, children[path]) for path in _depth_first(paths))
    return layers, {(path, slot): name for path, pairs in owned.items() for slot, name in pairs}


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(name)]


def _with_above(path: str) -> Iterable[str]:
    yield ROOT
    if path != ROOT:
        parts = path.split(".")
        yield from (".".join(parts[:k]) for k in range(1, len(parts) + 1))


def _depth_first(paths: list[str]) -> list[str]:
    return [
        ROOT,
        *sorted((path for path in paths if path != ROOT), key=lambda p: [_natural(part) for part in p.split(".")]),
    ]


def _layer(path: str, owned: Iterable[tuple[str, str]], tensors: Mapping[str, TensorSource], children: int) -> Layer:
    slots = {slot: tensors[name] for slot, name in owned}
    parameters = tuple(
        Parameter(slot, _shape(source), _dtype(source), role=_role(slot, _dtype(source)))
        for slot, source in slots.items()
    )
    kind = _kind(path, {slot: _shape(source) for slot, source in slots.items()})
    return Layer(path, kind or "layer", kind, parameters, children=children)


def _shape(source: TensorSource) -> tuple[int, ...]:
    return tuple(source.shape)  # type: ignore[attr-defined]


def _dtype(source: TensorSource) -> str:
    return str(source.dtype)  # type: ignore[attr-defined]


def _role(slot: str, dtype: str) -> str:
    learned = dtype.startswith(("float", "bfloat", "complex"))
    return "parameter" if learned and equivalents.slot(slot) not in equivalents.STATISTICS else "buffer"


def _kind(path: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The common kind, as far as what a layer owns tells it; else empty."""
    slots = {equivalents.slot(slot) for slot in shapes}
    weight = next((shape for slot, shape in shapes.items() if equivalents.slot(slot) == "weight"), ())
    for slot in ("weight_hh_l0", "weight_hh"):
        if len(shapes.get(slot, ())) == 2:
            rows, state = shapes[slot]
            kind = _RECURRENT.get(rows // max(state, 1), "")
            return f"{kind}cell" if kind and slot == "weight_hh" else kind
    if "in_proj_weight" in slots:
        return "multiheadattention"
    if "running_mean" in slots:
        return "batchnorm2d"
    if len(weight) in (3, 4, 5):
        return f"conv{len(weight) - 2}d"
    if len(weight) == 1:
        return "norm"
    looked_up = len(weight) == 2 and "bias" not in slots and _LOOKED_UP.search(path.rpartition(".")[2])
    return "embedding" if looked_up else ""
