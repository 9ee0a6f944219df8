"""Losses of compiled trainings: what is compiled stays as it is, and is compiled once more at most."""

from __future__ import annotations

import contextlib

import numpy as np
import paddle
import pytest
import torch
from hard.children import run_script
from kit.frameworks import PADDLE, TORCH
from paddle.nn import functional as paddle_functional
from torch.nn import functional as torch_functional

import padiff
from padiff.records import is_of_loss

pytestmark = pytest.mark.filterwarnings(
    "ignore:padiff. what .* compiled is recorded",
    "ignore:.*no layer of the recorded",
    "ignore:The .grad attribute of a Tensor",  # of torch's compiler
)
RNG = np.random.default_rng(0)
X, LABELS = RNG.standard_normal((6, 4)).astype("float32"), RNG.integers(0, 3, 6)


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)

    def forward(self, x, labels=None):
        output = self.last(torch.tanh(self.first(x)))
        return output if labels is None else torch_functional.cross_entropy(output, labels)


class PaddleNet(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.first, self.last = paddle.nn.Linear(4, 8), paddle.nn.Linear(8, 3)

    def forward(self, x, labels=None):
        output = self.last(paddle.tanh(self.first(x)))
        if labels is None:
            return output
        return paddle_functional.cross_entropy(output, labels)


def paddle_loss(output, labels):
    return paddle_functional.cross_entropy(output, labels)


def whole_in_torch(model, compiled):
    return model, compiled(lambda x, y: model(x, y))


def model_in_torch(model, compiled):
    made = compiled(model)
    return made, made


def outside_in_torch(model, compiled):
    made = compiled(model)
    return made, lambda x, y: torch_functional.cross_entropy(made(x), y)


def in_place_in_torch(model, compiled):
    model.compile(backend="aot_eager", fullgraph=True)
    return model, model


def loss_in_torch(model, compiled):
    loss = compiled(lambda output, y: torch_functional.cross_entropy(output, y))
    return model, lambda x, y: loss(model(x), y)


def train(kit, model, call, recorded, every=2):
    optimizer, found = kit.sgd(model.parameters()), []
    x, y = kit.tensor(X), kit.tensor(LABELS, "int64")
    target, call = call
    recorder = padiff.record(target, optimizer=optimizer, every_n_steps=every) if recorded else contextlib.nullcontext()
    with recorder as rec:
        for _ in range(6):
            loss = call(x, y)
            loss.backward()
            found += [kit.numpy(loss), *(kit.grad(p) for p in model.parameters())]
            optimizer.step()
            kit.zero(optimizer)
            if recorded:
                rec.try_dump()
    slots = (
        {r.slot for n in rec.run.numbers() for r in rec.run.steps(n)[0].records if is_of_loss(r)} if recorded else set()
    )
    return found, slots


@pytest.mark.parametrize(
    ("way", "seen"),
    [(whole_in_torch, 0), (model_in_torch, 0), (outside_in_torch, 3), (in_place_in_torch, 0), (loss_in_torch, 0)],
)
def test_torch(way, seen):
    def trained(recorded, every=1):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model = TorchNet()
        call = way(model, lambda made: torch.compile(made, backend="aot_eager", fullgraph=True))
        found, slots = train(TORCH, model, call, recorded, every)
        return found, slots, torch._dynamo.utils.counters["stats"]["unique_graphs"]

    plain, _, once = trained(False)
    assert once == 1
    for every in (1, 2):
        found, slots, graphs = trained(True, every)
        for one, other in zip(plain, found):
            np.testing.assert_array_equal(one, other)
        assert len(slots) == seen
        assert graphs <= every
    torch._dynamo.reset()


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("what", ["model", "outside", "loss"])
@pytest.mark.filterwarnings("ignore:In transformed code", "ignore:Tensor do not have 'place' interface")
def test_paddle(what, full):
    def trained(recorded):
        paddle.seed(0)
        model = PaddleNet()
        if what == "loss":
            loss = paddle.jit.to_static(paddle_loss, full_graph=full)
            call = model, lambda x, y: loss(model(x), y)
        else:
            paddle.jit.to_static(model, full_graph=full)
            outside = what == "outside"
            call = model, (lambda x, y: paddle_functional.cross_entropy(model(x), y)) if outside else model
        return train(PADDLE, model, call, recorded)

    (plain, _), (found, slots) = trained(False), trained(True)
    for one, other in zip(plain, found):
        np.testing.assert_array_equal(one, other)
    # Without a full graph paddle calls what is inside with values, where it is no layer's.
    assert len(slots) == (3 if what == "outside" or (what == "loss" and not full) else 0)


def test_a_loss_that_is_a_compiled_module_compiles_as_without_padiff(tmp_path):
    """A compiler sees global hooks on modules, and with ``fullgraph=True`` it refuses them."""
    (tmp_path / "train.py").write_text("""
import torch, padiff
class Loss(torch.nn.Module):
    def forward(self, a, b):
        return ((a - b) ** 2).mean()
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loss = torch.compile(Loss(), backend="eager", fullgraph=True)
with padiff.record(model, optimizer=optimizer) as rec:
    for _ in range(2):
        loss(model(torch.ones(2, 4)), torch.zeros(2, 3)).backward()
        optimizer.step()
        rec.try_dump()
print(rec.run.numbers())
""")
    ran = run_script(tmp_path, "train.py")
    assert (ran.returncode, ran.stdout.strip()) == (0, "[0, 1]"), ran.stderr
    assert "global hooks" not in ran.stderr
