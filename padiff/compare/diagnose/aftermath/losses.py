"""A loss that is another one than the reference's, given what goes into the candidate's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from padiff.compare.diagnose.aftermath.fault import Fault
from padiff.compare.diagnose.hypotheses.scene import Scene
from padiff.compare.diagnose.loss_calls import LossCall, calls_of
from padiff.compare.diagnose.loss_inputs import labels_in_order
from padiff.compare.diagnose.losses import loss_cause_of
from padiff.errors import PadiffError
from padiff.records import SIDES, Both, Cause, Diff, Recomputed, is_loss, is_of_loss, loss_role

# How far off the reference's own is at most, and the candidate's at least. Chosen.
_NEAR, _FAR = 1e-5, 1e-3


def own_fault(scene: Scene) -> Fault | None:
    """Of a step whose loss differs: what is wrong with it whatever goes in; `None`: nothing that shows.

    Args:
        scene: of the first diff, before the loss.
    """
    try:
        with np.errstate(all="ignore"):
            return _own_fault(scene)
    except (PadiffError, OSError, KeyError, ValueError, IndexError):
        return None


def _own_fault(scene: Scene) -> Fault | None:
    wrong = [d for d in scene.step if d.pair.stage == "loss" and not d.passed and d.pair.complete]
    # Labels go with their inputs.
    labels = _labels(scene, wrong) if scene.stage != "input" else None
    if labels is not None:
        return labels
    given = next((d for d in wrong if is_of_loss(d.pair.anchor) and loss_role(d.pair.anchor.slot) == "0"), None)
    logged = next((d for d in wrong if is_loss(d.pair.anchor)), None)
    shown = given or logged
    calls = None if shown is None else calls_of(replace(scene, diff=shown))
    if shown is None or calls is None:
        return None
    reference, candidate = calls
    made = candidate.computed(
        settings=_settings(calls),
        framework=reference.framework,
        loss=replace(candidate.loss, function=reference.loss.function),
    )
    near = _off(reference.output, reference.computed())
    far = _off(candidate.output, made)
    if near is None or far is None or near > _NEAR:
        return None
    if far <= _FAR:
        return _afterwards(logged, calls)
    recomputed = Recomputed("loss", calls.map(lambda call: call.loss.function), Both(near, far), SIDES.candidate)
    alike = Both(replace(reference, inputs=candidate.inputs, output=made), candidate)
    cause = loss_cause_of(replace(scene, diff=shown), alike)
    return Fault(shown, cause, recomputed, kind="loss")


def _settings(calls: Both[LossCall]) -> dict[str, object]:
    return {**calls.reference.settings, "function": calls.reference.loss.function}


def _afterwards(logged: Diff | None, calls: Both[LossCall]) -> Fault | None:
    """What is made of a loss after its function gave it: a factor on one side."""
    if logged is None:
        return None
    figures = logged.figures
    outputs = calls.map(lambda call: call.output)
    if figures is None or any(one is None or one.size != 1 for one in outputs):
        return None
    values = [float(one.ravel()[0]) for one in outputs if one is not None]
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


def _labels(scene: Scene, wrong: list[Diff]) -> Fault | None:
    """Labels that no model made: those of the reference in another order, or counted from another number on."""
    for diff in wrong:
        if is_of_loss(diff.pair.anchor) and loss_role(diff.pair.anchor.slot) == "labels":
            cause: Cause | None = labels_in_order(replace(scene, diff=diff))
            if cause is not None:
                return Fault(diff, cause, kind="labels")
    return None


def _off(values: np.ndarray | None, made: np.ndarray | None) -> float | None:
    if values is None or made is None or values.size != made.size:
        return None
    norm = float(np.linalg.norm(made))
    found = float(np.linalg.norm(values.ravel() - made.ravel())) / norm if norm else None
    return found if found is not None and np.isfinite(found) else None
