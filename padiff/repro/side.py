"""One side's step, as scripts are written of it."""

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

# Lines of a script, after which a tensor that was not kept is no longer computed.
_MOST = 200


@dataclass(frozen=True)
class Side(Recorded):
    """What one side recorded of the first diff's step.

    Attributes:
        name: ``reference`` or ``candidate``.
    """

    name: str

    @cached_property
    def gradients(self) -> Mapping[int, Record]:
        """The recorded gradients of tensors, by their numbers in the trace."""
        found: dict[int, Record] = {}
        for record in self.step.records:
            if record.stage == "backward" and not record.source.sketched:
                tensor = self.graph.tensor_of(record)
                if tensor is not None:
                    found.setdefault(tensor, record)
        return found

    def case(self, what: str) -> Case:
        """A script of this side to be filled."""
        language_of(self.info.framework)
        return Case(self.info.framework, what)

    def under_autocast(self, case: Case) -> Case:
        """The case, computed under the autocast that the run says it calls its model in."""
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
        """A recorded parameter or buffer.

        Raises:
            CannotWriteError: it has no record.
        """
        path, _, slot = site.rpartition("/")
        found = self._weights.get((path, slot))
        if found is None:
            own = (
                next((p for p in self.layers[path].parameters if p.slot == slot), None) if path in self.layers else None
            )
            tied = own.tied_to.rpartition("/") if own is not None and own.tied_to else None
            found = self._weights.get((tied[0], tied[2])) if tied is not None else None
        if found is None:
            raise CannotWriteError(f"{site} of the {self.name} was not recorded in step {self.step.number}")
        return found


class Chain:
    """Writes calls of a trace, one line each.

    Args:
        side: whose.
        case: what is written into.
        learns: whether parameters learn, as they do where a gradient is computed along with them.
        window: calls whose tensors are computed, also where they were recorded.
    """

    def __init__(self, side: Side, case: Case, learns: bool = False, window: Sequence[TracedCall] = ()) -> None:
        self._side, self._case, self._learns = side, case, learns
        self._window = {id(call) for call in window}
        #: Variables of tensors that are computed, and that are given, by number; and of parameters by site.
        self.made: dict[int, str] = {}
        self.given: dict[int, str] = {}
        self.parameters: dict[str, str] = {}

    def tensor(self, number: int, wish: str = "x") -> str:
        """The variable of a tensor: as it was recorded, or, where the window has it or only a sketch was kept, as the
        lines before compute it.
        """
        if number in self.made:
            return self.made[number]
        if number not in self.given:
            traced = self._side.graph.trace.tensors[number]
            producer = self._side.graph.producers.get(number)
            kept = traced.source is not None and not traced.source.sketched
            if producer is not None and (id(producer) in self._window or not kept) and len(self._case.lines) < _MOST:
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
        """The variable of a parameter or buffer."""
        if site not in self.parameters:
            record = self._side.weight(site)
            name = self._case.give(site, record.source, record.dtype, f"{site} of the {self._side.name}")
            self.parameters[site] = name
            path, _, slot = site.rpartition("/")
            layer = self._side.layers.get(path)
            owned_ = next((p for p in layer.parameters if p.slot == slot), None) if layer is not None else None
            if self._learns and owned_ is not None and owned_.role == "parameter" and owned_.trainable:
                self._case.learns.append(name)
        return self.parameters[site]

    def write(self, call: TracedCall, keep: Collection[int] = ()) -> None:
        """Write a call.

        Args:
            keep: of what it gives, tensors that the lines after it do not use: they use what was recorded.

        Raises:
            CannotWriteError: it is not known here how.
        """
        given = {operand.tensor for operand in call.inputs}
        outputs = [operand.tensor for operand in call.outputs]
        if outputs and all(tensor in given for tensor in outputs):
            return  # handed on
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
        wanted = owned(layer)
        tensors = {
            equivalents.slot(p.slot): self.parameter(f"{layer.path}/{p.slot}")
            for p in layer.parameters
            if equivalents.slot(p.slot) in wanted
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
            found = softmax_axis(np.exp(values) if equivalents.kind(layer) == "logsoftmax" else values)
            if found is not None:
                return found
        raise CannotWriteError(
            f"the axis of `{layer.path}` ({layer.type}) is not recorded, and its output does not tell it"
        )


def calls_in_order(graph: Graph, calls: Sequence[TracedCall]) -> list[TracedCall]:
    """Calls in the order of the trace, each once."""
    places = {id(call): graph.places[id(call)] for call in calls}
    return [call for call in graph.trace.calls if id(call) in places]


def _named(call: TracedCall) -> str:
    return f"{call.function}() in `{call.layer}`" if call.function else f"`{call.layer}`"
