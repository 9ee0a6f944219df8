"""Faults in what the loop computes before it calls the model: of its inputs, targets and weights."""

from __future__ import annotations

import numpy as np
import pytest
from kit.frameworks import PADDLE, TORCH

import padiff

RNG = np.random.default_rng(3)
RAW = RNG.integers(0, 256, (4, 6, 3, 5, 5))
LABELS = RNG.integers(0, 4, (4, 6))
NOISE = RNG.standard_normal((4, 6, 3, 5, 5))
MATRIX = RNG.normal(0, 0.2, (75, 4)).astype(np.float32)
TEACHER = RNG.normal(0, 1, (75, 4)).astype(np.float32)


def functional(kit):
    return __import__(f"{kit.name}.nn.functional", fromlist=["softmax"])


def without_gradients(kit):
    return __import__(kit.name).no_grad()


def cross_entropy(kit, scores, target):
    return -(target * functional(kit).log_softmax(scores, -1)).sum(-1).mean()


def train(kit, fault="", sketched=False):
    """Four steps of a linear classifier; images are normalised and noised, and targets smoothed, by hand."""
    model = kit.linear(75, 4, bias=False)
    kit.set_weight(model, MATRIX.T)
    optimizer = kit.sgd(model.parameters(), 0.1)
    options = {"detail": "sketch"} if sketched else {}
    with padiff.record(model, optimizer=optimizer, **options) as rec:
        for raw, labels, drawn in zip(RAW, LABELS, np.roll(NOISE, 1, 0) if fault == "drawn" else NOISE):
            x = kit.tensor(raw[::-1].copy() if fault == "samples" else raw)
            if fault != "unscaled":
                x = x / 255
            x = (x - (0.5 if fault == "mean" else 0.45)) / 0.25
            if fault == "flipped":
                x = x.flip([1])
            x = x + (0.3 if fault == "noise" else 0.1) * kit.tensor(drawn)
            x = x.reshape([6, 75])
            with without_gradients(kit):
                soft = functional(kit).softmax((x @ kit.tensor(TEACHER)) / (2.0 if fault == "temperature" else 4.0), -1)
            hard = kit.tensor(np.eye(4)[labels])
            share = 0.4 if fault == "share" else 0.3
            target = hard if fault == "no teacher" else (1 - share) * hard + share * soft
            cross_entropy(kit, model(x), target).backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()
    return rec.run


@pytest.fixture(scope="module", params=["torch", "paddle"])
def reference(request):
    return train({"torch": TORCH, "paddle": PADDLE}[request.param])


@pytest.mark.parametrize(
    ("fault", "stage", "words"),
    [
        ("mean", "input", "sub() in the loop is 0.5 for the reference's 0.45"),
        ("unscaled", "input", "div() in the loop is left out: nothing is scaled by 255 there"),
        ("flipped", "input", "flip() in the loop"),
        ("noise", "input", "mul() in the loop is 0.3 for the reference's 0.1"),
        ("temperature", "loss", "the temperature in"),
        ("share", "loss", "0.4"),
    ],
)
def test_the_call_that_differs_is_named(reference, fault, stage, words):
    first = padiff.compare_runs(reference, train(TORCH, fault)).first_diff
    assert (first.step, first.stage) == (0, stage)
    assert first.cause.proven and words in first.cause.sentence, first.cause.sentence
    assert "test_before_the_model.py" in first.cause.lines.candidate.file


@pytest.mark.parametrize(("fault", "words"), [("samples", "samples"), ("drawn", "other random numbers")])
def test_other_data_are_no_other_code(reference, fault, words):
    cause = padiff.compare_runs(reference, train(TORCH, fault)).first_diff.cause
    assert words in cause.sentence and "left out" not in cause.sentence, cause.sentence


def test_other_targets_say_what_they_lack(reference):
    first = padiff.compare_runs(reference, train(TORCH, "no teacher")).first_diff
    assert first.stage == "loss" and "teacher" not in first.cause.sentence
    assert "the candidate leaves out the second mul(), then the second add() in the loop" in first.cause.sentence


@pytest.mark.parametrize("sketched", [False, True])
def test_equal_loops_match(reference, sketched):
    assert not padiff.compare_runs(reference, train(TORCH, sketched=sketched)).first_diff
    assert not padiff.compare_runs(reference, train(PADDLE, sketched=sketched)).first_diff


def weighed(weigh):
    """Three steps with a cross entropy whose elements are weighed by numbers that the loop computes."""
    model = TORCH.linear(75, 4, bias=False)
    TORCH.set_weight(model, MATRIX.T)
    optimizer = TORCH.sgd(model.parameters(), 0.1)
    loss = functional(TORCH).binary_cross_entropy_with_logits
    with padiff.record(model, optimizer=optimizer) as rec:
        for raw, labels in zip(RAW, LABELS):
            wanted = TORCH.tensor(np.eye(4)[labels])
            weights = {"weight": 1 + 2 * wanted} if weigh else {}
            loss(model(TORCH.tensor(raw.reshape(6, 75) / 255)), wanted, **weights).backward()
            optimizer.step()
            TORCH.zero(optimizer)
            rec.try_dump()
    return rec.run


@pytest.mark.parametrize("sides", [(True, False), (False, True)])
def test_computed_weights_of_a_loss_are_named(sides):
    cause = padiff.compare_runs(*map(weighed, sides)).first_diff.cause
    assert cause.kind == "loss_weight" and cause.proven, cause


def test_a_number_that_the_code_of_the_candidate_lacks_is_no_cause():
    """A mask that is drawn once keeps all: a rate of 0 explains that as well, and nobody wrote it."""
    import torch

    class Drop(torch.nn.Module):
        def __init__(self, each):
            super().__init__()
            self.each = each

        def forward(self, x):
            drawn = torch.rand((x.shape[0], 1) if self.each else (1, 1))
            return x * torch.floor(0.8 + drawn) / 0.8

    def dropped(each):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(75, 32), Drop(each), torch.nn.Linear(32, 4))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with padiff.record(net, optimizer=optimizer) as rec:
            for raw in RAW:
                net(torch.tensor(np.resize(raw / 255, (16, 75)), dtype=torch.float32)).square().mean().backward()
                optimizer.step()
                rec.try_dump()
        return rec.run

    cause = padiff.compare_runs(dropped(True), dropped(False)).first_diff.cause
    assert "for the reference's 0.8" not in cause.sentence, cause
