"""Facts about steps and their elements from their measured diffs, for several steps at once, before judging."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from padiff.compare.judge import limits
from padiff.compare.judge.limits import MOST
from padiff.compare.judge.site_facts import Scales, SiteFacts, largest_rms, may_have_kinks, rounding_gradients
from padiff.compare.measure.operands import elements
from padiff.model import equivalents
from padiff.records import LOOP, Diff, Figure, Rule
from padiff.records.pair_table import PairSchema
from padiff.records.step_diffs import TENSORS, StepBatch, StepDiffs
from padiff.sketches.sketch import ELEMENTS


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


def without_noise(
    diff: Diff, gradient: Diff | None, limit: float, rounding: float, another: bool, most: Callable[[int], float]
) -> Diff:
    """Return the diff, passed if its error lies in elements whose gradients are rounding noise, or differ by much.

    Rounding noise is searched for in vectors only. Example: one bias of query, key and value; the attention does not
    depend on the key's part. Where rounding flips the sign of an element's gradient, an adaptive optimizer makes a
    full-size update of either sign.

    Args:
        diff: diff of a parameter's weight or update.
        gradient: diff of the parameter's gradient.
        limit: allowed L2 error of all elements that are not noise.
        rounding: size up to which an element's gradient is rounding noise.
        another: True to also leave out elements whose gradients differ by much.
        most: function from the number of such elements to their allowed L2 error.
    """
    figures = diff.figures
    if gradient is None or gradient.figures is None or figures is None or gradient.figures.size != figures.size:
        return diff
    gradients, sides = elements(gradient.pair), elements(diff.pair)
    if gradients is None or sides is None:
        return diff  # a sketch does not contain single elements
    largest = np.maximum(*gradients.map(np.abs))
    noise = (largest <= rounding) & (len(diff.pair.anchor.shape) == 1)
    if another:
        noise |= np.abs(gradients.candidate - gradients.reference) > limits.ANOTHER * largest
    noise &= largest > 0  # a gradient of zero on both sides is no rounding
    error = sides.candidate - sides.reference
    count = int(noise.sum())
    remainder = float(np.linalg.norm(error[~noise]))
    if not count or remainder > limit or float(np.linalg.norm(error[noise])) > most(count):
        return diff
    size = figures.reference_l2 or 1.0
    return diff.judged(True, Figure.WITHOUT_NOISE, remainder / size, limit / size, Rule.ELEMENTS)


def without_last_places(diff: Diff, weight: Diff | None, limit: float) -> Diff:
    """Return the diff of an update, passed if its error lies in the last place of the weights.

    Nothing smaller than a last place can be added to a weight. Early in a warm-up an update is a few last places, and
    its value depends on whether decay and step are rounded together or one after the other.

    Args:
        diff: diff of an update.
        weight: diff of the weight that the update changes.
        limit: allowed L2 error beyond the last places.
    """
    figures = diff.figures
    if weight is None or weight.figures is None or figures is None or weight.figures.size != figures.size:
        return diff
    dtype = limits.coarse(weight.pair.anchor.dtype)
    if dtype not in limits.ROUNDING or limits.is_half(dtype):
        return diff
    unit, size = 2 * limits.ROUNDING[dtype], figures.reference_l2 or 1.0
    weights, sides = elements(weight.pair), elements(diff.pair)
    if weights is None or sides is None:  # a sketch does not contain single elements
        most = limit + unit * weight.figures.reference_l2
        passed = figures.l2 <= most * (1 + limits.SURE * figures.spread)
        return diff.judged(True, Figure.REL_L2, figures.rel_l2, most / size, Rule.LAST_PLACE) if passed else diff
    error = np.abs(sides.candidate - sides.reference)
    # A weight that crosses a power of two has the larger unit.
    places = np.spacing(np.maximum(*weights.map(np.abs)).astype(dtype)).astype(np.float64)
    beyond = error > limits.LAST_PLACES * places * (1 + unit)
    remainder = float(np.linalg.norm(error[beyond]))
    if remainder > limit:
        return diff
    return diff.judged(True, Figure.BEYOND_LAST_PLACE, remainder / size, limit / size, Rule.LAST_PLACE)
