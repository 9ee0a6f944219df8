"""Facts about a step's tensors: their sites, gradients of value zero, errors of scale, kinks and rates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from padiff.compare.judge import limits
from padiff.compare.judge.limits import CLEARLY, DIFFERENT, FEW_LOOK, SPARSE
from padiff.model import equivalents
from padiff.pair.parameters import is_fused
from padiff.records import LOOP, ROOT, STAGES, Diff, Figure, Rule, is_below, is_functional, loss_role
from padiff.records.pair_table import Key, PairSchema
from padiff.records.step_diffs import MOMENTS, RULE_NUMBERS, RULES, TENSORS, StepDiffs

_Fact = TypeVar("_Fact")
_FLOATING = ("float", "bfloat", "complex")


class SiteFacts:
    """Facts about a step's pairs; arrays have one element for each pair.

    Attributes:
        dtypes: the dtypes of either side's records, by stage.
        coarsest: the coarsest floating dtype up to and including each stage. Coarsely stored weights count, too.
        level: rounding error of a sum relative to its terms, in the coarsest dtype of the stages that lead to a
            gradient.
        of_loop: mask of the pairs of the training loop.
        of_loss: mask of the inputs and outputs of loss functions, and of the norms that clipping measured.
        running: mask of the running statistics.
        rounding: relative error of rounding one number of the anchor; 0 for a dtype that is not floating.
        exact: mask of the pairs of integers or booleans on both sides (token ids, masks, counters).
        vectors: mask of the pairs with fewer than two axes.
        biases: mask of the pairs of one-dimensional biases.
        fused: mask of the biases of query, key and value in one.
        simple: mask of the pairs of layers that compute nothing in between their inputs and outputs: linear layers,
            convolutions, normalisations and embeddings.
        fed_here: mask of the inputs that are computed from outputs of other models of the run.
        kinked: True if layers or functions with recorded outputs have kinks (ReLU, max pooling).
    """

    def __init__(self, sites: PairSchema) -> None:
        dtypes = sites.anchor_dtypes
        self.dtypes = dtypes_of(sites)
        self.coarsest = {stage: coarsest(self.dtypes, STAGES[: number + 1]) for number, stage in enumerate(STAGES)}
        before = [stage for stage in STAGES if stage not in ("loss", "update")]
        self.level = limits.allowed(coarsest(self.dtypes, before), "forward")
        functional = _each(is_functional, sites.slots)
        self.of_loop = _array(layer == LOOP for layer in sites.layers)
        self.of_loss = self.of_loop & _array(functional)
        self.running = _array(_each(limits.is_running, sites.slots))
        #: Mask of the pairs of layers, without running statistics.
        self.own = ~(self.of_loop | self.running)
        self.rounding = np.array(_each(lambda dtype: limits.ROUNDING.get(limits.coarse(dtype), 0.0), dtypes))
        #: Relative L2 error that rounding explains of an update of this dtype.
        self.update_noise = np.array(
            [
                limits.allowed(dtype, "update") if dtype in limits.ROUNDING else 0.0
                for dtype in map(limits.coarse, dtypes)
            ]
        )
        #: Mask of the pairs that measure the distance at the start. Running variances may differ by n / (n - 1).
        self.fed_here = _fed_here(sites)
        # Outputs of this run are no such distance where they are inputs of other models.
        self.starting = (self.rounding > 0) & ~self.running & ~self.fed_here
        self.exact = _array(
            expected is not None
            and actual is not None
            and not expected.startswith(_FLOATING)
            and not actual.startswith(_FLOATING)
            for expected, actual in zip(*sites.dtypes)
        )
        self.vectors = _array(len(shape) < 2 for shape in sites.shapes)
        self.biases = _array(_each(_is_bias, sites.slots)) & _array(len(s) == 1 for s in sites.shapes)
        self.fused = _array(is_fused(slot) and len(shape) == 1 for slot, shape in zip(sites.slots, sites.shapes))
        kinds = _each(str.lower, sites.types)
        self.simple = _array(_each(lambda kind: equivalents.group_of_kinds(kind) in limits.SIMPLE, kinds))
        #: Mask of the pairs of activation layers.
        self.activations = _each(equivalents.is_activation, kinds)
        #: Mask of the inputs of loss functions, most of which are outputs of the model.
        self.into_loss = [
            bool(of_loss) and stage == "loss" and loss_role(slot) != "0"
            for of_loss, stage, slot in zip(self.of_loss, sites.stages, sites.slots)
        ]
        #: Mask of the losses that the training loop logged.
        self.losses = [
            bool(loop) and stage == "loss" and not called
            for loop, stage, called in zip(self.of_loop, sites.stages, functional)
        ]
        outputs = sites.places["forward"].tolist()
        called = {(sites.slots[place], sites.types[place]) for place in outputs}
        called |= {sites.candidates[place][1:] for place in outputs}
        self.kinked = any(
            equivalents.has_kinks((slot.partition("()")[0] if is_functional(slot) else kind).lower())
            for slot, kind in called
        )
        #: Layers whose outputs get no gradients in a step in which others do: a teacher's, a target network's.
        learning = {sites.layers[place] for place in sites.places["backward"].tolist()}
        self.untaught = {sites.layers[place] for place in outputs} - learning if learning else set()
        #: Values per channel of a layer's output: the samples of a BatchNorm's statistics.
        self.samples: dict[str, int] = {}
        for place in sites.places["forward"].tolist():
            shape = sites.shapes[place]
            if sites.dtypes.reference[place] is not None and len(shape) > 1 and shape[1]:
                self.samples.setdefault(sites.layers[place], math.prod(shape) // shape[1])


def _fed_here(sites: PairSchema) -> np.ndarray:
    """Return a mask of the inputs that are computed from outputs of other models of the run."""
    mask = np.zeros(len(sites), np.bool_)
    outputs = sites.places["forward"].tolist()

    def is_inside(path: str, layer: str) -> bool:
        return path == layer or is_below(path, layer)

    for place in np.flatnonzero(sites.derived).tolist():
        layer = sites.layers[place]
        mask[place] = layer != ROOT and any(not is_inside(sites.layers[k], layer) for k in outputs if k < place)
    return mask


def dtypes_of(sites: PairSchema) -> dict[str, set[str]]:
    """Return the dtypes of either side's records, by stage."""
    by_stage: dict[str, set[str]] = {stage: set() for stage in STAGES}
    for dtypes in sites.dtypes:
        for stage, dtype in set(zip(sites.stages, dtypes)):
            if dtype is not None:
                by_stage[stage].add(dtype)
    return by_stage


def coarsest(dtypes: Mapping[str, set[str]], stages: Collection[str]) -> str:
    """Return the coarsest floating dtype at some stages, of either side; the finest dtype of all if none is floating.

    Args:
        dtypes: result of `dtypes_of`.
    """
    reals = {limits.coarse(dtype) for stage in stages for dtype in dtypes[stage]}
    return next((dtype for dtype in reversed(limits.COARSENESS) if dtype in reals), limits.COARSENESS[0])


def _each(find: Callable[[str], _Fact], values: Sequence[str]) -> list[_Fact]:
    """Return a function's result for each word, calling the function once for each different word."""
    results = {value: find(value) for value in set(values)}
    return [results[value] for value in values]


def _is_bias(slot: str) -> bool:
    return equivalents.slot(slot.partition("[")[0]).endswith("bias")


def _array(values: Iterable[bool]) -> np.ndarray:
    return np.fromiter(values, np.bool_)


class Scales:
    """Sizes of the gradients of a step's parameters, from its measured diffs.

    Attributes:
        layers: largest root mean square of the reference's gradients of each diff's layer.
        outputs: norm of the recorded gradients of the layer's outputs, over all calls, or 0: a bias's gradient is their
            sum.
    """

    def __init__(self, diffs: StepDiffs) -> None:
        self.layers = largest_rms(diffs, "grad")
        squares = diffs.known_of_stage("backward", diffs.rows["reference_l2"] ** 2, 0.0)
        self.outputs = np.sqrt(diffs.sites.sums_of_layers("backward", squares))


# Fewest elements, ratio of the norms and cosine from which one tensor is a multiple of another not by chance. Chosen.
_MANY, _SCALED, _PARALLEL = 16, 1.5, 0.99


@np.errstate(all="ignore")
def only_scaled(rows: np.ndarray) -> np.ndarray:
    """Return a mask of tensors that are a multiple of the other side's: rounding noise has another direction.

    Args:
        rows: the figures, with the fields `reference_l2`, `candidate_l2`, `l2` and `size`.
    """
    first, second = rows["reference_l2"], rows["candidate_l2"]
    product = (np.square(first) + np.square(second) - np.square(rows["l2"])) / 2
    norms = np.minimum(first, second), np.maximum(first, second)
    is_scaled = (norms[0] > 0) & (norms[1] > _SCALED * norms[0])
    return np.asarray(is_scaled & (rows["size"] >= _MANY) & (product > _PARALLEL * first * second))


@np.errstate(all="ignore")
def rounding_gradients(diffs: StepDiffs) -> np.ndarray:
    """Return a mask of gradients that are only rounding noise: tiny beside their inputs, and different on either side.

    A bias's gradient is a sum of gradients of its layer's outputs; rounding leaves `SiteFacts.level` of the root of the
    sum of their squares. If these are unknown, or for another parameter, the layer's largest gradient estimates the
    scale. Because that estimate depends on the layer's inputs, noise then has to differ clearly.
    """
    facts, scales, rows = diffs.sites.fact(SiteFacts), diffs.figure_fact(Scales), diffs.rows

    def of_grads(values: np.ndarray) -> np.ndarray:
        return diffs.of_stage("grad", values)

    result = np.zeros(rows.shape, np.bool_)
    size, norms = of_grads(rows["size"]), of_grads(np.maximum(rows["reference_l2"], rows["candidate_l2"]))
    outputs = of_grads(scales.outputs)
    sums = (outputs != 0) & of_grads(facts.biases)
    most = facts.level * np.where(sums, outputs, of_grads(scales.layers) * np.sqrt(size))
    small = of_grads(diffs.known) & (norms <= most) & (size > 0) & (of_grads(rows["nonfinite"]) == 0)
    if small.any():
        differ = of_grads(rows["l2"]) > np.where(sums, DIFFERENT, CLEARLY) * norms
        differ &= ~of_grads(only_scaled(rows))
        result[diffs.sites.places["grad"]] = small & differ
    return result


def is_nothing(diff: Diff) -> bool:
    """Return True if a lone gradient or update is all zeros, which the other framework represents by no tensor."""
    figures = diff.figures
    zero = figures is not None and figures.reference_l2 == figures.candidate_l2 == 0 and figures.size > 0
    return zero and diff.pair.stage in ("grad", "update")


def noted(diff: Diff) -> Diff:
    """Return the diff of a gradient, passed as rounding noise around zero."""
    figures = diff.figures
    assert figures is not None
    # Two unrelated tensors differ by at most the sum of their norms.
    most = (figures.reference_l2 + figures.candidate_l2) / (figures.reference_l2 or 1.0)
    value = figures.l2 / (figures.reference_l2 or 1.0)
    return diff.judged(True, Figure.AROUND_ZERO, value, max(most, value), Rule.AROUND_ZERO)


def largest_rms(diffs: StepDiffs, stage: str) -> np.ndarray:
    """Return the largest root mean square of the reference's gradients or updates, of each diff's layer."""
    sites, size = diffs.sites, diffs.of_stage(stage, diffs.rows["size"])
    # Empty tensors have no root mean square; the loop's numbers are no gradients.
    is_gradient = diffs.of_stage(stage, diffs.known & ~sites.fact(SiteFacts).of_loop) & (size > 0)
    rms = np.where(is_gradient, diffs.of_stage(stage, diffs.rows["reference_l2"]) / np.sqrt(np.maximum(size, 1)), 0.0)
    return np.asarray(np.fmax(sites.largest_of_layers(stage, rms), 0.0))


# Rules of diffs whose size proves nothing, such as a gradient judged by its layer's largest, or an update from noise.
_NO_WITNESS = frozenset({None, Rule.LAYER, Rule.NOISE_DRIVEN, Rule.AROUND_ZERO, Rule.STATISTICS, Rule.EQUAL})
_IS_WITNESS = np.array([rule not in _NO_WITNESS for rule in RULES])


class ScaleErrors(NamedTuple):
    """Scale errors of tensors; one element for each tensor.

    Attributes:
        places: indices of their diffs among the step's diffs.
        ratio: the candidate is ``1 + ratio`` times the reference, plus a remainder.
        error: relative L2 error.
        size: number of elements.
        spread: relative standard deviation of `error`.
    """

    places: np.ndarray
    ratio: np.ndarray
    error: np.ndarray
    size: np.ndarray
    spread: np.ndarray

    @property
    def mostly_ratio(self) -> np.ndarray:
        """Return a mask of the tensors whose error is almost entirely the ratio."""
        return np.asarray(np.abs(self.ratio) >= (limits.MOSTLY - limits.SURE * self.spread) * self.error)

    @property
    def typical_ratio(self) -> float:
        """Return the median of the ratios; 0 if there are none."""
        return statistics.median(self.ratio.tolist()) if len(self.places) else 0.0

    @property
    def typical_error(self) -> float:
        """Return the median of the relative errors; 0 if there are none."""
        return statistics.median(self.error.tolist()) if len(self.places) else 0.0

    def where(self, which: np.ndarray) -> ScaleErrors:
        """Return the entries of the masked tensors."""
        return ScaleErrors(*(column[which] for column in self))


def ratios_of(rows: np.ndarray) -> np.ndarray:
    """Return each candidate's ratio to its reference, less 1, along the direction of the reference."""
    with np.errstate(all="ignore"):
        square = rows["reference_l2"] ** 2
        ratio = (rows["candidate_l2"] ** 2 - square - rows["l2"] ** 2) / (2 * square)
    return np.where(square > 0, ratio, 0.0)


def _ratios(diffs: StepDiffs) -> np.ndarray:
    return ratios_of(diffs.rows)


def _may_witness(diffs: StepDiffs) -> np.ndarray:
    """Return a mask of the diffs of layers that may be witnesses of a common ratio.

    A witness has at least `WITNESS` elements, a finite error, and a finite reference that is not zero.
    """
    rows, reference = diffs.rows, diffs.rows["reference_l2"]
    is_known = diffs.known & (rows["basis"] != MOMENTS) & diffs.sites.fact(SiteFacts).own & ~diffs.troubled
    return np.asarray(
        is_known
        & (rows["size"] >= limits.WITNESS)
        & np.isfinite(diffs.relative)
        & (reference > 0)
        & (reference < np.inf)
    )


class StageScaleErrors:
    """Scale errors of a step's tensors, as far as known.

    Args:
        diffs: judged diffs of the step.
    """

    def __init__(self, diffs: StepDiffs) -> None:
        # No reference to the diffs, which cache this object.
        self._places, self._rows, self._errors = diffs.sites.places, diffs.rows, diffs.relative
        self._known = diffs.figure_fact(_may_witness) & _IS_WITNESS[diffs.rows["rule"]]
        self._ratios = diffs.figure_fact(_ratios)
        self._of_stage: dict[str, ScaleErrors] = {}

    def errors_of(self, stage: str, noise: np.ndarray | None = None) -> ScaleErrors:
        """Return the scale errors of a stage.

        Args:
            noise: mask of the diffs of parameters whose gradients are rounding noise; these are left out.
        """
        if noise is None or not noise.any():
            if stage not in self._of_stage:
                self._of_stage[stage] = self._of(stage, self._known)
            return self._of_stage[stage]
        return self._of(stage, self._known & ~noise)

    def _of(self, stage: str, has_figures: np.ndarray) -> ScaleErrors:
        places = self._places[stage]
        places = places[has_figures[places]]
        sizes, spreads = self._rows["size"][places], self._rows["spread"][places]
        return ScaleErrors(places, self._ratios[places], self._errors[places], sizes, spreads)


def scale_errors(diffs: StepDiffs, stage: str, noise: np.ndarray | None = None) -> ScaleErrors:
    """Return the scale error of each tensor of a stage, as far as known.

    Args:
        noise: mask of the diffs of parameters whose gradients are rounding noise; these are left out.
    """
    return diffs.fact(StageScaleErrors).errors_of(stage, noise)


def key_of(diff: Diff) -> Key:
    """Return the key of a diff's parameter: layer and slot."""
    return diff.pair.anchor.layer, diff.pair.anchor.slot


def may_have_kinks(diffs: StepDiffs) -> bool:
    """Return True if the step's layers or functions have kinks, or its activation gradients suggest kinks.

    Functions that a model calls outside of layers may be unrecorded; therefore the errors are checked, too.
    """
    if diffs.sites.fact(SiteFacts).kinked:
        return True
    return bool(diffs.of_stage("backward", look_like_few(diffs.rows) & diffs.known).any())


def look_like_few(rows: np.ndarray) -> np.ndarray:
    """Return a mask of the errors that lie in few elements, judging by their norms."""
    l2, size = rows["l2"], rows["size"]
    is_known = (l2 != 0) & (size > 0) & np.isfinite(l2)
    few = rows["bulk_l2"] <= FEW_LOOK * l2  # false for NaN
    is_full = rows["basis"] == TENSORS
    if not is_full.any():
        return np.asarray(is_known & few)
    # The mean of equally large values is nearly their root mean square; of a few values among zeros it is far less.
    root, reference = np.sqrt(size), rows["reference_l2"]
    with np.errstate(all="ignore"):
        spread = rows["mean_abs"] * root / l2
        own_spread = rows["mean_reference"] * root / np.where(reference != 0, reference, 1.0)
    return np.asarray(is_known & (few | (is_full & (spread <= SPARSE * own_spread))))


def with_rates(ranks: list[StepDiffs], agree: Callable[[], bool]) -> list[StepDiffs]:
    """Return the diffs of each rank, with all learning rates of groups passed if each parameter's rates agree.

    Args:
        agree: function that returns True if each parameter's rates agree; called only if a learning rate did not pass.
    """
    rates = [_rates(diffs) for diffs in ranks]
    failed = any((~diffs.rows["passed"][places]).any() for diffs, places in zip(ranks, rates))
    if not failed or not agree():
        return ranks
    return [_of_groups(diffs, places) for diffs, places in zip(ranks, rates)]


def _rates(diffs: StepDiffs) -> np.ndarray:
    places = diffs.sites.places["update"]
    return np.asarray(places[diffs.sites.fact(SiteFacts).of_loop[places]])


def _of_groups(diffs: StepDiffs, places: np.ndarray) -> StepDiffs:
    rows = diffs.rows.copy()
    judged = places[rows["figure"][places] != 0]
    rows["passed"][judged], rows["rule"][judged] = True, RULE_NUMBERS[Rule.GROUPS]
    return diffs.judged(rows)
