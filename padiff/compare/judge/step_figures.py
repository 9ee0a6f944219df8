"""What has to be known of a whole step before one of its diffs can be judged."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from padiff.compare.judge import limits
from padiff.model import equivalents
from padiff.pair.parameters import is_fused
from padiff.records import LOOP, STAGES, Diff, Record, is_of_loss, loss_role

_FLOATING = ("float", "bfloat", "complex")


def coarsest_dtypes(dtypes: Mapping[str, set[str]]) -> dict[str, str]:
    """The coarsest floating dtype up to and with each stage. Weights that are stored coarsely count too."""
    return {stage: coarsest(dtypes, STAGES[: number + 1]) for number, stage in enumerate(STAGES)}


def coarsest(dtypes: Mapping[str, set[str]], stages: Collection[str]) -> str:
    """The coarsest floating dtype at some stages, of either side; the finest of all where there is none.

    Args:
        dtypes: as `dtypes_of` gives them.
    """
    seen = {limits.coarse(dtype) for stage in stages for dtype in dtypes[stage]}
    return next((dtype for dtype in reversed(limits.COARSENESS) if dtype in seen), limits.COARSENESS[0])


def dtypes_of(diffs: Sequence[Diff]) -> dict[str, set[str]]:
    """The dtypes of either side's records, by stage."""
    dtypes: dict[str, set[str]] = {stage: set() for stage in STAGES}
    sides = [diff.pair.reference for diff in diffs] + [diff.pair.candidate for diff in diffs]
    for stage, dtype in {(record.stage, record.dtype) for record in sides if record is not None}:
        dtypes[stage].add(dtype)
    return dtypes


def is_exact(diff: Diff) -> bool:
    """Whether both sides are integers or booleans (token ids, masks, counters)."""
    one, other = diff.pair.reference, diff.pair.candidate
    if one is None or other is None:
        return False
    return not one.dtype.startswith(_FLOATING) and not other.dtype.startswith(_FLOATING)


def goes_into_loss(diff: Diff) -> bool:
    """Whether a diff is of what goes into a loss function: of an output, mostly."""
    anchor = diff.pair.anchor
    return is_of_loss(anchor) and anchor.stage == "loss" and loss_role(anchor.slot) != "0"


def is_activation(record: Record) -> bool:
    return equivalents.is_activation(record.layer_type.lower())


def largest_errors(diffs: Sequence[Diff], stage: str) -> dict[str, float]:
    """Largest relative L2 error of what a layer gave out, or of what came back to it, by layer."""
    errors: dict[str, float] = {}
    for diff in diffs:
        if diff.pair.stage == stage and diff.compared and diff.figures and math.isfinite(diff.figures.rel_l2):
            layer = diff.pair.anchor.layer
            errors[layer] = max(errors.get(layer, 0.0), diff.figures.rel_l2)
    return errors


def bulk_of(diff: Diff) -> float | None:
    """A gradient's or update's error (L2) without a few of its elements; of a small tensor, without the largest."""
    figures = diff.figures
    if figures is None or figures.bulk_l2 is not None:
        return figures.bulk_l2 if figures is not None else None
    if diff.pair.stage not in ("backward", "update") or figures.basis != "tensors" or figures.size < limits.WITNESS:
        return None
    return math.sqrt(max(figures.l2**2 - figures.max_abs**2, 0.0))


class Outputs(NamedTuple):
    """What a step's last outputs say of its loss.

    Attributes:
        error: their largest relative L2 error, over all calls.
        first_order: how far off the loss may be for it, all calls: the norm of their error times that of the gradient
            that comes back to them.
    """

    error: float
    first_order: float


def outputs_of(diffs: Sequence[Diff]) -> Outputs | None:
    """Those of a step, from its measured diffs; `None` where they, or gradients of all of them, were not recorded."""
    forward = [d for d in diffs if d.pair.stage == "forward" and d.pair.anchor.layer != LOOP]
    if not forward or any(d.figures is None or not d.compared for d in forward[-1:]):
        return None
    last = forward[-1].pair.anchor.layer
    gradients = {
        (d.pair.anchor.slot, d.pair.anchor.call): d.figures.reference_l2
        for d in diffs
        if d.pair.stage == "backward" and d.pair.anchor.layer == last and d.compared and d.figures is not None
    }
    error = first_order = 0.0
    for diff in forward:
        anchor, figures = diff.pair.anchor, diff.figures
        if anchor.layer != last:
            continue
        gradient = gradients.get((anchor.slot, anchor.call))
        if figures is None or not diff.compared or gradient is None or not math.isfinite(figures.rel_l2 * gradient):
            return None
        error = max(error, figures.rel_l2)
        first_order += figures.l2 * gradient
    return Outputs(error, first_order)


def hides_noise(diff: Diff) -> bool:
    """Whether the key's bias, whose gradient is rounding, lies in one sketch with those of query and value."""
    sketched = diff.figures is not None and diff.figures.basis != "tensors"
    return sketched and is_fused(diff.pair.anchor.slot) and len(diff.pair.anchor.shape) == 1


def deviations_of(diffs: Sequence[Diff]) -> dict[str, float]:
    """L2 norm of the running standard deviations of a layer's channels."""
    return {
        diff.pair.anchor.layer: math.sqrt(diff.figures.mean_reference * diff.figures.size)
        for diff in diffs
        if diff.pair.stage == "weight" and equivalents.slot(diff.pair.anchor.slot) == "running_var"
        if diff.compared and diff.figures is not None
    }


def samples_of(diffs: Sequence[Diff]) -> dict[str, int]:
    """How many values each channel of a layer's output has: what a BatchNorm takes its statistics over."""
    counts: dict[str, int] = {}
    for diff in diffs:
        record = diff.pair.reference
        if diff.pair.stage == "forward" and record is not None and len(record.shape) > 1 and record.shape[1]:
            counts.setdefault(record.layer, math.prod(record.shape) // record.shape[1])
    return counts
