"""Tensors that can't be copied, or are none: nested, on the meta device, of a kind of its own. Training goes on."""

from __future__ import annotations

import warnings

import pytest
import torch
from kit.frameworks import PADDLE, TORCH

import padiff
from padiff.frameworks.torch import FRAMEWORK
from padiff.recorder.copying import Copier
from padiff.recorder.tensor_copy import SkipLog, SkippedTensor

from .training import Training, assert_neutral, counts, train

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")


class Odd(torch.Tensor):
    """A tensor made of another one, with no memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner.detach())
        raise OSError(f"{func} is not there, " * 20)


class Broken(torch.Tensor):
    """Nothing at all can be done with it."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise OSError("there is nothing to see here, " * 20)


class Sized(Odd):
    """It does not even tell its shape."""

    @staticmethod
    def __new__(cls, inner, requires_grad=True):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, dispatch_sizes_strides_policy="sizes", requires_grad=requires_grad
        )
        made.inner = inner
        return made


def jagged(x):
    return torch.nested.nested_tensor([x[:4], x[4:]], layout=torch.jagged)


def ragged(x):
    return torch.nested.nested_tensor([x[:4], x[4:]], layout=torch.strided)


MADE = {
    "jagged": (jagged, "nested tensors have no one shape"),
    "nested": (ragged, "nested tensors have no one shape"),
    "meta": (lambda x: x.detach().to("meta"), "tensors on the meta device have no values"),
    "odd": (lambda x: Odd(x.detach()), "tensors of the type Odd have no memory of their own"),
}


class Making(torch.nn.Module):
    """Gives, beside what it is given, something that is made of it."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return x * 1, self.make(x)


class Uncopied(Training):
    """A net whose middle hands out a tensor that can't be copied, twice a step; the fault is the rate."""

    make = None

    def build(self):
        class Net(torch.nn.Module):
            def __init__(self, make):
                super().__init__()
                self.one, self.made, self.two = torch.nn.Linear(4, 8), Making(make), torch.nn.Linear(8, 3)

            def forward(self, x):
                return self.two(self.made(self.made(self.one(x))[0])[0])

        return Net(self.make)

    def optimize(self):
        return [self.kit.sgd(self.model.parameters(), 0.12 if self.fault else 0.1)]


@pytest.fixture(params=MADE)
def made(request):
    make, reason = MADE[request.param]
    return type(request.param, (Uncopied,), {"make": staticmethod(make)}), reason


def test_the_training_is_the_same_and_all_else_is_recorded(made, options, tmp_path):
    kind, reason = made
    plain = train(kind(TORCH))
    with pytest.warns(RuntimeWarning, match="2 tensor") as reported:
        recorded = train(kind(TORCH), tmp_path / "run", options)
    assert len(reported) == 1
    assert f"2 tensor(s) of 1 layer(s) are not recorded (made): {reason}" in str(reported[0].message)
    assert len(str(reported[0].message)) < 600
    assert_neutral(plain, recorded)
    for number in recorded.run.numbers():
        (step,) = recorded.run.steps(number)
        assert len(step.notes) == 1
        assert reason in step.notes[0]
        assert counts(recorded.run, number) == {
            "input": 1, "weight": 4, "forward": 5, "loss": 1, "backward": 5, "grad": 4, "update": 4, "rate": 1
        }  # fmt: skip


def test_a_tensor_whose_class_fails_in_each_function_is_copied_without_them(options, tmp_path):
    kind = type("broken", (Uncopied,), {"make": staticmethod(lambda x: x.detach().as_subclass(Broken))})
    plain, recorded = train(kind(TORCH)), train(kind(TORCH), tmp_path / "run", options)
    assert_neutral(plain, recorded)
    assert counts(recorded.run, 0)["forward"] == 7
    assert not recorded.run.steps(0)[0].notes


@pytest.mark.filterwarnings("ignore:padiff. in step:RuntimeWarning")
def test_runs_match_but_for_a_mistake(made, options, tmp_path):
    kind, _ = made
    for name, fault in (("right", False), ("again", False), ("wrong", True)):
        train(kind(TORCH, fault), tmp_path / name, options)
    assert padiff.compare_runs(tmp_path / "right", tmp_path / "again").passed
    first = padiff.compare_runs(tmp_path / "right", tmp_path / "wrong").first_diff
    assert (first.step, first.stage) == (0, "update"), first.message


def test_a_warning_that_would_be_an_error_does_not_reach_the_training(made, options, tmp_path, unexpected_warnings):
    kind, _ = made
    training = kind(TORCH)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with padiff.record(training.model, tmp_path / "run", **options):
            training.step(0, lambda loss: None)
    (text,) = unexpected_warnings
    assert "are not recorded" in text
    unexpected_warnings.clear()
    assert counts(padiff.open_run(tmp_path / "run"), 0)["forward"] == 5
    assert not any(module._forward_hooks for module in training.model.modules())


def test_a_tensor_of_paddle_whose_memory_is_gone(options, tmp_path):
    class Clearing(PADDLE.Layer):
        def forward(self, x):
            gone = x.detach().clone()
            gone._clear_data()
            return x * 1, gone

    model = PADDLE.Sequential(PADDLE.Linear(4, 3), Clearing())

    def twice():
        with padiff.record(model, tmp_path / "run", **options) as rec:
            for _ in range(2):
                model(PADDLE.tensor([[1.0, 2, 3, 4]]))[0].sum().backward()
                rec.try_dump()

    with pytest.warns(RuntimeWarning, match="2 tensor") as reported:
        twice()
    assert len(reported) == 1
    for number in (0, 1):
        found = counts(padiff.open_run(tmp_path / "run"), number)
        assert (found["forward"], found["backward"], found["grad"]) == (3, 3, 2)


class Padded(Training):
    """An encoder with a padding mask, evaluated in each step: torch then packs the sentences into a nested tensor."""

    modes = (True, False)

    def build(self):
        layer = torch.nn.TransformerEncoderLayer(16, 2, 24, 0.1, batch_first=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.nn.TransformerEncoder(layer, 2)

    def step(self, number, log):
        x = self.batch(number, (4, 6, 16))[0]
        mask = torch.arange(6)[None] >= torch.tensor([6, 3, 5, 2])[:, None]
        total = 0.0
        for mode in self.modes:
            self.model.train(mode)
            with torch.set_grad_enabled(mode):
                loss = (self.model(x, src_key_padding_mask=mask) ** 2).mean()
            total += float(loss.detach())
            if mode:
                loss.backward()
                log(loss)
                self.update()
        return total


class Evaluated(Padded):
    modes = (False,)


def test_an_encoder_with_a_padding_mask_that_is_evaluated(options, tmp_path):
    plain, recorded = train(Padded(TORCH)), train(Padded(TORCH), tmp_path / "run", options)
    assert_neutral(plain, recorded)
    # What evaluation would have left out is not recorded anyway: no warning, and no note beside the usual one.
    for number in recorded.run.numbers():
        assert recorded.run.steps(number)[0].notes == ("1 call(s) in evaluation mode within the step are not recorded",)


def test_an_encoder_with_a_padding_mask_whose_evaluation_is_recorded(options, tmp_path):
    plain = train(Evaluated(TORCH))
    with pytest.warns(RuntimeWarning, match="nested tensors have no one shape"):
        recorded = train(Evaluated(TORCH), tmp_path / "run", options, optimizer=None)
    assert_neutral(plain, recorded)
    assert "(root)/forward/output.0" in {r.site for r in recorded.run.steps(3)[0].records}


@pytest.mark.parametrize("optimizer", [True, False], ids=["optimizer", "none"])
def test_parameters_and_gradients_that_cannot_be_copied(options, optimizer):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(4, 3, device="meta"))
    model[0].frozen = torch.nn.Parameter(Odd(torch.ones(2)), requires_grad=False)
    sgd = torch.optim.SGD(model[0].parameters(), 0.1)

    def once():
        with padiff.record(model, optimizer=sgd if optimizer else None, **options) as rec:
            model[0](torch.ones(2, 4)).sum().backward()
            rec.log_loss(torch.empty((), device="meta"))
            sgd.step()
            rec.try_dump()
        return rec

    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="on the meta device"):
            rec = once()
        (step,) = rec.run.steps(0)
        assert {r.site for r in step.records if r.stage == "weight"} == {"0/weight/weight", "0/weight/bias"}
        assert {r.site for r in step.records if r.stage == "grad"} == {"0/grad/weight", "0/grad/bias"}
        assert any("(loop)" in note for note in step.notes)


DESCRIBED = {
    "jagged": (lambda: jagged(torch.ones(6, 4)), (2, 0, 4)),
    "nested": (lambda: ragged(torch.ones(6, 4)), (0,)),
    "sized": (lambda: Sized(torch.ones(6, 4)), (0,)),
    "meta": (lambda: torch.ones(6, 4, device="meta"), (6, 4)),
    "sparse": (lambda: torch.eye(4).to_sparse(), (4, 4)),
}


@pytest.mark.parametrize("kind", DESCRIBED)
@pytest.mark.parametrize("trains", [True, False])
def test_a_parameter_of_any_kind_is_described_and_recorded_around(kind, trains, options, tmp_path):
    """So that it can be seen afterwards that it trains, and that there is no record of it."""
    make, shape = DESCRIBED[kind]
    model = torch.nn.Linear(4, 3)
    model.odd = torch.nn.Parameter(make(), requires_grad=trains)
    sgd = torch.optim.SGD([model.weight, model.bias], 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with padiff.record(model, tmp_path / "run", optimizer=sgd, **options) as rec:
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
                sgd.step()
                rec.try_dump()
    run = padiff.open_run(tmp_path / "run")
    (odd,) = [p for p in run.info.layers[0].parameters if p.slot == "odd"]
    assert (odd.shape, odd.dtype, odd.trainable) == (shape, "float32", trains)
    weights = {r.slot for r in run.steps(1)[0].records if r.stage == "weight"}
    assert weights == {"weight", "bias", "odd"} - ({"odd"} if kind != "sparse" else set())


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("level", ["full", "sketch"])
def test_short_memory_and_interrupts_are_not_hidden(error, level, monkeypatch):
    def fails(*_):
        raise error

    monkeypatch.setattr(FRAMEWORK.tensors, "copy", fails)
    with pytest.raises(error):
        Copier(FRAMEWORK, padiff.sketches.samples.Samples(fails)).copy_at_level(torch.ones(3), level)


def test_notes_are_short_however_much_is_left_out():
    left_out = SkipLog()
    for k in range(1000):
        reason = SkippedTensor.because(ValueError(f"{k % 50}\n" + "words " * 1000)).reason
        left_out.add(f"layer{k % 200}", reason, training=k % 2 == 0)
    for training_only in (True, False):
        notes = left_out.notes(training_only)
        assert len(notes) == 6
        assert max(map(len, notes)) < 300
    assert notes[0].startswith("20 tensor(s) of 4 layer(s) are not recorded (layer0, layer50, layer100, ...): ")
    assert notes[-1] == "more is not recorded, for 45 other reason(s)"
    assert SkipLog().notes(False) == ()
