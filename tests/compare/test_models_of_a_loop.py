"""Several models that one loop trains: one run, one verdict, in causal order."""

from __future__ import annotations

import contextlib
import copy
from itertools import pairwise

import numpy as np
import paddle
import pytest
import torch
from torch.nn import functional

import padiff
from padiff.errors import UsageError

RNG = np.random.default_rng(3)
X, Z = (RNG.normal(size=(5, 12, width)).astype("float32") for width in (6, 3))
MIX = RNG.uniform(size=(5, 12, 1)).astype("float32")
QUEUE = RNG.normal(size=(4, 24)).astype("float32")


def _net(kit, *widths, seed=0, act="Tanh"):
    """Linear layers with an activation between them; equal weights in both frameworks."""
    rng, layers = np.random.default_rng(seed), []
    for before, after in pairwise(widths):
        linear = kit.nn.Linear(before, after)
        weight = (rng.normal(size=(after, before)) / np.sqrt(before)).astype("float32")
        if kit is torch:
            with torch.no_grad():
                linear.weight.copy_(torch.tensor(weight))
                linear.bias.zero_()
        else:
            linear.weight.set_value(weight.T)
            linear.bias.set_value(np.zeros(after, "float32"))
        layers += [linear, getattr(kit.nn, act)()]
    return kit.nn.Sequential(*layers[:-1])


def _adam(kit, net, rate=2e-3):
    if kit is torch:
        return torch.optim.Adam(net.parameters(), rate)
    return paddle.optimizer.Adam(rate, parameters=net.parameters())


def _tensor(kit, values):
    return torch.tensor(values) if kit is torch else paddle.to_tensor(values)


def _step(optimizer):
    optimizer.step()
    optimizer.zero_grad() if isinstance(optimizer, torch.optim.Optimizer) else optimizer.clear_grad()


def _cascade(folder, kit, act="Tanh", between=None, **options):
    """One model eats what the other gives."""
    first, second = _net(kit, 6, 24, 8, seed=1, act=act), _net(kit, 8, 16, 1, seed=2)
    optimizers = [_adam(kit, net, 1e-2) for net in (first, second)]
    with padiff.record({"first": first, "second": second}, folder, optimizer=optimizers, **options) as rec:
        for number, x in enumerate(X):
            hidden = first(_tensor(kit, x))
            hidden = hidden if between is None else between(number, hidden)
            loss = (second(hidden) ** 2).mean()
            loss.backward()
            for optimizer in optimizers:
                _step(optimizer)
            rec.try_dump()
    return folder


@pytest.mark.parametrize("options", [{}, {"detail": "sketch"}], ids=["full", "sketch"])
def test_a_clean_cascade_matches(options, tmp_path):
    report = padiff.compare_runs(
        _cascade(tmp_path / "a", torch, **options), _cascade(tmp_path / "b", paddle, **options)
    )
    assert report.passed, report.first_diff.message


def test_a_fault_in_the_first_model_is_placed_there_and_the_second_follows(tmp_path):
    report = padiff.compare_runs(_cascade(tmp_path / "a", torch), _cascade(tmp_path / "b", paddle, act="GELU"))
    first = report.first_diff
    assert (first.step, first.stage, first.candidate) == (0, "forward", "first.1")
    assert first.cause.proven and "GELU" in str(first.cause)
    assert not report.independent


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (lambda _, hidden: hidden.flip([0]), "flip() in the loop is left out"),
        (lambda _, hidden: hidden * 1.1, "is not scaled by 1.1"),
    ],
    ids=["flipped", "scaled"],
)
def test_code_between_two_models_is_named_and_is_no_shuffling(between, words, tmp_path):
    report = padiff.compare_runs(_cascade(tmp_path / "a", torch), _cascade(tmp_path / "b", paddle, between=between))
    first = report.first_diff
    assert (first.step, first.stage, first.candidate) == (0, "input", "second")
    assert first.cause.proven and words in str(first.cause) and "samples" not in str(first.cause)


@pytest.mark.parametrize("options", [{}, {"detail": "sketch"}], ids=["full", "sketch"])
def test_an_input_that_another_model_makes_does_not_excuse_itself(options, tmp_path):
    def between(number, hidden):
        return hidden * (0.9 if number >= 2 else 1.0)

    report = padiff.compare_runs(
        _cascade(tmp_path / "a", torch, **options), _cascade(tmp_path / "b", paddle, between=between, **options)
    )
    first = report.first_diff
    assert (first.step, first.stage, first.candidate) == (2, "input", "second")
    assert "batch" not in str(first.cause) and "samples" not in str(first.cause)


def test_an_input_of_a_model_in_another_run_is_said_to_follow(tmp_path):
    def train(folder, act):
        first, second = _net(torch, 6, 24, 8, seed=1, act=act), _net(torch, 8, 16, 1, seed=2)
        optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
        with (
            padiff.record(first, folder / "first", optimizer=optimizer) as one,
            padiff.record(second, folder / "second", optimizer=optimizer) as two,
        ):
            for x in X[:2]:
                hidden = first(torch.tensor(x))
                (second(hidden.detach()).square().mean() + hidden.square().mean()).backward()
                _step(optimizer)
                one.try_dump()
                two.try_dump()
        return folder

    a, b = train(tmp_path / "a", "Tanh"), train(tmp_path / "b", "Sigmoid")
    assert padiff.compare_runs(a / "first", b / "first").first_diff.candidate == "1"
    first = padiff.compare_runs(a / "second", b / "second").first_diff
    assert first.stage == "input" and first.cause.kind == "other_model" and "padiff.record({" in str(first.cause)


# -- a critic with a gradient penalty --------------------------------------------------------------------------------


def _wgan(folder, other=False, weight=10.0, target=1.0, graph=True, penalized=True, **options):
    """A critic and a generator; ``other``: the critic's calls come in another order."""
    gen, critic = _net(torch, 3, 12, 6, seed=4), _net(torch, 6, 24, 1, seed=5)
    optimizers = [torch.optim.Adam(net.parameters(), 1e-3) for net in (critic, gen)]

    def penalty(mixed):
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=graph)
        return weight * ((slope.norm(2, 1) - target) ** 2).mean()

    with padiff.record({"gen": gen, "critic": critic}, folder, optimizer=optimizers, **options) as rec:
        for x, z, mix in zip(*map(torch.tensor, (X, Z, MIX))):
            fake = gen(z).detach()
            mixed = (mix * x + (1 - mix) * fake).requires_grad_()
            if other:
                loss = penalty(mixed)
                loss = critic(fake).mean() - critic(x).mean() + loss
            else:
                loss = critic(fake).mean() - critic(x).mean()
                loss = loss + penalty(mixed) if penalized else loss
            loss.backward()
            _step(optimizers[0])
            critic.zero_grad()
            (-critic(gen(z)).mean()).backward()
            _step(optimizers[1])
            optimizers[0].zero_grad()
            rec.try_dump()
    return folder


@pytest.mark.parametrize("options", [{}, {"detail": "sketch"}], ids=["full", "sketch"])
def test_calls_of_a_model_in_another_order_are_the_same_calls(options, tmp_path):
    report = padiff.compare_runs(_wgan(tmp_path / "a", **options), _wgan(tmp_path / "b", other=True, **options))
    assert report.passed, report.first_diff.message


def test_a_weight_of_a_term_of_gradients_is_named(tmp_path):
    first = padiff.compare_runs(_wgan(tmp_path / "a"), _wgan(tmp_path / "b", other=True, weight=1.0)).first_diff
    assert (first.step, first.stage) == (0, "loss")
    assert first.cause.proven and "is 1 for the reference's 10" in str(first.cause)


def test_another_form_of_a_term_of_gradients_is_named(tmp_path):
    first = padiff.compare_runs(_wgan(tmp_path / "a"), _wgan(tmp_path / "b", target=0.0)).first_diff
    assert first.cause.proven and "is 0 for the reference's 1" in str(first.cause)


def test_a_penalty_without_create_graph_has_no_gradient(tmp_path):
    first = padiff.compare_runs(_wgan(tmp_path / "a"), _wgan(tmp_path / "b", graph=False)).first_diff
    assert first.cause.kind == "second_order" and "create_graph" in str(first.cause)


def test_a_call_that_one_loop_lacks_is_no_micro_batch(tmp_path):
    first = padiff.compare_runs(_wgan(tmp_path / "a"), _wgan(tmp_path / "b", penalized=False)).first_diff
    assert first.cause.kind == "missing_call" and not first.cause.proven
    assert "`critic` 3 times" in str(first.cause) and "micro" not in str(first.cause)


def _contrast(folder, kit, wrapped=False, weight=0.3):
    """An encoder and a head that the loop calls twice; ``wrapped``: inside of one model, the second half first."""
    encoder, head = _net(kit, 6, 24, 8, seed=1), _net(kit, 8, 4, seed=2)

    class Model(kit.nn.Module if kit is torch else kit.nn.Layer):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = encoder, head

        def forward(self, x):
            if wrapped:
                return self.project(x)
            raise AssertionError("the loop calls the parts")

        def project(self, x):
            return self.head(self.encoder(x).mean(-2))

    model = Model()
    optimizer = _adam(kit, model)
    with padiff.record(model, folder, optimizer=optimizer) as rec:
        for x in X:
            x = _tensor(kit, x.reshape(3, 4, 6))
            if wrapped:
                second, first = model(x[:, 1:]), model(x)
            else:
                first, second = model.project(x), model.project(x[:, 1:])
            (((first - second) ** 2).mean() + weight * (first**2).mean()).backward()
            _step(optimizer)
            rec.try_dump()
    return folder


@pytest.mark.parametrize("kit", [torch, paddle])
def test_parts_that_a_loop_calls_are_paired_with_those_of_a_model_called_in_another_order(kit, tmp_path):
    reference = _contrast(tmp_path / "a", torch)
    report = padiff.compare_runs(reference, _contrast(tmp_path / "b", kit, wrapped=True))
    assert report.passed, report.first_diff.message
    first = padiff.compare_runs(reference, _contrast(tmp_path / "c", kit, wrapped=True, weight=0.2)).first_diff
    assert first.stage in ("loss", "backward") and "0.3" in str(first.cause)


def _mean_teacher(folder, kit, decay=0.9, eps=1e-5, **options):
    """A student, and a teacher in evaluation mode whose weights and statistics are averages of the student's."""
    norm = kit.nn.BatchNorm1d if kit is torch else kit.nn.BatchNorm1D
    argument = "eps" if kit is torch else "epsilon"
    student, teacher = (
        kit.nn.Sequential(_net(kit, 6, 16, seed=1), norm(16, **{argument: each}), _net(kit, 16, 4, seed=2))
        for each in (1e-5, eps)
    )
    teacher.eval()
    optimizer = _adam(kit, student)
    with padiff.record({"student": student, "teacher": teacher}, folder, optimizer=optimizer, **options) as rec:
        for x, z in zip(X, X[::-1].copy()):
            with kit.no_grad():
                goal = teacher(_tensor(kit, z))
            ((student(_tensor(kit, x)) ** 2).mean() + ((student(_tensor(kit, z)) - goal) ** 2).mean()).backward()
            _step(optimizer)
            with kit.no_grad():
                for of in ("parameters", "buffers"):
                    for mine, theirs in zip(getattr(teacher, of)(), getattr(student, of)()):
                        if "int" not in str(mine.dtype):
                            average = decay * mine + (1 - decay) * theirs
                            mine.copy_(average) if kit is torch else mine.set_value(average)
            rec.try_dump()
    return folder


@pytest.mark.parametrize("options", [{}, {"detail": "sketch"}], ids=["full", "sketch"])
def test_a_teacher_in_evaluation_mode_has_the_error_of_its_running_variances(options, tmp_path):
    """torch feeds a running variance the unbiased estimate, paddle the biased one: the teacher's outputs show it."""
    reference = _mean_teacher(tmp_path / "a", torch, **options)
    report = padiff.compare_runs(reference, _mean_teacher(tmp_path / "b", paddle, **options))
    assert report.passed, report.first_diff.message
    report = padiff.compare_runs(reference, _mean_teacher(tmp_path / "c", paddle, eps=1e-3, **options))
    assert (report.first_diff.step, report.first_diff.stage) == (0, "forward")
    report = padiff.compare_runs(reference, _mean_teacher(tmp_path / "d", paddle, decay=0.8, **options))
    assert report.first_diff.step == 1 and report.first_diff.reference.startswith("teacher")


# -- a generator that is not detached --------------------------------------------------------------------------------


def _gan(folder, kit, detached=True, zeroed=True, both=False):
    gen, disc = _net(kit, 3, 12, 6, seed=4), _net(kit, 6, 24, 1, seed=5)
    optimizers = [_adam(kit, net) for net in (disc, gen)]
    if both:
        optimizers[1] = torch.optim.Adam([*gen.parameters(), *disc.parameters()], 1e-3)
    loss_of = kit.nn.BCEWithLogitsLoss()
    one, zero = (_tensor(kit, np.full((12, 1), value, "float32")) for value in (1.0, 0.0))
    with padiff.record({"gen": gen, "disc": disc}, folder, optimizer=optimizers) as rec:
        for x, z in zip(X, Z):
            fake = gen(_tensor(kit, z))
            loss = loss_of(disc(_tensor(kit, x)), one) + loss_of(disc(fake.detach() if detached else fake), zero)
            loss.backward(retain_graph=True)
            _step(optimizers[0])
            loss_of(disc(fake), one).backward()
            _step(optimizers[1])
            if zeroed:
                optimizers[0].zero_grad() if kit is torch else optimizers[0].clear_grad()
            rec.try_dump()
    return folder


def test_gradients_that_another_models_backward_leaves_are_named(tmp_path):
    first = padiff.compare_runs(_gan(tmp_path / "a", torch), _gan(tmp_path / "b", paddle, zeroed=False)).first_diff
    assert (first.step, first.stage, first.cause.kind) == (1, "grad", "stale_gradient") and first.cause.proven
    assert "those of call 3 of `disc.0` in step 0" in str(first.cause) and "clear_grad()" in first.cause.fix


def test_a_parameter_that_two_optimizers_hold_is_named(tmp_path):
    first = padiff.compare_runs(_gan(tmp_path / "a", torch), _gan(tmp_path / "b", torch, both=True)).first_diff
    assert (first.stage, first.cause.kind, first.cause.proven) == ("grad", "step_repeated", True)
    assert "/weight` in 2 of its optimizers, the reference's in 1" in str(first.cause)


def _bootstrapped(folder, kit, cut=True):
    """A critic whose goal the policy gives; ``cut``: without gradients."""
    policy, critic = _net(kit, 6, 12, 3, seed=4), _net(kit, 9, 24, 1, seed=5)
    optimizers = [_adam(kit, net) for net in (critic, policy)]
    models = {"policy": policy, "critic": critic} if kit is torch else {"actor": policy, "q": critic}
    with padiff.record(models, folder, optimizer=optimizers) as rec:
        for x, z in zip(X, Z):
            x, z = _tensor(kit, x), _tensor(kit, z)
            with kit.no_grad() if cut else contextlib.nullcontext():
                goal = policy(x[:6]).sum(1, keepdim=True).mean()
            ((critic(kit.concat([x, z], 1)) - goal) ** 2).mean().backward()
            _step(optimizers[0])
            (-critic(kit.concat([x, policy(x)], 1)).mean()).backward()
            _step(optimizers[1])
            optimizers[0].zero_grad() if kit is torch else optimizers[0].clear_grad()
            rec.try_dump()
    return folder


@pytest.mark.parametrize("kit", [torch, paddle])
def test_a_goal_that_one_side_does_not_cut_off_is_no_gradient_of_another_loss(kit, tmp_path):
    reference = _bootstrapped(tmp_path / "a", torch)
    assert padiff.compare_runs(reference, _bootstrapped(tmp_path / "b", kit)).passed
    first = padiff.compare_runs(reference, _bootstrapped(tmp_path / "c", kit, cut=False)).first_diff
    assert first.stage == "grad" and "detached" in first.cause.kind, first.message
    assert "the reference " in first.cause.sentence and "detach" in first.cause.sentence and not first.cause.fix


def _interval(folder, every):
    """A policy that is trained after every few updates of its critic."""
    policy, critic = _net(torch, 6, 12, 3, seed=4), _net(torch, 9, 24, 1, seed=5)
    optimizers = [_adam(torch, net) for net in (critic, policy)]
    with padiff.record({"policy": policy, "critic": critic}, folder, optimizer=optimizers) as rec:
        for step, (x, z) in enumerate(zip(*map(torch.tensor, (X, Z)))):
            loss = (critic(torch.cat([x, z], 1)) - x[:, :1]).square().mean()
            loss.backward()
            _step(optimizers[0])
            if step % every == 0:
                (-critic(torch.cat([x, policy(x)], 1)).mean()).backward()
                _step(optimizers[1])
            optimizers[0].zero_grad()
            rec.try_dump()
    return folder


def test_a_model_that_is_updated_at_another_interval_is_named(tmp_path):
    first = padiff.compare_runs(_interval(tmp_path / "a", 2), _interval(tmp_path / "b", 1)).first_diff
    assert (first.step, first.cause.kind, first.cause.proven) == (1, "step_repeated", True)
    assert "updates `policy.0` each time, the reference in every 2 steps, from step 0 on" in str(first.cause)


def _sampled(folder, asked):
    """A model of energies whose samples follow its slopes: asked for, or left in the parameters by a backward."""
    energy = _net(torch, 6, 24, 1, seed=5)
    optimizer = _adam(torch, energy)
    with padiff.record(energy, folder, optimizer=optimizer) as rec:
        for x, noise in zip(*map(torch.tensor, (X, X[::-1].copy()))):
            for _ in range(2):
                noise = noise.detach().requires_grad_()
                energy(noise).sum().backward()
                noise = noise - 0.1 * noise.grad
                if asked:
                    energy.zero_grad()
            (energy(x).mean() - energy(noise.detach()).mean()).backward()
            _step(optimizer)
            rec.try_dump()
    return folder


def test_gradients_that_samples_leave_in_the_parameters_are_named(tmp_path):
    first = padiff.compare_runs(_sampled(tmp_path / "a", True), _sampled(tmp_path / "b", False)).first_diff
    assert (first.step, first.stage, first.cause.kind) == (0, "grad", "stale_gradient") and first.cause.proven
    assert "hold those of 4 of 4 backwards of this step, the reference's of 2 of 4" in str(first.cause)


def _two_losses(folder, weight, parts=2, scaled=False):
    """Two losses of a model, each with a backward of its own in each micro-batch."""
    model = _net(torch, 6, 24, 4, seed=5)
    optimizer = _adam(torch, model)
    with padiff.record(model, folder, optimizer=optimizer) as rec:
        for x in torch.tensor(X):
            for part in x.chunk(parts):
                hidden = model[0](part)
                out = model[2](model[1](hidden))
                (out.square().mean() / parts).backward(retain_graph=True)
                loss = hidden.abs().mean() / parts
                if weight != 0:
                    (loss if weight is None else weight * loss).backward()
            if scaled:
                for parameter in model.parameters():
                    parameter.grad *= 0.3
            _step(optimizer)
            rec.try_dump()
    return folder


def test_the_weight_of_a_loss_with_a_backward_of_its_own_is_proven(tmp_path):
    reference = _two_losses(tmp_path / "a", 0.3)
    assert padiff.compare_runs(reference, _two_losses(tmp_path / "c", 0.3)).passed
    for name, weight, words in ("b", None, "not scaled by 0.3"), ("d", 0.7, "0.7 for the reference's 0.3"):
        cause = padiff.compare_runs(reference, _two_losses(tmp_path / name, weight)).first_diff.cause
        assert cause.proven and words in str(cause), str(cause)


def test_a_loss_without_a_backward_of_its_own_is_named(tmp_path):
    first = padiff.compare_runs(_two_losses(tmp_path / "a", 0.3), _two_losses(tmp_path / "b", 0)).first_diff
    assert (first.stage, first.cause.kind, first.cause.proven) == ("grad", "loss_term_missing", True)
    assert "runs 4 backwards in this step, the candidate's 2, of the same losses" in str(first.cause)


def test_gradients_that_a_loop_scales_by_hand_are_proven(tmp_path):
    first = padiff.compare_runs(
        _two_losses(tmp_path / "a", 0.3, scaled=True), _two_losses(tmp_path / "b", 0.3)
    ).first_diff
    assert (first.stage, first.cause.kind, first.cause.proven) == ("grad", "gradient_scale", True), str(first.cause)
    assert "the reference multiplies what its backward gave by 0.3 before its optimizer" in str(first.cause)


def test_a_generator_that_is_not_detached_gets_a_further_gradient(tmp_path):
    reference = _gan(tmp_path / "a", torch)
    assert padiff.compare_runs(reference, _gan(tmp_path / "c", paddle)).passed
    first = padiff.compare_runs(reference, _gan(tmp_path / "b", paddle, detached=False)).first_diff
    assert (first.step, first.stage) == (0, "backward") and first.candidate.startswith("gen.")
    assert first.cause.kind == "not_detached" and first.cause.proven


def _apart(folder, real_first):
    """A discriminator with a backward for real and one for generated samples."""
    gen, disc = _net(torch, 3, 12, 6, seed=4), _net(torch, 6, 24, 1, seed=5)
    optimizers = [_adam(torch, net) for net in (disc, gen)]
    loss_of = torch.nn.BCEWithLogitsLoss()
    with padiff.record({"gen": gen, "disc": disc}, folder, optimizer=optimizers) as rec:
        for x, z in zip(*map(torch.tensor, (X, Z))):
            fake = gen(z)
            for real in (real_first, not real_first):
                loss = loss_of(disc(x if real else fake.detach()), torch.full((12, 1), float(real)))
                loss.backward()
                rec.log_loss(loss)
            _step(optimizers[0])
            loss = loss_of(disc(fake), torch.ones(12, 1))
            loss.backward()
            rec.log_loss(loss)
            _step(optimizers[1])
            optimizers[0].zero_grad()
            rec.try_dump()
    return folder


def test_losses_of_calls_in_another_order_are_the_same_losses(tmp_path):
    report = padiff.compare_runs(_apart(tmp_path / "a", True), _apart(tmp_path / "b", False))
    assert report.passed, report.first_diff.message


# -- averages --------------------------------------------------------------------------------------------------------


def _averages(folder, before=False, still=(), online=False):
    """A critic and an actor with targets, as in DDPG."""
    nets = {"actor": _net(torch, 6, 12, 3, seed=6), "critic": _net(torch, 9, 16, 1, seed=7)}
    targets = {f"{name}_target": copy.deepcopy(net).requires_grad_(False) for name, net in nets.items()}
    optimizers = {name: torch.optim.Adam(net.parameters(), 5e-3) for name, net in nets.items()}

    def move():
        for name, net in nets.items():
            for old, new in zip(targets[f"{name}_target"].parameters(), net.parameters()):
                old.data.lerp_(new.data, 0.0 if name in still else 0.1)

    critic, target = nets["critic"], nets["critic"] if online else targets["critic_target"]
    with padiff.record({**nets, **targets}, folder, optimizer=[*optimizers.values()]) as rec:
        for x, z in zip(*map(torch.tensor, (X, Z))):
            with torch.no_grad():
                goal = 0.5 * target(torch.cat([x, targets["actor_target"](x)], 1))
            if before:
                move()
            functional.mse_loss(critic(torch.cat([x, z], 1)), goal).backward()
            _step(optimizers["critic"])
            (-critic(torch.cat([x, nets["actor"](x)], 1)).mean()).backward()
            _step(optimizers["actor"])
            if not before:
                move()
            optimizers["critic"].zero_grad()
            rec.try_dump()
    return folder


def test_an_average_before_the_step_is_not_taken_for_a_missing_one(tmp_path):
    first = padiff.compare_runs(_averages(tmp_path / "a"), _averages(tmp_path / "b", before=True)).first_diff
    assert (first.step, first.stage) == (1, "weight")
    assert first.cause.kind == "average_order" and first.cause.proven


def test_one_of_two_averages_that_is_not_updated_is_named(tmp_path):
    first = padiff.compare_runs(_averages(tmp_path / "a"), _averages(tmp_path / "b", still=("actor",))).first_diff
    assert (first.step, first.candidate) == (1, "actor_target.0")
    assert first.cause.kind == "average_missing" and first.cause.proven


def test_a_network_called_for_its_target_is_found_in_the_first_step(tmp_path):
    first = padiff.compare_runs(_averages(tmp_path / "a"), _averages(tmp_path / "b", online=True)).first_diff
    assert (first.step, first.stage) == (0, "forward")
    assert "critic_target" in str(first.cause) and "another model" in str(first.cause)


# -- losses of several models ----------------------------------------------------------------------------------------


def _residual(folder, kit, weight=5.0, factor=0.1, constant=False):
    """A differential equation: the loss is made of slopes of the first model, and of the second one's output."""
    first, second = _net(kit, 2, 16, 1, seed=8), _net(kit, 2, 8, 1, seed=9)
    optimizers = [_adam(kit, net) for net in (first, second)]
    grad = torch.autograd.grad if kit is torch else paddle.grad
    with padiff.record({"u": first, "k": second}, folder, optimizer=optimizers) as rec:
        for x, z in zip(X, Z):
            at, border = _tensor(kit, x[:, :2]), _tensor(kit, z[:, :2])
            if kit is torch:
                at.requires_grad_()
            else:
                at.stop_gradient = False
            value = first(at)
            slope = grad(value.sum(), at, create_graph=True)[0]
            curve = grad(slope[:, 0:1].sum(), at, create_graph=not constant)[0]
            rest = slope[:, 1:2] + value * slope[:, 0:1] - factor * second(at) * curve[:, 0:1]
            loss = (rest**2).mean() + weight * ((first(border) - border[:, 0:1]) ** 2).mean()
            loss.backward()
            rec.log_loss(loss)
            for optimizer in optimizers:
                _step(optimizer)
            rec.try_dump()
    return folder


@pytest.fixture(scope="module")
def residual(tmp_path_factory):
    return _residual(tmp_path_factory.mktemp("residual") / "a", torch)


def test_a_loss_made_of_slopes_of_a_model_matches(residual, tmp_path):
    report = padiff.compare_runs(residual, _residual(tmp_path / "b", paddle))
    assert report.passed, report.first_diff.message


@pytest.mark.parametrize(
    ("fault", "words"),
    [({"weight": 1.0}, "is 1 for the reference's 5"), ({"factor": 0.01}, "is 0.01 for the reference's 0.1")],
)
def test_numbers_of_a_loss_made_of_slopes_are_named(fault, words, residual, tmp_path):
    first = padiff.compare_runs(residual, _residual(tmp_path / "b", paddle, **fault)).first_diff
    assert (first.step, first.stage) == (0, "loss")
    assert first.cause.proven and words in str(first.cause)


def test_a_second_slope_that_is_a_constant_is_a_term_made_of_gradients(residual, tmp_path):
    first = padiff.compare_runs(residual, _residual(tmp_path / "b", paddle, constant=True)).first_diff
    assert (first.step, first.stage) == (0, "backward")
    assert first.cause.kind == "second_order" and not first.cause.proven


def _vae(folder, weight=0.5, detached=False):
    encoder, decoder = _net(torch, 6, 12, 6, seed=1), _net(torch, 3, 12, 6, seed=2)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
    with padiff.record({"encoder": encoder, "decoder": decoder}, folder, optimizer=optimizer) as rec:
        for x, z in zip(*map(torch.tensor, (X, Z))):
            mean, log = encoder(x).chunk(2, 1)
            out = decoder(mean + z * (0.5 * log).exp())
            term = 0.5 * (mean**2 + log.exp() - 1 - log).sum(1).mean()
            loss = functional.mse_loss(out, x) + weight * (term.detach() if detached else term)
            loss.backward()
            rec.log_loss(loss)
            _step(optimizer)
            rec.try_dump()
    return folder


def test_a_term_of_an_output_that_another_model_takes_is_named(tmp_path):
    reference = _vae(tmp_path / "a")
    first = padiff.compare_runs(reference, _vae(tmp_path / "b", weight=0.05)).first_diff
    assert first.stage == "loss" and first.cause.proven
    assert "the weight of a term of the loss" in str(first.cause) and "is 0.05 for the reference's 0.5" in str(
        first.cause
    )
    first = padiff.compare_runs(reference, _vae(tmp_path / "c", detached=True)).first_diff
    assert first.stage == "backward" and first.cause.proven and "detach" in str(first.cause)


def _distilled(folder, temperature=4.0, weight=0.7):
    """A student and a frozen teacher."""
    teacher, student = _net(torch, 6, 24, 5, seed=1), _net(torch, 6, 8, 5, seed=2)
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    labels = torch.arange(12) % 5
    with padiff.record({"teacher": teacher, "student": student}, folder, optimizer=optimizer) as rec:
        for x in torch.tensor(X):
            with torch.no_grad():
                soft = functional.softmax(teacher(x) / temperature, 1)
            out = student(x)
            term = functional.kl_div(functional.log_softmax(out / temperature, 1), soft, reduction="batchmean")
            loss = weight * (temperature**2 * term) + 0.3 * functional.cross_entropy(out, labels)
            loss.backward()
            rec.log_loss(loss)
            _step(optimizer)
            rec.try_dump()
    return folder


def test_a_temperature_in_several_places_is_one_number(tmp_path):
    first = padiff.compare_runs(_distilled(tmp_path / "a"), _distilled(tmp_path / "b", temperature=2.0)).first_diff
    assert first.cause.kind == "temperature" and "is 2 for the reference's 4" in str(first.cause)


# -- recording by names ----------------------------------------------------------------------------------------------


def test_models_are_recorded_by_their_names(tmp_path):
    run = padiff.compare_runs(_gan(tmp_path / "a", torch), _gan(tmp_path / "b", torch)).models.layers.reference
    assert {layer.path.partition(".")[0] for layer in run} >= {"gen", "disc"}


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ({}, "several models are recorded by name"),
        ({0: torch.nn.Linear(1, 1)}, "several models are recorded by name"),
        ({"a": torch.nn.Linear(1, 1), "b": paddle.nn.Linear(1, 1)}, "models of one framework"),
    ],
    ids=["none", "a number", "two frameworks"],
)
def test_what_is_no_group_of_models_is_refused(models, words):
    with pytest.raises(UsageError, match=words):
        padiff.record(models)


# -- copies that the loop keeps --------------------------------------------------------------------------------------


def _kept(folder, share=0.1, names=("average", "shadow"), **options):
    """A model with an average as a layer, and another one as tensors in a list."""
    model, kept = _net(torch, 6, 8, 2, seed=3), {}
    average = copy.deepcopy(model)
    shadow = [parameter.detach().clone() for parameter in model.parameters()]
    kept = {"average": average, "shadow": shadow}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    models = {"model": model, **{name: kept[name] for name in names}} if names else model
    with padiff.record(models, folder, optimizer=optimizer, **options) as rec:
        for x in torch.tensor(X):
            model(x).square().mean().backward()
            _step(optimizer)
            with torch.no_grad():
                for k, (old, new) in enumerate(zip(average.parameters(), model.parameters())):
                    old.lerp_(new, share)
                    shadow[k] = shadow[k].lerp(new, share)
            rec.try_dump()
    return folder


@pytest.mark.parametrize("name", ["average", "shadow"])
def test_an_average_is_recorded_as_a_layer_or_as_tensors(name, tmp_path):
    first = padiff.compare_runs(
        _kept(tmp_path / "a", names=[name]), _kept(tmp_path / "b", share=0.01, names=[name])
    ).first_diff
    assert (first.step, first.stage, first.candidate) == (1, "weight", f"{name}.0")
    assert "has a decay of 0.99 for the reference's 0.9" in str(first.cause)


def test_copies_that_are_not_recorded_are_named(tmp_path, capfd):
    report = padiff.compare_runs(_kept(tmp_path / "a", names=()), _kept(tmp_path / "b", share=0.01, names=()))
    said = (
        'average, shadow, copies of the model that the loop changes. Record the models by name: padiff.record({"model"'
    )
    assert report.passed and f"Not recorded in the candidate: {said}" in report.text(400)
    assert f"not recorded: {said}" in capfd.readouterr().err
    _kept(tmp_path / "c", share=0.0, names=())
    assert "copies of the model" not in capfd.readouterr().err


def test_tensors_that_are_no_copy_of_a_model_are_refused():
    with pytest.raises(UsageError, match="no copy of a recorded model's parameters"):
        padiff.record({"model": torch.nn.Linear(3, 2), "average": [torch.zeros(3, 2), torch.zeros(2)]})


def _twins(folder, smaller=torch.minimum, still=()):
    """Two critics with targets; an iteration of the loop steps twice, and calls the critics again in between."""
    critics = {name: _net(torch, 6, 8, 1, seed=seed) for name, seed in (("one", 3), ("two", 4))}
    targets = {f"{name}_target": copy.deepcopy(critic) for name, critic in critics.items()}
    optimizer = torch.optim.SGD([p for critic in critics.values() for p in critic.parameters()], 0.1)
    with padiff.record({**critics, **targets}, folder, optimizer=optimizer) as rec:
        for x in torch.tensor(X):
            with torch.no_grad():
                goal = 1.0 + 0.9 * smaller(*(target(x) for target in targets.values()))
            sum(functional.mse_loss(critic(x), goal) for critic in critics.values()).backward()
            _step(optimizer)
            critics["one"](x).mean().backward()
            _step(optimizer)
            for name, critic in critics.items():
                if name not in still:
                    for old, new in zip(targets[f"{name}_target"].parameters(), critic.parameters()):
                        old.data.lerp_(new.data, 0.1)
            rec.try_dump()
    return folder


def test_of_several_sources_of_one_shape_the_average_follows_its_own(tmp_path):
    first = padiff.compare_runs(_twins(tmp_path / "a"), _twins(tmp_path / "b", still=("two",))).first_diff
    assert (first.step, first.candidate) == (1, "two_target.0")
    assert "does not update this average of `two.0`" in str(first.cause) and first.cause.proven


def test_targets_of_several_losses_are_explained_where_later_calls_differ_too(tmp_path):
    first = padiff.compare_runs(_twins(tmp_path / "a"), _twins(tmp_path / "b", smaller=torch.maximum)).first_diff
    assert (first.step, first.stage, first.slot) == (0, "loss", "mse_loss().input.target")
    assert "calls maximum()" in str(first.cause) and "calls minimum()" in str(first.cause) and first.cause.proven


class _Momentum(torch.nn.Module):
    """MoCo's: the key encoder is averaged in the forward, and the queue holds a key in each column."""

    def __init__(self, share, advance):
        super().__init__()
        self.q, self.k = _net(torch, 6, 8, 4, seed=3), _net(torch, 6, 8, 4, seed=3).requires_grad_(False)
        self.register_buffer("queue", torch.tensor(QUEUE))
        self.share, self.advance, self.at = share, advance, 0

    def forward(self, x, y):
        with torch.no_grad():
            for old, new in zip(self.k.parameters(), self.q.parameters()):
                old.lerp_(new, self.share)
            keys = functional.normalize(self.k(y), dim=1)
        logits = functional.normalize(self.q(x), dim=1) @ torch.cat([keys.T, self.queue.clone()], 1)
        self.queue[:, self.at : self.at + len(y)] = keys.T
        self.at = (self.at + self.advance) % self.queue.shape[1]
        return functional.cross_entropy(logits, torch.arange(len(x)))


def _momentum(folder, share=0.1, advance=12):
    model = _Momentum(share, advance)
    optimizer = torch.optim.SGD(model.q.parameters(), 0.1)
    with padiff.record(model, folder, optimizer=optimizer) as rec:
        for x, y in zip(torch.tensor(X), torch.tensor(X[::-1].copy())):
            model(x, y).backward()
            _step(optimizer)
            rec.try_dump()
    return folder


def test_an_average_that_the_model_makes_in_its_forward_is_named_where_it_shows_first(tmp_path):
    first = padiff.compare_runs(_momentum(tmp_path / "a"), _momentum(tmp_path / "b", share=0.01)).first_diff
    assert (first.step, first.stage, first.candidate) == (1, "forward", "k.0")
    assert "has a decay of 0.99 for the reference's 0.9" in str(first.cause) and first.cause.proven


def test_columns_of_a_queue_that_are_written_elsewhere_are_named(tmp_path):
    first = padiff.compare_runs(_momentum(tmp_path / "a"), _momentum(tmp_path / "b", advance=0)).first_diff
    assert (first.step, first.stage, first.slot) == (2, "weight", "queue")
    assert str(first.cause) == "the candidate writes columns 0 to 11 of `queue`, the reference columns 12 to 23"
    assert first.cause.proven


class _OfTeacher:
    """A student that follows an average of itself, which gives a small term of its loss."""

    def __init__(self, share):
        self.student, self.share = _net(torch, 6, 8, 3, seed=3), share
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.optimizer = torch.optim.SGD(self.student.parameters(), 0.05)

    def train(self, rec):
        for x in torch.tensor(X):
            out = self.student(x)
            apart = functional.mse_loss(out.softmax(1), self.teacher(x + 0.1).softmax(1))
            (functional.cross_entropy(out, torch.arange(12) % 3) + apart).backward()
            _step(self.optimizer)
            for old, new in zip(self.teacher.parameters(), self.student.parameters()):
                old.data.lerp_(new.data, self.share)
            rec.try_dump()


def _taught(folder, share):
    training = _OfTeacher(share)
    with padiff.record(training.student, folder, optimizer=training.optimizer) as rec:
        training.train(rec)
    return folder


def test_a_target_of_a_copy_that_is_not_recorded_is_no_other_way_to_write_a_loss(tmp_path):
    report = padiff.compare_runs(_taught(tmp_path / "a", 0.5), _taught(tmp_path / "b", 0.05))
    first = report.first_diff
    assert (first.step, first.slot) == (1, "mse_loss().input.target")
    assert "may give them, and is not recorded: `teacher`" in str(first.cause)


def test_tensors_without_a_model_are_refused():
    with pytest.raises(UsageError, match="got no model"):
        padiff.record({"average": [torch.zeros(3, 2), torch.zeros(2)]})


def test_a_model_without_layers_is_a_model():
    padiff.record({"model": torch.nn.Linear(3, 2), "nothing": torch.nn.Sequential()})


def test_a_view_of_the_parameters_is_no_copy(tmp_path, capfd):
    model = _net(torch, 6, 8, 2, seed=3)
    views, listed = model.state_dict(), list(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with padiff.record(model, tmp_path / "a", optimizer=optimizer) as rec:
        for x in torch.tensor(X):
            model(x).square().mean().backward()
            _step(optimizer)
            rec.try_dump()
    assert len(views) == len(listed) and "of the model that the loop changes" not in capfd.readouterr().err


def _two_views(folder, exchanged=False):
    """BYOL's loss: each view's prediction against what the target gives for the other view."""
    online, predictor = _net(torch, 6, 8, 4, seed=3), _net(torch, 4, 6, 4, seed=4)
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.SGD([*online.parameters(), *predictor.parameters()], 0.1)
    models = {"online": online, "predictor": predictor, "target": target}
    with padiff.record(models, folder, optimizer=optimizer) as rec:
        for x, y in zip(torch.tensor(X), torch.tensor(X[::-1].copy())):
            goals = [target(y), target(x)]
            goals = goals[::-1] if exchanged else goals
            made = [predictor(online(x)), predictor(online(y))]
            (2 - sum(functional.cosine_similarity(a, b).mean() for a, b in zip(made, goals))).backward()
            _step(optimizer)
            rec.try_dump()
    return folder


def test_targets_of_a_recorded_model_that_are_exchanged_are_named(tmp_path):
    first = padiff.compare_runs(_two_views(tmp_path / "a"), _two_views(tmp_path / "b", exchanged=True)).first_diff
    assert first.step == 0 and first.cause.proven
    assert "inputs of the loss are exchanged: what goes into the first cosine_similarity()" in str(first.cause)
