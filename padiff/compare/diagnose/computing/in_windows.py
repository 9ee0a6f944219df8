"""Formulas of functions with windows: convolution, pooling, padding, interpolation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padiff.compare.diagnose.computing.formula import Formula, UnknownError
from padiff.compare.diagnose.computing.known_inputs import KnownInputs
from padiff.compare.diagnose.computing.writing import Add, Writing
from padiff.compare.diagnose.kernels.windows import RESIZED, each
from padiff.frameworks.conventions import conventions_of


def windows(given: KnownInputs, ndim: int, padding: Any) -> tuple[list[int], Any, list[int]]:
    """Return stride, padding and dilation of a window over the axes after the second.

    Raises:
        UnknownError: the padding is given as text.
    """
    count = ndim - 2
    if isinstance(padding, str):
        raise UnknownError("padding")
    return (
        each(given.argument(("stride",), 3, 1), count),
        [(n, n) for n in each(padding, count)],
        each(given.argument(("dilation",), 5, 1), count),
    )


def _conv(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    ndim = formula.values[inputs.first].ndim
    stride, padding, dilation = windows(inputs, ndim, inputs.argument(("padding",), 4, 0))
    groups = int(inputs.argument(("groups",), 6, 1))
    product = add(
        "conv", inputs.first, inputs.node(1), stride=stride, padding=padding, dilation=dilation, groups=groups
    )
    return product if 2 not in inputs.nodes else add("channelwise", product, inputs.node(2), how="add")


def _pool(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    count = formula.values[inputs.first].ndim - 2
    kernel = each(inputs.argument(("kernel_size",), 1), count)
    stride = inputs.argument(("stride",), 2, None)
    by = "max" if inputs.function.startswith("max") else "mean"
    exclusive = inputs.argument(("exclusive",), -1, None)
    if exclusive is None:
        exclusive = conventions_of(framework).pools_without_padding or not inputs.argument(
            ("count_include_pad",), 5, True
        )
    return add(
        "pool",
        inputs.first,
        by=by,
        kernel=kernel,
        stride=each(stride, count) if stride else kernel,
        padding=each(inputs.argument(("padding",), 3, 0), count),
        exclusive=bool(exclusive) and by == "mean",
        ceil=bool(inputs.argument(("ceil_mode",), -1, False)),
    )


def _global_pool(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    size = inputs.argument(("output_size",), 1)
    shape = formula.values[inputs.first].shape
    sizes = each(size, len(shape) - 2)
    if any(n % w for n, w in zip(shape[2:], sizes)):
        raise UnknownError("adaptive pool")
    kernel = [n // w for n, w in zip(shape[2:], sizes)]
    by = "max" if "max" in inputs.function else "mean"
    return add("pool", inputs.first, by=by, kernel=kernel, stride=kernel, padding=[0] * len(kernel))


def _pad(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    pads = inputs.numbers(("pad",), 1)
    ndim = formula.values[inputs.first].ndim
    mode = inputs.argument(("mode",), 2, "constant")
    # Two numbers for each axis, the last axis first.
    both = [(0, 0)] * ndim
    if len(pads) == 2 * ndim and conventions_of(framework).pads_first_axis_first:
        both = [(pads[2 * k], pads[2 * k + 1]) for k in range(ndim)]
    else:
        for k in range(len(pads) // 2):
            both[ndim - 1 - k] = (pads[2 * k], pads[2 * k + 1])
    return add("pad", inputs.first, pads=both, mode=str(mode), value=float(inputs.argument(("value",), 3, 0.0) or 0.0))


def _interpolate(add: Add, formula: Formula, inputs: KnownInputs, framework: str) -> int:
    shape = formula.values[inputs.first].shape
    size, scale = inputs.argument(("size",), 1, None), inputs.argument(("scale_factor",), 2, None)
    count = len(shape) - 2
    sizes = each(size, count) if size else [int(n * s) for n, s in zip(shape[2:], _floats(scale, count))]
    mode = str(inputs.argument(("mode",), 3, "nearest"))
    if mode not in RESIZED or inputs.argument(("align_mode",), -1, 0):
        raise UnknownError(mode)
    corners = bool(inputs.argument(("align_corners",), 4, False))
    return add("resized", inputs.first, size=sizes, mode=RESIZED[mode], corners=corners)


def _floats(value: Any, count: int) -> list[float]:
    return [float(n) for n in value] if isinstance(value, list) else [float(value)] * count


#: Writers of formulas, by the function's common name.
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
