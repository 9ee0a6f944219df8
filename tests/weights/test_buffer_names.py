"""Buffers of two models whose names differ: carried by statistic, words, shape and order, or named."""

from __future__ import annotations

import numpy as np
import pytest

import padiff
from padiff.weights.assign import AssignError


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


def test_a_matrix_is_carried_into_its_transpose(kit, tmp_path):
    first, second = (
        net_of(kit, names, 1, shapes)
        for names, shapes in ((("queue", "scale"), ((4, 6), (6,))), (("spread", "bank"), ((6,), (6, 4))))
    )
    assert padiff.assign_weight(first, second)
    np.testing.assert_array_equal(values(kit, second, "bank"), values(kit, first, "queue").T)
    np.testing.assert_array_equal(values(kit, second, "spread"), values(kit, first, "scale"))


@pytest.mark.parametrize("shapes", [((4, 4), (3,)), ((6, 4), (6, 4))])
def test_matrices_that_may_be_two_transposes_stay_as_they_are(kit, shapes, capsys):
    other = tuple(shape[::-1] for shape in shapes) if shapes[0] == shapes[1] else ((4, 4), (5,))
    first, second = net_of(kit, ("queue", "rows"), 1, shapes), net_of(kit, ("bank", "table"), 2, other)
    before = values(kit, second, "table").copy()
    assert padiff.assign_weight(first, second)
    np.testing.assert_array_equal(values(kit, second, "table"), before)


def test_buffers_without_a_partner_are_named(kit, tmp_path, capsys):
    first, second = net_of(kit, ("table", "rows")), net_of(kit, ("bank", "other"), 2, ((4,), (3, 2)))
    before = values(kit, second, "bank").copy()
    assert padiff.assign_weight(first, second)
    text = capsys.readouterr().out
    assert "buffers without a partner, as they were: " in text
    assert all(name in text for name in ("/table [6]", "/rows [6]", "/bank [4]", "/other [3, 2]"))
    np.testing.assert_array_equal(values(kit, second, "bank"), before)


def test_a_table_that_nothing_trains_needs_no_partner(kit, tmp_path):
    table = np.random.default_rng(5).random((6, 6)).astype("float32")

    class Looked(kit.Layer):
        def __init__(self):
            super().__init__()
            self.linear, self.table = kit.Linear(6, 6), kit.embedding(6, 6)
            weight = self.table.weight
            kit.set(weight, table)
            kit.freeze(weight)

        def forward(self, x):
            return self.linear(x) + self.table.weight

    class Computed(Looked):
        def __init__(self):
            super().__init__()
            del self.table

        def forward(self, x):
            return self.linear(x) + kit.tensor(table)

    first, second = Looked(), Computed()
    with padiff.record(first, tmp_path / "run") as rec:
        first(kit.tensor(np.ones((6, 6), np.float32))).sum().backward()
        rec.try_dump()
    started = padiff.start_from(tmp_path / "run", second)
    assert str(started).startswith("outputs agree")
    assert started.unpaired_buffers == ("table/weight [6, 6]",)


@pytest.mark.parametrize("copied", [True, False])
def test_a_copy_of_a_model_needs_no_partner(kit, copied, tmp_path):
    net, target, other = (kit.Sequential(kit.linear(6, 6), kit.linear(6, 3)) for _ in range(3))
    if copied:
        kit.load(target, kit.state(net))
    with padiff.record({"net": net, "target": target}, tmp_path / "run") as rec:
        x = kit.tensor(np.ones((2, 6), np.float32))
        (net(x) - target(x)).sum().backward()
        rec.try_dump()
    if not copied:
        with pytest.raises(AssignError, match="No partner for the base model's target"):
            padiff.start_from(tmp_path / "run", other)
        return
    started = padiff.start_from(tmp_path / "run", other)
    assert started.unpaired_buffers[:2] == ("target.0/weight [6, 6]", "target.0/bias [6]")
    for name, value in kit.state(net).items():
        np.testing.assert_array_equal(np.asarray(kit.state(other)[name]), np.asarray(value))
