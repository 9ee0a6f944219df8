"""Hypotheses on a loss's code: what the reference's loss would have been, had one thing in it been written otherwise.

The calls from what the model gave to where the backward began are computed again, with one edit at a time. A loss is
one number: so its slopes are held against the gradients that were recorded of what the model gave, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from padiff.compare.diagnose.computing.edit import Edit, Sheet, Target, put
from padiff.compare.diagnose.computing.formula import UnknownError
from padiff.compare.diagnose.computing.in_losses import loss_edits, loss_left_out, loss_numbers
from padiff.compare.diagnose.computing.otherwise import other_operations
from padiff.compare.diagnose.computing.slopes import Leaf, Sloped
from padiff.compare.diagnose.computing.solving import numbers
from padiff.compare.diagnose.computing.writer import Writer
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.compare.diagnose.hypotheses.layer_output import noise_level, root
from padiff.compare.diagnose.hypotheses.proof import CLOSE
from padiff.compare.diagnose.hypotheses.rewritten import Case, Found, reported, tried
from padiff.compare.diagnose.hypotheses.scene import Scene, place_of, whole_of
from padiff.compare.diagnose.place import graphs_of
from padiff.compare.diagnose.traced import Graph
from padiff.errors import PadiffError
from padiff.records import LOOP, Both, RunInfo, Step

# Slopes that each edit is tried on, and that one which fits is held against.
_FEW, _MANY = 3, 32
# How far along a direction is looked, as a share of what the tensor is itself. Chosen: in float64, halfway between
# what the difference is rounded to and what is left out beside its linear part.
_FAR = 1e-4
# What a loss's slopes may be off from the recorded gradients, as a share, for its code to be what was computed.
_AGREES = 1e-4
#: Elements that are computed with, at most: each edit does so some dozen times.
_MOST = 300_000


@dataclass(frozen=True)
class _Side:
    """One side's loss, computed again.

    Attributes:
        leaves: nodes of what the model gave.
        off: what was computed is off from what was recorded.
    """

    sheet: Sheet
    formula: Sloped
    leaves: tuple[int, ...]
    off: float


@dataclass(frozen=True)
class _Case(Case):
    """Losses and their slopes.

    Attributes:
        written: what of either side could be computed again.
        whole: both sides' loss and all slopes.
    """

    written: Both[_Side | None] = field(default_factory=lambda: Both(None, None))
    whole: Both[np.ndarray] = field(default_factory=lambda: Both(np.zeros(0), np.zeros(0)))

    def hypothesis(self, found: Found, head: str) -> Hypothesis:
        made = super().hypothesis(found, head)
        side = self.written.candidate if found.surplus else self.written.reference
        without, actual = self.whole.swapped(found.surplus)
        assert side is not None
        formula = side.formula

        def predict() -> Iterator[Prediction]:
            # The few slopes are among all: so far off, it is not likely even if the others agree to the last digit.
            if found.off * math.sqrt(found.made.size) > CLOSE * self.noise * math.sqrt(actual.size):
                return
            row = formula.row(found.edit.changes, _MANY)
            if row is not None:
                yield Prediction("the loss and its slopes", actual, row, without, self.noise)

        # That the whole loss is scaled is said otherwise, too, where a number of the run is the ratio.
        telling = found.edit.telling
        free = made.free if telling else max(made.free, 2)
        return replace(made, predict=predict, what="numbers", code=telling, free=free)


def hypotheses(scene: Scene) -> Iterator[Hypothesis]:
    """Of a first diff in the loss, or in a gradient of what the model gave, where the loop's calls are traced."""
    steps = scene.sides(scene.number)
    if steps is None or not all(step.trace.functions for step in steps):
        return
    if len({step.micro_batches for step in steps}) > 1:
        return  # that is what is other
    of_loop = scene.diff.pair.anchor.layer == LOOP
    if any(not d.passed for d in scene.diffs("forward")) or (scene.stage == "loss" and not of_loop):
        return
    graphs = graphs_of(steps, scene.runs.map(lambda run: run.info))
    sheets = [_sheet(graph, step, run.info) for graph, step, run in zip(graphs, steps, scene.runs)]
    outputs = [
        one
        for one in _outputs(scene, graphs)
        if all(sheet is None or _is_leaf(sheet, tensor) for sheet, tensor in zip(sheets, one.tensors))
    ]
    losses = _losses(scene, sheets, graphs)
    rows = _recorded(outputs, losses)
    if rows is None:
        return
    written = Both(*(_side(sheets[k], k, outputs, losses, rows) for k in range(2)))
    few = rows.sides.map(lambda row: row[: len(row) - _MANY + _FEW])
    offs = [side.off for side in written if side is not None]
    noise = max([noise_level(scene) * max(map(root, rows.sides)), *offs, 1e-300])
    case = _Case(scene, few, Both(_same, _same), noise, written, rows.sides)
    found: list[Found] = []
    reference, candidate = written
    if reference is not None:
        target = Target(few.candidate, few.candidate.shape, _same)
        some = [*numbers(reference.sheet), *loss_numbers(reference.sheet, reference.leaves, reference.formula.loss)]
        makers = (partial(_other_inputs, candidate=sheets[1]), loss_edits, loss_left_out, other_operations)
        found += [_of_scale(one) for one in tried(case, reference.sheet, makers, target, False, some)]
    if candidate is not None:
        target = Target(few.reference, few.reference.shape, _same)
        found += tried(case, candidate.sheet, (loss_left_out,), target, True)
    yield from reported(case, found)


def _of_scale(found: Found) -> Found:
    """That the whole loss is scaled is how a cause shows, and none by itself."""
    edit, sheet = found.edit, found.sheet
    scales = edit.kind in ("scale", "loss_scale", "scale_missing") and edit.at >= 0 and sheet.shape(edit.at) == ()
    return replace(found, edit=replace(edit, telling=False, rank=3)) if scales else found


def _other_inputs(sheet: Sheet, candidate: Sheet | None) -> Iterator[Edit]:
    """What goes into the loss besides what the model gave, as the candidate has it: labels, targets, weights."""
    if candidate is None:
        return
    others = [(k, v) for k, v in enumerate(candidate.formula.values) if _goes_in(candidate, k)]
    for k, own in enumerate(sheet.formula.values):
        if not _goes_in(sheet, k) or any(v.shape == own.shape and np.allclose(v, own, 1e-5) for _, v in others):
            continue
        for _, other in others:
            if other.size == own.size and (other.dtype.kind in "iub") == (own.dtype.kind in "iub"):
                labels = own.dtype.kind in "iu" and sheet.feeds(k, frozenset({"targets", "picked"}))
                differ = int((other.reshape(own.shape) != own).sum())
                what = "labels" if labels else sheet.named(k)
                text = f"the loss is of other {what}: {differ} of {own.size} differ from the reference's"
                if np.array_equal(np.sort(own, axis=None), np.sort(other, axis=None)):
                    text += ", which are in another order"
                kind = "labels" if labels else "loss_input"
                yield Edit(kind, "other labels", text, {k: put(other.reshape(own.shape))}, 0, at=k)


def _goes_in(sheet: Sheet, k: int) -> bool:
    """Whether a tensor comes from outside of the model, or is the labels that something was made of."""
    node, values = sheet.nodes[k], sheet.formula.values[k]
    tensor = sheet.tensor(k)
    if values.size < 2 or node.name or tensor is None:
        return False
    if values.dtype.kind in "iu" and any(sheet.nodes[u].operation in ("targets", "picked") for u in sheet.users(k)):
        return True
    return not node.operation and tensor not in sheet.graph.producers


def _same(values: np.ndarray) -> np.ndarray:
    return values


# -- what is recorded ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Output:
    """What a layer gave, whose gradient is recorded on both sides.

    Attributes:
        tensors: its numbers in the traces.
        gradients: in the reference's layout.
        directions: in which the loss is looked at, as far as is looked; for each side, in its own layout.
    """

    tensors: Both[int]
    gradients: Both[np.ndarray]
    directions: Both[list[np.ndarray]]


def _outputs(scene: Scene, graphs: Both[Graph]) -> Iterator[_Output]:
    rng = np.random.default_rng(7)
    known: set[tuple[int, int]] = set()
    for pair in scene.pairs(scene.number, "backward").values():
        forward = scene.pairs(scene.number, "forward").get(place_of(pair))
        whole, given = whole_of(pair), None if forward is None else whole_of(forward)
        if whole is None or given is None or whole.reference.size > _MOST:
            continue
        if pair.reference is None or pair.candidate is None:
            continue
        of_reference, of_candidate = (
            graphs.reference.tensor_of(pair.reference),
            graphs.candidate.tensor_of(pair.candidate),
        )
        if of_reference is None or of_candidate is None or (of_reference, of_candidate) in known:
            continue  # of a container, it is what its last layer gave
        if _is_used_inside(graphs.reference, of_reference) or _is_used_inside(graphs.candidate, of_candidate):
            continue  # its gradient is not the loss's alone
        known.add((of_reference, of_candidate))
        tensors = Both(of_reference, of_candidate)
        far = _FAR * (root(given.reference) or 1.0)
        toward = [far * rng.standard_normal(whole.reference.shape) for _ in range(_MANY)]
        shape = pair.candidate.shape
        own = [np.asarray(pair.layout.undo(one, shape)) for one in toward]
        yield _Output(tensors, whole, Both(toward, own))


def _is_used_inside(graph: Graph, tensor: int) -> bool:
    """Whether the model goes on with a tensor that it gives."""
    return any(o.tensor == tensor for call in graph.trace.calls if call.layer != LOOP for o in call.inputs)


def _losses(scene: Scene, sheets: Sequence[Sheet | None], graphs: Both[Graph]) -> Both[tuple[int, float]] | None:
    """Of either side the node of the loss that was logged, and what was recorded of it."""
    pair = next((p for p in scene.pairs(scene.number, "loss").values() if p.anchor.slot == "loss"), None)
    if pair is None or pair.reference is None or pair.candidate is None:
        return None
    found = []
    for sheet, graph, record in zip(sheets, graphs, pair.sides):
        tensor = _noted(graph, "log_loss")
        node = -1 if sheet is None or tensor is None else sheet.writer.nodes.get(tensor)
        if node is None or (sheet is not None and node < 0) or record is None:
            return None
        found.append((node, float(np.ravel(record.value)[0])))
    return Both(*found)


@dataclass(frozen=True)
class _Rows:
    """The loss, where it was logged, and its slopes, as they were recorded.

    Attributes:
        scales: what the loss, and the slopes, are divided by.
    """

    sides: Both[np.ndarray]
    scales: tuple[float, float]


def _recorded(outputs: Sequence[_Output], losses: Both[tuple[int, float]] | None) -> _Rows | None:
    """The loss, where it was logged, and its slopes as the gradients give them."""
    rows = []
    for k in range(2):
        slopes = np.zeros(_MANY)
        for one in outputs:
            gradient = [*one.gradients][k]
            slopes += [float(np.vdot(gradient, toward)) for toward in one.directions.reference]
        rows.append(slopes)
    size, largest = max(map(root, rows)), 1.0
    if not size or not all(np.isfinite(row).all() for row in rows):
        return None
    rows = [row / size for row in rows]
    if losses is not None:
        largest = max(abs(value) for _, value in losses) or 1.0
        rows = [np.concatenate([[value / largest], row]) for row, (_, value) in zip(rows, losses)]
    return _Rows(Both(*rows), (largest, size))


def _noted(graph: Graph, name: str) -> int | None:
    """The tensor that something was first done with: where the first backward began, what was first logged."""
    return next((c.inputs[0].tensor for c in graph.trace.calls if c.layer == LOOP and c.function == name), None)


# -- what is computed ----------------------------------------------------------------------------------------------


def _sheet(graph: Graph, step: Step, info: RunInfo) -> Sheet | None:
    """The loss that the first backward began at, as a formula; `None` where it can't be written."""
    end = _noted(graph, "backward")
    if end is None:
        return None
    writer = Writer(graph, step, info)
    try:
        # What layers give is where a loss begins, and their gradients are what it is held against.
        formula = writer.write(end, (), {o.tensor for c in graph.trace.calls if not c.function for o in c.outputs})
    except (UnknownError, ValueError, IndexError, PadiffError):
        return None
    if formula.values[formula.end].shape != () or sum(value.size for value in formula.values) > 10 * _MOST:
        return None
    return Sheet(writer, graph, False)


def _is_leaf(sheet: Sheet, tensor: int) -> bool:
    node = sheet.writer.nodes.get(tensor, -1)
    return node >= 0 and not sheet.nodes[node].operation and sheet.is_float(node)


def _side(
    sheet: Sheet | None,
    index: int,
    outputs: Sequence[_Output],
    losses: Both[tuple[int, float]] | None,
    rows: _Rows,
) -> _Side | None:
    """A side's loss with its slopes; `None` where what is computed is not what was recorded."""
    if sheet is None or not outputs:
        return None
    leaves = [Leaf(sheet.writer.nodes[[*one.tensors][index]], [*one.directions][index]) for one in outputs]
    value = None if losses is None else [*losses][index][0]
    formula = Sloped(sheet.formula, leaves, value, _FEW, rows.scales)
    own = formula.row({}, _MANY)
    recorded = [*rows.sides][index]
    if own is None or own.shape != recorded.shape:
        return None
    off = root(own - recorded)
    sheet.formula = formula
    return None if off > _AGREES * root(recorded) else _Side(sheet, formula, tuple(one.node for one in leaves), off)
