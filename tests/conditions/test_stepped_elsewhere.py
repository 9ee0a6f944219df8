"""An optimizer that is given, but whose step() is not what changes the parameters: that is said, and only that."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from kit.frameworks import TORCH
from kit.nets import mlp

import padiff

DETAILS = ["full", "sketch"]


class Sam(torch.optim.Optimizer):
    """As it is found on the net: two steps of its own, and an optimizer that takes them."""

    def __init__(self, params, rho=0.05):
        super().__init__(params, {"rho": rho})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.02, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * group["rho"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure=None):
        raise NotImplementedError


def loss_of(kit, model, number):
    return (model(kit.tensor(np.random.default_rng(number).normal(size=(5, 4)))) ** 2).mean()


def said_of(kit, model, optimizer, step, steps=5, **options):
    """What is said about optimizers in a training; and the run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        with padiff.record(model, optimizer=optimizer, **options) as rec:
            for number in range(steps):
                step(number)
                rec.try_dump()
    return [str(one.message) for one in caught if "optimizer that was given" in str(one.message)], rec.run


@pytest.mark.parametrize("detail", DETAILS)
@pytest.mark.parametrize("given", ["itself", "base"])
def test_an_optimizer_that_hands_its_step_on_is_reported(given, detail):
    kit = TORCH
    model = mlp(kit)
    sam = Sam(model.parameters())

    def step(number):
        loss_of(kit, model, number).backward()
        sam.first_step()
        loss_of(kit, model, number).backward()
        sam.second_step()

    said, run = said_of(kit, model, sam if given == "itself" else sam.base_optimizer, step, detail=detail)
    recorded = [sum(r.stage == "grad" for r in run.steps(number)[0].records) for number in run.numbers()]
    if given == "base":
        assert not said
        assert recorded == [4] * 5
        return
    (text,) = said
    assert "in step 1 and the due step before" in text
    assert "base_optimizer" in text
    assert "optimizer= the one whose step() is called" in text


@pytest.mark.parametrize("detail", DETAILS)
def test_another_optimizer_that_has_taken_its_place_is_reported(kit, detail):
    model = mlp(kit)
    first, second = kit.sgd(model.parameters()), kit.sgd(model.parameters())

    def step(number):
        loss_of(kit, model, number).backward()
        (first if number < 2 else second).step()
        kit.zero(first)

    said, _ = said_of(kit, model, first, step, detail=detail)
    assert len(said) == 1
    assert "in step 3" in said[0]


@pytest.mark.parametrize("detail", DETAILS)
def test_gradients_that_add_up_over_many_due_steps_are_no_reason(kit, detail):
    model = mlp(kit)
    optimizer = kit.adam(model.parameters())

    def step(number):
        loss_of(kit, model, number).backward()
        if number % 4 == 3:
            optimizer.step()
            kit.zero(optimizer)

    assert not said_of(kit, model, optimizer, step, steps=9, detail=detail)[0]


@pytest.mark.parametrize("detail", DETAILS)
def test_skipped_steps_of_a_loss_scaler_are_no_reason(detail):
    """In torch; paddle's scaler does nothing without a GPU."""
    kit = TORCH
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)

    def step(number):
        scaler.scale(loss_of(kit, model, number) * float("inf")).backward()
        scaler.step(optimizer)
        scaler.update()
        kit.zero(optimizer)

    assert not said_of(kit, model, optimizer, step, detail=detail)[0]


def test_an_optimizer_of_a_part_that_rests_is_no_reason(kit):
    """Of a GAN, say, whose other half is trained by an optimizer that was not given."""
    model = mlp(kit)
    given, other = kit.sgd(model[0].parameters()), kit.sgd(model[2].parameters())

    def step(number):
        loss_of(kit, model, number).backward()
        other.step()
        kit.zero(given)
        kit.zero(other)

    assert not said_of(kit, model, given, step)[0]


def test_evaluation_alone_is_no_reason(kit):
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters())

    def step(number):
        with kit.no_grad():
            loss_of(kit, model, number)

    assert not said_of(kit, model, optimizer, step)[0]
