"""Code that sets a declared setting in each framework, by the framework's name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from padiff.frameworks.optimizer_catalog import classes
from padiff.system.code import literal


@dataclass(frozen=True)
class ArgumentNames:
    """The names by which one framework's code sets things.

    Attributes:
        optimizers, layers: the modules that hold optimizers and layers.
        rate: an optimizer's argument for the learning rate.
        values: common name of an optimizer's setting -> the argument, and the common names of the argument's items.
        clips: kind of clipping -> a call or an argument that clips; ``{}`` stands for the limit.
        rules: common name of an update rule -> the class, if its name differs.
        with_momentum: the class for SGD with momentum, if it has a class of its own.
        arguments: common name of a layer's setting -> the argument, if its name differs.
        converted: common name of a layer's setting -> a function that converts the common value, which is torch's, to
            the argument. Momentum is that of a normalization layer.
        losses: common name of a loss function -> its name, and arguments that select this loss.
        loss_arguments: common name of a loss's setting -> the argument, if its name differs.
        parameters: an optimizer's argument for its parameters; empty if they are the first positional argument.
    """

    optimizers: str
    layers: str
    rate: str
    values: Mapping[str, tuple[str, tuple[str, ...]]]
    clips: Mapping[str, str]
    rules: Mapping[str, str] = field(default_factory=dict)
    with_momentum: str = ""
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
_TORCH = ArgumentNames(
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
    rules={rule: name for name, (rule, _) in classes("torch").items() if name != rule},
    arguments={"slope": "negative_slope"},
)
_PADDLE = ArgumentNames(
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
    arguments={
        "eps": "epsilon",
        "slope": "negative_slope",
        "count_include_pad": "exclusive",
        "min_val": "min",
        "max_val": "max",
        "lambd": "threshold",
        "norm_first": "normalize_before",
        "nonlinearity": "activation",
    },
    converted={
        # paddle's momentum weights the old running statistics, torch's weights the new batch.
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
    """Return a value as a literal of code, rounded to 7 digits if float32 can't tell the difference."""
    if not isinstance(value, float) or not math.isfinite(value):
        return literal(value)
    short = float(f"{value:.7g}")
    return literal(short if abs(short - value) <= 1e-7 * abs(value) else value)
