"""A tensor that one side's code detaches, with torch's ``detach`` and with paddle's."""

from __future__ import annotations

import numpy as np
import pytest

import padiff

FAULTS = ["residual", "weight", "recurrent"]


def net_of(kit, fault="", logs=False):
    class Net(kit.Layer):
        def __init__(self):
            super().__init__()
            self.first, self.branch, self.head = kit.Linear(6, 6), kit.Linear(6, 6), kit.Linear(6, 3)
            self.kept = None

        def forward(self, x):
            x = self.first(x)
            if logs:
                self.kept = x.detach() * 2
                x = x + 0 * x.detach()
            y = self.branch(x)
            x = y + (x.detach() if fault == "residual" else x)
            weight = self.first.weight
            x = x @ (weight.detach() if fault == "weight" else weight)
            for k in range(3):
                x = kit.sigmoid(x * 0.5 + self.branch(x.detach() if fault == "recurrent" and k == 1 else x))
            return self.head(x)

    kit.seed(3)
    net = Net()
    state = kit.state(net)
    rng = np.random.default_rng(0)
    kit.load(net, {name: 0.5 * rng.normal(size=np.shape(value)).astype("float32") for name, value in state.items()})
    return net


def recorded(kit, net, scale=1.0, **options):
    x = kit.tensor(np.random.default_rng(1).normal(size=(5, 6)))
    with padiff.record(net, **options) as rec:
        ((net(x) ** 2).sum() * scale).backward()
        rec.try_dump()
    return rec.run


@pytest.mark.parametrize("options", [{}, {"detail": "sketch"}], ids=["full", "sketch"])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_detached_is_named_and_not_called_proven(kit, fault, options):
    one = recorded(kit, net_of(kit), **options)
    first = padiff.compare_runs(one, recorded(kit, net_of(kit, fault), **options)).first_diff
    assert first.cause.kind == "detached", first.cause.text
    assert "detach() in `(root)` of the candidate cuts gradients off" in first.cause.sentence
    assert first.cause.fix == "take detach() out of `(root)`"
    assert not first.cause.proven
    first = padiff.compare_runs(recorded(kit, net_of(kit, fault), **options), one).first_diff
    assert "detach() in `(root)` of the reference" in first.cause.sentence


def test_what_changes_no_gradient_or_is_on_both_sides_is_no_cause(kit):
    one = recorded(kit, net_of(kit))
    assert padiff.compare_runs(one, recorded(kit, net_of(kit, logs=True))).passed
    first = padiff.compare_runs(one, recorded(kit, net_of(kit, logs=True), scale=1.5)).first_diff
    assert "detach" not in first.cause.sentence
    detached = recorded(kit, net_of(kit, "residual"))
    first = padiff.compare_runs(detached, recorded(kit, net_of(kit, "residual"), scale=1.5)).first_diff
    assert "detach" not in first.cause.sentence


def two_heads(kit):
    class Net(kit.Layer):
        def __init__(self):
            super().__init__()
            self.trunk, self.main, self.side = kit.Linear(6, 6), kit.Linear(6, 3), kit.Linear(6, 2)

        def forward(self, x):
            x = self.trunk(x)
            return self.main(x), self.side(x)

    net = Net()
    rng = np.random.default_rng(5)
    state = kit.state(net)
    kit.load(net, {name: rng.normal(size=np.shape(value)).astype("float32") for name, value in state.items()})
    return net


def scored(kit, cut=False):
    """A layer with parameters of its own, of which one enters only scores; ``cut``: these are detached."""

    class Scored(kit.Layer):
        def __init__(self):
            super().__init__()
            self.weight, self.query = kit.param(6, 3), kit.param(6, 1)

        def forward(self, x):
            h = x @ self.weight
            scores = kit.sigmoid(x @ self.query)
            return h * (scores.detach() if cut else scores)

    net = Scored()
    rng = np.random.default_rng(5)
    kit.load(net, {name: rng.normal(size=np.shape(v)).astype("float32") for name, v in kit.state(net).items()})
    return net


def test_a_parameter_whose_every_way_to_the_loss_is_detached_is_named(kit):
    runs = [recorded(kit, scored(kit)), recorded(kit, scored(kit, cut=True))]
    first = padiff.compare_runs(*runs).first_diff
    assert (first.stage, first.slot, first.cause.kind) == ("grad", "query", "detached"), first.message
    assert "on the candidate, each way from `query` to the loss passes detach()" in first.cause.sentence
    first = padiff.compare_runs(*runs[::-1]).first_diff
    assert "on the reference, each way from `query` to the loss passes detach()" in first.cause.sentence


def test_a_term_of_the_loss_that_is_missing_is_proven(kit):
    def run(side, main=1.0):
        net = two_heads(kit)
        with padiff.record(net) as rec:
            one, other = net(kit.tensor(np.random.default_rng(1).normal(size=(5, 6))))
            loss = (one**2).sum() * main
            (loss + (other**2).sum() if side else loss).backward()
            rec.try_dump()
        return rec.run

    first = padiff.compare_runs(run(True), run(False)).first_diff
    assert (first.stage, first.reference, first.cause.kind) == ("loss", "(loop)", "loss_term_missing")
    assert "the candidate does not add the second sum() in the loop to its loss" in first.cause.sentence
    assert first.cause.proven
    first = padiff.compare_runs(run(False), run(True)).first_diff
    assert "the reference does not add the second sum() in the loop to its loss" in first.cause.sentence
    assert first.cause.proven
    # On neither side it is no news.
    first = padiff.compare_runs(run(False), run(False, main=1.5)).first_diff
    assert "`side`" not in first.cause.text
