"""One side of a step, and the code lines of its calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from padiff.compare.diagnose.recompute.recorded import Recorded
from padiff.compare.diagnose.traced import Graph
from padiff.model import equivalents
from padiff.records import Layer, Record, TracedCall
from padiff.repro.case import CannotWriteError, Case, comment
from padiff.repro.expressions import function_text, is_writable, language_of, layer_text, owned, softmax_axis

# Number of lines after which a script no longer recomputes tensors that were not recorded.
_MOST = 200


@dataclass(frozen=True)
class Side(Recorded):
    """The records of one side in the step of the first diff.

    Attributes:
        name: ``reference`` or ``candidate``.
    """

    name: str

    @cached_property
    def gradients(self) -> Mapping[int, Record]:
        """Return the recorded gradients of tensors, by their numbers in the trace."""
        gradients: dict[int, Record] = {}
        for record in self.step.records:
            if record.stage == "backward" and not record.source.sketched:
                tensor = self.graph.tensor_of(record)
                if tensor is not None:
                    gradients.setdefault(tensor, record)
        return gradients

    def case(self, what: str) -> Case:
        """Return an empty case of this side.

        Raises:
            CannotWriteError: scripts of the framework are not supported.
        """
        language_of(self.info.framework)
        return Case(self.info.framework, what)

    def under_autocast(self, case: Case) -> Case:
        """Set the autocast of a case to the one that the run recorded, and return the case."""
        about = self.info.environment
        dtype, level = about.get("autocast.dtype", "off"), about.get("autocast.level", "O1")
        if dtype in ("float16", "bfloat16"):
            device = "cpu" if about.get("device.kind") == "cpu" else "cuda"
            case.autocast = str(dtype), "O2" if level == "O2" else "O1", device
            case.remarks.append(
                f"It is computed under autocast ({dtype}), as in the run; of its lists nothing is known."
            )
        return case

    def weight(self, site: str) -> Record:
        """Return the record of a parameter or buffer; a tied parameter may be recorded under its other name.

        Raises:
            CannotWriteError: the step has no record of it.
        """
        path, _, slot = site.rpartition("/")
        record = self._weights.get((path, slot))
        if record is None:
            parameter = (
                next((p for p in self.layers[path].parameters if p.slot == slot), None) if path in self.layers else None
            )
            tied = parameter.tied_to.rpartition("/") if parameter is not None and parameter.tied_to else None
            record = self._weights.get((tied[0], tied[2])) if tied is not None else None
        if record is None:
            raise CannotWriteError(f"{site} of the {self.name} was not recorded in step {self.step.number}")
        return record


class Chain:
    """Writer of a trace's calls into a case, one line each.

    Args:
        side: the side of the trace.
        case: the case, which gets the lines and inputs.
        learns: parameters require a gradient.
        window: calls whose outputs are computed even if they were recorded.
    """

    def __init__(self, side: Side, case: Case, learns: bool = False, window: Sequence[TracedCall] = ()) -> None:
        self._side, self._case, self._learns = side, case, learns
        self._window = {id(call) for call in window}
        #: Variables of computed tensors and of input tensors, by number; and of parameters, by site.
        self.made: dict[int, str] = {}
        self.given: dict[int, str] = {}
        self.parameters: dict[str, str] = {}

    def tensor(self, number: int, wish: str = "x") -> str:
        """Return the variable of a tensor, which is an input, or is computed by earlier lines.

        It is computed if its call is in the window, or its full values were not recorded.

        Raises:
            CannotWriteError: the tensor was not recorded and can't be computed.
        """
        if number in self.made:
            return self.made[number]
        if number not in self.given:
            traced = self._side.graph.trace.tensors[number]
            producer = self._side.graph.producers.get(number)
            is_recorded = traced.source is not None and not traced.source.sketched
            if (
                producer is not None
                and (id(producer) in self._window or not is_recorded)
                and len(self._case.lines) < _MOST
            ):
                self.write(producer)
                return self.made[number]
            if producer is None:
                what, wish = f"a tensor of the {self._side.name} that nothing recorded gave", wish
            else:
                what = f"what {_named(producer)} of the {self._side.name} gave"
                wish = producer.function or producer.layer
            self.given[number] = self._case.give(wish, traced.source, traced.dtype, what)
        return self.given[number]

    def parameter(self, site: str) -> str:
        """Return the variable of a parameter or buffer."""
        if site not in self.parameters:
            record = self._side.weight(site)
            name = self._case.give(site, record.source, record.dtype, f"{site} of the {self._side.name}")
            self.parameters[site] = name
            path, _, slot = site.rpartition("/")
            layer = self._side.layers.get(path)
            parameter = next((p for p in layer.parameters if p.slot == slot), None) if layer is not None else None
            if self._learns and parameter is not None and parameter.role == "parameter" and parameter.trainable:
                self._case.learns.append(name)
        return self.parameters[site]

    def write(self, call: TracedCall, keep: Collection[int] = ()) -> None:
        """Add the line of a call.

        Args:
            call: the call.
            keep: outputs for which later lines use the recorded values, not the computed ones.

        Raises:
            CannotWriteError: the call can't be written as a line.
        """
        inputs = {operand.tensor for operand in call.inputs}
        outputs = [operand.tensor for operand in call.outputs]
        if outputs and all(tensor in inputs for tensor in outputs):
            return  # the call returns its inputs
        text = self._function(call) if call.function else self._layer(call)
        names = []
        for number in outputs:
            name = f"t{number}"
            names.append(name)
            if number not in keep:
                self.made[number] = name
        what = call.function if call.function else f"{call.layer} ({call.layer_type})"
        self._case.lines.append(f"{', '.join(names)} = {text}  # {comment(what)}")

    def _function(self, call: TracedCall) -> str:
        operands = {operand.slot: self.tensor(operand.tensor) for operand in call.inputs}
        parameters = [self.parameter(site) for site in call.parameters]
        dtype = self._side.graph.trace.tensors[call.outputs[0].tensor].dtype
        return function_text(self._side.info.framework, call, operands, parameters, dtype)

    def _layer(self, call: TracedCall) -> str:
        side = self._side
        layer = side.layers.get(call.layer)
        if layer is None or not is_writable(layer) or len(call.inputs) != 1 or len(call.outputs) != 1:
            raise CannotWriteError(
                f"`{call.layer}` ({call.layer_type}) of the {side.name} is not a known layer as a "
                "function's call, and no functions that its code calls are in this step. Of code that is not the "
                "framework's own they are heard in the first recorded step: record so that this step is that one "
                f"(every_n_steps=padiff.Schedule(every=1, first={side.step.number}))"
            )
        slots = owned(layer)
        tensors = {
            equivalents.slot(p.slot): self.parameter(f"{layer.path}/{p.slot}")
            for p in layer.parameters
            if equivalents.slot(p.slot) in slots
        }
        output = side.graph.trace.tensors[call.outputs[0].tensor]
        axis = None
        if equivalents.kind(layer) in ("softmax", "logsoftmax"):
            axis = self._axis(call, layer)
        return layer_text(
            side.info.framework,
            layer,
            self.tensor(call.inputs[0].tensor),
            tensors,
            side.training(layer),
            output.shape,
            axis,
        )

    def _axis(self, call: TracedCall, layer: Layer) -> int:
        source = self._side.graph.trace.tensors[call.outputs[0].tensor].source
        if source is not None and not source.sketched:
            values = source.read()
            axis = softmax_axis(np.exp(values) if equivalents.kind(layer) == "logsoftmax" else values)
            if axis is not None:
                return axis
        raise CannotWriteError(
            f"the axis of `{layer.path}` ({layer.type}) is not recorded, and its output does not tell it"
        )


def calls_in_order(graph: Graph, calls: Sequence[TracedCall]) -> list[TracedCall]:
    """Return calls in the order of the trace, without duplicates."""
    places = {id(call): graph.places[id(call)] for call in calls}
    return [call for call in graph.trace.calls if id(call) in places]


def _named(call: TracedCall) -> str:
    return f"{call.function}() in `{call.layer}`" if call.function else f"`{call.layer}`"
