"""Settings of paddle's optimizers, under the names that both frameworks share.

Parameters of one paddle group can differ by their own attributes: a regularizer, a factor of the learning rate, an
exclusion from clipping. So this module splits paddle's groups into groups of parameters with the same settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import paddle
from paddle.regularizer import L1Decay, L2Decay

from padiff.frameworks.optimizer_catalog import classes
from padiff.frameworks.optimizing import OptimizerGroup, OptimizerSettings

_CLASSES = classes("paddle")
_OF_LBFGS = ("max_iter", "max_eval", "tolerance_grad", "tolerance_change", "history_size", "line_search_fn")
_CLIPS = (
    (paddle.nn.ClipGradByGlobalNorm, "global_norm"),
    (paddle.nn.ClipGradByNorm, "tensor_norm"),
    (paddle.nn.ClipGradByValue, "value"),
)
# Attributes of a scheduler that are state, not settings.
_STATE = frozenset({"last_lr", "last_epoch", "verbose", "num_bad_epochs", "cooldown_counter", "best", "base_lr"})


def settings(optimizer: Any) -> OptimizerSettings:
    """Return the settings of an optimizer of paddle, not of a wrapper."""
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
    attributes = vars(optimizer)
    default = attributes.get("_default_dict") or {}
    return (
        [(name, _stamp(value)) for name, value in default.items()],
        _stamp(attributes.get("_grad_clip")),
        _stamp(attributes.get("regularization")),
        id(attributes.get("_learning_rate")) if not isinstance(attributes.get("_learning_rate"), float) else 0,
        [
            (
                [(name, _stamp(value)) for name, value in group.items() if name != "params"],
                [_of_parameter(parameter) for parameter in parameters],
            )
            for group, parameters in grouped(optimizer)
        ],
    )


def _of_parameter(parameter: Any) -> tuple[Any, ...]:
    # One lookup each, because every due step calls this for hundreds of parameters.
    attributes = parameter.__dict__
    factor = (attributes.get("optimize_attr") or {}).get("learning_rate", 1.0)
    factor = factor if isinstance(factor, float) else _stamp(factor)
    return (
        id(parameter),
        id(attributes.get("regularizer")),
        factor,
        attributes.get("need_clip", True),
        parameter.stop_gradient,
    )


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
    if name in _CLASSES and kind is getattr(paddle.optimizer, name, None):
        rule, known = _CLASSES[name]
        return rule, known.settings
    return f"{kind.__module__}.{kind.__qualname__}", {}


def grouped(optimizer: Any) -> Iterator[tuple[Mapping[str, Any], Sequence[Any]]]:
    listed = optimizer._parameter_list or []
    if listed and isinstance(listed[0], dict):
        for group in optimizer._param_groups:
            yield group, group["params"]
    else:
        yield {}, listed


def values_of(optimizer: Any, group: Mapping[str, Any], names: Mapping[str, str], rule: str) -> dict[str, Any]:
    attributes, default = vars(optimizer), getattr(optimizer, "_default_dict", {})
    values = {}
    for name, common in names.items():
        # After a step, the optimizer's own attributes have the values of its last group.
        value = group.get(name, default.get(name, attributes.get(f"_{name}", attributes.get(name))))
        if value is not None:
            values[common] = value
    if attributes.get("_amsgrad"):
        values["amsgrad"] = True
    if rule == "Rprop":
        values |= zip(("eta_minus", "eta_plus"), attributes.get("_etas", ()))
        values |= zip(("step_min", "step_max"), attributes.get("_learning_rate_range", ()))
    if rule == "LBFGS":
        values |= {name: attributes[name] for name in _OF_LBFGS if attributes.get(name) is not None}
    if not names and rule not in ("SGD", "Rprop", "LBFGS"):  # a user's own class
        values |= {name: value for name, value in default.items() if isinstance(value, (bool, int, float, str))}
    return values


def _alike(
    optimizer: Any, rule: str, group: Mapping[str, Any], values: Mapping[str, Any], parameters: Sequence[Any]
) -> list[OptimizerGroup]:
    """Split the parameters of a group into groups with the same settings."""
    groups: dict[tuple[Any, ...], tuple[dict[str, Any], list[Any]]] = {}
    for parameter in parameters:
        settings = {**_decay(optimizer, rule, group, parameter), **_carried(optimizer, parameter)}
        groups.setdefault(tuple(sorted(settings.items())), (settings, []))[1].append(parameter)
    return [OptimizerGroup({**values, **settings}, members) for settings, members in groups.values()]


def _carried(optimizer: Any, parameter: Any) -> dict[str, Any]:
    """Return a single parameter's learning-rate factor and exclusion from clipping, as far as they are not default."""
    settings: dict[str, Any] = {}
    factor: Any = carried_factor(parameter)
    if isinstance(optimizer._param_groups[0], dict):
        factor = 1.0  # the learning rate already includes the factor of the group
    ratio = getattr(optimizer, "_lr_ratio", None)
    if ratio is not None:
        factor = factor * ratio(parameter)
    if isinstance(factor, (int, float)) and factor != 1:
        settings["lr_factor"] = float(factor)
    if getattr(parameter, "need_clip", True) is False:
        settings["clipped"] = False
    return settings


def carried_factor(parameter: Any) -> Any:
    """Return the factor of a parameter's learning rate; in an optimizer with groups, this is the group's factor."""
    return (getattr(parameter, "optimize_attr", None) or {}).get("learning_rate", 1.0)


def _decay(optimizer: Any, rule: str, group: Mapping[str, Any], parameter: Any) -> dict[str, float]:
    """Return a parameter's weight decay, by kind: ``decay.coupled``, ``.decoupled``, ``.l1`` or ``.own``."""
    default = getattr(optimizer, "_default_dict", {})
    parameter_regularizer = getattr(parameter, "regularizer", None)
    regularizer = parameter_regularizer if parameter_regularizer is not None else optimizer.regularization
    decay: dict[str, float] = {}
    if rule == "AdamW":
        predicate = optimizer._apply_decay_param_fun
        decays = predicate is None or predicate(parameter.name)
        decay["decay.decoupled"] = _number(group.get("weight_decay", default.get("weight_decay"))) if decays else 0.0
    elif rule == "Lamb":
        without: Callable[[Any], bool] | None = group.get(
            "exclude_from_weight_decay_fn", default.get("exclude_from_weight_decay_fn")
        )
        coefficient = _number(group.get("lamb_weight_decay", default.get("lamb_weight_decay")))
        decay["decay.decoupled"] = 0.0 if without is not None and without(parameter) else coefficient
    elif type(optimizer) is paddle.optimizer.Momentum and parameter_regularizer is None and regularizer is None:
        # Momentum stores an L2 decay separately, and adds it inside of its own update.
        decay["decay.coupled"] = _number(group.get("regularization_coeff", default.get("regularization_coeff", 0.0)))
        return decay
    if regularizer is None:
        return decay or {"decay.coupled": 0.0}
    if isinstance(regularizer, (int, float)):
        decay["decay.coupled"] = float(regularizer)
    elif isinstance(regularizer, (L1Decay, L2Decay)):
        decay["decay.l1" if isinstance(regularizer, L1Decay) else "decay.coupled"] = _number(regularizer._coeff)
    else:
        decay["decay.own"] = 1.0  # a user's own class: its effect is unknown
    return decay


def _number(value: Any) -> float:
    return float(value.item() if hasattr(value, "item") else value or 0.0)


def _clip(clips: Sequence[Any]) -> dict[str, Any]:
    """Return the settings of gradient clipping; empty if the groups clip differently."""
    first = clips[0] if clips else None
    if any(clip is not first for clip in clips):
        return {}
    if first is None:
        return {"clip.kind": "none"}
    kind = next((name for cls, name in _CLIPS if type(first) is cls), None)
    if kind is None:
        return {"clip.kind": f"{type(first).__module__}.{type(first).__qualname__}"}
    if kind == "value":
        settings = {"clip.kind": kind, "clip.limit": float(first.max)}
        return settings if first.min == -first.max else {**settings, "clip.lowest": float(first.min)}
    settings = {"clip.kind": kind, "clip.limit": float(first.clip_norm), "clip.norm_type": 2.0}
    # Each group is clipped by its own norm.
    return {**settings, "clip.by_group": True} if kind == "global_norm" and len(clips) > 1 else settings


def _schedule(rate: Any) -> dict[str, Any]:
    if not isinstance(rate, paddle.optimizer.lr.LRScheduler):
        return {}
    settings: dict[str, Any] = {"schedule": type(rate).__name__}
    for name, value in vars(rate).items():
        items = value if isinstance(value, (list, tuple)) else [value]
        if (
            name not in _STATE
            and not name.startswith("_")
            and all(isinstance(x, (bool, int, float, str)) for x in items)
        ):
            settings[f"schedule.{name}"] = value
    return settings
