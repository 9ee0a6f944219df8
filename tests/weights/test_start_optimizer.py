"""A training that goes on in the other framework from a pack: weights, moments, counts of steps, rates.

Expected is the recorded training itself, which goes on in its own framework.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import KITS, PADDLE, TORCH, kit_of
from kit.trainings import X, Y, paddle_net, torch_net
from pairs import PAIRS
from pairs.test_runs import evaluated

import padiff
from padiff.errors import UsageError
from padiff.records.traces import MASTER_WEIGHT
from padiff.weights.start import start
from padiff.weights.stored import open_stored

from .test_special_init import isolated

BEFORE, AFTER = 2, 2
# The fused against the parted, moments in other orders, tied and summed parameters, statistics.
NAMES = (
    "resnet_stages",
    "vit_fused_to_nested",
    "encoder_torch_to_paddle",
    "vit_nested_to_fused",
    "gpt2_conv1d",
    "gpt2_split_and_tied_by_call",
    "llama_fused_kv_and_gate_up",
    "lstm_torch_to_paddle",
    "lstm_two_to_stack",
    "gru_to_cells",
    "neox_interleaved_to_split",
)
# Where a gradient is zero but for rounding, Adam would make a step of it.
EPS = 1e-2


def adam(kit, parameters, rate=0.02):
    parameters = [
        p
        for p in parameters
        if (kit.name == "paddle" and not p.stop_gradient) or (kit.name == "torch" and p.requires_grad)
    ]
    if kit.name == "torch":
        return torch.optim.Adam(parameters, rate, betas=(0.8, 0.9), eps=EPS)
    return paddle.optimizer.Adam(rate, 0.8, 0.9, EPS, parameters=parameters)


def step(model, optimizer, args, train=True):
    kit = kit_of(model)
    output = model(*args)
    (output**2).mean().backward()
    optimizer.step()
    kit.zero(optimizer)
    return kit.float64(output)


def went_on(pair, folder, with_state=True):
    """Outputs of the recorded training, and of the one that went over, in the steps after it did."""
    reference, candidate = map(evaluated, pair.build())  # some drop, and draw what
    args = pair.inputs()
    optimizer = adam(kit_of(reference), reference.parameters())
    with padiff.record(reference, dir_path=folder, optimizer=optimizer, replay_every_n_steps=BEFORE) as rec:
        for _ in range(BEFORE):
            step(reference, optimizer, args[0])
            rec.try_dump()
        expected = []
        for _ in range(AFTER):
            expected.append(step(reference, optimizer, args[0]))
            rec.try_dump()
    other = adam(kit_of(candidate), candidate.parameters(), rate=0.5 if with_state else 0.02)
    given = other if with_state else None
    started = padiff.start_from(folder, candidate, step=BEFORE, optimizer=given)
    return expected, [step(candidate, other, args[1]) for _ in range(AFTER)], started


def apart(expected, got):
    return max(np.linalg.norm(a - b) / np.linalg.norm(a) for a, b in zip(expected, got))


@pytest.mark.parametrize("name", NAMES)
def test_training_goes_on_in_the_other_framework(name, tmp_path):
    (pair,) = (pair for pair in PAIRS if pair.name == name)
    expected, got, started = went_on(pair, tmp_path / "run")
    assert apart(expected, got) < 2e-4
    assert f"after {BEFORE} steps, learning rate 0.02" in str(started)


@pytest.mark.parametrize("name", NAMES[::3])
def test_without_the_state_it_does_not(name, tmp_path):
    (pair,) = (pair for pair in PAIRS if pair.name == name)
    expected, got, _ = went_on(pair, tmp_path / "run", with_state=False)
    assert apart(expected, got) > 2e-3


# -- what there is to go on from


NETS = {"torch": torch_net, "paddle": paddle_net}


def trained(folder, make=None, framework="torch", steps=4, **options):
    net, kit = NETS[framework](), KITS[framework]
    optimizer = (make or (lambda p: adam(kit, p)))(net.parameters())
    with padiff.record(net, dir_path=folder, optimizer=optimizer, **options) as rec:
        for number in range(steps):
            ((net(kit.tensor(X[number])) - kit.tensor(Y[number])) ** 2).mean().backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()
    return folder


def same(one, other):
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def held(net, optimizer):
    """All values of a paddle net and its optimizer."""
    return (
        [p.numpy() for p in net.parameters()]
        + [np.asarray(tensor) for tensor in optimizer.state_dict().values() if isinstance(tensor, paddle.Tensor)]
        + [np.asarray(optimizer.get_lr())]
    )


def refused(message, *args, **kwargs):
    """Start a paddle net, whose optimizer has stepped, in vain."""
    net = paddle_net()
    optimizer = kwargs.pop("make", lambda p: adam(PADDLE, p))(net.parameters())
    step(net, optimizer, [paddle.to_tensor(X[0])])
    before = held(net, optimizer)
    with pytest.raises(UsageError, match=message):
        padiff.start_from(*args, net, optimizer=optimizer, **kwargs)
    assert same(held(net, optimizer), before)


def test_before_the_first_step_there_is_the_rate_alone(tmp_path):
    run = trained(tmp_path / "run")
    net = paddle_net()
    optimizer = adam(PADDLE, net.parameters(), rate=0.7)
    step(net, optimizer, [paddle.to_tensor(X[0])])
    started = padiff.start_from(run, net, optimizer=optimizer)
    assert optimizer.get_lr() == 0.02
    assert "Adam: no state yet, learning rate 0.02" in str(started)
    assert not any(optimizer._accumulators.values())


def test_rates_of_groups_go_to_the_parameters_that_answer(tmp_path):
    net = torch_net()
    groups = [{"params": net[0].parameters(), "lr": 0.3}, {"params": net[2].parameters(), "lr": 0.01}]
    optimizer = torch.optim.SGD(groups)
    with padiff.record(net, dir_path=tmp_path / "run", optimizer=optimizer) as rec:
        step(net, optimizer, [torch.tensor(X[0])])
        rec.try_dump()
    other = paddle_net()
    groups = [{"params": other[2].parameters()}, {"params": other[0].parameters()}]
    optimizer = paddle.optimizer.SGD(0.5, parameters=groups)
    padiff.start_from(tmp_path / "run", other, optimizer=optimizer)
    step(other, optimizer, [paddle.to_tensor(X[0])])
    for parameter, expected in zip(other.parameters(), net.parameters()):
        found = parameter.numpy().T if parameter.ndim == 2 else parameter.numpy()
        np.testing.assert_allclose(found, expected.detach().numpy(), 1e-5, 1e-6)


def test_later_there_is_no_state_without_a_pack(tmp_path):
    run = trained(tmp_path / "run")
    refused("keeps no optimizer's state of step 2: record it with replay_every_n_steps=N", run, step=2)


def test_the_nearest_pack_is_named(tmp_path):
    run = trained(tmp_path / "run", replay_every_n_steps=3)
    refused("keeps no optimizer's state of step 2; the nearest step that has it is 3: give step=3", run, step=2)


def test_files_of_weights_have_no_state(tmp_path):
    from safetensors.torch import save_file

    save_file(torch_net().state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    refused("holds weights alone, and no optimizer's state", tmp_path)


def test_another_rule_is_refused(tmp_path):
    run = trained(tmp_path / "run", replay_every_n_steps=3)
    refused("the state is that of Adam, the optimizer is SGD", run, step=3,
            make=lambda p: paddle.optimizer.Momentum(0.1, parameters=p))  # fmt: skip


def test_another_setting_is_refused(tmp_path):
    run = trained(tmp_path / "run", lambda p: torch.optim.Adam(p, 0.1, amsgrad=True), replay_every_n_steps=3)
    refused("has no place for max second moment", run, step=3)


def test_the_optimizer_of_another_model_is_refused(tmp_path):
    run, net = trained(tmp_path / "run", replay_every_n_steps=3), paddle_net()
    with pytest.raises(UsageError, match="the optimizer steps no parameter of this model"):
        padiff.start_from(run, net, step=3, optimizer=adam(PADDLE, paddle_net().parameters()))
    with pytest.raises(UsageError, match="optimizer has to be one of paddle"):
        padiff.start_from(run, net, step=3, optimizer=torch.optim.SGD(torch_net().parameters(), 0.1))


def test_a_second_optimizer_that_fails_takes_back_the_first(tmp_path):
    run, net = trained(tmp_path / "run", replay_every_n_steps=3), paddle_net()
    good = adam(PADDLE, net[0].parameters())
    bad = paddle.optimizer.SGD(0.1, parameters=net[2].parameters())
    before = held(net, good)
    with pytest.raises(UsageError, match="the optimizer is SGD"):
        padiff.start_from(run, net, step=3, optimizer=[good, bad])
    assert same(held(net, good), before)


def test_one_recorded_optimizer_is_parted_among_several(tmp_path):
    run, net = trained(tmp_path / "run", replay_every_n_steps=3), paddle_net()
    several = [adam(PADDLE, layer.parameters()) for layer in (net[0], net[2])]
    started = padiff.start_from(run, net, step=3, optimizer=several)
    assert [len(state.parameters) for state in started.optimizers] == [2, 2]


@isolated
def test_a_rule_of_ones_own_carries_moments_as_it_carries_weights(tmp_path):
    class Turned(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = torch.nn.Parameter(torch.randn(5, 7))

        def forward(self, x):
            return x @ self.matrix

    class Parted(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.left, self.right = self.create_parameter([7, 3]), self.create_parameter([7, 2])

        def forward(self, x):
            return x @ paddle.concat([self.left, self.right], 1).T

    def rule(base, raw):
        first, second = np.split(base.matrix.numpy().T, [3], axis=1)
        raw.left.set_value(first)
        raw.right.set_value(second)

    padiff.add_special_init("torch", "Turned", "paddle", "Parted", rule)
    base, raw = TORCH.net(lambda self, x: self.x(x), x=Turned()), PADDLE.net(lambda self, x: self.x(x), x=Parted())
    optimizer = adam(TORCH, base.parameters())
    with padiff.record(base, dir_path=tmp_path / "run", optimizer=optimizer, replay_every_n_steps=BEFORE) as rec:
        for _ in range(BEFORE + 1):
            step(base, optimizer, [torch.tensor(X[0])])
            rec.try_dump()
    other = adam(PADDLE, raw.parameters())
    padiff.start_from(tmp_path / "run", raw, step=BEFORE, optimizer=other)
    step(raw, other, [paddle.to_tensor(X[0])])
    matrix = np.concatenate([raw.x.left.numpy(), raw.x.right.numpy()], 1).T
    np.testing.assert_allclose(matrix, base.x.matrix.detach().numpy(), 1e-4, 1e-5)


@isolated
def test_a_rule_that_computes_carries_no_moments(tmp_path):
    class Plain(torch.nn.Linear):
        pass

    class Doubled(paddle.nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    def rule(base, raw):
        raw.weight.set_value(base.weight.numpy().T / 2)
        raw.bias.set_value(base.bias.numpy() / 2)

    padiff.add_special_init("torch", "Plain", "paddle", "Doubled", rule)
    base, raw = TORCH.net(lambda self, x: self.x(x), x=Plain(5, 3)), PADDLE.net(lambda s, x: s.x(x), x=Doubled(5, 3))
    optimizer = adam(TORCH, base.parameters())
    with padiff.record(base, dir_path=tmp_path / "run", optimizer=optimizer, replay_every_n_steps=1) as rec:
        for _ in range(2):
            step(base, optimizer, [torch.tensor(X[0])])
            rec.try_dump()
    other, before = adam(PADDLE, raw.parameters()), [p.numpy() for p in raw.parameters()]
    with pytest.raises(UsageError, match="does more than put values elsewhere"):
        padiff.start_from(tmp_path / "run", raw, step=1, optimizer=other)
    assert same([p.numpy() for p in raw.parameters()], before)


def test_a_run_can_be_moved(tmp_path):
    run = trained(tmp_path / "run", replay_every_n_steps=3)
    moved, net = shutil.move(run, tmp_path / "elsewhere"), paddle_net()
    started = padiff.start_from(moved, net, step=3, optimizer=adam(PADDLE, net.parameters()))
    assert started.parameters == 4


# -- parameters that the optimizer keeps in more digits than the model


def test_an_optimizer_that_keeps_parameters_in_full_gets_them_as_they_were_recorded(tmp_path):
    run, net = trained(tmp_path / "run", replay_every_n_steps=3), paddle_net()
    net.to(dtype="bfloat16")  # also where the processor has no such arithmetic
    optimizer = paddle.optimizer.Adam(0.1, 0.8, 0.9, EPS, parameters=net.parameters(), multi_precision=True)
    padiff.start_from(run, net, step=3, optimizer=optimizer, prove=False)
    weights = padiff.open_run(run).packs[3].weights
    matrix = weights["0", "weight"].read().T
    np.testing.assert_array_equal(optimizer._master_weights[net[0].weight.name].numpy(), matrix)
    np.testing.assert_array_equal(
        PADDLE.float64(net[0].weight), torch.tensor(matrix.copy()).bfloat16().double().numpy()
    )


def test_parameters_that_were_kept_in_full_go_into_a_model_that_has_the_digits(tmp_path):
    stored = open_stored(trained(tmp_path / "run", replay_every_n_steps=3), 3)
    (state,) = stored.optimizers
    held, master = state.parameters["0/weight"], np.random.rand(7, 5).astype("float32")
    parameters = {**state.parameters, "0/weight": replace(held, tensors={**held.tensors, MASTER_WEIGHT: master})}
    stored.optimizers = (replace(state, parameters=parameters),)
    for framework in NETS:
        net = NETS[framework]()
        start(stored, net, [adam(KITS[framework], net.parameters())])
        np.testing.assert_array_equal(KITS[framework].weight(net[0]), master.astype(np.float64))
