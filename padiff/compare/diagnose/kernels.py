"""Operations of layers in float64: activations, normalisations, windows, recurrent cells, indexed reads and writes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Function = Callable[[np.ndarray], np.ndarray]


def erf(x: np.ndarray) -> np.ndarray:
    """Return the error function, exact to about 1e-13: a series near zero, a continued fraction beyond."""
    size = np.abs(x)
    near = np.minimum(size, 3.0)
    term = total = near.copy()
    for n in range(1, 60):
        term = -term * near * near / n
        total = total + term / (2 * n + 1)
    far = np.maximum(size, 2.5)
    fraction = np.zeros_like(far)
    for n in range(60, 0, -1):
        fraction = n / 2 / (far + fraction)
    with np.errstate(under="ignore"):
        beyond = 1 - np.exp(-far * far) / (math.sqrt(math.pi) * (far + fraction))
    return np.asarray(np.sign(x) * np.where(size < 2.75, 2 / math.sqrt(math.pi) * total, beyond))


def gelu(x: np.ndarray) -> np.ndarray:
    return np.asarray(0.5 * x * (1 + erf(x / math.sqrt(2))))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def sigmoid(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)))


def leaky(slope: float) -> Function:
    return lambda x: np.where(x > 0, x, slope * x)


def _elu(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.where(x > 0, x, np.expm1(np.minimum(x, 0))))


def _softplus(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.logaddexp(0, x))


def softmax(x: np.ndarray, axis: int = -1) -> np.ndarray:
    raised = np.exp(x - x.max(axis=axis, keepdims=True))
    return np.asarray(raised / raised.sum(axis=axis, keepdims=True))


#: Functions by name, the usual ones first.
FUNCTIONS: Mapping[str, Function] = {
    "ReLU": lambda x: np.maximum(x, 0.0),
    "exact GELU": gelu,
    "tanh-form GELU": gelu_tanh,
    "SiLU": lambda x: x * sigmoid(x),
    "tanh": np.tanh,
    "sigmoid": sigmoid,
    "sigmoid-form GELU": lambda x: x * sigmoid(1.702 * x),
    "ELU": _elu,
    "softplus": _softplus,
    "ReLU6": lambda x: np.clip(x, 0.0, 6.0),
    "Hardswish": lambda x: x * np.clip(x / 6 + 0.5, 0.0, 1.0),
    "Hardsigmoid": lambda x: np.clip(x / 6 + 0.5, 0.0, 1.0),
    "Mish": lambda x: x * np.tanh(_softplus(x)),
    "SELU": lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(np.minimum(x, 0))),
    "squared ReLU": lambda x: np.square(np.maximum(x, 0.0)),
    **{f"leaky ReLU of slope {slope:g}": leaky(slope) for slope in (0.01, 0.1, 0.2, 0.3, 0.25, 0.05)},
}

_NONE = "no activation"


def act(x: np.ndarray, function: str, number: float | None = None) -> np.ndarray:
    """Return an activation of each element, with its parameter set to ``number`` if there is one."""
    if function == _NONE:
        return x
    if number is not None:
        return np.asarray(_WITH_NUMBER[function](x, number))
    return np.asarray(FUNCTIONS[function](x))


#: The name of the number of an activation.
ACTIVATION_NUMBERS = {"leaky ReLU": "slope", "ELU": "alpha", "softplus": "beta"}
# The argument of GELU for each of its forms, and of numbers that have other names in words.
_FORMS = {"exact GELU": "none", "tanh-form GELU": "tanh"}
_ARGUMENTS = {"slope": "negative_slope"}
_WITH_NUMBER: Mapping[str, Callable[[np.ndarray, float], np.ndarray]] = {
    "leaky ReLU": lambda x, slope: np.where(x > 0, x, slope * x),
    "ELU": lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
    "softplus": lambda x, beta: np.logaddexp(0, beta * x) / beta,
}


def activation_settings(function: str) -> dict[str, float | str]:
    """Return the arguments of torch's layer for an activation in words, such as ``leaky ReLU of slope 0.1``."""
    if function in _FORMS:
        return {"approximate": _FORMS[function]}
    words = function.split(" of ")[-1].split()
    return {_ARGUMENTS.get(words[0], words[0]): float(words[1])} if words[0] in ACTIVATION_NUMBERS.values() else {}


def einsum(*operands: np.ndarray, equation: str) -> np.ndarray:
    return np.asarray(np.einsum(equation.replace(" ", ""), *operands))


def indexed(
    x: np.ndarray, *indices: np.ndarray, axes: tuple[int, ...], parts: Sequence[tuple[int, Any]] = ()
) -> np.ndarray:
    """Return the elements at indices of some axes.

    Args:
        parts: numbers and slices of other axes, as a trace stores them; all other axes are whole.
    """
    key: list[Any] = [slice(None)] * (1 + max(*axes, *(axis for axis, _ in parts), 0))
    for axis, part in parts:
        if part in (None, "..."):
            raise ValueError("an index that shifts axes")
        key[axis] = slice(*(int(n) if n else None for n in part.split(":"))) if isinstance(part, str) else part
    for axis, index in zip(axes, indices):
        key[axis] = index.astype(np.int64) if index.dtype.kind == "f" else index  # sums with numbers of the code
    return np.asarray(x[tuple(key)])


def rows(x: np.ndarray, index: np.ndarray, axis: int) -> np.ndarray:
    return np.take(x, index.astype(np.int64), axis)


def rows_added(x: np.ndarray, index: np.ndarray, source: np.ndarray, axis: int) -> np.ndarray:
    """Return a tensor with the rows of another one added at the places of an index."""
    total = np.moveaxis(np.array(x), axis, 0)
    np.add.at(total, index.astype(np.int64), np.moveaxis(source, axis, 0))
    return np.moveaxis(total, 0, axis)


def rows_set(x: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Return a tensor with zeros in the rows of an index."""
    cleared = np.array(x)
    cleared[index.astype(np.int64)] = 0.0
    return cleared


def elements_added(x: np.ndarray, index: np.ndarray, source: np.ndarray, axis: int) -> np.ndarray:
    """Return a tensor with the elements of another one added, each at its index along an axis."""
    total = np.array(x)
    places: list[Any] = list(np.indices(index.shape))
    places[axis] = index.astype(np.int64)
    np.add.at(total, tuple(places), source[tuple(map(slice, index.shape))])
    return total


def elements_reduced(x: np.ndarray, index: np.ndarray, source: np.ndarray, axis: int, how: str) -> np.ndarray:
    """Return a tensor with sums, products, maxima or minima of its elements and of another one's, by an index."""
    reductions = {"sum": np.add, "prod": np.multiply, "amax": np.maximum, "amin": np.minimum}
    at: list[Any] = list(np.indices(index.shape))
    at[axis] = index.astype(np.int64)
    total = np.array(x)
    reductions[how].at(total, tuple(at), source[tuple(slice(n) for n in index.shape)])
    return total


def lstm(
    x: np.ndarray, w: np.ndarray, u: np.ndarray, *biases: np.ndarray, order: Sequence[int] = (0, 1, 2, 3),
    backward: bool = False, inner: str = "tanh", outer: str = "tanh", gate: str = "sigmoid", forget: float = 0.0,
    time_first: bool = False, start: float = 0.0,
) -> np.ndarray:  # fmt: skip
    """Return the hidden states of all steps of an LSTM.

    Args:
        order: positions of the input, forget, cell and output gate in the weights.
        backward: True to run from the last step to the first.
        inner: activation of the cell gate.
        outer: activation of the cell state for the output.
        gate: activation of the other gates.
        forget: number that is added to the forget gate.
        time_first: True if the first axis is time, else the second is.
        start: each number of the first states.
    """
    x = np.swapaxes(x, 0, 1) if not time_first else x
    h = c = np.full((x.shape[1], u.shape[1]), start)
    states = []
    for t in range(len(x))[:: -1 if backward else 1]:
        parts = np.split(x[t] @ w.T + h @ u.T + sum(biases, np.zeros(len(w))), 4, axis=-1)
        i, f, g, o = (parts[k] for k in order)
        c = act(f + forget, gate) * c + act(i, gate) * act(g, inner)
        h = act(o, gate) * act(c, outer)
        states.append(h)
    output = np.stack(states)
    return output if time_first else np.swapaxes(output, 0, 1)


def gru(
    x: np.ndarray, w: np.ndarray, u: np.ndarray, *biases: np.ndarray, order: Sequence[int] = (0, 1, 2),
    backward: bool = False, inner: str = "tanh", swapped: bool = False, time_first: bool = False,
    gate: str = "sigmoid", reset: str = "after", keeps: bool = True, start: float = 0.0,
) -> np.ndarray:  # fmt: skip
    """Return the hidden states of all steps of a GRU.

    Args:
        order: positions of the reset, update and new gate in the weights.
        backward: True to run from the last step to the first.
        inner: activation of the new gate.
        swapped: True if the update gate scales the new state instead of the previous one.
        time_first: True if the first axis is time, else the second is.
        gate: activation of the other gates.
        reset: the reset gate scales the state ``after`` its matrix product, ``before`` it, or ``never``.
        keeps: True if the new state contains a share of the previous one.
        start: each number of the first state.
    """
    x = np.swapaxes(x, 0, 1) if not time_first else x
    input_bias, state_bias = biases if biases else (np.zeros(len(w)), np.zeros(len(w)))
    h = np.full((x.shape[1], u.shape[1]), start)
    states = []
    for t in range(len(x))[:: -1 if backward else 1]:
        from_input, from_state = (
            np.split(part, 3, axis=-1) for part in (x[t] @ w.T + input_bias, h @ u.T + state_bias)
        )
        (ri, zi, ni), (rh, zh, nh) = ([part[k] for k in order] for part in (from_input, from_state))
        r, z = act(ri + rh, gate), act(zi + zh, gate)
        if reset == "before":
            nh = np.split((r * h) @ u.T + state_bias, 3, axis=-1)[order[2]]
        n = act(ni + (r * nh if reset == "after" else nh), inner)
        h = z * n + (1 - z) * h if swapped else (1 - z) * n + (z * h if keeps else 0.0)
        states.append(h)
    output = np.stack(states)
    return output if time_first else np.swapaxes(output, 0, 1)


def rnn(
    x: np.ndarray, w: np.ndarray, u: np.ndarray, *biases: np.ndarray, inner: str = "tanh", backward: bool = False,
    time_first: bool = False,
) -> np.ndarray:  # fmt: skip
    """Return the hidden states of all steps of a plain RNN."""
    x = np.swapaxes(x, 0, 1) if not time_first else x
    h = np.zeros((x.shape[1], u.shape[1]))
    states = []
    for t in range(len(x))[:: -1 if backward else 1]:
        h = act(x[t] @ w.T + h @ u.T + sum(biases, np.zeros(len(w))), inner)
        states.append(h)
    output = np.stack(states)
    return output if time_first else np.swapaxes(output, 0, 1)


def targets(labels: np.ndarray, classes: int, smoothing: float = 0.0) -> np.ndarray:
    """Return a row of class probabilities for each label, smoothed; an ignored label has no true class."""
    hot = np.arange(classes) == labels[..., None].astype(np.int64)
    return np.asarray(hot * (1.0 - smoothing) + smoothing / classes)


def picked(x: np.ndarray, index: np.ndarray, axis: int) -> np.ndarray:
    return np.take_along_axis(x, index.astype(np.int64), axis)


def of_classes(weights: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the weight of each label's class."""
    return np.asarray(weights[np.clip(labels.astype(np.int64), 0, len(weights) - 1)])


def huber(error: np.ndarray, beta: float, divided: bool) -> np.ndarray:
    size = np.abs(error)
    inside = 0.5 * np.square(error) if not divided else 0.5 * np.square(error) / beta
    outside = size - 0.5 * beta if divided else beta * (size - 0.5 * beta)
    return np.asarray(np.where(size < beta, inside, outside))


def normalised(
    x: np.ndarray, axes: Sequence[int], eps: float, centred: bool = True, power: float = 0.5, unbiased: bool = False
) -> np.ndarray:
    """Return the values minus their mean, divided by the root of their variance plus epsilon, over the axes.

    Args:
        centred: False to leave the mean in.
        power: the power of the variance that the values are divided by.
        unbiased: True for the unbiased variance.
    """
    axes = tuple(axes)
    mean = x.mean(axes, keepdims=True) if centred else 0.0
    count = math.prod(x.shape[axis] for axis in axes)
    square = np.mean(np.square(x - mean), axes, keepdims=True) * (count / (count - 1) if unbiased else 1.0)
    return np.asarray((x - mean) / (square + eps) ** power)


def grouped(x: np.ndarray, groups: int, eps: float, centred: bool = True) -> np.ndarray:
    """Return the values normalised within each group of channels."""
    parts = x.reshape(len(x), groups, -1)
    return normalised(parts, (2,), eps, centred).reshape(x.shape)


def by_statistics(x: np.ndarray, mean: np.ndarray, variance: np.ndarray, eps: float, train: bool) -> np.ndarray:
    """Return the values normalised by channel, with the batch's statistics if ``train``, else with the given ones."""
    if train:
        return normalised(x, (0, *range(2, x.ndim)), eps)
    shape = (1, -1, *[1] * (x.ndim - 2))
    return np.asarray((x - mean.reshape(shape)) / np.sqrt(variance.reshape(shape) + eps))


def channelwise(x: np.ndarray, parameter: np.ndarray, how: str) -> np.ndarray:
    """Return the values multiplied by (``mul``) or added to a parameter of each channel, along the second axis."""
    shaped = parameter.reshape(1, -1, *[1] * (x.ndim - 2))
    return np.asarray(x * shaped if how == "mul" else x + shaped)


def looked_up(indices: np.ndarray, table: np.ndarray, zero: int | None = None) -> np.ndarray:
    """Return the rows of a table at the indices; zeros for the index ``zero``, if set."""
    rows = np.asarray(table[indices])
    return rows if zero is None else np.where((indices == zero)[..., None], 0.0, rows)


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
    groups: int = 1, mode: str = "zeros",
) -> np.ndarray:  # fmt: skip
    """Return a convolution over the axes after the second.

    Raises:
        ValueError: the convolution has too many multiplications.
    """
    x = pad(x, [(0, 0), (0, 0), *padding], mode)
    out = [(n - (k - 1) * d - 1) // s + 1 for n, k, s, d in zip(x.shape[2:], weight.shape[2:], stride, dilation)]
    if math.prod(out) * len(x) * weight.size > _MOST:
        raise ValueError("too large")
    result = np.zeros((len(x), len(weight), *out))
    per_out = len(weight) // groups
    for place in itertools.product(*(range(k) for k in weight.shape[2:])):
        patches = x[_strided(place, stride, dilation, out)].reshape(len(x), groups, weight.shape[1], -1)
        index: Any = (..., *place)
        kernel = weight[index]
        for group in range(groups):
            outputs = slice(group * per_out, (group + 1) * per_out)
            result[:, outputs] += np.matmul(kernel[outputs], patches[:, group]).reshape(len(x), per_out, *out)
    return result


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


def sampled(
    x: np.ndarray, grid: np.ndarray, padding: str = "zeros", nearest: bool = False, corners: bool = False
) -> np.ndarray:
    """Return the pixels of pictures at the places of a grid (`grid_sample`), of shape (batch, channels, rows, columns).

    Args:
        grid: the column and the row of each place, from -1 to 1, of shape (batch, rows, columns, 2).
        padding: ``zeros`` or ``border``, for places outside.
        corners: True if -1 and 1 are the centres of the outermost pixels, False if they are their edges.
    """
    sizes = x.shape[3], x.shape[2]
    places = [
        (grid[..., k] + 1) / 2 * (n - 1) if corners else ((grid[..., k] + 1) * n - 1) / 2 for k, n in enumerate(sizes)
    ]
    if padding == "border":
        places = [np.clip(place, 0, n - 1) for place, n in zip(places, sizes)]
    samples = np.arange(len(x))[:, None, None]
    result = np.zeros((len(x), *places[0].shape[1:], x.shape[1]))
    starts = [np.rint(place) if nearest else np.floor(place) for place in places]
    for right, below in ((0, 0),) if nearest else ((0, 0), (0, 1), (1, 0), (1, 1)):
        column, row = starts[0] + right, starts[1] + below
        shares = [1.0 - np.abs(place - at) for place, at in zip(places, (column, row))]
        weight = np.ones_like(column) if nearest else shares[0] * shares[1]
        weight = np.where((column >= 0) & (column < sizes[0]) & (row >= 0) & (row < sizes[1]), weight, 0.0)
        rows, columns = (np.clip(at, 0, n - 1).astype(int) for at, n in ((row, sizes[1]), (column, sizes[0])))
        result += weight[..., None] * x[samples, :, rows, columns]
    return np.moveaxis(result, -1, 1)
