"""What of a call is computed; convolution and pooling as a layer is set to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from padiff.compare.diagnose.kernels import windows


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
    extents = [length + sum(pads[k]) for k, length in enumerate(x.shape[2:])]
    each = math.prod(windows.counted(extents, size, stride, dilation)) * math.prod(weight.shape[1:])
    samples = min(len(x), max(1, most // max(each * outs, 1)))
    channels = np.unique(np.linspace(0, outs - 1, max(1, min(outs, most // max(each * samples, 1)))).astype(np.int64))
    mode = str(settings.get("padding_mode", "zeros"))
    made = windows.conv(x[:samples], weight, stride, pads, dilation, groups, mode, channels)
    if bias is not None:
        made += bias.ravel()[channels].reshape((1, -1) + (1,) * n)
    return Part(made, lambda out: out[:samples, channels])


def pooling(x: np.ndarray, how: str, settings: Mapping[str, Any], shape: tuple[int, ...]) -> Part:
    """Pooling, channels second; ``how`` is ``max``, ``avg``, ``adaptivemax`` or ``adaptiveavg``.

    Raises:
        ValueError, KeyError, TypeError: the settings do not say all of it.
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
        raise ValueError(shape)  # the last window is not a whole one
    if by == "mean" and any(map(sum, pads)) and not isinstance(settings.get("count_include_pad"), bool):
        raise KeyError("count_include_pad")
    exclusive = not settings.get("count_include_pad", True)
    return whole(windows.pool(x, by, size, stride, pads, exclusive, dilation=dilation))


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
