"""One side's step, as layers are computed again from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from padiff.compare.declared.layers import modes_of, trains
from padiff.compare.diagnose.recompute.of_layers import Call, computed
from padiff.compare.diagnose.recompute.parts import Part
from padiff.compare.diagnose.traced import Graph
from padiff.compare.judge.limits import COARSENESS, allowed, coarse
from padiff.errors import PadiffError
from padiff.model import equivalents
from padiff.records import Both, Layer, Parameter, Record, RunInfo, Step, TracedTensor, settings_at

# Elements of a layer's input or output that are computed, at most.
_MOST = 300_000
#: What a dtype's numbers are apart at 1.
_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Recorded:
    """What one side recorded of a step.

    Attributes:
        step: the step.
        info: what holds for all steps of the run.
        graph: its trace.
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
        """What the run declares in this step."""
        return settings_at(self.info.settings, self.step.settings)

    @cached_property
    def _modes(self) -> tuple[bool, frozenset[str]] | None:
        return modes_of(self.settings)

    def training(self, layer: Layer) -> bool | None:
        """Whether a layer trains; `None`: not known."""
        return None if self._modes is None else trains(layer, *self._modes)

    def off_by(self, record: Record) -> float | None:
        """What a layer's output is off by, beside the same in float64 (relative L2); `None`: it can't be computed.

        Infinite where it is no number, though what goes in is.
        """
        part = self.part(record)
        return None if part is None else off_by(part, record)

    def dtype(self, record: Record) -> str:
        """The coarsest dtype of a layer's output and of what goes in."""
        call = self.graph.of_record(record)
        inputs = [] if call is None else [self.graph.trace.tensors[one.tensor].dtype for one in call.inputs]
        known = [name for name in (coarse(one) for one in (record.dtype, *inputs)) if name in COARSENESS]
        return max(known, key=COARSENESS.index, default="float32")

    def tensor_given(self, record: Record) -> TracedTensor | None:
        """What goes into a layer's call, where that is one tensor, as is what comes out."""
        traced = self.graph.of_record(record)
        if traced is None or len(traced.inputs) != 1 or len(traced.outputs) != 1:
            return None
        return self.graph.trace.tensors[traced.inputs[0].tensor]

    def given(self, record: Record) -> np.ndarray | None:
        """Its values; `None` where they are not recorded."""
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
        """What float64 makes of what goes into a layer's call, or of a part of that; `None`: it can't be computed.

        Args:
            given: what goes in, if not what was recorded of this side.
            weights: the layer's parameters and buffers, by this side's slots; likewise.
        """
        layer, tensor = self.layers.get(record.layer), self.tensor_given(record)
        whole = self.given(record) if given is None else given
        if layer is None or tensor is None or layer.children or whole is None:
            return None
        kind, training = equivalents.kind(layer), self.training(layer)
        try:
            weights = self._of_layer(layer, whole, weights)
            if weights is None or not whole.ndim or not record.shape:
                return None
            # Of large tensors some samples are computed, or some channels where these are made of all samples.
            channels = kind.startswith("batchnorm") and whole.ndim > 1
            axis = int(channels)
            if kind != "flatten" and whole.shape[axis] != record.shape[axis]:
                return None
            count = min(whole.shape[axis], max(1, _MOST * whole.shape[axis] // max(whole.size, record_size(record), 1)))
            cut: tuple[slice, ...] = (*(slice(None),) * axis, slice(count))
            if channels:
                weights = {slot: values[:count] for slot, values in weights.items()}
            given = as_float64(whole[cut])
        except (PadiffError, ValueError, IndexError):
            return None
        if not np.isfinite(given).all():
            return None
        shape = tuple(count if k == axis else extent for k, extent in enumerate(record.shape))
        eps = _EPS.get(coarse(tensor.dtype), _EPS["float32"])
        made = computed(Call(kind, (given,), weights, layer.settings, training, shape, self.info.framework, eps))
        return None if made is None else made.cut(cut)

    def _of_layer(
        self, layer: Layer, given: np.ndarray, others: Mapping[str, np.ndarray] | None
    ) -> dict[str, np.ndarray] | None:
        """A layer's parameters by their common names; `None` where one is not known."""
        found = {}
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
            found[equivalents.slot(parameter.slot)] = values
        return found

    def _record(self, layer: Layer, parameter: Parameter) -> Record | None:
        own = self._weights.get((layer.path, parameter.slot))
        if own is None and parameter.tied_to:
            path, _, slot = parameter.tied_to.rpartition("/")
            own = self._weights.get((path, slot))
        return own


def recorded(steps: Both[Step], infos: Both[RunInfo], graphs: Both[Graph] | None = None) -> Both[Recorded]:
    """Both sides' step."""
    if graphs is None:
        graphs = steps.zip(infos).map(lambda side: Graph(side[0].trace, side[1].layers))
    return steps.zip(infos.zip(graphs)).map(lambda side: Recorded(side[0], *side[1]))


def off_by(part: Part, record: Record) -> float | None:
    """The relative L2 error of a recorded output; `None` where it is not known."""
    try:
        picked = part.pick(record.value).astype(np.float64)
        values = part.values if part.of is None else part.of(picked)
    except (PadiffError, ValueError, IndexError):
        return None  # of the output a sketch is all there is, or it is no longer there
    norm = float(np.linalg.norm(values))
    if picked.shape != values.shape or not math.isfinite(norm) or not norm:
        return None
    return float(np.linalg.norm(picked - values)) / norm if np.isfinite(picked).all() else math.inf


def record_size(record: Record) -> int:
    """How many elements a record has."""
    return math.prod(record.shape)


def rounding(dtype: str) -> float:
    """What a right implementation of a layer is off by at most."""
    return allowed(dtype, "forward")


def as_float64(values: np.ndarray) -> np.ndarray:
    """Floating numbers in float64, others as they are."""
    return values if values.dtype.kind in "iub" else values.astype(np.float64)


def _out_in(values: np.ndarray, layout: str, given: int) -> np.ndarray:
    if layout not in ("in_out", "out_in"):
        # Its class does not say; a square one is not known.
        layout = "out_in" if values.shape[1] == given else "in_out"
        if values.shape[0] == values.shape[1]:
            raise ValueError(layout)
    return values.T if layout == "in_out" else values
