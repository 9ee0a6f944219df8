"""Construction of a layer tree from the names and shapes of tensors in a weight file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from padiff.align.matching.parameter_units import Shape, as_out_in
from padiff.frameworks.conventions import FRAMEWORKS
from padiff.model import equivalents
from padiff.records import ROOT, Layer, Parameter, TensorSource

_NUMBER = re.compile(r"(\d+)")
# Last names of a path that indicate an embedding table, and last names that indicate a linear layer.
_LOOKED_UP = re.compile(r"(?:^|_)(?:emb\w*|wte|wpe|lookup|shared|tok\w*|relative_attention_bias)$|embeddings?$", re.I)
_MULTIPLIED = re.compile(r"(?:out|head|proj|linear|fc|dense)\d*$", re.I)
# Slot of a recurrent layer's matrix over its state.
# No literal: Python keeps one object of each, and pickles of models would share the name with another parameter's.
_HIDDEN = re.compile("weight_hh(_l[0])?")
# Kind of a recurrent layer by the rows of its matrix per element of its state.
_RECURRENT = {1: "simplernn", 3: "gru", 4: "lstm"}


def tree_of(
    tensors: Mapping[str, TensorSource], framework: str, beside: Sequence[Layer] = ()
) -> tuple[tuple[Layer, ...], dict[tuple[str, str], str]]:
    """Return the layers that dotted tensor names imply, and each tensor's name by path and slot.

    The layers are in the order of the names, with digits compared as numbers (files sort names as text). The kind of a
    layer and the layout of its matrix are inferred from shapes, from names, and from the other model.

    Args:
        framework: framework of the weights.
        beside: layers of the model that will receive the weights.
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
    shapes = {path: {slot: _shape(tensors[name]) for slot, name in pairs} for path, pairs in owned.items()}
    kinds, ties = _Kinds(shapes, framework, beside), _ties(tensors)
    layers = tuple(
        _layer(path, owned.get(path, ()), tensors, children[path], kinds, ties) for path in _depth_first(paths)
    )
    return layers, {(path, slot): name for path, pairs in owned.items() for slot, name in pairs}


def _ties(tensors: Mapping[str, TensorSource]) -> dict[str, str]:
    """Return the site of the earlier equal matrix for each repeated one: tied parameters may be saved twice."""
    groups: dict[tuple[Shape, bytes], list[tuple[str, np.ndarray]]] = {}
    ties: dict[str, str] = {}
    for name in sorted(tensors, key=_natural):
        if len(_shape(tensors[name])) != 2:
            continue
        array = tensors[name].read()
        first = np.ascontiguousarray(array[:1])
        if not array.size or ((first == first[0, 0]).all() and (array == array[0, 0]).all()):
            continue  # constant, as after initialisation: equality proves nothing
        alike = groups.setdefault((array.shape, first.tobytes()), [])
        home = next((earlier for earlier, values in alike if np.array_equal(values, array)), None)
        if home is None:
            alike.append((name, array))
        else:
            path, _, slot = home.rpartition(".")
            ties[name] = f"{path or ROOT}/{slot}"
    return ties


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


def _layer(
    path: str,
    owned: Iterable[tuple[str, str]],
    tensors: Mapping[str, TensorSource],
    children: int,
    kinds: _Kinds,
    ties: Mapping[str, str],
) -> Layer:
    parameters = tuple(
        Parameter(
            slot,
            _shape(tensors[name]),
            _dtype(tensors[name]),
            role=_role(slot, _dtype(tensors[name])),
            layout=kinds.layout(path) if slot == "weight" else "",
            tied_to=ties.get(name, ""),
        )
        for slot, name in owned
    )
    kind = kinds.kind_of(path)
    name = "weights" if path == ROOT else kind or "layer"
    return Layer(path, name, kind, parameters, children=children)


def _shape(source: TensorSource) -> tuple[int, ...]:
    return tuple(source.shape)  # type: ignore[attr-defined]


def _dtype(source: TensorSource) -> str:
    return str(source.dtype)  # type: ignore[attr-defined]


def _role(slot: str, dtype: str) -> str:
    learned = dtype.startswith(("float", "bfloat", "complex"))
    return "parameter" if learned and equivalents.slot(slot) not in equivalents.STATISTICS else "buffer"


class _Kinds:
    """Kinds and matrix layouts of layers, inferred from the tensors that they own.

    Args:
        shapes: shapes of tensors, by path and slot.
        framework: framework of the weights.
        beside: layers of the other model.
    """

    def __init__(self, shapes: Mapping[str, Mapping[str, Shape]], framework: str, beside: Sequence[Layer]) -> None:
        self._shapes, self._usual = shapes, FRAMEWORKS[framework].layout
        matrices = [
            (equivalents.common_kind(layer.kind) == "embedding", as_out_in(p.shape, p.layout))
            for layer in beside
            for p in layer.parameters
            if len(p.shape) == 2
        ]
        self._tables = {shape for looked_up, shape in matrices if looked_up}
        self._matrices = {shape for looked_up, shape in matrices if not looked_up}
        # A layout that biases reveal is assumed for square matrices of layers with the same last name.
        self._by_name: dict[str, Counter[str]] = {}
        for path, slot_shapes in shapes.items():
            layout = _by_bias(slot_shapes)
            if layout:
                self._by_name.setdefault(_last(path), Counter())[layout] += 1
        layouts = {layout for counts in self._by_name.values() for layout in counts}
        self._else = layouts.pop() if len(layouts) == 1 else self._usual

    def kind_of(self, path: str) -> str:
        """Return the common kind of the layer at a path, or an empty text if unknown."""
        slot_shapes = self._shapes.get(path, {})
        slots = {equivalents.slot(slot) for slot in slot_shapes}
        weight = next((shape for slot, shape in slot_shapes.items() if equivalents.slot(slot) == "weight"), ())
        recurrent = [
            match for match in map(_HIDDEN.fullmatch, slot_shapes) if match and len(slot_shapes[match[0]]) == 2
        ]
        if recurrent:
            rows, state = slot_shapes[recurrent[0][0]]
            kind = _RECURRENT.get(rows // max(state, 1), "")
            return f"{kind}cell" if kind and not recurrent[0][1] else kind
        if "in_proj_weight" in slots:
            return "multiheadattention"
        if "running_mean" in slots:
            return "batchnorm2d"
        if len(weight) in (3, 4, 5):
            return f"conv{len(weight) - 2}d"
        if len(weight) == 1:
            return "norm"
        if len(weight) != 2 or "weight" not in slot_shapes:
            return ""
        return "embedding" if "bias" not in slots and self._looked_up(path, weight) else "linear"

    def _looked_up(self, path: str, shape: Shape) -> bool:
        if shape in self._tables and as_out_in(shape, self._usual) not in self._matrices:
            return True
        name = _last(path)
        return bool(_LOOKED_UP.search(name)) and not _MULTIPLIED.search(name)

    def layout(self, path: str) -> str:
        """Return the layout of the matrix ``weight``; empty if there is no matrix, or if it is an embedding table."""
        if self.kind_of(path) != "linear":
            return ""
        layout = self._by_name.get(_last(path))
        return _by_bias(self._shapes[path]) or (layout.most_common(1)[0][0] if layout else self._else)


def _by_bias(shapes: Mapping[str, Shape]) -> str:
    """Return a matrix's layout (``out_in`` or ``in_out``) if the length of its bias reveals the outputs, else empty."""
    weight, bias = shapes.get("weight", ()), shapes.get("bias", ())
    if len(weight) != 2 or len(bias) != 1 or weight[0] == weight[1] or bias[0] not in weight:
        return ""
    return "out_in" if bias[0] == weight[0] else "in_out"


def _last(path: str) -> str:
    """Return the last name in a path that is not a number."""
    return next((part for part in reversed(path.split(".")) if not part.isdecimal()), "")
