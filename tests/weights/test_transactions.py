"""Weights are carried over as a whole or not at all, and looking at two models leaves no trace."""

from __future__ import annotations

import contextvars

import numpy as np
import paddle
import pytest
import torch

import padiff
from padiff import assign_weight
from padiff.errors import UsageError
from padiff.frameworks import framework_of
from padiff.weights.assign import carry_over


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.bn, self.drop = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)
        self.b, self.c = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
        self.scale = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        return self.c(self.b(self.drop(self.bn(self.a(x))))) * self.scale


class PaddleNet(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.a, self.bn, self.drop = paddle.nn.Linear(4, 4), paddle.nn.BatchNorm1D(4), paddle.nn.Dropout(0.5)
        self.b, self.c = paddle.nn.Linear(4, 4), paddle.nn.Linear(4, 2)
        self.scale = paddle.create_parameter([], "float32")

    def forward(self, x):
        return self.c(self.b(self.drop(self.bn(self.a(x))))) * self.scale


BOTH = {"torch": TorchNet, "paddle": PaddleNet}


@pytest.fixture(params=[("torch", "paddle"), ("paddle", "torch"), ("torch", "torch")], ids="->".join)
def models(request):
    return [BOTH[name]() for name in request.param]


def tensors(model):
    return [t for _, t in (*model.named_parameters(), *model.named_buffers())]


def bits(model):
    return [t.detach().numpy().tobytes() for t in tensors(model)]


def inputs(models):
    """The same batch for each."""
    x = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    return [torch.tensor(x) if isinstance(m, torch.nn.Module) else paddle.to_tensor(x) for m in models]


def test_a_scalar_is_carried_over_too(models):
    base, raw = models
    with torch.no_grad(), paddle.no_grad():
        base.scale.fill_(7.0)
    assert assign_weight(base, raw)
    assert float(raw.scale.detach()) == 7.0


def test_a_rule_that_fails_half_way_leaves_the_raw_model_as_it_was(models, capsys):
    base, raw = models
    before, calls = bits(raw), []

    def rule(reference, candidate):
        calls.append(reference)
        with torch.no_grad(), paddle.no_grad():
            candidate.weight.zero_() if isinstance(candidate, torch.nn.Module) else candidate.weight.set_value(
                paddle.zeros_like(candidate.weight)
            )
        if len(calls) == 2:
            raise ZeroDivisionError("half way")

    def within():
        sides = [framework_of(m).name for m in models]
        padiff.add_special_init(sides[0], "Linear", sides[1], "Linear", rule)
        return assign_weight(base, raw)

    # A rule holds in the context that it was registered in.
    assert contextvars.copy_context().run(within) is False
    assert len(calls) == 2
    assert bits(raw) == before
    assert "half way" in capsys.readouterr().out


def test_a_write_that_fails_half_way_leaves_the_raw_model_as_it_was(models, monkeypatch, capsys):
    base, raw = models
    before, tensors, done = bits(raw), framework_of(models[1]).tensors, []
    write = tensors.write

    def failing(tensor, array):
        done.append(tensor)
        if len(done) == 4:
            raise MemoryError("no room")
        write(tensor, array)

    monkeypatch.setattr(tensors, "write", failing)
    assert assign_weight(base, raw) is False
    # Three had been written and are written back.
    assert len(done) > 4
    assert bits(raw) == before
    assert "no room" in capsys.readouterr().out


def test_an_interrupt_half_way_leaves_the_raw_model_as_it_was(models, monkeypatch):
    base, raw = models
    before, tensors, done = bits(raw), framework_of(models[1]).tensors, []
    write = tensors.write

    def interrupted(tensor, array):
        done.append(tensor)
        if len(done) == 3:
            raise KeyboardInterrupt
        write(tensor, array)

    monkeypatch.setattr(tensors, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        assign_weight(base, raw)
    assert bits(raw) == before


def test_a_forward_that_fails_leaves_the_raw_model_as_it_was(models):
    base, raw = models
    before, states = bits(raw), [state(m) for m in models]
    wrong = [x[:, :3] for x in inputs(models)]
    with pytest.raises(UsageError, match="failed on the inputs"):
        assign_weight(base, raw, inputs=tuple(wrong))
    assert bits(raw) == before
    assert [state(m) for m in models] == states


def test_weights_that_do_not_fit_leave_the_raw_model_as_it_was(models, capsys):
    base, raw = models
    base.c = torch.nn.Linear(4, 3) if isinstance(base, torch.nn.Module) else paddle.nn.Linear(4, 3)
    before = bits(raw)
    assert assign_weight(base, raw) is False
    assert assign_weight(base, raw, inputs=tuple(inputs(models))) is False
    assert bits(raw) == before
    assert "not the same: " in capsys.readouterr().out


def state(model):
    """Modes, and hooks by number, of every layer; the statistics are looked at apart."""
    if isinstance(model, torch.nn.Module):
        layers = list(model.modules())
        hooks = [len(x._forward_hooks) + len(x._forward_pre_hooks) + len(x._backward_hooks) for x in layers]
    else:
        layers = model.sublayers(include_self=True)
        hooks = [len(x._forward_post_hooks) + len(x._forward_pre_hooks) for x in layers]
    own = [sorted(key for key in vars(x) if key == "forward") for x in layers]
    return [x.training for x in layers], hooks, own


def random_state():
    return torch.get_rng_state().numpy().tobytes(), [str(s.current_seed()) for s in paddle.get_rng_state()]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluated"])
def test_running_both_models_leaves_no_trace(models, training):
    base, raw = models
    for model in models:
        model.train() if training else model.eval()
        # One layer in the other mode: modes are put back layer by layer.
        model.drop.eval() if training else model.drop.train()
    states, random, weights = [state(m) for m in models], random_state(), bits(base)
    carried = carry_over(base, raw, inputs=tuple(inputs(models)))
    assert max(output.error for output in carried.proof.outputs) < 1e-5
    assert [state(m) for m in models] == states
    assert random_state() == random
    assert bits(base) == weights
    # The statistics are the base's own, not one batch further.
    for model in models:
        mean = model.bn.running_mean if isinstance(model, torch.nn.Module) else model.bn._mean
        assert not mean.numpy().any()


def test_what_is_drawn_next_is_what_would_have_been_drawn(models):
    drawn = []
    for look in (False, True):
        paddle.seed(9)
        torch.manual_seed(9)
        if look:
            carry_over(*models, inputs=tuple(inputs(models)))
        drawn.append((paddle.rand([3]).numpy().tolist(), torch.rand(3).tolist()))
    assert drawn[0] == drawn[1]


def test_no_gradient_is_left_behind(models):
    base, raw = models
    carry_over(base, raw, inputs=tuple(inputs(models)))
    assert all(p.grad is None for m in models for p in m.parameters())


def test_no_memory_is_shared(models):
    base, raw = models
    assert assign_weight(base, raw, inputs=tuple(inputs(models)))
    before = bits(raw)
    with torch.no_grad(), paddle.no_grad():
        for tensor in tensors(base):
            tensor.zero_() if isinstance(tensor, torch.Tensor) else tensor.set_value(paddle.zeros_like(tensor))
    assert bits(raw) == before
