"""Where in the code a diff of an output comes from: inside of the layer, or between it and those before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from padiff.compare.diagnose.call_words import given_otherwise, is_looking, same_name
from padiff.compare.diagnose.traced import Graph, Relation, Relations
from padiff.compare.judge.policy import Policy
from padiff.records import LOOP, Both, Diff, Operand, RunInfo, Step, TracedCall, is_below, is_functional

# Functions that give the same whatever the order of what they are given.
_EXCHANGED = frozenset({"add", "mul", "maximum", "minimum", "logical_and", "logical_or", "eq", "ne"})


@dataclass(frozen=True)
class Calls:
    """What is called, on either side, between tensors that agree and one that does not.

    Attributes:
        only: what has no call of the same function on the other side; calls that only look at values in another way
            are left out where there are others.
        same: a call of either side of one function whose outcome is the first to differ, though its inputs agree.
        given_otherwise: whether it is given other arguments.
        slots: what goes into that call and differs, though nothing is known of where it comes from: a mask, say.
    """

    only: Both[tuple[TracedCall, ...]]
    same: Both[TracedCall] | None = None
    given_otherwise: bool = False
    slots: Both[str] | None = None

    @property
    def one(self) -> tuple[TracedCall, bool] | None:
        """The call that it is, and whether it is the reference's; `None` where it may be any of several."""
        if self.same is not None:
            return self.same.reference, True
        counts = self.only.map(len)
        if max(counts) > 1:
            return None
        return (self.only.reference[0], True) if counts.reference else (self.only.candidate[0], False)


@dataclass(frozen=True)
class Place:
    """Where a diff of an output comes from.

    Attributes:
        diff: what is reported: the diff of the output, or of what goes into its layer where that differs already.
        inside: whether what goes into the layer agrees; `None` where that is not known.
        last_agreeing: path of the last layer before it whose output agrees, the reference's; empty: there is none.
        calls: what is called there, where functions were looked at.
        graphs: both traces.
        ends: the tensors that differ, of which `calls` tells; their numbers in the traces.
        computed: the tensors that they were computed by, from tensors that agree on.
    """

    diff: Diff
    inside: bool | None = None
    last_agreeing: str = ""
    calls: Calls | None = None
    graphs: Both[Graph] | None = None
    ends: Both[int] | None = None
    computed: Both[frozenset[int]] = field(default_factory=lambda: Both(frozenset(), frozenset()))

    @property
    def between(self) -> bool:
        """Whether it comes from code between layers: before this one, or of this one after those inside of it."""
        reference = self.diff.pair.reference
        return self.inside is False or (reference is not None and is_below(self.last_agreeing, reference.layer))


def place_of_diff(
    diff: Diff, step: Sequence[Diff], steps: Both[Step] | None, infos: Both[RunInfo], policy: Policy
) -> Place:
    """Where a diff comes from, as far as the traces of its step tell.

    Args:
        diff: the first one that did not pass.
        step: all of its step and rank.
        steps: the step of either side; `None` if it is not at hand.
        infos: what holds for all steps of either run.
        policy: what judged it.
    """
    pair = diff.pair
    reference, candidate = pair.sides
    if steps is None or reference is None or candidate is None or pair.stage != "forward" or reference.layer == LOOP:
        return Place(diff)
    if is_functional(reference.slot) or not all(step.trace.calls for step in steps):
        return Place(diff)
    graphs = graphs_of(steps, infos)
    relations = Relations(diff, graphs, policy)
    last = _last_agreeing(diff, step)
    calls = graphs.zip(pair.sides).map(lambda side: side[0].of_record(side[1]) if side[1] is not None else None)
    inside, differing = _inputs(calls, relations)
    starts = graphs.zip(pair.sides).map(lambda side: None if side[1] is None else side[0].tensor_of(side[1]))
    if differing is not None:
        starts = differing.map(lambda operand: operand.tensor)
        slots = differing.map(lambda operand: operand.slot)
        diff = relations.diff(differing.reference.tensor, differing.candidate.tensor, slots)
    if starts.reference is None or starts.candidate is None:
        return Place(diff, inside, last, graphs=graphs)
    ends = Both(starts.reference, starts.candidate)
    back = _back(ends, graphs, relations, agreeing(step, graphs))
    found = _calls_between(back, calls, graphs, relations) if all(step.trace.functions for step in steps) else None
    differing_there = back.map(lambda side: frozenset(operand.tensor for call in side for operand in call.outputs))
    return Place(diff, inside, last, found, graphs, ends, differing_there)


def _last_agreeing(diff: Diff, step: Sequence[Diff]) -> str:
    """The layer whose output is the last to agree before a diff."""
    last = ""
    for other in step:
        if other is diff:
            break
        if other.pair.stage == "forward" and other.compared and other.passed and other.pair.reference is not None:
            record = other.pair.reference
            # What a container gives is mostly what its last layer gave.
            last = last if last.startswith(f"{record.layer}.") else record.layer
    return "" if last == LOOP else last


def _inputs(calls: Both[TracedCall | None], relations: Relations) -> tuple[bool | None, Both[Operand] | None]:
    """Whether what goes into two calls agrees, `None` if that is not known; and the first that does not."""
    reference, candidate = calls
    if reference is None or candidate is None:
        return None, None
    found: list[Relation] = []
    for one, other in _answering(reference.inputs, candidate.inputs):
        relation = relations.between(one.tensor, other.tensor, exact=True)
        if relation is Relation.DIFFER:
            return False, Both(one, other)
        found.append(relation)
    return (True if found and found[0] is Relation.AGREE else None), None


def _answering(reference: Sequence[Operand], candidate: Sequence[Operand]) -> list[Both[Operand]]:
    """Which inputs answer to each other: by name, else by place; what has no partner is left out."""
    waiting = {operand.slot: operand for operand in candidate}
    named = {one.slot: waiting.pop(one.slot) for one in reference if one.slot in waiting}
    rest = list(waiting.values())
    pairs = []
    for one in reference:
        other = named.get(one.slot) or (rest.pop(0) if rest else None)
        if other is not None:
            pairs.append(Both(one, other))
    return pairs


def graphs_of(steps: Both[Step], infos: Both[RunInfo]) -> Both[Graph]:
    """The traces of a step."""
    return steps.zip(infos).map(lambda side: Graph(side[0].trace, side[1].layers))


def agreeing(step: Sequence[Diff], graphs: Both[Graph]) -> Both[set[int]]:
    """Outputs of layers that agree, by their numbers."""
    found: Both[set[int]] = Both(set(), set())
    for diff in step:
        if diff.pair.stage != "forward" or not diff.compared or not diff.passed:
            continue
        for numbers, graph, record in zip(found, graphs, diff.pair.sides):
            tensor = graph.tensor_of(record) if record is not None else None
            if tensor is not None:
                numbers.add(tensor)
    return found


def _back(
    starts: Both[int], graphs: Both[Graph], relations: Relations, agreed: Both[set[int]]
) -> Both[list[TracedCall]]:
    """What is called between tensors that agree and two that do not."""
    return Both(
        graphs.reference.back(
            starts.reference, lambda tensor: tensor in agreed.reference or relations.is_found(tensor, True)
        ),
        graphs.candidate.back(
            starts.candidate, lambda tensor: tensor in agreed.candidate or relations.is_found(tensor, False)
        ),
    )


def _calls_between(
    back: Both[list[TracedCall]], own: Both[TracedCall | None], graphs: Both[Graph], relations: Relations
) -> Calls | None:
    """What of it tells why; not the layers' own calls, whose output it is."""
    found = back.zip(own).map(lambda side: [call for call in side[0] if call is not side[1]])
    # What only looks at values in another way, or makes a constant, is reported where there is nothing else.
    others = found.map(lambda calls: [call for call in calls if not is_looking(call)])
    found = others if any(others) else found
    others = found.map(lambda calls: [call for call in calls if call.inputs or call.parameters])
    found = others if any(others) else found
    if not any(found):
        return None
    pairs = _in_step(found)
    for both in pairs:
        related = [relations.between(one.tensor, other.tensor) for one, other in _in_places(both, relations)]
        axes = both.zip(graphs).map(lambda side: _axes(*side))
        if Relation.DIFFER in related:
            continue
        otherwise = given_otherwise(both, axes)
        if otherwise or all(relation is Relation.AGREE for relation in related):
            return Calls(Both((), ()), both, otherwise)
    paired = Both(*({id(call) for call in side} for side in (zip(*pairs) if pairs else ((), ()))))
    only = found.zip(paired).map(lambda side: tuple(call for call in side[0] if id(call) not in side[1]))
    if any(only):
        return Calls(only)
    for both in pairs:
        for one, other in _in_places(both, relations):
            # Where they come from is not known, or they are what other layers gave.
            ends = Both(
                one.tensor not in graphs.reference.producers or relations.is_found(one.tensor, True),
                other.tensor not in graphs.candidate.producers or relations.is_found(other.tensor, False),
            )
            if all(ends) and relations.between(one.tensor, other.tensor) is Relation.DIFFER:
                return Calls(only, both, slots=Both(one.slot, other.slot))
    return None


def _in_step(calls: Both[list[TracedCall]]) -> list[Both[TracedCall]]:
    """Calls of one function that answer to each other, in the order of both sides: as many as can be."""
    one, other = calls
    lengths = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
    for k in reversed(range(len(one))):
        for n in reversed(range(len(other))):
            if same_name(one[k], other[n]):
                lengths[k][n] = lengths[k + 1][n + 1] + 1
            else:
                lengths[k][n] = max(lengths[k + 1][n], lengths[k][n + 1])
    pairs, k, n = [], 0, 0
    while k < len(one) and n < len(other):
        if same_name(one[k], other[n]):
            pairs.append(Both(one[k], other[n]))
            k, n = k + 1, n + 1
        elif lengths[k + 1][n] >= lengths[k][n + 1]:
            k += 1
        else:
            n += 1
    return pairs


def _in_places(calls: Both[TracedCall], relations: Relations) -> list[Both[Operand]]:
    """What goes into two calls, place by place; of two that may be exchanged, those that agree are put together."""
    reference, candidate = calls.map(lambda call: list(call.inputs))
    pairs = []
    for one in reference:
        place = next(
            (k for k, other in enumerate(candidate) if relations.between(one.tensor, other.tensor) is Relation.AGREE),
            0,
        )
        if candidate:
            pairs.append(Both(one, candidate.pop(place if calls.reference.function in _EXCHANGED else 0)))
    return pairs


def _axes(call: TracedCall, graph: Graph) -> int:
    """How many axes the first tensor has that goes into a call."""
    return len(graph.trace.tensors[call.inputs[0].tensor].shape) if call.inputs else 0
