"""Losses that differ from the reference's loss function applied to the candidate's own inputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from padiff.compare.diagnose.followups.fault import Fault
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.loss_calls import LossCall, calls_of
from padiff.compare.diagnose.loss_inputs import labels_in_order
from padiff.compare.diagnose.losses import loss_cause_of
from padiff.errors import PadiffError
from padiff.records import SIDES, Both, Cause, Diff, Recomputed, is_loss, is_of_loss, loss_role

# The largest error of the reference's loss and the smallest error of a faulty candidate's, relative. Chosen.
_NEAR, _FAR = 1e-5, 1e-3


def own_fault(scene: DiffContext) -> Fault | None:
    """Return a fault of the loss that is independent of the loss's inputs; `None` if the records show none.

    Args:
        scene: the scene of the first diff, which comes before the loss.
    """
    try:
        with np.errstate(all="ignore"):
            return _own_fault(scene)
    except (PadiffError, OSError, KeyError, ValueError, IndexError):
        return None


def _own_fault(scene: DiffContext) -> Fault | None:
    wrong = [d for d in scene.step if d.pair.stage == "loss" and not d.passed and d.pair.complete]
    # If the inputs differ, so do the labels.
    labels = _labels(scene, wrong) if scene.stage != "input" else None
    if labels is not None:
        return labels
    output_diff = next((d for d in wrong if is_of_loss(d.pair.anchor) and loss_role(d.pair.anchor.slot) == "0"), None)
    logged = next((d for d in wrong if is_loss(d.pair.anchor)), None)
    shown = output_diff or logged
    calls = None if shown is None else calls_of(replace(scene, diff=shown))
    if shown is None or calls is None:
        return None
    reference, candidate = calls
    computed = candidate.computed(
        settings=_settings(calls),
        framework=reference.framework,
        loss=replace(candidate.loss, function=reference.loss.function),
    )
    near = _off(reference.output, reference.computed())
    far = _off(candidate.output, computed)
    if near is None or far is None or near > _NEAR:
        return None
    if far <= _FAR:
        return _afterwards(logged, calls)
    recomputed = Recomputed("loss", calls.map(lambda call: call.loss.function), Both(near, far), SIDES.candidate)
    alike = Both(replace(reference, inputs=candidate.inputs, output=computed), candidate)
    cause = loss_cause_of(replace(scene, diff=shown), alike)
    return Fault(shown, cause, recomputed, kind="loss")


def _settings(calls: Both[LossCall]) -> dict[str, object]:
    return {**calls.reference.settings, "function": calls.reference.loss.function}


def _afterwards(logged: Diff | None, calls: Both[LossCall]) -> Fault | None:
    """Return a fault if one side's loss is a multiple of its loss function's output; else `None`."""
    if logged is None:
        return None
    figures = logged.figures
    outputs = calls.map(lambda call: call.output)
    if figures is None or any(output is None or output.size != 1 for output in outputs):
        return None
    values = [float(output.ravel()[0]) for output in outputs if output is not None]
    if not all(values) or not figures.values.reference:
        return None
    factors = Both(figures.values.reference / values[0], figures.values.candidate / values[1])
    if abs(factors.reference - 1) > _NEAR or abs(factors.candidate - 1) <= _FAR:
        return None
    text = (
        f"the candidate's loss is {factors.candidate:.5g} times what its own loss function gives, the reference's is "
        "what the function gives: another factor, or a term that is added"
    )
    return Fault(logged, Cause("loss_scale", text), kind="loss")


def _labels(scene: DiffContext, wrong: list[Diff]) -> Fault | None:
    """Return a fault if labels are the reference's in another order or with a constant offset; else `None`."""
    for diff in wrong:
        if is_of_loss(diff.pair.anchor) and loss_role(diff.pair.anchor.slot) == "labels":
            cause: Cause | None = labels_in_order(replace(scene, diff=diff))
            if cause is not None:
                return Fault(diff, cause, kind="labels")
    return None


def _off(values: np.ndarray | None, computed: np.ndarray | None) -> float | None:
    if values is None or computed is None or values.size != computed.size:
        return None
    norm = float(np.linalg.norm(computed))
    error = float(np.linalg.norm(values.ravel() - computed.ravel())) / norm if norm else None
    return error if error is not None and np.isfinite(error) else None
