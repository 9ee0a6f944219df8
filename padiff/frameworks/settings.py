"""Hyper-parameters of layers under common names, and the conventions of each framework."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from padiff.system.terminal import warn

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
_TAKES_BATCH = {"batch_first": "batch_first", "time_major": "batch_first"}
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
    "rnn": _ACTIVATES | _TAKES_BATCH,
    "simplernn": _ACTIVATES | _TAKES_BATCH,
    "lstm": _TAKES_BATCH,
    "gru": _TAKES_BATCH,
    "multiheadattention": _TAKES_BATCH,
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
            value = bool(value) if bare == "align_corners" else not value if bare == "time_major" else _plain(value)
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


@dataclass(frozen=True)
class Conventions:
    """Conventions of a framework.

    Attributes:
        layer: the framework's word for a layer.
        layout: the layout of the matrix ``weight`` of a linear layer: ``out_in`` or ``in_out``.
        counts_ignored: True if the mean of a cross-entropy counts rows with an ignored label, too, where the ignored
            label is negative and the classes have no weights. Soft labels are then weighted per row, not per class.
        pads_with_zeros: True if an embedding returns zeros for its padding index, whatever its weight contains.
        pools_without_padding: True if average pooling excludes padding from the mean by default.
        pads_first_axis_first: True if a list of paddings of every axis begins with the first axis.
        heads_third: True if the heads in the inputs of attention are the third of four axes, not the second.
        classes_last: True if the classes of a cross-entropy are the last axis, for any number of axes.
        smooth_undivided: True if the smooth L1 loss is not divided by its beta.
        gathers_rows: True if ``gather`` selects whole rows.
        samples_corners: True if ``grid_sample`` aligns corners unless it is told otherwise.
        splits_into: True if the number passed to ``split`` is the number of parts, not the length of a part.
    """

    layer: str
    layout: str
    counts_ignored: bool = False
    pads_with_zeros: bool = False
    pools_without_padding: bool = False
    pads_first_axis_first: bool = False
    heads_third: bool = False
    classes_last: bool = False
    smooth_undivided: bool = False
    gathers_rows: bool = False
    samples_corners: bool = False
    splits_into: bool = False


FRAMEWORKS = {
    "torch": Conventions("module", "out_in"),
    "paddle": Conventions(
        "layer",
        "in_out",
        counts_ignored=True,
        pads_with_zeros=True,
        pools_without_padding=True,
        pads_first_axis_first=True,
        heads_third=True,
        classes_last=True,
        smooth_undivided=True,
        gathers_rows=True,
        samples_corners=True,
        splits_into=True,
    ),
}
_OTHER = Conventions("layer", "in_out")


def conventions_of(framework: str) -> Conventions:
    """Return the conventions of a framework; for an unknown framework, defaults without any special convention."""
    return FRAMEWORKS.get(framework, _OTHER)


def usual_layout(framework: str, slot: str) -> str:
    """Return the usual layout (``out_in`` or ``in_out``) of a matrix whose layer is not known to be linear."""
    return conventions_of(framework).layout if slot == "weight" else "in_out"


def launched(rank: str, world_size: str) -> tuple[int, int]:
    """Return the rank of this process and the number of processes; ``(0, 1)`` if either variable is missing or invalid.

    Args:
        rank: the environment variable of the rank.
        world_size: the environment variable of the number of processes.
    """
    try:
        numbers = int(os.environ[rank]), int(os.environ[world_size])
    except (KeyError, ValueError):
        return 0, 1
    return numbers if 0 <= numbers[0] < numbers[1] else (0, 1)


def warn_of_compiled(paths: Iterable[str], by: str, instead: str) -> None:
    """Warn about compiled layers; name only the outermost of nested ones.

    Args:
        paths: dotted paths from the model, outermost first; the path of the model itself is empty.
        by: the name of the compiler.
        instead: how to train without the compiler.
    """
    outer: list[str] = []
    for path in paths:
        if not any(not above or f"{path}.".startswith(f"{above}.") for above in outer):
            outer.append(path)
    if not outer:
        return
    named = ", ".join(path or "the model itself" for path in outer[:5]) + (", ..." if len(outer) > 5 else "")
    warn(
        f"what {by} compiled is recorded from outside ({named}): its inputs, outputs, weights, gradients and "
        f"updates, but not the outputs of the layers inside, of which compiled code leaves no trace. To see those, "
        f"record a run without: {instead}"
    )
