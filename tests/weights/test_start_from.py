"""A model that starts where a recorded run was; expected is what the other model, or numpy, computes."""

from __future__ import annotations

import random
import shutil
import textwrap

import numpy as np
import paddle
import pytest
import torch
from hard.children import run_child
from kit.forking import python_with_frameworks
from kit.frameworks import KITS, PADDLE, TORCH, kit_of
from kit.trainings import X, Y, paddle_net, torch_net
from pairs import PAIRS
from pairs.test_truth import distance, outputs

import padiff
from padiff.errors import RunFolderError, UsageError

from .test_special_init import isolated

#: One side owns what the other has no place for.
UNEVEN = {"vit_layer_scale", "vit_layer_scale_to_layers", "heads_in_wrappers"}
NETS = {"torch": torch_net, "paddle": paddle_net}


def once(model, args, folder, **options):
    """A run of one step, in evaluation mode, without an optimizer."""
    with padiff.record(model.eval() or model, dir_path=folder, **options) as rec:
        kit_of(model).run(model, args)
        rec.try_dump()
    return folder


def state(model):
    return {name: kit_of(model).numpy(value).copy() for name, value in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def mixed(framework):
    """A small net with values of its own, a BatchNorm and its buffers."""
    net = NETS[framework](norm=True)
    kit = KITS[framework]
    for number, tensor in enumerate(net.state_dict().values()):
        if "float" in str(tensor.dtype):
            kit.set(tensor, np.random.RandomState(number).rand(*tensor.shape).astype("float32") + 0.1)
    return net


@pytest.mark.parametrize("pair", [p for p in PAIRS[::2] if p.name not in UNEVEN], ids=lambda pair: pair.name)
def test_outputs_are_those_of_the_recorded_model(pair, tmp_path, capsys):
    reference, candidate = (model.eval() or model for model in pair.build())
    run = once(reference, pair.inputs()[0], tmp_path / "run")
    assert distance(*outputs(pair, (reference, candidate))) > 1e-2
    started = padiff.start_from(run, candidate)
    assert distance(*outputs(pair, (reference, candidate))) < 1e-5
    assert not started.assumed
    assert "outputs agree with the recorded ones; starts from" in capsys.readouterr().err


@pytest.mark.parametrize("name", sorted(UNEVEN))
def test_what_does_not_fit_is_named_and_nothing_is_changed(name, tmp_path):
    (pair,) = (p for p in PAIRS if p.name == name)
    reference, candidate = pair.build()
    run, before = once(reference, pair.inputs()[0], tmp_path / "run"), state(candidate)
    with pytest.raises(UsageError, match="No partner for"):
        padiff.start_from(run, candidate)
    assert same(state(candidate), before)
    started = padiff.start_from(run, candidate, partial=True)
    assert started.left_as_is
    assert "left as it is" in str(started)


@pytest.mark.parametrize("source", NETS)
@pytest.mark.parametrize("target", NETS)
def test_weights_and_statistics_are_those_before_the_step(source, target, tmp_path, capsys):
    net = mixed(source)
    expected = state(net)
    once(net, [KITS[source].tensor(X[0])], tmp_path / "run")
    other = NETS[target](norm=True)
    started = padiff.start_from(tmp_path / "run", other)
    assert (started.step, started.parameters, started.buffers >= 2) == (0, 6, True)
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == f"padiff: Sequential: {started}" and str(started).startswith("outputs agree")
    assert f"starts from step 0 of {tmp_path}/run ({source} Sequential): 6 parameters" in line
    found = state(other)
    turned = (lambda array: array) if source == target else np.transpose
    for name in ("0.weight", "2.weight"):
        np.testing.assert_array_equal(found[name], turned(expected[name]))
    names = {"torch": ("running_mean", "running_var"), "paddle": ("_mean", "_variance")}
    for one, two in zip(names[source], names[target]):
        np.testing.assert_array_equal(found[f"1.{two}"], expected[f"1.{one}"])


def trained(folder, framework="torch", steps=4, **options):
    """A run of SGD; and its weights before each step, as torch has them."""
    net, kit = NETS[framework](), KITS[framework]
    optimizer = kit.sgd(net.parameters(), 0.1)
    before = []
    with padiff.record(net, dir_path=folder, optimizer=optimizer, **options) as rec:
        for step in range(steps):
            before.append(kit.weight(net[0]))
            ((net(kit.tensor(X[step])) - kit.tensor(Y[step])) ** 2).mean().backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()
    return before


@pytest.mark.parametrize("step", [None, 0, 2])
def test_the_step_is_the_one_that_was_asked_for(tmp_path, step):
    before = trained(tmp_path / "run")
    net = paddle_net()
    started = padiff.start_from(tmp_path / "run", net, step=step)
    assert started.step == (step or 0)
    np.testing.assert_array_equal(PADDLE.weight(net[0]), before[step or 0])


def test_a_square_matrix_is_transposed_too(tmp_path):
    net = TORCH.net(lambda self, x: self.b(self.a(x)), a=torch.nn.Linear(5, 5), b=torch.nn.Linear(5, 5))
    once(net, [torch.tensor(X[0])], tmp_path / "run")
    other = PADDLE.net(lambda self, x: self.b(self.a(x)), a=paddle.nn.Linear(5, 5), b=paddle.nn.Linear(5, 5))
    padiff.start_from(tmp_path / "run", other)
    np.testing.assert_array_equal(other.a.weight.numpy(), net.a.weight.detach().numpy().T)


def test_losses_of_both_runs_are_the_same_afterwards_and_the_runs_match(tmp_path):
    trained(tmp_path / "torch")
    net = paddle.nn.Sequential(paddle.nn.Linear(5, 7), paddle.nn.Tanh(), paddle.nn.Linear(7, 3))
    optimizer = paddle.optimizer.SGD(0.9, parameters=net.parameters())
    padiff.start_from(tmp_path / "torch", net, optimizer=optimizer)
    with padiff.record(net, dir_path=tmp_path / "paddle", optimizer=optimizer) as rec:
        for step in range(4):
            loss = ((net(paddle.to_tensor(X[step])) - paddle.to_tensor(Y[step])) ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            rec.try_dump()
    report = padiff.compare_runs(tmp_path / "torch", tmp_path / "paddle")
    assert report.passed, report


def test_a_layer_map_decides_between_layers_that_are_alike(tmp_path):
    def forward(self, x):
        return self.a(x) + 2 * self.b(x)

    net = TORCH.net(forward, a=torch.nn.Linear(5, 5), b=torch.nn.Linear(5, 5))
    once(net, [torch.tensor(X[0])], tmp_path / "run")
    other = PADDLE.net(forward, a=paddle.nn.Linear(5, 5), b=paddle.nn.Linear(5, 5))
    padiff.start_from(tmp_path / "run", other, layer_map=[("a", other.b), ("b", other.a)])
    np.testing.assert_array_equal(PADDLE.weight(other.b), TORCH.weight(net.a))


@isolated
def test_a_rule_of_ones_own_gets_the_recorded_layer(tmp_path):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix, self.inner = torch.nn.Parameter(torch.randn(5, 7)), torch.nn.Linear(7, 2)

        def forward(self, x):
            return self.inner(x @ self.matrix)

    class Halves(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.left, self.right = self.create_parameter([7, 3]), self.create_parameter([7, 2])
            self.last = paddle.nn.Linear(7, 2)

        def forward(self, x):
            return self.last(x @ paddle.concat([self.left, self.right], 1).T)

    def rule(base, raw):
        first, second = np.split(base.matrix.detach().cpu().numpy().T, [3], axis=1)
        raw.left.set_value(first)
        raw.right.set_value(second)
        raw.last.weight.set_value(base.inner.weight.t().numpy())
        raw.last.bias.set_value(base.state_dict()["inner.bias"].numpy())

    padiff.add_special_init("torch", "Scaled", "paddle", "Halves", rule)
    base, raw = TORCH.net(lambda self, x: self.x(x), x=Scaled()), PADDLE.net(lambda self, x: self.x(x), x=Halves())
    once(base, [torch.tensor(X[0])], tmp_path / "run")
    started = padiff.start_from(tmp_path / "run", raw)
    assert started.by_rule == 1
    np.testing.assert_allclose(raw(paddle.to_tensor(X[0])).numpy(), base(torch.tensor(X[0])).detach(), 1e-5, 1e-6)


@isolated
def test_a_rule_that_fails_leaves_the_model_as_it_was(tmp_path):
    class Own(torch.nn.Linear):
        pass

    def rule(base, raw):
        raw.weight.set_value(paddle.zeros_like(raw.weight))
        base.nothing_of_this_name  # noqa: B018

    class OwnLayer(paddle.nn.Linear):
        pass

    padiff.add_special_init("torch", "Own", "paddle", "OwnLayer", rule)
    once(TORCH.net(lambda self, x: self.x(x), x=Own(5, 3)), [torch.tensor(X[0])], tmp_path / "run")
    raw = PADDLE.net(lambda self, x: self.x(x), x=OwnLayer(5, 3))
    before = state(raw)
    with pytest.raises(UsageError, match=r"x is a recorded Own, of which there are its tensors.*no 'nothing_of_this"):
        padiff.start_from(tmp_path / "run", raw)
    assert same(state(raw), before)


def test_assign_weight_takes_a_run_folder(tmp_path, capsys):
    before = trained(tmp_path / "run")
    net = paddle_net()
    assert padiff.assign_weight(tmp_path / "run", net)
    assert "weights: torch Sequential -> paddle Sequential" in capsys.readouterr().out
    np.testing.assert_array_equal(PADDLE.weight(net[0]), before[0])
    with pytest.raises(UsageError, match="weights go into a live model"):
        padiff.assign_weight(net, str(tmp_path / "run"))
    with pytest.raises(UsageError, match="leave inputs out"):
        padiff.assign_weight(tmp_path / "run", net, inputs=(X[0], X[0]))


def test_the_training_is_left_as_it_was_but_for_the_weights(tmp_path):
    """Modes, random numbers, hooks, gradients."""
    trained(tmp_path / "run")
    net = torch_net().train()
    net[1].eval()
    torch.manual_seed(3)
    (net(torch.tensor(X[0])) ** 2).mean().backward()
    gradient = net[0].weight.grad.clone()
    tensor = net[0].weight
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    padiff.start_from(tmp_path / "run", net)
    assert torch.equal(torch.rand(3), expected)
    assert [layer.training for layer in net] == [True, False, True]
    assert torch.equal(net[0].weight.grad, gradient)
    assert net[0].weight is tensor
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in net.modules())


# -- bad input


def refused(net, message, *args, **kwargs):
    before = state(net)
    with pytest.raises((UsageError, RunFolderError), match=message) as caught:
        padiff.start_from(*args, **kwargs)
    assert same(state(net), before)
    return str(caught.value)


def test_another_model_is_refused(tmp_path):
    trained(tmp_path / "run")
    net = paddle.nn.Sequential(paddle.nn.Linear(5, 9), paddle.nn.Tanh(), paddle.nn.Linear(9, 3))
    refused(net, "(No partner|hapes)", tmp_path / "run", net)


def test_a_step_that_is_not_there_is_refused(tmp_path):
    trained(tmp_path / "run", every_n_steps=2)
    net = paddle_net()
    refused(net, r"has no step 3: recorded are 0, 2; the nearest is 2", tmp_path / "run", net, step=3)


def test_sketches_alone_are_no_weights(tmp_path):
    trained(tmp_path / "run", detail="sketch", functions=False)
    net = paddle_net()
    message = refused(net, "of step 0 .* keeps sketches of the weights, not their values", tmp_path / "run", net)
    assert "full_every_n_steps=N" in message
    assert "replay_every_n_steps=N" in message


def test_the_nearest_step_with_weights_is_named(tmp_path):
    before = trained(tmp_path / "run", detail="sketch", full_every_n_steps=3)
    net = paddle_net()
    refused(net, "The nearest step that has them is 3: give step=3", tmp_path / "run", net, step=2)
    padiff.start_from(tmp_path / "run", net, step=3)
    np.testing.assert_array_equal(PADDLE.weight(net[0]), before[3])


def test_a_pack_serves_where_records_are_sketches(tmp_path):
    before = trained(tmp_path / "run", detail="sketch", replay_every_n_steps=2)
    net = paddle_net()
    refused(net, "The nearest step that has them is 2: give step=2", tmp_path / "run", net, step=3)
    padiff.start_from(tmp_path / "run", net, step=2)
    np.testing.assert_array_equal(PADDLE.weight(net[0]), before[2])


@pytest.mark.parametrize("name", ["unet_of_one_width", "attention_scrambled", "conformer_macaron"])
def test_the_order_of_execution_is_known_of_sketches_too(name, tmp_path):
    (pair,) = (p for p in PAIRS if p.name == name)
    reference, candidate = (model.eval() or model for model in pair.build())
    run = once(reference, pair.inputs()[0], tmp_path / "run", detail="sketch", replay_every_n_steps=1)
    padiff.start_from(run, candidate)
    assert distance(*outputs(pair, (reference, candidate))) < 1e-5


def test_layers_that_were_left_out_are_named(tmp_path):
    trained(tmp_path / "run", black_list=["2"])
    net = paddle_net()
    refused(net, "has no weights of 2/weight, 2/bias: they were left out by the lists", tmp_path / "run", net)


def test_a_damaged_folder_is_refused(tmp_path):
    trained(tmp_path / "run")
    for path in (tmp_path / "run" / "steps").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    for path in (tmp_path / "run" / "steps").rglob("*.npy"):
        path.write_bytes(path.read_bytes()[:90])
    net = paddle_net()
    refused(net, "(damaged|cut off|truncated|can.t be read)", tmp_path / "run", net)


def test_a_folder_without_a_run_is_refused(tmp_path):
    net = paddle_net()
    (tmp_path / "empty").mkdir()
    refused(net, "is no run folder", tmp_path / "empty", net)
    refused(net, "there is no run folder", tmp_path / "missing", net)
    refused(net, "has to be the path of a folder, got Sequential", net, net)


def test_what_is_no_model_is_refused(tmp_path):
    trained(tmp_path / "run")
    with pytest.raises(UsageError, match=r"expected a torch.nn.Module or a paddle.nn.Layer"):
        padiff.start_from(tmp_path / "run", [1, 2])


# -- in an environment that has the candidate's framework alone

_BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == BLOCKED:
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Blocked())
"""
_TORCH = """
import torch, padiff
net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
optimizer = torch.optim.Adam(net.parameters(), 0.9)
padiff.start_from(RUN, net, step=STEP, optimizer=optimizer)
with padiff.record(net, dir_path=OUT, optimizer=optimizer, start_step=STEP) as rec:
    for x, y in padiff.batches(RUN, steps=range(STEP, 6)):
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step(); optimizer.zero_grad(); rec.try_dump()
"""
_PADDLE = """
import paddle, padiff
net = paddle.nn.Sequential(paddle.nn.Linear(5, 7), paddle.nn.Tanh(), paddle.nn.Linear(7, 3))
optimizer = paddle.optimizer.Adam(0.9, parameters=net.parameters())
padiff.start_from(RUN, net, step=STEP, optimizer=optimizer)
with padiff.record(net, dir_path=OUT, optimizer=optimizer, start_step=STEP) as rec:
    for x, y in padiff.batches(RUN, steps=range(STEP, 6)):
        paddle.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step(); optimizer.clear_grad(); rec.try_dump()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "script", "step"), [("torch", _PADDLE, 3), ("paddle", _TORCH, 0)], ids=["there", "back"]
)
def test_the_frameworks_are_in_two_environments(tmp_path, source, script, step):
    net, kit = NETS[source](), KITS[source]
    optimizer = kit.adam(net.parameters(), 0.01)
    loss_of = torch.nn.functional.mse_loss if source == "torch" else paddle.nn.functional.mse_loss
    with padiff.record(net, dir_path=tmp_path / "run", optimizer=optimizer, replay_every_n_steps=3) as rec:
        for number in range(6):
            loss_of(net(kit.tensor(X[number])), kit.tensor(Y[number])).backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()
    moved = shutil.move(tmp_path / "run", tmp_path / "moved")
    about = f"BLOCKED, RUN, OUT, STEP = {source!r}, {str(moved)!r}, {str(tmp_path / 'other')!r}, {step}\n"
    code = about + textwrap.dedent(_BLOCKED + script)
    command = [*python_with_frameworks(only="paddle" if source == "torch" else "torch"), "-c", code]
    done = run_child(command, timeout=200)
    assert done.returncode == 0, done.stderr
    report = padiff.compare_runs(moved, tmp_path / "other")
    assert report.passed, report
    assert report.coverage.steps == tuple(range(step, 6))


# -- running the model to see


class Counts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.drop, self.last = torch.nn.BatchNorm1d(5), torch.nn.Dropout(0.5), torch.nn.Linear(5, 3)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.last(self.drop(self.norm(x)) * float(np.random.rand()))


def test_running_the_model_leaves_no_trace_and_can_be_forbidden(tmp_path):
    base, raw = Counts(), Counts()
    with padiff.record(base, dir_path=tmp_path / "run") as rec:
        base(torch.tensor(X[0]))
        rec.try_dump()
    np.random.seed(5)
    expected = np.random.rand()
    np.random.seed(5)
    padiff.start_from(tmp_path / "run", raw, prove=False)
    assert raw.calls == 0
    padiff.start_from(tmp_path / "run", raw)
    assert raw.calls > 0
    assert np.random.rand() == expected
    assert int(raw.norm.num_batches_tracked) == 0
    np.testing.assert_array_equal(raw.norm.running_mean.numpy(), np.zeros(5))


def test_outputs_that_differ_are_said(tmp_path):
    """Weights went to their places, and the port computes something else: no error, a hint where to look."""
    trained(tmp_path / "run")
    net = paddle.nn.Sequential(paddle.nn.Linear(5, 7), paddle.nn.ReLU(), paddle.nn.Linear(7, 3))
    started = padiff.start_from(tmp_path / "run", net)
    assert str(started).startswith(
        "outputs differ from the recorded ones: record a step and look with `padiff compare "
    )
    np.testing.assert_array_equal(PADDLE.weight(net[0]).shape, (7, 5))


def test_a_model_with_other_inputs_starts_all_the_same(tmp_path):
    trained(tmp_path / "run")
    net = PADDLE.net(lambda self, x, mask: self.last(self.first(x)) * mask,
                     first=paddle.nn.Linear(5, 7), last=paddle.nn.Linear(7, 3))  # fmt: skip
    started = padiff.start_from(tmp_path / "run", net)
    assert started.parameters == 4
    assert not started.outputs


def test_inputs_of_the_same_names_are_given_by_name(tmp_path):
    """The recorded loop gives them in another order than the port's forward has them."""

    def forward(self, x, scale):
        return self.last(torch.tanh(self.first(x)) * scale)

    base = TORCH.net(forward, first=torch.nn.Linear(5, 5), last=torch.nn.Linear(5, 5))
    with padiff.record(base, dir_path=tmp_path / "run") as rec:
        base(scale=torch.tensor(Y[0][:, :1]), x=torch.tensor(X[0]))
        rec.try_dump()
    port = PADDLE.net(lambda self, x, scale: self.last(paddle.tanh(self.first(x)) * scale),
                      first=paddle.nn.Linear(5, 5), last=paddle.nn.Linear(5, 5))  # fmt: skip
    assert "outputs agree with the recorded ones; starts from" in str(padiff.start_from(tmp_path / "run", port))


def test_a_model_that_is_being_recorded_is_not_run(tmp_path):
    """The run would be recorded as a call of the training."""
    trained(tmp_path / "run")
    net = paddle_net()
    optimizer = paddle.optimizer.SGD(0.1, parameters=net.parameters())
    with padiff.record(net, dir_path=tmp_path / "paddle", optimizer=optimizer) as rec:
        padiff.start_from(tmp_path / "run", net, optimizer=optimizer)
        for step in range(4):
            ((net(paddle.to_tensor(X[step])) - paddle.to_tensor(Y[step])) ** 2).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
            rec.try_dump()
    report = padiff.compare_runs(tmp_path / "run", tmp_path / "paddle")
    assert report.passed, report
    assert padiff.open_run(tmp_path / "paddle").steps(0)[0].micro_batches == 1


class Rotary(torch.nn.Module):
    """A layer with a table that it computes, a table that checkpoints hold, and a weight."""

    def __init__(self, base: float, kept: float) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)
        self.register_buffer("table", base ** -torch.arange(0.0, 1.0, 0.25), persistent=False)
        self.register_buffer("kept", torch.full((4,), kept))

    def forward(self, x):
        return self.inner(x) * self.table + self.kept


class PaddleRotary(paddle.nn.Layer):
    def __init__(self, base: float, kept: float) -> None:
        super().__init__()
        self.inner = paddle.nn.Linear(4, 4)
        self.register_buffer("table", base ** -paddle.arange(0.0, 1.0, 0.25), persistable=False)
        self.register_buffer("kept", paddle.full((4,), kept))

    def forward(self, x):
        return self.inner(x) * self.table + self.kept


@pytest.mark.parametrize(("base", "differs"), [(10.0, False), (100.0, True)])
@pytest.mark.parametrize("kind", [Rotary, PaddleRotary])
def test_what_a_model_computes_by_itself_stays_and_is_named_where_it_differs(kind, base, differs, tmp_path, capsys):
    run = once(Rotary(10.0, 0.5), (torch.ones(2, 4),), tmp_path / "run")
    model = kind(base, 0.0)
    started = padiff.start_from(run, model)
    kit = kit_of(model)
    np.testing.assert_allclose(kit.numpy(model.table), base ** -np.arange(0.0, 1.0, 0.25), rtol=1e-6)
    np.testing.assert_array_equal(kit.numpy(model.kept), np.full(4, 0.5, "float32"))
    assert (started.buffers, started.computed) == (1, ("(root)/table",) if differs else ())
    assert ("the model computes otherwise, and keeps: (root)/table" in capsys.readouterr().err) is differs


OWN = np.random.RandomState(3)


class Noisy(torch.nn.Module):
    """A model that draws from generators of its own and of its module."""

    def __init__(self):
        super().__init__()
        self.linear, self.own, self.plain = torch.nn.Linear(3, 2), np.random.default_rng(5), random.Random(7)

    def forward(self, x):
        return self.linear(x) * float(OWN.rand() + self.own.random() + self.plain.random())


def test_generators_of_the_programs_own_go_on_as_without_it(tmp_path):
    reference = Noisy()
    with padiff.record(reference, tmp_path / "run") as rec:
        reference(torch.ones(4, 3))
        rec.end_step()
    OWN.seed(3)
    model = Noisy()
    expected = [np.random.RandomState(3).rand(), np.random.default_rng(5).random(), random.Random(7).random()]
    padiff.start_from(tmp_path / "run", model)
    assert [OWN.rand(), model.own.random(), model.plain.random()] == expected


def test_a_model_that_ends_with_another_function_is_no_other_model(tmp_path, capsys):
    reference = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2), torch.nn.Sigmoid())
    with padiff.record(reference, tmp_path / "run") as rec:
        reference(torch.ones(4, 3))
        rec.end_step()
    padiff.start_from(tmp_path / "run", paddle.nn.Sequential(*map(paddle.nn.Linear, (3, 4), (4, 2))))
    assert "outputs differ" in capsys.readouterr().err  # without the tanh
    layers = paddle.nn.Linear(3, 4), paddle.nn.Tanh(), paddle.nn.Linear(4, 2)
    padiff.start_from(tmp_path / "run", paddle.nn.Sequential(*layers))
    assert "outputs of 3 layers agree with the recorded ones, what the model makes of them" in capsys.readouterr().err


def test_several_models_start_by_name_as_they_are_recorded(tmp_path):
    torch.manual_seed(0)
    models = {"G": torch.nn.Linear(3, 4), "D": torch.nn.Linear(4, 1)}
    with padiff.record(models, tmp_path / "run") as rec:
        models["D"](models["G"](torch.ones(2, 3)))
        rec.end_step()
    gen, critic = paddle.nn.Linear(3, 4), paddle.nn.Linear(4, 1)
    assert padiff.start_from(tmp_path / "run", {"gen": gen, "critic": critic}).parameters == 4
    for mine, theirs in ((gen, models["G"]), (critic, models["D"])):
        np.testing.assert_array_equal(mine.weight.numpy(), theirs.weight.detach().numpy().T)
