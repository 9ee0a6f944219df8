"""Gradients that a call in one side's code cuts off."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from padiff.compare.diagnose.hypotheses.scene import Scene
from padiff.compare.diagnose.traced import Graph
from padiff.records import LOOP, SIDES, Both, Cause, Record, TracedCall


def causes(scene: Scene) -> Iterator[Cause]:
    """Of a first diff in gradients: that one side's code detaches a tensor that is computed from what differs, and the
    other side's detaches none. It changes that gradient; that nothing else does is not computed.
    """
    steps, records = scene.sides(scene.number), Both(scene.diff.pair.reference, scene.diff.pair.candidate)
    if steps is None or scene.diff.pair.anchor.layer == LOOP or not all(step.trace.functions for step in steps):
        return
    infos = scene.runs.map(lambda run: run.info)
    graphs = steps.zip(infos).map(lambda side: Graph(side[0].trace, side[1].layers))
    cuts = graphs.map(_cuts)
    if bool(cuts.reference) == bool(cuts.candidate):
        return
    side, other = SIDES if cuts.reference else SIDES.swapped()
    graph, record = getattr(graphs, side), getattr(records, side)
    # What goes back through a tensor whose gradient agrees is not cut off there.
    agreeing = {graph.tensor_of(getattr(d.pair, side)) for d in scene.diffs("backward") if d.passed and d.pair.complete}
    for call in getattr(cuts, side):
        if record is not None and _comes_from(graph, call, record, agreeing):
            text = (
                f"detach() in `{call.layer}` of the {side} cuts gradients off that the {other}'s have: none goes back "
                f"through it to `{record.layer}`"
            )
            fix = f"take detach() out of `{call.layer}`" if side == "candidate" else ""
            yield Cause("detached", text, False, "", fix)
            return


def _cuts(graph: Graph) -> list[TracedCall]:
    """The calls that detach what the model's output is computed from; what is only kept to look at is no part of it."""
    found = [call for call in graph.trace.calls if call.function == "detach"]
    outermost = next((call for call in reversed(graph.trace.calls) if not call.function), None)
    if not found or outermost is None:
        return []
    used: set[int] = set()
    for operand in outermost.outputs:
        used |= {given.tensor for call in graph.back(operand.tensor, lambda _: False) for given in call.inputs}
    return [call for call in found if any(operand.tensor in used for operand in call.outputs)]


def _comes_from(graph: Graph, cut: TracedCall, record: Record, agreeing: Collection[int | None]) -> bool:
    """Whether what is detached is computed from a layer's output, or with a parameter, by way of no tensor of some."""
    starts = {given.tensor for given in cut.inputs}
    before = [call for tensor in starts for call in graph.back(tensor, lambda at: at in agreeing)]
    if record.stage == "backward":
        there = starts | {given.tensor for call in before for given in call.inputs}
        return graph.tensor_of(record) in there
    # Of a layer of the framework the output's gradient would differ before.
    return any(f"{record.layer}/{record.slot}" in call.parameters for call in (cut, *before))
