"""Facts about a step's tensors that do not depend on their values: the same for all steps with the same records."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from padiff.compare.judge import limits
from padiff.model import equivalents
from padiff.pair.parameters import is_fused
from padiff.records import LOOP, ROOT, STAGES, is_below, is_functional, loss_role
from padiff.records.pair_schema import PairSchema

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
