"""Operations with windows in numpy: convolutions, pooling, padding, interpolation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

_MODES = {"zeros": "constant", "constant": "constant", "reflect": "reflect", "replicate": "edge", "circular": "wrap",
          "edge": "edge"}  # fmt: skip
#: Multiplications that a convolution may take: some tenths of a second.
_MOST = 3e9


def each(value: int | Sequence[int], count: int) -> list[int]:
    """A number for each of so many axes."""
    if isinstance(value, (list, tuple)):
        return [int(n) for n in value] if len(value) == count else [int(value[0])] * count
    return [int(value)] * count  # type: ignore[arg-type]


def pad(x: np.ndarray, pads: Sequence[Sequence[int]], mode: str = "zeros", value: float = 0.0) -> np.ndarray:
    """Padded by so much before and after each axis."""
    pads = [tuple(one) for one in pads]
    if any(n < 0 for one in pads for n in one):
        cut = tuple(slice(max(-a, 0), x.shape[k] - max(-b, 0)) for k, (a, b) in enumerate(pads))
        x, pads = x[cut], [(max(a, 0), max(b, 0)) for a, b in pads]
    if _MODES[mode] == "constant":
        return np.pad(x, pads, constant_values=value)
    return np.pad(x, pads, mode=_MODES[mode])  # type: ignore[call-overload,no-any-return]


def conv(
    x: np.ndarray, weight: np.ndarray, stride: Sequence[int], padding: Sequence[Sequence[int]], dilation: Sequence[int],
    groups: int = 1, mode: str = "zeros",
) -> np.ndarray:  # fmt: skip
    """A convolution over the axes after the second."""
    axes = x.ndim - 2
    x = pad(x, [(0, 0), (0, 0), *padding], mode)
    spans = [(k - 1) * d + 1 for k, d in zip(weight.shape[2:], dilation)]
    out = [(n - span) // s + 1 for n, span, s in zip(x.shape[2:], spans, stride)]
    if math.prod(out) * len(x) * weight.size > _MOST:
        raise ValueError("too large")
    found = np.zeros((len(x), weight.shape[0], *out))
    per_in, per_out = weight.shape[1], weight.shape[0] // groups
    for place in itertools.product(*(range(k) for k in weight.shape[2:])):
        cut = tuple(slice(p * d, p * d + (n - 1) * s + 1, s) for p, d, n, s in zip(place, dilation, out, stride))
        everything: Any = (slice(None), slice(None), *cut)
        seen = x[everything]
        for g in range(groups):
            part = seen[:, g * per_in : (g + 1) * per_in]
            own: Any = (slice(g * per_out, (g + 1) * per_out), slice(None), *place)
            w = weight[own]
            found[:, g * per_out : (g + 1) * per_out] += np.moveaxis(np.tensordot(part, w, axes=(1, 1)), -1, 1)
    assert found.ndim == axes + 2
    return found


def conv_transpose(
    x: np.ndarray, weight: np.ndarray, stride: Sequence[int], padding: Sequence[int], output_padding: Sequence[int],
    dilation: Sequence[int], groups: int = 1,
) -> np.ndarray:  # fmt: skip
    """The convolution's own transposed."""
    kernel = weight.shape[2:]
    full = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(x.shape[2:], stride, kernel, dilation)]
    per_in, per_out = x.shape[1] // groups, weight.shape[1]
    grown = [n + o for n, o in zip(full, output_padding)]
    found = np.zeros((len(x), per_out * groups, *grown))
    for place in itertools.product(*(range(k) for k in kernel)):
        cut = tuple(
            slice(p * d, p * d + (n - 1) * s + 1, s) for p, d, n, s in zip(place, dilation, x.shape[2:], stride)
        )
        for g in range(groups):
            part = x[:, g * per_in : (g + 1) * per_in]
            own: Any = (slice(g * per_in, (g + 1) * per_in), slice(None), *place)
            there: Any = (slice(None), slice(g * per_out, (g + 1) * per_out), *cut)
            w = weight[own]
            found[there] += np.moveaxis(np.tensordot(part, w, axes=(1, 0)), -1, 1)
    inner = tuple(slice(p, n - p) for p, n in zip(padding, grown))
    return np.asarray(found[(slice(None), slice(None), *inner)])


def pool(
    x: np.ndarray, by: str, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    exclusive: bool = False, ceil: bool = False,
) -> np.ndarray:  # fmt: skip
    """The largest, or the mean, of each window; `exclusive` leaves what is padded out of the mean."""
    sizes = []
    for n, k, s, p in zip(x.shape[2:], kernel, stride, padding):
        count = (n + 2 * p - k) / s + 1
        whole = math.ceil(count) if ceil else math.floor(count)
        # The last window begins within the values, or what is padded before them.
        sizes.append(whole - 1 if ceil and (whole - 1) * s >= n + p else whole)
    after = [max((m - 1) * s + k - n - p, p) for m, s, k, n, p in zip(sizes, stride, kernel, x.shape[2:], padding)]
    pads = [(0, 0), (0, 0), *zip(padding, after)]
    empty = -math.inf if by == "max" else 0.0
    windows = sliding_window_view(np.pad(x, pads, constant_values=empty), tuple(kernel), tuple(range(2, x.ndim)))
    steps = tuple(slice(0, (m - 1) * s + 1, s) for m, s in zip(sizes, stride))
    windows = windows[(slice(None), slice(None), *steps)]
    last = tuple(range(-len(kernel), 0))
    if by == "max":
        return np.asarray(windows.max(last))
    # What lies beyond the padding, where the last window is cut off, never counts.
    counting = np.pad(np.ones(x.shape[2:]), list(zip(padding, padding)), constant_values=0.0 if exclusive else 1.0)
    more = [(0, max(b - p, 0)) for b, p in zip(after, padding)]
    counts = sliding_window_view(np.pad(counting, more), tuple(kernel), tuple(range(counting.ndim)))[steps].sum(last)
    return np.asarray(windows.sum(last) / counts)


def resized(x: np.ndarray, size: Sequence[int], mode: str, corners: bool = False) -> np.ndarray:
    """Interpolated over the axes after the second."""
    for axis, wanted in enumerate(size, 2):
        n = x.shape[axis]
        places = np.arange(wanted)
        ratio = n / wanted
        if mode == "nearest":
            x = np.take(x, np.minimum((places * ratio).astype(int), n - 1), axis)
            continue
        where = places * (n - 1) / max(wanted - 1, 1) if corners else np.maximum((places + 0.5) * ratio - 0.5, 0.0)
        low = np.minimum(where.astype(int), n - 1)
        share = (where - low).reshape([-1 if k == axis else 1 for k in range(x.ndim)])
        x = np.take(x, low, axis) * (1 - share) + np.take(x, np.minimum(low + 1, n - 1), axis) * share
    return x
