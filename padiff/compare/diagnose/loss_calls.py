"""Calls of loss functions as they were recorded, and what they give in float64 with something replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from padiff.compare.declared.fixes import loss_fix
from padiff.compare.diagnose.hypotheses.scene import Scene
from padiff.compare.measure.losses import RecordedLoss, loss_of, loss_settings, recorded_losses
from padiff.compare.measure.operands import operands
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.frameworks.spelled import SPELLINGS
from padiff.records import Both, Diff, Problem, RunInfo, Step, is_of_loss, settings_at

# What counts as computed to be the same: so many times nearer than what was recorded, and this near. Chosen.
_NEARER, _NEAR = 30.0, 2e-3
#: What a loss weighs by.
WEIGHTS = ("weight", "pos_weight")


@dataclass(frozen=True)
class LossCall:
    """One side's call of a loss function.

    Attributes:
        framework: the run's.
        loss: what was recorded of it.
        settings: what the function was set to.
        inputs: what went in; `None` where it can't be read.
        output: what it gave.
    """

    framework: str
    loss: RecordedLoss
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, np.ndarray] | None = None
    output: np.ndarray | None = None

    def computed(self, **other: Any) -> np.ndarray | None:
        """What it gives in float64, with some things replaced by others."""
        call = replace(self, **other)
        if call.inputs is None:
            return None
        return loss_of(
            str(call.settings.get("function", call.loss.function)), call.inputs, call.settings, call.framework
        )

    def gives(self, expected: np.ndarray | None, **other: Any) -> bool:
        """Whether it would give that with some things replaced, and does not without."""
        found, own = self.computed(**other), self.output
        if found is None or expected is None or own is None or found.size != expected.size:
            return False
        size = float(np.linalg.norm(expected))
        off = float(np.linalg.norm(found.ravel() - expected.ravel()))
        without = float(np.linalg.norm(own.ravel() - expected.ravel())) if own.size == expected.size else np.inf
        return off <= _NEAR * size and off * _NEARER <= without


def calls_of(scene: Scene) -> Both[LossCall] | None:
    """The two calls that a scene's diff is of; `None` where that is not one on either side."""
    sides = scene.sides(scene.number)
    if sides is None:
        return None
    found = []
    for record, step, run in zip(scene.diff.pair.sides, sides, scene.runs):
        losses = recorded_losses(step.records)
        if record is None:
            return None
        if is_of_loss(record):
            function = record.slot.partition("()")[0]
            losses = [loss for loss in losses if (loss.function, loss.call) == (function, record.call)]
        else:
            losses = [loss for loss in losses if loss.call == record.call]
        if len(losses) != 1:
            return None
        found.append(_read(losses[0], step, run.info))
    return Both(*found)


def loss_calls(step: Step, info: RunInfo) -> list[LossCall]:
    """All calls of loss functions of a step."""
    return [_read(loss, step, info) for loss in recorded_losses(step.records)]


def _read(loss: RecordedLoss, step: Step, info: RunInfo) -> LossCall:
    call = LossCall(info.framework, loss)
    try:
        output = loss.records["0"].value.astype(np.float64) if "0" in loss.records else None
        call = replace(call, output=output)
        call = replace(call, inputs=loss.inputs())
    except (SketchOnlyError, RunFolderError):
        pass
    options = loss_settings(settings_at(info.settings, step.settings), loss.function)
    fitting = [settings for settings in options if is_near(call.computed(settings=settings), call.output)]
    return replace(call, settings=next(iter(fitting or options), {"function": loss.function}))


def is_near(found: np.ndarray | None, expected: np.ndarray | None) -> bool:
    """Whether what was computed is what was recorded."""
    if found is None or expected is None or found.size != expected.size:
        return False
    return bool(np.linalg.norm(found.ravel() - expected.ravel()) <= _NEAR * np.linalg.norm(expected))


def sides_of(diff: Diff) -> Both[np.ndarray] | None:
    """Both tensors of a diff; `None` where they can't be brought together."""
    found = operands(diff.pair)
    return None if isinstance(found, Problem) else found.values()


# -- words -------------------------------------------------------------------------------------------------------------


def number_text(output: np.ndarray | None) -> str:
    """A loss in words."""
    if output is None:
        return "unknown"
    return f"{float(output.ravel()[0]):.6g}" if output.size == 1 else "element by element"


def functions_of(framework: str) -> str:
    """Where a framework has its functions, with the dot after it."""
    spelling = SPELLINGS.get(framework)
    return f"{spelling.layers}.functional." if spelling is not None else ""


def spelled(framework: str, function: str) -> str:
    """What a framework calls a loss function."""
    spelling = SPELLINGS.get(framework)
    return function if spelling is None else spelling.losses.get(function, (function, ""))[0]


def fixed(calls: Both[LossCall], settings: Mapping[str, Any], function: str = "") -> str:
    """The candidate's call with settings as the reference has them."""
    candidate = calls.candidate
    return loss_fix(candidate.framework, function or candidate.loss.function, settings)
