"""The optimizers of both frameworks, one row each: classes, state, settings, and where epsilon is added.

Whatever depends on a rule alone is a column here; `padiff.compare.diagnose.hypotheses.rules` has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from padiff.records.parameter_states import (
    FIRST_MOMENT,
    GRADIENT_AVERAGE,
    INFINITY_NORM,
    MAX_SECOND_MOMENT,
    MOMENTUM,
    PREVIOUS_GRADIENT,
    SECOND_MOMENT,
    SQUARE_AVERAGE,
    SQUARE_SUM,
    STEP_SIZE,
    UPDATE_AVERAGE,
)


@dataclass(frozen=True)
class OptimizerClass:
    """A class of a framework.

    Attributes:
        name: its name in the framework's module of optimizers.
        tensors: the framework's name of a tensor of its state -> the common name; `None` if states can't be converted.
        settings: the framework's name of a setting -> the common name. torch's are read from the groups.
        powers: tensors of its state that hold a power: name, the base (a setting's name), and the initial exponent.
        epsilon: where it adds epsilon, if the frameworks differ in this rule, as a phrase.
        inside: True if that is the place that the rule's form ``inside`` stands for.
    """

    name: str
    tensors: Mapping[str, str] | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    powers: tuple[tuple[str, str, int], ...] = ()
    epsilon: str = ""
    inside: bool = False


@dataclass(frozen=True)
class Optimizer:
    """An update rule that has the same meaning in both frameworks.

    Attributes:
        rule: the common name.
        classes: the classes that follow the rule, by framework.
        counts: True if the update depends on the number of steps.
    """

    rule: str
    classes: Mapping[str, tuple[OptimizerClass, ...]]
    counts: bool = False


def _row(rule: str, torch: OptimizerClass | None, *paddle: OptimizerClass, counts: bool = False) -> Optimizer:
    return Optimizer(rule, {"torch": () if torch is None else (torch,), "paddle": paddle}, counts)


_Class = OptimizerClass
_TORCH_MOMENTS = {"exp_avg": FIRST_MOMENT, "exp_avg_sq": SECOND_MOMENT}
_TORCH_ADAM = {**_TORCH_MOMENTS, "max_exp_avg_sq": MAX_SECOND_MOMENT}
_TORCH_ADAMAX = {"exp_avg": FIRST_MOMENT, "exp_inf": INFINITY_NORM}
_TORCH_ADADELTA = {"square_avg": SQUARE_AVERAGE, "acc_delta": UPDATE_AVERAGE}
_TORCH_RMSPROP = {"square_avg": SQUARE_AVERAGE, "momentum_buffer": MOMENTUM, "grad_avg": GRADIENT_AVERAGE}
_MOMENTS = {"moment1": FIRST_MOMENT, "moment2": SECOND_MOMENT}
_ADAM = {**_MOMENTS, "moment2_max": MAX_SECOND_MOMENT}
_ADAMAX = {"moment": FIRST_MOMENT, "inf_norm": INFINITY_NORM}
_ADADELTA = {"_avg_squared_grad": SQUARE_AVERAGE, "_avg_squared_update": UPDATE_AVERAGE}
_RMSPROP = {"mean_square": SQUARE_AVERAGE, "momentum": MOMENTUM, "mean_grad": GRADIENT_AVERAGE}
_RPROP = {"prevs": PREVIOUS_GRADIENT, "learning_rates": STEP_SIZE}

# paddle's settings, and its accumulators that hold powers.
_BETAS = {"beta1": "beta1", "beta2": "beta2", "epsilon": "eps"}
_BETAS_AND_DECAY = {**_BETAS, "momentum_decay": "momentum_decay"}
_OF_MOMENTUM = {"momentum": "momentum", "use_nesterov": "nesterov", "rescale_grad": "rescale_grad"}
_OF_ADAGRAD = {"epsilon": "eps", "initial_accumulator_value": "initial_accumulator_value"}
_OF_ADADELTA = {"epsilon": "eps", "rho": "rho"}
_OF_RMSPROP = {"rho": "alpha", "epsilon": "eps", "momentum": "momentum", "centered": "centered"}
_POWERS = (("beta1_pow_acc", "beta1", 1), ("beta2_pow_acc", "beta2", 1))
_POWERS_AHEAD = (("beta1_pow", "beta1", 0), ("beta2_pow", "beta2", 0))

# fmt: off
CATALOG = (
    _row("SGD", _Class("SGD", {"momentum_buffer": MOMENTUM}),
         _Class("SGD", {}), _Class("Momentum", {"velocity": MOMENTUM}, _OF_MOMENTUM)),
    _row("Adam", _Class("Adam", _TORCH_ADAM), _Class("Adam", _ADAM, _BETAS, _POWERS), counts=True),
    _row("AdamW", _Class("AdamW", _TORCH_ADAM), _Class("AdamW", _ADAM, _BETAS, _POWERS), counts=True),
    _row("Adamax", _Class("Adamax", _TORCH_ADAMAX, epsilon="to the gradient"),
         _Class("Adamax", _ADAMAX, _BETAS, _POWERS[:1], "to the norm before", inside=True), counts=True),
    _row("NAdam", _Class("NAdam", _TORCH_MOMENTS),
         _Class("NAdam", _MOMENTS, _BETAS_AND_DECAY, _POWERS_AHEAD[1:]), counts=True),
    _row("RAdam", _Class("RAdam", _TORCH_MOMENTS), _Class("RAdam", _MOMENTS, _BETAS, _POWERS_AHEAD), counts=True),
    _row("Lamb", None, _Class("Lamb", _MOMENTS, _BETAS, _POWERS), counts=True),
    _row("Adagrad", _Class("Adagrad", {"sum": SQUARE_SUM}), _Class("Adagrad", {"moment": SQUARE_SUM}, _OF_ADAGRAD)),
    _row("Adadelta", _Class("Adadelta", _TORCH_ADADELTA), _Class("Adadelta", _ADADELTA, _OF_ADADELTA)),
    _row("RMSProp", _Class("RMSprop", _TORCH_RMSPROP, epsilon="outside of the root"),
         _Class("RMSProp", _RMSPROP, _OF_RMSPROP, epsilon="inside of the root", inside=True)),
    _row("Rprop", _Class("Rprop", {"prev": PREVIOUS_GRADIENT, "step_size": STEP_SIZE}), _Class("Rprop", _RPROP)),
    _row("LBFGS", _Class("LBFGS"), _Class("LBFGS")),
    _row("Adafactor", _Class("Adafactor")),
)
# fmt: on


def classes(framework: str) -> dict[str, tuple[str, OptimizerClass]]:
    """Return a framework's classes by name, each with the common name of its rule."""
    return {known.name: (row.rule, known) for row in CATALOG for known in row.classes.get(framework, ())}


def epsilon_of(framework: str, rule: str) -> OptimizerClass | None:
    """Return the class of a rule in which the frameworks add epsilon in different places; `None` in other rules."""
    return next((known for name, known in classes(framework).values() if name == rule and known.epsilon), None)
