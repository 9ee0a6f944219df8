"""What judging has to know of the tensors of a step but for their values: the same for all steps that are alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from padiff.compare.judge import limits
from padiff.model import equivalents
from padiff.pair.parameters import is_fused
from padiff.records import LOOP, STAGES, is_functional, loss_role
from padiff.records.sites import Sites

_Fact = TypeVar("_Fact")
_FLOATING = ("float", "bfloat", "complex")


class SiteFacts:
    """What is known of a step's pairs; arrays have one element for each.

    Attributes:
        dtypes: the dtypes of either side's records, by stage.
        coarsest: the coarsest floating dtype up to and with each stage. Weights that are stored coarsely count too.
        level: what rounding leaves of a sum, relative to what it is a sum of, in the coarsest dtype that led to a
            gradient.
        of_loop: which are of the training loop.
        of_loss: which went into a loss function, or came out of it; or the norm that clipping measured.
        running: which are running statistics.
        rounding: relative error of rounding one number of the anchor; 0 where it is no floating dtype.
        exact: which are integers or booleans on both sides (token ids, masks, counters).
        vectors: which have fewer than two axes.
        biases: which are gradients of what is added to a layer's output.
        fused: which are biases of query, key and value in one.
        simple: which are of layers whose gradients are made of what goes in and comes back alone.
        kinked: whether layers or functions have kinks (ReLU, max pooling).
    """

    def __init__(self, sites: Sites) -> None:
        own = sites.anchor_dtypes
        self.dtypes = dtypes_of(sites)
        self.coarsest = {stage: coarsest(self.dtypes, STAGES[: number + 1]) for number, stage in enumerate(STAGES)}
        before = [stage for stage in STAGES if stage not in ("loss", "update")]
        self.level = limits.allowed(coarsest(self.dtypes, before), "forward")
        functional = _each(is_functional, sites.slots)
        self.of_loop = _array(layer == LOOP for layer in sites.layers)
        self.of_loss = self.of_loop & _array(functional)
        self.running = _array(_each(limits.is_running, sites.slots))
        #: Which are of layers, and no running statistics.
        self.own = ~(self.of_loop | self.running)
        self.rounding = np.array(_each(lambda dtype: limits.ROUNDING.get(limits.coarse(dtype), 0.0), own))
        #: Relative L2 error that rounding explains of an update of this dtype.
        self.update_noise = np.array(
            [limits.allowed(dtype, "update") if dtype in limits.ROUNDING else 0.0 for dtype in map(limits.coarse, own)]
        )
        #: Which say how far apart a step starts. Running statistics may be n / (n - 1) apart.
        self.starting = (self.rounding > 0) & ~self.running
        self.exact = _array(
            one is not None and other is not None and not one.startswith(_FLOATING) and not other.startswith(_FLOATING)
            for one, other in zip(*sites.dtypes)
        )
        self.vectors = _array(len(shape) < 2 for shape in sites.shapes)
        self.biases = _array(_each(_is_bias, sites.slots)) & _array(len(s) == 1 for s in sites.shapes)
        self.fused = _array(is_fused(slot) and len(shape) == 1 for slot, shape in zip(sites.slots, sites.shapes))
        kinds = _each(str.lower, sites.types)
        self.simple = _array(_each(lambda kind: equivalents.group_of_kinds(kind) in limits.SIMPLE, kinds))
        #: Which outputs are of activations, and which go into a loss function: of an output, mostly.
        self.activations = _each(equivalents.is_activation, kinds)
        self.into_loss = [
            bool(of_loss) and stage == "loss" and loss_role(slot) != "0"
            for of_loss, stage, slot in zip(self.of_loss, sites.stages, sites.slots)
        ]
        #: Which are the loss of a micro-batch.
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
        #: How many values each channel of a layer's output has: what a BatchNorm takes its statistics over.
        self.samples: dict[str, int] = {}
        for place in sites.places["forward"].tolist():
            shape = sites.shapes[place]
            if sites.dtypes.reference[place] is not None and len(shape) > 1 and shape[1]:
                self.samples.setdefault(sites.layers[place], math.prod(shape) // shape[1])


def dtypes_of(sites: Sites) -> dict[str, set[str]]:
    """The dtypes of either side's records, by stage."""
    found: dict[str, set[str]] = {stage: set() for stage in STAGES}
    for dtypes in sites.dtypes:
        for stage, dtype in set(zip(sites.stages, dtypes)):
            if dtype is not None:
                found[stage].add(dtype)
    return found


def coarsest(dtypes: Mapping[str, set[str]], stages: Collection[str]) -> str:
    """The coarsest floating dtype at some stages, of either side; the finest of all where there is none.

    Args:
        dtypes: as `dtypes_of` gives them.
    """
    seen = {limits.coarse(dtype) for stage in stages for dtype in dtypes[stage]}
    return next((dtype for dtype in reversed(limits.COARSENESS) if dtype in seen), limits.COARSENESS[0])


def _each(find: Callable[[str], _Fact], values: Sequence[str]) -> list[_Fact]:
    """What a function says of each of many words, most of which are the same few."""
    known = {value: find(value) for value in set(values)}
    return [known[value] for value in values]


def _is_bias(slot: str) -> bool:
    return equivalents.slot(slot.partition("[")[0]).endswith("bias")


def _array(values: Iterable[bool]) -> np.ndarray:
    return np.fromiter(values, np.bool_)
