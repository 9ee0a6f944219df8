"""Operations with windows in numpy: convolutions, pooling, padding, interpolation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

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
    groups: int = 1, mode: str = "zeros", channels: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """A convolution over the axes after the second; of all output channels, or of some."""
    x = pad(x, [(0, 0), (0, 0), *padding], mode)
    out = counted(x.shape[2:], weight.shape[2:], stride, dilation)
    chosen = np.arange(len(weight)) if channels is None else channels
    if math.prod(out) * len(x) * len(chosen) * math.prod(weight.shape[1:]) > _MOST:
        raise ValueError("too large")
    found = np.zeros((len(x), len(chosen), *out))
    per_in, per_out = weight.shape[1], len(weight) // groups
    members = [np.flatnonzero(chosen // per_out == group) for group in range(groups)]
    for place in itertools.product(*(range(k) for k in weight.shape[2:])):
        seen = x[_strided(place, stride, dilation, out)].reshape(len(x), groups, per_in, -1)
        there: Any = (..., *place)
        own = weight[there]
        for group, some in enumerate(members):
            if len(some):
                found[:, some] += np.matmul(own[chosen[some]], seen[:, group]).reshape(len(x), len(some), *out)
    return found


def counted(extents: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """How many windows there are along each axis."""
    return [(n - (k - 1) * d - 1) // s + 1 for n, k, s, d in zip(extents, kernel, stride, dilation)]


def _strided(place: Sequence[int], stride: Sequence[int], dilation: Sequence[int], out: Sequence[int]) -> Any:
    """Where a place of the window lies, over all windows: an index of the last axes."""
    starts = [p * d for p, d in zip(place, dilation)]
    return (..., *(slice(a, a + (n - 1) * s + 1, s) for a, n, s in zip(starts, out, stride)))


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
    x: np.ndarray, by: str, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int | Sequence[int]],
    exclusive: bool = False, ceil: bool = False, dilation: Sequence[int] = (),
) -> np.ndarray:  # fmt: skip
    """The largest, or the mean, of each window; `exclusive` leaves what is padded out of the mean.

    Args:
        padding: of each axis, on both sides, or before and after.
    """
    dilation = dilation or [1] * len(kernel)
    pads = [(p, p) if isinstance(p, int) else (p[0], p[1]) for p in padding]
    sizes, after = [], []
    for n, k, s, d, (a, b) in zip(x.shape[2:], kernel, stride, dilation, pads):
        span = (k - 1) * d + 1
        count = (n + a + b - span) / s + 1
        whole = math.ceil(count) if ceil else math.floor(count)
        # The last window begins within the values, or what is padded before them.
        sizes.append(whole - 1 if ceil and (whole - 1) * s >= n + a else whole)
        after.append(max((sizes[-1] - 1) * s + span - n - a, b))
    outer = [(0, 0), (0, 0), *((a, b) for (a, _), b in zip(pads, after))]
    filled = np.pad(x, outer, constant_values=-math.inf if by == "max" else 0.0)
    # What lies beyond the padding, where the last window is cut off, never counts.
    counting = np.pad(np.ones(x.shape[2:]), pads, constant_values=0.0 if exclusive else 1.0)
    counting = np.pad(counting, [(0, max(m - b, 0)) for m, (_, b) in zip(after, pads)])
    found = np.full((*x.shape[:2], *sizes), -math.inf if by == "max" else 0.0)
    counts = np.zeros(sizes)
    for place in itertools.product(*(range(k) for k in kernel)):
        cut = _strided(place, stride, dilation, sizes)
        found = np.maximum(found, filled[cut]) if by == "max" else found + filled[cut]
        counts += counting[cut]
    return found if by == "max" else np.asarray(found / counts)


def pool_to(x: np.ndarray, by: str, shape: Sequence[int]) -> np.ndarray:
    """Pooled to so many places of each axis after the second, whose windows may be of unlike sizes."""
    take: Any = np.max if by == "max" else np.mean
    for axis, length in enumerate(shape, 2):
        extent = x.shape[axis]
        edges = [(k * extent // length, -(-(k + 1) * extent // length)) for k in range(length)]
        parts = [take(np.take(x, range(a, b), axis=axis), axis=axis, keepdims=True) for a, b in edges]
        x = np.concatenate(parts, axis=axis)
    return x


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
