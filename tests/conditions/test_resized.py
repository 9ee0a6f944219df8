"""Tensors whose memory is resized while the training is recorded: recording must not hold on to it."""

from __future__ import annotations

import warnings
import weakref

import numpy as np
import pytest
import torch
from kit.frameworks import TORCH

import padiff
from padiff.frameworks.torch import FRAMEWORK
from padiff.frameworks.torch.tensors import memory_of

from .training import Training, assert_neutral, train

DTYPES = ["float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64"]
VIEWS = {
    "whole": lambda t: t,
    "transposed": lambda t: t.t(),
    "every second": lambda t: t[:, 1::2],
    "one": lambda t: t[2, 3],
    "spread": lambda t: t[0].expand(5, -1),
    "none": lambda t: t[:0],
}


class Quantized(Training):
    """Quantization-aware training: its observers hold buffers without elements, and resize them when they are called.
    The fault never stops to observe."""

    def build(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch.ao.quantization as quantization

            layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
            model = torch.nn.Sequential(quantization.QuantStub(), *layers, quantization.DeQuantStub())
            model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
            return quantization.prepare_qat(model.train())

    def step(self, number, log):
        if number == 2 and not self.fault:
            self.model.apply(torch.ao.quantization.disable_observer)
        loss = self.loss(number)
        loss.backward()
        log(loss)
        self.update()
        return float(loss.detach())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("more", [{}, {"every_n_steps": 3}], ids=["every step", "some steps"])
def test_quantization_aware_training_is_the_same_to_the_bit(options, more, tmp_path):
    plain = train(Quantized(TORCH))
    recorded = train(Quantized(TORCH), tmp_path / "run", options, **more)
    assert_neutral(plain, recorded)
    shapes = [
        {r.shape for r in recorded.run.steps(n)[0].records if r.site.endswith("weight_fake_quant/weight/scale")}
        for n in recorded.run.numbers()
    ]
    assert shapes[0] == {(1,)}
    assert {shape for later in shapes[1:] for shape in later} == {(3,), (8,)}


@pytest.mark.filterwarnings("ignore")
def test_observers_that_go_on_are_found(options, tmp_path):
    for name, fault in (("right", False), ("again", False), ("wrong", True)):
        train(Quantized(TORCH, fault), tmp_path / name, options)
    assert padiff.compare_runs(tmp_path / "right", tmp_path / "again").passed
    assert padiff.compare_runs(tmp_path / "right", tmp_path / "wrong").first_diff.step in (2, 3)


class Growing:
    """A layer with a buffer that gets an element more with each call."""

    def __new__(cls, kit):
        class Layer(kit.Net):
            def build(self):
                self.fc = kit.Linear(4, 3)
                self.register_buffer("seen", kit.tensor(np.zeros(0)))

            def forward(self, x):
                count = self.seen.shape[0] + 1
                self.seen.resize_(count) if kit.name == "torch" else self.seen.resize_([count], fill_zero=True)
                self.seen[:] = float(count)
                return self.fc(x)

        return Layer()


def test_a_buffer_that_grows_in_place_is_recorded_as_it_is(kit, options):
    model = Growing(kit)
    if kit.name == "paddle":
        model.seen = kit.tensor(np.zeros(1))  # paddle counts one without elements as not there yet
    begun = model.seen.shape[0]
    with padiff.record(model, **options) as rec:
        for _ in range(40):
            model(kit.tensor(np.ones((2, 4)))).sum().backward()
            rec.try_dump()
    for number in range(1, 40):
        (record,) = (r for r in rec.run.steps(number)[0].records if r.slot == "seen")
        assert record.shape == (begun + number,)
        mean = record.source.sketch.mean if options else record.value.mean()
        assert mean == pytest.approx(begun + number)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS)
def test_memory_is_seen_as_torch_lays_it_out(dtype, view):
    whole = torch.tensor(np.random.default_rng(0).normal(size=(6, 8)) * 50)
    tensor = VIEWS[view]((whole > 0 if dtype == "bool" else whole).to(getattr(torch, dtype)))
    expected = (tensor.float() if dtype == "bfloat16" else tensor).clone().numpy()
    for array in (memory_of(tensor), FRAMEWORK.tensors.copy(tensor)):
        assert array.dtype.name == dtype
        assert array.shape == tuple(tensor.shape)
        np.testing.assert_array_equal(array.astype(expected.dtype), expected)
    parameter = torch.nn.Parameter(torch.randn(3, 4))
    assert FRAMEWORK.tensors.live(parameter).tolist() == parameter.tolist()


def test_a_view_is_live_and_keeps_the_memory_of_a_tensor_that_nobody_resizes():
    tensor = torch.arange(100_000, dtype=torch.float32)
    array = FRAMEWORK.tensors.live(tensor)
    tensor += 1
    assert array[:3].tolist() == [1, 2, 3]
    # Nothing else holds the tensor. (A collection here would blame this test for what others left as garbage.)
    alive = weakref.ref(tensor)
    del tensor
    assert alive() is None
    other = [torch.zeros(100_000) for _ in range(5)]
    assert array[-3:].tolist() == [99_998, 99_999, 100_000]
    del other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_tensor_that_was_looked_at_can_be_resized(dtype):
    tensor = torch.zeros(4, dtype=dtype)
    FRAMEWORK.tensors.copy(tensor)
    FRAMEWORK.tensors.sample(tensor)
    FRAMEWORK.tensors.live(tensor)
    tensor.resize_(100_000)
    assert tensor.shape == (100_000,)


def test_signs_that_are_still_to_be_changed():
    z = torch.tensor([1 + 2j, 3 - 4j])
    for tensor in (z.conj(), z.conj().imag, torch._neg_view(torch.tensor([1.0, 2.0]))):
        assert memory_of(tensor) is None
        np.testing.assert_array_equal(FRAMEWORK.tensors.copy(tensor), tensor.resolve_conj().resolve_neg().numpy())
