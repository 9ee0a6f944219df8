"""What an optimizer of paddle is set to, under the names that torch's have too.

Within one group paddle treats parameters apart by what they carry themselves: a regularizer, a multiplier of the
learning rate, whether they are clipped. So the groups here are those of parameters that are treated alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import paddle
from paddle.regularizer import L1Decay, L2Decay

from padiff.frameworks.optimizing import OptimizerGroup, OptimizerSettings

_BETAS = {"beta1": "beta1", "beta2": "beta2", "epsilon": "eps"}
# paddle's class -> the common name of its rule, and what its groups call the values.
_RULES: dict[str, tuple[str, dict[str, str]]] = {
    "SGD": ("SGD", {}),
    "Momentum": ("SGD", {"momentum": "momentum", "use_nesterov": "nesterov", "rescale_grad": "rescale_grad"}),
    "Adam": ("Adam", _BETAS),
    "AdamW": ("AdamW", _BETAS),
    "Adamax": ("Adamax", _BETAS),
    "NAdam": ("NAdam", {**_BETAS, "momentum_decay": "momentum_decay"}),
    "RAdam": ("RAdam", _BETAS),
    "Lamb": ("Lamb", _BETAS),
    "Adagrad": ("Adagrad", {"epsilon": "eps", "initial_accumulator_value": "initial_accumulator_value"}),
    "Adadelta": ("Adadelta", {"epsilon": "eps", "rho": "rho"}),
    "RMSProp": ("RMSProp", {"rho": "alpha", "epsilon": "eps", "momentum": "momentum", "centered": "centered"}),
    "Rprop": ("Rprop", {}),
    "LBFGS": ("LBFGS", {}),
}
_OF_LBFGS = ("max_iter", "max_eval", "tolerance_grad", "tolerance_change", "history_size", "line_search_fn")
_CLIPS = (
    (paddle.nn.ClipGradByGlobalNorm, "global_norm"),
    (paddle.nn.ClipGradByNorm, "tensor_norm"),
    (paddle.nn.ClipGradByValue, "value"),
)
# What of a scheduler is its state, and not its setting.
_STATE = frozenset({"last_lr", "last_epoch", "verbose", "num_bad_epochs", "cooldown_counter", "best", "base_lr"})


def settings(optimizer: Any) -> OptimizerSettings:
    """Of the optimizer that does the work in the end."""
    rule, names = rule_of(optimizer)
    groups, clips = [], []
    for number, (group, parameters) in enumerate(grouped(optimizer)):
        values = values_of(optimizer, group, names, rule)
        if optimizer._learning_rate is not None:
            values |= {"lr": float(optimizer.get_lr()) * float(group.get("learning_rate", 1.0)), "rate": number}
        groups += _alike(optimizer, rule, group, values, parameters)
        clips.append(group.get("grad_clip") if "grad_clip" in group else optimizer._grad_clip)
    return OptimizerSettings(rule, groups, {**_clip(clips), **_schedule(optimizer._learning_rate)})


def settings_stamp(optimizer: Any) -> Any:
    own = vars(optimizer)
    default = own.get("_default_dict") or {}
    return (
        [(name, _stamp(value)) for name, value in default.items()],
        _stamp(own.get("_grad_clip")),
        _stamp(own.get("regularization")),
        id(own.get("_learning_rate")) if not isinstance(own.get("_learning_rate"), float) else 0,
        [
            (
                [(name, _stamp(value)) for name, value in group.items() if name != "params"],
                [_of_parameter(parameter) for parameter in parameters],
            )
            for group, parameters in grouped(optimizer)
        ],
    )


def _of_parameter(parameter: Any) -> tuple[Any, ...]:
    # A lookup each, of hundreds of parameters in every due step.
    own = parameter.__dict__
    factor = (own.get("optimize_attr") or {}).get("learning_rate", 1.0)
    factor = factor if isinstance(factor, float) else _stamp(factor)
    return id(parameter), id(own.get("regularizer")), factor, own.get("need_clip", True), parameter.stop_gradient


def _stamp(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, paddle.Tensor):
        return id(value), value.inplace_version
    limits = [getattr(value, name, None) for name in ("clip_norm", "max", "min", "_coeff")]
    return id(value), *limits


def rule_of(optimizer: Any) -> tuple[str, Mapping[str, str]]:
    kind = type(optimizer)
    name = kind.__name__
    if name in _RULES and kind is getattr(paddle.optimizer, name, None):
        return _RULES[name]
    return f"{kind.__module__}.{kind.__qualname__}", {}


def grouped(optimizer: Any) -> Iterator[tuple[Mapping[str, Any], Sequence[Any]]]:
    listed = optimizer._parameter_list or []
    if listed and isinstance(listed[0], dict):
        for group in optimizer._param_groups:
            yield group, group["params"]
    else:
        yield {}, listed


def values_of(optimizer: Any, group: Mapping[str, Any], names: Mapping[str, str], rule: str) -> dict[str, Any]:
    own, default = vars(optimizer), getattr(optimizer, "_default_dict", {})
    found = {}
    for name, common in names.items():
        # Once it stepped, the optimizer's own attributes are those of its last group.
        value = group.get(name, default.get(name, own.get(f"_{name}", own.get(name))))
        if value is not None:
            found[common] = value
    if own.get("_amsgrad"):
        found["amsgrad"] = True
    if rule == "Rprop":
        found |= zip(("eta_minus", "eta_plus"), own.get("_etas", ()))
        found |= zip(("step_min", "step_max"), own.get("_learning_rate_range", ()))
    if rule == "LBFGS":
        found |= {name: own[name] for name in _OF_LBFGS if own.get(name) is not None}
    if not names and rule not in ("SGD", "Rprop", "LBFGS"):  # somebody's own class
        found |= {name: value for name, value in default.items() if isinstance(value, (bool, int, float, str))}
    return found


def _alike(
    optimizer: Any, rule: str, group: Mapping[str, Any], values: Mapping[str, Any], parameters: Sequence[Any]
) -> list[OptimizerGroup]:
    """The parameters of a group, parted by how they are treated."""
    found: dict[tuple[Any, ...], tuple[dict[str, Any], list[Any]]] = {}
    for parameter in parameters:
        own = {**_decay(optimizer, rule, group, parameter), **_carried(optimizer, parameter)}
        found.setdefault(tuple(sorted(own.items())), (own, []))[1].append(parameter)
    return [OptimizerGroup({**values, **own}, some) for own, some in found.values()]


def _carried(optimizer: Any, parameter: Any) -> dict[str, Any]:
    """What a parameter carries itself, where it is other than usual."""
    found: dict[str, Any] = {}
    factor: Any = carried_factor(parameter)
    if isinstance(optimizer._param_groups[0], dict):
        factor = 1.0  # the group's, which is in its learning rate already
    ratio = getattr(optimizer, "_lr_ratio", None)
    if ratio is not None:
        factor = factor * ratio(parameter)
    if isinstance(factor, (int, float)) and factor != 1:
        found["lr_factor"] = float(factor)
    if getattr(parameter, "need_clip", True) is False:
        found["clipped"] = False
    return found


def carried_factor(parameter: Any) -> Any:
    """What a parameter's learning rate is multiplied by; where there are groups, it is the group's."""
    return (getattr(parameter, "optimize_attr", None) or {}).get("learning_rate", 1.0)


def _decay(optimizer: Any, rule: str, group: Mapping[str, Any], parameter: Any) -> dict[str, float]:
    """A parameter's weight decay, by its form."""
    default = getattr(optimizer, "_default_dict", {})
    own = getattr(parameter, "regularizer", None)
    regularizer = own if own is not None else optimizer.regularization
    found: dict[str, float] = {}
    if rule == "AdamW":
        asked = optimizer._apply_decay_param_fun
        decays = asked is None or asked(parameter.name)
        found["decay.decoupled"] = _number(group.get("weight_decay", default.get("weight_decay"))) if decays else 0.0
    elif rule == "Lamb":
        without: Callable[[Any], bool] | None = group.get(
            "exclude_from_weight_decay_fn", default.get("exclude_from_weight_decay_fn")
        )
        coefficient = _number(group.get("lamb_weight_decay", default.get("lamb_weight_decay")))
        found["decay.decoupled"] = 0.0 if without is not None and without(parameter) else coefficient
    elif type(optimizer) is paddle.optimizer.Momentum and own is None and regularizer is None:
        # It keeps an L2 decay apart, and adds it inside of its own update.
        found["decay.coupled"] = _number(group.get("regularization_coeff", default.get("regularization_coeff", 0.0)))
        return found
    if regularizer is None:
        return found or {"decay.coupled": 0.0}
    if isinstance(regularizer, (int, float)):
        found["decay.coupled"] = float(regularizer)
    elif isinstance(regularizer, (L1Decay, L2Decay)):
        found["decay.l1" if isinstance(regularizer, L1Decay) else "decay.coupled"] = _number(regularizer._coeff)
    else:
        found["decay.own"] = 1.0  # somebody's own class: what it adds is not known
    return found


def _number(value: Any) -> float:
    return float(value.item() if hasattr(value, "item") else value or 0.0)


def _clip(clips: Sequence[Any]) -> dict[str, Any]:
    """How gradients are clipped; nothing where it can't be said in a few values."""
    first = clips[0] if clips else None
    if any(clip is not first for clip in clips):
        return {}
    if first is None:
        return {"clip.kind": "none"}
    kind = next((name for one, name in _CLIPS if type(first) is one), None)
    if kind is None:
        return {"clip.kind": f"{type(first).__module__}.{type(first).__qualname__}"}
    if kind == "value":
        found = {"clip.kind": kind, "clip.limit": float(first.max)}
        return found if first.min == -first.max else {**found, "clip.lowest": float(first.min)}
    found = {"clip.kind": kind, "clip.limit": float(first.clip_norm), "clip.norm_type": 2.0}
    # Each group is clipped by its own norm.
    return {**found, "clip.by_group": True} if kind == "global_norm" and len(clips) > 1 else found


def _schedule(rate: Any) -> dict[str, Any]:
    if not isinstance(rate, paddle.optimizer.lr.LRScheduler):
        return {}
    found: dict[str, Any] = {"schedule": type(rate).__name__}
    for name, value in vars(rate).items():
        items = value if isinstance(value, (list, tuple)) else [value]
        if (
            name not in _STATE
            and not name.startswith("_")
            and all(isinstance(x, (bool, int, float, str)) for x in items)
        ):
            found[f"schedule.{name}"] = value
    return found
