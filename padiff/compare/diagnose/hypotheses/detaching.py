"""Gradients that one side does not have: a call in its code cuts them off, or no term of its loss gives them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from padiff.compare.diagnose.hypotheses.scene import Scene
from padiff.compare.diagnose.traced import Graph
from padiff.records import LOOP, SIDES, Both, Cause, Diff, Record, TracedCall


def causes(scene: Scene) -> Iterator[Cause]:
    """Of a first diff in gradients: what the records and the code say of gradients that only one side has."""
    yield from _unreached(scene)
    yield from _detached(scene)


def _unreached(scene: Scene) -> Iterator[Cause]:
    """A layer that gave the same on both sides, and that a gradient comes back to on one side only."""
    there: dict[str, list[Diff]] = {}
    for diff in scene.step:
        if diff.pair.anchor.layer != LOOP:
            there.setdefault(diff.pair.stage, []).append(diff)
    for side, other in (SIDES.swapped(), SIDES):
        lacking = [
            {d.pair.anchor.layer for d in there.get(stage, ()) if getattr(d.pair, side) is None}
            for stage in ("backward", "grad")
        ]
        some = {d.pair.anchor.layer for d in there.get("grad", ()) if d.pair.complete}
        agreeing = _all_agree(there.get("forward", ()))
        names = {layers.reference.path: layers.candidate.path for layers in scene.alignment.pairs}
        for layer in sorted((lacking[0] & lacking[1] & agreeing) - some):
            own = layer if side == "reference" else names.get(layer, layer)
            text = (
                f"no gradient comes back to `{own}` on the {side}, and one does on the {other}, though it gives the "
                "same: a term of the loss is missing that is of what it gives, or it is detached"
            )
            yield Cause("loss_term_missing", text)
            return


def _all_agree(diffs: Sequence[Diff]) -> set[str]:
    """The layers whose outputs are all there on both sides, and pass."""
    found = {diff.pair.anchor.layer for diff in diffs}
    return found - {diff.pair.anchor.layer for diff in diffs if not (diff.pair.complete and diff.passed)}


def _detached(scene: Scene) -> Iterator[Cause]:
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
    # Of a layer of the framework the output's gradient would differ before. That a parameter was turned (`w.T`) is not
    # always heard, so another one of the layer whose own code it is will do.
    own = f"{record.layer}/" if cut.layer == record.layer else f"{record.layer}/{record.slot}"
    return any(name.startswith(own) for call in (cut, *before) for name in call.parameters)
