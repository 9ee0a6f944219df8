"""Layers that are out of the ordinary."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import TORCH, hook_count
from kit.nets import batch, recorded, sites

import padiff


class Same:
    """A layer that returns the very tensor that it was given."""

    def __new__(cls, kit):
        class Inner(kit.Layer):
            def forward(self, x):
                return x

        return Inner()


def test_layers_that_hand_a_tensor_on_have_its_values_and_its_gradient(kit):
    model = kit.Sequential(kit.Linear(4, 3), Same(kit), Same(kit))
    with padiff.record(model) as rec:
        (model(batch(kit)[0]) * 3).sum().backward()
    values = recorded(rec)
    for path in ("0", "1", "2", "(root)"):
        np.testing.assert_array_equal(values[f"{path}/forward/output.0"], values["0/forward/output.0"])
        assert (values[f"{path}/backward/output.0"] == 3).all()
    assert len(sites(rec, "backward")) == 4


class Token:
    """A net with a layer that returns its own parameter, as a class token or a learned scale is kept."""

    def __new__(cls, kit):
        class Own(kit.Net):
            def build(self):
                self.weight = kit.Linear(3, 1).weight

            def forward(self):
                return self.weight

        return kit.net(lambda net, x: net.fc(x) * net.token().reshape([1, 3]), token=Own(), fc=kit.Linear(4, 3))


def test_a_parameter_that_a_layer_returns_has_its_gradient_recorded(kit):
    model = Token(kit)
    x, _ = batch(kit)
    expected = kit.autograd(model(x).sum(), [model.token.weight])[0]
    with padiff.record(model) as rec:
        model(x).sum().backward()
    values = recorded(rec)
    np.testing.assert_allclose(values["token/backward/output.0"], expected, 1e-6)
    np.testing.assert_allclose(values["token/grad/weight"], expected, 1e-6)


def test_no_hook_stays_on_a_parameter_that_a_layer_returned(kit):
    model = Token(kit)
    with padiff.record(model) as rec:
        for _ in range(3):
            model(batch(kit)[0]).sum().backward()
            rec.try_dump()
    arrays = [weakref.ref(r.value) for n in range(3) for r in rec.run.steps(n)[0].records if r.stage == "forward"]
    assert all(array() is not None for array in arrays)
    del rec
    gc.collect()
    assert not [array for array in arrays if array() is not None]
    if kit.name == "torch":
        assert not model.token.weight._backward_hooks


def test_no_hook_stays_on_an_input_that_asks_for_a_gradient(kit):
    model, x = Same(kit), kit.tensor(np.ones((2, 2)), grad=True)
    with padiff.record(model) as rec:
        (model(x) * 5).sum().backward()
    assert (recorded(rec)["(root)/backward/output.0"] == 5).all()
    array = weakref.ref(recorded(rec)["(root)/forward/output.0"])
    del rec
    gc.collect()
    assert array() is None


def test_sparse_gradients_of_an_embedding_are_recorded_dense(kit):
    class Net(kit.Net):
        def build(self):
            make = torch.nn.Embedding if kit.name == "torch" else paddle.nn.Embedding
            self.embed = make(5, 2, sparse=True)

        def forward(self, x):
            return self.embed(x)

    model = Net()
    optimizer = kit.sgd(model.parameters())
    with padiff.record(model, optimizer=optimizer) as rec:
        model(kit.tensor([[1, 3, 3]], "int64")).sum().backward()
        optimizer.step()
        rec.try_dump()
    values = recorded(rec)
    assert values["embed/grad/weight"].tolist() == [[0, 0], [1, 1], [0, 0], [2, 2], [0, 0]]
    np.testing.assert_allclose(values["embed/update/weight"], -0.1 * values["embed/grad/weight"], 1e-5, 1e-7)
    assert values["(root)/input/input.x"].tolist() == [[1, 3, 3]]


def test_complex_outputs_are_recorded(kit, tmp_path):
    class Net(kit.Layer):
        def forward(self, x):
            return torch.fft.fft(x) if kit.name == "torch" else paddle.fft.fft(x)

    model, x = Net(), np.array([1.0, 2.0, 0.0, -1.0])
    with padiff.record(model, tmp_path / "run"):
        model(kit.tensor(x))
    (found,) = [r for r in padiff.open_run(tmp_path / "run").steps(0)[0].records if r.stage == "forward"]
    assert found.dtype == "complex64"
    np.testing.assert_allclose(found.value, np.fft.fft(x), 1e-6)


RECURRENT = {
    "torch": lambda: torch.nn.LSTM(3, 4, num_layers=2, batch_first=True),
    "paddle": lambda: paddle.nn.LSTM(3, 4, num_layers=2),
}
ATTENTION = {
    "torch": lambda: torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
    "paddle": lambda: paddle.nn.TransformerEncoderLayer(4, 2, 8),
}


@pytest.mark.parametrize(("make", "width"), [(RECURRENT, 3), (ATTENTION, 4)], ids=["LSTM", "TransformerEncoderLayer"])
@pytest.mark.filterwarnings("ignore:.*cudnn")
def test_the_frameworks_own_compound_layers_are_recorded_with_every_gradient(kit, make, width):
    model = make[kit.name]()
    optimizer = kit.sgd(model.parameters())
    x = kit.tensor(np.random.default_rng(0).normal(size=(2, 5, width)))
    with padiff.record(model, optimizer=optimizer) as rec:
        output = model(x)
        ((output[0] if isinstance(output, tuple) else output) ** 2).sum().backward()
        optimizer.step()
        rec.try_dump()
    trainable = [p for p in model.parameters() if kit.name == "torch" or not p.stop_gradient]
    assert len(sites(rec, "grad")) == len(trainable)
    (given,) = (r for r in rec.run.steps(0)[0].records if r.stage == "input")
    np.testing.assert_array_equal(given.value, kit.numpy(x))
    assert hook_count(kit, model, optimizer) == 0


def test_torchs_inference_mode_is_recorded():
    model = TORCH.Sequential(TORCH.Linear(4, 3), TORCH.ReLU())
    model.eval()
    with padiff.record(model) as rec, torch.inference_mode():
        expected = model(batch(TORCH)[0]).numpy().copy()
    np.testing.assert_array_equal(recorded(rec)["(root)/forward/output.0"], expected)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_torchs_lazy_layers_are_recorded_from_their_first_call_on():
    model = torch.nn.Sequential(torch.nn.LazyLinear(3), torch.nn.ReLU())
    with padiff.record(model) as rec:
        for _ in range(2):
            model(batch(TORCH)[0])
            rec.try_dump()
    assert recorded(rec, 0)["0/forward/output.0"].shape == (6, 3)
    np.testing.assert_array_equal(recorded(rec, 1)["0/weight/weight"], model[0].weight.detach().numpy())


def test_a_forward_hook_of_the_user_that_replaces_the_output_is_seen(kit):
    model = kit.Sequential(kit.Linear(4, 3), kit.ReLU())
    register = model[0].register_forward_hook if kit.name == "torch" else model[0].register_forward_post_hook
    register(lambda layer, given, output: output * 0 + 7)
    with padiff.record(model) as rec:
        model(batch(kit)[0])
    values = recorded(rec)
    assert (values["0/forward/output.0"] == 7).all()
    assert (values["1/forward/output.0"] == 7).all()


def test_a_layer_that_calls_itself_is_recorded_call_by_call(kit):
    class Net(kit.Net):
        def build(self):
            self.fc = kit.Linear(2, 2)

        def forward(self, x, depth=2):
            return self(self.fc(x), depth - 1) if depth else x

    model = Net()
    with padiff.record(model) as rec:
        model(kit.tensor(np.ones((1, 2))))
    assert [s for s in sites(rec, "forward") if s.startswith("fc")] == ["fc/forward/output.0", "fc/forward/output.0#1"]
    (step,) = rec.run.steps(0)
    assert step.micro_batches == 1
    assert len(sites(rec, "input")) == 1
