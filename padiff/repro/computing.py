"""Scripts for outputs and gradients: the calls between tensors that agree and the tensor that differs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import numpy as np

from padiff.compare.diagnose.place import Place, agreeing
from padiff.compare.diagnose.traced import Graph, Relations
from padiff.compare.judge.policy import Policy
from padiff.records import Both, Diff, Record, TracedCall, is_functional
from padiff.repro.case import RECORD_IN_FULL, CannotWriteError, Case, values_of
from padiff.repro.expressions import is_writable
from padiff.repro.losses import loss_lines
from padiff.repro.side import Chain, Side, calls_in_order

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
