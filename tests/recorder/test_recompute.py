"""Activation recomputation and data-parallel wrappers."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import PADDLE, TORCH
from kit.nets import batch, mlp, one_step, recorded
from paddle.distributed.fleet.utils import recompute
from torch.utils.checkpoint import checkpoint

import padiff

WAYS = {
    "torch, reentrant": (TORCH, lambda layer, x: checkpoint(layer, x, use_reentrant=True)),
    "torch, not reentrant": (TORCH, lambda layer, x: checkpoint(layer, x, use_reentrant=False)),
    "paddle, reentrant": (PADDLE, lambda layer, x: recompute(layer, x, use_reentrant=True)),
    "paddle, not reentrant": (PADDLE, lambda layer, x: recompute(layer, x, use_reentrant=False)),
}


class Net:
    def __new__(cls, kit, call):
        class Inner(kit.Net):
            def build(self):
                self.first, self.block, self.last = kit.Linear(4, 4), mlp(kit, (4, 8, 4)), kit.Linear(4, 3)
                self.call = call

            def forward(self, x):
                return self.last(self.call(self.block, self.first(x)))

        return Inner()


def two_steps(kit, call, weights=None):
    kit.seed(0)
    model = Net(kit, call)
    optimizer = kit.sgd(model.parameters())
    with padiff.record(model, optimizer=optimizer) as rec:
        for seed in range(2):
            one_step(kit, model, optimizer, *batch(kit, seed=seed), rec)
    return rec, kit.state(model)


@pytest.mark.parametrize("way", WAYS)
def test_with_recomputation_the_records_are_those_of_a_run_without(way):
    kit, call = WAYS[way]
    plain, plain_state = two_steps(kit, lambda layer, x: layer(x))
    rec, state = two_steps(kit, call)
    for name in plain_state:
        np.testing.assert_array_equal(state[name], plain_state[name])
    for number in range(2):
        expected, found = recorded(plain, number), recorded(rec, number)
        assert found.keys() == expected.keys()
        for site, value in expected.items():
            np.testing.assert_allclose(found[site], value, 1e-6, 1e-9, err_msg=site)
        (step,) = rec.run.steps(number)
        assert step.micro_batches == 1


@pytest.mark.parametrize("way", WAYS)
def test_with_recomputation_forward_is_recorded_once_and_inner_gradients_are_there(way):
    kit, call = WAYS[way]
    rec, _ = two_steps(kit, call)
    (step,) = rec.run.steps(0)
    sites = [r.site for r in step.records]
    assert sites.count("block.0/forward/output.0") == 1
    assert "block.0/forward/output.0#1" not in sites
    assert sites.count("block.0/backward/output.0") == 1
    assert sites.count("block.2/backward/output.0") == 1


def test_a_model_that_is_recomputed_whole_is_recorded_once(kit):
    model = mlp(kit)
    call = WAYS[f"{kit.name}, not reentrant"][1]
    x = kit.tensor(np.ones((2, 4)), grad=True)
    with padiff.record(model) as rec:
        call(model, x).sum().backward()
    values = recorded(rec)
    assert "(root)/input/input.input" in values
    assert "(root)/input/input.input#1" not in values
    assert (values["2/backward/output.0"] == 1).all()


def test_torchs_data_parallel_wrapper_is_taken_off():
    inner = mlp(TORCH)
    model = torch.nn.DataParallel(inner)
    x, _ = batch(TORCH)
    with padiff.record(model) as rec:
        expected = model(x).detach().numpy()
    assert [layer.path for layer in rec.info.layers] == ["(root)", "0", "1", "2"]
    np.testing.assert_array_equal(recorded(rec)["(root)/forward/output.0"], expected)


@pytest.mark.filterwarnings("ignore:The program will return to single-card")
def test_paddles_data_parallel_wrapper_is_taken_off():
    inner = mlp(PADDLE)
    model = paddle.DataParallel(inner)
    x, _ = batch(PADDLE)
    with padiff.record(model) as rec:
        expected = model(x).numpy()
    assert [layer.path for layer in rec.info.layers] == ["(root)", "0", "1", "2"]
    np.testing.assert_array_equal(recorded(rec)["(root)/forward/output.0"], expected)
