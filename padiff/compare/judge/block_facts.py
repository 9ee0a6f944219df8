"""Facts about steps from their measured diffs, computed for several steps at once, before judging."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from padiff.compare.judge.kinks import may_have_kinks
from padiff.compare.judge.limits import MOST
from padiff.compare.judge.site_facts import SiteFacts
from padiff.compare.judge.step_figures import bulk_of, hiding_noise, largest_errors
from padiff.compare.judge.zero import Scales, largest_rms, rounding_gradients
from padiff.records.diff_rows import TENSORS
from padiff.records.step_batch import StepBatch
from padiff.sketches.sketch import ELEMENTS


class Apart(NamedTuple):
    """Distance of the two sides at the start of a step.

    Attributes:
        weights: relative L2 error of all weights together.
        sampled: True if only samples of some weights are known.
        inputs: largest relative L2 error of an input.
    """

    weights: float
    sampled: bool
    inputs: float

    def error(self, unseen: float = 0.0) -> float:
        """Return the relative L2 error at the start of the step, at most `MOST`.

        Args:
            unseen: error to add if only samples of a weight are known.
        """
        return min(self.weights + (unseen if self.sampled else 0.0) + self.inputs, MOST)


@np.errstate(all="ignore")
def apart_at_start(block: StepBatch, besides: np.ndarray | None = None) -> list[Apart]:
    """Return the distance at the start of each step.

    Args:
        besides: mask of diffs to leave out. Default: none.
    """
    rows, starting = block.rows, block.sites.fact(SiteFacts).starting
    used = block.known & (starting if besides is None else starting & ~besides)
    weights, inputs = block.of_stage("weight", used), block.of_stage("input", used)
    squares = [
        np.where(weights, block.of_stage("weight", rows[name]) ** 2, 0.0).sum(axis=-1)
        for name in ("l2", "reference_l2")
    ]
    errors = np.where(squares[1] > 0, np.sqrt(squares[0] / squares[1]), 0.0)
    sampled = (weights & block.of_stage("weight", is_sampled(block))).any(axis=-1)
    relative = block.of_stage("input", block.relative)
    largest = np.where(inputs & np.isfinite(relative), relative, 0.0).max(axis=-1, initial=0.0)
    return list(map(Apart, errors.tolist(), sampled.tolist(), largest.tolist()))


def is_sampled(block: StepBatch) -> np.ndarray:
    """Return a mask of the tensors that were measured by samples of their elements only."""
    rows = block.rows
    return np.asarray(block.measured & (rows["basis"] != TENSORS) & (rows["size"] > ELEMENTS))


class BlockFacts:
    """Facts about each step from its measured diffs. The first axis of arrays, and of lists, is the step.

    Attributes:
        bulk: L2 errors without a few elements; NaN if unknown.
        grad_scales: largest root mean square of the reference's gradients of each diff's layer.
        noise: mask of the diffs of parameters whose gradients are rounding noise, or sketches that may contain it.
        update_scale: largest root mean square of the reference's updates.
        weights: squared norm of all of the reference's weights.
        start, later: distance at the start of the step; `later` leaves out noise-driven weights, for stages after
            forward.
        kinked: True if the step may have kinks.
        came_back: largest relative error of the output gradients of each diff's layer; NaN if unknown.
        went_in: largest relative error of an output.
        made_of: mask of the diffs of simple layers (`SiteFacts.simple`) whose output gradients have known errors, in
            steps where outputs differ: `came_back` and `went_in` limit the errors of these layers' gradients.
    """

    def __init__(self, block: StepBatch) -> None:
        self.bulk = bulk_of(block)
        self.grad_scales = block.fact(Scales).layers
        self.noise = _of_parameters(block, rounding_gradients(block) | hiding_noise(block))
        self.update_scale: list[float] = largest_rms(block, "update").max(axis=-1, initial=0.0).tolist()
        squares = block.known_of_stage("weight", block.rows["reference_l2"] ** 2, 0.0)
        self.weights: list[float] = squares.sum(axis=-1).tolist()
        self.start = block.fact(apart_at_start)
        # Noise in a bias before a normalisation shows in outputs, and cancels out before the loss.
        self.later = apart_at_start(block, self.noise) if self.noise.any() else self.start
        self.kinked: list[bool] = may_have_kinks(block).tolist()
        self.came_back = largest_errors(block, "backward")
        errors = block.of_stage("forward", largest_errors(block, "forward"))
        self.went_in = np.fmax.reduce(errors, axis=-1, initial=0.0)
        simple = block.sites.fact(SiteFacts).simple
        self.made_of = simple & (self.went_in > 0)[:, None] & ~np.isnan(self.came_back)


def _of_parameters(block: StepBatch, which: np.ndarray) -> np.ndarray:
    """Return a mask of the diffs whose parameter is among the parameters of the masked gradients."""
    sites = block.sites
    which = block.of_stage("grad", which & block.known & ~block.troubled)
    if not which.any():
        return np.zeros(block.rows.shape, np.bool_)
    has_key = np.zeros((len(which), sites.key_count), np.bool_)
    steps, grads = which.nonzero()
    has_key[steps, sites.key_numbers[sites.places["grad"][grads]]] = True
    return np.take(has_key, sites.key_numbers, axis=1)
