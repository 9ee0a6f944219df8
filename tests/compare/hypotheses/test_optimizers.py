"""Faults of an optimizer, planted in real trainings: each is named, and proven."""

from __future__ import annotations

import math
from functools import lru_cache

import paddle
import pytest
import torch
from kit.records import sketched_run

from compare.hypotheses.trainings import first_of, paddle_run, torch_run

OPTIM, PADDLE = torch.optim, paddle.optimizer
STEPS = 4


def sgd(model, **more):
    return OPTIM.SGD(model.parameters(), 0.1, **{"momentum": 0.9, "weight_decay": 1e-2, **more})


def damped(model, **more):
    return sgd(model, **{"dampening": 0.1, "momentum": 0.8, **more})


def adamw(model, **more):
    return OPTIM.AdamW(model.parameters(), 1e-2, **{"weight_decay": 0.1, **more})


def adam(model, **more):
    return OPTIM.Adam(model.parameters(), 1e-2, **more)


def rmsprop(model):
    return OPTIM.RMSprop(model.parameters(), 1e-3)


def momentum(model, rate=0.1, **more):
    more = {"weight_decay": 1e-2, **more}
    return PADDLE.Momentum(rate, more.pop("momentum", 0.9), parameters=model.parameters(), **more)


def paddle_adamw(model, **more):
    return PADDLE.AdamW(1e-2, parameters=model.parameters(), **{"weight_decay": 0.1, **more})


def by_kind(model, matrices, others):
    """Groups with a decay of their own for norms and biases."""
    parts = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]
    return OPTIM.AdamW([{"params": part, "weight_decay": wd} for part, wd in zip(parts, (matrices, others))], 1e-2)


def with_head(model, factor):
    head = {id(p) for p in model[5].parameters()}
    parts = [p for p in model.parameters() if id(p) not in head], [p for p in model.parameters() if id(p) in head]
    return OPTIM.Adam([{"params": parts[0], "lr": 1e-2}, {"params": parts[1], "lr": 1e-2 * factor}], 1e-2)


class Uncorrected(OPTIM.Optimizer):
    """Adam by hand, without bias correction."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + 0.1 * p.grad
            state["v"] = 0.999 * state.get("v", torch.zeros_like(p)) + 0.001 * p.grad**2
            p.sub_(1e-2 * state["m"] / (state["v"].sqrt() + 1e-8))


@lru_cache(maxsize=8)
def reference(make):
    return torch_run(make, STEPS)


def lost_at(step):
    return lambda model, optimizer, number: optimizer.state.clear() if number == step else None


def cosine(step):
    return 0.5 * (1 + math.cos(math.pi * step / 12))


FROM_PADDLE = [
    (sgd, lambda m: momentum(m, 0.12), "learning_rate", "0.1 against 0.12; the candidate's is 1.2 times"),
    (sgd, lambda m: momentum(m, momentum=0.8), "momentum", "momentum is 0.8 in the candidate for the reference's 0.9"),
    (sgd, lambda m: momentum(m, momentum=0.83), "momentum", "momentum is 0.83 in the candidate"),
    (sgd, lambda m: momentum(m, use_nesterov=True), "nesterov", "the candidate has Nesterov momentum"),
    (sgd, lambda m: momentum(m, weight_decay=None), "weight_decay", "weight decay is 0 in the candidate for the"),
    (sgd, lambda m: momentum(m, weight_decay=0.1), "weight_decay", "weight decay is 0.1 in the candidate for the"),
    (
        sgd,
        lambda m: PADDLE.Adam(0.1, parameters=m.parameters()),
        "optimizer_rule",
        "are those of Adam (beta1 0.9, beta2",
    ),
    (adamw, lambda m: paddle_adamw(m, beta2=0.95), "adam_beta2", "beta2 is 0.95 in the candidate for the reference's"),
    (adamw, lambda m: paddle_adamw(m, beta1=0.8), "adam_beta1", "beta1 is 0.8 in the candidate for the reference's"),
    (adamw, lambda m: paddle_adamw(m, epsilon=1e-3), "adam_eps", "epsilon is 0.001 in the candidate for the"),
    (adamw, lambda m: paddle_adamw(m, weight_decay=1.0), "weight_decay", "weight decay is 1 in the candidate for the"),
    (
        adamw,
        lambda m: PADDLE.Adam(1e-2, parameters=m.parameters(), weight_decay=0.1),
        "weight_decay_form",
        "weight decay is part of the gradient in the candidate (coupled)",
    ),
    (adam, lambda m: PADDLE.Adamax(1e-2, parameters=m.parameters()), "optimizer_rule", "are those of Adamax"),
    (adam, lambda m: PADDLE.NAdam(1e-2, parameters=m.parameters()), "optimizer_rule", "are those of NAdam"),
    (adam, lambda m: PADDLE.Lamb(1e-2, parameters=m.parameters()), "optimizer_rule", "are those of Lamb"),
    (adam, lambda m: PADDLE.SGD(1e-2, parameters=m.parameters()), "optimizer_rule", "are those of SGD"),
    (
        rmsprop,
        lambda m: PADDLE.RMSProp(1e-3, 0.99, 1e-8, parameters=m.parameters()),
        "rmsprop_eps_inside",
        "epsilon is added inside of the square root in the candidate",
    ),
    (
        rmsprop,
        lambda m: PADDLE.RMSProp(1e-3, parameters=m.parameters()),
        "rmsprop_eps_inside+rmsprop_alpha+rmsprop_eps",
        "",
    ),
]


@pytest.mark.parametrize(("right", "wrong", "kind", "words"), FROM_PADDLE)
def test_a_setting_of_a_paddle_optimizer_is_proven(right, wrong, kind, words):
    cause = first_of(reference(right), paddle_run(wrong, STEPS)).cause
    assert (cause.kind, cause.proven) == (kind, True), cause.text
    assert words in cause.sentence


TORCH = [
    (adamw, lambda m: by_kind(m, 0.1, 0.0), {}, "weight_decay", "of norms and biases only"),
    (lambda m: by_kind(m, 0.1, 0.0), adamw, {}, "weight_decay", "weight decay is 0.1 in the candidate for the"),
    (lambda m: with_head(m, 0.1), adam, {}, "learning_rate", "0.01, 0.001 against 0.01 (by parameter group)"),
    (adam, lambda m: Uncorrected(m.parameters()), {}, "bias_correction", "are not bias-corrected, the reference's are"),
    (adam, adam, {"before_step": lost_at(3)}, "optimizer_state_lost", "lost its state before step 3"),
    (sgd, sgd, {"before_step": lost_at(2)}, "optimizer_state_lost", "lost its state before step 2"),
    (sgd, lambda m: sgd(m, dampening=0.1), {}, "dampening", "dampening is 0.1 in the candidate for the reference's 0"),
    (damped, lambda m: damped(m, momentum=0.0), {}, "momentum", "momentum is 0 in the candidate for the"),
    (adamw, lambda m: adamw(m, eps=1e-4), {}, "adam_eps", "epsilon is 0.0001 in the candidate"),
    (adamw, lambda m: adamw(m, betas=(0.8, 0.95)), {}, "adam_beta1+adam_beta2", "beta1 is 0.8 in the candidate"),
    (adam, lambda m: OPTIM.Adagrad(m.parameters(), 1e-2), {}, "optimizer_rule", "are those of Adagrad"),
]  # fmt: skip


@pytest.mark.parametrize(("right", "wrong", "more", "kind", "words"), TORCH)
def test_a_group_a_form_or_a_lost_state_is_proven(right, wrong, more, kind, words):
    cause = first_of(reference(right), torch_run(wrong, STEPS, **more)).cause
    assert (cause.kind, cause.proven) == (kind, True), cause.text
    assert words in cause.sentence


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (lambda step: cosine(step - 1) if step else 1.0, "the candidate's schedule is shifted: it is one step late"),
        (lambda step: cosine(step // 2), "goes on every 2 steps: half as fast"),
        (lambda step: cosine(2 * step), "goes 2 times as fast"),
        (lambda step: cosine(2 * step + 1), "goes 2 times as fast"),
        (lambda step: cosine(step % 4), "begins again after 4 steps"),
        (lambda step: 1.0, "the candidate's rate stays the same: its schedule never steps (or once an epoch)"),
    ],
)
def test_how_a_schedule_differs_is_reported(schedule, words):
    cause = first_of(torch_run(adam, 7, cosine), torch_run(adam, 7, schedule)).cause
    assert (cause.kind, cause.proven) == ("learning_rate", True)
    assert words in cause.sentence


def torch_halved(model, optimizer, number):
    """All weights are halved between the first step and the second."""
    if number == 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)


def paddle_halved(model, optimizer, number):
    if number == 0:
        for parameter in model.parameters():
            parameter.set_value(parameter * 0.5)


OF = {"torch": adam, "paddle": lambda m: PADDLE.Adam(1e-2, parameters=m.parameters())}


def test_of_sketches_small_tensors_show_any_rule_and_projections_linear_ones():
    sketched = sketched_run(reference(adamw)), sketched_run(paddle_run(lambda m: paddle_adamw(m, beta2=0.95), STEPS))
    cause = first_of(*sketched).cause
    assert (cause.kind, cause.proven) == ("adam_beta2", True), cause.text
    sketched = sketched_run(reference(sgd)), sketched_run(paddle_run(lambda m: momentum(m, momentum=0.8), STEPS))
    cause = first_of(*sketched).cause
    assert (cause.kind, cause.proven) == ("momentum", True), cause.text


@pytest.mark.parametrize("number", [1, 4])
def test_a_first_step_that_has_tensors_whole_goes_with_sketches_of_the_others(number):
    """Of a bias a sketch has each element with a sign, of a matrix sums of elements."""
    sketches = {"detail": "sketch"}
    reference = torch_run(adam, 6, **sketches)
    assert [any(r.sketch is not None for r in reference.steps(k)[0].records) for k in (0, 1)] == [False, True]
    cause = first_of(reference, torch_run(adam, 6, before_step=lost_at(number), **sketches)).cause
    assert (cause.kind, cause.proven) == ("optimizer_state_lost", True), cause.text
    assert f"before step {number}" in cause.sentence
    candidate = paddle_run(lambda m: PADDLE.Adam(1e-2, beta2=0.95, parameters=m.parameters()), 6, **sketches)
    cause = first_of(reference, candidate).cause
    assert (cause.kind, cause.proven) == ("adam_beta2", True), cause.text


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_a_weight_of_the_second_step_is_held_against_the_first_steps(framework):
    """Which was recorded whole: the sketch of that is."""
    sketches = {"detail": "sketch"}
    halved = {"torch": torch_halved, "paddle": paddle_halved}[framework]
    run = torch_run if framework == "torch" else paddle_run
    first = first_of(torch_run(adam, 3, **sketches), run(OF[framework], 3, after_step=halved, **sketches))
    assert (first.step, first.stage, first.diff.figures.basis) == (1, "weight", "sketches")
    assert first.recomputed.wrong == "candidate"
    assert first.recomputed.errors.reference < 1e-6 < 0.1 < first.recomputed.errors.candidate
    assert first.cause.proven, first.cause.text


def test_of_a_first_step_alone_nothing_is_proven_that_it_does_not_show():
    """What a memory makes of one step may be many things."""
    reference = torch_run(sgd, 1)
    nesterov = first_of(reference, paddle_run(lambda m: momentum(m, use_nesterov=True), 1)).cause
    assert nesterov.kind == "nesterov"  # the momentum that goes with it is said to be both sides'
    other = first_of(
        torch_run(rmsprop, 1), paddle_run(lambda m: PADDLE.RMSProp(1e-3, parameters=m.parameters()), 1)
    ).cause
    assert not other.proven


def test_a_training_that_was_recorded_from_its_middle_on_is_not_guessed():
    """What the optimizer remembers is not known there."""
    late = range(2, STEPS)
    runs = torch_run(adam, STEPS, numbers=late), torch_run(adam, STEPS, numbers=late, before_step=lost_at(3))
    cause = first_of(*runs).cause
    assert not cause.proven


class Odd(OPTIM.Optimizer):
    """A rule that nobody has."""

    def __init__(self, params, how):
        super().__init__(params, {"lr": 1e-2})
        self.how = how

    @torch.no_grad()
    def step(self, closure=None):
        for k, p in enumerate(self.param_groups[0]["params"]):
            p.sub_(1e-2 * self.how(p.grad, k, p))


def plain(model):
    return OPTIM.SGD(model.parameters(), 1e-2)


ODD = [
    lambda g, k, p: g.sign() * g.abs().sqrt(),
    lambda g, k, p: g * (1 + 0.2 * torch.sin(torch.arange(g.numel(), dtype=torch.float32))).reshape(g.shape),
    lambda g, k, p: g * (1 + 0.1 * k),
    lambda g, k, p: g + 0.05 * g.std() * torch.randn_like(g),
    lambda g, k, p: torch.tanh(5 * g),
    lambda g, k, p: g / (g.norm() + 1e-3),
    lambda g, k, p: g - g.mean(),
    lambda g, k, p: torch.where(g.abs() > g.abs().median(), g, torch.zeros_like(g)),
    lambda g, k, p: g.flip(0),
    lambda g, k, p: g + 0.1 * p * p,
]


@pytest.mark.parametrize(("how", "make"), [(k, (adam, plain)[k % 2]) for k in range(len(ODD))])
def test_a_rule_that_nobody_has_is_never_proven_to_be_another(make, how):
    torch.manual_seed(1)
    first = first_of(reference(make), torch_run(lambda m: Odd(m.parameters(), ODD[how]), STEPS))
    assert first.cause is None or not first.cause.proven, first.cause.text
