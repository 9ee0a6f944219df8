"""The cause of a first diff that was seen in sketches only, found in a later step that was recorded in full.

By then the runs have come apart: weights and what goes in are others on either side. So the reference's calls are
computed of what went into the candidate's, as they are and with one edit: what gives the candidate's tensor is what is
other in its code, however far the runs are apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from padiff.compare.diagnose.computing.edit import Sheet, Target
from padiff.compare.diagnose.computing.formula import Formula, UnknownError, computed
from padiff.compare.diagnose.computing.leaving_out import left_out
from padiff.compare.diagnose.computing.otherwise import otherwise
from padiff.compare.diagnose.computing.writer import CONSTANT, Writer
from padiff.compare.diagnose.evidence import Evidence
from padiff.compare.diagnose.hypotheses.engine import explain, explained
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis
from padiff.compare.diagnose.hypotheses.layer_output import root
from padiff.compare.diagnose.hypotheses.proof import NEAR
from padiff.compare.diagnose.hypotheses.rewritten import AGREES, Case, Found, case_of, reported, tried
from padiff.compare.diagnose.hypotheses.rewritten import same as _same
from padiff.compare.diagnose.hypotheses.scene import Scene, rounding_of, whole_of
from padiff.compare.diagnose.place import Place, graphs_of
from padiff.compare.diagnose.ranks import placed
from padiff.compare.diagnose.traced import Graph
from padiff.errors import PadiffError
from padiff.pair.layouts import layout_between
from padiff.records import Both, Cause, Diff, FirstDiff, Operand, Pair, Step

# What rounding makes of an output that is computed of the same, as a multiple of its type's: as in
# `padiff.compare.diagnose.hypotheses.layer_output`.
_ROUNDINGS = 8.0
#: Elements that are computed with, at most.
_MOST = 8_000_000


def cause_found_later(first: FirstDiff, place: Place, diffs: Sequence[Diff], evidence: Evidence) -> Cause | None:
    """The cause of a first diff, proven by a later step; `None` where that step does not show it.

    Args:
        place: where in the code it comes from, in its own step.
        diffs: of the later step.
        evidence: with the later step on either side.
    """
    if first.diff is None or evidence.steps is None:
        return None
    anchor = first.diff.pair.anchor
    at = anchor.layer, anchor.stage, anchor.call
    own = next((d for d in diffs if _site(d) == at and d.pair.complete and d.pair.step == diffs[0].pair.step), None)
    if own is None or first.stage not in ("forward", "input"):
        return None
    if own.figures is None or own.figures.basis != "tensors":
        return None
    number = own.pair.step
    found = placed(own, diffs)
    scene = Scene(own, found.own, evidence.alignment, evidence.runs, found.rank)
    try:
        # What comes from outside is as it would be had the runs not come apart.
        cause = (
            explain(scene) if first.stage == "input" else explained(_hypotheses(scene, place, evidence.steps))
        ).cause
    except (PadiffError, ValueError, IndexError, KeyError):
        return None  # what can't be read explains nothing
    if cause is None or not cause.proven:
        return None
    text = f"at step {number}, which was recorded in full, {cause.evidence}"
    return replace(cause, evidence=text, fix=cause.fix or (first.cause.fix if first.cause is not None else ""))


def _site(diff: Diff) -> tuple[str, str, int]:
    anchor = diff.pair.anchor
    return anchor.layer, anchor.stage, anchor.call


def _hypotheses(scene: Scene, place: Place, steps: Both[Step]) -> Iterator[Hypothesis]:
    infos = scene.runs.map(lambda run: run.info)
    graphs = graphs_of(steps, infos)
    ends = _ends(scene, place, graphs)
    if ends is None:
        return
    known = _case(scene, graphs, ends)
    if known is None:
        return
    sheets, noise = [], 0.0
    for k, (graph, step, info, end) in enumerate(zip(graphs, steps, infos, ends)):
        writer, own, look = Writer(graph, step, info), [*known.sides][k], [*known.looks][k]
        try:
            formula = writer.write(end, {end, *_found_again([*place.computed][k], place, k, graph)})
            made = look(formula.values[formula.end])
        except (UnknownError, ValueError, IndexError):
            return
        off = root(made - own) if made.shape == own.shape else np.inf
        if off > AGREES * root(own) or sum(value.size for value in formula.values) > _MOST:
            return
        noise = max(noise, off, _ROUNDINGS * rounding_of(scene.diff.pair) * root(own))
        sheets.append(Sheet(writer, graph, known.looks.reference is not _same))
    answers = _Answers(scene, graphs)
    found: list[Found] = []
    case = None
    for k, sheet in enumerate(sheets):
        other, actual, look = answers.instead(sheet, k), [*known.sides][1 - k], [*known.looks][k]
        if other is None:
            continue
        base = look(other.values[other.end])
        if base.shape != actual.shape or root(base - actual) <= NEAR * noise:
            return  # what goes in is all that differs
        sheet.formula = other
        case = replace(known, sides=Both(base, actual).swapped(bool(k)), noise=max(noise, 1e-300))
        makers = (left_out,) if k else (left_out, otherwise)
        target = Target(actual, sheet.shape(other.end), look)
        found += [replace(one, case=case) for one in tried(case, sheet, makers, target, bool(k))]
    if case is not None:
        yield from reported(case, found)


def _case(scene: Scene, graphs: Both[Graph], ends: Both[int]) -> Case | None:
    """What was recorded of the tensors that differ; `None` where it can't be brought together."""
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

#: A tensor of a trace, whatever its number: a call that gives it, or that it goes into, and its slot there.
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


def _ends(scene: Scene, place: Place, graphs: Both[Graph]) -> Both[int] | None:
    """The tensors that differ: those that the first step showed, where it did."""
    found: list[int | None] = []
    for k, (graph, record) in enumerate(zip(graphs, scene.diff.pair.sides)):
        if place.graphs is not None and place.ends is not None:
            found.append(_at(graph, _address([*place.graphs][k], [*place.ends][k])))
        else:
            found.append(None if record is None else graph.tensor_of(record))
    return None if found[0] is None or found[1] is None else Both(found[0], found[1])


def _found_again(tensors: Iterable[int], place: Place, k: int, graph: Graph) -> set[int]:
    """Tensors of the first step's trace, by their numbers in another one's."""
    if place.graphs is None:
        return set()
    found = {_at(graph, _address([*place.graphs][k], tensor)) for tensor in tensors}
    return {one for one in found if one is not None}


# -- what the other side has in a tensor's place -------------------------------------------------------------------


class _Answers:
    """What goes into one side's calls, as the other side has it.

    Args:
        graphs: of the step, either side's.
    """

    def __init__(self, scene: Scene, graphs: Both[Graph]) -> None:
        self._scene, self._graphs = scene, graphs
        self._paths = Both(
            {p.reference.path: p.candidate.path for p in scene.alignment.pairs},
            {p.candidate.path: p.reference.path for p in scene.alignment.pairs},
        )
        self._pairs: list[dict[tuple[str, str, int], Pair]] = [{}, {}]
        for stage in ("forward", "weight", "input"):
            for pair in scene.pairs(scene.number, stage).values():
                for known, record in zip(self._pairs, pair.sides):
                    if record is not None:
                        known[record.layer, record.slot, record.call] = pair

    def instead(self, sheet: Sheet, k: int) -> Formula | None:
        """A side's formula, of what goes in on the other side; `None` where that is not known."""
        made = Formula()
        for number, (node, value) in enumerate(zip(sheet.nodes, sheet.formula.values)):
            if node.operation:
                made.nodes.append(node)
                try:
                    with np.errstate(all="ignore"):
                        made.values.append(computed(node, made.values.__getitem__))
                except (UnknownError, ValueError, IndexError):
                    return None
                continue
            other = value if node.name == CONSTANT else self._of(sheet, number, k)
            if other is None or other.shape != value.shape:
                return None
            made.leaf(other, node.name)
        made.end = sheet.formula.end
        return made if np.isfinite(made.values[made.end]).all() else None

    def _of(self, sheet: Sheet, node: int, k: int) -> np.ndarray | None:
        name = sheet.nodes[node].name
        if name:
            layer, _, slot = name.rpartition("/")
            return self._other(self._pairs[k].get((layer, slot, 0)), k)
        tensor = sheet.tensor(node)
        if tensor is None:
            return None
        graph, other = self._graphs if not k else self._graphs.swapped()
        for call in graph.trace.calls:
            if call.function:
                continue
            for operand in call.outputs:
                found = self._other(self._pairs[k].get((call.layer, operand.slot, call.call)), k)
                if operand.tensor == tensor and found is not None:
                    return found
        for call in graph.trace.calls:
            at = other.layers.get(([*self._paths][k].get(call.layer, ""), call.call)) if not call.function else None
            for place, operand in enumerate(call.inputs) if at is not None else ():
                if operand.tensor == tensor:
                    return self._input(graph, other, tensor, at.inputs, operand.slot, place)  # type: ignore[union-attr]
        return None

    def _other(self, pair: Pair | None, k: int) -> np.ndarray | None:
        whole = None if pair is None or not pair.complete else whole_of(pair)
        if whole is None or pair is None or pair.candidate is None:
            return None
        return whole.candidate if not k else np.asarray(pair.layout.undo(whole.reference, pair.candidate.shape))

    @staticmethod
    def _input(
        graph: Graph, other: Graph, tensor: int, there: Sequence[Operand], slot: str, place: int
    ) -> np.ndarray | None:
        """What goes into the layer that answers to one: in the slot of that name, else in that place."""
        named = [one for one in there if one.slot == slot] or list(there[place : place + 1])
        source = other.trace.tensors[named[0].tensor].source if named else None
        if source is None or source.sketched:
            return None
        shape, value = graph.trace.tensors[tensor].shape, np.asarray(source.read())
        return np.asarray(layout_between(shape, value.shape).apply(value, shape))
