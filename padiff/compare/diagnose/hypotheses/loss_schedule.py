"""Hypotheses on the weights of a loss's terms in later steps: schedules, warm-ups, curricula.

The calls of the loop are recorded in the first step only. The loss is written from them, and computed again with the
outputs, inputs and labels of the later step. What each side recorded there is a sum of the same terms, each with a
weight of its own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from padiff.compare.diagnose.computing.divergence import numbers, solved
from padiff.compare.diagnose.computing.edit import FormulaView, Target, put
from padiff.compare.diagnose.computing.formula import Formula, UnknownError
from padiff.compare.diagnose.computing.in_losses import in_several_places, temperatures
from padiff.compare.diagnose.computing.loss_terms import (
    Leaf,
    Sloped,
    Terms,
    Weighing,
    merged,
    names_of,
    terms_of,
    weighed,
)
from padiff.compare.diagnose.hypotheses import loss_code
from padiff.compare.diagnose.hypotheses.code_edits import same
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, PairPlace, whole_of
from padiff.compare.diagnose.hypotheses.hypothesis import NEAR, Hypothesis, Prediction
from padiff.compare.diagnose.hypotheses.outputs import noise_level, root
from padiff.compare.diagnose.place import graphs_of
from padiff.compare.diagnose.traced import Graph
from padiff.errors import PadiffError
from padiff.records import LOOP, Both, Pair, Run, Step

# Relative difference of two weights that is no rounding. Chosen.
_SAME = 1e-3
# Relative rounding error of a loss and its slopes that is allowed for in any case. Chosen.
_ROUNDING = 1e-5
# A loss is nearer to another one if less than this share of the distance is left. Chosen.
_NEARER = 0.9


def hypotheses(scene: DiffContext) -> Iterator[Hypothesis]:
    """Yield the hypothesis that terms of the loss have other weights in this step, and had equal ones in the first."""
    first = next(iter(scene.numbers), scene.number)
    start, now = scene.sides(first), scene.sides(scene.number)
    if first >= scene.number or start is None or now is None or not all(step.trace.functions for step in start):
        return
    if any(not diff.passed for diff in scene.diffs("forward")):
        return
    graphs = graphs_of(start, scene.runs.map(lambda run: run.info))
    sheet = loss_code.sheet_of(graphs.reference, start.reference, scene.runs.reference.info)
    if sheet is None:
        return
    loss = _loss(scene)
    places = _places(scene, first, graphs.reference)
    again = _again(sheet, places, scene, start.reference, now.reference)
    rows = None if again is None else _rows(scene, sheet, places, loss)
    if again is None or rows is None:
        return
    leaves, sides, unit = rows
    noise = max(noise_level(scene), _ROUNDING) * max(map(root, sides))
    view = copy.copy(again)
    formula = view.formula = Sloped(again.formula, leaves, None, 0, (1.0, 1.0))
    columns = formula.columns(
        terms := terms_of(view, formula.loss, [leaf.node for leaf in leaves], True), len(leaves[0].directions)
    )
    columns = columns if columns is None else columns[-len(unit) :] / unit[:, None]
    own = None if columns is None else merged(view, terms, columns)
    weighings = None if own is None else sides.map(lambda row: weighed(own, row, noise))
    if own is not None and weighings is not None and weighings.reference and weighings.candidate:
        sentence = _text(own, Both(weighings.reference, weighings.candidate), scene.number)
        if sentence is not None:
            row, what = weighings.candidate.row, "a schedule of weights"
            yield _hypothesis("loss_term_weight", what, sentence, sides, row, noise, len(own.groups))
            return
    value = again.formula.end if loss is not None else None
    view.formula = Sloped(again.formula, leaves, value, loss_code.MANY, (float(unit[0]), float(unit[-1])))
    yield from _numbers(view, sides, noise, scene.number)


def _hypothesis(
    kind: str, name: str, sentence: str, sides: Both[np.ndarray], row: np.ndarray, noise: float, free: int
) -> Hypothesis:
    prediction = Prediction("the loss and its slopes", sides.candidate, row, sides.reference, noise)
    return Hypothesis(kind, name, sentence, partial(iter, [prediction]), "numbers", free=free, code=True)


def _numbers(view: FormulaView, sides: Both[np.ndarray], noise: float, step: int) -> Iterator[Hypothesis]:
    """Yield the hypotheses that a number of the loss's code, such as a temperature, follows another schedule."""
    start = view.formula.values[view.formula.end]
    for number in (*temperatures(view), *in_several_places(view), *numbers(view)):
        node = next(iter(number.make(number.value)))
        if not view.is_number(node):
            continue
        values, row = list[float](), start
        for side in sides:
            target = Target(side, side.shape, same)
            edit = None if target.off(start) <= NEAR * noise else solved(view, number, target, noise)
            changes = {} if edit is None else edit.changes
            computed = view.formula.changed(changes)
            if computed is None or target.off(computed) > NEAR * noise:
                break
            row = computed
            values.append(float(np.ravel(view.formula.getter(changes)(node))[0]))
        if len(values) == 2 and not math.isclose(*values, rel_tol=_SAME):
            text = (
                f"in step {step} {number.text} is {values[1]:.4g}, in the reference {values[0]:.4g}, and "
                f"{number.value:.4g} in the first step: another schedule"
            )
            yield _hypothesis(number.kind, "a schedule of a number", text, sides, row, noise, 1)


def _loss(scene: DiffContext) -> Both[float] | None:
    """Return the recorded loss of both sides in the step of the first diff."""
    for pair in scene.pairs(scene.number, "loss").values():
        if pair.anchor.slot == "loss" and pair.anchor.layer == LOOP and pair.reference and pair.candidate:
            return Both(*(float(np.ravel(record.value)[0]) for record in (pair.reference, pair.candidate)))
    return None


def _places(scene: DiffContext, number: int, graph: Graph) -> Mapping[int, PairPlace]:
    """Return the output that each tensor of the reference's first step is, by its place."""
    places: dict[int, PairPlace] = {}
    for place, pair in scene.pairs(number, "forward").items():
        tensor = None if pair.reference is None else graph.tensor_of(pair.reference)
        if tensor is not None:
            places.setdefault(tensor, place)
    return places


def _given(value: np.ndarray, start: Step, now: Step) -> np.ndarray:
    """Return the input or the labels of a later step, for a value of the first step.

    Raises:
        KeyError: no record of the first step has the value, or the later step has no such record.
    """
    for record in start.records:
        if record.stage not in ("input", "loss") or record.source.sketched or math.prod(record.shape) != value.size:
            continue
        if np.array_equal(np.ravel(record.value), np.ravel(value)):
            site = record.stage, record.layer, record.slot, record.call
            later = {(each.stage, each.layer, each.slot, each.call): each for each in now.records}[site]
            return np.asarray(later.value).reshape(value.shape)
    raise KeyError("a tensor of the loop")


def _again(
    sheet: FormulaView, places: Mapping[int, PairPlace], scene: DiffContext, start: Step, now: Step
) -> FormulaView | None:
    """Return the formula with the values of a later step; `None` if a tensor is not recorded there."""
    weights = {f"{record.layer}/{record.slot}": record for record in now.records if record.stage == "weight"}
    formula = Formula()
    try:
        for k, node in enumerate(sheet.nodes):
            value = sheet.formula.values[k]
            if node.operation:
                formula.add(node.operation, *node.given, about=node.about, **node.how)
                continue
            if sheet.is_parameter(k):
                value = np.asarray(weights[node.name].value)
            elif not node.name and value.size > 1:
                place = places.get(sheet.tensor(k) or 0)
                both = None if place is None else whole_of(scene.pairs(scene.number, "forward")[place])
                value = _given(value, start, now) if both is None else both.reference.reshape(value.shape)
            formula.leaf(value, node.name)
    except (UnknownError, PadiffError, KeyError, ValueError, IndexError):
        return None
    formula.end = sheet.formula.end
    view = copy.copy(sheet)
    view.formula = formula
    return view


def _rows(
    scene: DiffContext, sheet: FormulaView, places: Mapping[int, PairPlace], loss: Both[float] | None
) -> tuple[list[Leaf], Both[np.ndarray], np.ndarray] | None:
    """Return the leaves of the formula that are outputs, and the loss, if recorded, and slopes of both sides."""
    rng = np.random.default_rng(7)
    leaves: list[Leaf] = []
    slopes = Both(np.zeros(loss_code.MANY), np.zeros(loss_code.MANY))
    for k, node in enumerate(sheet.nodes):
        place = places.get(sheet.tensor(k) or 0)
        if node.operation or node.name or place is None or not sheet.is_float(k):
            continue
        backward = scene.pairs(scene.number, "backward").get(place)
        gradients = None if backward is None else whole_of(backward)
        output = whole_of(scene.pairs(scene.number, "forward")[place])
        if gradients is None or output is None:
            return None
        far = loss_code.FAR * (root(output.reference) or 1.0)
        toward = [far * rng.standard_normal(sheet.shape(k)) for _ in range(loss_code.MANY)]
        leaves.append(Leaf(k, toward))
        for row, gradient in zip(slopes, gradients):
            row += [float(np.vdot(gradient, direction)) for direction in toward]
    size = max(map(root, slopes))
    if not leaves or not size:
        return None
    head: Both[list[float]] = Both([], []) if loss is None else loss.map(lambda value: [value])
    unit = np.array([*([max(map(abs, loss)) or 1.0] if loss is not None else []), *[size] * loss_code.MANY])
    return leaves, head.zip(slopes).map(lambda side: np.array([*side[0], *side[1]]) / unit), unit


def _text(own: Terms, weighings: Both[Weighing], number: int) -> str | None:
    """Return the terms of other weights as text; `None` if there are none, or all have one ratio."""
    ratios = [theirs / ours if ours else math.inf for ours, theirs in zip(*(each.ratios for each in weighings))]
    changed = [k for k, ratio in enumerate(ratios) if abs(ratio - 1) > _SAME]
    if not changed or len(changed) == len(ratios):
        return None
    texts = []
    for k in changed:
        shares = [each.ratios[k] for each in weighings.swapped()]
        if not all(map(math.isfinite, shares)):
            return None
        texts.append(
            f"in step {number} the weight of a term of the loss ({names_of(own, [k])}) is {shares[0]:.4g} times that "
            f"of the first step, in the reference {shares[1]:.4g} times: another schedule of the weights"
        )
    return "; ".join(texts)


# -- outputs that the loss takes in another form -------------------------------------------------------------------


# The node of an output in the reference's loss and in the candidate's, and what the other side gives there.
_Exchange = tuple[int, int, np.ndarray, np.ndarray]


def other_forms(pairs: Sequence[Pair], steps: Both[Step], runs: Both[Run]) -> list[bool]:
    """Return for each output whether neither loss gets nearer to the other one by the other side's output.

    One author takes the last function in the model, another one in the loss: exchanged outputs then spoil both losses.

    Args:
        pairs: outputs of whole models that differ, though all layers inside agree.
        steps: the records of one process.
    """
    infos = runs.map(lambda run: run.info)
    try:
        graphs = graphs_of(steps, infos)
        sheets = [loss_code.sheet_of(*side, frozenset()) for side in zip(graphs, steps, infos)]
        calls: dict[tuple[str, str], list[Pair]] = {}
        for pair in pairs:
            calls.setdefault((pair.anchor.layer, pair.anchor.slot), []).append(pair)
        if len(calls) > 1 and _explain_losses(pairs, graphs, sheets):
            return [False for _ in pairs]
        answers = {site: _are_other_forms(group, graphs, sheets) for site, group in calls.items()}
        return [answers[pair.anchor.layer, pair.anchor.slot] for pair in pairs]
    except PadiffError:  # a damaged trace
        return [False for _ in pairs]


def _are_other_forms(pairs: Sequence[Pair], graphs: Both[Graph], sheets: Sequence[FormulaView | None]) -> bool:
    """Return True if the outputs of all calls of a model are of another form: one call alone may move the loss away."""
    reference, candidate = sheets
    if reference is None or candidate is None:
        return False
    nodes = _nodes_of(pairs, graphs, reference, candidate)
    if nodes is None:
        return False
    if any(
        _computes_form(candidate, partner, put_there) or _computes_form(reference, node, put_here)
        for node, partner, put_here, put_there in nodes
    ):
        return True
    losses = [float(sheet.formula.values[sheet.formula.end]) for sheet in (reference, candidate)]
    exchanged = _exchange(nodes, reference, candidate)
    if any(
        loss is not None and math.isclose(loss, own, rel_tol=_ROUNDING) for loss, own in zip(exchanged, losses[::-1])
    ):
        return True  # a loss that takes the function itself takes either form
    far = _NEARER * abs(losses[0] - losses[1])
    return all(loss is None or abs(float(loss) - goal) > far for loss, goal in zip(exchanged, losses))


def _nodes_of(
    pairs: Sequence[Pair], graphs: Both[Graph], reference: FormulaView, candidate: FormulaView
) -> list[_Exchange] | None:
    """Return the nodes of each pair of outputs in both losses, with what the other side gives there."""
    nodes = []
    for pair in pairs:
        if pair.reference is None or pair.candidate is None:
            return None
        tensors = graphs.reference.tensor_of(pair.reference), graphs.candidate.tensor_of(pair.candidate)
        node, partner = (
            None if tensor is None else sheet.writer.nodes.get(tensor)
            for sheet, tensor in zip((reference, candidate), tensors)
        )
        if node is None or partner is None:
            return None
        expected = pair.layout.undo(reference.formula.values[node], pair.candidate.shape)
        actual = pair.layout.apply(candidate.formula.values[partner], pair.reference.shape)
        nodes.append((node, partner, actual, expected))
    return nodes


def _exchange(
    nodes: Sequence[_Exchange], reference: FormulaView, candidate: FormulaView
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Return the candidate's loss of the reference's outputs, and the reference's of the candidate's."""
    there = candidate.formula.changed({partner: put(expected) for _, partner, _, expected in nodes})
    return there, reference.formula.changed({node: put(actual) for node, _, actual, _ in nodes})


def _explain_losses(pairs: Sequence[Pair], graphs: Both[Graph], sheets: Sequence[FormulaView | None]) -> bool:
    """Return True if losses that differ are the other side's by its outputs: then the outputs are what differs."""
    reference, candidate = sheets
    nodes = None
    if reference is not None and candidate is not None:
        nodes = _nodes_of(pairs, graphs, reference, candidate)
    if reference is None or candidate is None or nodes is None:
        return False
    losses = [float(sheet.formula.values[sheet.formula.end]) for sheet in (reference, candidate)]
    if math.isclose(*losses, rel_tol=_ROUNDING):
        return False
    exchanged = _exchange(nodes, reference, candidate)
    return any(
        loss is not None and math.isclose(loss, goal, rel_tol=_ROUNDING) for loss, goal in zip(exchanged, losses)
    )


# Operations that normalise: taken of what is normalised already, they are a fault.
_NORMALISING = frozenset({"softmax", "log_softmax"})


def _computes_form(sheet: FormulaView, node: int, partner: np.ndarray) -> bool:
    """Return True if a loss computes, from the model's output, the other side's output or its logarithm.

    Args:
        sheet: the loss.
        node: the output of the model in the loss.
        partner: the output of the other side's model, which that side does not normalise.
    """
    with np.errstate(all="ignore"):
        forms = [partner, np.log(partner)]
    later = [
        sheet.formula.values[k]
        for k in sheet.formula.below([node]) - {node}
        if sheet.nodes[k].operation in _NORMALISING
    ]
    return any(form.shape == value.shape and np.allclose(form, value, 1e-4, 1e-6) for value in later for form in forms)
