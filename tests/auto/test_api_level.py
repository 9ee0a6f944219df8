"""The API level: functional calls inside of layers, seen only when switched on, in both frameworks."""

from __future__ import annotations

import sys
import types

import numpy as np
import paddle
import pytest
import torch

import padiff
from padiff.errors import UsageError
from padiff.system.terminal import Switches

X = np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = torch.nn.functional.softmax(self.fc(x), -1)
        y = y * 2 + x
        return torch.nn.functional.gelu(y).reshape(2, 16).mean(-1)


class PaddleNet(paddle.nn.Layer):
    def __init__(self, approximate=False, factor=2):
        super().__init__()
        self.fc = paddle.nn.Linear(8, 8)
        self.approximate, self.factor = approximate, factor

    def forward(self, x):
        y = paddle.nn.functional.softmax(self.fc(x), -1)
        y = y * self.factor + x
        return paddle.nn.functional.gelu(y, approximate=self.approximate).reshape([2, 16]).mean(-1)


def run(raw, base=None, **options):
    inputs = ({"x": torch.tensor(X)}, {"x": paddle.to_tensor(X)})
    return padiff.auto_diff(base or TorchNet(), raw, inputs, atol=1e-5, **options)


@pytest.fixture
def switched_on(monkeypatch):
    monkeypatch.setenv("PADIFF_API_CHECK", "ON")


def slots(report, stage="forward"):
    return [d.pair.anchor.slot for d in report if d.pair.stage == stage and d.compared]


def test_functional_calls_are_records_below_their_layer_and_paired_across_frameworks(switched_on):
    report = run(PaddleNet())
    assert report
    expected = ["linear().0", "output.0", "softmax().0", "mul().0", "add().0", "gelu().0", "mean().0", "output.0"]
    assert slots(report) == expected
    assert report.diffs[3].pair.anchor.site == "fc/forward/linear().0"


def test_gradients_of_functional_calls_are_paired_too(switched_on):
    found = slots(run(PaddleNet()), "backward")
    assert {"softmax().0", "mul().0", "add().0", "gelu().0"} <= set(found)


def test_off_by_default(monkeypatch):
    monkeypatch.delenv("PADIFF_API_CHECK", raising=False)
    assert slots(run(PaddleNet())) == ["output.0", "output.0"]


@pytest.mark.parametrize(
    ("raw", "slot"),
    [(PaddleNet(approximate=True), "gelu().0"), (PaddleNet(factor=3), "mul().0")],
    ids=["gelu", "a multiplication"],
)
def test_a_diff_between_two_layers_is_traced_to_the_call(switched_on, raw, slot, capsys):
    report = run(raw)
    assert not report
    assert (report.first_diff.stage, report.first_diff.reference, report.first_diff.slot) == ("forward", "(root)", slot)
    printed = capsys.readouterr().out
    # The user's own line, on either side.
    assert printed.count("test_api_level.py") >= 2


def test_the_tanh_approximation_is_named(switched_on):
    assert "tanh-form GELU for the reference's exact GELU" in run(PaddleNet(approximate=True)).first_diff.cause.sentence


def test_a_call_that_only_one_side_makes_is_no_gap(switched_on):
    class Detour(PaddleNet):
        def forward(self, x):
            return super().forward(paddle.exp(paddle.log(x.abs() + 1)) - 1 - x.abs() + x)

    report = run(Detour())
    assert report
    assert not report.coverage.candidate_sites


def test_what_the_user_computes_stays_the_same_to_the_bit(switched_on):
    model = TorchNet()
    plain = model(torch.tensor(X))
    with padiff.record(model) as rec:
        recorded = model(torch.tensor(X))
    assert torch.equal(plain, recorded)
    assert any("softmax()" in r.slot for r in rec.run.steps(0)[0].records)
    layer = PaddleNet()
    plain = layer(paddle.to_tensor(X)).numpy()
    with padiff.record(layer):
        recorded = layer(paddle.to_tensor(X)).numpy()
    np.testing.assert_array_equal(plain, recorded)


def test_paddles_functions_and_methods_are_its_own_again_afterwards(switched_on):
    owners = [paddle, paddle.nn.functional, paddle.linalg, paddle.Tensor]
    before = [dict(vars(owner)) for owner in owners]
    run(PaddleNet())
    layer = PaddleNet()
    with pytest.raises(ZeroDivisionError), padiff.record(layer):
        layer(paddle.to_tensor(X))
        raise ZeroDivisionError
    for owner, kept in zip(owners, before):
        now = dict(vars(owner))
        assert now.keys() == kept.keys()
        assert [name for name in kept if now[name] is not kept[name]] == []


def test_importing_patches_nothing(monkeypatch):
    softmax, add = paddle.nn.functional.softmax, paddle.Tensor.__add__
    import padiff.frameworks.paddle.hooks  # noqa: F401

    assert paddle.nn.functional.softmax is softmax
    assert paddle.Tensor.__add__ is add


def test_custom_paddle_operators_are_seen_by_name(switched_on, monkeypatch):
    ops = types.ModuleType("my_ops")
    ops.fused = lambda x: x * 2 + 1
    monkeypatch.setitem(sys.modules, "my_ops", ops)
    monkeypatch.setenv("PADDLE_THIRDPARTY_API", "my_ops.fused")

    class Net(paddle.nn.Layer):
        def forward(self, x):
            return sys.modules["my_ops"].fused(x)

    layer = Net()
    with padiff.record(layer) as rec:
        layer(paddle.to_tensor(X))
    [record] = [r for r in rec.run.steps(0)[0].records if r.slot == "fused().0"]
    np.testing.assert_allclose(record.value, X * 2 + 1, rtol=1e-6)


def test_an_unknown_custom_operator_is_reported(switched_on, monkeypatch):
    monkeypatch.setenv("PADDLE_THIRDPARTY_API", "no_such.op")
    layer = PaddleNet()
    with pytest.raises(UsageError, match=r"PADDLE_THIRDPARTY_API: 'no_such.op' is neither a module nor a function"):
        padiff.record(layer).__enter__()


def test_switches_are_read_when_asked_and_wrong_ones_reported(monkeypatch):
    monkeypatch.setenv("PADIFF_API_CHECK", "on")
    monkeypatch.setenv("PADDLE_THIRDPARTY_API", "a.b, c")
    assert Switches.from_environment() == Switches(api_check=True, third_party=("a.b", "c"))
    monkeypatch.setenv("PADIFF_PATH_LOG", "perhaps")
    with pytest.raises(UsageError, match="PADIFF_PATH_LOG is ON or OFF, got 'perhaps'"):
        Switches.from_environment()


def test_the_path_log_names_layers_as_they_are_called(monkeypatch, capsys):
    monkeypatch.setenv("PADIFF_PATH_LOG", "ON")
    with padiff.record(model := TorchNet()):
        model(torch.tensor(X))
    assert capsys.readouterr().out.splitlines() == [
        "[padiff] (root) (TorchNet), call 0",
        "[padiff] fc (Linear), call 0",
    ]


@pytest.mark.parametrize("name", ["PADIFF_SKIP_WRAP_LAYER", "PADIFF_SIKP_WRAP_LAYER"])
def test_wrappers_around_one_layer_are_skipped_if_asked(monkeypatch, name):
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(8, 8)), torch.nn.ReLU())

    def recorded():
        with padiff.record(model) as rec:
            model(torch.tensor(X))
        return {r.layer for r in rec.run.steps(0)[0].records if r.stage == "forward"}

    assert recorded() == {"(root)", "0", "0.0", "1"}
    monkeypatch.setenv(name, "ON")
    assert recorded() == {"(root)", "0.0", "1"}
