"""Writer of formulas: a tensor of a trace, computed from recorded tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from padiff.compare.diagnose.computing.call_formulas import written
from padiff.compare.diagnose.computing.formula import CONSTANT, MADE, Formula, KnownInputs, UnknownError, placed
from padiff.compare.diagnose.computing.layer_formulas import Called, formula_lies_out_first, writings
from padiff.compare.diagnose.computing.operations import OPERATIONS
from padiff.compare.diagnose.traced import Graph
from padiff.compare.judge.limits import ROUNDING, coarse
from padiff.frameworks.catalog import GRAD
from padiff.model import equivalents
from padiff.records import Layer, RunInfo, Step, TracedCall

# The largest relative error of a computed call. If the error is larger, the function is not the assumed one. Chosen:
# the rounding of a chain of float32 operations is a thousandth of it.
_AGREES = 1e-3
# Functions whose arguments a trace may keep in part.
_INDEXED = frozenset({"getitem", "setitem"})
# Functions that make a tensor of numbers in the code.
_MAKING = frozenset({"zeros", "ones", "full", "arange", "linspace", "eye"})
#: The most calls of a formula.
_MOST = 600


class Writer:
    """Writer of tensors of one side's trace as a formula.

    Args:
        graph: the graph of the trace.
        step: the step of the trace.
        info: the information on the run.
        settings: settings to use instead of a layer's own, by the layer's path and the setting's name.
        instead: a call to write in place of another, and its framework, by the id of the replaced call.

    Attributes:
        formula: the formula written so far.
        nodes: the node of a tensor, by the tensor's number.
        calls: the calls written so far, by position in the trace.
    """

    def __init__(
        self,
        graph: Graph,
        step: Step,
        info: RunInfo,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        instead: Mapping[int, tuple[TracedCall, str]] | None = None,
    ) -> None:
        self.formula = Formula()
        self.nodes: dict[int, int] = {}
        self.calls: dict[int, TracedCall] = {}
        self._graph, self._info = graph, info
        self._settings, self._instead = settings or {}, instead or {}
        self._layers = {layer.path: layer for layer in info.layers}
        self._weights = {(record.layer, record.slot): record for record in step.records if record.stage == "weight"}
        self._parameters: dict[str, int] = {}
        #: The rounding error of sums, and of what is computed of them, by node.
        self._roundings: dict[int, float] = {}

    def write(self, tensor: int, open_: Collection[int], closed: Collection[int] = ()) -> Formula:
        """Write a tensor as the end of the formula and return the formula.

        Open tensors are computed by their calls, other tensors are leaves with recorded values. Outputs of functions
        that feed open tensors are opened too, up to the nearest outputs of layers: an edit further up shows only in
        later values.

        Args:
            tensor: the number of the tensor.
            open_: the numbers of the open tensors.
            closed: the numbers of tensors that stay leaves, whatever computed them.

        Raises:
            UnknownError: the tensor can't be computed.
        """
        self.formula.end = self._node(tensor, self._wide(tensor, open_, closed))
        return self.formula

    def _wide(self, tensor: int, open_: Collection[int], closed: Collection[int]) -> frozenset[int]:
        """Return the open tensors, and the outputs of functions that feed them."""
        opened, waiting = {*open_}, [tensor, *open_]
        for number in waiting:
            call = self._graph.producers.get(number)
            if call is None or len(opened) > _MOST or (number not in opened and not call.function):
                continue
            if call.function == GRAD:
                continue  # gradients are no values that a formula computes
            opened.add(number)
            for operand in call.inputs:
                before = self._graph.producers.get(operand.tensor)
                is_open = before is not None and before.function not in ("", GRAD)
                if is_open and operand.tensor not in {*opened, *closed}:
                    opened.add(operand.tensor)
                    waiting.append(operand.tensor)
        return frozenset(opened)

    def _node(self, tensor: int, open_: frozenset[int]) -> int:
        if tensor in self.nodes:
            return self.nodes[tensor]
        value = None if tensor in open_ else self.value(tensor)
        call = self._graph.producers.get(tensor)
        if value is None and call is not None:
            self._written(call, open_)
            if tensor in self.nodes:
                return self.nodes[tensor]
        value = self.value(tensor) if value is None else value
        if value is None:
            raise UnknownError("a tensor that was not kept")
        made = call is not None and call.function in _MAKING and not call.inputs
        self.nodes[tensor] = self.formula.leaf(value, MADE if made else "")
        return self.nodes[tensor]

    def value(self, tensor: int) -> np.ndarray | None:
        """Return the recorded values of a tensor; `None` if there are none."""
        return self._graph.values(tensor)

    def _written(self, call: TracedCall, open_: frozenset[int]) -> None:
        """Write a call; a call that can't be computed is left out if one of its outputs was recorded."""
        if len(self.calls) > _MOST:
            raise UnknownError("too many calls")
        place = self._graph.places[id(call)]
        count = len(self.formula.nodes)
        try:
            slots = [(operand.slot, self._node(operand.tensor, open_)) for operand in call.inputs]
            nodes = self._made(call, slots, place)
            nodes = [self.formula.add("detach", node, about=place) for node in nodes] if call.cut else nodes
        except (UnknownError, ValueError, IndexError):
            if all(self.value(operand.tensor) is None for operand in call.outputs):
                raise
            return
        self.calls[place] = call
        for operand, node in zip(call.outputs, nodes):
            recorded = self.value(operand.tensor)
            if recorded is None and call.function in _INDEXED:
                self._check_shape(operand.tensor, node)
            changed = bool(self._instead or self._settings)
            if recorded is None or changed or self._fits(node, recorded):
                self.nodes.setdefault(operand.tensor, node)
        assert len(self.formula.nodes) >= count

    def _fits(self, node: int, recorded: np.ndarray) -> bool:
        """Return True if a node gives a recorded tensor; a sum of large values that cancel has their rounding error."""
        made, values = self.formula.nodes[node], self.formula.values
        unit = ROUNDING.get(coarse(recorded.dtype.name), 0.0)
        rounding = max((self._roundings.get(k, 0.0) for k in made.given), default=0.0)
        if made.operation in ("add", "sub"):
            rounding += 2 * unit * max(float(np.linalg.norm(values[k])) for k in made.given)
        elif made.operation == "reduced" and made.how["by"] in ("sum", "mean"):
            sizes = OPERATIONS["reduced"](np.abs(values[made.given[0]]), **made.how)
            rounding += 2 * unit * float(np.linalg.norm(sizes))
        elif made.operation == "mul":
            rounding *= max(float(np.max(np.abs(values[k]), initial=0.0)) for k in made.given)
        elif made.operation != "neg":
            rounding = 0.0
        self._roundings[node] = rounding
        return _agree(values[node], recorded, rounding)

    def _check_shape(self, tensor: int, node: int) -> None:
        """Raise `UnknownError` if a node has another shape than its tensor: parts of the call's index are missing."""
        shape = self._graph.trace.tensors[tensor].shape
        if tuple(shape) != self.formula.values[node].shape:
            raise UnknownError("a tensor of another shape")

    def _made(self, call: TracedCall, slots: Sequence[tuple[str, int]], place: int) -> list[int]:
        framework = self._info.framework
        if id(call) in self._instead:
            replacement, framework = self._instead[id(call)]
            call = TracedCall(call.layer, call.call, replacement.function, call.nth, call.inputs, call.outputs,
                              replacement.arguments, call.parameters, call.layer_type)  # fmt: skip
        if call.function:
            inputs = KnownInputs(
                call.function, placed(call.function, slots, [self._parameter(name) for name in call.parameters]),
                call.arguments,
            )  # fmt: skip
            if "dropout" in call.function and (dropped := self._dropped(call, inputs.first, place)) is not None:
                return [dropped]
            nodes = written(self.formula, inputs, place, framework)
            return nodes if isinstance(nodes, list) else [nodes]
        return [self._layer(call, [node for _, node in slots], place)]

    def _dropped(self, call: TracedCall, source: int, place: int) -> int | None:
        """Return the node of a dropout with the mask that was drawn; `None` if nothing was dropped or recorded."""
        recorded, values = self.value(call.outputs[0].tensor), self.formula.values[source]
        if recorded is None or recorded.shape != values.shape or np.allclose(recorded, values, 1e-5):
            return None
        with np.errstate(all="ignore"):
            mask = np.where(values == 0, 1.0, recorded / values)
        return self.formula.add("dropped", source, self.formula.leaf(mask, MADE), about=place)

    def _layer(self, call: TracedCall, inputs: list[int], place: int) -> int:
        layer = self._layers.get(call.layer)
        if layer is None or not inputs:
            raise UnknownError(call.layer)
        shape = self._graph.trace.tensors[call.outputs[0].tensor].shape
        called = Called(
            equivalents.kind(layer),
            {**layer.settings, **self._settings.get(call.layer, {})},
            tuple(inputs),
            self._own(layer),
            any(p.layout == "out_in" for p in layer.parameters) or (
                not any(p.layout for p in layer.parameters) and formula_lies_out_first(self._info.framework)
            ),
            self._info.framework,
            shape,
        )  # fmt: skip
        recorded = self.value(call.outputs[0].tensor)
        first: int | None = None
        for writing in writings(called):
            try:
                node = writing(lambda *a, **k: self.formula.add(*a, about=place, **k), self.formula, called)
            except (UnknownError, ValueError, IndexError):
                continue
            if recorded is None or _agree(self.formula.values[node], recorded):
                return node
            first = node if first is None else first
        if first is None:
            raise UnknownError(called.kind)
        return first

    def _own(self, layer: Layer) -> dict[str, int]:
        nodes = {}
        for path, prefix in ((layer.path, ""), (f"{layer.path}.out_proj", "out_proj.")):
            owner = self._layers.get(path)
            for p in owner.parameters if owner is not None else ():
                name = p.tied_to or f"{path}/{p.slot}"
                layer_, _, slot = name.rpartition("/")
                if (layer_, slot) in self._weights:
                    nodes[prefix + equivalents.slot(p.slot)] = self._parameter(name)
        return nodes

    def slots(self, name: str) -> str:
        """Return a parameter's slot, by the name that both frameworks share."""
        return equivalents.slot(name.rpartition("/")[2])

    def _parameter(self, name: str) -> int:
        if name not in self._parameters:
            layer, _, slot = name.rpartition("/")
            record = self._weights.get((layer, slot))
            if record is None or record.source.sketched:
                raise UnknownError(f"{name} is not there")
            self._parameters[name] = self.formula.leaf(np.asarray(record.value), name)
        return self._parameters[name]


def _agree(computed: np.ndarray, recorded: np.ndarray, rounding: float = 0.0) -> bool:
    """Return True if computed values are the recorded ones, up to rounding of the values that they are made of."""
    if computed.shape != recorded.shape:
        return False
    if recorded.dtype.kind in "biu":
        return bool(np.array_equal(computed, recorded))
    wide = np.asarray(recorded, np.float64)
    with np.errstate(all="ignore"):
        # Values that stand for infinity are not compared.
        usual = np.abs(wide) < 1e4
        error, size = float(np.linalg.norm((computed - wide)[usual])), float(np.linalg.norm(wide[usual]))
    return bool(error <= max(_AGREES * size, rounding) or size == 0.0 == error)


__all__ = ["CONSTANT", "Writer"]
