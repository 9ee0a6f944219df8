"""Pairs of buffers of two paired layers whose names differ: by the statistic, else by shape and order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from padiff.align import ParameterPair, Slice
from padiff.model import equivalents
from padiff.records import Both, Layer, Parameter

#: Parts of names of the statistics of a normalisation.
_STATISTICS = {"mean": ("mean", "mu", "avg"), "variance": ("var", "sigma2"), "deviation": ("std", "sigma")}
_FLOATS = ("float", "bfloat")


def buffers_of(layer: Layer) -> list[Parameter]:
    """Return the buffers of a layer that both frameworks have."""
    return [
        p
        for p in layer.parameters
        if p.role == "buffer" and not p.tied_to and equivalents.slot(p.slot) not in equivalents.ONE_SIDED
    ]


def pair_buffers(layers: Both[Layer], buffers: Both[list[Parameter]]) -> list[ParameterPair]:
    """Pair buffers of two layers that have no partner of their name.

    Buffers of one statistic and shape are pairs, and buffers of one shape that share a word of their names; else
    buffers of one shape and kind of numbers, in the order of definition, if both layers have equally many of them.
    """
    waiting = buffers.map(list)
    pairs: list[Both[Parameter]] = []
    words = {word for p in waiting.reference for word in p.slot.lower().split("_")}
    keys_of: list[Callable[[Parameter], tuple[object, ...] | None]] = [_statistic]
    keys_of += [partial(_with_word, word) for word in sorted(words)]
    for key in (*keys_of, _form):
        keys = {key(p) for side in waiting for p in side} - {None}
        for value in sorted(keys, key=str):
            members = waiting.map(lambda side, key=key, value=value: [p for p in side if key(p) == value])  # type: ignore[misc]
            if len(members.reference) == len(members.candidate):
                pairs += [Both(*both) for both in zip(*members)]
        paired = {id(p) for pair in pairs for p in pair}
        waiting = waiting.map(lambda side, paired=paired: [p for p in side if id(p) not in paired])  # type: ignore[misc]
    return [ParameterPair(*(_whole(layer, p) for layer, p in layers.zip(pair))) for pair in pairs]


def _statistic(parameter: Parameter) -> tuple[object, ...] | None:
    """Return the statistic that a buffer's name says, with the buffer's form; `None` if the name says none."""
    name = parameter.slot.lower()
    statistics = [key for key, parts in _STATISTICS.items() if any(part in name for part in parts)]
    return (statistics[-1], *_form(parameter)) if statistics else None


def _with_word(word: str, parameter: Parameter) -> tuple[object, ...] | None:
    """Return a buffer's form if its name has a word; else `None`."""
    return _form(parameter) if word in parameter.slot.lower().split("_") else None


def _form(parameter: Parameter) -> tuple[object, ...]:
    """Return the shape and the kind of numbers of a buffer."""
    return parameter.shape, parameter.dtype.startswith(_FLOATS), "bool" in parameter.dtype


def _whole(layer: Layer, parameter: Parameter) -> tuple[Slice, ...]:
    return (Slice(layer.path, parameter.slot, parameter.shape),)


def names_of(layer: Layer, buffers: Sequence[Parameter]) -> list[str]:
    """Return buffers with their shapes, as ``layer/slot [shape]``."""
    return [f"{layer.path}/{p.slot} {list(p.shape)}" for p in buffers]
