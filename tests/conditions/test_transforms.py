"""Models that are called inside of torch.func: there they get stand-ins for tensors, whose values nobody can see."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch
from kit.frameworks import TORCH
from torch.func import functional_call, grad, jacrev, jvp, vmap

import padiff

from .training import Training, assert_neutral, counts, train

STAND_INS = "inside of torch.func"


class Transformed(Training):
    """Calls of the model inside of a transformation, and what the optimizer makes of them."""

    def build(self):
        kit = self.kit
        return kit.Sequential(kit.Linear(4, 8), torch.nn.Tanh(), kit.Linear(8, 3))

    def optimize(self):
        return [self.kit.sgd(self.model.parameters(), 0.12 if self.fault else 0.1)]

    def step(self, number, log):
        x, _ = self.batch(number)
        loss = self.calculate(x)
        log(loss)
        self.update()
        return float(loss.detach())

    def held(self):
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def of(self, parameters, x):
        return functional_call(self.model, parameters, (x,)).pow(2).mean()

    def give(self, gradients):
        for name, parameter in self.model.named_parameters():
            parameter.grad = gradients[name]


class PerSample(Transformed):
    """A gradient for each sample, as differential privacy wants them."""

    def calculate(self, x):
        gradients = vmap(grad(lambda p, one: self.of(p, one[None])), (None, 0))(self.held(), x)
        self.give({name: each.mean(0) for name, each in gradients.items()})
        return gradients["2.bias"].sum()


class Grad(Transformed):
    def calculate(self, x):
        gradients = grad(lambda p: self.of(p, x))(self.held())
        self.give(gradients)
        return gradients["2.bias"].sum()


class Vmap(Transformed):
    def calculate(self, x):
        loss = vmap(self.model)(x[:, None]).pow(2).mean()
        loss.backward()
        return loss


class Jacobian(Transformed):
    """A penalty on the Jacobian, after an ordinary call."""

    ordinary = True

    def calculate(self, x):
        loss = self.model(x).pow(2).mean() + vmap(jacrev(lambda z: self.model(z[None])[0]))(x).pow(2).mean()
        loss.backward()
        return loss


class Before(Jacobian):
    """The same, before the ordinary call."""

    def calculate(self, x):
        penalty = vmap(jacrev(lambda z: self.model(z[None])[0]))(x).pow(2).mean()
        loss = self.model(x).pow(2).mean() + penalty
        loss.backward()
        return loss


class Beside(Transformed):
    """A gradient for each sample, of which the loop only reads the norms, beside an ordinary call."""

    ordinary = True

    def calculate(self, x):
        loss = self.model(x).pow(2).mean()
        self.norms = vmap(grad(lambda p, one: self.of(p, one[None])), (None, 0))(self.held(), x)
        loss.backward()
        return loss


class Jvp(Transformed):
    def calculate(self, x):
        output, tangent = jvp(self.model, (x,), (torch.ones_like(x),))
        loss = (output + tangent).pow(2).mean()
        loss.backward()
        return loss


class Inside(Transformed):
    """A layer that calls one of its own inside of vmap."""

    ordinary = True

    def build(self):
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)

            def forward(self, x):
                return vmap(self.head)(self.body(x))

        return Net()

    def calculate(self, x):
        loss = self.model(x).pow(2).mean()
        loss.backward()
        return loss


class Batched(Transformed):
    """Gradients of activations for several directions at once, which backward computes inside of vmap."""

    ordinary = True

    def calculate(self, x):
        hidden = self.model[0](x)
        output = self.model[2](self.model[1](hidden))
        directions = torch.eye(3)[:, None].expand(3, 6, 3)
        (jacobian,) = torch.autograd.grad(output, hidden, directions, is_grads_batched=True, retain_graph=True)
        loss = output.pow(2).mean() + jacobian.pow(2).mean()
        loss.backward()
        return loss


KINDS = [PerSample, Grad, Vmap, Jacobian, Before, Beside, Jvp, Inside, Batched]
of_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__.lower())


def quiet(*args, **more):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "padiff: in step", RuntimeWarning)
        return train(*args, **more)


@of_kinds
def test_the_training_is_the_same_and_what_else_it_has_is_recorded(kind, options, tmp_path):
    plain = train(kind(TORCH))
    with pytest.warns(RuntimeWarning, match=STAND_INS) as reported:
        recorded = train(kind(TORCH), tmp_path / "run", options)
    assert len(reported) == 1
    assert_neutral(plain, recorded)
    for number in recorded.run.numbers():
        (step,) = recorded.run.steps(number)
        assert len(step.notes) == 1
        assert STAND_INS in step.notes[0]
        found = counts(recorded.run, number)
        assert {stage: found[stage] for stage in ("weight", "grad", "update", "rate", "loss")} == {
            "weight": 4, "grad": 4, "update": 4, "rate": 1, "loss": 1
        }  # fmt: skip
        assert ("forward" in found) == hasattr(kind, "ordinary")


def test_the_ordinary_call_is_recorded_whole(options, tmp_path):
    for kind in (Jacobian, Before):
        run = quiet(kind(TORCH), tmp_path / kind.__name__, options).run
        for number in run.numbers():
            found = counts(run, number)
            assert (found["input"], found["forward"], found["backward"]) == (1, 4, 4)
            assert {r.call for r in run.steps(number)[0].records} == {0}
    assert padiff.compare_runs(tmp_path / "Jacobian", tmp_path / "Before").passed


@of_kinds
def test_weights_are_those_before_the_step_and_mistakes_are_found(kind, options, tmp_path):
    quiet(kind(TORCH), tmp_path / "right", options)
    quiet(kind(TORCH), tmp_path / "again", options)
    quiet(kind(TORCH, fault=True), tmp_path / "wrong", options)
    assert padiff.compare_runs(tmp_path / "right", tmp_path / "again").passed
    first = padiff.compare_runs(tmp_path / "right", tmp_path / "wrong").first_diff
    assert (first.step, first.stage) == (0, "update"), first.message


def test_weights_and_updates_follow_each_other(tmp_path):
    run = quiet(PerSample(TORCH), tmp_path / "run").run
    steps = [{r.site: r.value for r in run.steps(n)[0].records} for n in run.numbers()]
    for before, after in itertools.pairwise(steps):
        for layer, slot in (("0", "weight"), ("0", "bias"), ("2", "weight"), ("2", "bias")):
            moved = before[f"{layer}/weight/{slot}"] + before[f"{layer}/update/{slot}"]
            np.testing.assert_allclose(after[f"{layer}/weight/{slot}"], moved, 1e-6, 1e-7)


def test_functional_calls_inside_are_left_out_too(monkeypatch, options, tmp_path):
    monkeypatch.setenv("PADIFF_API_CHECK", "ON")
    plain = train(Inside(TORCH))
    recorded = quiet(Inside(TORCH), tmp_path / "run", options)
    assert_neutral(plain, recorded)


def test_a_loss_that_is_logged_inside_is_left_out(options):
    training = Grad(TORCH)
    rec = padiff.record(training.model, **options)

    def of(parameters, x):
        loss = training.of(parameters, x)
        rec.log_loss(loss)
        return loss

    def once():
        with rec:
            grad(of)(training.held(), training.batch(0)[0])

    with pytest.warns(RuntimeWarning, match=STAND_INS):
        once()
    (step,) = rec.run.steps(0)
    assert not [record for record in step.records if record.stage == "loss"]
    assert len(step.notes) == 2
