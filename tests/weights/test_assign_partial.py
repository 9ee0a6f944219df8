"""``assign_weight(..., partial=True)``: what fits is carried over, the rest is listed by path."""

from __future__ import annotations

import contextvars

import numpy as np
import pytest
from kit.nets import data

import padiff


def conv_net(kit, bias):
    """A convolution with or without a bias, a normalisation and a head."""
    name = "bias" if kit.name == "torch" else "bias_attr"
    none = {} if bias else {name: False}

    class Net(kit.Net):
        def build(self):
            self.conv, self.norm, self.head = kit.Conv(3, 4, 3, **none), kit.BatchNorm(4), kit.Linear(4, 2)

        def forward(self, x):
            x = self.norm(self.conv(x))
            return self.head(x.mean(-1).mean(-1))

    return Net()


@pytest.mark.parametrize("which", ["base", "raw"])
def test_all_that_fits_is_carried_over_and_the_rest_is_listed(pair, which, capsys):
    base, raw = conv_net(pair[0], which == "base"), conv_net(pair[1], which == "raw")
    before = pair[1].state(raw)
    assert padiff.assign_weight(base, raw) is False
    assert all(before[name].tobytes() == value.tobytes() for name, value in pair[1].state(raw).items())
    printed = capsys.readouterr().out
    assert "partial=True" in printed
    assert "auto_diff(..., auto_init=False)" in printed

    assert padiff.assign_weight(base, raw, partial=True) is True
    np.testing.assert_array_equal(pair[1].float64(raw.conv.weight), pair[0].float64(base.conv.weight))
    np.testing.assert_array_equal(pair[1].weight(raw.head), pair[0].weight(base.head))
    printed = capsys.readouterr().out
    if which == "raw":
        np.testing.assert_array_equal(pair[1].float64(raw.conv.bias), before["conv.bias"])
        assert "[AutoDiff] as it was, the base model has nothing for it: conv/bias [4]\n" in printed
        assert "the raw model has no place" not in printed
    else:
        assert "[AutoDiff] not carried over, the raw model has no place for it: conv/bias [4]\n" in printed
        assert "as it was" not in printed
    # Weights of the convolution and the head, the head's bias, and the normalisation's two; its two statistics.
    assert f"{pair[0].name} Net -> {pair[1].name} Net (5 tensors, 2 buffers)" in printed
    assert "Assign weight success, but for what is listed !!!" in printed


def test_what_fits_wholly_is_an_ordinary_success(pair, capsys):
    base, raw = conv_net(pair[0], True), conv_net(pair[1], True)
    assert padiff.assign_weight(base, raw, partial=True) is True
    assert capsys.readouterr().out.endswith("[AutoDiff] Assign weight success !!!\n")


def test_a_parameter_of_another_shape_is_listed_on_both_sides(pair, capsys):
    base = pair[0].Sequential(pair[0].Linear(3, 3), pair[0].Linear(3, 5))
    raw = pair[1].Sequential(pair[1].Linear(3, 3), pair[1].Linear(3, 4))
    last = list(raw.children())[1]
    before = pair[1].weight(last)
    assert padiff.assign_weight(base, raw, partial=True) is True
    first = [next(iter(model.children())) for model in (base, raw)]
    np.testing.assert_array_equal(pair[1].weight(first[1]), pair[0].weight(first[0]))
    np.testing.assert_array_equal(pair[1].weight(last), before)
    printed = capsys.readouterr().out
    (candidate,) = [line for line in printed.splitlines() if "no place for it" in line]
    (own,) = [line for line in printed.splitlines() if "nothing for it" in line]
    assert "1/weight" in candidate and "1/bias [5]" in candidate
    assert "1/weight" in own and "1/bias [4]" in own


def test_inputs_prove_what_was_carried_over_and_a_surplus_layer_is_listed(pair, capsys):
    base = pair[0].Sequential(pair[0].Linear(4, 4), pair[0].Tanh())
    raw = pair[1].Sequential(pair[1].Linear(4, 4), pair[1].Tanh(), pair[1].Linear(4, 4))
    inputs = tuple(kit.tensor(data(5, 4)) for kit in pair)
    spare = list(raw.children())[2]
    before = pair[1].weight(spare)
    assert padiff.assign_weight(base, raw, inputs=inputs, partial=True) is True
    first = [next(iter(model.children())) for model in (base, raw)]
    np.testing.assert_array_equal(pair[1].weight(first[1]), pair[0].weight(first[0]))
    np.testing.assert_array_equal(pair[1].weight(spare), before)
    printed = capsys.readouterr().out
    assert "nothing for it: 2/weight [4, 4], 2/bias [4]" in printed


def test_where_nothing_fits_nothing_is_done(pair, capsys):
    base, raw = pair[0].Linear(3, 5), pair[1].Linear(7, 2)
    before = pair[1].state(raw)
    assert padiff.assign_weight(base, raw, partial=True) is False
    assert all(before[name].tobytes() == value.tobytes() for name, value in pair[1].state(raw).items())
    assert "no parameter of the one model fits the other: nothing was carried over" in capsys.readouterr().out


def test_an_error_half_way_leaves_the_raw_model_as_it_was(pair, capsys):
    base, raw = conv_net(pair[0], True), conv_net(pair[1], False)
    before = pair[1].state(raw)

    def rule(reference, candidate):
        pair[1].set(candidate.weight, np.zeros(pair[1].float64(candidate.weight).shape, "float32"))
        raise ZeroDivisionError("half way")

    def work():
        padiff.add_special_init(pair[0].name, "Linear", pair[1].name, "Linear", rule)
        return padiff.assign_weight(base, raw, partial=True)

    assert contextvars.copy_context().run(work) is False
    assert all(before[name].tobytes() == value.tobytes() for name, value in pair[1].state(raw).items())
    assert "half way" in capsys.readouterr().out


def test_what_an_earlier_try_wrote_is_undone(pair):
    """Names say ``fc``, the outputs say ``other``: then ``fc`` is as it was."""

    def net(kit, more):
        class Net(kit.Net):
            def build(self):
                if more:
                    self.other = kit.Linear(4, 4)
                self.fc = kit.Linear(4, 4)

            def forward(self, x):
                return self.other(x) + 0 * self.fc(x) if more else self.fc(x)

        return Net()

    base, raw = net(pair[0], False), net(pair[1], True)
    before = pair[1].weight(raw.fc)
    inputs = tuple(kit.tensor(data(5, 4)) for kit in pair)
    assert padiff.assign_weight(base, raw, inputs=inputs, partial=True) is True
    np.testing.assert_array_equal(pair[1].weight(raw.other), pair[0].weight(base.fc))
    np.testing.assert_array_equal(pair[1].weight(raw.fc), before)
