"""The cause of a loss that is a sum over another count: of samples, rows, labels that count, or elements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.loss_calls import LossCall, loss_calls
from padiff.records import LOOP, Both, Cause, Step, is_loss

# Largest relative difference of a divisor from the count that it is, and most steps that are read. Chosen.
_NEAR, _STEPS = 1e-4, 4
_LABELS = ("labels", "target")


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
