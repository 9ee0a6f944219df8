"""Buffers of two models whose names differ: carried by statistic, words, shape and order, or named."""

from __future__ import annotations

import numpy as np
import pytest

import padiff


def net_of(kit, names, seed=0, shapes=((6,), (6,)), dtypes=("float32", "float32")):
    class Frozen(kit.Layer):
        def __init__(self):
            super().__init__()
            rng = np.random.default_rng(seed)
            self.linear = kit.Linear(6, 6)
            for name, shape, dtype in zip(names, shapes, dtypes):
                self.register_buffer(name, kit.tensor((rng.random(shape) + 0.5).astype(dtype)))

        def forward(self, x):
            center, spread = getattr(self, names[0]), getattr(self, names[1])
            return (self.linear(x) - center.sum()) / spread.sum()

    return Frozen()


def values(kit, net, name):
    return np.asarray(kit.state(net)[name])


PAIRS = [
    (("running_mean", "running_var"), ("mean", "variance")),
    (("mu_hat", "sigma2_hat"), ("variance", "mean")),
    (("cos_cached", "sin_cached"), ("sin", "cos")),
    (("queue", "keys"), ("bank", "rows")),
]
PARTNERS = [("mean", "variance"), ("mean", "variance"), ("cos", "sin"), ("bank", "rows")]


@pytest.mark.parametrize(("names", "partners"), zip(PAIRS, PARTNERS))
def test_buffers_of_other_names_are_carried(kit, names, partners, tmp_path):
    first, second = net_of(kit, names[0], 1), net_of(kit, names[1], 2)
    with padiff.record(first, tmp_path / "run") as rec:
        first(kit.tensor(np.ones((2, 6), np.float32))).sum().backward()
        rec.try_dump()
    started = padiff.start_from(tmp_path / "run", second)
    assert started.buffers == 2
    for name, partner in zip(names[0], partners):
        np.testing.assert_array_equal(values(kit, second, partner), values(kit, first, name))


def test_buffers_without_a_partner_are_named(kit, tmp_path, capsys):
    first, second = net_of(kit, ("table", "rows")), net_of(kit, ("bank", "other"), 2, ((4,), (3, 2)))
    before = values(kit, second, "bank").copy()
    assert padiff.assign_weight(first, second)
    text = capsys.readouterr().out
    assert "buffers without a partner, as they were: " in text
    assert all(name in text for name in ("/table [6]", "/rows [6]", "/bank [4]", "/other [3, 2]"))
    np.testing.assert_array_equal(values(kit, second, "bank"), before)
