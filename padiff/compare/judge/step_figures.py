"""What has to be known of a whole step before one of its diffs can be judged."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from padiff.compare.judge import limits
from padiff.compare.judge.site_facts import SiteFacts
from padiff.model import equivalents
from padiff.records import LOOP
from padiff.records.block import Block
from padiff.records.rows import TENSORS
from padiff.records.sites import Sites
from padiff.records.step_diffs import StepDiffs


def bulk_of(block: Block) -> np.ndarray:
    """Errors (L2) of gradients and updates without a few of their elements; of a small tensor, without the largest. NaN
    where that is not known.
    """
    rows = block.rows
    bulk = rows["bulk_l2"].copy()
    whole = (rows["basis"] == TENSORS) & np.isnan(bulk) & (rows["size"] >= limits.WITNESS)
    if whole.any():
        for stage in ("backward", "update"):
            some = np.zeros(whole.shape, np.bool_)
            some[:, block.sites.places[stage]] = True
            some &= whole
            bulk[some] = np.sqrt(np.fmax(rows["l2"][some] ** 2 - rows["max_abs"][some] ** 2, 0.0))
    return bulk


def largest_errors(block: Block, stage: str) -> np.ndarray:
    """Largest relative L2 error of what each diff's layer gave out, or of what came back to it; NaN: none is known.

    Args:
        stage: forward or backward.
    """
    errors = block.known_of_stage(stage, block.relative)
    return block.sites.largest_of_layers(stage, np.where(errors < math.inf, errors, math.nan))


class Outputs(NamedTuple):
    """What a step's last outputs say of its loss.

    Attributes:
        error: their largest relative L2 error, over all calls.
        first_order: how far off the loss may be for it, all calls: the norm of their error times that of the gradient
            that comes back to them.
    """

    error: float
    first_order: float


def _last_outputs(sites: Sites) -> list[tuple[int, int]]:
    """The places of the last layer's outputs, and of the gradients of each; -1 where that was not recorded. The last
    output of all comes last.
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
    own = [place for place in forward if sites.layers[place] == last]
    return [(place, back.get((sites.slots[place], sites.calls[place]), -1)) for place in own]


def outputs_of(diffs: StepDiffs) -> Outputs | None:
    """Those of a step, from its measured diffs; `None` where they, or gradients of all of them, were not recorded."""
    found, known = diffs.sites.fact(_last_outputs), diffs.known
    if not found:
        return None
    rows, errors = diffs.rows, diffs.relative
    error = first_order = 0.0
    for place, back in found:
        if back < 0 or not known[place] or not known[back]:
            return None
        gradient = float(rows["reference_l2"][back])
        if not math.isfinite(errors[place] * gradient):
            return None
        error = max(error, float(errors[place]))
        first_order += float(rows["l2"][place]) * gradient
    return Outputs(error, first_order)


def hiding_noise(block: Block) -> np.ndarray:
    """Where the key's bias, whose gradient is rounding, lies in one sketch with those of query and value."""
    sketched = block.measured & (block.rows["basis"] != TENSORS)
    return np.asarray(sketched & block.sites.fact(SiteFacts).fused)


def _running_variances(sites: Sites) -> list[int]:
    return [place for place in sites.places["weight"].tolist() if equivalents.slot(sites.slots[place]) == "running_var"]


def deviations_of(diffs: StepDiffs) -> dict[str, float]:
    """L2 norm of the running standard deviations of a layer's channels."""
    places = diffs.sites.fact(_running_variances)
    if not places:
        return {}
    rows, known = diffs.rows, diffs.known
    return {
        diffs.sites.layers[place]: math.sqrt(rows["mean_reference"][place] * rows["size"][place])
        for place in places
        if known[place]
    }
