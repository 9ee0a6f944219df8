"""Hyper-parameters of layers, under the names that both frameworks share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# A framework's name of a setting, without leading underscores -> the common name.
_COMMON = {
    "epsilon": "eps",
    "variance_epsilon": "eps",
    "layer_norm_eps": "eps",
    "layer_norm_epsilon": "eps",
    "rms_norm_eps": "eps",
    "norm_eps": "eps",
    "attention_dropout": "dropout",
    "attn_dropout": "dropout",
    "rope_base": "rope_theta",
    "negative_slope": "slope",
    "ksize": "kernel_size",
    "rate": "p",
    "in_features": "inputs",
    "out_features": "outputs",
    "in_channels": "inputs",
    "out_channels": "outputs",
    "num_attention_heads": "num_heads",
    "n_head": "num_heads",
    "n_heads": "num_heads",
    "nhead": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "n_kv_heads": "num_kv_heads",
}

# Settings that change the layer's result; only these are compared. Most exist in both frameworks.
_KEPT = frozenset((
    "eps", "momentum", "p", "stride", "dilation", "groups", "padding", "padding_mode", "approximate", "slope",
    "ceil_mode", "num_heads", "num_kv_heads", "num_groups", "inputs", "outputs", "kernel_size", "alpha", "beta", "act",
    "count_include_pad", "padding_idx", "dropout", "use_global_stats", "rope_theta",
))  # fmt: skip


_RESIZES = {"mode": "mode", "align_corners": "align_corners", "scale_factor": "scale_factor", "size": "size"}
_SHRINKS = {"lambd": "lambd", "threshold": "lambd"}
_ACTIVATES = {"nonlinearity": "nonlinearity", "activation": "nonlinearity"}
_NORMALIZES = {"norm_first": "norm_first", "normalize_before": "norm_first"}
# Settings of single classes of the frameworks, whose names mean anything elsewhere: the class, in small letters and
# without its dimensions, and its attributes with their common names.
_OF_CLASSES: Mapping[str, Mapping[str, str]] = {
    "upsample": _RESIZES,
    "upsamplingbilinear": _RESIZES,
    "upsamplingnearest": _RESIZES,
    "pixelshuffle": {"upscale_factor": "upscale_factor"},
    "pixelunshuffle": {"downscale_factor": "downscale_factor"},
    "hardtanh": {"min_val": "min_val", "max_val": "max_val", "min": "min_val", "max": "max_val"},
    "threshold": {"threshold": "threshold", "value": "value"},
    "softplus": {"threshold": "threshold"},
    "hardshrink": _SHRINKS,
    "softshrink": _SHRINKS,
    "rrelu": {"lower": "lower", "upper": "upper"},
    "localresponsenorm": {"size": "size", "k": "k"},
    "lppool": {"norm_type": "norm_type"},
    "avgpool": {"divisor_override": "divisor_override", "divisor": "divisor_override"},
    "constantpad": {"value": "value"},
    "embedding": {"max_norm": "max_norm"},
    "embeddingbag": {"max_norm": "max_norm"},
    "rnncell": _ACTIVATES,
    "simplernncell": _ACTIVATES,
    "rnn": _ACTIVATES,
    "simplernn": _ACTIVATES,
    "transformerencoderlayer": _NORMALIZES,
    "transformerdecoderlayer": _NORMALIZES,
    **{f"adaptive{kind}pool": {"output_size": "output_size"} for kind in ("avg", "max")},
}

#: Common names of all settings of layers.
LAYER_SETTINGS = _KEPT | {name for names in _OF_CLASSES.values() for name in names.values()}


def settings_of_class(cls: type) -> Mapping[str, str]:
    """Return the attributes that only this class of a framework has as settings, with their common names."""
    if not cls.__module__.startswith(("torch.nn.", "paddle.nn.")):
        return {}
    return _OF_CLASSES.get(re.sub(r"[123]d$", "", cls.__name__.lower()), {})


def plain_settings(attributes: Mapping[str, Any], cls: type = object) -> dict[str, Any]:
    """Return the plain-valued settings among a layer's attributes, under common names.

    A sequence of numbers becomes a list, or one number if all its items are equal, so that ``stride=(2, 2)`` and
    ``stride=2`` are the same.
    """
    settings: dict[str, Any] = {}
    of_class = settings_of_class(cls)
    for name, value in attributes.items():
        bare = name.lstrip("_")
        if bare in of_class:
            # Without a value Upsample's corners are not aligned.
            value = bool(value) if bare == "align_corners" else _plain(value)
            if value is not None:
                settings.setdefault(of_class[bare], value)
            continue
        common = _COMMON.get(bare, bare)
        if common in _KEPT and common not in settings:
            value = "none" if common == "padding_idx" and value is None else _plain(value)
            if value is not None:
                settings[common] = value
    # Attention layers of model libraries may have the number of heads only in the configuration of the whole model.
    if "num_heads" not in settings and attributes.get("config") is not None:
        settings |= _heads(attributes["config"])
    # Rotary embeddings may have the base of their table only in that configuration.
    if "rope_theta" not in settings and "inv_freq" in (attributes.get("_buffers") or ()):
        settings |= _rope(attributes.get("config"))
    return settings


def _rope(config: Any) -> dict[str, Any]:
    parameters = getattr(config, "rope_parameters", None)
    theta = parameters.get("rope_theta") if isinstance(parameters, Mapping) else getattr(config, "rope_theta", None)
    return {"rope_theta": float(theta)} if isinstance(theta, (int, float)) and not isinstance(theta, bool) else {}


def _heads(config: Any) -> dict[str, Any]:
    heads: dict[str, Any] = {}
    for name in ("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"):
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            heads.setdefault(_COMMON.get(name, name), value)
    return heads


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)) and value and all(isinstance(item, (int, float)) for item in value):
        return value[0] if len(set(value)) == 1 else list(value)
    return None
