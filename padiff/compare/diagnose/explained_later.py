"""Causes of a first diff that was recorded as sketches, found in a later step that was recorded in full.

By the later step the runs have diverged: weights and inputs differ on both sides. So the calls of one side are
computed from the inputs of the other side, unchanged and with one edit. An edit that gives the other side's tensor
shows what differs in the code, however far the runs have diverged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from padiff.compare.diagnose.computing.edit import FormulaView, Target, dropped_terms
from padiff.compare.diagnose.computing.formula import Formula, UnknownError, computed
from padiff.compare.diagnose.computing.operation_edits import operation_edits
from padiff.compare.diagnose.computing.writer import CONSTANT, Writer
from padiff.compare.diagnose.first import placed
from padiff.compare.diagnose.hypotheses.code_edits import AGREES, Case, Found, case_of, reported, tried
from padiff.compare.diagnose.hypotheses.code_edits import same as _same
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, rounding_of, whole_of
from padiff.compare.diagnose.hypotheses.engine import explain, explained
from padiff.compare.diagnose.hypotheses.hypothesis import NEAR, Hypothesis
from padiff.compare.diagnose.hypotheses.outputs import root
from padiff.compare.diagnose.place import Evidence, Place, graphs_of
from padiff.compare.diagnose.traced import Graph
from padiff.errors import PadiffError
from padiff.pair.joined_calls import layout_between
from padiff.records import Both, Cause, Diff, FirstDiff, Operand, Pair, Step

# The rounding error of an output computed from the same inputs, as a multiple of its dtype's rounding: the same limit
# as in `padiff.compare.diagnose.hypotheses.outputs`.
_ROUNDINGS = 8.0
#: The most elements that a formula may hold to be computed.
_MOST = 8_000_000


def cause_found_later(first: FirstDiff, place: Place, diffs: Sequence[Diff], evidence: Evidence) -> Cause | None:
    """Return the cause of a first diff, proven by a later step; `None` if that step does not show the cause.

    Args:
        first: the first diff.
        place: where in the code the diff comes from, in the diff's own step.
        diffs: the diffs of the later step.
        evidence: the input of the search, with the later step on either side.
    """
    if first.diff is None or evidence.steps is None:
        return None
    anchor = first.diff.pair.anchor
    site = anchor.layer, anchor.stage, anchor.call
    later = next((d for d in diffs if _site(d) == site and d.pair.complete and d.pair.step == diffs[0].pair.step), None)
    if later is None or first.stage not in ("forward", "input"):
        return None
    if later.figures is None or later.figures.basis != "tensors":
        return None
    number = later.pair.step
    rank_diff = placed(later, diffs)
    scene = DiffContext(later, rank_diff.own, evidence.alignment, evidence.runs, rank_diff.rank, unlimited=True)
    try:
        # The inputs of the model do not depend on the weights, so they can be compared as in the first step.
        cause = (
            explain(scene) if first.stage == "input" else explained(_hypotheses(scene, place, evidence.steps))
        ).cause
    except (PadiffError, ValueError, IndexError, KeyError):
        return None  # unreadable values explain nothing
    if cause is None or not cause.proven:
        return None
    text = f"at step {number}, which was recorded in full, {cause.evidence}"
    return replace(cause, evidence=text, fix=cause.fix or (first.cause.fix if first.cause is not None else ""))


def _site(diff: Diff) -> tuple[str, str, int]:
    anchor = diff.pair.anchor
    return anchor.layer, anchor.stage, anchor.call


def _hypotheses(scene: DiffContext, place: Place, steps: Both[Step]) -> Iterator[Hypothesis]:
    infos = scene.runs.map(lambda run: run.info)
    graphs = graphs_of(steps, infos)
    ends = _ends(scene, place, graphs)
    if ends is None:
        return
    recorded = _case(scene, graphs, ends)
    if recorded is None:
        return
    sheets, noise = [], 0.0
    for k, (graph, step, info, end) in enumerate(zip(graphs, steps, infos, ends)):
        writer, actual, look = Writer(graph, step, info), [*recorded.sides][k], [*recorded.looks][k]
        try:
            formula = writer.write(end, {end, *_found_again([*place.computed][k], place, k, graph)})
            output = look(formula.values[formula.end])
        except (UnknownError, ValueError, IndexError):
            return
        error = root(output - actual) if output.shape == actual.shape else np.inf
        if error > AGREES * root(actual) or sum(value.size for value in formula.values) > _MOST:
            return
        noise = max(noise, error, _ROUNDINGS * rounding_of(scene.diff.pair) * root(actual))
        sheets.append(FormulaView(writer, graph, recorded.looks.reference is not _same))
    answers = _Answers(scene, graphs)
    trials: list[Found] = []
    case = None
    for k, sheet in enumerate(sheets):
        swapped, expected, look = answers.instead(sheet, k), [*recorded.sides][1 - k], [*recorded.looks][k]
        if swapped is None:
            continue
        base = look(swapped.values[swapped.end])
        if base.shape != expected.shape or root(base - expected) <= NEAR * noise:
            return  # only the inputs differ
        sheet.formula = swapped
        case = replace(recorded, sides=Both(base, expected).swapped(bool(k)), noise=max(noise, 1e-300))
        makers = (dropped_terms,) if k else (dropped_terms, operation_edits)
        target = Target(expected, sheet.shape(swapped.end), look)
        trials += [replace(trial, case=case) for trial in tried(case, sheet, makers, target, bool(k))]
    if case is not None:
        yield from reported(case, trials)


def _case(scene: DiffContext, graphs: Both[Graph], ends: Both[int]) -> Case | None:
    """Return the recorded tensors that differ, as a case; `None` if they are not recorded or do not fit each other."""
    likes = scene.diff.pair.sides
    if likes.reference is None or likes.candidate is None:
        return None
    reference = graphs.reference.record(ends.reference, likes.reference)
    candidate = graphs.candidate.record(ends.candidate, likes.candidate)
    if reference is None or candidate is None:
        return None
    layout = layout_between(reference.shape, candidate.shape)
    pair = Pair(scene.number, reference, candidate, layout)
    return case_of(replace(scene, diff=Diff(pair)))


# -- the same places in a later step -------------------------------------------------------------------------------

#: A tensor of a trace, independent of its number: True if the call returns the tensor and False if the tensor is an
#: input, then layer, call, function and nth of the call, and the tensor's slot.
_Address = tuple[bool, str, int, str, int, str]


def _address(graph: Graph, tensor: int) -> _Address | None:
    call = graph.producers.get(tensor)
    if call is not None:
        slot = next(o.slot for o in call.outputs if o.tensor == tensor)
        return True, call.layer, call.call, call.function, call.nth, slot
    for call in graph.trace.calls:
        for operand in call.inputs:
            if operand.tensor == tensor:
                return False, call.layer, call.call, call.function, call.nth, operand.slot
    return None


def _at(graph: Graph, address: _Address | None) -> int | None:
    if address is None:
        return None
    gives, *which, slot = address
    for call in graph.trace.calls:
        if [call.layer, call.call, call.function, call.nth] == which:
            return next((o.tensor for o in (call.outputs if gives else call.inputs) if o.slot == slot), None)
    return None


def _ends(scene: DiffContext, place: Place, graphs: Both[Graph]) -> Both[int] | None:
    """Return the numbers of the tensors that differ, in the traces of the later step; `None` if a side has none.

    The tensors that the first step showed are preferred over the output of the layer.
    """
    tensors: list[int | None] = []
    for k, (graph, record) in enumerate(zip(graphs, scene.diff.pair.sides)):
        if place.graphs is not None and place.ends is not None:
            tensors.append(_at(graph, _address([*place.graphs][k], [*place.ends][k])))
        else:
            tensors.append(None if record is None else graph.tensor_of(record))
    return None if tensors[0] is None or tensors[1] is None else Both(tensors[0], tensors[1])


def _found_again(tensors: Iterable[int], place: Place, k: int, graph: Graph) -> set[int]:
    """Return the numbers that tensors of the first step's trace have in another trace."""
    if place.graphs is None:
        return set()
    numbers = {_at(graph, _address([*place.graphs][k], tensor)) for tensor in tensors}
    return {number for number in numbers if number is not None}


# -- the other side's values in a tensor's place -------------------------------------------------------------------


class _Answers:
    """Inputs of one side's calls, with the values of the other side.

    Args:
        scene: the diff and its step.
        graphs: the traces of the step, of either side.
    """

    def __init__(self, scene: DiffContext, graphs: Both[Graph]) -> None:
        self._scene, self._graphs = scene, graphs
        self._paths = Both(
            {p.reference.path: p.candidate.path for p in scene.alignment.pairs},
            {p.candidate.path: p.reference.path for p in scene.alignment.pairs},
        )
        self._pairs: list[dict[tuple[str, str, int], Pair]] = [{}, {}]
        for stage in ("forward", "weight", "input"):
            for pair in scene.pairs(scene.number, stage).values():
                for pairs, record in zip(self._pairs, pair.sides):
                    if record is not None:
                        pairs[record.layer, record.slot, record.call] = pair

    def instead(self, sheet: FormulaView, k: int) -> Formula | None:
        """Return a side's formula computed with the inputs of the other side; `None` if these are not recorded."""
        formula = Formula()
        for number, (node, value) in enumerate(zip(sheet.nodes, sheet.formula.values)):
            if node.operation:
                formula.nodes.append(node)
                try:
                    with np.errstate(all="ignore"):
                        formula.values.append(computed(node, formula.values.__getitem__))
                except (UnknownError, ValueError, IndexError):
                    return None
                continue
            leaf = value if node.name == CONSTANT else self._of(sheet, number, k)
            if leaf is None or leaf.shape != value.shape:
                return None
            formula.leaf(leaf, node.name)
        formula.end = sheet.formula.end
        return formula if np.isfinite(formula.values[formula.end]).all() else None

    def _of(self, sheet: FormulaView, node: int, k: int) -> np.ndarray | None:
        name = sheet.nodes[node].name
        if name:
            layer, _, slot = name.rpartition("/")
            return self._other(self._pairs[k].get((layer, slot, 0)), k)
        tensor = sheet.tensor(node)
        if tensor is None:
            return None
        graph, other_graph = self._graphs if not k else self._graphs.swapped()
        for call in graph.trace.calls:
            if call.function:
                continue
            for operand in call.outputs:
                value = self._other(self._pairs[k].get((call.layer, operand.slot, call.call)), k)
                if operand.tensor == tensor and value is not None:
                    return value
        for call in graph.trace.calls:
            at = (
                other_graph.layers.get(([*self._paths][k].get(call.layer, ""), call.call))
                if not call.function
                else None
            )
            for place, operand in enumerate(call.inputs) if at is not None else ():
                if operand.tensor == tensor:
                    return self._input(graph, other_graph, tensor, at.inputs, operand.slot, place)  # type: ignore[union-attr]
        return None

    def _other(self, pair: Pair | None, k: int) -> np.ndarray | None:
        tensors = None if pair is None or not pair.complete else whole_of(pair)
        if tensors is None or pair is None or pair.candidate is None:
            return None
        return tensors.candidate if not k else np.asarray(pair.layout.undo(tensors.reference, pair.candidate.shape))

    @staticmethod
    def _input(
        graph: Graph, partner: Graph, tensor: int, partner_inputs: Sequence[Operand], slot: str, place: int
    ) -> np.ndarray | None:
        """Return the value in the same slot, else position, of the counterpart layer; `None` if not recorded."""
        operands = [operand for operand in partner_inputs if operand.slot == slot] or list(
            partner_inputs[place : place + 1]
        )
        source = partner.trace.tensors[operands[0].tensor].source if operands else None
        if source is None or source.sketched:
            return None
        shape, value = graph.trace.tensors[tensor].shape, np.asarray(source.read())
        return np.asarray(layout_between(shape, value.shape).apply(value, shape))
