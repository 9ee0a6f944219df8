"""Choices among tokens and samples, choices that the loop's loss is made of, and what flips leave to later steps.

In each program the candidate adds in another order, so that scores which nearly tie choose otherwise.
"""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
from torch import nn
from torch.nn import functional

import padiff
from padiff.compare import compare_runs

WIDTH, TOKENS, BATCH = 12, 8, 5


def halves(x, layer):
    """Return a linear layer's output, with the two halves of the input added in the other order."""
    half = x.shape[-1] // 2
    y = x[..., half:] @ layer.weight[:, half:].T + x[..., :half] @ layer.weight[:, :half].T
    return y if layer.bias is None else y + layer.bias


def recorded(model, optimizer, step, steps=3, **options):
    with padiff.record(model, optimizer=optimizer, **options) as rec:
        for number in range(steps):
            step(number).backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()
    return rec.run


def noise(number, *shape):
    return torch.tensor(np.random.default_rng(number).normal(size=shape).astype(np.float32))


def nearly(x, pairs):
    """Make some rows nearly equal to the ones before, so that their scores nearly tie."""
    x = x.clone()
    x[1 : 2 * pairs : 2] = x[0 : 2 * pairs : 2] * (1 + 1e-7 * noise(99, *x[0 : 2 * pairs : 2].shape))
    return x


# -- a layer that takes some tokens of each sequence


class Depth(nn.Module):
    """Takes three tokens of each sequence through a layer."""

    def __init__(self, candidate, fault):
        super().__init__()
        self.candidate, self.fault = candidate, fault
        self.first, self.router, self.up, self.last = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 1, bias=False),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, 4),
        )

    def forward(self, x):
        x = torch.tanh(self.first(x))
        scores = (halves(x, self.router) if self.candidate else self.router(x)).squeeze(-1)
        weights, places = scores.topk(3, dim=1, sorted=self.candidate)
        if not self.candidate:
            places, order = places.sort(dim=1)
            weights = weights.gather(1, order)
        index = places.unsqueeze(-1).expand(-1, -1, WIDTH)
        taken = torch.relu(self.up(x.gather(1, index))) * torch.sigmoid(weights).unsqueeze(-1)
        x = x.scatter_add(1, index, taken)
        return self.last(x * (1.03 if self.fault == "late" else 1.0))


def depth(candidate, fault="", **options):
    torch.manual_seed(0)
    model = Depth(candidate, fault)

    def step(number):
        x = noise(number, BATCH, TOKENS, WIDTH)
        x = torch.stack([nearly(each, 3) for each in x])
        return (model(x) - noise(50 + number, BATCH, TOKENS, 4)).pow(2).mean()

    return recorded(model, torch.optim.Adam(model.parameters(), 1e-3), step, **options)


@pytest.mark.parametrize("detail", ["full", "sketch"])
def test_tokens_that_nearly_tie_are_left_out_one_by_one(detail):
    report = compare_runs(depth(False, detail=detail), depth(True, detail=detail))
    assert report.passed, report.text(120)
    assert report.choices and "topk() of (root)" in report.text(120)


def test_a_factor_of_all_rows_shows_beside_tokens_that_flip():
    report = compare_runs(depth(False), depth(True, "late"))
    assert not report.passed and report.first_diff.step == 0 and report.first_diff.stage == "forward"


# -- labels and samples that the loop chooses


class Encoder(nn.Module):
    def __init__(self, candidate):
        super().__init__()
        self.candidate = candidate
        self.a, self.b, self.c = nn.Linear(WIDTH, 16), nn.Linear(16, 16), nn.Linear(16, 6, bias=False)
        with torch.no_grad():
            self.c.weight.copy_(nearly(self.c.weight, 3))

    def forward(self, x):
        x = torch.tanh(self.a(x))
        return torch.tanh(halves(x, self.b) if self.candidate else self.b(x))


def clusters(candidate, fault=""):
    """The labels of the loss are the nearest centres: by distances, in the candidate by products."""
    torch.manual_seed(0)
    model = Encoder(candidate)

    def step(number):
        z = functional.normalize(model(noise(number, 40, WIDTH)), dim=1)
        with torch.no_grad():
            centres = functional.normalize(model.c.weight, dim=1)
            if not candidate:
                labels = torch.cdist(z, centres).argmin(1)
            else:
                products = z @ (model.c.weight if fault == "not normalised" else centres).T
                labels = (centres.pow(2).sum(1) - 2 * products).argmin(1)
        return functional.cross_entropy(z @ model.c.weight.T / 0.2, labels)

    return recorded(model, torch.optim.SGD(model.parameters(), 0.001), step)


def test_labels_that_the_loop_chooses_may_flip():
    report = compare_runs(clusters(False), clusters(True))
    assert report.passed, report.text(120)
    assert report.choices and report.choices[0].calls == (("argmin", "(loop)"),)


def test_labels_chosen_by_other_scores_are_named():
    cause = compare_runs(clusters(False), clusters(True, "not normalised")).first_diff.cause
    assert cause.kind == "choice" and "argmin() in `the loop`" in cause.sentence


def mined(candidate, fault=""):
    """The loop takes the samples of least confidence: their losses jump where two confidences nearly tie."""
    torch.manual_seed(0)
    model = Encoder(candidate)
    labels = torch.arange(40) % 6

    def step(number):
        logits = model(nearly(noise(number, 40, WIDTH), 12)) @ model.c.weight.T
        losses = functional.cross_entropy(logits, labels, reduction="none")
        if not candidate:
            confidence = torch.softmax(logits.detach(), 1).max(1)[0]
            return losses[confidence.topk(11, largest=False)[1]].mean()
        confidence, _ = functional.log_softmax(logits.detach(), -1).max(-1)
        order = torch.argsort(confidence, descending=fault == "most confident")
        chosen = torch.zeros(40)
        chosen[order[:11]] = 1.0
        return (losses * chosen).sum() / (10 if fault == "divided by 10" else 11)

    return recorded(model, torch.optim.SGD(model.parameters(), 0.1), step)


def test_a_loss_may_jump_where_the_loop_ranks_by_other_scores():
    report = compare_runs(mined(False), mined(True))
    assert report.passed, report.text(120)
    assert report.choices


@pytest.mark.parametrize("fault", ["most confident", "divided by 10"])
def test_another_loss_of_the_chosen_samples_is_a_difference(fault):
    report = compare_runs(mined(False), mined(True, fault))
    assert not report.passed and report.first_diff.step == 0
    if fault == "most confident":
        assert report.first_diff.cause.kind == "choice_order" and "argsort()" in report.first_diff.cause.sentence


# -- a codebook that follows the rows


class Codebook(nn.Module):
    def __init__(self, candidate, fault):
        super().__init__()
        self.candidate, self.rate = candidate, 0.8 if fault == "rate" else 0.9
        self.encode, self.decode = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.register_buffer("codes", nearly(noise(7, 10, 6), 2))
        self.register_buffer("sums", self.codes.clone())
        self.register_buffer("counts", torch.ones(10))

    def forward(self, x):
        z = self.encode(x)
        if self.candidate:
            distances = ((z[:, None] - self.codes[None]) ** 2).sum(-1)
        else:
            distances = z.pow(2).sum(1, keepdim=True) - 2 * z @ self.codes.T + self.codes.pow(2).sum(1)
        places = distances.argmin(1)
        codes = self.codes[places]
        with torch.no_grad():
            hot = functional.one_hot(places, 10).float()
            self.counts.mul_(self.rate).add_(hot.sum(0), alpha=1 - self.rate)
            self.sums.mul_(self.rate).add_(hot.T @ z, alpha=1 - self.rate)
            self.codes.copy_(self.sums / (self.counts + 1e-3).unsqueeze(1))
        return self.decode(z + (codes - z).detach())


def coded(candidate, fault=""):
    torch.manual_seed(0)
    model = Codebook(candidate, fault)

    def step(number):
        x = noise(number, 60, WIDTH)
        return (model(x) - x).pow(2).mean()

    return recorded(model, torch.optim.SGD(model.parameters(), 0.01), step)


def test_a_codebook_follows_rows_that_flip():
    report = compare_runs(coded(False), coded(True))
    assert report.passed, report.text(120)


def test_a_codebook_with_another_rate_is_a_difference():
    first = compare_runs(coded(False), coded(True, "rate")).first_diff
    assert first is not None and (first.step, first.stage) == (1, "weight")


# -- gradients beside rows that flip


class Gumbel(nn.Module):
    def __init__(self, candidate, fault):
        super().__init__()
        self.candidate, self.fault = candidate, fault
        self.a, self.b, self.logits = nn.Linear(WIDTH, 16), nn.Linear(16, 16), nn.Linear(16, 8, bias=False)
        self.code, self.c = nn.Parameter(torch.randn(8, WIDTH)), nn.Linear(WIDTH, 4)
        with torch.no_grad():
            self.logits.weight.copy_(nearly(self.logits.weight, 4))

    def forward(self, x):
        hidden = torch.relu(self.a(x))
        hidden = torch.relu(halves(hidden, self.b) if self.candidate else self.b(hidden))
        scores = self.logits(hidden)
        soft = torch.softmax(scores / (0.7 if self.fault == "temperature" else 1.0), -1)
        hard = functional.one_hot(scores.argmax(-1), 8).float()
        kept = hard if self.fault == "detached" else hard + soft - soft.detach()
        return self.c(kept @ self.code), (soft * soft).sum(-1).mean()


def gumbel(candidate, fault="", **options):
    torch.manual_seed(0)
    model = Gumbel(candidate, fault)

    def step(number):
        output, auxiliary = model(noise(number, 96, WIDTH))
        return (output - noise(60 + number, 96, 4)).pow(2).mean() + (
            0.02 if fault == "coefficient" else 0.01
        ) * auxiliary

    return recorded(model, torch.optim.SGD(model.parameters(), 0.01), step, **options)


def test_hard_samples_may_flip():
    report = compare_runs(gumbel(False), gumbel(True))
    assert report.passed and report.choices, report.text(120)


@pytest.mark.parametrize("fault", ["temperature", "detached"])
def test_flips_do_not_hide_other_gradients(fault):
    report = compare_runs(gumbel(False), gumbel(True, fault))
    assert not report.passed and report.first_diff.step == 0


@pytest.mark.parametrize("detail", ["full", "sketch"])
def test_flips_do_not_hide_the_weight_of_a_term(detail):
    first = compare_runs(gumbel(False, detail=detail), gumbel(True, "coefficient", detail=detail)).first_diff
    assert first.step == 0 and first.stage in ("backward", "loss")
    assert "0.02" in first.cause.sentence and "0.01" in first.cause.sentence


# -- another function that chooses


class Quantised(nn.Module):
    def __init__(self, candidate, fault):
        super().__init__()
        self.candidate, self.fault = candidate, fault
        self.weight, self.scale = nn.Parameter(noise(3, 6, WIDTH) * 0.2), 0.05

    def forward(self, x):
        steps = self.weight * (1 / self.scale) if self.candidate else self.weight / self.scale
        rounded = steps.floor() if self.fault else steps.round()
        steps = steps + (rounded - steps).detach()
        if self.candidate:
            return functional.linear(x, steps) * self.scale
        return functional.linear(x, steps * self.scale)


def quantised(candidate, fault=""):
    model = nn.Sequential(Quantised(candidate, fault))
    return recorded(
        model,
        torch.optim.SGD(model.parameters(), 0.01),
        lambda number: model(noise(number, 30, WIDTH)).pow(2).mean(),
    )


def test_another_rounding_goes_before_a_computed_cause():
    assert compare_runs(quantised(False), quantised(True)).passed
    cause = compare_runs(quantised(False), quantised(True, "floor")).first_diff.cause
    assert cause.kind == "choice_function" and "floor() for the reference's round()" in cause.sentence


# -- between frameworks


def test_tokens_are_left_out_between_frameworks():
    reference = depth(False)
    torch.manual_seed(0)
    weights = Depth(False, "")

    class Net(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            for name in ("first", "router", "up", "last"):
                source = getattr(weights, name)
                size = source.weight.shape
                layer = paddle.nn.Linear(size[1], size[0], bias_attr=None if source.bias is not None else False)
                layer.weight.set_value(source.weight.detach().numpy().T)
                if source.bias is not None:
                    layer.bias.set_value(source.bias.detach().numpy())
                setattr(self, name, layer)

        def forward(self, x):
            x = paddle.tanh(self.first(x))
            values, places = paddle.topk(self.router(x).squeeze(-1), 3, axis=1)
            rows = (places + paddle.arange(BATCH).unsqueeze(1) * TOKENS).reshape([-1])
            flat = x.reshape([-1, WIDTH])
            taken = paddle.nn.functional.relu(self.up(flat[rows]))
            taken = taken * paddle.nn.functional.sigmoid(values).reshape([-1, 1])
            return self.last(paddle.scatter_nd_add(flat, rows.unsqueeze(-1), taken).reshape([BATCH, TOKENS, WIDTH]))

    model = Net()
    optimizer = paddle.optimizer.Adam(1e-3, parameters=model.parameters())
    with padiff.record(model, optimizer=optimizer) as rec:
        for number in range(3):
            x = torch.stack([nearly(each, 3) for each in noise(number, BATCH, TOKENS, WIDTH)])
            target = paddle.to_tensor(noise(50 + number, BATCH, TOKENS, 4).numpy())
            ((model(paddle.to_tensor(x.numpy())) - target) ** 2).mean().backward()
            optimizer.step()
            optimizer.clear_grad()
            rec.try_dump()
    report = compare_runs(reference, rec.run)
    assert report.passed, report.text(120)
