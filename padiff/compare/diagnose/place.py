"""The place in the code that a diff of an output comes from, and the extent of the first diff."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from padiff.align import Alignment
from padiff.compare.diagnose.traced import (
    Graph,
    Relation,
    Relations,
    axes_of,
    given_in_common,
    given_otherwise,
    is_looking,
    same_name,
    take_alike,
)
from padiff.compare.judge.drift import Site, site_of
from padiff.compare.judge.policy import Policy
from padiff.compare.measure.operands import Arrays, operands
from padiff.errors import RunFolderError
from padiff.frameworks.catalog import RESHAPING
from padiff.model import equivalents
from padiff.recorder.calls import SAMPLING
from padiff.records import (
    LOOP,
    PARAMETER_STAGES,
    ROOT,
    Both,
    Diff,
    Difference,
    Extent,
    Figure,
    Operand,
    Pair,
    Run,
    RunInfo,
    Step,
    TensorExtent,
    TracedCall,
    is_below,
    is_functional,
)
from padiff.records.first_diff import CAUSAL
from padiff.records.pair_table import PairSchema, PairTable
from padiff.records.step_diffs import StepDiffs

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
        lone: the input slots of the layer's call that only one side fills, if the other inputs do not differ; else
            those of a layer around it, if what differs is computed from them.
        around: the path, in the reference, of the layer of `lone`; empty for the layer itself.
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
    around: str = ""
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

    @property
    def is_given(self) -> bool:
        """Return True if the tensors that differ are what the loop calls the models with, handed on as they are."""
        if self.inside is not False or self.graphs is None or self.ends is None:
            return False
        calls = self.graphs.map(lambda graph: graph.layers.get((ROOT, self.diff.pair.anchor.call)))
        inputs = calls.map(lambda call: set() if call is None else {operand.tensor for operand in call.inputs})
        return all(tensor in tensors for tensor, tensors in zip(self.ends, inputs))


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
    if pair.stage not in ("forward", "input"):
        return Place(diff)
    if is_functional(reference.slot) or not all(step.trace.calls for step in steps):
        return Place(diff)
    graphs = graphs_of(steps, infos)
    relations = Relations(diff, graphs, policy)
    last = _last_agreeing(diff, step)
    calls = graphs.zip(pair.sides).map(lambda side: side[0].of_record(side[1]) if side[1] is not None else None)
    of_loop = pair.stage == "input"
    agreed = _agreeing_pairs(step, graphs)
    inside, differing = (False, _fed(calls, pair)) if of_loop else _inputs(calls, relations, graphs, agreed)
    if of_loop and not pair.derived and not _is_made(differing, graphs):
        return Place(diff)
    if not of_loop:
        differing = _given_above(differing, calls, relations, graphs, agreed)
    lone = _lone(calls, graphs) if differing is None else NO_SLOTS
    inside = None if any(lone) else inside
    lone = NO_SLOTS if all(lone) else lone  # each side takes in parts, or in another form, what the other takes
    starts = graphs.zip(pair.sides).map(lambda side: None if side[1] is None else side[0].tensor_of(side[1]))
    if differing is not None:
        starts = differing.map(lambda operand: operand.tensor)
        slots = differing.map(lambda operand: operand.slot)
    if differing is not None and not of_loop:
        diff = relations.diff(differing.reference.tensor, differing.candidate.tensor, slots)
    if starts.reference is None or starts.candidate is None:
        return Place(diff, inside, lone, "", last, graphs=graphs)
    ends = Both(starts.reference, starts.candidate)
    back = _back(ends, graphs, relations, agreed)
    calls_between = (
        _calls_between(back, calls, graphs, relations) if all(step.trace.functions for step in steps) else None
    )
    differing_there = back.map(lambda side: frozenset(operand.tensor for call in side for operand in call.outputs))
    around = "" if any(lone) or of_loop else ROOT
    if around:
        used = differing_there.zip(ends).map(lambda side: side[0] | {side[1]})
        lone = _lone_around(graphs.map(lambda graph: graph.layers.get((ROOT, 0))), graphs, used)
    return Place(diff, inside, lone, around, last, calls_between, graphs, ends, differing_there)


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
    back = _back(starts, graphs, relations, _agreeing_pairs(step, graphs))
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


def _given_above(
    inputs: Both[Operand] | None,
    calls: Both[TracedCall | None],
    relations: Relations,
    graphs: Both[Graph],
    agreed: set[Both[int]],
) -> Both[Operand] | None:
    """Return the two inputs of two calls that differ; if layers of the frameworks around, whose code is not traced,
    have made both (a mask in another form), those of these layers that differ.
    """
    known = [(call.layer, call.call) for call in calls if call is not None]
    while inputs is not None and not any(graph.producers.get(each.tensor) for graph, each in zip(graphs, inputs)):
        known = [(layer.rpartition(".")[0], number) for layer, number in known]
        if not all(layer for layer, _ in known):
            break
        around = Both(*(graph.layers.get(call) for graph, call in zip(graphs, known)))
        above = _inputs(around, relations, graphs, agreed)[1]
        if above is not None and _is_made(above, graphs):
            return above
    return inputs


def _is_made(inputs: Both[Operand] | None, graphs: Both[Graph]) -> bool:
    """Return True if the loop computed two inputs by calls that are traced."""
    return inputs is not None and all(
        graph.producers.get(operand.tensor) is not None for graph, operand in zip(graphs, inputs)
    )


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


def _inputs(
    calls: Both[TracedCall | None], relations: Relations, graphs: Both[Graph], agreed: set[Both[int]]
) -> tuple[bool | None, Both[Operand] | None]:
    """Return whether the inputs of two calls agree, and the first two inputs that differ.

    Args:
        agreed: numbers of tensors that agree, if only without the rows that chose otherwise.

    Returns:
        True, False, or `None` if unknown; and the two operands, or `None` if no input differs.
    """
    reference, candidate = calls
    if reference is None or candidate is None:
        return None, None
    related: list[Relation] = []
    for reference_input, candidate_input in _answering(reference.inputs, candidate.inputs, graphs):
        relation = relations.between(reference_input.tensor, candidate_input.tensor, exact=True)
        passed = Both(reference_input.tensor, candidate_input.tensor) in agreed
        if relation is Relation.DIFFER and not passed:
            return False, Both(reference_input, candidate_input)
        related.append(Relation.AGREE if relation is Relation.DIFFER else relation)
    return (True if related and related[0] is Relation.AGREE else None), None


def _lone(calls: Both[TracedCall | None], graphs: Both[Graph]) -> Both[tuple[str, ...]]:
    """Return the input slots of two calls of a layer that only one of them fills.

    A slot that is filled with a tensor of a paired slot is none: an attention over itself gets its query three times.
    Nor is one with zeros: a recurrent layer begins with them where it gets no state, and a mask of them adds nothing.
    Nor is a matrix in whose place the other side has one of its own.
    """
    reference, candidate = calls
    if reference is None or candidate is None or reference.function or candidate.function:
        return NO_SLOTS
    paired = _answering(reference.inputs, candidate.inputs, graphs)
    met = Both(*({operand.tensor for operand in side} for side in (zip(*paired) if paired else ((), ()))))
    lone: list[tuple[str, ...]] = []
    constants = graphs.zip(calls).map(_held_shapes).swapped()
    for call, tensors, shapes, graph in zip((reference, candidate), met, constants, graphs):
        operands = [o for o in call.inputs if o.tensor not in tensors and not graph.is_zero(o.tensor)]
        lone.append(tuple(o.slot for o in operands if graph.trace.tensors[o.tensor].shape not in shapes))
    return Both(*lone)


def _lone_around(
    calls: Both[TracedCall | None], graphs: Both[Graph], used: Both[frozenset[int]]
) -> Both[tuple[str, ...]]:
    """Return the input slots of the model's call that only one of two calls fills, if what is in them is used.

    Args:
        calls: the calls of the models.
        graphs: the traces.
        used: the numbers of the tensors that differ, and of those that they are computed from.
    """
    lone = _lone(calls, graphs)
    if not any(lone) or all(lone) or any(call is None for call in calls):
        return NO_SLOTS
    filled = calls.zip(used).map(
        lambda side: {o.slot for o in side[0].inputs if o.tensor in side[1]} if side[0] is not None else set()
    )
    return lone.zip(filled).map(lambda side: tuple(slot for slot in side[0] if slot in side[1]))


def _held_otherwise(
    pairs: Sequence[Both[TracedCall]], only: Both[tuple[TracedCall, ...]], graphs: Both[Graph], relations: Relations
) -> Calls | None:
    """Return the call that takes, beside a tensor that agrees, one that a side computes and the other holds."""
    for both in pairs:
        operands = _in_places(both, relations)
        rows = [(pair, relations.between(pair.reference.tensor, pair.candidate.tensor)) for pair in operands]
        unequal = [pair for pair, relation in rows if relation is Relation.DIFFER]
        if len(unequal) != 1 or {relation for _, relation in rows} != {Relation.AGREE, Relation.DIFFER}:
            continue
        is_constant = unequal[0].zip(graphs).map(lambda side: side[0].tensor not in side[1].producers)
        if is_constant.reference != is_constant.candidate and not only.swapped(is_constant.candidate).reference:
            return Calls(Both((), ()), both, slots=unequal[0].map(lambda operand: operand.slot))
    return None


def _held_shapes(side: tuple[Graph, TracedCall | None]) -> set[tuple[int, ...]]:
    """Return the shapes of the tensors that a layer's own code takes, and that nothing computes or gives it."""
    graph, layer = side
    if layer is None:
        return set()
    inputs = {operand.tensor for operand in layer.inputs}
    calls = (call for call in graph.trace.calls if call.function and call.layer == layer.layer)
    operands = {operand.tensor for call in calls for operand in call.inputs}
    return {graph.trace.tensors[k].shape for k in operands - inputs if k not in graph.producers}


def _answering(reference: Sequence[Operand], candidate: Sequence[Operand], graphs: Both[Graph]) -> list[Both[Operand]]:
    """Pair the inputs of two calls, by slot name, else by position; inputs without a partner are left out.

    Of several inputs with other names, those of one position are paired if they have the same size.
    """
    waiting = {operand.slot: operand for operand in candidate}
    named = {
        reference_input.slot: waiting.pop(reference_input.slot)
        for reference_input in reference
        if reference_input.slot in waiting
    }
    unnamed = list(waiting.values())
    single = len(reference) - len(named) == len(unnamed) == 1
    pairs = []
    for reference_input in reference:
        partner = named.get(reference_input.slot) or (unnamed.pop(0) if unnamed else None)
        if partner is None:
            continue
        sizes = graphs.reference.size(reference_input.tensor), graphs.candidate.size(partner.tensor)
        if single or reference_input.slot in named or sizes[0] == sizes[1]:
            pairs.append(Both(reference_input, partner))
    return pairs


def graphs_of(steps: Both[Step], infos: Both[RunInfo]) -> Both[Graph]:
    """Return the graphs of a step's traces."""
    return steps.zip(infos).map(lambda side: Graph(side[0].trace, side[1].layers))


def agreeing(step: Sequence[Diff], graphs: Both[Graph]) -> Both[set[int]]:
    """Return the numbers, in either trace, of the layers' outputs that agree."""
    return _sides(_agreeing_pairs(step, graphs, ("forward",)))


def _sides(pairs: set[Both[int]]) -> Both[set[int]]:
    return Both({tensors.reference for tensors in pairs}, {tensors.candidate for tensors in pairs})


def _agreeing_pairs(
    step: Sequence[Diff], graphs: Both[Graph], stages: Sequence[str] = ("input", "forward")
) -> set[Both[int]]:
    """Return the numbers, in both traces, of the layers' inputs and outputs that agree."""
    agreed: set[Both[int]] = set()
    for diff in step:
        if diff.pair.stage not in stages or not diff.compared or not diff.passed:
            continue
        tensors = [graph.tensor_of(record) for graph, record in zip(graphs, diff.pair.sides) if record is not None]
        first, second = (*tensors, None, None)[:2]
        if first is not None and second is not None:
            agreed.add(Both(first, second))
    return agreed


def _back(
    starts: Both[int], graphs: Both[Graph], relations: Relations, agreed: set[Both[int]]
) -> Both[list[TracedCall]]:
    """Return the calls of either side between tensors that agree and the two tensors that differ."""
    reference, candidate = _sides(agreed)
    return Both(
        graphs.reference.back(starts.reference, lambda tensor: tensor in reference or relations.is_found(tensor, True)),
        graphs.candidate.back(
            starts.candidate, lambda tensor: tensor in candidate or relations.is_found(tensor, False)
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
    pairs = [both for both in pairs if take_alike(both)]
    for both in pairs:
        if all(call.chooses and call.function not in SAMPLING for call in both):
            continue  # what they choose is judged by their scores
        operands = _in_places(both, relations)
        related = [relations.between(first.tensor, second.tensor) for first, second in operands]
        axes = both.zip(graphs).map(lambda side: axes_of(*side))
        if Relation.DIFFER in related:
            continue
        arguments_differ = given_otherwise(both, axes) and not _reshapes_alike(both, graphs)
        # One function of the same parameters gives the same; near a pole, small differences of what goes in are large.
        agree = related and all(relation is Relation.AGREE for relation in related)
        if arguments_differ or (agree and all(relations.are_equal(a.tensor, b.tensor) for a, b in operands)):
            return Calls(Both((), ()), both, arguments_differ)
    paired = Both(*({id(call) for call in side} for side in (zip(*pairs) if pairs else ((), ()))))
    only = suspects.zip(paired).map(lambda side: tuple(call for call in side[0] if id(call) not in side[1]))
    if not all(only) and any(only):
        repeated = _repeated(only.reference or only.candidate, graphs)
        if repeated is not None:
            return Calls(Both((), ()), repeated, True)
    if any(only):
        # One side makes a matrix that the other side holds: calls that only one side makes are no fault.
        return _held_otherwise(pairs, only, graphs, relations) or Calls(only)
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


def _reshapes_alike(calls: Both[TracedCall], graphs: Both[Graph]) -> bool:
    """Return True if two calls give tensors of one shape with the values of their inputs: -1 stands for a size."""
    shapes = calls.zip(graphs).map(lambda side: side[1].trace.tensors[side[0].outputs[0].tensor].shape)
    return all(call.function in RESHAPING for call in calls) and shapes.reference == shapes.candidate


def _alike(call: TracedCall, graph: Graph) -> list[TracedCall]:
    return [each for each in graph.trace.calls if each.full_name == call.full_name]


def _repeated(calls: Sequence[TracedCall], graphs: Both[Graph]) -> Both[TracedCall] | None:
    """Return the first call, with that of the other side, of a function that both sides call as often, with other
    arguments. Where one side gives the same as a call before by chance, the call seems to be the other side's only.
    """
    for call in calls:
        alike = graphs.map(partial(_alike, call))
        if call.function and len(alike.reference) == len(alike.candidate):
            both = next(Both(*pair) for pair in zip(*alike) if any(each is call for each in pair))
            if take_alike(both) and given_in_common(both):
                return both
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


# A part of a tensor is named if it is at most this share of the tensor and at most this many slices. Single elements
# are counted, not named, up to the last share.
_SHARE, _NAMED, _ELEMENTS = 0.25, 4, 0.01

#: The largest relative L2 error of a tensor, and the number of steps in which the tensor was compared.
Agreed = tuple[float, int]
NEVER: Agreed = (0.0, 0)
_Columns = tuple[np.ndarray, np.ndarray]
_NO_COLUMNS: Mapping[tuple[int, PairSchema], _Columns] = MappingProxyType({})
_NONE: Mapping[Site, Agreed] = MappingProxyType({})


class Agreement:
    """The largest error of each tensor in the steps so far, over all processes.

    Args:
        columns: arrays for the tensors that steps with the same schema share, by process and schema: the largest error
            of each tensor, and the number of steps in which the tensor was compared.
        others: the same two numbers for each remaining tensor.
    """

    def __init__(
        self, columns: Mapping[tuple[int, PairSchema], _Columns] = _NO_COLUMNS, others: Mapping[Site, Agreed] = _NONE
    ) -> None:
        self._columns, self._others = columns, others

    def after(self, ranks: Sequence[StepDiffs]) -> Agreement:
        """Return an agreement that includes one more step.

        Args:
            ranks: the step's diffs, by process.
        """
        columns, others = dict(self._columns), self._others
        for rank, diffs in enumerate(ranks):
            compared = diffs.known
            if isinstance(diffs.pairs, PairTable):
                most, steps = columns.get((rank, diffs.sites), (0.0, 0))
                errors = np.where(compared, diffs.relative, 0.0)
                columns[rank, diffs.sites] = np.fmax(most, errors), steps + compared
            else:
                others = self._after_one_by_one(others, diffs, compared)
        return Agreement(columns, others)

    def _after_one_by_one(
        self, others: Mapping[Site, Agreed], diffs: StepDiffs, places: np.ndarray
    ) -> dict[Site, Agreed]:
        after = dict(others)
        errors, sites = diffs.relative.tolist(), _sites(diffs.sites)
        for place in np.flatnonzero(places).tolist():
            site, error = sites[place], errors[place]
            most = after.get(site, NEVER)[0]
            after[site] = error if error > most else most, self._others.get(site, NEVER)[1] + 1
        return after

    def get(self, site: Site, never: Any = None) -> Any:
        """Return the largest error of a tensor and the number of steps in which the tensor was compared.

        Args:
            site: the key of the tensor.
            never: the value to return if the tensor was not compared in any step.
        """
        most, steps = self._others.get(site, NEVER)
        by_rank: dict[int, int] = {}
        for (rank, sites), (errors, counts) in self._columns.items():
            places = [place for place, key in enumerate(_sites(sites)) if key == site]
            if places:
                most = max(most, *(float(errors[place]) for place in places))
                by_rank[rank] = by_rank.get(rank, 0) + max(int(counts[place]) for place in places)
        steps += max(by_rank.values(), default=0)
        return (most, steps) if steps else never


def _sites(sites: PairSchema) -> list[Site]:
    return list(zip(sites.layers, sites.stages, sites.slots, sites.calls))


def extent_of(diff: Diff, step: Sequence[Diff], agreed: Agreement) -> Extent:
    """Return how far a diff reaches within its tensor, over its step and in the steps before.

    Args:
        diff: the first diff that did not pass.
        step: the judged diffs of its step, in causal order.
        agreed: the largest errors in the steps before.
    """
    most, steps = agreed.get(site_of(diff), (None, 0))
    others = _others(diff, step)
    differing = [d for d in others if not d.passed]
    return Extent(
        diff.pair.stage,
        _within(diff),
        len(differing),
        len(others),
        _only([diff, *differing], [d for d in others if d.passed]),
        most,
        steps,
    )


def _others(diff: Diff, step: Sequence[Diff]) -> list[Diff]:
    stage = diff.pair.stage
    same = [d for d in step if d.pair.stage == stage and d.counts and d.pair.anchor.layer != LOOP]
    if stage not in CAUSAL:
        return [d for d in same if d is not diff]
    place = next((k for k, d in enumerate(same) if d is diff), len(same))
    return same[place + 1 :]


def _only(differing: Sequence[Diff], equal: Sequence[Diff]) -> tuple[str, ...]:
    """Return the kinds of parameters that differ, if all compared parameters of these kinds differ and no others."""
    if differing[0].pair.stage not in PARAMETER_STAGES or not equal:
        return ()
    kinds, equal_kinds = {_kind(d) for d in differing}, {_kind(d) for d in equal}
    return tuple(sorted(kinds, reverse=True)) if kinds.isdisjoint(equal_kinds) else ()


def _kind(diff: Diff) -> str:
    anchor = diff.pair.anchor
    if equivalents.group_of_kinds(anchor.layer_type.lower()) == "norm":
        return "norms"
    return "biases" if equivalents.slot(anchor.slot).endswith("bias") else "matrices"


def _within(diff: Diff) -> TensorExtent | None:
    """Return the part of the tensor that differs, if the remaining elements are within the limit; else `None`."""
    judged = diff.judgement
    if judged is None or judged.figure not in (Figure.REL_L2, Figure.L2) or diff.figures is None or diff.problem:
        return None
    try:
        tensors = operands(diff.pair)
    except RunFolderError:
        return None
    if not isinstance(tensors, Arrays) or not tensors.reference.ndim:
        return None
    values = tensors.values()
    error = np.abs(values.candidate - values.reference) ** 2
    scale = diff.figures.reference_l2 if judged.figure is Figure.REL_L2 else 1.0
    allowed = (judged.limit * scale) ** 2
    best: TensorExtent | None = None
    for axis in range(error.ndim):
        indices = _fewest(error.sum(axis=tuple(k for k in range(error.ndim) if k != axis)), allowed)
        size = error.shape[axis]
        if 0 < len(indices) <= min(_NAMED, _SHARE * size) and (
            best is None or len(indices) / size < best.count / best.size
        ):
            best = TensorExtent(_axis_name(diff.pair.stage, axis, error.ndim), indices, len(indices), size)
    if best is None and error.ndim > 1:
        count = len(_fewest(error.ravel(), allowed))
        if 0 < count <= _ELEMENTS * error.size:
            return TensorExtent("element", (), count, error.size)
    return best


def _fewest(errors: np.ndarray, allowed: float) -> tuple[int, ...]:
    """Return the sorted indices of the fewest slices without which the squared error is within the limit."""
    order = np.argsort(errors)
    within = np.cumsum(errors[order]) <= allowed
    return tuple(sorted(int(k) for k in order[int(within.sum()) :]))


def _axis_name(stage: str, axis: int, axes: int) -> str:
    if stage not in PARAMETER_STAGES and axis == 0:
        return "sample"
    if axes == 1:
        return "element"
    if axes == 2 and stage in PARAMETER_STAGES:
        return ("row", "column")[axis]
    return f"index of axis {axis}"


def _nothing(_: int) -> Sequence[Difference]:
    return ()


@dataclass(frozen=True)
class Evidence:
    """Runs, alignment, policy and settings that the search for a cause reads.

    Attributes:
        runs: the reference and the candidate run; their other steps may be read too.
        alignment: the pairs of layers and parameters.
        policy: the policy that judged the diffs.
        steps: the step of the first diff on either side, of the diff's rank; `None` if the steps are not available.
        declared: returns the settings that differ between the runs in a step, by the step's number.
        agreed: the largest error of each tensor in the steps compared before.
    """

    runs: Both[Run]
    alignment: Alignment
    policy: Policy
    steps: Both[Step] | None = None
    declared: Callable[[int], Sequence[Difference]] = _nothing
    agreed: Agreement = field(default_factory=Agreement)
