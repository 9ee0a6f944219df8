"""Rules of the user's own for carrying weights over."""

from __future__ import annotations

import contextvars
import threading
from functools import wraps

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import PADDLE, TORCH
from kit.nets import both, data

import padiff
from padiff import add_special_init, assign_weight


def isolated(test):
    """Runs a test in a context of its own, so that what it registers is gone afterwards."""
    return wraps(test)(lambda *args, **given: contextvars.copy_context().run(test, *args, **given))


class Packed(torch.nn.Module):
    """Two matrices below each other, in a vector: no one can know what it holds."""

    def __init__(self):
        super().__init__()
        self.both = torch.nn.Parameter(torch.randn(24))

    def forward(self, x):
        return x @ self.both.view(6, 4).T


class Apart(paddle.nn.Layer):
    """The same two matrices, each in a layer of its own."""

    def __init__(self):
        super().__init__()
        self.top, self.low = (paddle.nn.Linear(4, 3, bias_attr=False) for _ in range(2))

    def forward(self, x):
        return paddle.concat([self.top(x), self.low(x)], -1)


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.packed = torch.nn.Linear(4, 4), Packed()

    def forward(self, x):
        return self.packed(self.first(x))


class PaddleNet(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.first, self.apart = paddle.nn.Linear(4, 4), Apart()

    def forward(self, x):
        return self.apart(self.first(x))


def torch_to_paddle(base, raw):
    matrix = base.both.detach().numpy().reshape(6, 4)
    raw.top.weight.set_value(paddle.to_tensor(matrix[:3].T.copy()))
    raw.low.weight.set_value(paddle.to_tensor(matrix[3:].T.copy()))


def paddle_to_torch(base, raw):
    matrix = np.concatenate([base.top.weight.numpy().T, base.low.weight.numpy().T])
    with torch.no_grad():
        raw.both.copy_(torch.tensor(matrix.ravel()))


def equal_outputs(base_kit, base, raw_kit, raw):
    x = data(3, 4)
    reference, candidate = base_kit.float64(base(base_kit.tensor(x))), raw_kit.float64(raw(raw_kit.tensor(x)))
    np.testing.assert_allclose(candidate, reference, rtol=1e-5, atol=1e-6)


def test_without_a_rule_such_layers_are_refused(capsys):
    assert assign_weight(TorchNet(), PaddleNet()) is False
    assert "add_special_init" in capsys.readouterr().out


@isolated
def test_a_rule_of_the_second_generation_copies_base_to_raw():
    add_special_init("torch", "Packed", "paddle", "Apart", torch_to_paddle)
    base, raw = TorchNet(), PaddleNet()
    assert assign_weight(base, raw)
    equal_outputs(TORCH, base, PADDLE, raw)


@isolated
def test_a_rule_in_the_other_direction_is_another_rule():
    add_special_init("paddle", "Apart", "torch", "Packed", paddle_to_torch)
    base, raw = PaddleNet(), TorchNet()
    assert assign_weight(base, raw)
    equal_outputs(PADDLE, base, TORCH, raw)
    assert assign_weight(TorchNet(), PaddleNet()) is False


@pytest.mark.parametrize(
    "register",
    [
        lambda func: add_special_init("Apart", "Packed", func),
        lambda func: add_special_init(paddle_name="Apart", torch_name="Packed", func=func),
        lambda func: add_special_init(func=func, torch_name="Packed", paddle_name="Apart"),
    ],
)
@isolated
def test_a_rule_of_the_first_generation_gets_the_paddle_layer_first(register):
    register(lambda layer, module: torch_to_paddle(module, layer))
    layer, module = PaddleNet(), TorchNet()
    assert assign_weight(layer, module, padiff.LayerMap())
    equal_outputs(TORCH, module, PADDLE, layer)


@isolated
def test_rules_by_keyword():
    add_special_init(
        base_framework="torch",
        base_model_name="Packed",
        raw_framework="paddle",
        raw_model_name="Apart",
        func=torch_to_paddle,
    )
    assert assign_weight(TorchNet(), PaddleNet())


@isolated
def test_auto_diff_uses_the_rule_and_compares_such_layers_as_wholes():
    add_special_init("torch", "Packed", "paddle", "Apart", torch_to_paddle)
    report = padiff.auto_diff(
        TorchNet(), PaddleNet(), both((TORCH, PADDLE), data(3, 4)), atol=1e-5, layer_map={"packed": "apart"}
    )
    assert report
    paired = {d.pair.reference.layer for d in report if d.compared and d.pair.stage == "forward"}
    assert "packed" in paired


@isolated
def test_a_rule_comes_before_the_built_in_ones():
    add_special_init("torch", "Linear", "paddle", "Linear", lambda base, raw: raw.weight.set_value(raw.weight * 0))
    raw = PaddleNet().first
    assert assign_weight(TorchNet().first, raw)
    assert not raw.weight.numpy().any()


@isolated
def test_a_rule_that_raises_leaves_the_raw_model_bit_by_bit_as_it_was(capsys):
    def half_way(base, raw):
        raw.top.weight.set_value(raw.top.weight * 0)
        raise ZeroDivisionError("half way")

    add_special_init("torch", "Packed", "paddle", "Apart", half_way)
    raw = PaddleNet()
    before = PADDLE.state(raw)
    assert assign_weight(TorchNet(), raw) is False
    after = PADDLE.state(raw)
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    assert "ZeroDivisionError('half way')" in capsys.readouterr().out


def test_rules_of_one_thread_are_not_seen_by_another():
    seen = {}

    def with_rule():
        add_special_init("torch", "Packed", "paddle", "Apart", torch_to_paddle)
        ready.wait()
        seen["with"] = assign_weight(TorchNet(), PaddleNet())

    def without():
        ready.wait()
        seen["without"] = assign_weight(TorchNet(), PaddleNet())

    ready = threading.Barrier(2)
    threads = [threading.Thread(target=contextvars.copy_context().run, args=(work,)) for work in (with_rule, without)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"with": True, "without": False}


@isolated
def test_a_rule_registered_by_the_main_thread_holds_there_afterwards():
    add_special_init("torch", "Packed", "paddle", "Apart", torch_to_paddle)
    assert assign_weight(TorchNet(), PaddleNet())
    assert assign_weight(TorchNet(), PaddleNet())


@isolated
def test_auto_layer_map_finds_the_classes_that_rules_are_about():
    add_special_init("torch", "Packed", "paddle", "Apart", torch_to_paddle)
    assert padiff.create_model(TorchNet()).auto_layer_map("base") == ["packed"]
    assert padiff.create_model(PaddleNet()).auto_layer_map("raw") == ["apart"]
    assert padiff.create_model(TorchNet()).auto_layer_map("raw") == []


def test_wrong_rules_are_reported():
    with pytest.raises(padiff.PadiffError, match="base_framework is 'torch' or 'paddle', got 'jax'"):
        add_special_init("jax", "A", "torch", "B", print)
    with pytest.raises(padiff.PadiffError, match="func has to be a function of two layers, got 3"):
        add_special_init("torch", "A", "paddle", "B", 3)
    with pytest.raises(padiff.PadiffError, match="func has to be a function of two layers, got 3"):
        add_special_init("A", "B", 3)
    with pytest.raises(padiff.PadiffError, match=r"add_special_init takes \(base_framework, .* got 2 arguments"):
        add_special_init("A", "B")


@pytest.mark.parametrize("turned", [False, True])
@isolated
def test_layer_map_auto_finds_the_classes_that_rules_are_about(turned, capsys):
    """As the proxies' ``auto_layer_map`` does, and whichever way the rule copies."""

    add_special_init("torch", "Packed", "paddle", "Apart", torch_to_paddle)
    module, layer = TorchNet(), PaddleNet()
    layer_map = padiff.LayerMap()
    layer_map.auto(*((module, layer) if turned else (layer, module)))
    pairs = {module.packed: layer.apart} if turned else {layer.apart: module.packed}
    assert layer_map.map == pairs
    assert assign_weight(layer, module, layer_map)
    equal_outputs(TORCH, module, PADDLE, layer)
    assert "LayerMap.auto: `" in capsys.readouterr().out


@isolated
def test_layer_map_auto_passes_over_rules_that_are_about_none_of_these_layers():
    add_special_init("torch", "Linear", "paddle", "SomethingElse", torch_to_paddle)
    add_special_init("torch", "SomethingElse", "paddle", "Linear", torch_to_paddle)
    assert len(padiff.LayerMap().auto(PaddleNet().first, TorchNet().first)) == 0
