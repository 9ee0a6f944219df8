"""Hearing which functions a model's code calls changes no training, whatever else the training does."""

from __future__ import annotations

from contextlib import nullcontext

import paddle
import pytest
import torch
from kit.frameworks import PADDLE, TORCH
from paddle.distributed.fleet.utils import recompute
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import padiff
from padiff.records import LOOP

from .loops import Frozen
from .training import assert_neutral, train

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*can only be enabled on CUDAPlace",
    "ignore:.*is recorded from outside",
    "ignore:Tensor do not have 'place' interface",
    "ignore:.*script_method",
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)


class Functional(Frozen):
    """A model whose code calls functions between its layers."""

    def build(self):
        kit, between = self.kit, self.between

        class Net(kit.Layer):
            def __init__(self):
                super().__init__()
                self.first, self.norm, self.last = kit.Linear(4, 8), kit.layernorm(8), kit.Linear(8, 3)

            def forward(self, x):
                return self.last(between(self, self.first(x)))

        return Net()

    def between(self, net, y):
        kit = self.kit
        return net.norm(kit.gelu(y * 0.5) + kit.softmax(y)) + y

    def optimize(self):
        return [self.kit.sgd(self.model.parameters(), 0.1)]

    def loss(self, number):
        x, y = self.batch(number)
        with self.around():
            return self.kit.cross_entropy(self.model(x), y)

    def around(self):
        return nullcontext()


class InPlace(Functional):
    def between(self, net, y):
        z = y + 0
        z[:, 1] = 0.5
        z += 1
        return net.norm(self.kit.relu_(z))


class Checkpointed(Functional):
    """What is computed again in backward is not heard."""

    def between(self, net, y):
        way = checkpoint if self.kit.name == "torch" else recompute
        return way(lambda z: super(Checkpointed, self).between(net, z), y, use_reentrant=False)


class Autocast(Functional):
    def around(self):
        if self.kit.name == "torch":
            return torch.autocast("cpu", torch.bfloat16)
        return paddle.amp.auto_cast(level="O1", dtype="bfloat16")


class Raising(Functional):
    """An error in a function, and one in a layer, that the model catches itself."""

    def between(self, net, y):
        for wrong in ([7, 7], [2, 24]):
            try:
                net.last(y.reshape(wrong))
            except Exception:
                y = y * 0.5
        return super().between(net, y)


class Device(Functional):
    """Modes of others that begin and end at any place."""

    def between(self, net, y):
        with torch.device("cpu"):
            z = net.norm(y + torch.zeros(8))
            inner = torch.device("cpu")
            inner.__enter__()
            y = net.norm(z * 2)
        inner.__exit__(None, None, None)
        return y + torch.ones(8)


class Transformed(Functional):
    def between(self, net, y):
        return torch.vmap(lambda row: row.softmax(-1) * 2)(y) + net.norm(y)


class Attending(Functional):
    """An attention in eval mode without gradients takes a path of its own, but where functions are heard."""

    def build(self):
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)
                self.encoder = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

            def forward(self, x):
                y = self.first(x) + 1
                self.encoder.eval()
                with torch.no_grad():
                    fixed = self.encoder(y.detach()[None])[0]
                return self.last(y + fixed)

        return Net()


def inside(step):
    """The functions that layers' own code calls, in order; those that make the loss are the loop's."""
    return [call.function for call in step.trace.calls if call.function and call.layer != LOOP]


EVERYWHERE = [Functional, InPlace, Checkpointed, Autocast, Raising]
WAYS = [(kit, way) for way in EVERYWHERE for kit in (TORCH, PADDLE)]
WAYS += [(TORCH, way) for way in (Device, Transformed, Attending)]


@pytest.mark.parametrize(("kit", "way"), WAYS, ids=[f"{way.__name__.lower()}-{kit.name}" for kit, way in WAYS])
def test_the_training_is_the_same_to_the_bit(kit, way, level, tmp_path):
    recorded = train(way(kit), tmp_path / "run", level)
    assert_neutral(train(way(kit)), recorded)
    trace = recorded.run.steps(recorded.run.numbers()[0])[0].trace
    assert any(call.function for call in trace.calls)
    assert _get_current_function_mode_stack() == []


def test_what_is_computed_again_is_heard_once(kit, tmp_path):
    counts = []
    for way in (Functional, Checkpointed):
        run = train(way(kit), tmp_path / way.__name__).run
        counts.append(inside(run.steps(0)[0]))
    assert counts[0] == counts[1] == ["mul", "gelu", "softmax", "add", "add"]


# -- what is compiled ----------------------------------------------------------------------------------------------


class CompiledFunction(Functional):
    """The model's own code calls a function that is compiled: nobody sees it from outside."""

    early = False

    def optimize(self):
        self.compiled = torch.compile(lambda y: torch.softmax(y * 2, -1), backend="aot_eager", fullgraph=True)
        if self.early:
            self.compiled(torch.zeros(6, 8, requires_grad=True))
        return super().optimize()

    def between(self, net, y):
        return net.norm(self.compiled(y) + y) + self.compiled(y)


class CompiledBefore(CompiledFunction):
    early = True


@pytest.fixture
def forgotten():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("way", [CompiledFunction, CompiledBefore])
def test_what_is_compiled_is_compiled_as_often_and_is_the_same(forgotten, way, options, tmp_path):
    plain, before = train(way(TORCH)), graphs()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    recorded = train(way(TORCH), tmp_path / "run", options)
    assert_neutral(plain, recorded)
    assert graphs() == before > 0


def test_what_runs_before_something_is_compiled_is_heard(forgotten, tmp_path):
    class Late(CompiledFunction):
        def between(self, net, y):
            return super().between(net, y + 1)

    run = train(Late(TORCH), tmp_path / "run").run
    assert inside(run.steps(0)[0]) == ["add"]


@pytest.mark.parametrize("way", ["static", "scripted"])
def test_compiled_layers_of_the_model_are_left_alone(way, options, tmp_path):
    class Part(Functional):
        def build(self):
            model = super().build()
            if way == "scripted":
                model.norm = torch.jit.script(torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.ReLU()))
            return model

        def optimize(self):
            if way == "static":
                paddle.jit.to_static(self.model.norm, full_graph=True)
            return super().optimize()

    kit = TORCH if way == "scripted" else PADDLE
    recorded = train(Part(kit), tmp_path / "run", options)
    assert_neutral(train(Part(kit)), recorded)
    functions = inside(recorded.run.steps(0)[0])
    assert functions == ["mul", "gelu", "softmax", "add", "add"]


def test_the_api_level_hears_them_besides(kit, monkeypatch, tmp_path):
    monkeypatch.setenv("PADIFF_API_CHECK", "ON")
    run = train(Functional(kit), tmp_path / "run").run
    step = run.steps(0)[0]
    slots = {r.slot for r in step.records if r.stage == "forward" and "()" in r.slot}
    assert {"mul().0", "gelu().0", "softmax().0", "add().0"} <= slots
    assert inside(step) == ["mul", "gelu", "softmax", "add", "add"]


def test_two_recorders_hear_their_own(kit):
    """Where one model calls another one that it does not hold, each with a recorder of its own."""
    inner, outer = (Functional(kit).model for _ in range(2))

    class Pair(kit.Layer):
        def __init__(self):
            super().__init__()
            self.own = outer

        def forward(self, x):
            return self.own(x) + inner(x)

    model, x = Pair(), Functional(kit).batch(0)[0]
    with padiff.record(inner) as one, padiff.record(model) as other:
        model(x)
    first, second = (inside(rec.run.steps(0)[0]) for rec in (one, other))
    expected = ["mul", "gelu", "softmax", "add", "add"]
    assert first == expected
    # What the other model calls, its layers too, is called by the code of this one; but nothing that padiff calls.
    assert second == [*expected, "linear", "mul", "gelu", "softmax", "add", "layer_norm", "add", "linear", "add"]
