"""Writes down functions with windows: convolution, pooling, padding, interpolation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padiff.compare.diagnose.computing.formula import Formula, UnknownError
from padiff.compare.diagnose.computing.given import Given
from padiff.compare.diagnose.computing.writing import Add, Writing
from padiff.compare.diagnose.kernels.windows import each
from padiff.frameworks.known import known


def windows(given: Given, ndim: int, padding: Any) -> tuple[list[int], Any, list[int]]:
    """Stride, padding and dilation of a window over the axes after the second."""
    count = ndim - 2
    if isinstance(padding, str):
        raise UnknownError("padding")
    return (
        each(given.argument(("stride",), 3, 1), count),
        [(n, n) for n in each(padding, count)],
        each(given.argument(("dilation",), 5, 1), count),
    )


def _conv(add: Add, formula: Formula, given: Given, framework: str) -> int:
    ndim = formula.values[given.first].ndim
    stride, padding, dilation = windows(given, ndim, given.argument(("padding",), 4, 0))
    groups = int(given.argument(("groups",), 6, 1))
    found = add("conv", given.first, given.node(1), stride=stride, padding=padding, dilation=dilation, groups=groups)
    return found if 2 not in given.nodes else add("channelwise", found, given.node(2), how="add")


def _pool(add: Add, formula: Formula, given: Given, framework: str) -> int:
    count = formula.values[given.first].ndim - 2
    kernel = each(given.argument(("kernel_size",), 1), count)
    stride = given.argument(("stride",), 2, None)
    by = "max" if given.function.startswith("max") else "mean"
    exclusive = given.argument(("exclusive",), -1, None)
    if exclusive is None:
        exclusive = known(framework).pools_without_padding or not given.argument(("count_include_pad",), 5, True)
    return add(
        "pool",
        given.first,
        by=by,
        kernel=kernel,
        stride=each(stride, count) if stride else kernel,
        padding=each(given.argument(("padding",), 3, 0), count),
        exclusive=bool(exclusive) and by == "mean",
        ceil=bool(given.argument(("ceil_mode",), -1, False)),
    )


def _global_pool(add: Add, formula: Formula, given: Given, framework: str) -> int:
    size = given.argument(("output_size",), 1)
    shape = formula.values[given.first].shape
    wanted = each(size, len(shape) - 2)
    if any(n % w for n, w in zip(shape[2:], wanted)):
        raise UnknownError("adaptive pool")
    kernel = [n // w for n, w in zip(shape[2:], wanted)]
    by = "max" if "max" in given.function else "mean"
    return add("pool", given.first, by=by, kernel=kernel, stride=kernel, padding=[0] * len(kernel))


def _pad(add: Add, formula: Formula, given: Given, framework: str) -> int:
    pads = given.numbers(("pad",), 1)
    ndim = formula.values[given.first].ndim
    mode = given.argument(("mode",), 2, "constant")
    # Two for each axis, from the last one on.
    both = [(0, 0)] * ndim
    if len(pads) == 2 * ndim and known(framework).pads_first_axis_first:
        both = [(pads[2 * k], pads[2 * k + 1]) for k in range(ndim)]
    else:
        for k in range(len(pads) // 2):
            both[ndim - 1 - k] = (pads[2 * k], pads[2 * k + 1])
    return add("pad", given.first, pads=both, mode=str(mode), value=float(given.argument(("value",), 3, 0.0) or 0.0))


def _interpolate(add: Add, formula: Formula, given: Given, framework: str) -> int:
    shape = formula.values[given.first].shape
    size, scale = given.argument(("size",), 1, None), given.argument(("scale_factor",), 2, None)
    count = len(shape) - 2
    wanted = each(size, count) if size else [int(n * s) for n, s in zip(shape[2:], _floats(scale, count))]
    mode = str(given.argument(("mode",), 3, "nearest"))
    kinds = {"nearest": "nearest", "bilinear": "linear", "linear": "linear", "trilinear": "linear"}
    if mode not in kinds or given.argument(("align_mode",), -1, 0):
        raise UnknownError(mode)
    corners = bool(given.argument(("align_corners",), 4, False))
    return add("resized", given.first, size=wanted, mode=kinds[mode], corners=corners)


def _floats(value: Any, count: int) -> list[float]:
    return [float(n) for n in value] if isinstance(value, list) else [float(value)] * count


#: By the names of the functions.
IN_WINDOWS: Mapping[str, Writing] = {
    "conv1d": _conv,
    "conv2d": _conv,
    "conv3d": _conv,
    "max_pool1d": _pool,
    "max_pool2d": _pool,
    "max_pool3d": _pool,
    "avg_pool1d": _pool,
    "avg_pool2d": _pool,
    "avg_pool3d": _pool,
    "adaptive_avg_pool1d": _global_pool,
    "adaptive_avg_pool2d": _global_pool,
    "adaptive_max_pool1d": _global_pool,
    "adaptive_max_pool2d": _global_pool,
    "pad": _pad,
    "interpolate": _interpolate,
}
