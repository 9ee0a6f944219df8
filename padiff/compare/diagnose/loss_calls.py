"""Recorded calls of loss functions, and their losses computed in float64 with some parts replaced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from padiff.compare.declared.fixes import loss_fix
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.measure.losses import RecordedLoss, loss_of, loss_settings, recorded_losses
from padiff.compare.measure.operands import operands
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.frameworks.argument_names import SPELLINGS
from padiff.records import Both, Diff, Problem, RunInfo, Step, is_of_loss, settings_at

# A computed loss counts as the other side's if it is this many times nearer than the recorded one, and at most this
# relative error away. Chosen.
_NEARER, _NEAR = 30.0, 2e-3
#: Roles of inputs that weigh the classes of a loss.
WEIGHTS = ("weight", "pos_weight")


@dataclass(frozen=True)
class LossCall:
    """One side's call of a loss function.

    Attributes:
        framework: the framework of the run.
        loss: the records of the call.
        settings: the settings of the function.
        inputs: the inputs by role; `None` if they can't be read.
        output: the recorded output; `None` if it can't be read.
    """

    framework: str
    loss: RecordedLoss
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, np.ndarray] | None = None
    output: np.ndarray | None = None

    def computed(self, **other: Any) -> np.ndarray | None:
        """Return the output computed in float64; `None` without inputs.

        Args:
            other: attributes of the call to replace, by name.
        """
        call = replace(self, **other)
        if call.inputs is None:
            return None
        return loss_of(
            str(call.settings.get("function", call.loss.function)), call.inputs, call.settings, call.framework
        )

    def gives(self, expected: np.ndarray | None, **other: Any) -> bool:
        """Return True if the call gives the expected output only with some attributes replaced.

        Args:
            expected: the output of the other side.
            other: attributes of the call to replace, by name.
        """
        loss, recorded = self.computed(**other), self.output
        if loss is None or expected is None or recorded is None or loss.size != expected.size:
            return False
        size = float(np.linalg.norm(expected))
        error = float(np.linalg.norm(loss.ravel() - expected.ravel()))
        recorded_error = (
            float(np.linalg.norm(recorded.ravel() - expected.ravel())) if recorded.size == expected.size else np.inf
        )
        return error <= _NEAR * size and error * _NEARER <= recorded_error


def calls_of(scene: DiffContext) -> Both[LossCall] | None:
    """Return the two calls that a scene's diff belongs to; `None` if a side does not have exactly one such call."""
    sides = scene.sides(scene.number)
    if sides is None:
        return None
    calls = []
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
        calls.append(_read(losses[0], step, run.info))
    return Both(*calls)


def loss_calls(step: Step, info: RunInfo) -> list[LossCall]:
    """Return all calls of loss functions in a step."""
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
    """Return True if a computed output agrees with the recorded one."""
    if found is None or expected is None or found.size != expected.size:
        return False
    return bool(np.linalg.norm(found.ravel() - expected.ravel()) <= _NEAR * np.linalg.norm(expected))


def sides_of(diff: Diff) -> Both[np.ndarray] | None:
    """Return both tensors of a diff in one layout; `None` if their layouts do not fit."""
    tensors = operands(diff.pair)
    return None if isinstance(tensors, Problem) else tensors.values()


# -- words -------------------------------------------------------------------------------------------------------------


def number_text(output: np.ndarray | None) -> str:
    """Return a loss as text."""
    if output is None:
        return "unknown"
    return f"{float(output.ravel()[0]):.6g}" if output.size == 1 else "element by element"


def functions_of(framework: str) -> str:
    """Return the module of a framework's functions, with a trailing dot; empty for an unknown framework."""
    spelling = SPELLINGS.get(framework)
    return f"{spelling.layers}.functional." if spelling is not None else ""


def spelled(framework: str, function: str) -> str:
    """Return a framework's name of a loss function."""
    spelling = SPELLINGS.get(framework)
    return function if spelling is None else spelling.losses.get(function, (function, ""))[0]


def fixed(calls: Both[LossCall], settings: Mapping[str, Any], function: str = "") -> str:
    """Return the candidate's call as code, with settings of the reference."""
    candidate = calls.candidate
    return loss_fix(candidate.framework, function or candidate.loss.function, settings)
