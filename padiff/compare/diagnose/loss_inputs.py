"""Causes of a difference in a loss function's inputs: other labels, other weights, logits that the loop changed."""

from __future__ import annotations

import numpy as np

from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.loss_calls import (
    LossCall,
    calls_of,
    fixed,
    functions_of,
    number_text,
    sides_of,
    spelled,
)
from padiff.compare.diagnose.values import ratio_of, same_values, times
from padiff.records import Both, Cause, Diff, loss_role, setting_text


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
        power = _power_of(reference, candidate)
        if ratio is not None:
            text = f"the {what} that the loss is of are {times(ratio)}: another normalisation"
        elif power is not None:
            text = (
                f"the {what} that the loss is of are the softmax of logits that are {times(power)}: another temperature"
            )
        elif same_values(reference, candidate):
            text = f"the {what} that the loss is of are in another order than the model's inputs"
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
    text = f"the {what} that go into the loss differ where the model's outputs agree: what the loop does in between"
    return Cause("loss_input", text)


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
