"""Causes of a loss that differs although the model's outputs agree: other labels, another setting, another function.

The inputs of loss functions are recorded, so the candidate's loss can be computed with a setting or an input of the
reference. If this gives the reference's loss, the cause is proven.
"""

from __future__ import annotations

from dataclasses import replace

from padiff.align.call_order import outermost_calls
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.loss_calls import WEIGHTS, LossCall, calls_of
from padiff.compare.diagnose.loss_inputs import input_cause, labels_cause, weights_cause
from padiff.compare.diagnose.loss_outputs import output_cause
from padiff.compare.diagnose.loss_sources import source_cause
from padiff.compare.measure.operands import operands
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.records import Both, Cause, Problem, Step, is_of_loss, loss_role

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
    calls = steps.map(_without_gradients)
    if calls.reference == calls.candidate:
        return cause
    counts = calls.map(lambda count: f"{count} time{'s' * (count != 1)}")
    text = (
        f"{cause.sentence}: the candidate calls the model {counts.candidate} without gradients, as for a target, the "
        f"reference {counts.reference}"
    )
    return replace(cause, sentence=text)


def _without_gradients(step: Step) -> int:
    """Return the number of calls of the loop whose outputs get no gradient."""
    calls = outermost_calls(step.records)
    return len(calls - {(record.layer, record.call) for record in step.records if record.stage == "backward"})


def loss_cause_of(scene: DiffContext, calls: Both[LossCall]) -> Cause | None:
    """Return the cause of a loss function's output that differs, for two calls with the same inputs; `None` if
    unknown.
    """
    return output_cause(scene, calls)
