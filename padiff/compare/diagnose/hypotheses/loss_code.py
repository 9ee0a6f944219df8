"""Hypotheses on the code of a loss: recompute the reference's loss with one edit, and compare with the candidate's.

The calls from the model's outputs to the start of the backward are computed again, with one edit at a time. A loss is
a single number, so its slopes are compared with the recorded gradients of the model's outputs, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, count

import numpy as np

from padiff.compare.diagnose.computing.divergence import (
    READ,
    divergences,
    numbers,
    other_code,
    read_numbers,
    terms_apart,
)
from padiff.compare.diagnose.computing.edit import FormulaView, Target
from padiff.compare.diagnose.computing.formula import UnknownError
from padiff.compare.diagnose.computing.in_losses import (
    asked_gradients,
    loss_cut_off,
    loss_edits,
    loss_left_out,
    loss_numbers,
    made_with,
    other_inputs,
    with_gradients,
)
from padiff.compare.diagnose.computing.loss_terms import (
    Leaf,
    Sloped,
    Term,
    Terms,
    described,
    merged,
    multiple_of,
    terms_of,
    weighed,
)
from padiff.compare.diagnose.computing.operation_edits import (
    exchanged_operations,
    of_all_turns,
    other_operations,
    other_reductions,
)
from padiff.compare.diagnose.computing.writer import Writer
from padiff.compare.diagnose.hypotheses import clipping, code_edits, gradients
from padiff.compare.diagnose.hypotheses.code_edits import Case, Found, Maker, named, reported, tried
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, PairPlace, place_of, whole_of
from padiff.compare.diagnose.hypotheses.hypothesis import (
    CLOSE,
    NEAR,
    Hypothesis,
    Prediction,
    explains,
    is_likely,
    weigh,
)
from padiff.compare.diagnose.hypotheses.missing_gradient import reaches
from padiff.compare.diagnose.hypotheses.outputs import noise_level, root
from padiff.compare.diagnose.place import Place, graphs_of
from padiff.compare.diagnose.traced import Graph, calls_text
from padiff.compare.judge.drift import was_excused
from padiff.errors import PadiffError
from padiff.frameworks.catalog import CONSUMED, GRAD, is_loss
from padiff.pair.joined_calls import calls_of
from padiff.records import LOOP, ROOT, SIDES, Both, Cause, Pair, Record, RunInfo, Step
from padiff.records.traces import TracedCall
from padiff.system.frames import Frame
from padiff.system.terminal import first_few

#: Count of slopes that each edit is tried on, and count that a fitting edit is checked on.
_FEW, MANY = 3, 32
#: Step of a slope's finite difference, as a share of the tensor's size. Chosen: halfway between the rounding error of
# the difference in float64 and the error of the linear approximation.
FAR = 1e-6
# Largest relative difference of a recomputed loss's slopes from the recorded gradients; else the loss is not used.
_AGREES = 1e-4
# The same for the loss alone, which may be the sum of terms that cancel.
_CORNERS = 1e-2
_AGREES_ALONE = 1e-3
# Relative rounding error of a loss and its slopes that is allowed for in any case. Chosen.
_ROUNDING = 1e-5
#: Most elements to compute with: each edit computes with all of them some dozen times.
_MOST = 300_000


@dataclass(frozen=True)
class _Side:
    """The recomputed loss of one side.

    Attributes:
        leaves: nodes of the model's outputs in the formula.
        off: difference of the recomputed loss and slopes from the recorded ones (root of the mean square).
    """

    sheet: FormulaView
    formula: Sloped
    leaves: tuple[int, ...]
    off: float


@dataclass(frozen=True)
class _Case(Case):
    """The losses of both sides with their slopes.

    Attributes:
        written: the recomputed loss of each side, or `None` if recomputing failed.
        whole: loss and all slopes of both sides.
    """

    written: Both[_Side | None] = field(default_factory=lambda: Both(None, None))
    whole: Both[np.ndarray] = field(default_factory=lambda: Both(np.zeros(0), np.zeros(0)))

    def hypothesis(self, found: Found, head: str) -> Hypothesis:
        base = super().hypothesis(found, head)
        side = self.written.candidate if found.surplus else self.written.reference
        without, actual = self.whole.swapped(found.surplus)
        assert side is not None
        formula = side.formula

        def predict() -> Iterator[Prediction]:
            # The few slopes are part of all: with this error, exact agreement of the others would not make it likely.
            if found.off * math.sqrt(found.made.size) > CLOSE * self.noise * math.sqrt(actual.size):
                return
            row = formula.row(found.edit.changes, MANY)
            if row is not None:
                yield Prediction("the loss and its slopes", actual, row, without, self.noise)

        # A scaled loss has a better explanation if a number of the run is the ratio.
        free = base.free if base.telling else max(base.free, 2)
        return replace(base, predict=predict, what="numbers", code=base.telling, free=free)


# Largest difference of what agrees, as a multiple of the noise.
_AGREE_BELOW = 3
# Number of the first steps among which the last one with known code is looked for.
_TRACED = 4


def hypotheses(scene: DiffContext) -> Iterator[Hypothesis]:
    """Yield hypotheses on a first diff in the loss or in the gradient of an output, if the loop's calls are traced."""
    steps = scene.sides(scene.number)
    if steps is None or not all(step.trace.functions for step in steps):
        return
    starts = steps.map(lambda step: step.trace.backwards)
    if len({step.micro_batches for step in steps}) > 1 and starts.reference != starts.candidate:
        return  # the count of micro-batches is the difference
    of_loop = scene.diff.pair.anchor.layer == LOOP
    graphs = graphs_of(steps, scene.runs.map(lambda run: run.info))
    turn = _turn(scene, graphs)
    # A model may return its loss: this is no output that the loss is made of. Calls after it follow from it: a step may
    # hold some of weights that an optimizer has changed.
    here = scene.diff.pair.anchor.order
    outputs_differ = any(
        not d.passed and d.pair.anchor.order < here and not _is_loss(d.pair, graphs) for d in scene.diffs("forward")
    )
    if outputs_differ or (scene.stage == "loss" and not of_loop):
        return
    if scene.stage == "forward" and not _is_loss(scene.diff.pair, graphs):
        return
    paired = _paired_outputs(scene, graphs)
    # Of a loop over tensors of no layer, the parameters are all that the loss begins at.
    bare = not any(not call.function for graph in graphs for call in graph.trace.calls)
    parameters = [*_parameters(scene, graphs)] if bare or scene.stage == "grad" else []
    other_loss = _other_loss(scene, graphs) if scene.stage == "grad" else None
    turn = turn if other_loss is None else other_loss
    if (
        scene.stage == "grad"
        and other_loss is None
        and not any(
            record is not None and f"{record.layer}/{record.slot}" == each.parameters.reference
            for each in parameters
            for record in [scene.diff.pair.reference]
        )
    ):
        return
    sheets = [
        sheet_of(graph, step, run.info, tensors, turn)
        for graph, step, run, tensors in zip(graphs, steps, scene.runs, paired)
    ]
    leaves = [
        output
        for output in chain(parameters, _outputs(scene, graphs, paired, turn))
        if output.trained
        and all(sheet is None or output.begins(k, sheet) is not False for k, sheet in enumerate(sheets))
    ]
    begun = [leaf for leaf in leaves if any(s is not None and leaf.begins(k, s) for k, s in enumerate(sheets))]
    asks = any(call.function == GRAD for graph in graphs for call in graph.trace.calls)
    if scene.stage == "backward" and begun and all(leaf.agrees for leaf in begun) and not asks:
        return  # whatever the loss is, it gives all outputs equal gradients
    # Where layers use an output too, its recorded gradient comes from more than the loss.
    outputs = [
        output
        for output in leaves
        if output.gradients is not None
        and all(sheet is None or output.begins(k, sheet) for k, sheet in enumerate(sheets))
    ]
    learned = Both(*({tensor for leaf in leaves for tensor in [*leaf.tensors][k]} for k in range(2)))
    losses = _losses(scene, sheets, graphs, turn)
    rows = _recorded(outputs, losses)
    if rows is None:
        return
    written = Both(*(_side(sheets[k], k, outputs, losses, rows) for k in range(2)))
    few = rows.sides.map(lambda row: row[: len(row) - MANY + _FEW])
    offs = [side.off for side in written if side is not None]
    noise = max([noise_level(scene) * max(map(root, rows.sides)), *offs, 1e-300])
    case = _Case(scene, few, Both(_same, _same), noise, graphs, Both(*sheets), written, rows.sides)
    agree = root(rows.sides.reference - rows.sides.candidate) <= _AGREE_BELOW * noise
    if None not in [*written]:
        known = {leaf.parameters.reference for leaf in leaves}
        leaves = [*leaves, *(each for each in _penalised(scene, sheets) if each.parameters.reference not in known)]
    if None not in [*written] and (agree or len(leaves) > len(outputs)):
        # Of outputs that other models use, and of gradients that the loop asks for, no gradient of the loss alone is
        # recorded. Both formulas agree with what is recorded, so their slopes count there.
        leaves = [*leaves, *_gradient_inputs(scene, sheets, graphs)]
        case = _along(case, leaves)
        few, written = case.sides, case.written
    # The terms that the code adds come before edits, as these may give the same numbers by chance.
    sums = _sums_of_both(case, leaves) if None not in [*written] else _sums_of_one(case, losses is not None)
    by_terms = _weighed(case, sums, scalar=True)
    if by_terms is not None:
        yield by_terms
        if explains(weigh(by_terms.predict()), by_terms):
            return
    trials: list[Found] = []
    reference, candidate = written
    # Where only gradients differ, what one side detaches comes first.
    cut: list[Maker] = [loss_cut_off] if scene.stage == "backward" else []
    if reference is not None:
        target = Target(few.candidate, few.candidate.shape, _same)
        candidates = [
            *numbers(reference.sheet),
            *loss_numbers(reference.sheet, reference.leaves, reference.formula.loss),
        ]
        makers: list[Maker] = [
            *cut,
            partial(other_inputs, candidate=sheets[1], learned=learned),
            of_all_turns,
            loss_edits,
            loss_left_out,
            other_operations,
        ]
        slopes = {} if candidate is None else asked_gradients(reference.sheet, candidate.sheet)
        base = reference.sheet.formula.changed(slopes) if slopes else None
        if base is not None:
            explained = target.off(base) <= NEAR * noise
            # What an inner loop changes shows in the gradients that it asks for next.
            others = [] if explained else [partial(with_gradients, make=make, slopes=slopes) for make in makers]
            makers = [*makers, *others]
            candidates += [replace(n, make=partial(made_with, make=n.make, slopes=slopes)) for n in candidates]
        # A scale of the whole loss has many causes, which the code of the loss alone does not show.
        if candidate is not None and multiple_of(few.candidate, few.reference) is None:
            # First, as there are few of them: a long formula leaves no time for all edits.
            makers.insert(0, partial(divergences, candidate=candidate.sheet))
        trials += [_of_scale(trial) for trial in tried(case, reference.sheet, makers, target, False, candidates)]
    if candidate is not None:
        target = Target(few.reference, few.reference.shape, _same)
        written_there = partial(read_numbers, other=graphs.reference, surplus=True)
        surplus: list[Maker] = [*cut, loss_left_out, written_there, other_reductions, exchanged_operations]
        slopes = {} if reference is None else asked_gradients(candidate.sheet, reference.sheet)
        base = candidate.sheet.formula.changed(slopes) if slopes else None
        if base is not None and target.off(base) > NEAR * noise:
            surplus += [partial(with_gradients, make=make, slopes=slopes) for make in (of_all_turns, loss_left_out)]
        trials += tried(case, candidate.sheet, surplus, target, True)
    agreeing = _agreeing_calls(graphs, sheets)
    near = NEAR * case.noise
    trials = [trial for trial in trials if trial.surplus or trial.off > near or not _changes(trial, agreeing)]
    trials = [trial for trial in trials if trial.surplus or not _reduces_alike(trial, written.candidate)]
    trials = [_as_read(trial, trials, case.noise) for trial in trials]
    # If the code of both sides is known, a factor in one side's code is the difference, and no effect of another one.
    if None not in written and len({step.micro_batches for step in steps}) == 1:
        # Several backwards have a scale in common with what the loop accumulates, unless some of them agree.
        partly = any(d.passed and d.figures is not None and d.figures.reference_l2 for d in scene.diffs("backward"))
        one = steps.reference.micro_batches == 1 or starts.reference == starts.candidate == 1 or partly
        trials = [_as_told(trial, sheets[1], one) for trial in trials]
    if not named(case, trials):
        by_terms = _weighed(case, sums, scalar=False)
        if by_terms is not None:
            yield by_terms
            if explains(weigh(by_terms.predict()), by_terms):
                return
    yield from reported(case, trials)


def gradient_hypotheses(scene: DiffContext) -> Iterator[Hypothesis]:
    """Yield hypotheses on what both loops compute of a gradient after the backward: clipping, norms, projections.

    A line computes all gradients: where some agree, an edit that fits one tensor proves nothing.
    """
    place = _after_backward(scene)
    if place is not None and not _some_agree(scene):
        for hypothesis in code_edits.hypotheses(replace(scene, place=place)):
            computed = _is_computed(hypothesis)
            yield replace(hypothesis, telling=False, code=False, free=1) if computed else hypothesis


def _is_computed(hypothesis: Hypothesis) -> bool:
    """Return True if a hypothesis is about numbers that nobody writes: the loop computes them, as it does the factor of
    clipping, and differs in what it computes them from.
    """
    numbers = () if hypothesis.kind != "scale" or hypothesis.values is None else [*hypothesis.values]
    return bool(numbers) and all(float(f"{number:.3g}") != number for number in numbers)


def gradient_code(scene: DiffContext) -> Iterator[Cause]:
    """Yield what both loops compute of a gradient after the backward, if the code differs: that of the step, or of the
    last step before whose code is known, where the difference may be within its limit.
    """
    rivals = chain(clipping.hypotheses(scene), gradients.hypotheses(scene)) if _some_agree(scene) else ()
    # Of a ratio, a reason follows a colon.
    reasons = (
        each
        for each in rivals
        if isinstance(each, Hypothesis) and (each.kind != "gradient_scale" or ":" in each.sentence)
    )
    if any(is_likely(weigh(each.predict()), each) for each in reasons):
        return
    for number in [number for number in scene.numbers if number <= scene.number][::-1][: _TRACED + 1]:
        pair = replace(scene.diff.pair, step=number)
        here = replace(scene, diff=replace(scene.diff, pair=pair))
        place = _after_backward(here)
        cause = None if place is None else code_cause(here, place.ends)
        if cause is not None:
            yield cause


def gradient_besides(scene: DiffContext) -> Iterator[Cause]:
    """Yield what only one side's loop computes of a gradient after the backward, such as a projection."""
    steps = scene.sides(scene.number)
    if steps is None or not all(step.trace.functions for step in steps) or all(map(clipping.clipped_norms, steps)):
        return  # one framework's clipping is traced, the other's is one call
    graphs = graphs_of(steps, scene.runs.map(lambda run: run.info))
    ends = [_consumed(graph, record) for graph, record in zip(graphs, scene.diff.pair.sides)]
    for side, graph, end in zip(SIDES, graphs, ends):
        if end is not None and ends.count(None) == 1:
            calls = graph.back(end, lambda tensor: False)
            text = f"only the {side} changes this gradient before the optimizer takes it: {calls_text(calls)}"
            yield Cause(
                "gradient_code", text, lines=Both(*(calls[-1].line if each == side else None for each in SIDES))
            )


def _some_agree(scene: DiffContext) -> bool:
    return any(diff.passed for diff in scene.diffs("grad"))


def _after_backward(scene: DiffContext) -> Place | None:
    """Return the place of a gradient that both loops have computed themselves; `None` of another gradient."""
    steps = scene.sides(scene.number)
    if steps is None or not all(step.trace.functions for step in steps):
        return None
    graphs = graphs_of(steps, scene.runs.map(lambda run: run.info))
    reference, candidate = (_consumed(graph, record) for graph, record in zip(graphs, scene.diff.pair.sides))
    if reference is None or candidate is None:
        return None
    return Place(scene.diff, graphs=graphs, ends=Both(reference, candidate))


def _consumed(graph: Graph, record: Record | None) -> int | None:
    """Return the tensor that the optimizer takes as a parameter's gradient; `None` if the loop has not computed it."""
    name = None if record is None else f"{record.layer}/{record.slot}"
    calls = (call for call in graph.trace.calls if (call.layer, call.function) == (LOOP, CONSUMED))
    return next((operand.tensor for call in calls for operand in call.inputs if operand.slot == name), None)


def unreduced_mean(scene: DiffContext) -> Iterator[Cause]:
    """Yield the cause that one side's backward begins at several numbers whose mean is the other side's loss."""
    yield from (cause for cause in unreduced(scene) if cause.proven)


def unreduced(scene: DiffContext) -> Iterator[Cause]:
    """Yield the cause that one side's backward begins at several numbers, the other side's at one.

    Paddle takes the sum of several numbers; torch refuses them, unless their weights are given.
    """
    steps = scene.sides(scene.number)
    if steps is None:
        return
    graphs = graphs_of(steps, scene.runs.map(lambda run: run.info))
    losses = graphs.map(lambda graph: _all_noted(graph, "backward"))
    if len(losses.reference) != len(losses.candidate):
        return
    for pair in map(Both, *losses):
        shapes = graphs.zip(pair).map(lambda side: side[0].trace.tensors[side[1]].shape)
        sizes = shapes.map(math.prod)
        if (sizes.reference == 1) != (sizes.candidate == 1):
            side, shape = (
                (SIDES.reference, shapes.reference) if sizes.candidate == 1 else (SIDES.candidate, shapes.candidate)
            )
            text = (
                f"the {side}'s backward begins at a tensor of shape {shape}, the other side's at a single number: the "
                "loss is not reduced, and backward takes the sum"
            )
            values = graphs.zip(pair).map(lambda each: each[0].values(each[1]))
            known = [each.astype(np.float64) for each in values if each is not None]
            sums, means = [float(each.sum()) for each in known], [float(each.mean()) for each in known]
            if len(known) == 2 and math.isclose(*sums, rel_tol=_AGREES):
                return  # the other side takes the sum itself
            proven = len(known) == 2 and math.isclose(*means, rel_tol=_AGREES)
            evidence = "the mean of these numbers is the other side's" if proven else ""
            makers = graphs.zip(pair).map(lambda each: each[0].producers.get(each[1]))
            lines = makers.map(lambda call: None if call is None else call.line)
            yield Cause("reduction", text, proven, evidence, lines=lines)
            return


def code_cause(scene: DiffContext, ends: Both[int] | None = None) -> Cause | None:
    """Return the code of both sides from tensors that agree to the first ones that differ, as a cause that is not
    proven; `None` if the traces do not show it.

    These are the outputs, or the inputs, of a layer whose place is known, else the first losses that differ.

    Args:
        ends: the tensors that differ, by their numbers in the traces, if these are others.
    """
    steps, place = scene.sides(scene.number), scene.place
    if scene.stage == "weight" or steps is None:
        return None  # a weight differs before any call
    if not all(step.trace.functions for step in steps):
        return _without_effect(scene) if scene.stage in ("loss", "backward") else None
    graphs = graphs_of(steps, scene.runs.map(lambda run: run.info))
    noted = graphs.map(lambda graph: _all_noted(graph, "backward") or _all_noted(graph, GRAD))
    fewest = min(noted.map(len))
    pairs = [*zip(*noted.map(lambda tensors: tensors[len(tensors) - fewest :]))]  # a loop's loss comes last
    if scene.stage == "grad" and ends is None:
        learning = [partial(reaches, *side, trained=True) for side in zip(graphs, scene.diff.pair.sides)]
        pairs = [pair for pair in pairs if any(learns([loss]) for learns, loss in zip(learning, pair))]
    closed: Both[set[int]] = Both(set(), set())
    sites = graphs.zip(scene.diff.pair.sides).map(lambda side: side[0].layers if side[1] is not None else {})
    paths = scene.diff.pair.sides.map(lambda record: record and record.layer)
    counts = sites.zip(paths).map(lambda side: sum(path == side[1] for path, _ in side[0]))
    # Of a layer that one side calls less often, later calls are other ones: what the loss is made of says why.
    same = counts.reference == counts.candidate
    if ends is not None:
        pairs = [(ends.reference, ends.candidate)]
    elif same and place is not None and place.ends is not None and scene.stage in ("forward", "input"):
        pairs = [(place.ends.reference, place.ends.candidate)]
    elif same and scene.stage in ("forward", "input"):
        return None
    else:
        closed = graphs.map(lambda graph: {o.tensor for c in graph.trace.calls if not c.function for o in c.outputs})
    for ends in (Both(*pair) for pair in pairs):
        sides = zip(graphs, steps, scene.runs, ends, closed)
        values = Both(
            *(_values(Writer(graph, step, run.info), end, outputs) for graph, step, run, end, outputs in sides)
        )
        cause = other_code(graphs, values, terms_apart(graphs, values, ends) if scene.stage == "backward" else ends)
        if cause is not None:
            return cause
    if scene.stage == "grad":
        return _other_uses(scene, graphs)
    return _other_backward(scene, graphs) if scene.stage == "backward" else None


def _without_effect(scene: DiffContext) -> Cause | None:
    """Return the cause that the losses have another number, which has no effect in the last step whose code is known;
    `None` unless there is one such number.
    """
    numbers_before = [number for number in scene.numbers if number < scene.number][:_TRACED]
    for number in reversed(numbers_before):
        steps = scene.sides(number)
        if steps is None or not all(step.trace.functions for step in steps):
            continue
        infos = scene.runs.map(lambda run: run.info)
        graphs = graphs_of(steps, infos)
        sheets = Both(*(sheet_of(*side, frozenset()) for side in zip(graphs, steps, infos)))
        surplus = sheets.reference is None
        sheet, partner = sheets.swapped(surplus)
        if sheet is None:
            return None
        loss = sheet.formula.values[sheet.formula.end]
        edits = {edit.text: edit for edit in read_numbers(sheet, partner or graphs.swapped(surplus).candidate, surplus)}
        values = ((edit, sheet.formula.changed(edit.changes)) for edit in edits.values())
        idle = [edit for edit, value in values if value is not None and np.array_equal(value, loss)]
        if len(idle) != 1:
            return _limit_without_effect(sheets, number)
        text = idle[0].text if surplus else f"in the candidate, {idle[0].text}"
        lines = Both(sheet.line(idle[0].at), None).swapped(surplus)
        return Cause(idle[0].kind, f"{text}, which has no effect in step {number}, whose code is known", lines=lines)
    return None


def _limit_without_effect(sheets: Both[FormulaView | None], number: int) -> Cause | None:
    """Return the cause that only one loss limits some values, which it leaves as they are in the step whose code is
    known; `None` unless there is one such limit.
    """
    reference, candidate = sheets
    if reference is None or candidate is None:
        return None
    views = Both(reference, candidate)
    idle, lone = views.map(lambda view: [*_idle_limits(view)]), list[tuple[bool, int, int]]()
    for surplus in (False, True):
        sheet, partner = views.swapped(surplus)
        limits, theirs = idle.swapped(surplus)
        values, operands = sheet.formula.values, {operand for _, operand in theirs}
        lone += [(surplus, k, operand) for k, operand in limits if operands.isdisjoint(partner.equal(values[operand]))]
    if len(lone) != 1:
        return None
    surplus, k, operand = lone[0]
    sheet, partner = views.swapped(surplus)
    side, where = SIDES.swapped(surplus).reference, sheet.where(k)
    text = (
        f"only the {side} limits {sheet.named(operand)} ({where}), which has no effect in step {number}, whose code is "
        "known"
    )
    takers = (user for node in partner.equal(sheet.formula.values[operand]) for user in partner.users(node))
    lines = Both(sheet.line(k), next(filter(None, map(partner.line, takers)), None)).swapped(surplus)
    return Cause("clamp_added" if surplus else "clamp_missing", text, lines=lines)


def _idle_limits(sheet: FormulaView) -> Iterator[tuple[int, int]]:
    """Yield the nodes that limit a tensor to a range, and leave it as it is, with that tensor's node."""
    for k, node in enumerate(sheet.nodes):
        if node.operation == "clamp" and np.array_equal(sheet.formula.values[k], sheet.formula.values[node.given[0]]):
            yield k, node.given[0]


def _other_uses(scene: DiffContext, graphs: Both[Graph]) -> Cause | None:
    """Return the cause that the code takes a parameter, whose gradient differs, in more calls on one side; `None` if
    it does not. A parameter of zeros shows in no output.
    """
    names = scene.diff.pair.sides.map(lambda record: "" if record is None else f"{record.layer}/{record.slot}")
    uses = graphs.zip(names).map(lambda side: [*_uses(*side)])
    if not all(uses) or len(uses.reference) == len(uses.candidate):
        return None
    texts = uses.map(lambda calls: first_few([f"{call.function}()" for call in calls], 4))
    text = (
        f"other code: the candidate takes `{names.candidate.removeprefix(f'{ROOT}/')}` in {texts.candidate}, the "
        f"reference `{names.reference.removeprefix(f'{ROOT}/')}` in {texts.reference}"
    )
    return Cause("code", text, lines=uses.map(lambda calls: calls[0].line))


def _uses(graph: Graph, name: str) -> Iterator[TracedCall]:
    """Yield the calls that take a parameter, without those whose result nothing takes on the way to a loss."""
    into_loss = {id(call) for end in _all_noted(graph, "backward") for call in graph.back(end, lambda tensor: False)}
    for call in graph.trace.calls:
        if call.function and name in call.parameters and (not into_loss or id(call) in into_loss):
            yield call


# The call of a function with a backward of its own.
_APPLIED = re.compile(r"(\w+)\.apply\(")


def _other_backward(scene: DiffContext, graphs: Both[Graph]) -> Cause | None:
    """Return the cause that a function of the user's own, with a backward of its own, stands between a gradient that
    differs and those after it, which agree; `None` if there is none.
    """
    applied: list[tuple[str, Frame | None]] = []
    diffs = [diff for diff in (scene.diff, *scene.diffs("backward")) if diff.pair.complete]
    for graph, records in zip(graphs, zip(*(diff.pair.sides for diff in diffs))):
        tensors = [r and graph.tensor_of(replace(r, slot=r.slot.partition("@")[0])) for r in records]
        agreeing = {tensor for tensor, diff in zip(tensors, diffs) if diff.passed}
        after, name, line = {tensors[0]}, "", None
        for call in graph.trace.calls:
            if not after.isdisjoint(o.tensor for o in call.inputs):
                for frame, inner in zip(call.stack, call.stack[1:]):
                    match = _APPLIED.search(frame.code) if inner.function == "forward" and not name else None
                    name, line = (match[1], frame) if match else (name, line)
                after |= {o.tensor for o in call.outputs} - agreeing
        applied.append((name, line))
    names = Both(*(name for name, _ in applied))
    if not any(names):
        return None
    text = (
        f"`{names.candidate}.backward` gives another gradient than the reference's `{names.reference}.backward`"
        if all(names)
        else f"only the {'candidate' if names.candidate else 'reference'} calls a function with a backward of its own "
        f"there, `{names.candidate or names.reference}.backward`"
    )
    lines = Both(*(line for _, line in applied))
    return Cause("own_backward", f"{text}: forward agrees, and so do the gradients that come in", lines=lines)


def _values(writer: Writer, end: int, closed: set[int]) -> Callable[[int], np.ndarray | None]:
    """Return a function that gives the values of the tensors that an end is computed from; `None` where unknown."""
    with suppress(UnknownError, ValueError, IndexError, PadiffError), np.errstate(all="ignore"):
        writer.write(end, (), closed - {end})
    nodes, values = writer.nodes, writer.formula.values
    return lambda tensor: values[nodes[tensor]] if tensor in nodes else writer.value(tensor)


def _agreeing_calls(graphs: Both[Graph], sheets: Sequence[FormulaView | None]) -> list[int]:
    """Return the nodes of the reference's formula that loss functions of both loops give, with the same values."""
    rows: list[list[tuple[str, FormulaView, int | None]]] = [
        [
            (call.function, sheet, sheet.writer.nodes.get(call.outputs[0].tensor))
            for call in graph.trace.calls
            if sheet is not None and call.layer == LOOP and call.outputs and is_loss(call.function)
        ]
        for graph, sheet in zip(graphs, sheets)
    ]
    if [row[0] for row in rows[0]] != [row[0] for row in rows[1]]:
        return []
    nodes = []
    for (_, sheet, node), (_, other_sheet, partner) in zip(*rows):
        if node is not None and partner is not None:
            values = sheet.formula.values[node], other_sheet.formula.values[partner]
            if values[0].shape == values[1].shape and root(values[0] - values[1]) <= _AGREES * root(values[0]):
                nodes.append(node)
    return nodes


def _changes(trial: Found, nodes: Sequence[int]) -> bool:
    """Return True if an edit inside of a function would change what the function gives, which is a node."""
    formula, changes = trial.sheet.formula, trial.edit.changes
    values = ((formula.changed(changes, node), formula.values[node]) for node in nodes if node not in changes)
    return any(value is None or root(value - recorded) > _CORNERS * root(recorded) for value, recorded in values)


def _reduces_alike(trial: Found, candidate: _Side | None) -> bool:
    """Return True if an edit takes another reduction where both sides' reductions give one and the same number."""
    if candidate is None or trial.edit.kind != "reduction_form":
        return False
    sheet, theirs = trial.sheet, candidate.sheet
    values = [theirs.formula.values[k] for k, node in enumerate(theirs.nodes) if node.operation == "reduced"]
    results = [sheet.formula.values[k] for k in trial.edit.changes]
    return all(
        any(v.shape == value.shape and root(v - value) <= _ROUNDING * root(value) for v in values) for value in results
    )


def _as_read(trial: Found, trials: Sequence[Found], noise: float) -> Found:
    """Return an edit whose number was solved for as one whose number was read, if the candidate's code has it."""
    read = {each.edit.at for each in trials if each.edit.name == READ and each.off <= CLOSE * noise}
    return replace(trial, edit=replace(trial.edit, free=0)) if trial.edit.at in read else trial


def _as_told(trial: Found, candidate: FormulaView | None, one: bool) -> Found:
    """Return an edit of a factor of the whole loss as telling, if it is read from both sides' code.

    Of edits of other numbers, one that puts a number of the candidate's code comes first.

    Args:
        candidate: the candidate's formula.
        one: True if the steps have one backward, or others agree: then a factor that is left out tells, too.
    """
    edit = trial.edit
    if one and edit.kind == "scale_missing" and not edit.free:
        return replace(trial, edit=replace(edit, telling=True))
    put = trial.number
    if candidate is None or trial.surplus or put is None:
        return trial
    value = float(trial.sheet.formula.values[next(iter(edit.changes))])
    theirs = [float(candidate.formula.values[k]) for k in range(len(candidate.nodes)) if candidate.is_number(k)]
    written = any(math.isclose(put, each, rel_tol=1e-4) for each in theirs)
    if edit.kind != "scale":
        return trial if written else replace(trial, edit=replace(edit, rank=edit.rank + 1))
    # A factor of 1 is none: another edit leaves it out.
    if put != 1 and written and not any(math.isclose(value, each, rel_tol=1e-4) for each in theirs):
        users = (
            user
            for k in range(len(candidate.nodes))
            if candidate.is_number(k) and math.isclose(put, float(candidate.formula.values[k]), rel_tol=1e-4)
            for user in candidate.users(k)
        )
        return replace(trial, edit=replace(edit, telling=True, free=0, other=next(users, -1)))
    return trial


def _of_scale(trial: Found) -> Found:
    """Return an edit that scales the whole loss as not telling, as the scale is an effect of many causes."""
    edit, sheet = trial.edit, trial.sheet
    scales = edit.kind in ("scale", "loss_scale", "scale_missing") and edit.at >= 0
    whole = scales and multiple_of(trial.made, sheet.formula.values[sheet.formula.end]) is not None
    scales = scales and (whole or sheet.shape(edit.at) == ())
    return replace(trial, edit=replace(edit, telling=False, rank=3)) if scales else trial


def _same(values: np.ndarray) -> np.ndarray:
    return values


# -- recorded values -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Output:
    """An output of a layer.

    Attributes:
        tensors: numbers of the tensor in the traces; several where one side makes the output in several calls.
        gradients: the recorded gradients, in the reference's layout; `None` if not recorded, or not of the loss alone.
        directions: changes of the output that slopes are computed for; for each side, in its own layout.
        trained: True if a gradient comes back to the output, on one side at least: not to a teacher's.
        agrees: True if all of the gradient that comes back agrees, of the loss and of layers that use the output.
        cuts: rows at which the tensors of a side begin, without the first.
        parameters: names of a parameter that the loop computes with, in the place of tensors; empty for outputs.
    """

    tensors: Both[tuple[int, ...]]
    gradients: Both[np.ndarray] | None
    directions: Both[list[np.ndarray]]
    trained: bool = True
    agrees: bool = False
    cuts: Both[tuple[int, ...]] = field(default_factory=lambda: Both((), ()))
    parameters: Both[str] = field(default_factory=lambda: Both("", ""))

    def leaves(self, side: int, sheet: FormulaView) -> list[Leaf]:
        """Return the leaves of a side's formula that are this output."""
        cuts, directions = [*self.cuts][side], [*self.directions][side]
        parts = [np.split(direction, cuts) if cuts else [direction] for direction in directions]
        nodes = [sheet.writer.nodes.get(tensor) for tensor in [*self.tensors][side]]
        if name := [*self.parameters][side]:
            nodes = [_parameter_node(sheet, name)]
        return [Leaf(node, [part[k] for part in parts]) for k, node in enumerate(nodes) if node is not None]

    def begins(self, side: int, sheet: FormulaView) -> bool | None:
        """Return True if a side's formula begins at the output, False if it computes it, `None` if it lacks it."""
        if name := [*self.parameters][side]:
            return True if _parameter_node(sheet, name) is not None else None
        answers = [_is_leaf(sheet, tensor) for tensor in [*self.tensors][side]]
        return False if False in answers else None if None in answers else True


def _paired_outputs(scene: DiffContext, graphs: Both[Graph]) -> Both[frozenset[int]]:
    """Return the numbers of the tensors, in each trace, that are compared as outputs of layers."""
    tensors: Both[set[int]] = Both(set(), set())
    forms = {place_of(diff.pair) for diff in scene.diffs("forward") if was_excused(diff)}
    for place, pair in scene.pairs(scene.number, "forward").items():
        if place in forms:
            continue  # the loss of the other side takes it in another form: what computes it is a part of the loss
        for graph, record, side in zip(graphs, pair.sides, tensors):
            if pair.complete and record is not None:
                side.update(_tensors_of(graph, record))
    return tensors.map(frozenset)


def _computed_outputs(graph: Graph, paired: frozenset[int]) -> dict[str, set[int]]:
    """Return the outputs that only one side's layer returns, and that its own code computes, by layer.

    One side's model returns its loss, or joins its outputs: its code counts as the loop's.
    """
    outputs: dict[str, set[int]] = {}
    for call in graph.trace.calls:
        alone = {o.tensor for o in call.outputs if not call.function} - paired
        makers = {tensor: graph.producers[tensor] for tensor in alone if tensor in graph.producers}
        computed = {tensor for tensor, maker in makers.items() if maker.layer == call.layer}
        if computed and all(makers[tensor].function for tensor in computed):
            outputs.setdefault(call.layer, set()).update(computed)
    return outputs


def _turn(scene: DiffContext, graphs: Both[Graph]) -> int:
    """Return the number of the backward that a first diff belongs to, of those that both loops run; the first is 0.

    A loop trains several models, each by a loss of its own: an actor and its critic, a generator and its discriminator.
    """
    pair = scene.diff.pair
    counts = graphs.map(lambda graph: len(_all_noted(graph, "backward")))
    if counts.reference != counts.candidate or counts.reference < 2 or not pair.complete:
        return 0
    if pair.stage == "loss":
        return pair.anchor.call if pair.anchor.slot == "loss" and pair.anchor.call < counts.reference else 0
    slot, _, number = pair.anchor.slot.partition("@")
    turns = []
    for graph, record in zip(graphs, pair.sides):
        if pair.stage == "grad" and record is not None:
            turns.append(next(iter(_turns_of(graph, f"{record.layer}/{record.slot}")), 0))
            continue
        tensor = None if record is None else graph.tensor_of(replace(record, slot=slot))
        reaching = [] if tensor is None else _reaching(graph, tensor)
        # Gradients that the loop asked for itself come before.
        turns.append(reaching[min(int(number or 0), len(reaching) - 1)] if reaching else 0)
    return turns[0] if turns[0] == turns[-1] else 0


def _other_loss(scene: DiffContext, graphs: Both[Graph]) -> int | None:
    """Return the number of the first of several backwards whose losses differ; `None` if all agree or are recorded."""
    if any(pair.anchor.slot == "loss" for pair in scene.pairs(scene.number, "loss").values()):
        return None
    ends = graphs.map(lambda graph: [graph.scalar(end) for end in _all_noted(graph, "backward")])
    pairs = list(zip(ends.reference, ends.candidate))
    if len(ends.reference) != len(ends.candidate):
        return None
    noise = 10 * noise_level(scene)
    return next((k for k, (one, other) in enumerate(pairs) if abs(one - other) > noise * abs(one)), None)


def _reaching(graph: Graph, tensor: int) -> list[int]:
    """Return the numbers of the backwards that reach a tensor."""
    return [
        turn
        for turn, end in enumerate(_all_noted(graph, "backward"))
        if any(
            o.tensor == tensor for c in graph.back(end, lambda k: _is_cut(graph, k)) for o in (*c.inputs, *c.outputs)
        )
    ]


def _is_cut(graph: Graph, tensor: int) -> bool:
    call = graph.producers.get(tensor)
    return call is not None and call.function == "detach"


def _outputs(scene: DiffContext, graphs: Both[Graph], paired: Both[frozenset[int]], turn: int = 0) -> Iterator[_Output]:
    rng, noise = np.random.default_rng(7), noise_level(scene)
    yielded: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    gradients = scene.pairs(scene.number, "backward")
    used = graphs.zip(paired).map(lambda side: _used_inside(*side, turn))
    trained = {place_of(diff.pair) for diff in scene.step if diff.pair.stage == "backward"}
    for place, pair in scene.pairs(scene.number, "forward").items():
        if _is_loss(pair, graphs):
            continue
        backward, output = gradients.get(_of_loss(place, pair, gradients, graphs, turn)), whole_of(pair)
        gradient = None if backward is None else whole_of(backward)
        if output is None or output.reference.size > _MOST or pair.reference is None or pair.candidate is None:
            continue
        tensors = Both(*(_tensors_of(*side) for side in zip(graphs, (pair.reference, pair.candidate))))
        if not all(tensors) or (tensors.reference, tensors.candidate) in yielded:
            continue  # the output of a container is also the output of its last layer
        agrees = gradient is not None and _agree(gradient, noise)
        if any(tensor in used_here for used_here, side in zip(used, tensors) for tensor in side):
            gradient = None
        yielded.add((tensors.reference, tensors.candidate))
        far = FAR * (root(output.reference) or 1.0)
        toward = [far * rng.standard_normal(output.reference.shape) for _ in range(MANY)]
        candidate_directions = [np.asarray(pair.layout.undo(direction, pair.candidate.shape)) for direction in toward]
        cuts = Both(pair.reference, pair.candidate).map(lambda record: _cuts(calls_of(record)))
        yield _Output(tensors, gradient, Both(toward, candidate_directions), place in trained, agrees, cuts)


def _agree(gradients: Both[np.ndarray], noise: float) -> bool:
    """Return True if gradients are equal up to rounding, as a share of their size, and not zero."""
    size = root(gradients.reference)
    return size > 0 and root(gradients.reference - gradients.candidate) <= _AGREE_BELOW * noise * size


def _parameters(scene: DiffContext, graphs: Both[Graph]) -> Iterator[_Output]:
    """Yield the parameters that only the code of one loss computes with: their gradients are its slopes."""
    rng = np.random.default_rng(13)
    for pair in scene.pairs(scene.number, "grad").values():
        gradient, names = whole_of(pair), _names_of(pair)
        if gradient is None or names is None:
            continue
        if any(len(_turns_of(graph, name)) != 1 for graph, name in zip(graphs, names)):
            continue
        yield _of_parameter(pair, names, gradient, rng)


def _penalised(scene: DiffContext, sheets: Sequence[FormulaView | None]) -> Iterator[_Output]:
    """Yield the parameters that both losses use beside the model's outputs, such as those of a penalty."""
    rng = np.random.default_rng(17)
    for pair in scene.pairs(scene.number, "grad").values():
        names = _names_of(pair)
        if names is None or any(s is None or _parameter_node(s, name) is None for s, name in zip(sheets, names)):
            continue
        yield _of_parameter(pair, names, None, rng)


def _names_of(pair: Pair) -> Both[str] | None:
    """Return the names of a parameter in both traces; `None` if only one side has it."""
    if pair.reference is None or pair.candidate is None:
        return None
    return Both(pair.reference, pair.candidate).map(lambda record: f"{record.layer}/{record.slot}")


def _of_parameter(pair: Pair, names: Both[str], gradient: Both[np.ndarray] | None, rng: np.random.Generator) -> _Output:
    assert pair.reference is not None and pair.candidate is not None
    toward = [FAR * rng.standard_normal(pair.reference.shape) for _ in range(MANY)]
    others = [np.asarray(pair.layout.undo(direction, pair.candidate.shape)) for direction in toward]
    return _Output(Both((), ()), gradient, Both(toward, others), parameters=names)


def _turns_of(graph: Graph, name: str) -> list[int]:
    """Return the numbers of the backwards whose loss is computed with a parameter of the loop; empty for a layer's."""
    if any(call.layer != LOOP and name in call.parameters for call in graph.trace.calls):
        return []
    if any(not call.function and call.layer == name.rpartition("/")[0] for call in graph.trace.calls):
        return []
    ends = enumerate(_all_noted(graph, "backward"))
    return [turn for turn, end in ends if any(name in c.parameters for c in graph.back(end, partial(_is_cut, graph)))]


def _parameter_node(sheet: FormulaView, name: str) -> int | None:
    return next((k for k, node in enumerate(sheet.nodes) if node.name == name), None)


def _tensors_of(graph: Graph, record: Record) -> tuple[int, ...]:
    """Return the numbers of the tensors, in a trace, that a record of one or several calls holds; empty if unknown."""
    tensors = [graph.tensor_of(replace(record, call=call)) for call, _ in calls_of(record)]
    return () if None in tensors else tuple(tensor for tensor in tensors if tensor is not None)


def _cuts(calls: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(np.cumsum([rows for _, rows in calls])[:-1].tolist())


def _along(case: _Case, leaves: Sequence[_Output]) -> _Case:
    """Return losses with the slopes of both formulas along all leaves, in the place of the recorded ones."""
    sides: list[_Side] = []
    rows: list[np.ndarray] = []
    for k, side in enumerate(case.written):
        assert side is not None
        formula = side.formula.along([leaf for output in leaves for leaf in output.leaves(k, side.sheet)])
        row = formula.row({}, MANY)
        if row is None:
            return case
        sides.append(replace(side, formula=formula, leaves=tuple(leaf.node for leaf in formula.leaves)))
        rows.append(row)
    for side in sides:
        side.sheet.formula = side.formula
    whole = Both(*rows)
    few = whole.map(lambda row: row[: len(row) - MANY + _FEW])
    noise = max(case.noise, _ROUNDING * max(map(root, rows)))
    return replace(case, sides=few, whole=whole, written=Both(*sides), noise=noise)


def _gradient_inputs(
    scene: DiffContext, sheets: Sequence[FormulaView | None], graphs: Both[Graph]
) -> Iterator[_Output]:
    """Yield the inputs of both losses that are gradients which the loop asked for, as far as they are equal."""
    if not any("@" in slot for _, slot, _ in scene.pairs(scene.number, "backward")):
        return
    inputs = [_outside(sheet, graph) for sheet, graph in zip(sheets, graphs)]
    rng = np.random.default_rng(11)
    for reference, values in inputs[0].items():
        for candidate, others in inputs[1].items():
            if values.shape == others.shape and np.allclose(values, others, 1e-4, 1e-5 * root(values)):
                toward = [FAR * (root(values) or 1.0) * rng.standard_normal(values.shape) for _ in range(MANY)]
                yield _Output(Both((reference,), (candidate,)), None, Both(toward, toward))
                del inputs[1][candidate]
                break


def _outside(sheet: FormulaView | None, graph: Graph) -> dict[int, np.ndarray]:
    """Return the tensors of a loss that no recorded call computes, and no layer gets, by number."""
    if sheet is None:
        return {}
    fed = {operand.tensor for call in graph.trace.calls if call.layer != LOOP for operand in call.inputs}
    tensors = {}
    for tensor, node in sheet.writer.nodes.items():
        call = graph.producers.get(tensor)
        if (call is None or call.function == GRAD) and tensor not in fed and _is_leaf(sheet, tensor):
            tensors[tensor] = sheet.formula.values[node]
    return {tensor: values for tensor, values in tensors.items() if values.size > 1}


def _of_loss(
    place: PairPlace, pair: Pair, gradients: Mapping[PairPlace, Pair], graphs: Both[Graph], turn: int
) -> PairPlace:
    """Return the place of the gradient that the loss's backward gave an output.

    Gradients that the loop asked for itself (`grad`, of a penalty or a differential equation) come before.
    """
    layer, slot, call = place
    times = next((k for k in count(1) if (layer, f"{slot}@{k}", call) not in gradients), 1)
    backwards = min(len(_all_noted(graph, "backward")) for graph in graphs)
    if backwards > 1:
        tensor = None if pair.reference is None else graphs.reference.tensor_of(pair.reference)
        reaching = [] if tensor is None else _reaching(graphs.reference, tensor)
        if times != len(reaching) or turn not in reaching:
            return (layer, "", call)  # which backward gave which gradient is not known
        return (layer, f"{slot}@{reaching.index(turn)}" if turn != reaching[0] else slot, call)
    return (layer, f"{slot}@{times - backwards}", call) if times > backwards > 0 else place


def _used_inside(graph: Graph, paired: frozenset[int], turn: int) -> set[int]:
    """Return the tensors that layers use as input, directly or through functions that the loop calls.

    Of several backwards, only the layers count that the loss of this one is computed with.
    """
    ends = _all_noted(graph, "backward")
    end = ends[turn] if turn < len(ends) else None
    calls = graph.trace.calls if end is None or len(ends) == 1 else [*graph.back(end, partial(_is_cut, graph))]
    forms = _forms_of_loss(graph, turn)
    losses = {c.layer for c in graph.trace.calls if not c.function and any(o.tensor in forms for o in c.outputs)}
    homes = {LOOP, *losses, *_computed_outputs(graph, paired)}
    used = {o.tensor for c in calls if c.layer not in homes for o in c.inputs}
    for call in reversed(graph.trace.calls):
        is_used = call.function and call.layer in homes and any(o.tensor in used for o in call.outputs)
        if is_used and call.function not in ("detach", GRAD):
            used.update(o.tensor for o in call.inputs)
    return used


def _losses(
    scene: DiffContext, sheets: Sequence[FormulaView | None], graphs: Both[Graph], turn: int
) -> Both[tuple[int, float]] | None:
    """Return the node and recorded value of each side's loss, or `None` if a side lacks one."""
    pairs = [p for p in scene.pairs(scene.number, "loss").values() if p.anchor.slot == "loss"]
    pair = next((p for p in pairs if turn in (0, p.anchor.call)), None)
    if pairs and (pair is None or not pair.complete):
        return None
    nodes = []
    for sheet, graph, record in zip(sheets, graphs, pair.sides if pair is not None else (None, None)):
        # A loss that nobody logs is that of the backward.
        logged, ends = _all_noted(graph, "log_loss"), _all_noted(graph, "backward")
        tensor = logged[turn] if turn < len(logged) else ends[turn] if turn < len(ends) else None
        node = -1 if sheet is None or tensor is None else sheet.writer.nodes.get(tensor)
        value = float(np.ravel(record.value)[0]) if record is not None else graph.scalar(tensor or 0)
        if node is None or (sheet is not None and node < 0) or math.isnan(value):
            return None
        nodes.append((node, value))
    return Both(*nodes)


@dataclass(frozen=True)
class _Rows:
    """The recorded loss (if logged) and slopes of both sides, scaled to the same size.

    Attributes:
        scales: divisors of the loss and of the slopes.
    """

    sides: Both[np.ndarray]
    scales: tuple[float, float]


def _recorded(outputs: Sequence[_Output], losses: Both[tuple[int, float]] | None) -> _Rows | None:
    """Return the logged loss and the slopes from the recorded gradients; `None` if they are zero or not finite."""
    rows = []
    for k in range(2):
        slopes = np.zeros(MANY)
        for output in outputs:
            assert output.gradients is not None
            gradient = [*output.gradients][k]
            slopes += [float(np.vdot(gradient, toward)) for toward in output.directions.reference]
        rows.append(slopes)
    size, largest = max(map(root, rows)), 1.0
    if (not size and losses is None) or not all(np.isfinite(row).all() for row in rows):
        return None
    size = size or 1.0
    rows = [row / size for row in rows]
    if losses is not None:
        largest = max(abs(value) for _, value in losses) or 1.0
        rows = [np.concatenate([[value / largest], row]) for row, (_, value) in zip(rows, losses)]
    return _Rows(Both(*rows), (largest, size))


def _is_loss(pair: Pair, graphs: Both[Graph]) -> bool:
    """Return True if an output of the models is what both backwards begin at, or begin at a multiple of."""
    sides = [(graph, record) for graph, record in zip(graphs, pair.sides) if record is not None]
    return len(sides) == 2 and all(graph.tensor_of(record) in _forms_of_loss(graph) for graph, record in sides)


def _forms_of_loss(graph: Graph, turn: int = 0) -> set[int]:
    """Return the tensor that a backward begins at, and those of one number that it is computed from alone."""
    ends = _all_noted(graph, "backward")[turn : turn + 1]
    for tensor in ends:
        call = graph.producers.get(tensor)
        inputs = () if call is None or not call.function else call.inputs
        if len(inputs) == 1 and math.prod(graph.trace.tensors[inputs[0].tensor].shape) == 1:
            ends.append(inputs[0].tensor)
    return {*ends}


def _noted(graph: Graph, name: str) -> int | None:
    """Return the first tensor that the loop called ``name`` with, e.g. ``backward``; `None` if never."""
    return next(iter(_all_noted(graph, name)), None)


def _all_noted(graph: Graph, name: str) -> list[int]:
    """Return all tensors that the loop called ``name`` with, in order."""
    return graph.noted.get(name, [])


# -- recomputed values ---------------------------------------------------------------------------------------------


def sheet_of(
    graph: Graph, step: Step, info: RunInfo, paired: frozenset[int] | None = None, turn: int = 0
) -> FormulaView | None:
    """Return the loss of a backward as a formula; `None` if it can't be written as one.

    Args:
        paired: the tensors that are compared as outputs of layers. Default: all outputs.
        turn: the number of the backward. Default: the first.
    """
    ends = _all_noted(graph, "backward")
    if turn >= len(ends):
        return None
    end = ends[turn]
    writer = Writer(graph, step, info)
    try:
        # The formula of a loss begins at outputs of layers, whose gradients are recorded.
        outputs = {o.tensor for c in graph.trace.calls if not c.function for o in c.outputs}
        if paired is not None:
            outputs = outputs.difference(*_computed_outputs(graph, paired).values())
        formula = writer.write(end, (), outputs - _forms_of_loss(graph, turn))
    except (UnknownError, ValueError, IndexError, PadiffError):
        return None
    if formula.values[formula.end].size != 1 or sum(value.size for value in formula.values) > 10 * _MOST:
        return None
    return FormulaView(writer, graph, False)


def _is_leaf(sheet: FormulaView, tensor: int) -> bool | None:
    """Return True if a formula begins at a tensor, False if it computes it, `None` if the tensor is not in it."""
    node = sheet.writer.nodes.get(tensor)
    return None if node is None else not sheet.nodes[node].operation and sheet.is_float(node)


def _side(
    sheet: FormulaView | None,
    index: int,
    outputs: Sequence[_Output],
    losses: Both[tuple[int, float]] | None,
    rows: _Rows,
) -> _Side | None:
    """Return a side's loss with its slopes; `None` if they do not agree with the recorded values."""
    if sheet is None or not outputs:
        return None
    leaves = [leaf for output in outputs for leaf in output.leaves(index, sheet)]
    value = None if losses is None else [*losses][index][0]
    formula = Sloped(sheet.formula, leaves, value, _FEW, rows.scales)
    row = formula.row({}, MANY)
    recorded = [*rows.sides][index]
    if row is None or row.shape != recorded.shape:
        return None
    off = root(row - recorded)
    sheet.formula = formula
    if off > _AGREES * root(recorded):
        # A model that is not recorded may give an input of the loss: its gradients are no slopes of the formula.
        # Or the loss has corners (absolute values, cells of a grid), at which slopes are computed across.
        corners = off <= _CORNERS * root(recorded)
        off = abs(row[0] - recorded[0])
        if value is None or off > _AGREES_ALONE * abs(recorded[0]) or not (corners or _outside(sheet, sheet.graph)):
            return None
        formula.complete(recorded, MANY)
    return _Side(sheet, formula, tuple(leaf.node for leaf in leaves), off)


# -- sums of terms -------------------------------------------------------------------------------------------------


def _weighed(case: _Case, sums: _Sums | None, scalar: bool) -> Hypothesis | None:
    """Return the hypothesis that one side's loss is a sum of the other's terms with other weights; `None` if not."""
    if sums is None or root(sums.total.reference - sums.total.candidate) <= 3 * sums.noise:
        return None
    sides: list[Terms | None] = []
    for side, formula in zip(case.written, sums.formulas):
        if side is None or formula is None:
            sides.append(None)
            continue
        terms = terms_of(side.sheet, formula.loss, [leaf.node for leaf in formula.leaves], scalar)
        columns = formula.columns(terms, MANY)
        units = None if columns is None else (columns / sums.unit[:, None])[sums.rows]
        sides.append(None if units is None else merged(side.sheet, terms, units))
    for surplus in (False, True):
        own, other = Both(*sides).swapped(surplus)
        without, actual = sums.total.swapped(surplus)
        weighing = None if own is None else weighed(own, actual, sums.noise)
        sheet = case.sheets.swapped(surplus).candidate
        text = None if own is None or weighing is None else described(own, other, sheet, weighing, surplus)
        if weighing is None or text is None:
            continue
        kind, sentence, lines, reductions = text
        return Hypothesis(
            kind,
            "the weight of a term",
            sentence if "does not add" in sentence else f"in the candidate, {sentence}",
            partial(iter, [Prediction("the loss and its slopes", actual, weighing.row, without, sums.noise)]),
            "numbers",
            0 if None not in sides else len(weighing.ratios),
            code=True,
            lines=lines,
            values=reductions,
        )
    return None


@dataclass(frozen=True)
class _Sums:
    """The losses of both sides with their slopes, and the formulas that are divided into terms.

    Attributes:
        unit: the unit of each row.
        rows: the rows of columns that are used.
        noise: the rounding error of a row.
    """

    formulas: Both[Sloped | None]
    total: Both[np.ndarray]
    unit: np.ndarray
    rows: slice
    noise: float


def _sums_of_both(case: _Case, leaves: Sequence[_Output]) -> _Sums | None:
    """Return both losses as functions of all outputs of the model; `None` if they can't be computed.

    Slopes along outputs count, too, whose recorded gradients come from more than the loss.
    """
    formulas: list[Sloped] = []
    totals: list[np.ndarray] = []
    for k, side in enumerate(case.written):
        assert side is not None
        moved = [leaf for output in leaves for leaf in output.leaves(k, side.sheet)]
        formula = side.formula.with_leaves(moved)
        total = formula.columns([Term((formula.loss,), _same)], MANY)
        if total is None:
            return None
        formulas.append(formula)
        totals.append(total[:, 0])
    unit = np.array([max(abs(total[0]) for total in totals) or 1.0, *[max(root(t[1:]) for t in totals) or 1.0] * MANY])
    both = Both(*(total / unit for total in totals))
    noise = max(case.noise / max(map(root, case.whole)), _ROUNDING) * max(map(root, both))
    return _Sums(Both(*formulas), both, unit, slice(None), noise)


def _sums_of_one(case: _Case, is_logged: bool) -> _Sums | None:
    """Return one loss as a function of outputs, and the other as it was recorded; `None` if both are unknown."""
    formulas = case.written.map(lambda side: None if side is None else side.formula)
    formula = formulas.reference or formulas.candidate
    if formula is None:
        return None
    # The logged loss is another tensor than that of the backward, if it is divided or scaled in between.
    same = is_logged and formula.value == formula.loss
    total = case.whole.map(lambda row: row[0 if same or not is_logged else 1 :])
    return _Sums(formulas, total, np.ones(MANY + 1), slice(0 if same else 1, None), case.noise)
