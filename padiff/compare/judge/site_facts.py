"""What judging has to know of the tensors of a step but for their values: the same for all steps that are alike."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from padiff.compare.judge import limits
from padiff.model import equivalents
from padiff.pair.parameters import is_fused
from padiff.records import LOOP, STAGES, is_functional, loss_role
from padiff.records.sites import Sites

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
        functional = [is_functional(slot) for slot in sites.slots]
        self.of_loop = _array(layer == LOOP for layer in sites.layers)
        self.of_loss = self.of_loop & _array(functional)
        self.running = _array(limits.is_running(slot) for slot in sites.slots)
        #: Which are of layers, and no running statistics.
        self.own = ~(self.of_loop | self.running)
        self.rounding = np.array([limits.ROUNDING.get(limits.coarse(dtype), 0.0) for dtype in own])
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
        slots = [equivalents.slot(slot.partition("[")[0]) for slot in sites.slots]
        self.biases = _array(slot.endswith("bias") for slot in slots) & _array(len(s) == 1 for s in sites.shapes)
        self.fused = _array(is_fused(slot) and len(shape) == 1 for slot, shape in zip(sites.slots, sites.shapes))
        kinds = [kind.lower() for kind in sites.types]
        self.simple = _array(equivalents.group_of_kinds(kind) in limits.SIMPLE for kind in kinds)
        #: Which outputs are of activations, and which go into a loss function: of an output, mostly.
        self.activations = [equivalents.is_activation(kind) for kind in kinds]
        self.into_loss = [
            bool(of_loss) and stage == "loss" and loss_role(slot) != "0"
            for of_loss, stage, slot in zip(self.of_loss, sites.stages, sites.slots)
        ]
        #: Which are the loss of a micro-batch.
        self.losses = [
            bool(loop) and stage == "loss" and not called
            for loop, stage, called in zip(self.of_loop, sites.stages, functional)
        ]
        candidates = [(slot, kind.lower()) for _, slot, kind in sites.candidates]
        self.kinked = any(
            stage == "forward"
            and equivalents.has_kinks(slot.partition("()")[0].lower() if is_functional(slot) else kind)
            for side in (zip(sites.slots, kinds), candidates)
            for stage, (slot, kind) in zip(sites.stages, side)
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


def _array(values: Iterable[bool]) -> np.ndarray:
    return np.fromiter(values, np.bool_)
