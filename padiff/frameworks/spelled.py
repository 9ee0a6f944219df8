"""How a line of each framework's code sets what a run declares; known by the framework's name, as `known` is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from padiff.system.code import literal


@dataclass(frozen=True)
class Spelling:
    """How one framework writes it.

    Attributes:
        optimizers, layers: the modules that hold them.
        rate: what an optimizer calls its learning rate.
        values: the common name of an optimizer's value -> the argument, with the values it is made of.
        clips: kind of clipping -> a call or an argument that does it, ``{}`` standing for the limit.
        rules: common name of a rule -> the class, where it is called otherwise.
        with_momentum: the class for SGD with momentum, where it is one of its own.
        epsilon: where RMSProp and Adamax add epsilon.
        arguments: the common name of a layer's setting -> the argument, where it is called otherwise.
        converted: likewise -> what the argument is for the common value, which is torch's. Momentum is a
            normalisation's.
        losses: common name of a loss function -> what it is called, and arguments that make it that.
        loss_arguments: the common name of a loss's setting -> the argument, where it is called otherwise.
        parameters: what an optimizer calls its parameters; empty: they come first.
    """

    optimizers: str
    layers: str
    rate: str
    values: Mapping[str, tuple[str, tuple[str, ...]]]
    clips: Mapping[str, str]
    rules: Mapping[str, str] = field(default_factory=dict)
    with_momentum: str = ""
    epsilon: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    converted: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    losses: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    loss_arguments: Mapping[str, str] = field(default_factory=dict)
    parameters: str = ""


def _alone(names: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    return {name: (name, (name,)) for name in names.split()}


def _as(argument: str, *names: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    return dict.fromkeys(names, (argument, names))


_SHARED = _alone("momentum momentum_decay initial_accumulator_value rho centered amsgrad")
_LBFGS = _alone("max_iter max_eval tolerance_grad tolerance_change history_size line_search_fn")
_TORCH = Spelling(
    optimizers="torch.optim",
    layers="torch.nn",
    rate="lr",
    values={
        **_SHARED,
        **_LBFGS,
        **_alone("eps dampening nesterov maximize alpha lr_decay"),
        **_as("betas", "beta1", "beta2"),
        **_as("etas", "eta_minus", "eta_plus"),
        **_as("step_sizes", "step_min", "step_max"),
        **_as("weight_decay", "decay.coupled"),
        **_as("weight_decay", "decay.decoupled"),
    },
    clips={
        "global_norm": "torch.nn.utils.clip_grad_norm_(model.parameters(), {})",
        "value": "torch.nn.utils.clip_grad_value_(model.parameters(), {})",
    },
    rules={"RMSProp": "RMSprop"},
    epsilon={"RMSProp": "outside of the root", "Adamax": "to the gradient"},
    arguments={"slope": "negative_slope"},
)
_PADDLE = Spelling(
    optimizers="paddle.optimizer",
    layers="paddle.nn",
    rate="learning_rate",
    values={
        **_SHARED,
        **_LBFGS,
        **_alone("beta1 beta2 rescale_grad"),
        **_as("epsilon", "eps"),
        **_as("use_nesterov", "nesterov"),
        **_as("rho", "alpha"),
        **_alone("rho"),
        **_as("etas", "eta_minus", "eta_plus"),
        **_as("learning_rate_range", "step_min", "step_max"),
        **_as("weight_decay", "decay.coupled"),
        **_as("weight_decay", "decay.decoupled"),
        **_as("weight_decay", "decay.l1"),
    },
    clips={
        "global_norm": "grad_clip=paddle.nn.ClipGradByGlobalNorm({})",
        "tensor_norm": "grad_clip=paddle.nn.ClipGradByNorm({})",
        "value": "grad_clip=paddle.nn.ClipGradByValue({})",
    },
    with_momentum="Momentum",
    epsilon={"RMSProp": "inside of the root", "Adamax": "to the norm before"},
    arguments={"eps": "epsilon", "slope": "negative_slope", "count_include_pad": "exclusive"},
    converted={
        # paddle keeps the share of what was, torch takes the share of what is new.
        "momentum": lambda value: round(1.0 - value, 12),
        "approximate": lambda value: value == "tanh",
        "count_include_pad": lambda value: not value,
    },
    losses={
        "huber_loss": ("smooth_l1_loss", ""),
        "smooth_l1_loss": ("smooth_l1_loss", "is_huber=False"),
        "multilabel_margin_loss": ("multi_label_margin_loss", ""),
        "multilabel_soft_margin_loss": ("multi_label_soft_margin_loss", ""),
    },
    loss_arguments={"beta": "delta", "eps": "epsilon"},
    parameters="parameters",
)
SPELLINGS = {"torch": _TORCH, "paddle": _PADDLE}


def number_text(value: Any) -> str:
    """A value as code has it; what was kept in float32 without the digits that this adds."""
    if not isinstance(value, float) or not math.isfinite(value):
        return literal(value)
    short = float(f"{value:.7g}")
    return literal(short if abs(short - value) <= 1e-7 * abs(value) else value)
