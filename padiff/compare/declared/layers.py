"""Hyper-parameters that differ between paired layers, and layers that train in one run only."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from padiff.align import Alignment, LayerPair
from padiff.compare.declared.fixes import layer_fix
from padiff.model import equivalents
from padiff.records import Both, Difference, Layer

# Settings that change the computation or the training, even by less than rounding; a dropout rate does not count.
_TELLING = frozenset(
    {
        "eps",
        "momentum",
        "approximate",
        "slope",
        "alpha",
        "padding_mode",
        "num_heads",
        "num_groups",
        "groups",
        "rope_theta",
    }
)
_MOMENTUM = "counted as torch does: paddle's own `momentum` is 1 minus it"


def layer_notes(alignment: Alignment) -> tuple[str, ...]:
    """Return the hyper-parameters that differ between paired layers, in words."""
    notes = ((pair, [_text(name, pair) for name in differing(pair)]) for pair in alignment.pairs)
    return tuple(f"{pair.reference.path} / {pair.candidate.path}: {', '.join(texts)}" for pair, texts in notes if texts)


def _text(name: str, pair: LayerPair) -> str:
    values = pair.map(lambda layer: layer.settings[name])
    return f"{name} {values.reference} against {values.candidate}"


def differing(pair: LayerPair) -> list[str]:
    """Return the names of the settings that differ between two layers."""
    reference, candidate = pair.map(lambda layer: layer.settings)
    return [
        name
        for name, value in reference.items()
        if name in candidate and not _equal(name, value, candidate[name])
        # A convolution over patches and a linear layer compute the same with different sizes.
        if name not in _SIZES or equivalents.kind(pair.reference) == equivalents.kind(pair.candidate)
        # The setting has no effect without padding.
        if name != "count_include_pad" or any(_pads(layer) for layer in pair)
    ]


def _equal(name: str, a: object, b: object) -> bool:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=1e-9)
    return a == b or (type(a) is not type(b) and name != "padding_idx")


def _pads(layer: Layer) -> bool:
    return bool(layer.settings.get("padding") or layer.settings.get("ceil_mode"))


# Numbers of input and output features.
_SIZES = frozenset({"inputs", "outputs"})
# Settings that only have an effect in training mode.
_OF_TRAINING = frozenset({"p", "dropout"})


def layer_differences(
    alignment: Alignment, settings: Both[Mapping[str, Any]], called: Both[Collection[str]], framework: str
) -> Iterator[Difference]:
    """Yield the settings of layers that differ; a difference counts if both layers ran.

    Args:
        framework: the candidate's framework.
    """
    modes = settings.map(modes_of)
    for pair in alignment.pairs:
        names = differing(pair)
        if not names:
            continue
        evaluates = [mode is not None and not trains(layer, *mode) for mode, layer in zip(modes, pair)]
        names = [name for name in names if name not in _OF_TRAINING or not all(evaluates)]
        ran = pair.reference.path in called.reference and pair.candidate.path in called.candidate
        for name in names:
            telling = name in _TELLING or name == "count_include_pad"
            yield Difference(
                name,
                pair.map(lambda layer, name=name: layer.settings[name]),  # type: ignore[misc]
                "forward",
                "layer_setting",
                about=_sides(pair),
                changes=ran and telling,
                fix=layer_fix(framework, pair.candidate, name, pair.reference.settings[name]),
                layers=pair.map(lambda layer: (layer.path,)),
                note=_MOMENTUM if name == "momentum" else "",
            )


def mode_differences(
    alignment: Alignment, settings: Both[Mapping[str, Any]], called: Both[Collection[str]]
) -> Iterator[Difference]:
    """Yield the layers that train in one run and evaluate in the other, if the mode changes the computation."""
    modes = settings.map(modes_of)
    if modes.reference is None or modes.candidate is None:
        return
    for pair in alignment.pairs:
        if pair.reference.path not in called.reference or pair.candidate.path not in called.candidate:
            continue
        training = Both(
            trains(pair.reference, *modes.reference),
            trains(pair.candidate, *modes.candidate),
        )
        if training.reference != training.candidate and any(has_modes(layer) for layer in pair):
            path = pair.candidate.path
            yield Difference(
                "mode",
                training.map(lambda on: "train" if on else "eval"),
                "forward",
                "mode",
                about=_sides(pair),
                fix=_mode_fix(path, training.reference),
                layers=pair.map(lambda layer: (layer.path,)),
            )


def _sides(pair: LayerPair) -> str:
    reference, candidate = pair.map(lambda layer: f"{layer.path} ({layer.type})")
    return f"{reference} against {candidate}"


def _mode_fix(path: str, training: bool) -> str:
    suffix = "" if path.startswith("(") else f".{path}"
    if not re.fullmatch(r"(\.[A-Za-z0-9]\w*)*", suffix, re.ASCII):
        return ""  # text from a run must not become code
    return f"model{suffix}.{'train' if training else 'eval'}()"


def modes_of(settings: Mapping[str, Any]) -> tuple[bool, frozenset[str]] | None:
    """Return True if the model trains, and the paths of the layers in the opposite mode; `None` if unknown."""
    if not isinstance(settings.get("training"), bool):
        return None
    others = settings.get("training.others")
    return settings["training"], frozenset(others if isinstance(others, list) else ())


def trains(layer: Layer, training: bool, others: Collection[str]) -> bool:
    """Return True if a layer trains, given the result of `modes_of`."""
    on = training is not (layer.path in others)
    # With global statistics, a BatchNorm uses its running statistics in both modes.
    return on and not (_is_batch_norm(layer) and layer.settings.get("use_global_stats") is True)


def has_modes(layer: Layer) -> bool:
    """Return True if a layer computes differently in training."""
    kind = equivalents.kind(layer)
    if _is_batch_norm(layer):
        return True
    if "dropout" in kind:
        return bool(layer.settings.get("p", 0) != 0)
    return bool(equivalents.is_composite(kind) and layer.settings.get("dropout", 0) != 0)


def _is_batch_norm(layer: Layer) -> bool:
    return equivalents.kind(layer).startswith("batchnorm")
