"""Causes of a loss that differs although the model's outputs agree: its inputs, its output, its divisor."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from padiff.align.call_order import outermost_calls
from padiff.compare.declared.optimizers import same
from padiff.compare.declared.run import OF_LAYOUT
from padiff.compare.diagnose.causes import ratio_of, round_ratio, same_values, times, weight_in_loss
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.loss_calls import (
    WEIGHTS,
    LossCall,
    are_exchangeable,
    calls_of,
    fixed,
    functions_of,
    is_near,
    loss_calls,
    number_text,
    sides_of,
    source_cause,
    spelled,
)
from padiff.compare.diagnose.place import graphs_of
from padiff.compare.judge.drift import was_excused
from padiff.compare.measure.operands import operands
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.frameworks.catalog import is_loss as is_loss_function
from padiff.frameworks.settings import conventions_of
from padiff.records import (
    LOOP,
    ROOT,
    SIDES,
    Both,
    Cause,
    Diff,
    Problem,
    Step,
    is_loss,
    is_of_loss,
    loss_role,
    setting_text,
)
from padiff.system.terminal import first_few

# Most columns of which each may have a factor of its own.
_COLUMNS = 16


def labels_cause(diff: Diff, role: str, calls: Both[LossCall] | None) -> Cause:
    sides = sides_of(diff)
    proven, evidence = _proof_by_input(role, calls)
    if sides is None:
        return Cause("labels", "the loss is of other labels", proven, evidence)
    reference, candidate = sides
    if any(not record.dtype.startswith(("int", "uint", "bool")) for record in diff.pair.sides if record is not None):
        ratio = ratio_of(reference, candidate)
        what = "labels" if role == "labels" else "targets"
        text = f"the loss is of other {what}"
        power, columns = _power_of(reference, candidate), _of_columns(reference, candidate)
        values = _one_value(reference, candidate)
        if values is not None:
            target, number = (f"{value:.6g}" for value in values)
            text = f"the loss is of other {what}: each that is not equal is {number} for the reference's {target}"
            return Cause("label_value", text, proven, evidence, values=Both(*values))
        if ratio is not None:
            text = f"the {what} that the loss is of are {times(ratio)}: another normalisation"
        elif power is not None:
            text = (
                f"the {what} that the loss is of are the softmax of logits that are {times(power)}: another temperature"
            )
        elif columns is not None:
            numbers = ", ".join(f"{number:.4g}" for number in columns)
            text = f"the {what} that the loss is of are {numbers} times the reference's, column by column"
        elif same_values(reference, candidate):
            text = f"the {what} that the loss is of are in another order than the model's inputs"
        else:
            proven = False  # which is no cause
        return Cause("labels", text, proven, evidence)
    differ = reference != candidate
    count, among = int(differ.sum()), reference.size
    place = tuple(int(k) for k in np.argwhere(differ)[0]) if count else ()
    expected, actual = (int(side[place]) for side in sides)
    text = (
        f"the loss is of other labels: {count} of {among} differ, the first at {list(place)}, "
        f"{expected} against {actual}"
    )
    regular = _pattern(reference.astype(np.int64), candidate.astype(np.int64), differ, _ignored(calls))
    return Cause("labels", f"{text}: {regular}" if regular else text, proven, evidence)


def _one_value(reference: np.ndarray, candidate: np.ndarray) -> tuple[float, float] | None:
    """Return the number of either side where they differ; `None` if it is not one number on each side."""
    differ = reference != candidate
    values = [np.unique(side[differ]) for side in (reference, candidate)]
    return (float(values[0][0]), float(values[1][0])) if all(each.size == 1 for each in values) else None


def _of_columns(reference: np.ndarray, candidate: np.ndarray) -> list[float] | None:
    """Return the factor of each of a few columns; `None` if a column has no constant factor, or all have the same."""
    count = reference.shape[-1] if reference.ndim > 1 else 0
    if not 1 < count <= _COLUMNS or reference.shape != candidate.shape or reference.size < 4 * count:
        return None
    columns = [side.reshape(-1, count).T.astype(np.float64) for side in (reference, candidate)]
    factors = [float(np.vdot(a, b) / max(float(np.vdot(a, a)), 1e-300)) for a, b in zip(*columns)]
    close = (np.allclose(factor * a, b, rtol=1e-3, atol=1e-6) for factor, a, b in zip(factors, *columns))
    return factors if all(close) and not np.allclose(factors, factors[0], rtol=1e-3) else None


def _power_of(reference: np.ndarray, candidate: np.ndarray) -> float | None:
    """Return the factor of the logits whose softmax the candidate's rows are; `None` if both are not such rows."""
    rows = [
        np.asarray(side, np.float64).reshape(-1, side.shape[-1] if side.ndim else 1) for side in (reference, candidate)
    ]
    if rows[0].shape != rows[1].shape or rows[0].shape[1] < 2:
        return None
    if any((side <= 0).any() or not np.allclose(side.sum(1), 1, atol=1e-3) for side in rows):
        return None
    logs = [np.log(side) - np.log(side).mean(1, keepdims=True) for side in rows]
    return ratio_of(*logs)


def _ignored(calls: Both[LossCall] | None) -> Both[int]:
    if calls is None:
        return Both(-100, -100)
    return calls.map(lambda call: int(call.settings.get("ignore_index", -100)))


def _pattern(reference: np.ndarray, candidate: np.ndarray, differ: np.ndarray, ignored: Both[int]) -> str:
    """Return a text on a regular difference of the labels, such as a shift; empty if the difference is irregular."""
    offsets = np.unique((candidate - reference)[differ])
    out = Both((reference == ignored.reference) | (reference < 0), (candidate == ignored.candidate) | (candidate < 0))
    if bool((out.reference != out.candidate)[differ].all()):
        if not out.reference[differ].any():
            return "all of these are ignored in the candidate only"
        if not out.candidate[differ].any():
            return "all of these are ignored in the reference only"
    if len(offsets) == 1 and bool(differ[~out.reference].all()):
        return f"the candidate's are {int(offsets[0]):+d}, as if classes were counted from another number on"
    if reference.ndim and reference.shape[-1] > 2:
        if np.array_equal(candidate[..., :-1], reference[..., 1:]):
            return "the candidate's are shifted: each place has the label of the one after it"
        if np.array_equal(candidate[..., 1:], reference[..., :-1]):
            return "the candidate's are shifted: each place has the label of the one before it"
    if np.array_equal(np.sort(candidate, axis=None), np.sort(reference, axis=None)):
        return "the same labels in another order, than the model's inputs are in"
    return ""


def _proof_by_input(role: str, calls: Both[LossCall] | None) -> tuple[bool, str]:
    """Check that an input of the reference, in one role, turns the candidate's loss into the reference's loss.

    Args:
        role: the role of the input, e.g. ``labels``.
        calls: the loss calls of both sides.

    Returns:
        True and the evidence as text, or False and an empty text.
    """
    if calls is None:
        return False, ""
    reference, candidate = calls
    if reference.inputs is None or candidate.inputs is None or reference.output is None:
        return False, ""
    inputs = {**candidate.inputs, role: reference.inputs[role].reshape(candidate.inputs[role].shape)}
    if not candidate.gives(reference.output, inputs=inputs):
        return False, ""
    return True, f"with the reference's the candidate's loss is the reference's, {number_text(reference.output)}"


def weights_cause(diff: Diff, role: str, calls: Both[LossCall] | None) -> Cause:
    proven, evidence = _proof_by_input(role, calls)
    values = (
        Both("others", "others") if calls is None else calls.map(lambda call: setting_text(call.settings.get(role)))
    )
    sentence = f"the loss weighs classes differently: {role} {values.reference} against {values.candidate}"
    fix = "" if calls is None else fixed(calls, {role: calls.reference.settings.get(role)})
    return Cause("loss_weight", sentence, proven, evidence, fix)


def input_cause(diff: Diff, calls: Both[LossCall] | None) -> Cause:
    role = loss_role(diff.pair.anchor.slot)
    what = role.replace("_", " ")
    sides = sides_of(diff)
    if sides is not None and calls is not None and role == "logits" and _is_softmax(calls):
        call = f"{functions_of(calls.candidate.framework)}{spelled(calls.candidate.framework, 'cross_entropy')}"
        text = "the candidate takes the softmax of the logits before the loss function, which takes it itself"
        return Cause(
            "softmax_twice", text, True, "what goes in is the softmax of the reference's", f"{call}(logits, ...)"
        )
    ratio = ratio_of(*sides) if sides is not None else None
    if ratio is not None:
        text = f"the {what} that go into the loss are {times(ratio)}, where the model's outputs agree: a temperature"
        return Cause("loss_input", text)
    normed = Both(False, False) if sides is None else _normed(sides)
    if sides is not None and normed.reference != normed.candidate:
        side, other = SIDES if normed.candidate else SIDES.swapped()
        text = f"the {side}'s {what} goes into the loss as it is, the {other}'s divided by its norm, row by row"
        return Cause("loss_input", text, True, "with it both agree")
    text = f"what goes into the loss as {what} differs: what the loop does before, as the model's outputs agree"
    return Cause("loss_input", text)


def _normed(sides: Both[np.ndarray]) -> Both[bool]:
    """Return which of two inputs is the other one divided by the norm of each row."""
    rows = sides.map(lambda side: np.asarray(side, np.float64).reshape(-1, side.shape[-1] if side.ndim else 1))
    norms = rows.map(lambda side: np.linalg.norm(side, axis=1, keepdims=True))
    if rows.reference.shape != rows.candidate.shape or rows.reference.shape[1] < 2:
        return Both(False, False)
    with np.errstate(all="ignore"):
        units = rows.zip(norms).map(lambda side: side[0] / side[1])
    if not np.allclose(units.reference, units.candidate, atol=1e-4):
        return Both(False, False)
    return norms.map(lambda side: bool(np.allclose(side, 1, atol=1e-4)))


def _is_softmax(calls: Both[LossCall]) -> bool:
    if calls.reference.inputs is None or calls.candidate.inputs is None:
        return False
    logits, candidate_input = (call.inputs["logits"].astype(np.float64) for call in calls if call.inputs is not None)
    if logits.shape != candidate_input.shape:
        return False
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return bool(np.allclose(shifted / shifted.sum(-1, keepdims=True), candidate_input, rtol=0, atol=1e-3))


def labels_in_order(scene: DiffContext) -> Cause | None:
    """Return the cause of labels that differ by their order or by a constant offset; `None` for any other difference.

    Labels that a model predicts do not differ in these ways.
    """
    calls = calls_of(scene)
    sides = sides_of(scene.diff)
    if sides is None or not all(np.all(side == np.round(side)) for side in sides):
        return None
    reference, candidate = (side.astype(np.int64) for side in sides)
    differ = reference != candidate
    if not _pattern(reference, candidate, differ, _ignored(calls)):
        return None
    return labels_cause(scene.diff, "labels", calls)


# Largest relative difference of a divisor from the count that it is, and most steps that are read. Chosen.
_NEAR, _STEPS = 1e-4, 4


def divisor_cause(scene: DiffContext) -> Cause | None:
    """Return the cause that the sides divide the sum of a loss function by other counts; `None` if they do not.

    It is proven if the counts are right in two steps in which one of them is another number.
    """
    numbers = [number for number in scene.numbers if number >= scene.number][:_STEPS]
    divisors = [each for number in numbers if (each := _divisors(scene, number)) is not None]
    if not divisors or divisors[0][0].reference == divisors[0][0].candidate:
        return None
    names = Both(
        _common((pair.reference, counts.reference) for pair, counts in divisors),
        _common((pair.candidate, counts.candidate) for pair, counts in divisors),
    )
    if names.reference == names.candidate or not all(names):
        return None
    found = divisors[0][0]
    text = (
        f"the candidate divides the loss by {found.candidate:g}, the number of {names.candidate}; the reference by "
        f"{found.reference:g}, the number of {names.reference}"
    )
    seen = {tuple(pair) for pair, _ in divisors}
    proven = len(seen) > 1
    shown = f"so in {len(divisors)} steps, where these numbers differ" if proven else ""
    return Cause("loss_scale", text, proven, shown)


def _divisors(scene: DiffContext, number: int) -> tuple[Both[float], Both[Mapping[str, int]]] | None:
    """Return by what each side divides the sum of its loss function, with its counts; `None` if that is not known."""
    steps = scene.sides(number)
    if steps is None:
        return None
    divisors, counts = [], []
    for step, run in zip(steps, scene.runs):
        calls = [call for call in loss_calls(step, run.info) if call.output is not None and call.output.size == 1]
        losses = [record for record in step.records if is_loss(record) and not record.source.sketched]
        if len(calls) != 1 or len(losses) != 1 or calls[0].inputs is None or calls[0].output is None:
            return None
        total, loss = float(calls[0].output.ravel()[0]), float(np.ravel(losses[0].value)[0])
        if not loss or not math.isfinite(total / loss) or total / loss <= 0:
            return None
        divisors.append(total / loss)
        counts.append(dict(_counts(calls[0], step)))
    return Both(*divisors), Both(*counts)


def _common(sides: Iterable[tuple[float, Mapping[str, int]]]) -> str:
    """Return the name of the count that the divisor is in all steps; empty if there is none."""
    sides = list(sides)
    names = [name for name in sides[0][1] if all(_is(divisor, counts.get(name, 0)) for divisor, counts in sides)]
    return names[0] if names else ""


def _is(divisor: float, count: int) -> bool:
    return count > 1 and abs(divisor - count) <= _NEAR * count


def _counts(call: LossCall, step: Step) -> Iterator[tuple[str, int]]:
    """Yield the counts that a loss may be divided by, the most usual first."""
    inputs = call.inputs or {}
    batch = next((r for r in step.records if r.stage == "input" and r.shape and r.layer != LOOP), None)
    labels = next((inputs[role] for role in _LABELS if role in inputs), None)
    if labels is not None and labels.dtype.kind in "iu":
        counted = int((labels != int(call.settings.get("ignore_index", -100))).sum())
        if counted != labels.size:
            yield "labels that count", counted
        yield "labels", int(labels.size)
    if batch is not None:
        yield "samples", int(batch.shape[0])
        if len(batch.shape) > 1:
            yield "elements of the input's first two axes", int(batch.shape[0] * batch.shape[1])
    for role, values in inputs.items():
        if values.ndim:
            yield f"rows of the {role.replace('_', ' ')}", len(values)
            yield f"elements of the {role.replace('_', ' ')}", int(values.size)


# Relative distance below which two gradients differ alike: rows that chose otherwise are part of some.
_LIKE = 0.1
_KINDS = {
    "function": "loss_function",
    "reduction": "loss_reduction",
    "label_smoothing": "label_smoothing",
    "ignore_index": "ignore_index",
    "weight": "loss_weight",
    "pos_weight": "loss_weight",
}


def output_cause(scene: DiffContext, calls: Both[LossCall] | None) -> Cause | None:
    if calls is None:
        return None
    reference, candidate = calls
    compared = [d for d in scene.step if is_of_loss(d.pair.anchor) and d.pair.stage == "loss" and d.compared]
    outputs = [d for d in compared if loss_role(d.pair.anchor.slot) == "0"]
    if is_loss(scene.diff.pair.anchor) and any(map(_agrees, outputs)):
        cause = _term(scene) or divisor_cause(scene)
        return cause or (_after(scene.diff) if _all_agree(scene, outputs) else None)
    differing = _differing(calls)
    if "function" in differing:
        # Two functions may give the same, as of logits and of their logarithms: what comes after them differs.
        if is_near(candidate.output, reference.output):
            return _after(scene.diff)
        if are_exchangeable(calls):
            return None
        return _other_function(calls)
    if not any(_agrees(d) for d in compared):
        return None
    ignoring = _ignored_rows(calls)
    if ignoring is not None:
        return ignoring
    are_scalars = all(record is not None and record.shape == () for record in scene.diff.pair.sides)
    if is_loss(scene.diff.pair.anchor) and are_scalars and "none" in differing.get("reduction", ()):
        del differing["reduction"]  # one side's loop takes the mean, or the sum, itself
        if not differing:
            return None
    if differing.keys() == {"reduction"} and _is_used_otherwise(scene, calls):
        return None  # what the loop divides by belongs to it
    if differing:
        return _set_differently(calls, differing)
    shapes = calls.map(lambda call: {role: r.shape for role, r in call.loss.records.items() if role != "0"})
    broadcast = shapes.map(lambda side: "target" in side and side["prediction"] != side["target"])
    if broadcast.candidate != broadcast.reference:
        side, shape = ("candidate", shapes.candidate) if broadcast.candidate else ("reference", shapes.reference)
        text = (
            f"the {side}'s prediction {shape['prediction']} and target {shape['target']} are broadcast against "
            "each other"
        )
        fix = "give both the same shape" if broadcast.candidate else ""
        return Cause("loss_shapes", text, True, "the loss has as many terms as that makes", fix)
    for role in sorted(shapes.reference.keys() & shapes.candidate.keys()):
        sizes = shapes.map(lambda side, role=role: side[role])  # type: ignore[misc]
        if math.prod(sizes.reference) != math.prod(sizes.candidate):
            text = (
                f"the loss function is given `{role}` of shape {sizes.candidate} for the reference's {sizes.reference}"
            )
            return Cause("loss_input", text)
    for side, call in (("reference", reference), ("candidate", candidate)):
        exact = call.computed()
        if exact is None or call.output is None or not exact.size == call.output.size == 1:
            continue
        if not is_near(exact, call.output):
            text = (
                f"the loss function itself: the {side}'s is {number_text(call.output)}, in float64 {number_text(exact)}"
            )
            return Cause("loss_function", f"{text} from what went in")
    return Cause("loss_function", "the loss function itself: what goes into it agrees, and what it is set to")


def _all_agree(scene: DiffContext, outputs: Sequence[Diff]) -> bool:
    """Return True if what all loss functions of the loop give agrees."""
    steps = scene.sides(scene.number)
    calls = [] if steps is None else [call for step in steps for call in step.trace.calls if call.layer == LOOP]
    # What a function gives whose tensors were not recorded is not known.
    return all(map(_agrees, outputs)) and sum(is_loss_function(c.function) for c in calls) <= 2 * len(outputs)


def _is_used_otherwise(scene: DiffContext, calls: Both[LossCall]) -> bool:
    """Return True if the tensors that backward begins at are not the same multiple of what the loss calls give."""
    steps, call = scene.sides(scene.number), scene.diff.pair.anchor.call
    if steps is None:
        return False
    graphs = graphs_of(steps, scene.runs.map(lambda run: run.info))
    starts = graphs.map(lambda graph: graph.noted.get("backward", ()))
    if min(map(len, starts)) <= call or any(each.output is None or each.output.size != 1 for each in calls):
        return False
    factors = [
        graph.scalar(start[call]) / float(np.ravel(each.output)[0]) if each.output is not None else math.nan
        for graph, start, each in zip(graphs, starts, calls)
    ]
    return all(map(math.isfinite, factors)) and not math.isclose(*factors, rel_tol=_LIKE)


def _term(scene: DiffContext) -> Cause | None:
    """Return the cause that a scalar output of the model has another weight in the loss: its gradient is the weight.

    `None` if the gradients of all outputs differ alike.
    """
    grads = [d for d in scene.step if d.pair.stage == "backward" and d.pair.anchor.layer == ROOT and d.compared]
    sizes = {
        d.pair.anchor.slot: d.figures.candidate_l2 / d.figures.reference_l2
        for d in grads
        if d.figures is not None and d.figures.reference_l2 > 0
    }
    scalars = [d for d in grads if d.pair.anchor.slot in sizes and math.prod(d.pair.anchor.shape) == 1]
    for diff in scalars:
        slot = diff.pair.anchor.slot
        if all(math.isclose(sizes[slot], size, rel_tol=_LIKE) for other, size in sizes.items() if other != slot):
            continue
        if not math.isclose(sizes[slot], 1.0, rel_tol=_LIKE):
            return weight_in_loss(diff)
    return None


def _agrees(diff: Diff) -> bool:
    return diff.passed and not was_excused(diff)


def _after(diff: Diff) -> Cause:
    sides = sides_of(diff)
    ratio = ratio_of(*sides) if sides is not None else None
    text = (
        "what the loss functions give agrees, so what is made of it afterwards: a factor, a mean, a term that is added"
    )
    if ratio is not None and round_ratio(ratio):
        text = f"what the loss functions give agrees, and the loss is {times(ratio)}: another factor, or another mean"
    return Cause("loss_scale", text)


def _differing(calls: Both[LossCall]) -> dict[str, Both[Any]]:
    """Return the values of the settings that differ, by name."""
    sides = calls.map(lambda call: call.settings)
    names = dict.fromkeys((*sides.reference, *sides.candidate))
    values_by_name = {name: Both(sides.reference.get(name), sides.candidate.get(name)) for name in names}
    optional = (*WEIGHTS, "function")
    return {
        name: values
        for name, values in values_by_name.items()
        if name not in OF_LAYOUT and (None not in values or name in optional) and not same(*values)
    }


def _set_differently(calls: Both[LossCall], differing: Mapping[str, Both[Any]]) -> Cause:
    reference, candidate = calls
    settings = {**candidate.settings, **{name: values.reference for name, values in differing.items()}}
    inputs = dict(candidate.inputs or {})
    for role in set(WEIGHTS) & differing.keys():
        inputs.pop(role, None)
        if reference.inputs is not None and role in reference.inputs:
            inputs[role] = reference.inputs[role]
    proven = candidate.inputs is not None and candidate.gives(reference.output, settings=settings, inputs=inputs)
    texts = [
        f"{name} {setting_text(values.reference)} against {setting_text(values.candidate)}"
        for name, values in differing.items()
    ]
    evidence = ""
    if proven and reference.output is not None:
        evidence = f"set as the reference's, the candidate's loss is the reference's, {number_text(reference.output)}"
    kind = _KINDS.get(next(iter(differing)), "loss_setting")
    fix = fixed(calls, {name: values.reference for name, values in differing.items()})
    sentence = f"the losses are set differently: {candidate.loss.function} with {', '.join(texts)}"
    return Cause(kind, sentence, proven, evidence, fix)


def _other_function(calls: Both[LossCall]) -> Cause:
    names = calls.map(lambda call: call.loss.function)
    spellings = names.zip(calls).map(lambda side: spelled(side[1].framework, side[0]))
    as_written = f" ({spellings.candidate} of {calls.candidate.framework})" * (spellings.candidate != names.candidate)
    sentence = f"the losses are others: {names.reference} against {names.candidate}{as_written}"
    proven = calls.candidate.gives(calls.reference.output, settings=calls.reference.settings)
    evidence = f"with the reference's function the candidate's loss is {number_text(calls.reference.output)}" * proven
    settings = {n: v for n, v in calls.reference.settings.items() if n in ("beta", "delta")}
    return Cause("loss_function", sentence, proven, evidence, fixed(calls, settings, names.reference))


def _ignored_rows(calls: Both[LossCall]) -> Cause | None:
    """Return a cause if only one of the frameworks counts rows with ignored labels in the mean; else `None`."""
    counting = calls.map(lambda call: conventions_of(call.framework).counts_ignored)
    if counting.reference == counting.candidate or calls.candidate.loss.function != "cross_entropy":
        return None
    reference, candidate = calls
    if candidate.inputs is None or not candidate.gives(reference.output, framework=reference.framework):
        return None
    labels, ignored = candidate.inputs["labels"], int(candidate.settings.get("ignore_index", -100))
    count, counted = labels.size, int((labels != ignored).sum())
    counts = Both(count, counted) if counting.reference else Both(counted, count)
    counter = (reference if counting.reference else candidate).framework
    if (candidate if counting.candidate else reference).settings.get("label_smoothing"):
        # Paddle looks for ignored labels among the numbers of the smoothed rows.
        text = (
            f"{count - counted} of {count} labels are ignored: where labels are smoothed, {counter} ignores none, and "
            "divides by the number of all logits"
        )
        fix = (
            f"keep = labels != {ignored}; {functions_of(candidate.framework)}cross_entropy(logits[keep], labels[keep])"
        )
        return Cause("ignored_rows", text, fix=fix * counting.candidate)
    if counted == count:
        return None
    text = (
        f"{count - counted} of {count} labels are ignored, and the reference's mean is over {counts.reference} rows, "
        f"the candidate's over {counts.candidate}: {counter} counts ignored rows where ignore_index is negative"
    )
    evidence = f"counted as the reference's, the candidate's loss is {number_text(reference.output)}"
    function = f"{functions_of(candidate.framework)}cross_entropy"
    fix = (
        f'{function}(..., reduction="sum") / (labels != {ignored}).sum()'
        if counting.candidate
        else f'{function}(..., reduction="sum") / labels.numel()'
    )
    return Cause("ignored_rows", text, True, evidence, fix)


_LABELS = ("labels", "target")


def loss_cause(scene: DiffContext) -> Cause | None:
    """Return the cause of a first diff that is a loss or an input of a loss function; `None` if the records do not
    show it.
    """
    diff = scene.diff
    if diff.pair.stage != "loss" or not diff.pair.complete or isinstance(operands(diff.pair), Problem):
        return None
    try:
        calls = calls_of(scene)
        source = source_cause(scene, calls)
        if source is not None:
            return source
        if is_of_loss(diff.pair.anchor):
            role = loss_role(diff.pair.anchor.slot)
            if role in _LABELS:
                return _with_targets(scene, labels_cause(diff, role, calls))
            if role in WEIGHTS:
                return weights_cause(diff, role, calls)
            if role != "0":
                return input_cause(diff, calls)
        return output_cause(scene, calls)
    except (RunFolderError, SketchOnlyError):
        return None


def _with_targets(scene: DiffContext, cause: Cause) -> Cause:
    """Return the cause of other targets, with the model's calls without gradients if one side makes more of them."""
    steps = scene.sides(scene.number)
    if steps is None or cause.sentence != "the loss is of other targets":
        return cause
    unrecorded = sorted({name for run in scene.runs for name in run.info.copies_left_out})
    if unrecorded:
        names = first_few([f"`{name}`" for name in unrecorded], 3)
        text = f"a copy of the model that the loop changes may give them, and is not recorded: {names}"
        return replace(cause, sentence=f"{cause.sentence}; {text}")
    paths = Both(*({getattr(pair, side).path for pair in scene.alignment.pairs} for side in SIDES))
    calls = steps.zip(paths).map(lambda side: _without_gradients(*side))
    if calls.reference == calls.candidate:
        return cause
    counts = calls.map(lambda count: f"{count} time{'s' * (count != 1)}")
    text = (
        f"{cause.sentence}: the candidate calls the model {counts.candidate} without gradients, as for a target, the "
        f"reference {counts.reference}"
    )
    return replace(cause, sentence=text)


def _without_gradients(step: Step, paths: Collection[str]) -> int:
    """Return the number of calls of the loop of some layers whose outputs get no gradient."""
    calls = {site for site in outermost_calls(step.records) if site[0] in paths}
    return len(calls - {(record.layer, record.call) for record in step.records if record.stage == "backward"})


def loss_cause_of(scene: DiffContext, calls: Both[LossCall]) -> Cause | None:
    """Return the cause of a loss function's output that differs, for two calls with the same inputs; `None` if
    unknown.
    """
    return output_cause(scene, calls)
