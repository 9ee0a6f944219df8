"""Facts about a step and its elements from its measured diffs, before judging."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from padiff.compare.judge import limits
from padiff.compare.judge.limits import MOST
from padiff.compare.judge.site_facts import SiteFacts
from padiff.compare.measure.operands import elements
from padiff.model import equivalents
from padiff.records import LOOP, Diff, Figure, Rule
from padiff.records.pair_table import PairSchema
from padiff.records.step_diffs import TENSORS, StepDiffs
from padiff.sketches.sketch import ELEMENTS


def bulk_of(diffs: StepDiffs) -> np.ndarray:
    """Return the L2 error of each diff without a few of its elements; NaN if unknown.

    For a full tensor without such a measurement (activation gradients and updates only), the error without the largest
    element is returned.
    """
    rows = diffs.rows
    bulk = rows["bulk_l2"].copy()
    is_full = (rows["basis"] == TENSORS) & np.isnan(bulk) & (rows["size"] >= limits.WITNESS)
    if is_full.any():
        for stage in ("backward", "update"):
            places = diffs.sites.places[stage]
            in_stage = places[is_full[places]]
            bulk[in_stage] = np.sqrt(np.fmax(rows["l2"][in_stage] ** 2 - rows["max_abs"][in_stage] ** 2, 0.0))
    return bulk


def largest_errors(diffs: StepDiffs, stage: str) -> np.ndarray:
    """Return the largest relative L2 error of the outputs, or output gradients, of each diff's layer; NaN if unknown.

    Args:
        stage: forward or backward.
    """
    errors = diffs.known_of_stage(stage, diffs.relative)
    return diffs.sites.largest_of_layers(stage, np.where(errors < math.inf, errors, math.nan))


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


def hiding_noise(diffs: StepDiffs) -> np.ndarray:
    """Return a mask of the sketches of fused query, key and value biases.

    The gradient of the key's part is rounding noise, which a sketch does not separate from the other parts.
    """
    sketched = diffs.measured & (diffs.rows["basis"] != TENSORS)
    return np.asarray(sketched & diffs.sites.fact(SiteFacts).fused)


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


@np.errstate(all="ignore")
def statistics_apart(diffs: StepDiffs) -> float:
    """Return the largest relative error of running statistics of layers whose outputs get no gradients; 0 if none is.

    In evaluation mode the outputs of such a layer, a teacher's for example, have this error.
    """
    facts, rows, deviations = diffs.sites.fact(SiteFacts), diffs.rows, diffs.figure_fact(deviations_of)
    largest = 0.0
    for place in np.flatnonzero(facts.running & diffs.known).tolist():
        layer = diffs.sites.layers[place]
        # A mean near zero comes from values that are not near zero.
        size = max(float(rows["reference_l2"][place]), deviations.get(layer, 0.0))
        if layer in facts.untaught and size:
            largest = max(largest, float(rows["l2"][place]) / size)
    return largest if math.isfinite(largest) else 0.0


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

    def beyond(self, rounding: float) -> Apart:
        """Return the distance without what rounding each number explains: layers round their outputs as much."""
        weights, inputs = (0.0 if error <= rounding else error for error in (self.weights, self.inputs))
        return self._replace(weights=weights, inputs=inputs)


@np.errstate(all="ignore")
def apart_at_start(diffs: StepDiffs, besides: np.ndarray | None = None) -> Apart:
    """Return the distance at the start of a step.

    Args:
        besides: mask of diffs to leave out. Default: none.
    """
    rows, starting = diffs.rows, diffs.sites.fact(SiteFacts).starting
    used = diffs.known & (starting if besides is None else starting & ~besides)
    weights, inputs = (places[used[places]] for places in (diffs.sites.places[stage] for stage in ("weight", "input")))
    error, size = (float((rows[name][weights] ** 2).sum()) for name in ("l2", "reference_l2"))
    relative = diffs.relative[inputs]
    largest = float(relative[np.isfinite(relative)].max(initial=0.0))
    return Apart(math.sqrt(error / size) if size > 0 else 0.0, bool(is_sampled(diffs)[weights].any()), largest)


def is_sampled(diffs: StepDiffs) -> np.ndarray:
    """Return a mask of the tensors that were measured by samples of their elements only."""
    rows = diffs.rows
    return np.asarray(diffs.measured & (rows["basis"] != TENSORS) & (rows["size"] > ELEMENTS))


def of_parameters(diffs: StepDiffs, which: np.ndarray) -> np.ndarray:
    """Return a mask of the diffs whose parameter is among the parameters of the masked gradients."""
    sites = diffs.sites
    grads = sites.places["grad"]
    has_key = np.zeros(sites.key_count, np.bool_)
    has_key[sites.key_numbers[grads[(which & diffs.known & ~diffs.troubled)[grads]]]] = True
    return np.asarray(has_key[sites.key_numbers])


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
