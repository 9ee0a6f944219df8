"""Outputs of layers in float64, computed from what a step recorded: inputs, parameters and settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from padiff.compare.declared.layers import modes_of, trains
from padiff.compare.diagnose.computing.formula import Formula, UnknownError
from padiff.compare.diagnose.computing.layer_formulas import Called, writings
from padiff.compare.diagnose.place import graphs_of
from padiff.compare.diagnose.traced import Graph
from padiff.compare.judge.limits import COARSENESS, coarse
from padiff.errors import PadiffError
from padiff.model import equivalents
from padiff.records import Both, Layer, Parameter, Record, RunInfo, Step, TracedTensor, settings_at

# Settings without which a layer's output is not known, by the beginning of its kind.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "layernorm": ("eps",),
    "batchnorm": ("eps",),
    "instancenorm": ("eps",),
    "groupnorm": ("eps", "num_groups"),
    "leakyrelu": ("slope",),
    "avgpool": ("count_include_pad",),
}
# Kinds whose axis no setting declares: the form that fits the recorded output best is the right one.
_OPEN = frozenset({"softmax", "logsoftmax"})


@dataclass(frozen=True)
class Part:
    """The computed outputs of a call for some samples or channels.

    Attributes:
        forms: the outputs; several if the settings leave the form open.
        cut: the slices of the recorded output that they stand for.
    """

    forms: Sequence[np.ndarray]
    cut: tuple[slice, ...]

    def values(self, record: Record) -> tuple[np.ndarray, np.ndarray]:
        """Return the same elements of a recorded output, and as they were computed: in the form that fits best."""
        picked = record.value[self.cut].astype(np.float64)
        return picked, min(self.forms, key=lambda form: _distance(form, picked))


def _distance(form: np.ndarray, picked: np.ndarray) -> float:
    return float(np.linalg.norm(form - picked)) if form.shape == picked.shape else math.inf


def is_known(kind: str) -> bool:
    """Return True if this module can compute a kind of layer."""
    return next(writings(Called(kind, {}, (0,), {}, True, "")), None) is not None


def _computed(call: Called, given: np.ndarray, weights: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Return the output of a call in each form that its settings leave open; empty if it can't be computed."""
    forms = []
    for writing in writings(call):
        formula = Formula()
        nodes = {slot: formula.leaf(values) for slot, values in weights.items()}
        written = replace(call, inputs=(formula.leaf(given),), parameters=nodes)
        try:
            forms.append(formula.values[writing(formula.add, formula, written)])
        except (UnknownError, KeyError, ValueError, IndexError, TypeError):
            continue  # a weight or setting is missing, or shapes do not fit
        if call.kind not in _OPEN:
            break
    return forms


def _is_open(kind: str, weights: Mapping[str, np.ndarray], settings: Mapping[str, Any], training: bool | None) -> bool:
    """Return True if what was recorded of a call leaves open what its output is."""
    needed = next((names for start, names in _NEEDED.items() if kind.startswith(start)), ())
    if any(not isinstance(settings.get(name), (int, float)) for name in needed):
        return True
    if kind in ("layernorm", "rmsnorm"):
        return "weight" not in weights  # which shows the number of axes
    if "dropout" in kind:
        return training is not False and settings.get("p") != 0  # the dropped elements are not recorded
    if kind.startswith("instancenorm"):
        return "running_mean" in weights and not training
    return kind.startswith("batchnorm") and training is None


# Most elements of a layer's input or output to compute, and most products.
_MOST_ELEMENTS, _MOST_PRODUCTS = 300_000, 20_000_000
#: Distance of the numbers of a dtype at 1.
_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Recorded:
    """The records of one side's step.

    Attributes:
        step: the step.
        info: the information on the whole run.
        graph: the trace of the step.
    """

    step: Step
    info: RunInfo
    graph: Graph

    @cached_property
    def layers(self) -> Mapping[str, Layer]:
        return {layer.path: layer for layer in self.info.layers}

    @cached_property
    def _weights(self) -> Mapping[tuple[str, str], Record]:
        return {(r.layer, r.slot): r for r in self.step.records if r.stage == "weight"}

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """Return the settings that the run declares in this step."""
        return settings_at(self.info.settings, self.step.settings)

    @cached_property
    def _modes(self) -> tuple[bool, frozenset[str]] | None:
        return modes_of(self.settings)

    def training(self, layer: Layer) -> bool | None:
        """Return True if a layer is in training mode; `None` if unknown."""
        return None if self._modes is None else trains(layer, *self._modes)

    def dtype(self, record: Record) -> str:
        """Return the coarsest dtype among a layer's output and inputs."""
        call = self.graph.of_record(record)
        inputs = [] if call is None else [self.graph.trace.tensors[operand.tensor].dtype for operand in call.inputs]
        dtypes = [name for name in (coarse(dtype) for dtype in (record.dtype, *inputs)) if name in COARSENESS]
        return max(dtypes, key=COARSENESS.index, default="float32")

    def tensor_given(self, record: Record) -> TracedTensor | None:
        """Return the input of a layer's call that has a single input and output tensor, else `None`."""
        traced = self.graph.of_record(record)
        if traced is None or len(traced.inputs) != 1 or len(traced.outputs) != 1:
            return None
        return self.graph.trace.tensors[traced.inputs[0].tensor]

    def given(self, record: Record) -> np.ndarray | None:
        """Return the values of `tensor_given`; `None` if they are not recorded."""
        tensor = self.tensor_given(record)
        if tensor is None or tensor.source is None or tensor.source.sketched:
            return None
        try:
            values = tensor.source.read()
        except PadiffError:
            return None
        return values if values.shape == tensor.shape else None

    def part(
        self, record: Record, given: np.ndarray | None = None, weights: Mapping[str, np.ndarray] | None = None
    ) -> Part | None:
        """Return a layer's output, or a part, computed in float64; `None` if it can't be computed.

        Args:
            given: the input. Default: the recorded input of this side.
            weights: the layer's parameters and buffers, by this side's slots. Default: the recorded ones.
        """
        layer, tensor = self.layers.get(record.layer), self.tensor_given(record)
        layer_input = self.given(record) if given is None else given
        if layer is None or tensor is None or layer.children or layer_input is None:
            return None
        kind, training = equivalents.kind(layer), self.training(layer)
        try:
            weights = self._of_layer(layer, layer_input, weights)
            if weights is None or not layer_input.ndim or not record.shape:
                return None
            # Of large tensors only some samples are computed; some channels for layers that average over samples.
            channels = kind.startswith("batchnorm") and layer_input.ndim > 1
            axis = int(channels)
            if kind != "flatten" and layer_input.shape[axis] != record.shape[axis]:
                return None
            extent = layer_input.shape[axis]
            size, count = max(layer_input.size, math.prod(record.shape), 1), extent
            if size > _MOST_ELEMENTS:
                count = max(1, _MOST_ELEMENTS * extent // size)
            shape = [*record.shape]
            cut = [slice(None)] * len(shape)
            if "weight" in weights and kind.startswith(("linear", "conv")):
                # Of large products only some outputs are computed, too.
                matrix, at = weights["weight"], -1 if kind == "linear" else 1
                each = math.prod(shape) // extent * matrix.size // len(matrix)
                count = min(count, max(1, _MOST_PRODUCTS // max(each, 1)))
                outputs = max(1, len(matrix) * _MOST_PRODUCTS // max(each, 1))
                if outputs < len(matrix) and layer.settings.get("groups", 1) == 1 and "transpose" not in kind:
                    weights = {slot: values[:outputs] for slot, values in weights.items()}
                    shape[at], cut[at] = outputs, slice(outputs)
            if channels:
                weights = {slot: values[:count] for slot, values in weights.items()}
            shape[axis], cut[axis] = count, slice(count)
            given = as_float64(layer_input[(slice(None),) * axis + (slice(count),)])
        except (PadiffError, ValueError, IndexError):
            return None
        settings = dict(layer.settings)
        if kind == "rmsnorm":
            settings = {"eps": _EPS.get(coarse(tensor.dtype), _EPS["float32"]), **settings}
        if not np.isfinite(given).all() or _is_open(kind, weights, settings, training):
            return None
        call = Called(kind, settings, (), {}, True, self.info.framework, tuple(shape), training)
        forms = _computed(call, given, weights)
        return Part(forms, tuple(cut)) if forms else None

    def _of_layer(
        self, layer: Layer, given: np.ndarray, others: Mapping[str, np.ndarray] | None
    ) -> dict[str, np.ndarray] | None:
        """Return a layer's parameters by their common names; `None` if one is not recorded."""
        weights = {}
        for parameter in layer.parameters:
            if parameter.slot in equivalents.ONE_SIDED:
                continue
            if others is not None:
                values = as_float64(others[parameter.slot])
            else:
                record = self._record(layer, parameter)
                if record is None or record.source.sketched or record.shape != parameter.shape:
                    return None
                values = as_float64(record.value)
            if equivalents.kind(layer) == "linear" and values.ndim == 2:
                values = _out_in(values, equivalents.layout(layer, parameter), given.shape[-1])
            weights[equivalents.slot(parameter.slot)] = values
        return weights

    def _record(self, layer: Layer, parameter: Parameter) -> Record | None:
        record = self._weights.get((layer.path, parameter.slot))
        if record is None and parameter.tied_to:
            path, _, slot = parameter.tied_to.rpartition("/")
            record = self._weights.get((path, slot))
        return record


def recorded(steps: Both[Step], infos: Both[RunInfo], graphs: Both[Graph] | None = None) -> Both[Recorded]:
    """Return the records of both sides' step; graphs are built from the traces by default."""
    if graphs is None:
        graphs = graphs_of(steps, infos)
    return steps.zip(infos.zip(graphs)).map(lambda side: Recorded(side[0], *side[1]))


def off_by(part: Part, record: Record) -> float | None:
    """Return the relative L2 error of a recorded output against its computed part; `None` if unknown."""
    try:
        picked, values = part.values(record)
    except (PadiffError, ValueError, IndexError):
        return None  # only a sketch of the output is recorded, or its file was deleted
    norm = float(np.linalg.norm(values))
    if picked.shape != values.shape or not math.isfinite(norm) or not norm:
        return None
    return float(np.linalg.norm(picked - values)) / norm if np.isfinite(picked).all() else math.inf


def as_float64(values: np.ndarray) -> np.ndarray:
    """Return floating-point values as float64, other values unchanged."""
    return values if values.dtype.kind in "iub" else values.astype(np.float64)


def _out_in(values: np.ndarray, layout: str, inputs: int) -> np.ndarray:
    if layout not in ("in_out", "out_in"):
        # The layer's class does not tell the layout; the shape of a square matrix does not either.
        layout = "out_in" if values.shape[1] == inputs else "in_out"
        if values.shape[0] == values.shape[1]:
            raise ValueError(layout)
    return values.T if layout == "in_out" else values
