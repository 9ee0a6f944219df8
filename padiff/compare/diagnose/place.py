"""The place in the code that a diff of an output comes from: inside of the layer, or between two layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from padiff.compare.diagnose.call_words import given_otherwise, is_looking, same_name
from padiff.compare.diagnose.traced import Graph, Relation, Relations
from padiff.compare.judge.policy import Policy
from padiff.records import LOOP, Both, Diff, Operand, Pair, RunInfo, Step, TracedCall, is_below, is_functional

#: No input slots on either side.
NO_SLOTS: Both[tuple[str, ...]] = Both((), ())
# Functions whose inputs may be exchanged.
_EXCHANGED = frozenset({"add", "mul", "maximum", "minimum", "logical_and", "logical_or", "eq", "ne"})


@dataclass(frozen=True)
class Calls:
    """The calls of either side between tensors that agree and a tensor that differs.

    Attributes:
        only: the calls without a partner of the same function on the other side; calls that only rearrange values are
            left out if there are other calls.
        same: a call of the same function on both sides, the first whose output differs though its inputs agree.
        given_otherwise: True if the arguments of that call differ.
        slots: the input slots of that call whose tensors differ and have an unknown origin, such as a mask.
        shapes: the shapes of what that call gives, if these are of other sizes.
    """

    only: Both[tuple[TracedCall, ...]]
    same: Both[TracedCall] | None = None
    given_otherwise: bool = False
    slots: Both[str] | None = None
    shapes: Both[tuple[int, ...]] | None = None

    @property
    def one(self) -> tuple[TracedCall, bool] | None:
        """Return the only call that can be the cause, and True if the call is the reference's; `None` for several."""
        if self.same is not None:
            return self.same.reference, True
        counts = self.only.map(len)
        if max(counts) > 1:
            return None
        return (self.only.reference[0], True) if counts.reference else (self.only.candidate[0], False)


@dataclass(frozen=True)
class Place:
    """The place in the code that a diff of an output comes from.

    Attributes:
        diff: the diff to report: of the output, or of an input of the layer if that input differs already.
        inside: True if the inputs of the layer agree, False if they differ; `None` if that is unknown.
        lone: the input slots of the layer's call that only one side fills, if the other inputs do not differ.
        last_agreeing: the path, in the reference, of the last layer before the diff whose output agrees; empty if
            there is none.
        calls: the calls at this place; `None` if calls of functions were not recorded.
        graphs: the traces of both sides.
        ends: the numbers, in the traces, of the tensors that differ and that `calls` is about.
        computed: the numbers of the tensors between the last tensors that agree and `ends`.
    """

    diff: Diff
    inside: bool | None = None
    lone: Both[tuple[str, ...]] = NO_SLOTS
    last_agreeing: str = ""
    calls: Calls | None = None
    graphs: Both[Graph] | None = None
    ends: Both[int] | None = None
    computed: Both[frozenset[int]] = field(default_factory=lambda: Both(frozenset(), frozenset()))

    @property
    def between(self) -> bool:
        """Return True if the diff comes from code before this layer, or in this layer after its inner layers."""
        reference = self.diff.pair.reference
        return self.inside is False or (reference is not None and is_below(self.last_agreeing, reference.layer))


def place_of_diff(
    diff: Diff, step: Sequence[Diff], steps: Both[Step] | None, infos: Both[RunInfo], policy: Policy
) -> Place:
    """Return the place in the code that a diff comes from, as far as the traces of its step show it.

    Args:
        diff: the first diff that did not pass.
        step: all diffs of its step and rank.
        steps: the step of either side; `None` if the steps are not available.
        infos: the information on either run.
        policy: the policy that judged the diff.
    """
    pair = diff.pair
    reference, candidate = pair.sides
    if steps is None or reference is None or candidate is None or reference.layer == LOOP:
        return Place(diff)
    if pair.stage != "forward" and not pair.derived:
        return Place(diff)
    if is_functional(reference.slot) or not all(step.trace.calls for step in steps):
        return Place(diff)
    graphs = graphs_of(steps, infos)
    relations = Relations(diff, graphs, policy)
    last = _last_agreeing(diff, step)
    calls = graphs.zip(pair.sides).map(lambda side: side[0].of_record(side[1]) if side[1] is not None else None)
    inside, differing = (False, _fed(calls, pair)) if pair.derived else _inputs(calls, relations)
    lone = _lone(calls) if differing is None else NO_SLOTS
    inside = None if any(lone) else inside
    starts = graphs.zip(pair.sides).map(lambda side: None if side[1] is None else side[0].tensor_of(side[1]))
    if differing is not None:
        starts = differing.map(lambda operand: operand.tensor)
        slots = differing.map(lambda operand: operand.slot)
    if differing is not None and not pair.derived:
        diff = relations.diff(differing.reference.tensor, differing.candidate.tensor, slots)
    if starts.reference is None or starts.candidate is None:
        return Place(diff, inside, lone, last, graphs=graphs)
    ends = Both(starts.reference, starts.candidate)
    back = _back(ends, graphs, relations, agreeing(step, graphs))
    calls_between = (
        _calls_between(back, calls, graphs, relations) if all(step.trace.functions for step in steps) else None
    )
    differing_there = back.map(lambda side: frozenset(operand.tensor for call in side for operand in call.outputs))
    return Place(diff, inside, lone, last, calls_between, graphs, ends, differing_there)


def calls_before(
    ends: Both[TracedCall], diff: Diff, step: Sequence[Diff], graphs: Both[Graph], policy: Policy
) -> Calls | None:
    """Return the calls that can explain that the first inputs of two calls differ; `None` if there are none.

    Args:
        ends: the calls.
        diff: the first diff that did not pass.
        step: all diffs of its step and rank.
        graphs: the traces.
        policy: the policy that judged the diff.
    """
    if not all(graph.trace.functions for graph in graphs):
        return None
    relations = Relations(diff, graphs, policy)
    starts = ends.map(lambda call: call.inputs[0].tensor)
    back = _back(starts, graphs, relations, agreeing(step, graphs))
    return _calls_between(back, Both(None, None), graphs, relations)


def _fed(calls: Both[TracedCall | None], pair: Pair) -> Both[Operand] | None:
    """Return the operands of two calls that a pair of inputs holds; `None` if the traces lack one."""
    operands = [
        next((operand for operand in call.inputs if operand.slot == record.slot), None)
        for call, record in zip(calls, pair.sides)
        if call is not None and record is not None
    ]
    first, second = (*operands, None, None)[:2]
    return None if first is None or second is None else Both(first, second)


def _last_agreeing(diff: Diff, step: Sequence[Diff]) -> str:
    """Return the path of the last layer before a diff whose output agrees; empty if there is none."""
    last = ""
    for earlier in step:
        if earlier is diff:
            break
        if (
            earlier.pair.stage == "forward"
            and earlier.compared
            and earlier.passed
            and earlier.pair.reference is not None
        ):
            record = earlier.pair.reference
            # The output of a container is mostly the output of its last layer.
            last = last if last.startswith(f"{record.layer}.") else record.layer
    return "" if last == LOOP else last


def _inputs(calls: Both[TracedCall | None], relations: Relations) -> tuple[bool | None, Both[Operand] | None]:
    """Return whether the inputs of two calls agree, and the first two inputs that differ.

    Returns:
        True, False, or `None` if unknown; and the two operands, or `None` if no input differs.
    """
    reference, candidate = calls
    if reference is None or candidate is None:
        return None, None
    related: list[Relation] = []
    for reference_input, candidate_input in _answering(reference.inputs, candidate.inputs):
        relation = relations.between(reference_input.tensor, candidate_input.tensor, exact=True)
        if relation is Relation.DIFFER:
            return False, Both(reference_input, candidate_input)
        related.append(relation)
    return (True if related and related[0] is Relation.AGREE else None), None


def _lone(calls: Both[TracedCall | None]) -> Both[tuple[str, ...]]:
    """Return the input slots of two calls of a layer that only one of them fills.

    A slot that is filled with a tensor of a paired slot is none: an attention over itself gets its query three times.
    """
    reference, candidate = calls
    if reference is None or candidate is None or reference.function or candidate.function:
        return NO_SLOTS
    paired = _answering(reference.inputs, candidate.inputs)
    met = Both(*({operand.tensor for operand in side} for side in (zip(*paired) if paired else ((), ()))))
    return (
        Both(reference.inputs, candidate.inputs)
        .zip(met)
        .map(lambda side: tuple(operand.slot for operand in side[0] if operand.tensor not in side[1]))
    )


def _answering(reference: Sequence[Operand], candidate: Sequence[Operand]) -> list[Both[Operand]]:
    """Pair the inputs of two calls, by slot name, else by position; inputs without a partner are left out."""
    waiting = {operand.slot: operand for operand in candidate}
    named = {
        reference_input.slot: waiting.pop(reference_input.slot)
        for reference_input in reference
        if reference_input.slot in waiting
    }
    unnamed = list(waiting.values())
    pairs = []
    for reference_input in reference:
        partner = named.get(reference_input.slot) or (unnamed.pop(0) if unnamed else None)
        if partner is not None:
            pairs.append(Both(reference_input, partner))
    return pairs


def graphs_of(steps: Both[Step], infos: Both[RunInfo]) -> Both[Graph]:
    """Return the graphs of a step's traces."""
    return steps.zip(infos).map(lambda side: Graph(side[0].trace, side[1].layers))


def agreeing(step: Sequence[Diff], graphs: Both[Graph]) -> Both[set[int]]:
    """Return the numbers, in either trace, of the layer outputs that agree."""
    agreed: Both[set[int]] = Both(set(), set())
    for diff in step:
        if diff.pair.stage != "forward" or not diff.compared or not diff.passed:
            continue
        for numbers, graph, record in zip(agreed, graphs, diff.pair.sides):
            tensor = graph.tensor_of(record) if record is not None else None
            if tensor is not None:
                numbers.add(tensor)
    return agreed


def _back(
    starts: Both[int], graphs: Both[Graph], relations: Relations, agreed: Both[set[int]]
) -> Both[list[TracedCall]]:
    """Return the calls of either side between tensors that agree and the two tensors that differ."""
    return Both(
        graphs.reference.back(
            starts.reference, lambda tensor: tensor in agreed.reference or relations.is_found(tensor, True)
        ),
        graphs.candidate.back(
            starts.candidate, lambda tensor: tensor in agreed.candidate or relations.is_found(tensor, False)
        ),
    )


def _calls_between(
    back: Both[list[TracedCall]], layer_calls: Both[TracedCall | None], graphs: Both[Graph], relations: Relations
) -> Calls | None:
    """Return the calls that can explain the difference, except the calls of the two layers; `None` if there are none.

    Args:
        back: the calls of either side between tensors that agree and the tensors that differ.
        layer_calls: the call of the layer on either side.
        graphs: the traces.
        relations: the comparison of tensors of the traces.
    """
    suspects = back.zip(layer_calls).map(lambda side: [call for call in side[0] if call is not side[1]])
    # Calls that only rearrange values, or make a constant, are reported only if there are no other calls.
    fewer = suspects.map(lambda calls: [call for call in calls if not is_looking(call)])
    suspects = fewer if any(fewer) else suspects
    fewer = suspects.map(lambda calls: [call for call in calls if call.inputs or call.parameters])
    suspects = fewer if any(fewer) else suspects
    if not any(suspects):
        return None
    pairs = _in_step(suspects, graphs.reference.paths & graphs.candidate.paths)
    for both in pairs:
        if both.reference.choice is not None and both.candidate.choice is not None:
            continue  # what they choose is judged by their scores
        related = [relations.between(first.tensor, second.tensor) for first, second in _in_places(both, relations)]
        axes = both.zip(graphs).map(lambda side: _axes(*side))
        if Relation.DIFFER in related:
            continue
        arguments_differ = given_otherwise(both, axes)
        # One function of the same parameters gives the same.
        if arguments_differ or (related and all(relation is Relation.AGREE for relation in related)):
            return Calls(Both((), ()), both, arguments_differ)
    paired = Both(*({id(call) for call in side} for side in (zip(*pairs) if pairs else ((), ()))))
    only = suspects.zip(paired).map(lambda side: tuple(call for call in side[0] if id(call) not in side[1]))
    if any(only):
        return Calls(only)
    for both in pairs:
        shapes = both.zip(graphs).map(lambda side: tuple(side[1].trace.tensors[side[0].outputs[0].tensor].shape))
        if math.prod(shapes.reference) != math.prod(shapes.candidate):
            return Calls(only, both, shapes=shapes)
    for both in pairs:
        for first, second in _in_places(both, relations):
            # The origin of both tensors is unknown, or both are outputs of other layers.
            ends = Both(
                first.tensor not in graphs.reference.producers or relations.is_found(first.tensor, True),
                second.tensor not in graphs.candidate.producers or relations.is_found(second.tensor, False),
            )
            if all(ends) and relations.between(first.tensor, second.tensor) is Relation.DIFFER:
                return Calls(only, both, slots=Both(first.slot, second.slot))
    return None


def _in_step(calls: Both[list[TracedCall]], common: frozenset[str]) -> list[Both[TracedCall]]:
    """Pair calls of the same function, in the order of both sides: a longest common subsequence.

    Args:
        calls: the calls of either side.
        common: paths of layers that both models have: one of them is no layer of another part of the other model.
    """
    reference, candidate = calls

    def alike(first: TracedCall, second: TracedCall) -> bool:
        parents = {call.layer.rpartition(".")[0] for call in (first, second)}
        apart = not first.function and not second.function and len(parents) > 1
        return same_name(first, second) and not (apart and {first.layer, second.layer} & common)

    lengths = [[0] * (len(candidate) + 1) for _ in range(len(reference) + 1)]
    for k in reversed(range(len(reference))):
        for n in reversed(range(len(candidate))):
            if alike(reference[k], candidate[n]):
                lengths[k][n] = lengths[k + 1][n + 1] + 1
            else:
                lengths[k][n] = max(lengths[k + 1][n], lengths[k][n + 1])
    pairs, k, n = [], 0, 0
    while k < len(reference) and n < len(candidate):
        if alike(reference[k], candidate[n]):
            pairs.append(Both(reference[k], candidate[n]))
            k, n = k + 1, n + 1
        elif lengths[k + 1][n] >= lengths[k][n + 1]:
            k += 1
        else:
            n += 1
    return pairs


def _in_places(calls: Both[TracedCall], relations: Relations) -> list[Both[Operand]]:
    """Pair the inputs of two calls by position, or by agreement if the function's inputs may be exchanged."""
    reference, candidate = calls.map(lambda call: list(call.inputs))
    pairs = []
    for operand in reference:
        place = next(
            (
                k
                for k, partner in enumerate(candidate)
                if relations.between(operand.tensor, partner.tensor) is Relation.AGREE
            ),
            0,
        )
        if candidate:
            pairs.append(Both(operand, candidate.pop(place if calls.reference.function in _EXCHANGED else 0)))
    return pairs


def _axes(call: TracedCall, graph: Graph) -> int:
    """Return the number of axes of a call's first input; 0 without inputs."""
    return len(graph.trace.tensors[call.inputs[0].tensor].shape) if call.inputs else 0
