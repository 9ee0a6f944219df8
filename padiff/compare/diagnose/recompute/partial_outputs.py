"""The computed part of a call's output; convolution and pooling from a layer's settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from padiff.compare.diagnose.kernels import windows


@dataclass(frozen=True)
class Part:
    """A computed output of a call, or a part of an output.

    Attributes:
        values: the computed outputs.
        pick: function that selects the same elements of a recorded output.
        of: function from the picked elements to the computed values, if these depend on the recorded output (as the
            axis of a softmax is not recorded).
    """

    values: np.ndarray
    pick: Callable[[np.ndarray], np.ndarray]
    of: Callable[[np.ndarray], np.ndarray] | None = None

    def cut(self, cut: tuple[Any, ...]) -> Part:
        """Return this part with a `pick` for the whole output, of which this part covers the slice ``cut``."""
        return replace(self, pick=lambda output: self.pick(output[cut]))


def whole(values: np.ndarray) -> Part:
    """Return the part that has all outputs."""
    return Part(values, lambda out: out.reshape(values.shape))


def convolution(
    x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, settings: Mapping[str, Any], most: int
) -> Part:
    """Return a convolution with channels second.

    Args:
        most: most products to compute; of larger convolutions only the first samples and some channels are computed.

    Raises:
        ValueError, KeyError, TypeError: the settings are incomplete, or do not fit the shapes.
    """
    n = x.ndim - 2
    outs, size = len(weight), weight.shape[2:]
    stride, dilation = (_each(settings.get(name, 1), n) for name in ("stride", "dilation"))
    groups = int(settings.get("groups", 1))
    if x.shape[1] != weight.shape[1] * groups or len(size) != n:
        raise ValueError(x.shape)
    pads = _padding(settings.get("padding", 0), size, stride, dilation, n)
    extents = [length + sum(pads[k]) for k, length in enumerate(x.shape[2:])]
    each = math.prod(windows.counted(extents, size, stride, dilation)) * math.prod(weight.shape[1:])
    samples = min(len(x), max(1, most // max(each * outs, 1)))
    channels = np.unique(np.linspace(0, outs - 1, max(1, min(outs, most // max(each * samples, 1)))).astype(np.int64))
    mode = str(settings.get("padding_mode", "zeros"))
    result = windows.conv(x[:samples], weight, stride, pads, dilation, groups, mode, channels)
    if bias is not None:
        result += bias.ravel()[channels].reshape((1, -1) + (1,) * n)
    return Part(result, lambda out: out[:samples, channels])


def pooling(x: np.ndarray, how: str, settings: Mapping[str, Any], shape: tuple[int, ...]) -> Part:
    """Return a pooling with channels second; ``how`` is ``max``, ``avg``, ``adaptivemax`` or ``adaptiveavg``.

    Raises:
        ValueError, KeyError, TypeError: the settings are incomplete, or do not fit the shapes.
    """
    n, by = x.ndim - 2, "max" if how.endswith("max") else "mean"
    if len(shape) != x.ndim:
        raise ValueError(shape)
    if how.startswith("adaptive"):
        return whole(windows.pool_to(x, by, shape[2:]))
    size = _each(settings["kernel_size"], n)
    stride = _each(settings.get("stride", settings["kernel_size"]), n)
    dilation = _each(settings.get("dilation", 1), n)
    pads = _padding(settings.get("padding", 0), size, stride, dilation, n)
    extents = [length + sum(pads[k]) for k, length in enumerate(x.shape[2:])]
    if windows.counted(extents, size, stride, dilation) != [*shape[2:]]:
        raise ValueError(shape)  # the last window is cut off
    if by == "mean" and any(map(sum, pads)) and not isinstance(settings.get("count_include_pad"), bool):
        raise KeyError("count_include_pad")
    exclusive = not settings.get("count_include_pad", True)
    return whole(windows.pool(x, by, size, stride, pads, exclusive, dilation=dilation))


def _each(value: Any, n: int) -> list[int]:
    """Return a setting for each of ``n`` axes."""
    if isinstance(value, (list, tuple)):
        if len(value) != n:
            raise ValueError(value)
        return [int(number) for number in value]
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
        return [(width // 2, width - width // 2) for width in whole_]
    return [(width, width) for width in _each(value, n)]
