"""Causes of a missing gradient or update: frozen, detached, not reached by the backward, not stepped."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from itertools import chain, pairwise

from padiff.compare.coverage import stacks_of
from padiff.compare.diagnose.hypotheses import parameter_history
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, place_of
from padiff.compare.diagnose.place import graphs_of
from padiff.compare.diagnose.traced import Graph
from padiff.compare.judge.missing_records import whole_stage_missing
from padiff.compare.measure.pairs import measure_pair
from padiff.errors import PadiffError
from padiff.frameworks.catalog import GRAD
from padiff.model import equivalents
from padiff.records import (
    LOOP,
    ROOT,
    SIDES,
    Both,
    Cause,
    Diff,
    Pair,
    Parameter,
    Record,
    RunInfo,
    Step,
    Trace,
    TracedCall,
    is_below,
)
from padiff.records.compared import UNKNOWN_LINES
from padiff.records.step_schema import without_values
from padiff.records.traces import Operand
from padiff.system.frames import Frame

# Kinds of layers whose parameters have a gradient whenever the output has one.
_SIMPLE = frozenset({"linear", "conv", "norm", "embedding"})


def missing_causes(scene: DiffContext) -> Iterator[Cause]:
    """Yield the cause of a first diff that is a missing gradient or update, as the records show it."""
    pair = scene.diff.pair
    if pair.stage not in ("grad", "update") or pair.anchor.layer == LOOP:
        return
    sides = scene.sides(scene.number)
    if sides is None:
        return
    if pair.complete:
        for side, step in zip(SIDES, sides):
            there = any(_is_there(r) for r in step.records if r.stage == "grad")
            if not there and (cleared := _cleared(scene, side)) is not None:
                yield cleared
        return
    side, other_side = SIDES.swapped() if pair.candidate is None else SIDES
    step, other_step = getattr(sides, side), getattr(sides, other_side)
    if whole_stage_missing(scene.diff, scene.step):
        yield _skipped(scene, side, step, other_step)
        return
    owner = _owned(scene, pair, side)
    if owner is None:
        return
    layer, parameter = owner
    cleared = _cleared(scene, side, (layer, parameter.slot))
    if cleared is not None:
        yield cleared
        return
    sites = [f"{record.layer}/{record.slot}" for record in step.records if record.stage == pair.stage]
    name, key = f"{layer}/{parameter.slot}", (layer, parameter.slot)
    if not parameter.trainable:
        text = f"{name} is frozen on the {side} (it does not require a gradient), and trains on the {other_side}"
        fix = parameter_history.training(getattr(scene.frameworks, side)) if side == "candidate" else ""
        yield Cause("frozen", text, True, "the run says so of the parameter", fix)
        return
    if not sites:
        return
    unsaid = (
        f"{name} requires a gradient on the {side}, and has none: its optimizer does not hold it, or what is computed "
        "with it does not reach the loss"
    )
    back = [r for r in step.records if r.stage == "backward" and r.layer == layer]
    ran = [r for r in step.records if r.stage == "forward" and r.layer == layer]
    back_there = [r for r in other_step.records if r.stage == "backward" and r.layer == pair.anchor.layer]
    info = getattr(scene.runs, side).info
    kind = _kind(info, layer)
    reached = {record.call for record in back}
    unreached = [call for call in sorted({record.call for record in back_there}) if call not in reached]
    is_held = any(key in group for group in _groups(info).values())
    if (
        ran
        and back_there
        and any(r.stage == "backward" for r in step.records)
        and (not back or (is_held and unreached))
    ):
        text = f"no gradient comes back to layer {layer} on the {side}: frozen, detached, or not used"
        if back:
            text = (
                f"no gradient comes back to call {unreached[0] + 1} of layer {layer} on the {side}: a term of its loss "
                "is missing, or detached"
            )
        number = unreached[0] if back else 0
        cut = _cut_line(step, other_step, layer, number) or (_model_line(step, layer, number) if back else None)
        lines = Both(None, cut) if side == SIDES.candidate else UNKNOWN_LINES
        yield Cause("detached", text, True, "the other side's layer gets one in this step, and both ran", lines=lines)
    elif back and not is_held and kind in _SIMPLE and any(_is_there(record) for record in back):
        text = (
            f"the {side}'s optimizer does not hold {name}: its layer's output gets a gradient, so the parameter has "
            "one, and others are updated"
        )
        weight = next((r for r in step.records if r.stage == "weight" and (r.layer, r.slot) == key), None)
        # For a weight of zeros, equal outputs do not show that the layer uses the weight.
        used = weight is not None and _is_there(weight)
        evidence = "gradients of the layer's output are recorded, the parameter requires one, and outputs agree with it"
        fix = parameter_history.holding(getattr(scene.frameworks, side))
        if used:
            yield Cause("not_in_optimizer", text, True, evidence, fix)
        else:
            yield Cause("not_in_optimizer", f"{text}; or the layer does not use it (it is zeros yet)", fix=fix)
    else:
        cut_off = _cut_parameters(scene, graphs_of(sides, scene.runs.map(lambda run: run.info)))
        yield next(cut_off, Cause("no_gradient", unsaid))


def _skipped(scene: DiffContext, side: str, step: Step, other_step: Step) -> Cause:
    """Return the cause of a step in which an optimizer updated nothing."""
    cleared = _cleared(scene, side)
    if cleared is not None:
        return cleared
    if step.trace.functions and not step.trace.backwards and other_step.trace.backwards:
        text = f"the {side}'s loop runs no backward in this step: its optimizer has no gradients to step with"
        return Cause("backward_missing", text, True, "each backward that a loop runs is recorded")
    back = [r for r in step.records if r.stage == "backward"]
    if not back and any(d.pair.stage == "backward" for d in scene.step):
        text = (
            f"no gradient comes back to the {side}'s layers: its loss is detached from them, or computed without them"
        )
        lines = Both(None, _cut_line(step, other_step)) if side == SIDES.candidate else UNKNOWN_LINES
        return Cause("detached", text, True, "no layer's output has a gradient, and the other side's have", lines=lines)
    text = f"the {side}'s optimizer did not step in this step, as it did in others"
    overflowed = [d for d in scene.step if d.figures is not None and d.figures.nonfinite + d.figures.overflowed]
    if not back or overflowed:
        return Cause("step_skipped", text)  # a scaler skips a step whose gradients overflowed
    return Cause("step_skipped", text, True, "its backward ran, and no gradient overflowed")


def _calls_of(step: Step) -> Sequence[TracedCall]:
    """Return the traced calls of a step; none if the trace is damaged."""
    try:
        return [*step.trace.calls]
    except PadiffError:
        return []


def _cut_line(step: Step, other_step: Step, layer: str = "", number: int = 0) -> Frame | None:
    """Return the line that cuts what a layer's call gives, or any layer's, off from the backward; `None` unless one.

    Args:
        other_step: the other side's step: lines that it has, too, are right.
    """
    right = {call.line.code for call in _calls_of(other_step) if call.line is not None}
    reached: set[int] = set()
    lines: set[Frame | None] = set()
    for call in _calls_of(step):
        tensors = {operand.tensor for operand in call.outputs}
        if not call.function and ((call.layer, call.call) == (layer, number) or not layer):
            reached |= tensors
        elif reached & {operand.tensor for operand in call.inputs}:
            if call.function == "detach" or call.cut:
                lines |= {call.line} if call.line is not None and call.line.code not in right else set()
            else:
                reached |= tensors
    return lines.pop() if len(lines) == 1 else None


def _model_line(step: Step, layer: str, number: int) -> Frame | None:
    """Return the line that calls the model in whose code a layer's call is; `None` if not traced."""
    calls = [call for call in _calls_of(step) if not call.function]
    at = next((k for k, call in enumerate(calls) if (call.layer, call.call) == (layer, number)), len(calls))
    around = [call for call in calls[at:] if call.layer == layer or is_below(layer, call.layer)]
    return min(around, key=lambda call: call.layer.count("."), default=TracedCall(layer, 0)).line


def _cleared(scene: DiffContext, side: str, parameter: tuple[str, ...] = ()) -> Cause | None:
    """Return the cause that a side's source clears the gradients between backward and step; `None` if it does not.

    Args:
        parameter: layer and slot of a parameter of the optimizer that is meant; of any optimizer by default.
    """
    info = getattr(scene.runs, side).info
    keys = [key for key, group in _groups(info).items() if not parameter or parameter in group]
    roles = ["@zeroed", *(f"@zeroed:{key}" for key in keys)]
    line = next((info.lines[role] for role in roles if role in info.lines), None)
    if line is None:
        return None
    text = f"the {side} clears its gradients between backward and step: its optimizer has nothing to step with"
    optimizer, _, clear = line.code.partition("(")[0].rpartition(".")
    fix = f"{optimizer}.step(); {optimizer}.{clear}()" if side == SIDES.candidate else ""
    return Cause("gradients_cleared", text, True, "the source clears them there, and nothing is updated", fix)


# Most steps whose updates are counted.
_COUNTED = 32


def interval_cause(scene: DiffContext) -> Cause | None:
    """Return the cause that the loops update parameters another number of times in this step; else `None`.

    A parameter that one side does not reach, such as an expert without a token, explains its missing gradient only.
    """
    now, pair = scene.sides(scene.number), scene.diff.pair
    if now is None or not any(updates := now.map(_updates)):
        return None
    is_missing = not pair.complete and pair.stage in ("grad", "update")
    is_first = scene.number == scene.numbers[0]
    most = updates.map(lambda counts: max(counts.values(), default=0))
    calls = now.map(lambda step: step.micro_batches)
    is_counted = most.reference != most.candidate and (not is_first or pair.stage == "input")
    # Weights that agree where the step begins, and are updated within it.
    called = pair.sides.map(lambda record: record.layer if record else "").zip(updates)
    owned = called.map(lambda side: max((n for (layer, _), n in side[1].items() if layer == side[0]), default=0))
    is_counted = is_counted or (pair.stage == "forward" and owned.reference != owned.candidate and all(owned))
    is_told = is_counted or is_missing or calls.reference != calls.candidate
    backwards = now.map(lambda step: Trace(calls=_calls_of(step)).backwards)
    if not is_told and backwards.reference == backwards.candidate:
        return None
    slices = (pair.map(lambda parts: parts[0]) for pair in scene.alignment.parameters)
    keys = [both.map(lambda part: (part.layer, part.slot)) for both in slices]
    steps = [sides for n in scene.numbers[:_COUNTED] if (sides := scene.sides(n)) is not None]
    groups = scene.runs.map(lambda run: _groups(run.info))
    counts = Both(*([_updates(getattr(sides, side)) for sides in steps] for side in SIDES))
    times = [both.zip(updates).map(lambda each: each[1][each[0]]) for both in keys]
    # What one side never updates is frozen there, or in no optimizer.
    rows = [both.zip(counts).map(lambda each: [step[each[0]] for step in each[1]]) for both in keys]
    never = _never_stepped(scene, keys, rows, steps)
    if never is not None or not is_told or not all(updates):
        return never
    trained = [k for k, both in enumerate(rows) if all(map(any, both))]
    # Beside its optimizer's others, a parameter without an update has no gradient: its optimizer steps as often.
    stepped = [keys[k].zip(groups.zip(updates)).map(_is_stepped) for k in range(len(keys))]
    apart = [k for k in trained if times[k].reference != times[k].candidate and all(stepped[k])]
    missing = pair.anchor.layer, pair.anchor.slot.partition("[")[0]
    if not apart or (is_missing and not any(missing in {*keys[k]} for k in apart)):
        return None
    side, partner = SIDES if times[apart[0]].reference < times[apart[0]].candidate else SIDES.swapped()
    often, fewer = (_often(getattr(times[apart[0]], each)) for each in (partner, side))
    text = f"the {partner}'s optimizer stepped {often} in this step, the {side}'s {fewer}"
    optimizer_names = scene.runs.map(lambda run: _holders(run.info))
    for k in apart:
        holders = keys[k].zip(optimizer_names).map(lambda each: each[1][each[0]])
        if holders.reference != holders.candidate and all(holders):
            name = "/".join(keys[k].candidate)
            text = (
                f"the candidate's loop has `{name}` in {holders.candidate} of its optimizers, the reference's in "
                f"{holders.reference}: a step of each updates it"
            )
            return Cause("step_repeated", text, True, _COUNTS)
    busiest = Both(*(max(trained, key=lambda k: sum(getattr(rows[k], side))) for side in SIDES))
    for k in [*apart, *trained]:
        intervals = Both(
            *(
                _interval(getattr(rows[k], side), getattr(rows[most], side), getattr(keys[most], side)[0], steps)
                for side, most in zip(SIDES, busiest)
            )
        )
        if intervals.reference != intervals.candidate:
            text = (
                f"the candidate updates `{keys[k].candidate[0]}` {intervals.candidate}, the reference "
                f"{intervals.reference}"
            )
            return Cause("step_repeated", text, True, _COUNTS)
    return Cause("step_repeated", text, is_missing, _COUNTS) if is_missing or is_counted or not is_first else None


_COUNTS = "each step's updates are recorded"


def _never_stepped(
    scene: DiffContext,
    keys: Sequence[Both[tuple[str, str]]],
    rows: Sequence[Both[list[int]]],
    steps: Sequence[Both[Step]],
) -> Cause | None:
    """Return the cause that one side's optimizer never steps, and the other side updates what it holds.

    Args:
        keys: parameters that both sides have.
        rows: the number of updates of each, in each step.
        steps: the steps. An optimizer that steps has a learning rate, though it may update nothing.
    """
    for side, other_side in (SIDES.swapped(), SIDES):
        info = getattr(scene.runs, side).info
        groups = _groups(info)
        most = sum(name.endswith(".parameters") for name in info.settings)  # each group of parameters has a rate
        rates = {
            r.slot for each in steps for r in getattr(each, side).records if (r.layer, r.stage) == (LOOP, "update")
        }
        apart = {
            getattr(both, side): getattr(row, side) for both, row in zip(keys, rows) if any(getattr(row, other_side))
        }
        for key, group in groups.items():
            names = [each for each in group if each in apart]
            if names and len(rates) < most and not any(any(apart[each]) for each in names):
                text = f"the {side}'s optimizer of `{'/'.join(names[0])}` never steps, the {other_side}'s does"
                roles = ("@unstepped:after", f"@zero_grad:{key}", "@zero_grad", key)
                line = next((info.lines[role] for role in roles if role in info.lines), None)
                lines = Both(None, line) if side == SIDES.candidate else Both(line, None)
                cleared = info.lines.get("@unstepped")
                name = None if cleared is None else re.search(r"([\w.]+)\.(?:zero_grad|clear_grad)", cleared.code)
                fix = f"{name[1]}.step()" if name is not None and side == SIDES.candidate else ""
                return Cause("never_stepped", text, True, _COUNTS, fix, lines=lines)
    return None


def _updates(step: Step) -> Counter[tuple[str, str]]:
    """Return the number of updates of each parameter in a step."""
    return Counter((r.layer, r.slot) for r in without_values(step.records) if r.stage == "update" and r.layer != LOOP)


_Groups = dict[str, list[tuple[str, ...]]]


def _groups(info: RunInfo) -> _Groups:
    """Return the parameters of each optimizer, by its key."""
    groups: _Groups = {}
    for name, value in info.settings.items():
        if name.endswith(".parameters") and isinstance(value, list | tuple):
            key = name.partition(".group.")[0]
            groups.setdefault(key, []).extend(tuple(each.rsplit("/", 1)) for each in value)
    return groups


def _is_stepped(
    of_side: tuple[tuple[str, str], tuple[_Groups, Counter[tuple[str, str]]]],
) -> bool:
    """Return False if a parameter is updated less often than others of its only optimizer."""
    key, (groups, updates) = of_side
    holding = [group for group in groups.values() if key in group]
    return len(holding) != 1 or updates[key] == max(
        (count for each, count in updates.items() if each in holding[0]), default=0
    )


def _holders(info: RunInfo) -> Counter[tuple[str, ...]]:
    """Return the number of optimizers that hold each parameter."""
    return Counter(chain.from_iterable(_groups(info).values()))


def _interval(series: Sequence[int], most: Sequence[int], name: str, steps: Sequence[Both[Step]]) -> str:
    """Return the steps in which a parameter is updated as text, beside the parameter with the most updates."""
    updating = [k for k, count in enumerate(series) if count]
    if [*series][updating[0] :] == [*most][updating[0] :]:
        return f"each time, but only from step {steps[updating[0]].reference.number} on" if updating[0] else "each time"
    first = steps[updating[0]].reference.number
    if all(series[updating[0] :]):
        ratios = {total / count for count, total in zip(series[1:], most[1:]) if count}
        often = f"once for {ratios.pop():g} updates of `{name}`" if len(ratios) == 1 else ""
        if often and most[0] * sum(series[1:]) != series[0] * sum(most[1:]):
            often += f", the first time for {most[0]}"
        often = often or f"{sum(series)} times for {sum(most)} updates of `{name}`"
        return f"{often}, but only from step {first} on" if updating[0] else often
    gaps = {after - before for before, after in pairwise(updating)}
    if len(gaps) == 1 and gaps != {1}:
        return f"in every {gaps.pop()} steps, from step {first} on"
    return f"in {len(updating)} of {len(series)} steps, first in step {first}"


def _often(times: int) -> str:
    return {0: "not at all", 1: "once", 2: "twice"}.get(times, f"{times} times")


def _owned(scene: DiffContext, pair: Pair, side: str) -> tuple[str, Parameter] | None:
    """Return the layer and parameter on the side that has no record; `None` if the alignment has none."""
    anchor = pair.anchor
    other_side = "candidate" if side == "reference" else "reference"
    for parts in scene.alignment.parameters:
        if any(
            (part.layer, part.slot) == (anchor.layer, anchor.slot.partition("[")[0])
            for part in getattr(parts, other_side)
        ):
            for part in getattr(parts, side):
                for layer in getattr(scene.runs, side).info.layers:
                    if layer.path == part.layer:
                        parameter = next((p for p in layer.parameters if p.slot == part.slot), None)
                        if parameter is not None:
                            return layer.path, parameter
    return None


def _kind(info: RunInfo, path: str) -> str:
    layer = next((layer for layer in info.layers if layer.path == path), None)
    return equivalents.group_of_kinds(equivalents.kind(layer)) if layer is not None else ""


def _is_there(record: Record) -> bool:
    """Return True if a gradient has an element other than zero."""
    sketch = record.sketch
    if sketch is not None:
        return sketch.l2 > 0
    size = math.prod(record.shape)
    return bool(size) and bool(record.value.any())


def detach_causes(scene: DiffContext) -> Iterator[Cause]:
    """Yield causes of a first diff in gradients that only one side has, from records and traced calls."""
    yield from _without_graph(scene)
    yield from _unreached(scene)
    yield from _detached(scene)
    yield from _second_order(scene)


def not_detached(scene: DiffContext) -> Iterator[Cause]:
    """Yield the cause that only one side cuts an output off from a backward, so that the other side's output gets a
    further gradient.
    """
    pair, steps = scene.diff.pair, scene.sides(scene.number)
    if steps is None or pair.stage != "backward" or pair.reference is None or pair.candidate is None:
        return
    fires = steps.zip(Both(pair.reference, pair.candidate)).map(lambda side: _fires(*side))
    starts = steps.map(lambda step: step.trace.backwards)
    if starts.reference != starts.candidate or abs(len(fires.reference) - len(fires.candidate)) != 1:
        return
    fewer, more = SIDES if len(fires.reference) < len(fires.candidate) else SIDES.swapped()
    rest, surplus = getattr(fires, fewer), getattr(fires, more)
    limit = scene.diff.judgement.limit if scene.diff.judgement is not None else 0.0
    agrees = all(_distance(one, other, scene.diff.pair) <= limit for one, other in zip(rest, surplus[1:]))
    graphs = graphs_of(steps, scene.runs.map(lambda run: run.info))
    cut = _cut_outputs(getattr(graphs, fewer), getattr(pair, fewer))
    other_cut = _cut_outputs(getattr(graphs, more), getattr(pair, more))
    if not agrees or other_cut:
        return
    name, how = getattr(pair, more).layer, "detach() in the loop" if cut else "detach, no_grad"
    text = (
        f"the {more} does not detach what `{name}` gives before another model takes it, the {fewer} does ({how}): a "
        "further gradient comes back to it, of another loss"
    )
    evidence = "without the further gradient, the gradients agree; both loops run as many backwards"
    lines = Both(cut.line if cut else None, None)
    taker = None if cut is None else _taker(getattr(graphs, fewer), cut)
    if taker is not None:
        # The other side's call of the model that takes the output.
        names = {getattr(each, fewer).path: getattr(each, more).path for each in scene.alignment.pairs}
        site = names.get(taker.layer, taker.layer), taker.call
        same = [c for c in getattr(steps, more).trace.calls if not c.function and (c.layer, c.call) == site]
        lines = replace(lines, candidate=next((c.line for c in same), None))
    yield Cause(
        "not_detached",
        text,
        bool(cut) and bool(rest),
        evidence if cut and rest else "",
        lines=lines if fewer == "reference" else lines.swapped(),
    )


def _fires(step: Step, record: Record) -> list[Record]:
    """Return the gradients of the output that a record is a gradient of, in order."""
    slot = record.slot.partition("@")[0]
    site = record.layer, record.call, slot
    return [r for r in step.records if r.stage == "backward" and (r.layer, r.call, r.slot.partition("@")[0]) == site]


def _distance(first: Record, second: Record, pair: Pair) -> float:
    figures = measure_pair(replace(pair, reference=first, candidate=second)).figures
    return math.inf if figures is None or figures.nonfinite else figures.rel_l2


def _cut_outputs(graph: Graph, record: Record) -> TracedCall | None:
    """Return the loop's call of detach on what the model of a record gives; `None` if there is none."""
    top = record.layer.partition(".")[0]
    outputs = {
        operand.tensor
        for call in graph.trace.calls
        if not call.function and (call.layer == top or is_below(call.layer, top))
        for operand in call.outputs
    }
    for call in graph.trace.calls:
        if call.layer == LOOP and call.function == "detach" and any(o.tensor in outputs for o in call.inputs):
            return call
    return None


def _taker(graph: Graph, cut: TracedCall) -> TracedCall | None:
    """Return the last call of a layer that takes what a call of detach gives: of the outermost such layer."""
    tensors = {operand.tensor for operand in cut.outputs}
    takers = [c for c in graph.trace.calls if not c.function and any(o.tensor in tensors for o in c.inputs)]
    return min(takers, key=lambda c: c.layer.count("."), default=None)


def _second_order(scene: DiffContext) -> Iterator[Cause]:
    """Yield the cause of a further gradient of an output whose first one agrees: gradients of gradients differ."""
    anchor, pair = scene.diff.pair.anchor, scene.diff.pair
    if pair.stage != "backward" or not pair.complete or "@" not in anchor.slot:
        return
    earlier = [
        d
        for d in scene.diffs("backward")
        if (d.pair.anchor.layer, d.pair.anchor.call) == (anchor.layer, anchor.call) and d is not scene.diff
    ]
    if earlier and all(d.passed for d in earlier):
        text = (
            f"the gradients of `{anchor.layer}` that the loop asks for agree, and what the loss gives back through "
            "them does not: a term of the loss that is made of gradients has another form or weight, or is a constant "
            "on one side (create_graph=True is missing, or it is detached)"
        )
        yield Cause("second_order", text)


def _without_graph(scene: DiffContext) -> Iterator[Cause]:
    """Yield the cause that only one side keeps the graph of the gradients that both loops ask for."""
    steps = scene.sides(scene.number)
    here = scene.diff.pair.anchor.order
    if steps is None or any(not d.passed and d.pair.anchor.order < here for d in scene.diffs("forward", "loss")):
        return
    calls, flags = _asked(steps)
    if len(flags.reference) != len(flags.candidate) or flags.reference == flags.candidate:
        return
    place = next(k for k, both in enumerate(zip(*flags)) if both[0] != both[1])
    side, other_side = SIDES.swapped() if flags.reference[place] else SIDES
    text = (
        f"the {side} asks for gradients without create_graph=True, the {other_side} with it: to the {side} they are "
        "constants, through which no gradient comes back"
    )
    fix = "create_graph=True" if side == "candidate" else ""
    yield Cause("second_order", text, fix=fix, lines=calls.map(lambda side: side[place].line))


def _asked(steps: Both[Step]) -> tuple[Both[list[TracedCall]], Both[list[bool]]]:
    """Return the loops' calls for gradients, and for each True if it keeps the graph."""
    calls = steps.map(lambda step: [call for call in step.trace.calls if call.function == GRAD])
    return calls, calls.map(lambda side: [bool(call.arguments.get("create_graph", False)) for call in side])


# Largest relative difference of two values of one loss.
_SAME_LOSS = 1e-4


def _without_backward(scene: DiffContext) -> Iterator[Cause]:
    """Yield the cause that one loop runs no backward of a loss, and the other loop runs it besides all others."""
    steps = scene.sides(scene.number)
    if steps is None:
        return
    graphs = graphs_of(steps, scene.runs.map(lambda run: run.info))
    ends = graphs.map(lambda graph: [*graph.noted.get("backward", ())])
    side, partner = SIDES if len(ends.reference) < len(ends.candidate) else SIDES.swapped()
    graph, remaining = getattr(graphs, partner), [getattr(graphs, side).scalar(end) for end in getattr(ends, side)]
    alone = []
    for end in getattr(ends, partner):
        value = graph.scalar(end)
        match = next((k for k, loss in enumerate(remaining) if abs(loss - value) <= _SAME_LOSS * abs(value)), None)
        if match is None:
            alone.append(end)
        else:
            del remaining[match]
    if remaining or not alone or not getattr(ends, side):
        return
    makers = [graph.producers.get(end) for end in alone]
    line = next((call.line for call in makers if call is not None), None)
    counts = ends.map(len)
    text = (
        f"the {partner}'s loop runs {getattr(counts, partner)} backwards in this step, the {side}'s "
        f"{getattr(counts, side)}, of the same losses: the other {len(alone)} are missing"
    )
    lines = Both(None, line) if partner == SIDES.candidate else Both(line, None)
    yield Cause("loss_term_missing", text, True, "the losses that each backward begins at are recorded", lines=lines)


def _unreached(scene: DiffContext) -> Iterator[Cause]:
    """Yield the cause of the first layer whose outputs agree and that has gradients on one side only."""
    by_stage: dict[str, list[Diff]] = {}
    for diff in scene.step:
        if diff.pair.anchor.layer != LOOP:
            by_stage.setdefault(diff.pair.stage, []).append(diff)
    for side, other_side in (SIDES.swapped(), SIDES):
        lacking = [
            {d.pair.anchor.layer for d in by_stage.get(stage, ()) if getattr(d.pair, side) is None}
            for stage in ("backward", "grad")
        ]
        with_gradients = {d.pair.anchor.layer for d in by_stage.get("grad", ()) if d.pair.complete}
        agreeing = _all_agree(by_stage.get("forward", ()))
        names = {layers.reference.path: layers.candidate.path for layers in scene.alignment.pairs}
        for layer in sorted((lacking[0] & lacking[1] & agreeing) - with_gradients):
            name = layer if side == "reference" else names.get(layer, layer)
            text = (
                f"no gradient comes back to `{name}` on the {side}, and one does on the {other_side}, though it "
                "gives the same: a term of the loss is missing that is of what it gives, or it is detached"
            )
            paths = Both(layer, names.get(layer, layer))
            steps = scene.sides(scene.number)
            stacks = (
                Both((), ()) if steps is None else steps.zip(paths).map(lambda side: stacks_of(side[0]).get(side[1]))
            )
            lines = stacks.map(lambda stack: stack[-1] if stack else None)
            yield Cause("loss_term_missing", text, lines=lines)
            return


def one_sided(scene: DiffContext) -> Iterator[Cause]:
    """Yield the cause of gradients that come back to a call on one side only, though both sides made the call.

    Only layers count in which other gradients come back on both sides, as frameworks record some gradients only.
    """
    yield from _without_graph(scene)
    path, steps = scene.diff.pair.anchor.layer, scene.sides(scene.number)
    backward = [d for d in scene.step if d.pair.stage == "backward" and d.pair.anchor.layer != LOOP]
    answered = {(d.pair.anchor.layer, _output(d)) for d in backward if d.pair.complete}
    forward = {place_of(d.pair): d for d in scene.step if d.pair.stage == "forward" and d.pair.complete}
    references = {pair.candidate.path: pair.reference.path for pair in scene.alignment.pairs}
    for side, other_side in (SIDES.swapped(), SIDES):
        for diff in backward:
            anchor = diff.pair.anchor
            layer = anchor.layer if diff.pair.reference is not None else references.get(anchor.layer, anchor.layer)
            call = forward.get((layer, _output(diff), anchor.call))
            if getattr(diff.pair, side) is not None or (layer, _output(diff)) not in answered:
                continue
            if call is None or not call.passed or not (path == layer or is_below(path, layer)):
                continue
            yield from _without_backward(scene)
            again = "@" in anchor.slot
            if again and steps is not None and any(flags := _asked(steps)[1]) and flags.reference == flags.candidate:
                continue  # both keep the graph of what they ask for: one framework does not record the second gradient
            lines = UNKNOWN_LINES if again else _lines_of_cut(scene, diff.pair, side)
            if any(lines):
                text = (
                    f"the {side} detaches what call {anchor.call + 1} of `{anchor.layer}` gives, the {other_side} does "
                    "not"
                )
                yield Cause("detached", text, lines=lines)
                return
            text = (
                f"{'a further' if again else 'a'} gradient comes back to call {anchor.call + 1} of `{anchor.layer}` on "
                f"the {other_side}, and none on the {side}, though both made the call: "
            )
            if again:
                text += (
                    f"the {side} has no gradient of a term of the loss that is made of gradients (a penalty without "
                    "create_graph=True), or detaches what the call gives"
                )
            else:
                text += f"the {side} detaches what the call gives (detach, no_grad), or runs no backward from it"
            yield Cause("second_order" if again else "detached", text)
            return


def _lines_of_cut(scene: DiffContext, pair: Pair, side: str) -> Both[Frame | None]:
    """Return the line of one side that cuts off what a call of a layer gives, and the other side's line most like it.

    Args:
        pair: the gradient, which the side does not have.
        side: the side that detaches.
    """
    steps, site = scene.sides(scene.number), (pair.anchor.layer, pair.anchor.call)
    names = {each.reference.path: each.candidate.path for each in scene.alignment.pairs}
    if steps is None or (side == "candidate" and site[0] not in names):
        return UNKNOWN_LINES
    site = site if side == "reference" else (names[site[0]], site[1])
    graph = getattr(graphs_of(steps, scene.runs.map(lambda run: run.info)), side)
    outputs = {o.tensor for call in graph.trace.calls if not call.function and (call.layer, call.call) == site
               for o in call.outputs}  # fmt: skip
    for cut in graph.trace.calls:
        before = (call for operand in cut.inputs for call in graph.back(operand.tensor, outputs.__contains__))
        tensors = {operand.tensor for call in (cut, *before) for operand in call.inputs}
        if (cut.function == "detach" or cut.cut) and cut.line is not None and outputs & tensors:
            return _with_nearest(cut, steps, side)
    return UNKNOWN_LINES


def _with_nearest(call: TracedCall, steps: Both[Step], side: str) -> Both[Frame | None]:
    """Return the line of a call of one side, and the other side's line that is most like it."""
    partner = steps.candidate if side == "reference" else steps.reference
    frames = {each.line.code: each.line for each in partner.trace.calls if each.line is not None}
    nearest = [] if call.line is None else get_close_matches(call.line.code, frames, 1)
    return Both(call.line, frames[nearest[0]] if nearest else None).swapped(side != "reference")


def _output(diff: Diff) -> str:
    """Return the slot of the output that a gradient is of, without the number of a further gradient."""
    return diff.pair.anchor.slot.partition("@")[0]


def _all_agree(diffs: Sequence[Diff]) -> set[str]:
    """Return the layers whose outputs exist on both sides and all pass."""
    layers = {diff.pair.anchor.layer for diff in diffs}
    return layers - {diff.pair.anchor.layer for diff in diffs if not (diff.pair.complete and diff.passed)}


def _detached(scene: DiffContext) -> Iterator[Cause]:
    """Yield the cause that only one side's code detaches a tensor computed from the tensor of the first diff.

    The detached tensor changes this gradient; other reasons for the diff are not excluded.
    """
    steps, records = scene.sides(scene.number), Both(scene.diff.pair.reference, scene.diff.pair.candidate)
    if steps is None or scene.diff.pair.anchor.layer == LOOP or not all(step.trace.functions for step in steps):
        return
    infos = scene.runs.map(lambda run: run.info)
    graphs = graphs_of(steps, infos)
    cuts = _unshared(scene, graphs, graphs.map(_cuts))
    if bool(cuts.reference) == bool(cuts.candidate):
        yield from _cut_parameters(scene, graphs)
        return
    side, other_side = SIDES if cuts.reference else SIDES.swapped()
    graph, record = getattr(graphs, side), getattr(records, side)
    # A tensor whose gradient agrees is not cut off.
    agreeing = {graph.tensor_of(getattr(d.pair, side)) for d in scene.diffs("backward") if d.passed and d.pair.complete}
    for call in getattr(cuts, side):
        if record is not None and _comes_from(graph, call, record, agreeing):
            text = (
                f"detach() in `{call.layer}` of the {side} cuts gradients off that the {other_side}'s have: none goes "
                f"back through it to `{record.layer}`"
            )
            fix = f"take detach() out of `{call.layer}`" if side == "candidate" else ""
            yield Cause("detached", text, False, "", fix, lines=_with_nearest(call, steps, side))
            return


def _cut_parameters(scene: DiffContext, graphs: Both[Graph]) -> Iterator[Cause]:
    """Yield the cause that one side detaches each way from a parameter to the losses, where the other side does not."""
    steps = scene.sides(scene.number)
    assert steps is not None
    learning = steps.map(lambda step: {(r.layer, r.slot) for r in step.records if r.stage == "grad"})
    for pair in scene.pairs(scene.number, "weight").values():
        sites = pair.sides.map(lambda record: None if record is None else (record.layer, record.slot))
        learns = sites.zip(learning).map(lambda side: side[0] in side[1])
        if None in [*sites] or learns.reference == learns.candidate:
            continue
        side, partner = SIDES.swapped() if learns.reference else SIDES
        record, graph = getattr(pair, side), getattr(graphs, side)
        losses = graph.noted.get("backward", [])
        if not reaches(graph, record, losses, trained=False) or reaches(graph, record, losses, trained=True):
            continue
        name = f"{record.layer}/{record.slot}".removeprefix(f"{ROOT}/")
        text = (
            f"on the {side}, each way from `{name}` to the loss passes detach(), on the {partner} one does not: the "
            "gradient goes elsewhere"
        )
        line = None
        for cut in _cuts(graph):
            if reaches(graph, record, [operand.tensor for operand in cut.inputs], trained=True):
                line = cut.line
        yield Cause("detached", text, lines=Both(line, None) if side == "reference" else Both(None, line))
        return


def reaches(graph: Graph, record: Record | None, tensors: Iterable[int], trained: bool) -> bool:
    """Return True if tensors are computed from the parameter of a record, or its layer.

    Args:
        trained: True to follow gradients only: not through what is detached, or is no floating point number.
    """

    def stops(tensor: int) -> bool:
        call = graph.producers.get(tensor)
        is_cut = call is not None and (call.function == "detach" or call.cut)
        return trained and (is_cut or "float" not in graph.trace.tensors[tensor].dtype)

    calls = [call for tensor in tensors for call in graph.back(tensor, stops)]
    names = set() if record is None else {record.layer, f"{record.layer}/{record.slot}"}
    return any(not names.isdisjoint(call.parameters if call.function else (call.layer,)) for call in calls)


def _unshared(scene: DiffContext, graphs: Both[Graph], cuts: Both[list[TracedCall]]) -> Both[list[TracedCall]]:
    """Return the calls of detach without those that both sides make for the same call of a layer."""
    partners = {pair.candidate.path: pair.reference.path for pair in scene.alignment.pairs}

    def takers(graph: Graph, cut: TracedCall) -> set[tuple[str, int]]:
        tensors = {operand.tensor for operand in cut.outputs}
        layers = (call for call in graph.layers.values() if any(operand.tensor in tensors for operand in call.inputs))
        return {(partners.get(c.layer, c.layer) if graph is graphs.candidate else c.layer, c.call) for c in layers}

    taking = graphs.zip(cuts).map(lambda side: [takers(side[0], cut) for cut in side[1]])
    others = taking.map(lambda side: set[tuple[str, int]]().union(*side)).swapped()
    return cuts.zip(taking.zip(others)).map(
        lambda side: [cut for cut, keys in zip(side[0], side[1][0]) if keys.isdisjoint(side[1][1])]
    )


def _cuts(graph: Graph) -> list[TracedCall]:
    """Return the calls of detach whose result a model's output, or of a layer's own calls a loss, depends on; calls for
    logging alone are left out.
    """
    detaches = [call for call in graph.trace.calls if call.function == "detach"]
    if not detaches:
        return []

    def used(operands: Iterable[Operand]) -> set[int]:
        calls = (call for operand in operands for call in graph.back(operand.tensor, lambda _: False))
        return {source.tensor for call in calls for source in call.inputs}

    outputs = used(o for call in graph.layers.values() if "." not in call.layer for o in call.outputs)
    backwards = (call for call in graph.trace.calls if (call.layer, call.function) == (LOOP, "backward"))
    in_loss = used(o for call in backwards for o in call.inputs)
    return [
        call
        for call in detaches
        if any(o.tensor in outputs or (o.tensor in in_loss and call.layer != LOOP) for o in call.outputs)
    ]


def _comes_from(graph: Graph, cut: TracedCall, record: Record, agreeing: Collection[int | None]) -> bool:
    """Return True if a detached tensor depends on the output or parameter of a record.

    Paths through the tensors in ``agreeing`` do not count.
    """
    starts = {operand.tensor for operand in cut.inputs}
    before = [call for tensor in starts for call in graph.back(tensor, lambda at: at in agreeing)]
    if record.stage == "backward":
        tensors = starts | {operand.tensor for call in before for operand in call.inputs}
        return graph.tensor_of(record) in tensors
    # For a layer of the framework the output's gradient would differ earlier. A transposed parameter (`w.T`) is not
    # always traced, so any parameter of the layer with the detach counts.
    prefix = f"{record.layer}/" if cut.layer == record.layer else f"{record.layer}/{record.slot}"
    return any(name.startswith(prefix) for call in (cut, *before) for name in call.parameters)
