"""Convolution and pooling, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Part:
    """What a call gives, or a part of it.

    Attributes:
        values: the outputs that were computed.
        pick: takes the same ones of a recorded output.
        of: where the values depend on what the output shows (an axis that is not recorded): makes them of what was
            picked.
    """

    values: np.ndarray
    pick: Callable[[np.ndarray], np.ndarray]
    of: Callable[[np.ndarray], np.ndarray] | None = None

    def cut(self, cut: tuple[Any, ...]) -> Part:
        """The same for an output of which this is a part."""
        return replace(self, pick=lambda output: self.pick(output[cut]))


def whole(values: np.ndarray) -> Part:
    """All outputs."""
    return Part(values, lambda out: out.reshape(values.shape))


_PADS = {"zeros": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap"}


def convolution(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, settings: Mapping[str, Any], most: int
) -> Part:
    """A convolution, channels second.

    Args:
        most: products that are added up; of larger ones the first samples and some channels are computed.

    Raises:
        ValueError, KeyError, TypeError: the settings do not say all of it.
    """
    n = x.ndim - 2
    outs, size = len(weight), weight.shape[2:]
    stride, dilation = (_each(settings.get(name, 1), n) for name in ("stride", "dilation"))
    groups = int(settings.get("groups", 1))
    if x.shape[1] != weight.shape[1] * groups or len(size) != n:
        raise ValueError(x.shape)
    pads = _padding(settings.get("padding", 0), size, stride, dilation, n)
    x = np.pad(x, [(0, 0), (0, 0), *pads], _PADS[settings.get("padding_mode", "zeros")])  # type: ignore[call-overload]
    lengths = [(x.shape[2 + k] - dilation[k] * (size[k] - 1) - 1) // stride[k] + 1 for k in range(n)]
    each = math.prod(lengths) * math.prod(weight.shape[1:])
    samples = min(len(x), max(1, most // max(each * outs, 1)))
    channels = np.unique(np.linspace(0, outs - 1, max(1, min(outs, most // max(each * samples, 1)))).astype(np.int64))
    x, per_group = x[:samples], outs // groups
    made = np.zeros((samples, len(channels), *lengths))
    for place in product(*(range(length) for length in size)):
        cut = _windows(place, stride, dilation, lengths)
        seen = x[cut].reshape(samples, groups, weight.shape[1], -1)
        at = weight[_at(place)]
        for group in range(groups):
            own = np.flatnonzero(channels // per_group == group)
            if len(own):
                found = np.matmul(at[channels[own]], seen[:, group])
                made[:, own] += found.reshape(samples, len(own), *lengths)
    if bias is not None:
        made += bias.ravel()[channels].reshape((1, -1) + (1,) * n)
    return Part(made, lambda out: out[:samples, channels])


def pooling(x: np.ndarray, how: str, settings: Mapping[str, Any], shape: tuple[int, ...]) -> Part:
    """Pooling, channels second; ``how`` is ``max``, ``avg``, ``adaptivemax`` or ``adaptiveavg``.

    Raises:
        ValueError, KeyError, TypeError: the settings do not say all of it.
    """
    n = x.ndim - 2
    if len(shape) != x.ndim:
        raise ValueError(shape)
    if how.startswith("adaptive"):
        for k, length in enumerate(shape[2:]):
            x = _adaptive(x, 2 + k, length, np.max if how.endswith("max") else np.mean)
        return whole(x)
    size = _each(settings["kernel_size"], n)
    stride = _each(settings.get("stride", settings["kernel_size"]), n)
    dilation = _each(settings.get("dilation", 1), n)
    pads = _padding(settings.get("padding", 0), size, stride, dilation, n)
    lengths = [(x.shape[2 + k] + sum(pads[k]) - dilation[k] * (size[k] - 1) - 1) // stride[k] + 1 for k in range(n)]
    if tuple(lengths) != tuple(shape[2:]):
        raise ValueError(shape)  # the last window is not a whole one
    around = [(0, 0), (0, 0), *pads]
    fill = -np.inf if how == "max" else 0.0
    filled, inside = np.pad(x, around, constant_values=fill), np.pad(np.ones_like(x[:1, :1]), around)
    found = np.full((*x.shape[:2], *lengths), fill)
    counts = np.zeros((1, 1, *lengths))
    for place in product(*(range(length) for length in size)):
        cut = _windows(place, stride, dilation, lengths)
        seen = filled[cut]
        found = np.maximum(found, seen) if how == "max" else found + seen
        counts += inside[cut]
    if how == "max":
        return whole(found)
    padded = any(sum(pad) for pad in pads)
    if padded and not isinstance(settings.get("count_include_pad"), bool):
        raise KeyError("count_include_pad")
    return whole(found / (counts if padded and not settings["count_include_pad"] else math.prod(size)))


def _at(place: tuple[Any, ...]) -> Any:
    """An index of the last axes."""
    return (..., *place)


def _windows(place: tuple[int, ...], stride: list[int], dilation: list[int], lengths: list[int]) -> Any:
    """Where a place of the window lies, over all windows."""
    starts = [one * by for one, by in zip(place, dilation)]
    return _at(
        tuple(slice(start, start + by * (length - 1) + 1, by) for start, by, length in zip(starts, stride, lengths))
    )


def _adaptive(x: np.ndarray, axis: int, length: int, take: Callable[..., Any]) -> np.ndarray:
    extent = x.shape[axis]
    edges = [(k * extent // length, -(-(k + 1) * extent // length)) for k in range(length)]
    parts = [take(np.take(x, range(a, b), axis=axis), axis=axis, keepdims=True) for a, b in edges]
    return np.concatenate(parts, axis=axis)


def _each(value: Any, n: int) -> list[int]:
    """A setting for each axis."""
    if isinstance(value, (list, tuple)):
        if len(value) != n:
            raise ValueError(value)
        return [int(one) for one in value]
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(value)
    return [value] * n


def _padding(value: Any, size: Any, stride: list[int], dilation: list[int], n: int) -> list[tuple[int, int]]:
    if isinstance(value, str):
        if value.lower() == "valid":
            return [(0, 0)] * n
        if value.lower() != "same" or set(stride) != {1}:
            raise ValueError(value)
        whole_ = [dilation[k] * (size[k] - 1) for k in range(n)]
        return [(one // 2, one - one // 2) for one in whole_]
    return [(one, one) for one in _each(value, n)]
