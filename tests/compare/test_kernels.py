"""What layers with windows compute, in float64, against torch's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from padiff.compare.diagnose import kernels

F = torch.nn.functional

AXES = pytest.mark.parametrize("axes", [1, 2, 3])


def values(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape)


@AXES
@pytest.mark.parametrize(
    ("groups", "stride", "pad", "dilation"), [(1, 1, 0, 1), (2, 2, 1, 1), (4, 1, 2, 2), (2, 3, 1, 2)]
)
def test_convolution_of_groups_of_channels(axes, groups, stride, pad, dilation):
    x, weight = values(3, 8, *[9] * axes), values(12, 8 // groups, *[3] * axes)
    given = torch.tensor(x), torch.tensor(weight)
    expected = getattr(F, f"conv{axes}d")(*given, None, stride, pad, dilation, groups).numpy()
    set_to = [stride] * axes, [(pad, pad)] * axes, [dilation] * axes, groups
    np.testing.assert_allclose(kernels.conv(x, weight, *set_to), expected, rtol=1e-10, atol=1e-12)


@AXES
@pytest.mark.parametrize(
    ("stride", "pad", "ceil"), [(1, 0, False), (2, 1, False), (2, 1, True), (3, 0, True), (3, 1, True)]
)
def test_pooling_where_windows_are_padded_or_cut_off(axes, stride, pad, ceil):
    x = values(2, 3, *[10] * axes)
    set_to = [3] * axes, [stride] * axes
    expected = getattr(F, f"max_pool{axes}d")(torch.tensor(x), 3, stride, pad, ceil_mode=ceil).numpy()
    np.testing.assert_allclose(kernels.pool(x, "max", *set_to, [pad] * axes, ceil=ceil), expected)
    dilated = getattr(F, f"max_pool{axes}d")(torch.tensor(x), 3, stride, pad, 2, ceil_mode=ceil).numpy()
    made = kernels.pool(x, "max", *set_to, [(pad, pad)] * axes, ceil=ceil, dilation=[2] * axes)
    np.testing.assert_allclose(made, dilated)
    mean = getattr(F, f"avg_pool{axes}d")
    for counted in (True, False):
        expected = mean(torch.tensor(x), 3, stride, pad, ceil_mode=ceil, count_include_pad=counted).numpy()
        made = kernels.pool(x, "mean", *set_to, [pad] * axes, exclusive=not counted, ceil=ceil)
        np.testing.assert_allclose(made, expected, rtol=1e-10)


@AXES
def test_pooling_to_a_size_that_does_not_divide(axes):
    x = values(2, 3, *[10] * axes)
    for by, name in (("mean", "avg"), ("max", "max")):
        expected = getattr(F, f"adaptive_{name}_pool{axes}d")(torch.tensor(x), 4).numpy()
        np.testing.assert_allclose(kernels.pool_to(x, by, [4] * axes), expected, rtol=1e-10)


def weights(gates):
    rng = np.random.default_rng(gates)
    shapes = (gates * 4, 3), (gates * 4, 4), (gates * 4,), (gates * 4,)
    return values(2, 5, 3), [rng.normal(size=shape) for shape in shapes]


@pytest.mark.parametrize(("kind", "cell", "gates"), [("LSTM", kernels.lstm, 4), ("GRU", kernels.gru, 3)])
@pytest.mark.parametrize("start", [0.0, 0.5])
def test_recurrent_cells(kind, cell, gates, start):
    x, parts = weights(gates)
    layer = getattr(torch.nn, kind)(3, 4, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        for own, value in zip(layer.parameters(), parts):
            own.copy_(torch.tensor(value))
    first = torch.full((1, 2, 4), start, dtype=torch.float64)
    expected = layer(torch.tensor(x), (first, first) if kind == "LSTM" else first)[0].detach().numpy()
    np.testing.assert_allclose(cell(x, *parts, start=start), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reset", ["before", "never"])
def test_a_gru_that_resets_elsewhere(reset):
    """Cho's form, and one without the gate, written out."""
    x, (w, u, one, other) = weights(3)

    def sigmoid(v):
        return 1 / (1 + np.exp(-v))

    h, states = np.zeros((2, 4)), []
    for t in range(5):
        given = x[:, t] @ w.T + one
        r = sigmoid(given[:, :4] + h @ u[:4].T + other[:4])
        z = sigmoid(given[:, 4:8] + h @ u[4:8].T + other[4:8])
        kept = (r * h if reset == "before" else h) @ u[8:].T + other[8:]
        h = (1 - z) * np.tanh(given[:, 8:] + kept) + z * h
        states.append(h)
    np.testing.assert_allclose(kernels.gru(x, w, u, one, other, reset=reset), np.stack(states, 1), rtol=1e-10)
