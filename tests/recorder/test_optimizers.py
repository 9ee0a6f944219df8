"""Several optimizers, none, frozen parameters, closures, accumulated steps."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import KITS, PADDLE, TORCH, hook_count
from kit.nets import batch, mlp, one_step, record_one, recorded, sites

import padiff
from padiff.errors import UsageError


class Gan:
    """A generator and a discriminator, linear both, trained in turn."""

    def __new__(cls, kit):
        return kit.net(
            lambda net, noise: net.discriminator(net.generator(noise)),
            generator=kit.Linear(2, 3),
            discriminator=kit.Linear(3, 1),
        )


def gan_step(kit, model, opt_g, opt_d, noise, real):
    fake = model.generator(noise).detach()
    (model.discriminator(fake).mean() - model.discriminator(real).mean()).backward()
    opt_d.step()
    kit.zero(opt_d)
    (-model(noise).mean()).backward()
    opt_g.step()
    kit.zero(opt_g)
    kit.zero(opt_d)


def test_with_two_optimizers_each_gradient_and_update_is_its_own_optimizers(kit):
    model = Gan(kit)
    opt_g, opt_d = kit.sgd(model.generator.parameters(), 0.1), kit.sgd(model.discriminator.parameters(), 0.5)
    noise, real = kit.tensor(np.ones((4, 2))), kit.tensor(np.full((4, 3), 2.0))
    before = [kit.numpy(p) for p in model.parameters()]
    with padiff.record(model, optimizer=[opt_g, opt_d]) as rec:
        gan_step(kit, model, opt_g, opt_d, noise, real)
        rec.try_dump()
    values, after = recorded(rec), [kit.numpy(p) for p in model.parameters()]
    names = ("generator/{}/weight", "generator/{}/bias", "discriminator/{}/weight", "discriminator/{}/bias")
    for name, old, new, rate in zip(names, before, after, (0.1, 0.1, 0.5, 0.5)):
        np.testing.assert_array_equal(values[name.format("update")], new - old)
        np.testing.assert_allclose(values[name.format("update")], -rate * values[name.format("grad")], 1e-4, 1e-7)
    rates = sorted(float(v) for site, v in values.items() if site.startswith("(loop)/update/learning_rate"))
    assert rates == pytest.approx([0.1, 0.5])
    # The discriminator's gradient in closed form: mean of the fakes less mean of the reals.
    fakes = before[0] if kit.name == "torch" else before[0].T
    expected = (fakes.sum(1) + before[1] - 2.0).reshape(-1)
    np.testing.assert_allclose(values["discriminator/grad/weight"].reshape(-1), expected, 1e-4, 1e-6)
    # Its bias cancels out; what the generator's backward leaves there is not the gradient that was consumed.
    np.testing.assert_allclose(values["discriminator/grad/bias"], 0.0, atol=1e-7)


def test_optimizers_can_be_given_by_name(kit):
    model = Gan(kit)
    named = {"g": kit.sgd(model.generator.parameters()), "d": kit.sgd(model.discriminator.parameters())}
    noise, real = kit.tensor(np.ones((4, 2))), kit.tensor(np.ones((4, 3)))
    with padiff.record(model, optimizer=named) as rec:
        gan_step(kit, model, *named.values(), noise, real)
        rec.try_dump()
    assert len(sites(rec, "grad")) == 4
    assert hook_count(kit, model, *named.values()) == 0


def test_gan_twins_match_across_the_frameworks():
    runs = []
    weights = None
    for kit in KITS.values():
        kit.seed(0)
        model = Gan(kit)
        if weights is None:
            weights = [kit.numpy(p) for p in model.parameters()]
        else:
            for p, value in zip(model.parameters(), weights):
                p.set_value(value.T.copy() if value.ndim == 2 else value)
        opt_g, opt_d = kit.sgd(model.generator.parameters()), kit.sgd(model.discriminator.parameters())
        data = np.random.default_rng(0)
        with padiff.record(model, optimizer=[opt_g, opt_d]) as rec:
            for _ in range(3):
                noise, real = kit.tensor(data.normal(size=(4, 2))), kit.tensor(data.normal(size=(4, 3)))
                gan_step(kit, model, opt_g, opt_d, noise, real)
                rec.try_dump()
        runs.append(rec.run)
    report = padiff.compare_runs(*runs)
    assert report.passed, report.first_diff.message
    assert report.coverage.complete


def test_an_optimizer_that_steps_twice_in_a_step_has_two_gradients_and_two_updates(kit):
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters())
    x, y = batch(kit)
    with padiff.record(model, optimizer=optimizer) as rec:
        before = kit.numpy(model[0].bias)
        one_step(kit, model, optimizer, x, y)
        between = kit.numpy(model[0].bias)
        one_step(kit, model, optimizer, x, y)
        after = kit.numpy(model[0].bias)
        rec.try_dump()
    values = recorded(rec)
    np.testing.assert_array_equal(values["0/update/bias"], between - before)
    np.testing.assert_array_equal(values["0/update/bias#1"], after - between)
    assert not np.array_equal(values["0/grad/bias"], values["0/grad/bias#1"])


@pytest.mark.parametrize("cleared", [True, False], ids=["cleared before try_dump", "still there"])
def test_without_an_optimizer_gradients_are_what_backward_left(kit, cleared):
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters())
    x, y = batch(kit)
    expected = kit.autograd(kit.cross_entropy(model(x), y), list(model.parameters()))
    with padiff.record(model) as rec:
        kit.cross_entropy(model(x), y).backward()
        optimizer.step()
        if cleared:
            kit.zero(optimizer)
        rec.try_dump()
    values = recorded(rec)
    for site, gradient in zip(("0/grad/weight", "0/grad/bias", "2/grad/weight", "2/grad/bias"), expected):
        np.testing.assert_allclose(values[site], gradient, 1e-6)


def test_without_an_optimizer_the_updates_are_what_the_parameters_moved_by(kit):
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters())
    before = kit.numpy(model[0].weight)
    with padiff.record(model) as rec:
        one_step(kit, model, optimizer, *batch(kit), rec)
    np.testing.assert_array_equal(recorded(rec)["0/update/weight"], kit.numpy(model[0].weight) - before)


def test_without_an_optimizer_accumulated_and_cleared_gradients_are_summed_over_the_micro_batches(kit):
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters())
    halves = [batch(kit, seed=k) for k in range(2)]
    total = sum(kit.cross_entropy(model(x), y) for x, y in halves)
    expected = kit.autograd(total, list(model.parameters()))
    with padiff.record(model) as rec:
        for x, y in halves:
            kit.cross_entropy(model(x), y).backward()
        optimizer.step()
        kit.zero(optimizer)
        rec.try_dump()
    np.testing.assert_allclose(recorded(rec)["0/grad/weight"], expected[0], 1e-5, 1e-8)


def test_frozen_parameters_have_weights_but_neither_gradient_nor_update(kit):
    model = mlp(kit)
    for parameter in model[0].parameters():
        kit.freeze(parameter)
    rec = record_one(kit, model, *batch(kit))
    assert sites(rec, "weight") == ["0/weight/weight", "0/weight/bias", "2/weight/weight", "2/weight/bias"]
    assert sites(rec, "grad") == ["2/grad/weight", "2/grad/bias"]
    assert [s for s in sites(rec, "update") if s[0] != "("] == ["2/update/weight", "2/update/bias"]
    frozen = {p.slot: p.trainable for layer in rec.info.layers if layer.path == "0" for p in layer.parameters}
    assert frozen == {"weight": False, "bias": False}


def test_a_parameter_that_took_no_part_in_the_backward_has_no_gradient(kit):
    class Net(kit.Net):
        def build(self):
            self.used, self.unused = kit.Linear(4, 3), kit.Linear(4, 3)

        def forward(self, x):
            return self.used(x)

    rec = record_one(kit, Net(), *batch(kit))
    assert sites(rec, "grad") == ["used/grad/weight", "used/grad/bias"]


def test_the_gradient_is_consumed_before_weight_decay_in_both():
    values = {}
    for kit in KITS.values():
        model = kit.Linear(2, 1)
        for p in model.parameters():
            p.data.fill_(3.0) if kit.name == "torch" else p.set_value(np.full(p.shape, 3.0, np.float32))
        if kit.name == "torch":
            optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.5)
        else:
            optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters(), weight_decay=0.5)
        with padiff.record(model, optimizer=optimizer) as rec:
            model(kit.tensor(np.ones((1, 2)))).sum().backward()
            optimizer.step()
            rec.try_dump()
        values[kit.name] = recorded(rec)
    for found in values.values():
        np.testing.assert_array_equal(found["(root)/grad/bias"], [1.0])
        np.testing.assert_allclose(found["(root)/update/bias"], [-0.1 * (1.0 + 0.5 * 3.0)], 1e-5)


def test_torchs_step_with_a_closure_records_the_gradient_that_the_closure_made():
    kit = TORCH
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters())
    x, y = batch(kit)
    expected = kit.autograd(kit.cross_entropy(model(x), y), list(model.parameters()))

    def closure():
        optimizer.zero_grad()
        loss = kit.cross_entropy(model(x), y)
        loss.backward()
        return loss

    with padiff.record(model, optimizer=optimizer) as rec:
        loss = optimizer.step(closure)
        optimizer.step(closure=closure)
        rec.try_dump()
    values = recorded(rec)
    np.testing.assert_array_equal(values["0/grad/weight"], expected[0])
    assert "0/grad/weight#1" in values
    assert float(loss.detach()) > 0


def test_lbfgs_with_its_closure_is_recorded_with_the_gradient_of_the_last_call(kit):
    model = mlp(kit)
    make = torch.optim.LBFGS if kit.name == "torch" else paddle.optimizer.LBFGS
    given = model.parameters()
    optimizer = make(given, lr=0.1, max_iter=3) if kit.name == "torch" else make(0.1, max_iter=3, parameters=given)
    x, y = batch(kit)
    gradients = []

    def closure():
        kit.zero(optimizer)
        loss = kit.cross_entropy(model(x), y)
        loss.backward()
        gradients.append(kit.numpy(model[0].weight.grad))
        return loss

    before = kit.numpy(model[0].weight)
    with padiff.record(model, optimizer=optimizer) as rec:
        optimizer.step(closure)
        rec.try_dump()
    values = recorded(rec)
    assert len(gradients) > 1
    np.testing.assert_array_equal(values["0/grad/weight"], gradients[-1])
    np.testing.assert_array_equal(values["0/update/weight"], kit.numpy(model[0].weight) - before)
    assert "(loop)/update/learning_rate" in values
    assert hook_count(kit, model, optimizer) == 0


NAMES = ("Adam", "AdamW", "RMSProp", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam")


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizers_gradients_and_updates_are_recorded(kit, name):
    model = mlp(kit)
    if kit.name == "torch":
        optimizer = getattr(torch.optim, name.replace("RMSP", "RMSp"))(model.parameters(), lr=0.1)
    else:
        optimizer = getattr(paddle.optimizer, name)(0.1, parameters=model.parameters())
    before = kit.numpy(model[0].weight)
    with padiff.record(model, optimizer=optimizer) as rec:
        one_step(kit, model, optimizer, *batch(kit), rec)
    values = recorded(rec)
    assert len(sites(rec, "grad")) == 4
    np.testing.assert_array_equal(values["0/update/weight"], kit.numpy(model[0].weight) - before)
    assert values["0/update/weight"].any()


def test_paddles_minimize_is_recorded_as_step_is():
    kit = PADDLE
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters())
    x, y = batch(kit)
    expected = kit.autograd(kit.cross_entropy(model(x), y), list(model.parameters()))
    before = kit.numpy(model[0].weight)
    with padiff.record(model, optimizer=optimizer) as rec:
        loss = kit.cross_entropy(model(x), y)
        loss.backward()
        optimizer.minimize(loss)
        optimizer.clear_grad()
        rec.try_dump()
    values = recorded(rec)
    np.testing.assert_array_equal(values["0/grad/weight"], expected[0])
    np.testing.assert_array_equal(values["0/update/weight"], kit.numpy(model[0].weight) - before)


def test_parameter_groups_have_a_learning_rate_each(kit):
    model = mlp(kit)
    if kit.name == "torch":
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.05}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
    else:  # paddle's groups give a factor
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "learning_rate": 0.5}]
        optimizer = paddle.optimizer.SGD(0.1, parameters=groups)
    with padiff.record(model, optimizer=optimizer) as rec:
        one_step(kit, model, optimizer, *batch(kit), rec)
    values = recorded(rec)
    assert values["(loop)/update/learning_rate"] == pytest.approx(0.1)
    assert values["(loop)/update/learning_rate.1"] == pytest.approx(0.05)
    np.testing.assert_allclose(values["0/update/weight"], -0.1 * values["0/grad/weight"], 1e-4, 1e-7)
    np.testing.assert_allclose(values["2/update/weight"], -0.05 * values["2/grad/weight"], 1e-4, 1e-7)


@pytest.mark.parametrize(("own", "other"), [(TORCH, PADDLE), (PADDLE, TORCH)], ids=lambda kit: kit.name)
def test_an_optimizer_of_the_other_framework_is_refused(own, other):
    wrong = other.sgd(mlp(other).parameters())
    with pytest.raises(UsageError, match=rf"expected an optimizer of {own.name} .*, got {other.name}"):
        padiff.record(mlp(own), optimizer=wrong)


def test_something_that_is_no_optimizer_is_refused(kit):
    with pytest.raises(UsageError, match=r"expected an optimizer of \w+ .*, got builtins.float"):
        padiff.record(mlp(kit), optimizer=0.1)


@pytest.mark.parametrize("options", [{}, {"detail": "sketch"}], ids=["full", "sketch"])
def test_parameters_that_are_frozen_while_another_optimizer_steps_have_updates(kit, options):
    """Networks that freeze each other in turn, as a GAN's: each step of an optimizer moves its own network alone."""
    first, second = kit.Linear(4, 4), kit.Linear(4, 4)
    model = kit.Sequential(first, second)
    optimizers = [kit.sgd(first.parameters(), 0.1), kit.sgd(second.parameters(), 0.1)]
    x = kit.tensor(np.ones((2, 4), np.float32))

    def train(layer, is_on):
        for parameter in layer.parameters():
            if kit.name == "torch":
                parameter.requires_grad_(is_on)
            else:
                parameter.stop_gradient = not is_on

    with padiff.record(model, optimizer=optimizers, **options) as rec:
        for _ in range(3):
            for other, optimizer in ((second, optimizers[0]), (first, optimizers[1])):
                train(other, False)
                model(x).mean().backward()
                optimizer.step()
                kit.zero(optimizer)
                train(other, True)
            rec.try_dump()
    for number in range(3):
        (step,) = rec.run.steps(number)
        for stage in ("grad", "update"):
            sites = {(record.layer, record.slot) for record in step.records if record.stage == stage}
            assert sites >= {(layer, slot) for layer in "01" for slot in ("weight", "bias")}, stage


@pytest.mark.parametrize("place", [0, 1])
def test_settings_leave_out_an_optimizer_whose_parameters_another_one_steps(kit, place, tmp_path):
    """An optimizer that is made and left aside, as a script's table of optimizers has them."""

    def train(folder, steps, *optimizers, model):
        with padiff.record(model, tmp_path / folder, optimizer=list(optimizers)) as rec:
            for step in range(3):
                model(kit.tensor(np.ones((4, 2)))).mean().backward()
                optimizer = steps(step)
                optimizer.step()
                kit.zero(optimizer)
                rec.try_dump()
        opened = padiff.open_run(tmp_path / folder)
        return opened.info.settings, [next(iter(opened.steps(number))).settings for number in opened.numbers()]

    def rates(settings):
        return {name: value for name, value in settings.items() if name.endswith(("rule", ".lr"))}

    def alone(at=0):
        return {f"optimizer.{at}.rule": "SGD", f"optimizer.{at}.group.0.lr": 0.1}

    def made():
        model = kit.Linear(2, 3)
        kit.set(model.weight, np.ones(tuple(model.weight.shape)))
        kit.set(model.bias, np.zeros(3))
        used, aside = kit.sgd(model.parameters(), 0.1), kit.sgd(model.parameters(), 0.7)
        return model, used, aside

    model, used, aside = made()
    order = [used, aside] if place else [aside, used]
    settings, later = train("aside", lambda _: used, *order, model=model)
    assert rates(settings) == alone() and not any(rates(each) for each in later)
    model, used, _ = made()
    assert rates(train("alone", lambda _: used, used, model=model)[0]) == alone()
    report = padiff.compare_runs(tmp_path / "aside", tmp_path / "alone")
    assert report.outcome == "match", str(report)
    # From its first step on it is listed; one that holds parameters of its own is, whether it steps or not.
    model, used, aside = made()
    _, later = train("second", lambda step: aside if step == 2 else used, used, aside, model=model)
    assert not rates(later[1]) and rates(later[2]) == {"optimizer.1.rule": "SGD", "optimizer.1.group.0.lr": 0.7}
    model, *_ = made()
    used, other = kit.sgd([model.weight], 0.1), kit.sgd([model.bias], 0.7)
    settings, _ = train("other", lambda _: used, used, other, model=model)
    assert rates(settings) == alone() | {"optimizer.1.rule": "SGD", "optimizer.1.group.0.lr": 0.7}
