"""Faults that are independent of all earlier diffs, and the flow of a difference through a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from padiff.compare.diagnose.place import Evidence, Place
from padiff.compare.diagnose.traced import MOST, Graph, Relations
from padiff.model import equivalents
from padiff.records import (
    LOOP,
    Both,
    Cause,
    Diff,
    FirstDiff,
    Recomputed,
    Record,
    RunInfo,
    Step,
    TracedCall,
    is_functional,
)


@dataclass(frozen=True)
class Fault:
    """A place where one side computes something else than the other side's rule gives for the same inputs.

    Attributes:
        shown: the diff that shows the fault.
        cause: the cause; `None` if nothing explains the fault.
        recomputed: the errors of both sides compared with a computation in float64 from their own tensors.
        inside: the diff of an input of the layer, if the input is what differs.
        kind: the kind of layer, or a stage; the same fault in the code may show at several places of one kind.
    """

    shown: Diff
    cause: Cause | None
    recomputed: Recomputed | None = None
    inside: Diff | None = None
    kind: str = ""

    @property
    def diff(self) -> Diff:
        """The diff to report: of the layer's input if that differs, else of its output."""
        return self.shown if self.inside is None else self.inside


# Causes that affect all layers or the whole training: beside such a cause there is no second fault.
_EVERYWHERE = frozenset(
    {"environment", "autocast", "tf32", "precision", "dropout", "mode", "surplus_layers", "not_called", "no_backward"}
)
# Families of causes that are too general to show that two faults are one.
_ANYWHERE = frozenset({"layer", "call"})
# Kinds of faults that are found from a side's own tensors, independent of the code that computed these tensors.
_BY_ITSELF = frozenset({"update", "loss", "labels", "gradients", "weight", "input"})
# Kinds of faults in a layer's weights or inputs, independent of the layer's own computation.
_GIVEN = frozenset({"weight", "input"})


class KnownFault(Protocol):
    """The attributes of a fault that `are_one` reads."""

    @property
    def cause(self) -> Cause | None: ...

    @property
    def recomputed(self) -> Recomputed | None: ...


def families(cause: Cause | None) -> frozenset[str]:
    """Return the families of a cause: the first words of its kinds. Empty for an unknown cause."""
    if cause is None or cause.kind == "unknown":
        return frozenset()
    return frozenset(map(_family, cause.kind.split("+")))


def _family(kind: str) -> str:
    if kind in _EVERYWHERE:
        return kind
    return "call" if "call" in kind.split("_") else kind.partition("_")[0]


def are_one(one: KnownFault, kind: str, other: KnownFault, of: str) -> bool:
    """Return True if two faults may be one.

    Args:
        one, other: the two faults.
        kind, of: the kind of layer, or the stage, of the first and of the second fault.
    """
    first, second = families(one.cause), families(other.cause)
    if one.cause is not None and other.cause is not None and one.cause.sentence == other.cause.sentence:
        return True
    if (first | second) & _EVERYWHERE:
        return True
    if kind == of:
        proven = all(fault.cause is not None and fault.cause.proven for fault in (one, other))
        return not proven or bool(first & second)
    if (first & second) - _ANYWHERE:
        return True
    if (first - {"call"} and second - {"call"}) or kind in _BY_ITSELF:
        return False
    # Without causes: two layers that both fail their own computation are two faults, and so are a layer and its inputs.
    wrong = [fault.recomputed is not None and bool(fault.recomputed.wrong) for fault in (one, other)]
    return not (wrong[0] and (wrong[1] or of in _GIVEN))


def kind_of_place(first: FirstDiff, evidence: Evidence) -> str:
    """Return the kind of the layer that a diff belongs to, or the diff's stage if there is no layer."""
    if first.stage != "forward" or first.reference is None:
        return first.stage
    layers = evidence.runs.reference.info.layers
    layer = next((layer for layer in layers if layer.path == first.reference), None)
    return equivalents.kind(layer) if layer is not None else first.stage


class Flow:
    """The tensors of a step's traces that are computed from tensors that differ.

    If the calls of functions were not recorded, the inputs of a tensor are unknown, and every tensor may depend on a
    diff.

    Args:
        steps: the step of either run.
        infos: the information on either run.
        graphs: the graphs of the step's traces.
        relations: the comparison of tensors of the traces.
    """

    def __init__(self, steps: Both[Step], infos: Both[RunInfo], graphs: Both[Graph], relations: Relations) -> None:
        self._infos, self._graphs, self._relations = infos, graphs, relations
        self._known = all(step.trace.functions for step in steps)
        self._reached: Both[set[int]] = Both(set(), set())
        self._everything = not self._known

    def add(self, diff: Diff, place: Place, agreed: Both[set[int]]) -> None:
        """Add a diff's tensor and all tensors that are computed from it.

        Args:
            diff: the diff.
            place: where in the code the diff comes from.
            agreed: the numbers of the layer outputs that agree.
        """
        for of_reference, record, seeds in zip((True, False), diff.pair.sides, self._reached):
            graph = self._graphs.reference if of_reference else self._graphs.candidate
            info = self._infos.reference if of_reference else self._infos.candidate
            tensors = set() if record is None else _of_record(record, graph, info)
            if place.inside is not True and diff.pair.stage == "forward" and record is not None:
                tensors |= self._before(
                    record, graph, of_reference, getattr(agreed, "reference" if of_reference else "candidate")
                )
            if not tensors:
                self._everything = True  # the tensor is not in the trace, so any tensor may depend on it
            seeds |= tensors
            for call in graph.trace.calls:
                if any(operand.tensor in seeds for operand in call.inputs):
                    seeds.update(operand.tensor for operand in call.outputs)

    def reaches(self, diff: Diff) -> bool:
        """Return True if a diff's tensor, or an input of its layer, is or may be computed from tensors that differ."""
        if self._everything:
            return True
        for of_reference, record in zip((True, False), diff.pair.sides):
            graph = self._graphs.reference if of_reference else self._graphs.candidate
            call = None if record is None else graph.of_record(record)
            reached = self._reached.reference if of_reference else self._reached.candidate
            if call is None or not call.inputs or any(operand.tensor in reached for operand in call.outputs):
                return True
            if not self._is_clean(call, graph, of_reference):
                return True
        return False

    def _is_clean(self, call: TracedCall, graph: Graph, of_reference: bool) -> bool:
        reached = self._reached.reference if of_reference else self._reached.candidate
        model_inputs = self._given.reference if of_reference else self._given.candidate
        waiting = [operand.tensor for operand in call.inputs]
        visited = set(waiting)
        while waiting:
            tensor = waiting.pop()
            if tensor in reached or len(visited) > MOST:
                return False
            producer = graph.producers.get(tensor)
            if producer is None:
                # Inputs of the model, and constants of both sides, are clean; other tensors have an unknown origin.
                if tensor not in model_inputs and not self._relations.is_found(tensor, of_reference):
                    return False
                continue
            more = [operand.tensor for operand in producer.inputs if operand.tensor not in visited]
            visited.update(more)
            waiting += more
        return True

    @cached_property
    def _given(self) -> Both[set[int]]:
        """Return the tensors that are inputs of each side's model."""
        return self._graphs.map(_given_to)

    def _before(self, record: Record, graph: Graph, of_reference: bool, agreed: set[int]) -> set[int]:
        """Return the tensors that are computed between tensors that agree and the inputs of a layer."""
        call = graph.of_record(record)
        tensors: set[int] = set()
        for operand in () if call is None else call.inputs:
            if operand.tensor in agreed or self._relations.is_found(operand.tensor, of_reference):
                continue
            tensors.add(operand.tensor)
            between = graph.back(
                operand.tensor, lambda tensor: tensor in agreed or self._relations.is_found(tensor, of_reference)
            )
            tensors.update(output.tensor for inner_call in between for output in inner_call.outputs)
        return tensors


def leaves(diffs: Sequence[Diff], infos: Both[RunInfo]) -> Iterator[Diff]:
    """Yield the diffs that did not pass and are outputs of layers without sublayers."""
    holding = infos.map(lambda info: {layer.path for layer in info.layers if layer.children})
    for diff in diffs:
        pair = diff.pair
        if pair.stage != "forward" or diff.passed or pair.reference is None or pair.candidate is None:
            continue
        layers = pair.reference.layer, pair.candidate.layer
        if LOOP in layers or is_functional(pair.anchor.slot):
            continue
        if layers[0] not in holding.reference and layers[1] not in holding.candidate:
            yield diff


def _given_to(graph: Graph) -> set[int]:
    """Return the inputs of the outermost layers that no recorded call computed."""
    paths = {call.layer for call in graph.trace.calls}
    top = min((len(path.split(".")) if path != "(root)" else 0 for path in paths), default=0)
    return {
        operand.tensor
        for call in graph.trace.calls
        if not call.function and (len(call.layer.split(".")) if call.layer != "(root)" else 0) == top
        for operand in call.inputs
        if operand.tensor not in graph.producers
    }


def _of_record(record: Record, graph: Graph, info: RunInfo) -> set[int]:
    """Return the tensors of a record: a layer's outputs, a layer's input, or the outputs of all calls that use a
    parameter.
    """
    calls = graph.trace.calls
    if record.stage == "forward":
        layer_call = graph.of_record(record)
        return set() if layer_call is None else {operand.tensor for operand in layer_call.outputs}
    if record.stage == "input":
        return {
            operand.tensor
            for call in calls
            if call.layer == record.layer and not call.function
            for operand in call.inputs
            if operand.slot == record.slot
        }
    if record.stage != "weight":
        return set()
    names = _names(record, info)
    layers = {name.rpartition("/")[0] for name in names}
    return {
        operand.tensor
        for call in calls
        if (not call.function and call.layer in layers) or names & set(call.parameters)
        for operand in call.outputs
    }


def _names(record: Record, info: RunInfo) -> set[str]:
    """Return all names of a parameter, including the names of parameters tied to it."""
    full_name = f"{record.layer}/{record.slot.partition('[')[0]}"
    tied = {f"{layer.path}/{p.slot}": p.tied_to for layer in info.layers for p in layer.parameters if p.tied_to}
    home = tied.get(full_name, full_name)
    return {full_name, home, *(name for name, first in tied.items() if first == home)}
