"""What the first diff reaches within its step: the tensors that are computed from it, in either run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from padiff.compare.diagnose.place import Place
from padiff.compare.diagnose.traced import MOST, Graph, Relations
from padiff.records import LOOP, Both, Diff, Record, RunInfo, Step, TracedCall, is_functional


class Flow:
    """The tensors of a step's traces that are made of what differs.

    Without the functions that layers' code calls it is not known what a tensor was made of: then all may be.

    Args:
        steps, infos: the step, and what holds for all steps, of either run.
        graphs: its traces.
        relations: which of their tensors agree.
    """

    def __init__(self, steps: Both[Step], infos: Both[RunInfo], graphs: Both[Graph], relations: Relations) -> None:
        self._infos, self._graphs, self._relations = infos, graphs, relations
        self._known = all(step.trace.functions for step in steps)
        self._reached: Both[set[int]] = Both(set(), set())
        self._everything = not self._known

    def add(self, diff: Diff, place: Place, agreed: Both[set[int]]) -> None:
        """Take in a diff, and all that is made of it.

        Args:
            place: where in the code it comes from.
            agreed: outputs that agree, by number.
        """
        for of_reference, record, seeds in zip((True, False), diff.pair.sides, self._reached):
            graph = self._graphs.reference if of_reference else self._graphs.candidate
            info = self._infos.reference if of_reference else self._infos.candidate
            found = set() if record is None else _of_record(record, graph, info)
            if place.inside is not True and diff.pair.stage == "forward" and record is not None:
                found |= self._before(
                    record, graph, of_reference, getattr(agreed, "reference" if of_reference else "candidate")
                )
            if not found:
                self._everything = True  # it is no tensor of the trace, so it is not known what is made of it
            seeds |= found
            for call in graph.trace.calls:
                if any(operand.tensor in seeds for operand in call.inputs):
                    seeds.update(operand.tensor for operand in call.outputs)

    def reaches(self, diff: Diff) -> bool:
        """Whether a diff's tensor, or what goes into its layer, is made of what differs, or may be."""
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
        given = self._given.reference if of_reference else self._given.candidate
        waiting = [operand.tensor for operand in call.inputs]
        seen = set(waiting)
        while waiting:
            tensor = waiting.pop()
            if tensor in reached or len(seen) > MOST:
                return False
            producer = graph.producers.get(tensor)
            if producer is None:
                # The model's own inputs, or a constant that both have; else it is not known where it comes from.
                if tensor not in given and not self._relations.is_found(tensor, of_reference):
                    return False
                continue
            more = [operand.tensor for operand in producer.inputs if operand.tensor not in seen]
            seen.update(more)
            waiting += more
        return True

    @cached_property
    def _given(self) -> Both[set[int]]:
        """What goes into the models."""
        return self._graphs.map(_given_to)

    def _before(self, record: Record, graph: Graph, of_reference: bool, agreed: set[int]) -> set[int]:
        """What is computed between tensors that agree and what goes into a layer."""
        call = graph.of_record(record)
        found: set[int] = set()
        for operand in () if call is None else call.inputs:
            if operand.tensor in agreed or self._relations.is_found(operand.tensor, of_reference):
                continue
            found.add(operand.tensor)
            between = graph.back(
                operand.tensor, lambda tensor: tensor in agreed or self._relations.is_found(tensor, of_reference)
            )
            found.update(output.tensor for one in between for output in one.outputs)
        return found


def leaves(diffs: Sequence[Diff], infos: Both[RunInfo]) -> Iterator[Diff]:
    """Of a step's diffs the outputs of layers without sublayers that do not pass."""
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
    """What goes into the outermost calls, from nowhere."""
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
    """The tensors of the trace that a record is, or that are computed with it first."""
    calls = graph.trace.calls
    if record.stage == "forward":
        own = graph.of_record(record)
        return set() if own is None else {operand.tensor for operand in own.outputs}
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
    """All names that a parameter has."""
    own = f"{record.layer}/{record.slot.partition('[')[0]}"
    tied = {f"{layer.path}/{p.slot}": p.tied_to for layer in info.layers for p in layer.parameters if p.tied_to}
    home = tied.get(own, own)
    return {own, home, *(name for name, first in tied.items() if first == home)}
