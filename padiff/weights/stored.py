"""Recorded weights and optimizer state that a training can start from: of a run, or of weight files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from padiff.align.matching.parameter_units import Shape, as_out_in, tie_targets
from padiff.dump import open_run
from padiff.dump.store import as_local, run_folder
from padiff.dump.weight_files import holds_weights, open_weights
from padiff.errors import UsageError
from padiff.frameworks.settings import FRAMEWORKS
from padiff.model import equivalents
from padiff.model.selection import Node
from padiff.pair.merge_ranks import merge_ranks
from padiff.records import (
    ROOT,
    Layer,
    OptimizerState,
    Parameter,
    ParameterState,
    Rate,
    Run,
    RunInfo,
    Step,
    TensorSource,
    settings_at,
)
from padiff.records.traces import Pack
from padiff.system.terminal import first_few


class StoredModel:
    """A recorded model with the lookups of a `LiveModel`.

    Args:
        info: the run's info with the layer tree.
        weights: tensors by layer path and slot; a tied tensor stands under its first path.
        label: source of the model, for messages.
        step: number of the recorded step; `None` for files.
    """

    def __init__(
        self, info: RunInfo, weights: Mapping[tuple[str, str], TensorSource], label: str, step: int | None = None
    ) -> None:
        self.info, self.label, self.step = info, label, step
        self.weights = weights
        self._homes = tie_targets(info.layers)
        self._layers = {layer.path: layer for layer in info.layers}

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Return an empty tuple: a recorded model has no layer objects."""
        return ()

    def source(self, path: str, slot: str) -> TensorSource | None:
        """Return the source of a parameter's or buffer's values; `None` if they were not recorded."""
        return self.weights.get(self._homes.get((path, slot), (path, slot)))

    def value(self, path: str, slot: str) -> np.ndarray:
        """Return the values of a parameter or buffer.

        Raises:
            KeyError: the values were not recorded.
        """
        source = self.source(path, slot)
        if source is None:
            raise KeyError(f"{path}/{slot}")
        return source.read()

    def below(self, path: str) -> list[Layer]:
        """Return the layer at a path and all layers below it."""
        return [x for x in self.info.layers if x.path == path or path == ROOT or x.path.startswith(f"{path}.")]

    def layer(self, path: str) -> StoredLayer:
        """Return a stand-in for the layer at a path, an object of a class with the recorded class name."""
        layer = self._layers[path]
        stand_in: StoredLayer = type(layer.type, (StoredLayer,), {})(self, layer)
        return stand_in

    def with_values(self, weights: Mapping[tuple[str, str], TensorSource]) -> StoredModel:
        """Return the same model with other values."""
        return StoredModel(self.info, weights, self.label, self.step)


class StoredTensor(np.ndarray):
    """A recorded tensor: an array with the methods that rules use to read torch and paddle tensors."""

    def detach(self) -> StoredTensor:
        return self

    def cpu(self) -> StoredTensor:
        return self

    def clone(self) -> StoredTensor:
        return self.copy()

    def numpy(self) -> np.ndarray:
        return np.array(self)

    def t(self) -> StoredTensor:
        return self.T

    def chunk(self, chunks: int, dim: int = 0) -> list[StoredTensor]:
        return [part.view(StoredTensor) for part in np.array_split(self, chunks, axis=dim)]


class StoredLayer:
    """Stand-in for a recorded layer in a rule of the user: tensors, sublayers and settings are attributes."""

    def __init__(self, model: StoredModel, layer: Layer) -> None:
        self._padiff = model, layer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_padiff":
            raise AttributeError(name)
        model, layer = self._padiff
        if any(p.slot == name for p in layer.parameters):
            return model.value(layer.path, name).view(StoredTensor)
        path = name if layer.path == ROOT else f"{layer.path}.{name}"
        if any(each.path == path for each in model.info.layers):
            return model.layer(path)
        if name in layer.settings:
            return layer.settings[name]
        raise AttributeError(
            f"{layer.path} is a recorded {layer.type}, of which there are its tensors "
            f"({', '.join(p.slot for p in layer.parameters) or 'none'}), its layers and its settings; no {name!r}"
        )

    def __getitem__(self, key: object) -> Any:
        return getattr(self, str(key))

    def named_parameters(self) -> Iterator[tuple[str, StoredTensor]]:
        """Yield all tensors of this layer and the layers below, with dotted names."""
        model, root = self._padiff
        for layer in model.below(root.path):
            inner = layer.path if root.path == ROOT else layer.path[len(root.path) + 1 :]
            for p in layer.parameters:
                name = p.slot if layer.path in (root.path, ROOT) else f"{inner}.{p.slot}"
                yield name, model.value(layer.path, p.slot).view(StoredTensor)

    def state_dict(self) -> dict[str, StoredTensor]:
        """Return all tensors of this layer and the layers below, by dotted name."""
        return dict(self.named_parameters())


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


# Number of nearby steps that are searched for weights, and number of items that a message names.
_LOOKED_AT, _NAMED = 64, 6

_Weights = Mapping[tuple[str, str], TensorSource]


class Stored:
    """A recorded step, or weight files, opened for reading.

    Attributes:
        model: layer tree and weights.
        step: number of the step; `None` for files.
        label: name for messages.
        optimizers: state of each optimizer before the step; `None` if not known.
        why_not: reason why the optimizers' state is not known, and what to do about it.
        recorded: the step's records; `None` for files, and for packs without records.
        training: True if the step ran in training mode.
        pack: the step's replay pack, if there is one.
    """

    def __init__(
        self,
        model: StoredModel,
        label: str,
        optimizers: tuple[OptimizerState, ...] | None,
        why_not: str = "",
        recorded: Step | None = None,
        training: bool = True,
        pack: Pack | None = None,
    ) -> None:
        self.model, self.label, self.step = model, label, model.step
        self.optimizers, self.why_not = optimizers, why_not
        self.recorded, self.training, self.pack = recorded, training, pack

    def draws(self, layers: Iterable[Layer]) -> bool:
        """Return True if the step ran in training mode, and its layers or the given ones contain dropout."""
        return self.training and any(map(_drops, (*self.model.info.layers, *layers)))


def open_stored(
    path: Any, step: int | None = None, framework: str | None = None, beside: RunInfo | None = None
) -> Stored:
    """Open a recorded step or weight files.

    Args:
        path: a run folder, or a file or folder of safetensors.
        step: number of a recorded step. Default: the first one.
        framework: framework of weight files that do not name one.
        beside: the model to be started; its layers resolve what the names of tensors in files leave open.

    Raises:
        RunFolderError: the path can't be read.
        UsageError: the step has no weights; the message names steps that have them.
    """
    folder = run_folder(path, "start_from")
    if framework is not None and framework not in FRAMEWORKS:
        raise UsageError(f"framework is one of {', '.join(map(repr, FRAMEWORKS))}, got {framework!r}")
    local = as_local(folder)
    if local is not None and holds_weights(local):
        if step is not None:
            raise UsageError(f"{folder} holds weights, not steps: step={step} can't be meant")
        return _of_files(local.absolute(), framework, beside)
    return stored_step(open_run(folder), step, str(path))


def _drops(layer: Layer) -> bool:
    rates = [layer.settings.get("dropout"), layer.settings.get("p") if "drop" in layer.kind else None]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


# -- files ---------------------------------------------------------------------------------------------------------


def _of_files(path: Path, framework: str | None, beside: RunInfo | None) -> Stored:
    files = open_weights(path)
    name = framework or files.framework
    if not name:
        raise UsageError(
            f"{path} does not say whether its weights are of torch or of paddle, and the matrices of their linear "
            "layers lie the other way round: give framework='torch' or framework='paddle'"
        )
    layers, names = tree_of(files.tensors, name, beside.layers if beside is not None else ())
    info = RunInfo(name, "", layers, name=path.name)
    weights = {site: files.tensors[tensor] for site, tensor in names.items()}
    why_not = f"{path} holds weights alone, and no optimizer's state"
    return Stored(StoredModel(info, weights, str(path)), str(path), None, why_not)


# -- runs ----------------------------------------------------------------------------------------------------------


def stored_step(run: Any, step: int | None, label: str) -> Stored:
    """Open a recorded step of an open run, like `open_stored`.

    Raises:
        UsageError: the run lacks the step, or its weights.
    """
    numbers = sorted({*run.numbers(), *run.packs})
    if not numbers:
        raise UsageError(f"{label} holds no step yet")
    number = numbers[0] if step is None else step
    if number not in numbers:
        raise UsageError(
            f"{label} has no step {number}: recorded are {first_few(numbers, _NAMED)}; the nearest is "
            f"{min(numbers, key=lambda other: abs(other - number))}"
        )
    pack = run.packs.get(number)
    recorded: Step | None = merge_ranks(run.steps(number))[0] if number in run.numbers() else None
    weights = _weights(pack, recorded)
    info: RunInfo = run.info
    lacking = _lacking(info, weights)
    if lacking:
        raise UsageError(_without(run, numbers, number, label, info, weights, lacking))
    info = _with_kept(info, weights)
    optimizers, why_not = _optimizers(run, pack, number, label)
    settings = settings_at(run.info.settings, recorded.settings) if recorded is not None else {}
    training = bool(settings.get("training", True))
    return Stored(StoredModel(info, weights, label, number), label, optimizers, why_not, recorded, training, pack)


def _weights(pack: Pack | None, step: Step | None) -> _Weights:
    weights: dict[tuple[str, str], TensorSource] = {}
    if step is not None:
        records = (r for r in step.records if r.stage == "weight" and r.call == 0 and not r.source.sketched)
        weights = {(record.layer, record.slot): record.source for record in records}
    return weights | dict(pack.weights) if pack is not None else weights


def _lacking(info: RunInfo, weights: _Weights) -> list[str]:
    """Return the parameters whose values are not in `weights`."""
    homes = tie_targets(info.layers)
    return [
        f"{layer.path}/{p.slot}"
        for layer in info.layers
        for p in layer.parameters
        if p.role == "parameter" and homes.get((layer.path, p.slot), (layer.path, p.slot)) not in weights
    ]


def _with_kept(info: RunInfo, weights: _Weights) -> RunInfo:
    """Return the run's info without its layer map, and without buffers whose values were not recorded.

    The layer map was made for another pair of runs.
    """
    layers = tuple(
        replace(
            layer,
            parameters=tuple(
                p for p in layer.parameters if p.role == "parameter" or p.tied_to or (layer.path, p.slot) in weights
            ),
        )
        for layer in info.layers
    )
    return replace(info, layers=layers, layer_map=())


def _without(
    run: Any, numbers: list[int], number: int, label: str, info: RunInfo, weights: _Weights, lacking: list[str]
) -> str:
    """Return the error text for a step whose weights are missing or incomplete."""
    step = merge_ranks(run.steps(number))[0] if number in run.numbers() else None
    sketched = {
        f"{r.layer}/{r.slot}"
        for r in (step.records if step is not None else ())
        if r.stage == "weight" and r.source.sketched
    }
    if sketched.intersection(lacking):
        what = f"of step {number} {label} keeps sketches of the weights, not their values"
        what += "" if not weights else f" (of {first_few([name for name in lacking if name in sketched], _NAMED)})"
    else:
        what = (
            f"step {number} of {label} has no weights of {first_few(lacking, _NAMED)}: they were left out by the lists"
        )
    near = sorted((n for n in numbers if n != number), key=lambda neighbour: abs(neighbour - number))[:_LOOKED_AT]
    for neighbour in near:
        pack = run.packs.get(neighbour)
        recorded = run.steps(neighbour)[0] if neighbour in run.numbers() else None
        if not _lacking(info, _weights(pack, recorded)):
            return f"{what}. The nearest step that has them is {neighbour}: give step={neighbour}"
    return (
        f"{what}, and no step near it does. Record the run with full_every_n_steps=N (values in every Nth step), with "
        "detail='full', or with replay_every_n_steps=N (packs)"
    )


def _optimizers(run: Any, pack: Pack | None, number: int, label: str) -> tuple[tuple[OptimizerState, ...] | None, str]:
    if pack is not None and pack.optimizers:
        return pack.optimizers, ""
    if pack is None and number == 0:
        # Before its first step an optimizer has settings, and no state.
        declared = declared_optimizers(run)
        if declared:
            return declared, ""
        return None, f"{label} does not record its optimizer's settings: record it with optimizer=..."
    with_state = [n for n in run.packs if run.packs[n].optimizers]
    near = min(with_state, key=lambda other: abs(other - number), default=None)
    return None, (
        f"{label} keeps no optimizer's state of step {number}"
        + (f"; the nearest step that has it is {near}: give step={near}" if near is not None else "")
        + ("" if near is not None else ": record it with replay_every_n_steps=N and optimizer=..., or start without")
    )


def declared_optimizers(run: Run) -> tuple[OptimizerState, ...]:
    """Return the initial states of a run's optimizers: rules and learning rates as declared, no moments."""
    settings, optimizers = run.info.settings, []
    for number in range(len(settings)):
        prefix = f"optimizer.{number}"
        if f"{prefix}.rule" not in settings:
            break
        rates = []
        for group in range(len(settings)):
            group_prefix = f"{prefix}.group.{group}"
            if f"{group_prefix}.parameters" not in settings:
                break
            value, sites = settings.get(f"{group_prefix}.lr"), settings[f"{group_prefix}.parameters"]
            if isinstance(value, (int, float)) and isinstance(sites, (list, tuple)):
                factor = settings.get(f"{group_prefix}.lr_factor", 1.0)
                rates.append(Rate(float(value) * float(factor), tuple(map(str, sites))))
        nothing: dict[str, ParameterState] = {}
        optimizers.append(OptimizerState(str(settings[f"{prefix}.rule"]), nothing, tuple(rates)))
    return tuple(optimizers)
