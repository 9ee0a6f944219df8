"""Figures over a whole step that the judgement of each diff needs."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from padiff.compare.judge import limits
from padiff.compare.judge.site_facts import SiteFacts
from padiff.model import equivalents
from padiff.records import LOOP
from padiff.records.diff_rows import TENSORS
from padiff.records.pair_schema import PairSchema
from padiff.records.step_batch import StepBatch
from padiff.records.step_diffs import StepDiffs


def bulk_of(block: StepBatch) -> np.ndarray:
    """Return the L2 error of each diff without a few of its elements; NaN if unknown.

    For a full tensor without such a measurement (activation gradients and updates only), the error without the largest
    element is returned.
    """
    rows = block.rows
    bulk = rows["bulk_l2"].copy()
    is_full = (rows["basis"] == TENSORS) & np.isnan(bulk) & (rows["size"] >= limits.WITNESS)
    if is_full.any():
        for stage in ("backward", "update"):
            in_stage = np.zeros(is_full.shape, np.bool_)
            in_stage[:, block.sites.places[stage]] = True
            in_stage &= is_full
            bulk[in_stage] = np.sqrt(np.fmax(rows["l2"][in_stage] ** 2 - rows["max_abs"][in_stage] ** 2, 0.0))
    return bulk


def largest_errors(block: StepBatch, stage: str) -> np.ndarray:
    """Return the largest relative L2 error of the outputs, or output gradients, of each diff's layer; NaN if unknown.

    Args:
        stage: forward or backward.
    """
    errors = block.known_of_stage(stage, block.relative)
    return block.sites.largest_of_layers(stage, np.where(errors < math.inf, errors, math.nan))


class Outputs(NamedTuple):
    """Errors of a step's last outputs, which bound the error of the loss.

    Attributes:
        error: largest relative L2 error, over all calls.
        first_order: first-order bound of the loss's error: the norm of an output's error times the norm of the
            output's gradient, added up over all calls.
    """

    error: float
    first_order: float


def _last_outputs(sites: PairSchema) -> list[tuple[int, int]]:
    """Return the indices of the last layer's outputs, and of each one's gradient (-1 if not recorded).

    The last output of all comes last.
    """
    forward = [place for place in sites.places["forward"].tolist() if sites.layers[place] != LOOP]
    if not forward:
        return []
    last = sites.layers[forward[-1]]
    back = {
        (sites.slots[place], sites.calls[place]): place
        for place in sites.places["backward"].tolist()
        if sites.layers[place] == last
    }
    outputs = [place for place in forward if sites.layers[place] == last]
    return [(place, back.get((sites.slots[place], sites.calls[place]), -1)) for place in outputs]


def outputs_of(diffs: StepDiffs) -> Outputs | None:
    """Return the errors of a step's last outputs.

    The result is `None` without outputs, or if the figures of one output or of its gradient are unknown or infinite.
    """
    last_outputs, is_known = diffs.sites.fact(_last_outputs), diffs.known
    if not last_outputs:
        return None
    rows, errors = diffs.rows, diffs.relative
    error = first_order = 0.0
    for place, back in last_outputs:
        if back < 0 or not is_known[place] or not is_known[back]:
            return None
        gradient = float(rows["reference_l2"][back])
        if not math.isfinite(errors[place] * gradient):
            return None
        error = max(error, float(errors[place]))
        first_order += float(rows["l2"][place]) * gradient
    return Outputs(error, first_order)


def hiding_noise(block: StepBatch) -> np.ndarray:
    """Return a mask of the sketches of fused query, key and value biases.

    The gradient of the key's part is rounding noise, which a sketch does not separate from the other parts.
    """
    sketched = block.measured & (block.rows["basis"] != TENSORS)
    return np.asarray(sketched & block.sites.fact(SiteFacts).fused)


def _running_variances(sites: PairSchema) -> list[int]:
    return [place for place in sites.places["weight"].tolist() if equivalents.slot(sites.slots[place]) == "running_var"]


def deviations_of(diffs: StepDiffs) -> dict[str, float]:
    """Return the L2 norm of the running standard deviations of each layer's channels, by layer."""
    places = diffs.sites.fact(_running_variances)
    if not places:
        return {}
    rows, is_known = diffs.rows, diffs.known
    return {
        diffs.sites.layers[place]: math.sqrt(rows["mean_reference"][place] * rows["size"][place])
        for place in places
        if is_known[place]
    }
