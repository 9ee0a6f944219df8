"""Window operations in numpy: convolutions, pooling, padding, interpolation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

_MODES = {"zeros": "constant", "constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap",
          "edge": "edge"}  # fmt: skip
#: Most multiplications of a convolution: some tenths of a second.
_MOST = 3e9

#: Kinds of interpolation that `resized` computes, by the frameworks' modes.
RESIZED = {"nearest": "nearest", "bilinear": "linear", "linear": "linear", "trilinear": "linear"}


def each(value: int | Sequence[int], count: int) -> list[int]:
    """Return a number for each of ``count`` axes, from one number or a sequence."""
    if isinstance(value, (list, tuple)):
        return [int(n) for n in value] if len(value) == count else [int(value[0])] * count
    return [int(value)] * count  # type: ignore[arg-type]


def pad(x: np.ndarray, pads: Sequence[Sequence[int]], mode: str = "zeros", value: float = 0.0) -> np.ndarray:
    """Return the array padded by (before, after) for each axis; negative numbers crop."""
    pads = [tuple(pair) for pair in pads]
    if any(n < 0 for pair in pads for n in pair):
        cut = tuple(slice(max(-a, 0), x.shape[k] - max(-b, 0)) for k, (a, b) in enumerate(pads))
        x, pads = x[cut], [(max(a, 0), max(b, 0)) for a, b in pads]
    if _MODES[mode] == "constant":
        return np.pad(x, pads, constant_values=value)
    return np.pad(x, pads, mode=_MODES[mode])  # type: ignore[call-overload,no-any-return]


def conv(
    x: np.ndarray, weight: np.ndarray, stride: Sequence[int], padding: Sequence[Sequence[int]], dilation: Sequence[int],
    groups: int = 1, mode: str = "zeros", channels: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """Return a convolution over the axes after the second, for all output channels or those in ``channels``.

    Raises:
        ValueError: the convolution has too many multiplications.
    """
    x = pad(x, [(0, 0), (0, 0), *padding], mode)
    out = counted(x.shape[2:], weight.shape[2:], stride, dilation)
    chosen = np.arange(len(weight)) if channels is None else channels
    if math.prod(out) * len(x) * len(chosen) * math.prod(weight.shape[1:]) > _MOST:
        raise ValueError("too large")
    result = np.zeros((len(x), len(chosen), *out))
    per_in, per_out = weight.shape[1], len(weight) // groups
    members = [np.flatnonzero(chosen // per_out == group) for group in range(groups)]
    for place in itertools.product(*(range(k) for k in weight.shape[2:])):
        patches = x[_strided(place, stride, dilation, out)].reshape(len(x), groups, per_in, -1)
        index: Any = (..., *place)
        kernel = weight[index]
        for group, outputs in enumerate(members):
            if len(outputs):
                result[:, outputs] += np.matmul(kernel[chosen[outputs]], patches[:, group]).reshape(
                    len(x), len(outputs), *out
                )
    return result


def counted(extents: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Return the count of windows along each axis."""
    return [(n - (k - 1) * d - 1) // s + 1 for n, k, s, d in zip(extents, kernel, stride, dilation)]


def _strided(place: Sequence[int], stride: Sequence[int], dilation: Sequence[int], out: Sequence[int]) -> Any:
    """Return the index of the last axes that selects one place of the window in all windows."""
    starts = [p * d for p, d in zip(place, dilation)]
    return (..., *(slice(a, a + (n - 1) * s + 1, s) for a, n, s in zip(starts, out, stride)))


def conv_transpose(
    x: np.ndarray, weight: np.ndarray, stride: Sequence[int], padding: Sequence[int], output_padding: Sequence[int],
    dilation: Sequence[int], groups: int = 1,
) -> np.ndarray:  # fmt: skip
    """Return a transposed convolution over the axes after the second."""
    kernel = weight.shape[2:]
    full = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(x.shape[2:], stride, kernel, dilation)]
    per_in, per_out = x.shape[1] // groups, weight.shape[1]
    grown = [n + o for n, o in zip(full, output_padding)]
    result = np.zeros((len(x), per_out * groups, *grown))
    for place in itertools.product(*(range(k) for k in kernel)):
        cut = tuple(
            slice(p * d, p * d + (n - 1) * s + 1, s) for p, d, n, s in zip(place, dilation, x.shape[2:], stride)
        )
        for g in range(groups):
            part = x[:, g * per_in : (g + 1) * per_in]
            weight_index: Any = (slice(g * per_in, (g + 1) * per_in), slice(None), *place)
            result_index: Any = (slice(None), slice(g * per_out, (g + 1) * per_out), *cut)
            w = weight[weight_index]
            result[result_index] += np.moveaxis(np.tensordot(part, w, axes=(1, 0)), -1, 1)
    inner = tuple(slice(p, n - p) for p, n in zip(padding, grown))
    return np.asarray(result[(slice(None), slice(None), *inner)])


def pool(
    x: np.ndarray, by: str, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int | Sequence[int]],
    exclusive: bool = False, ceil: bool = False, dilation: Sequence[int] = (),
) -> np.ndarray:  # fmt: skip
    """Return the maximum (``max``) or the mean of each window; ``exclusive`` leaves padding out of the mean.

    Args:
        padding: for each axis one number for both ends, or (before, after).
        ceil: True to add a window that is cut off at the end.
    """
    dilation = dilation or [1] * len(kernel)
    pads = [(p, p) if isinstance(p, int) else (p[0], p[1]) for p in padding]
    sizes, after = [], []
    for n, k, s, d, (a, b) in zip(x.shape[2:], kernel, stride, dilation, pads):
        span = (k - 1) * d + 1
        count = (n + a + b - span) / s + 1
        windows = math.ceil(count) if ceil else math.floor(count)
        # The last window has to begin within the values or the padding before them.
        sizes.append(windows - 1 if ceil and (windows - 1) * s >= n + a else windows)
        after.append(max((sizes[-1] - 1) * s + span - n - a, b))
    outer = [(0, 0), (0, 0), *((a, b) for (a, _), b in zip(pads, after))]
    filled = np.pad(x, outer, constant_values=-math.inf if by == "max" else 0.0)
    # Positions beyond the padding, in a last window that is cut off, never count.
    counting = np.pad(np.ones(x.shape[2:]), pads, constant_values=0.0 if exclusive else 1.0)
    counting = np.pad(counting, [(0, max(m - b, 0)) for m, (_, b) in zip(after, pads)])
    result = np.full((*x.shape[:2], *sizes), -math.inf if by == "max" else 0.0)
    counts = np.zeros(sizes)
    for place in itertools.product(*(range(k) for k in kernel)):
        cut = _strided(place, stride, dilation, sizes)
        result = np.maximum(result, filled[cut]) if by == "max" else result + filled[cut]
        counts += counting[cut]
    return result if by == "max" else np.asarray(result / counts)


def pool_to(x: np.ndarray, by: str, shape: Sequence[int]) -> np.ndarray:
    """Return adaptive pooling to ``shape`` of the axes after the second; windows may have different sizes."""
    take: Any = np.max if by == "max" else np.mean
    for axis, length in enumerate(shape, 2):
        extent = x.shape[axis]
        edges = [(k * extent // length, -(-(k + 1) * extent // length)) for k in range(length)]
        parts = [take(np.take(x, range(a, b), axis=axis), axis=axis, keepdims=True) for a, b in edges]
        x = np.concatenate(parts, axis=axis)
    return x


def resized(x: np.ndarray, size: Sequence[int], mode: str, corners: bool = False) -> np.ndarray:
    """Return the array interpolated to ``size`` over the axes after the second: nearest for that mode, else linear.

    Args:
        corners: True to align the corner elements.
    """
    for axis, length in enumerate(size, 2):
        n = x.shape[axis]
        places = np.arange(length)
        ratio = n / length
        if mode == "nearest":
            x = np.take(x, np.minimum((places * ratio).astype(int), n - 1), axis)
            continue
        where = places * (n - 1) / max(length - 1, 1) if corners else np.maximum((places + 0.5) * ratio - 0.5, 0.0)
        low = np.minimum(where.astype(int), n - 1)
        share = (where - low).reshape([-1 if k == axis else 1 for k in range(x.ndim)])
        x = np.take(x, low, axis) * (1 - share) + np.take(x, np.minimum(low + 1, n - 1), axis) * share
    return x
