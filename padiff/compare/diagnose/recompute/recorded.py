"""A recorded step of one side, with recomputation of its layers' outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from padiff.compare.declared.layers import modes_of, trains
from padiff.compare.diagnose.recompute.of_layers import Call, computed
from padiff.compare.diagnose.recompute.partial_outputs import Part
from padiff.compare.diagnose.traced import Graph
from padiff.compare.judge.limits import COARSENESS, allowed, coarse
from padiff.errors import PadiffError
from padiff.model import equivalents
from padiff.records import Both, Layer, Parameter, Record, RunInfo, Step, TracedTensor, settings_at

# Most elements of a layer's input or output to compute.
_MOST = 300_000
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

    def off_by(self, record: Record) -> float | None:
        """Return the relative L2 error of a layer's output against float64; `None` if it can't be computed.

        Infinite if the output is not finite, though the input is.
        """
        part = self.part(record)
        return None if part is None else off_by(part, record)

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
            count = min(
                layer_input.shape[axis],
                max(1, _MOST * layer_input.shape[axis] // max(layer_input.size, record_size(record), 1)),
            )
            cut: tuple[slice, ...] = (*(slice(None),) * axis, slice(count))
            if channels:
                weights = {slot: values[:count] for slot, values in weights.items()}
            given = as_float64(layer_input[cut])
        except (PadiffError, ValueError, IndexError):
            return None
        if not np.isfinite(given).all():
            return None
        shape = tuple(count if k == axis else extent for k, extent in enumerate(record.shape))
        eps = _EPS.get(coarse(tensor.dtype), _EPS["float32"])
        result = computed(Call(kind, (given,), weights, layer.settings, training, shape, self.info.framework, eps))
        return None if result is None else result.cut(cut)

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
        graphs = steps.zip(infos).map(lambda side: Graph(side[0].trace, side[1].layers))
    return steps.zip(infos.zip(graphs)).map(lambda side: Recorded(side[0], *side[1]))


def off_by(part: Part, record: Record) -> float | None:
    """Return the relative L2 error of a recorded output against its computed part; `None` if unknown."""
    try:
        picked = part.pick(record.value).astype(np.float64)
        values = part.values if part.of is None else part.of(picked)
    except (PadiffError, ValueError, IndexError):
        return None  # only a sketch of the output is recorded, or its file was deleted
    norm = float(np.linalg.norm(values))
    if picked.shape != values.shape or not math.isfinite(norm) or not norm:
        return None
    return float(np.linalg.norm(picked - values)) / norm if np.isfinite(picked).all() else math.inf


def record_size(record: Record) -> int:
    """Return the count of elements of a record."""
    return math.prod(record.shape)


def rounding(dtype: str) -> float:
    """Return the largest relative error of a correct implementation of a layer."""
    return allowed(dtype, "forward")


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
