"""Scripts for outputs, gradients and losses: the calls between tensors that agree and the tensor that differs."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from padiff.compare.diagnose.computing.recorded_losses import RecordedLoss, loss_settings, recorded_losses
from padiff.compare.diagnose.place import Place, agreeing
from padiff.compare.diagnose.recompute.of_layers import Recorded
from padiff.compare.diagnose.traced import Graph, Relations
from padiff.compare.judge.policy import Policy
from padiff.frameworks.catalog import SPELLINGS, is_loss, number_text
from padiff.frameworks.losses import ROLES
from padiff.model import equivalents
from padiff.records import Both, Diff, Layer, Record, TracedCall, is_functional
from padiff.repro.expressions import (
    function_text,
    is_writable,
    keyword_text,
    language_of,
    layer_text,
    owned,
    softmax_axis,
)
from padiff.repro.languages import RECORD_IN_FULL, CannotWriteError, Case, comment, values_of
from padiff.system.code import refused

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


# Settings that a framework's function lacks -> values that equal its behaviour, so the setting can be left out.
_ONLY = {"torch": {"soft_label": (False,), "use_softmax": (True,), "axis": (-1, 1)}, "paddle": {}}


def loss_cases(diff: Diff, sides: Both[Side]) -> Both[Case | CannotWriteError]:
    """Return the scripts' cases for a loss that differs."""
    records = diff.pair.sides
    cases: list[Case | CannotWriteError] = []
    for side, record, counterpart in ((sides.reference, *records), (sides.candidate, *records.swapped())):
        assert record is not None and counterpart is not None
        try:
            case = _case(side, record)
            case.own, case.other = (values_of(loss.source, "the loss") for loss in (record, counterpart))
            cases.append(case)
        except CannotWriteError as error:
            cases.append(error)
    return Both(*cases)


def _case(side: Side, record: Record) -> Case:
    if not is_functional(record.slot) and not recorded_losses(side.step.records):
        raise CannotWriteError(
            f"the {side.name}'s loop computes its loss in code of its own, of which nothing is recorded: use one of "
            "the framework's loss functions"
        )
    case = side.case("the loss")
    text, _ = loss_lines(side, case, None, record)
    case.what = f"the loss, {text.partition('(')[0]}"
    case.lines += [f"made = {text}"]
    return case


def loss_lines(
    side: Side, case: Case, shape: tuple[int, ...] | None = None, record: Record | None = None
) -> tuple[str, str]:
    """Return the call of the step's loss function as code, and the variable of its first input.

    Args:
        side: the side of the step.
        case: the case, which gets the inputs.
        shape: shape of the tensor that must be the first input, apart from a reshape. Default: not checked.
        record: the record of the loss. Default: the step's only loss.

    Raises:
        CannotWriteError: the step has several losses, or the call can't be written.
        ForeignCodeError: the loss function is not in the catalog.
    """
    losses = recorded_losses(side.step.records)
    foreign = [loss.function for loss in losses if loss.function not in ROLES]
    if foreign:
        raise refused("the loss function", foreign[0])
    if record is not None and is_functional(record.slot):
        losses = [
            entry for entry in losses if entry.function == record.slot.partition("()")[0] and entry.call == record.call
        ]
    if len(losses) != 1:
        raise CannotWriteError(
            f"the {side.name}'s step calls {len(losses)} loss functions that were recorded: one is what a script shows"
        )
    [loss] = losses
    roles = ROLES.get(loss.function, ())
    names = {}
    for role in (*roles, *(entry for entry in ("weight", "pos_weight") if entry in loss.records)):
        if role not in loss.records:
            raise CannotWriteError(f"the {role} of {loss.function}() of the {side.name} were not recorded")
        tensor = loss.records[role]
        names[role] = case.give(
            role, tensor.source, tensor.dtype, f"the {role} of {loss.function}() of the {side.name}"
        )
    first = next(iter(names.values()))
    if shape is not None and math.prod(shape) != case.given[first].size:
        raise CannotWriteError(
            f"the loss of the {side.name} is not of this tensor alone: code of the loop lies between"
        )
    return _text(side, loss, names), first


def _text(side: Side, loss: RecordedLoss, names: dict[str, str]) -> str:
    framework = side.info.framework
    language, spelling = language_of(framework), SPELLINGS[framework]
    variants = loss_settings(side.settings, loss.function)
    if not is_loss(loss.function, [name for settings in variants for name in settings]):
        raise refused("the loss function, or a setting of it,", loss.function)
    if len(variants) != 1:
        raise CannotWriteError(f"{loss.function}() is set in {len(variants)} ways in this step of the {side.name}")
    function, extra = spelling.losses.get(loss.function, (loss.function, ""))
    arguments = [extra] if extra else []
    for name, value in variants[0].items():
        neutral = _ONLY[framework].get(name)
        if name == "function" or neutral is not None:
            if neutral is not None and value not in neutral:
                raise CannotWriteError(
                    f"{loss.function}() is set to {name}={value!r}, which {framework} has no word for"
                )
            continue
        arguments.append(keyword_text(spelling.loss_arguments.get(name, name), number_text(value)))
    tensors = [name if role not in ("weight", "pos_weight") else f"{role}={name}" for role, name in names.items()]
    return f"{language.functional}.{function}({', '.join([*tensors, *arguments])})"


_NO_TRACE = (
    "what goes into layers and comes out of them was not recorded in this step (it has no trace): record it with this "
    "version of padiff"
)
#: Largest number of calls in a script.
MOST = 40


def output_cases(
    diff: Diff, place: Place, sides: Both[Side], step: list[Diff], policy: Policy
) -> Both[Case | CannotWriteError]:
    """Return the scripts' cases for an output that differs.

    Args:
        diff: the first diff.
        place: location of the difference among the calls of the traces.
        sides: both sides of the step.
        step: all diffs of the step.
        policy: the policy that judges them.

    Raises:
        CannotWriteError: neither side can have a script.
    """
    graphs = place.graphs
    if graphs is None:
        raise CannotWriteError(_NO_TRACE)
    # Calls are compared by identity, so the sides need the graphs of `place`.
    sides = Both(replace(sides.reference, graph=graphs.reference), replace(sides.candidate, graph=graphs.candidate))
    for window in _windows(diff, place, graphs, sides, step, policy):
        ends, calls = window
        sources = graphs.zip(ends).map(lambda side: side[0].trace.tensors[side[1]].source)
        if all(source is not None and not source.sketched for source in sources):
            break
    else:
        raise CannotWriteError(f"of what differs only a sketch was kept. {RECORD_IN_FULL}")
    recorded = sources.map(lambda source: values_of(source, "the tensor that differs"))
    return _each(
        sides,
        lambda side, k: _forward(
            side, calls.reference if k else calls.candidate, ends.reference if k else ends.candidate
        ),
        recorded,
    )


def _windows(
    diff: Diff, place: Place, graphs: Both[Graph], sides: Both[Side], step: list[Diff], policy: Policy
) -> Iterator[tuple[Both[int], Both[list[TracedCall]]]]:
    """Yield pairs of differing tensors with the calls that compute them, the smallest computation first."""
    same = place.calls.same if place.calls is not None and place.calls.slots is None else None
    if same is not None:
        yield same.map(lambda call: call.outputs[0].tensor), same.map(lambda call: [call])
    records = diff.pair.sides
    assert records.reference is not None and records.candidate is not None
    layer_calls = Both(_own_call(sides.reference, records.reference), _own_call(sides.candidate, records.candidate))
    outputs = Both(graphs.reference.tensor_of(records.reference), graphs.candidate.tensor_of(records.candidate))
    relations = Relations(diff, graphs, policy)
    agreed = agreeing(step, graphs)
    for ends in (place.ends, outputs):
        if ends is None or ends.reference is None or ends.candidate is None:
            continue
        tensors = Both(ends.reference, ends.candidate)
        if place.inside is True and layer_calls.reference is not None and layer_calls.candidate is not None:
            yield tensors, Both([layer_calls.reference], [layer_calls.candidate])
            continue
        yield (
            tensors,
            Both(
                _back(graphs.reference, tensors.reference, agreed.reference, relations, True),
                _back(graphs.candidate, tensors.candidate, agreed.candidate, relations, False),
            ),
        )


def _back(
    graph: Graph, end: int, agreed: Collection[int], relations: Relations, is_reference: bool
) -> list[TracedCall]:
    """Return the calls that compute a tensor from tensors that agree."""
    return graph.back(end, lambda t: t != end and (t in agreed or relations.is_found(t, is_reference)))


def _own_call(side: Side, record: Record | None) -> TracedCall | None:
    """Return the layer's call of a record if it can be written as one line, else `None`."""
    call = None if record is None or is_functional(record.slot) else side.graph.of_record(record)
    layer = None if call is None else side.layers.get(call.layer)
    return call if layer is not None and is_writable(layer) else None


def _forward(side: Side, calls: list[TracedCall], end: int) -> Case:
    ordered = calls_in_order(side.graph, calls)
    if not ordered:
        raise CannotWriteError(f"no call of the {side.name} was heard between what agrees and what differs")
    case = side.under_autocast(side.case(_what(ordered)))
    chain = Chain(side, case, window=ordered)
    case.lines.append(f"made = {chain.tensor(end)}")
    if len(case.lines) > MOST:
        raise CannotWriteError(
            f"between what was kept and what differs the {side.name} makes {len(case.lines)} calls: no small script"
        )
    return case


def _what(calls: list[TracedCall]) -> str:
    if len(calls) == 1:
        call = calls[0]
        return f"{call.function}() in {call.layer}" if call.function else f"{call.layer} ({call.layer_type})"
    names = list(dict.fromkeys(call.function or call.layer for call in calls))
    return f"the code of {calls[-1].layer}: {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"


def _each(sides: Both[Side], write, recorded: Both[np.ndarray]) -> Both[Case | CannotWriteError]:  # type: ignore[no-untyped-def]
    """Return the case of each side, or the reason why a side has none."""
    cases: list[Case | CannotWriteError] = []
    for is_reference, side in ((True, sides.reference), (False, sides.candidate)):
        recorded_here, recorded_there = recorded if is_reference else recorded.swapped()
        try:
            case = write(side, is_reference)
            case.own, case.other = recorded_here, recorded_there
            cases.append(case)
        except CannotWriteError as error:
            cases.append(error)
    return Both(*cases)


# -- gradients ---------------------------------------------------------------------------------------------------------


def gradient_cases(diff: Diff, sides: Both[Side], agreed: Both[Collection[int]]) -> Both[Case | CannotWriteError]:
    """Return the scripts' cases for a gradient, of an output or parameter, that differs.

    Args:
        diff: the first diff.
        sides: both sides of the step.
        agreed: numbers of the tensors whose gradients agree.
    """
    records = diff.pair.sides
    assert records.reference is not None and records.candidate is not None
    recorded = Both(
        values_of(records.reference.source, "the gradient of the reference") / diff.pair.scales.reference,
        values_of(records.candidate.source, "the gradient of the candidate") / diff.pair.scales.candidate,
    )
    return _each(
        sides,
        lambda side, k: _backward(
            side,
            records.reference if k else records.candidate,
            agreed.reference if k else agreed.candidate,
        ),
        recorded,
    )


def _backward(side: Side, record: Record, agreed: Collection[int]) -> Case:
    if side.step.micro_batches > 1:
        raise CannotWriteError(
            f"the step adds up the gradients of {side.step.micro_batches} micro-batches: record it with one"
        )
    if not side.graph.trace.calls:
        raise CannotWriteError(_NO_TRACE)
    if record.stage == "grad" and side.info.world_size > 1:
        raise CannotWriteError(f"the {side.name}'s gradients are made of those of {side.info.world_size} processes")
    site = f"{record.layer}/{record.slot}"
    start = side.graph.tensor_of(record) if record.stage == "backward" else None
    if record.stage == "backward" and start is None:
        raise CannotWriteError(f"the output of `{record.layer}` is not in the trace of the step")
    if record.stage == "grad" and any(p.tied_to == site for layer in side.info.layers for p in layer.parameters):
        raise CannotWriteError(
            f"{site} of the {side.name} is a parameter of several layers, which all make its gradient"
        )
    if record.stage == "grad" and side.settings.get("clip.kind", "none") != "none":
        raise CannotWriteError(
            f"the {side.name}'s gradients are clipped ({side.settings['clip.kind']}) before they are recorded: what "
            "went in is not in the run. Record a step without clipping"
        )
    calls, ends = _ahead(side, start, site, agreed)
    if not ends and start is not None:
        return _of_loss(side, record, start)
    if not ends:
        raise CannotWriteError(f"no gradient that agrees is recorded of what {site} of the {side.name} goes into")
    if len(calls) > MOST:
        raise CannotWriteError(f"{len(calls)} calls lie between it and gradients that agree: no small script")
    case = side.under_autocast(side.case(f"the backward of {_what(calls)}, the gradient of {site}"))
    chain = Chain(side, case, learns=True)
    leaf = chain.tensor(start, record.layer) if start is not None else chain.parameter(site)
    if leaf not in case.learns:
        case.learns.append(leaf)
    outputs, seeds = [], []
    for call in calls:
        chain.write(call, keep=ends)
        for operand in call.outputs:
            if operand.tensor in ends:
                seed = side.gradients[operand.tensor]
                name = case.give("gradient", seed.source, seed.dtype, f"the gradient of `{seed.layer}`")
                if side.step.loss_scale != 1:
                    case.given[name] = case.given[name] / side.step.loss_scale
                outputs.append(f"t{operand.tensor}")
                seeds.append(name)
    case.lines.append(f"made = gradient([{', '.join(outputs)}], [{', '.join(seeds)}], {leaf})")
    return case


def _ahead(side: Side, start: int | None, site: str, agreed: Collection[int]) -> tuple[list[TracedCall], list[int]]:
    """Return the calls that use a tensor or parameter, up to tensors whose gradients agree, and these tensors."""
    graph = side.graph
    reached = set() if start is None else {start}
    calls: list[TracedCall] = []
    ends: list[int] = []
    layer = site.rpartition("/")[0]
    for call in graph.trace.calls:
        leaf = any(graph.producers.get(operand.tensor) is call for operand in call.outputs)
        takes = any(operand.tensor in reached for operand in call.inputs)
        if start is None:
            takes = takes or site in call.parameters or (not call.function and call.layer == layer)
        if not leaf or not takes:
            continue
        calls.append(call)
        for operand in call.outputs:
            if operand.tensor in side.gradients and operand.tensor in agreed:
                ends.append(operand.tensor)
            else:
                reached.add(operand.tensor)
    return calls, ends


def _of_loss(side: Side, record: Record, start: int) -> Case:
    case = side.case(f"the backward of the loss, the gradient of {record.layer}")
    chain = Chain(side, case)
    source = side.graph.trace.tensors[start]
    text, logits = loss_lines(side, case, source.shape)
    del chain
    case.learns.append(logits)
    case.lines += [f"loss = {text}", f"made = gradient([loss], [None], {logits}).reshape({list(record.shape)})"]
    return case
