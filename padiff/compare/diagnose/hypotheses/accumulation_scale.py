"""The divisor of each side's loss before backward, from the recorded gradient of the loss's input."""

from __future__ import annotations

import numpy as np

from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.measure.losses import RecordedLoss, loss_of, loss_settings, recorded_losses
from padiff.errors import PadiffError
from padiff.records import Both, Record, RunInfo, Step, settings_at

# Roles of the inputs of a loss that have gradients.
_DERIVED = ("logits", "probabilities", "log_probabilities", "prediction")
# The step of a central difference in float64, relative to the largest input, and the tolerance of a divisor.
_STEP, _NEAR = 1e-4, 1e-3


def divisors(scene: DiffContext) -> Both[float] | None:
    """Return the divisor of each side's loss.

    `None` unless the first diff is the gradient of an input of a loss that this module can compute.
    """
    pair, sides = scene.diff.pair, scene.sides(scene.number)
    if pair.stage != "backward" or not pair.complete or sides is None:
        return None
    assert pair.reference is not None and pair.candidate is not None
    infos = scene.runs.map(lambda run: run.info)
    try:
        quotients = Both(
            _divisor(pair.reference, sides.reference, infos.reference),
            _divisor(pair.candidate, sides.candidate, infos.candidate),
        )
    except (PadiffError, FloatingPointError):
        return None
    if quotients.reference is None or quotients.candidate is None:
        return None
    return Both(quotients.reference, quotients.candidate)


def _divisor(gradient: Record, step: Step, info: RunInfo) -> float | None:
    """Return the computed gradient of the loss divided by the recorded one; `None` if not computable."""
    out = next((r for r in step.records if r.stage == "forward" and _place(r) == _place(gradient)), None)
    if out is None or out.source.sketched or gradient.source.sketched:
        return None
    settings = settings_at(info.settings, step.settings)
    for loss in recorded_losses(step.records):
        role = next((name for name in _DERIVED if name in loss.records), "")
        if not role or loss.records[role].source.sketched:
            continue
        x, g = np.asarray(out.value, np.float64), np.asarray(gradient.value, np.float64) / step.loss_scale
        calls = loss_settings(settings, loss.function)
        if len(calls) == 1 and x.size == g.size and np.array_equal(x.ravel(), np.ravel(loss.records[role].value)):
            return _ratio(loss, role, g.ravel(), calls[0], info.framework)
    return None


def _ratio(loss: RecordedLoss, role: str, g: np.ndarray, settings: dict[str, object], framework: str) -> float | None:
    inputs = loss.inputs()
    x, norm = np.asarray(inputs[role], np.float64), float(np.linalg.norm(g))
    if not norm or not np.isfinite(norm):
        return None
    width = _STEP * max(float(np.abs(x).max()), 1.0)
    moved = (g / norm * width).reshape(x.shape)
    ends = [loss_of(loss.function, {**inputs, role: x + way * moved}, settings, framework) for way in (1, -1)]
    if ends[0] is None or ends[1] is None or ends[0].size != 1:
        return None
    slope = float(ends[0].sum() - ends[1].sum()) / (2 * width)
    return slope / norm if np.isfinite(slope) and slope > 0 else None


def _place(record: Record) -> tuple[str, str, int]:
    return record.layer, record.slot, record.call


def division_text(count: int, found: Both[float] | None) -> str:
    """Return text on the divisors of both sides if these are different powers of ``count``; else empty text."""
    if found is None:
        return ""
    powers = found.map(lambda divisor: next((k for k in range(4) if abs(divisor / count**k - 1) <= _NEAR), None))
    if None in (powers.reference, powers.candidate) or powers.reference == powers.candidate:
        return ""
    texts = powers.map(lambda power: _said(count, int(power or 0)))
    return f"the reference divides {texts.reference}, the candidate {texts.candidate}"


def _said(count: int, power: int) -> str:
    if power < 2:
        return f"by {count}" if power else "not at all"
    return f"by {count**power} = {' times '.join([str(count)] * power)}"
