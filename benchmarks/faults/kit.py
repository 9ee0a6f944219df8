"""What a program, a planted fault and a clean pair are, and how a training is set up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Batch = dict[str, np.ndarray]

#: Steps of every training. Events happen at `EVENT`; with every third step recorded, steps 0, 3 and 6 are.
STEPS = 8
EVENT = 4


@dataclass(frozen=True)
class Recipe:
    """How a training is done. A fault of the loop is a candidate's recipe with other values.

    Attributes:
        rule: sgd, adam, adamw or rmsprop; `coupled` makes AdamW's decay part of the gradient.
        norms: whether norms and biases decay, too; where not, the optimizer has two groups.
        head, head_rate: a pattern of parameters with a rate of their own, a multiple of the others'.
        schedule: cosine, step or warmup; it starts `shift` steps late and goes on every `pace` steps.
        clip: norm, value or tensor (each tensor's own norm).
        divide: whether the loss is divided by the number of micro-batches; `micro` of them are done.
        style: how the loop is written: names in one string (`foreach`, `by_hand`, `own_rule`, `own_clip`, `lambda`).
        frozen, unheld, restarted: patterns of parameters that do not train, that the optimizer does not hold, that
            start from other values.
        skip, twice, forget, stale, reload, average: the step at which it happens, or none: no optimizer step, two of
            them, the optimizer's state is lost, gradients are not zeroed after it, the weights of two steps ago are
            loaded before it, the average of the weights is put in before it.
        clamp: weights are kept within, after every step.
        feed: makes of the batches what the candidate's loader gives.
    """

    rule: str = "sgd"
    rate: float = 0.1
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    alpha: float = 0.99
    decay: float = 0.0
    coupled: bool = False
    norms: bool = True
    corrected: bool = True
    head: str = ""
    head_rate: float = 1.0
    schedule: str = ""
    shift: int = 0
    pace: int = 1
    clip: str = ""
    limit: float = 1.0
    accumulate: int = 1
    divide: bool = True
    micro: int = 0
    style: str = ""
    frozen: str = ""
    unheld: str = ""
    restarted: str = ""
    skip: int | None = None
    twice: int | None = None
    forget: int | None = None
    stale: int | None = None
    reload: int | None = None
    average: int | None = None
    clamp: float = 0.0
    feed: Callable[[Sequence[Batch]], Sequence[Batch]] | None = None


@dataclass(frozen=True)
class Side:
    """One author's hand.

    Attributes:
        framework: torch or paddle.
        build: makes the model, given the name of a fault in it (or ``""``) and of a way to write it.
        loss: ``loss(outputs, batch, fault)``; `batch` holds tensors.
        names: from this side's name of a parameter to the reference's; several joined by ``|`` are stacked.
    """

    framework: str
    build: Callable[[str, str], Any]
    loss: Callable[[Any, Any, str], Any]
    names: Callable[[str], str] = str


@dataclass(frozen=True)
class Fault:
    """One fault of the candidate, and what a good verdict says of it.

    Attributes:
        name: what is wrong; of a fault in the model's or the loss's code, what `Side.build` and `Side.loss` get.
        stages: in which it may be reported, joined by ``|``.
        places: pattern of the candidate's layers (or ``layer.parameter``), the whole name; empty: any.
        kind: of cause; patterns joined by ``|``, for a verdict that has one.
        words: patterns of which one has to be found in the cause's sentence.
        step: the first at which it can show; up to `late` steps later is right, too.
        recipe: what is other in the candidate's recipe.
        start: what is other in both recipes.
        fine: so small that bfloat16 hides it.
        declared: a setting that the run declares: a verdict of the first step, about no tensor, is right.
    """

    name: str
    stages: str
    places: str
    kind: str
    words: tuple[str, ...]
    step: int = 0
    late: int = 0
    recipe: Mapping[str, Any] = field(default_factory=dict)
    start: Mapping[str, Any] = field(default_factory=dict)
    fine: bool = False
    declared: bool = False


@dataclass(frozen=True)
class Clean:
    """A pair that must match: the candidate is written otherwise (`variant`, `recipe`), or both start elsewhere."""

    name: str
    seed: int = 0
    variant: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    start: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """Two authors' versions of one training, with faults and clean pairs.

    Attributes:
        data: ``data(rng, n)``: n batches, of numpy arrays by name.
        inputs: names of the arrays that the model is called with, in order.
        pure: bfloat16 means weights in bfloat16, else autocast.
        shown: both loops log their loss.
    """

    name: str
    reference: Side
    candidate: Side
    recipe: Recipe
    data: Callable[[np.random.Generator, int], list[Batch]]
    inputs: tuple[str, ...]
    faults: tuple[Fault, ...]
    clean: tuple[Clean, ...]
    pure: bool = False
    shown: bool = True


@dataclass(frozen=True)
class Trace:
    """What a training came to, without padiff: to see whether a fault does anything."""

    losses: tuple[float, ...]
    seconds: float
    weights: Mapping[str, np.ndarray]


def rate_factor(kind: str, at: int) -> float:
    """What the rate is multiplied by at a step of a schedule; the same in both frameworks."""
    if kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * at / 12))
    if kind == "step":
        return 0.5 ** (at // 3)
    if kind == "warmup":
        return min(1.0, (at + 1) / 5)
    return 1.0


def is_norm(name: str, dimensions: int) -> bool:
    """Whether people leave a parameter out of weight decay: norms and biases."""
    return dimensions < 2 or name.endswith("bias")
