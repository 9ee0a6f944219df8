"""Models that change while they are trained: what is recorded is what the model is in the step."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
from recording.kits import hook_count, mlp

import padiff

DETAILS = ["full", "sketch"]


def loss_of(kit, model, number, width=8):
    x = kit.tensor(np.random.default_rng(number).normal(size=(5, width)))
    return (model(x) ** 2).mean()


def trained(kit, make, change, steps=6, given=False, hooks=0, **options):
    """Record a training whose model is changed before steps, by ``change(model, optimizer, number)``."""
    kit.seed(0)
    model = make()
    optimizer = kit.sgd(model.parameters())
    with padiff.record(model, optimizer=optimizer if given else None, **options) as rec:
        for number in range(steps):
            optimizer = change(model, optimizer, number) or optimizer
            loss = loss_of(kit, model, number)
            loss.backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.log_loss(loss)
            rec.try_dump()
    assert hook_count(kit, model, optimizer) == hooks  # those that are not ours
    return rec.run


def stages(run, number, layer):
    """The stages that were recorded of a layer, each as often as it was."""
    return sorted(r.stage for r in run.steps(number)[0].records if r.layer == layer)


def set_trainable(kit, layer, trainable):
    for parameter in layer.parameters():
        if kit.name == "torch":
            parameter.requires_grad_(trainable)
        else:
            parameter.stop_gradient = not trainable


# -- parameters that are frozen and unfrozen ---------------------------------------------------------------------------


def frozen_first(kit):
    def make():
        model = mlp(kit, (8, 16, 3))
        set_trainable(kit, model[0], False)
        return model

    return make


@pytest.mark.parametrize("detail", DETAILS)
def test_what_is_recorded_of_parameters_that_are_unfrozen_does_not_depend_on_the_schedule(kit, detail):
    def change(model, optimizer, number):
        if number == 3:
            set_trainable(kit, model[0], True)

    each, some = (trained(kit, frozen_first(kit), change, detail=detail, every_n_steps=n) for n in (1, 2))
    for number in some.numbers():
        assert [r.site for r in each.steps(number)[0].records] == [r.site for r in some.steps(number)[0].records]
    assert stages(each, 2, "0").count("grad") == 0
    for number in (3, 4, 5):
        assert stages(each, number, "0").count("grad") == stages(each, number, "0").count("update") == 2
    report = padiff.compare_runs(each, some)
    assert report.passed, report.first_diff.message


def test_parameters_that_are_frozen_have_no_gradient_any_more(kit):
    def change(model, optimizer, number):
        if number:
            set_trainable(kit, model[0], number % 2 == 0)

    run = trained(kit, lambda: mlp(kit, (8, 16, 3)), change)
    assert [stages(run, number, "0").count("grad") for number in range(6)] == [2, 0, 2, 0, 2, 0]
    assert [stages(run, number, "2").count("grad") for number in range(6)] == [2] * 6


def test_a_parameter_that_is_another_object_is_followed(kit):
    def change(model, optimizer, number):
        if number != 2:
            return None
        layer = model[2]
        if kit.name == "torch":
            layer.weight = torch.nn.Parameter(torch.full((3, 16), 0.25))
        else:
            layer.weight = paddle.create_parameter([16, 3], "float32")
            layer.weight.set_value(paddle.full([16, 3], 0.25))
        return kit.sgd(model.parameters())

    run = trained(kit, lambda: mlp(kit, (8, 16, 3)), change)
    for number in (2, 3):
        assert [stages(run, number, "2").count(stage) for stage in ("weight", "grad", "update")] == [2, 2, 2]
    (weight,) = (r for r in run.steps(2)[0].records if (r.layer, r.stage, r.slot) == ("2", "weight", "weight"))
    assert (weight.value == 0.25).all()


@pytest.mark.parametrize("every", [1, 2])
def test_a_norm_that_is_put_on_a_weight_does_not_disturb_the_training(kit, every):
    def change(model, optimizer, number):
        if number != 2:
            return None
        if kit.name == "torch":
            torch.nn.utils.parametrizations.spectral_norm(model[0])
        else:
            paddle.nn.utils.weight_norm(model[0])
        return kit.sgd(model.parameters())

    hooks = int(kit.name == "paddle")  # what works the weight out
    run = trained(kit, lambda: mlp(kit, (8, 16, 3)), change, hooks=hooks, every_n_steps=every)
    assert run.numbers() == list(range(0, 6, every))
    for number in run.numbers():
        assert stages(run, number, "2").count("grad") == 2
    slots = {r.slot for r in run.steps(4)[0].records if r.layer == "0" and r.stage == "grad"}
    assert "weight" not in slots
    assert "bias" in slots
