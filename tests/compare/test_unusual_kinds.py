"""Kinds of training that are seldom ported: averages of clients, quantization, preferences, optical flow, retrieval."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
from torch import nn
from torch.nn import functional as f

import padiff
from compare.test_other_kinds import BOTH, compared, descent, placed, tensor
from padiff.compare import compare_runs


def cause_of(report):
    return report.first_diff.cause


# -- calls inside of a model that take parts of one tensor ---------------------------------------------------------


class Words(nn.Module):
    """A table that one author looks up for the words and for the samples, the other once for both."""

    def __init__(self, way):
        super().__init__()
        self.way, self.centre, self.around = way, nn.Embedding(30, 6), nn.Embedding(30, 6)

    def forward(self, centre, word, samples):
        c = self.centre(centre)
        if self.way == "reference":
            right, wrong = self.around(word), self.around(samples)
            return (c * right).sum(1), (wrong * c[:, None]).sum(2)
        scores = (self.around(torch.cat([word[:, None], samples], 1)) * c[:, None]).sum(2)
        return scores[:, 0], scores[:, 1:]


def words(way):
    model = Words(way)

    def loss(rng):
        right, wrong = model(*(torch.randint(30, size, generator=rng) for size in ((8,), (8,), (8, 4))))
        share = 0.5 if way == "fault" else 1.0
        return -f.logsigmoid(right).mean() - share * f.logsigmoid(-wrong).sum(1).mean()

    return descent(model, loss)


@BOTH
def test_calls_inside_of_a_model_are_compared_with_one_call_of_all(options, tmp_path):
    clean, fault = compared(tmp_path, words, "reference", "clean", "fault", **options)
    assert clean.passed, clean.first_diff.message
    assert placed(fault)[:2] == (0, "loss")
    assert cause_of(fault).proven and "0.5" in cause_of(fault).sentence


def test_the_outputs_of_the_calls_are_compared_along_their_axis(tmp_path):
    (clean,) = compared(tmp_path, words, "reference", "clean")
    joined = [
        d for d in clean.diffs if d.pair.stage == "forward" and d.pair.anchor.layer == "around" and d.pair.complete
    ]
    assert joined and {d.pair.reference.shape for d in joined} == {(8, 5, 6)}


# -- weights that the loop mixes -----------------------------------------------------------------------------------


def clients(way):
    """Every two steps the loop puts in an average of what three clients have trained, each from the same weights."""
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    shares = [1 / 3] * 3 if way == "fault" else [0.5, 0.25, 0.25]
    rng = yield model, optimizer
    server = [p.detach().clone() for p in model.parameters()]
    while True:
        ends = []
        for _ in range(3):
            with torch.no_grad():
                for p, s in zip(model.parameters(), server):
                    p.copy_(s)
            for _ in range(2):
                value = model(tensor(rng, 8, 6)).square().mean()
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
                rng = yield value
            ends.append([p.detach().clone() for p in model.parameters()])
        server = [sum(share * end[k] for share, end in zip(shares, ends)) for k in range(len(server))]


@BOTH
def test_other_shares_of_an_average_of_clients_are_named(options, tmp_path):
    clean, fault = compared(tmp_path, clients, "reference", "clean", "fault", steps=8, **options)
    assert clean.passed, clean.first_diff.message
    assert placed(fault)[:2] == (6, "weight")
    cause = cause_of(fault)
    assert cause.kind == "weights_mixed" and cause.proven
    assert "0.333 of those after step 1 for the reference's 0.5" in cause.sentence


# -- one number in several places, and functions that leave nothing ------------------------------------------------


def preferences(way):
    """A preference loss, smoothed, against a reference model."""
    model = nn.Linear(6, 5)

    def loss(rng):
        better, worse, base = (tensor(rng, 8, 6) for _ in range(3))
        beta = 0.2 if way == "beta" else 0.1
        score = lambda x: (model(x).log_softmax(1) * (x[:, :5] > 0)).sum(1)  # noqa: E731
        with torch.no_grad():
            bias = score(base)
        margin = score(better) - score(worse)
        margin = margin if way == "no reference" else margin - bias
        if way == "reference":
            return -(0.9 * f.logsigmoid(beta * margin) + 0.1 * f.logsigmoid(-beta * margin)).mean()
        return (0.9 * f.softplus(-beta * margin) + 0.1 * f.softplus(beta * margin)).mean()

    return descent(model, loss)


def test_a_number_with_both_signs_is_one_number(tmp_path):
    clean, beta = compared(tmp_path, preferences, "reference", "clean", "beta")
    assert clean.passed, clean.first_diff.message
    assert cause_of(beta).proven and "in another place, is 0.2 for the reference's 0.1" in cause_of(beta).sentence


def test_a_term_that_is_left_out_is_no_other_reduction(tmp_path):
    # The maximum of negative numbers and zeros is zero: it explains as much.
    (fault,) = compared(tmp_path, preferences, "reference", "no reference")
    assert "max" not in cause_of(fault).sentence and "not added" in cause_of(fault).sentence


# -- buffers that paddle writes into -------------------------------------------------------------------------------


class Observed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 5)
        self.register_buffer("largest", torch.ones(1))

    def forward(self, x):
        self.largest.mul_(0.9).add_(0.1 * x.detach().abs().max())
        scale = self.largest / 127
        return self.inner(x + ((x / scale).round() * scale - x).detach())


class Written(paddle.nn.Layer):
    def __init__(self, share):
        super().__init__()
        self.share, self.inner = share, paddle.nn.Linear(6, 5)
        self.register_buffer("largest", paddle.ones([1]))

    def forward(self, x):
        self.largest.set_value(self.largest * self.share + x.detach().abs().max() * (1 - self.share))
        scale = self.largest / 127
        return self.inner(x + (paddle.round(x / scale) * scale - x).detach())


def quantized(folder, share, start=None):
    rng = torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model = Observed() if share is None else Written(share)
    if start is not None:
        padiff.start_from(start, model)
    rate = {"lr": 0.1, "params": model.parameters()} if share is None else {}
    optimizer = torch.optim.SGD(**rate) if rate else paddle.optimizer.SGD(0.1, parameters=model.parameters())
    with padiff.record(model, folder, optimizer=optimizer) as rec:
        for _ in range(3):
            x = tensor(rng, 8, 6)
            model(x if share is None else paddle.to_tensor(x.numpy())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad() if share is None else optimizer.clear_grad()
            rec.try_dump()
    return folder


def test_what_set_value_writes_is_computed_with(tmp_path):
    reference = quantized(tmp_path / "reference", None)
    clean = compare_runs(reference, quantized(tmp_path / "clean", 0.9, reference))
    assert clean.passed, clean.first_diff.message
    fault = compare_runs(reference, quantized(tmp_path / "fault", 0.99, reference))
    assert "0.99" in cause_of(fault).sentence


# -- what stands at another place ----------------------------------------------------------------------------------


class Matching(nn.Module):
    """One author's activations are layers in the encoder and functions after it; the other's the other way round."""

    def __init__(self, way):
        super().__init__()
        self.way, self.inner, self.act, self.out = way, nn.Linear(6, 8), nn.LeakyReLU(0.1), nn.Linear(7, 3)

    def forward(self, x):
        own = self.inner(x)
        h = self.act(own) if self.way == "reference" else f.leaky_relu(own, 0.1)
        h = h.unfold(1, 2, 1).mean(2) if self.way != "sum" else h.unfold(1, 2, 1).sum(2)
        return self.out(f.leaky_relu(h, 0.1) if self.way == "reference" else self.act(h))


def matching(way):
    model = Matching(way)
    return descent(model, lambda rng: model(tensor(rng, 8, 6)).square().mean())


def test_activations_at_other_places_are_no_pair(tmp_path):
    clean, fault = compared(tmp_path, matching, "reference", "clean", "sum")
    assert clean.passed, clean.first_diff.message
    assert "shapes differ" not in fault.first_diff.message and placed(fault) == (0, "forward", "out")
    assert cause_of(fault).proven and "the sum for the reference's mean" in cause_of(fault).sentence


class Head(nn.Module):
    """One author's head returns logits, the other's its loss, which the loop weighs."""

    def __init__(self, way):
        super().__init__()
        self.way, self.weight = way, nn.Parameter(torch.randn(4, 6))

    def forward(self, x, y):
        logits = (2.0 if self.way == "fault" else 1.0) * f.linear(f.normalize(x), f.normalize(self.weight))
        return logits if self.way == "reference" else f.cross_entropy(logits, y)


def mixed_up(way):
    body, head = nn.Linear(5, 6), Head(way)
    model = nn.ModuleDict({"body": body, "head": head})

    def loss(rng):
        x, y, share = tensor(rng, 8, 5), torch.randint(4, (8,), generator=rng), 0.3
        values = [head(body(x), each) for each in (y, y.flip(0))]
        if way == "reference":
            values = [f.cross_entropy(each, labels) for each, labels in zip(values, (y, y.flip(0)))]
        return share * values[0] + (1 - share) * values[1]

    return descent(model, loss)


def test_a_term_that_a_layer_returns_is_no_other_shape(tmp_path):
    clean, fault = compared(tmp_path, mixed_up, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    assert placed(fault)[:2] == (0, "loss") and "shapes differ" not in fault.first_diff.message
    assert cause_of(fault).proven and cause_of(fault).sentence == "in the candidate, added: mul() in `head`"


# -- order and grids -----------------------------------------------------------------------------------------------


class Masked(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.inner, self.out = way, nn.Linear(6, 6), nn.Linear(6, 3)
        self.places = nn.Parameter(torch.randn(5, 6))

    def forward(self, x, noise):
        order = noise.argsort(1)[..., None].expand(-1, -1, 6)
        h = self.inner(x)
        return self.out((h if self.way == "fault" else h.gather(1, order)) + self.places)


def masked(way):
    model = Masked(way)
    return descent(model, lambda rng: model(tensor(rng, 4, 5, 6), torch.rand(4, 5, generator=rng)).square().mean())


def test_an_order_that_is_left_out_is_named(tmp_path):
    (fault,) = compared(tmp_path, masked, "reference", "fault")
    assert cause_of(fault).kind == "order_missing" and cause_of(fault).proven


def warped(way):
    """A flow that samples a picture; the loss has corners: cells of the grid, and absolute values."""
    model = nn.Conv2d(2, 2, 3, padding=1)

    def loss(rng):
        pictures = torch.rand(3, 2, 9, 9, generator=rng)
        flow = model(pictures)
        y, x = torch.meshgrid(torch.linspace(-1, 1, 9), torch.linspace(-1, 1, 9), indexing="ij")
        grid = torch.stack([x + flow[:, 0], y + flow[:, 1]], -1)
        mode = "zeros" if way == "border" else "border"
        made = f.grid_sample(pictures, grid, padding_mode=mode, align_corners=way != "corners")
        return (made - pictures).abs().mean() + 0.1 * (flow[..., 1:] - flow[..., :-1]).abs().mean()

    return descent(model, loss)


@pytest.mark.parametrize(("way", "words"), [("border", "padding_mode zeros"), ("corners", "align_corners=False")])
def test_how_a_grid_samples_is_named(way, words, tmp_path):
    (fault,) = compared(tmp_path, warped, "reference", way)
    assert cause_of(fault).proven and words in cause_of(fault).sentence


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.out = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.norm.eval()

    def forward(self, x):
        return self.out(self.norm(self.inner(x)))


def features(way):
    """Running statistics of a frozen norm are still 0 and 1: in evaluation mode it changes nothing."""
    model = Features()
    nn.init.normal_(model.norm.weight)
    model.norm.train(way == "fault")
    return descent(model, lambda rng: model(tensor(rng, 16, 6)).square().mean())


@BOTH
def test_another_mode_is_no_missing_norm(options, tmp_path):
    (fault,) = compared(tmp_path, features, "reference", "fault", **options)
    assert cause_of(fault).kind == "mode"


def pruned(way):
    """Clients whose weights a mask holds at zero after each step, and an average of what they have trained."""
    model = nn.Linear(8, 12)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    mask = (model.weight.detach().abs() > 0.15).float()
    shares = [0.5, 0.5] if way == "shares" else [0.75, 0.25]
    with torch.no_grad():
        model.weight.mul_(mask)
    rng = yield model, optimizer
    while True:
        server, ends = [p.detach().clone() for p in model.parameters()], []
        for steps in (2, 1):
            with torch.no_grad():
                for p, s in zip(model.parameters(), server):
                    p.copy_(s)
            for _ in range(steps):
                value = model(tensor(rng, 8, 8)).square().mean()
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
                with torch.no_grad():
                    model.weight.mul_(1.0 if way == "unmasked" else mask)
                rng = yield value
            ends.append([p.detach().clone() for p in model.parameters()])
        with torch.no_grad():
            for k, p in enumerate(model.parameters()):
                p.copy_(sum(share * end[k] for share, end in zip(shares, ends)))


def test_masks_of_weights_are_named_and_do_not_hide_other_shares(tmp_path):
    shares, unmasked = compared(tmp_path, pruned, "reference", "shares", "unmasked", steps=6)
    assert cause_of(shares).proven and "0.75" in cause_of(shares).sentence
    assert cause_of(unmasked).kind == "weights_masked" and cause_of(unmasked).proven
    model = next(pruned("reference"))[0]
    zeros = int((model.weight == 0).sum())
    assert "sets 0 elements" in cause_of(unmasked).sentence and zeros > 0


# -- causes that no rule names: the code of both sides -------------------------------------------------------------


def survival(way):
    """A partial likelihood: one author sorts and sums up, the other compares all pairs of times."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(rng):
        risk = model(tensor(rng, 20, 6))[:, 0]
        time, event = torch.rand(20, generator=rng), (torch.rand(20, generator=rng) < 0.6).float()
        if way == "reference":
            order = torch.argsort(time, descending=True)
            hazard, event = risk[order], event[order]
            return -((hazard - torch.logcumsumexp(hazard, 0)) * event).sum() / event.sum()
        at_risk = time[None] <= time[:, None] if way == "fault" else time[None] >= time[:, None]
        denominator = torch.log((at_risk.float() * risk.exp()[None]).sum(1))
        return ((denominator - risk) * event).sum() / event.sum()

    return descent(model, loss)


def test_losses_of_other_code_show_both_sides_code(tmp_path):
    clean, fault = compared(tmp_path, survival, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    cause = cause_of(fault)
    assert placed(fault)[:2] == (0, "loss") and cause.kind == "code" and not cause.proven
    reference, candidate = cause.sentence.split("where the reference computes")[::-1]
    assert "logcumsumexp(risk, 0)" in reference and "<=" in candidate and "risk" in candidate
    assert "denominator - risk" in cause.lines.candidate.code and "logcumsumexp" in cause.lines.reference.code


class Calls(nn.Module):
    """A regularised factorisation, whose tables the loop calls, too: of users and items."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(12, 5), nn.Embedding(15, 5)

    def forward(self, user, item):
        return (self.users(user) * self.items(item)).sum(1)


def factors(way):
    model = Calls()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rng = yield model, optimizer
    while True:
        optimizer.zero_grad()
        for _ in range(2):
            user, item = (torch.randint(12, (8,), generator=rng) for _ in range(2))
            loss = f.softplus(-model(user, item)).mean()
            penalty = model.items(item).square().sum(1).mean()
            if way != "fault":
                penalty = penalty + model.users(user).square().sum(1).mean()
            loss = loss + 0.1 * penalty
            loss.backward()
        optimizer.step()
        rng = yield loss


def test_a_layer_that_is_called_less_often_shows_what_the_loss_is_made_of(tmp_path):
    (fault,) = compared(tmp_path, factors, "reference", "fault")
    assert "penalty" in cause_of(fault).sentence or "Embedding" in cause_of(fault).sentence


class Limited(torch.autograd.Function):
    """Gradients that are limited on their way back."""

    @staticmethod
    def forward(ctx, x, limit):
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-ctx.limit, ctx.limit), None


class Halved(torch.autograd.Function):
    """Gradients that are halved on their way back."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


class Custom(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.body, self.head = way, nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.body(x)
        if self.way == "reference":
            x = Limited.apply(x, 1e-3)
        else:
            x = Halved.apply(x)
        return self.head(x)


def custom(way):
    model = Custom(way)
    return descent(model, lambda rng: f.cross_entropy(model(tensor(rng, 16, 6)), torch.arange(16) % 3))


def test_a_backward_of_the_users_own_is_named(tmp_path):
    (fault,) = compared(tmp_path, custom, "reference", "fault")
    cause = cause_of(fault)
    assert placed(fault)[:2] == (0, "backward") and cause.kind == "own_backward"
    assert "`Halved.backward`" in cause.sentence and "`Limited.backward`" in cause.sentence
    assert all("apply" in line.code for line in cause.lines)


# -- losses that one side scales -----------------------------------------------------------------------------------


def accumulated(way):
    """Two micro-batches: one author divides the loss, the other adds up gradients and divides them."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parameters = [*model.parameters()]
    rng = yield model, optimizer
    while True:
        optimizer.zero_grad()
        sums = [torch.zeros_like(p) for p in parameters]
        for _ in range(2):
            loss = f.cross_entropy(model(tensor(rng, 16, 6)), torch.arange(16) % 3)
            if way == "reference":
                (loss / 2).backward()
            else:
                gradients = torch.autograd.grad(loss, parameters)
                share = 1 if way == "fault" else 2
                sums = [total + gradient / share for total, gradient in zip(sums, gradients)]
        if way != "reference":
            for p, total in zip(parameters, sums):
                p.grad = total
        optimizer.step()
        rng = yield loss


@BOTH
def test_gradients_that_are_scaled_in_the_place_of_the_loss_are_no_difference(options, tmp_path):
    clean, fault = compared(tmp_path, accumulated, "reference", "clean", "fault", **options)
    assert clean.passed, clean.first_diff.message
    assert not fault.passed


def clipped(way):
    """Clipping to a norm hides in the gradients of parameters what the loss is multiplied by."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rng = yield model, optimizer
    while True:
        optimizer.zero_grad()
        loss = f.cross_entropy(model(tensor(rng, 16, 6)), torch.arange(16) % 3)
        (loss * (2 if way == "fault" else 1)).backward()
        norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
        for p in model.parameters():
            p.grad = p.grad * (0.05 / norm)
        optimizer.step()
        rng = yield loss


def test_gradients_that_are_clipped_to_a_norm_do_not_excuse_another_loss(tmp_path):
    (fault,) = compared(tmp_path, clipped, "reference", "fault")
    assert placed(fault)[0] == 0


# -- a last function that one model computes, and the other's loss -------------------------------------------------


class Mixture(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.shares, self.means, self.widths = way, *(nn.Linear(5, 3) for _ in range(3))

    def forward(self, x):
        shares = self.shares(x)
        return (shares.softmax(-1) if self.way == "reference" else shares), self.means(x), f.softplus(self.widths(x))


def mixture(way):
    model = Mixture(way)

    def loss(rng):
        shares, mean, width = model(tensor(rng, 16, 5))
        y = tensor(rng, 16, 1)
        if way == "reference":
            density = shares * torch.exp(-0.5 * ((y - mean) / width) ** 2) / width
            return -density.sum(1).log().mean()
        exponent = -0.5 * ((y - mean) / width) ** 2 - (0 if way == "fault" else width.log())
        return -torch.logsumexp(shares.log_softmax(-1) + exponent, 1).mean()

    return descent(model, loss)


def test_an_output_that_the_loss_takes_in_another_form_is_no_cause(tmp_path):
    clean, fault = compared(tmp_path, mixture, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    assert placed(fault)[:2] == (0, "loss")


class Views(nn.Module):
    """An encoder that one author normalises in the loss, the other in the model."""

    def __init__(self, way):
        super().__init__()
        self.way, self.body, self.code = way, nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        code = self.code(self.body(x).relu())
        return code if self.way == "reference" else code / code.norm(dim=1, keepdim=True)


def views(way):
    model, steps = Views(way), []

    def loss(rng):
        first, second = model(tensor(rng, 8, 6)), model(tensor(rng, 8, 6))
        steps.append(0)
        tau = 0.25 if way == "fault" and len(steps) > 2 else 0.5
        if way == "reference":
            codes = f.normalize(torch.cat([first, second]))
            scores = (codes @ codes.T / tau).masked_fill(torch.eye(16) > 0, float("-inf"))
            return f.cross_entropy(scores, (torch.arange(16) + 8) % 16)
        codes = torch.cat([first, second])
        parts = (codes @ codes.T / tau).exp() * (1 if way == "itself" else 1 - torch.eye(16))
        return (parts.sum(1).log() - (codes * codes.roll(8, 0)).sum(1) / tau).mean()

    return descent(model, loss)


@BOTH
def test_an_output_of_another_form_is_no_difference_in_later_steps(options, tmp_path):
    clean, fault, itself = compared(tmp_path, views, "reference", "clean", "fault", "itself", **options)
    assert clean.passed, clean.first_diff.message
    assert placed(fault)[0] == 2 and placed(fault)[1] in ("loss", "backward")
    assert placed(itself)[0] == 0 and placed(itself)[1] in ("loss", "backward")
    if not options:
        assert cause_of(fault).proven and "0.25, in the reference 0.5" in cause_of(fault).sentence
        assert cause_of(itself).proven and cause_of(itself).kind == "mask_missing"


class Margins(nn.Module):
    """Distances of two embeddings, of which the loop asks for the right ones and the wrong ones in two calls."""

    def __init__(self, way):
        super().__init__()
        self.way, self.table = way, nn.Embedding(12, 6)

    def forward(self, head, tail):
        parts = (self.table(head) - self.table(tail)).square().unflatten(-1, (2, 3))
        if self.way == "fault":
            return 3.0 - parts.sum((-1, -2)).sqrt()
        return 3.0 - parts.sum(-1).sqrt().sum(-1)


def margins(way):
    model = Margins(way)

    def loss(rng):
        head, right, wrong = (torch.randint(size, (16,), generator=rng) for size in (12, 11, 11))
        scores = model(head, (head + 1 + right) % 12), model(head, (head + 1 + wrong) % 12)
        return f.softplus(-scores[0]).mean() + f.softplus(scores[1]).mean()

    return descent(model, loss)


def test_the_outputs_of_all_calls_of_a_model_are_exchanged_at_once(tmp_path):
    (fault,) = compared(tmp_path, margins, "reference", "fault")
    assert placed(fault)[:2] == (0, "forward") and cause_of(fault).proven


# -- a further loss after a backward -------------------------------------------------------------------------------


def two_losses(way):
    """Two losses with a backward each; the second one is computed after the first backward, or before it."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rng = yield model, optimizer
    while True:
        optimizer.zero_grad()
        out, share = model(tensor(rng, 16, 6)), 0.1 if way == "fault" else 0.5
        if way == "reference":
            smooth = out.diff(dim=0).square().mean()
            f.cross_entropy(out, torch.arange(16) % 3).backward(retain_graph=True)
            (0.5 * smooth).backward()
        else:
            f.cross_entropy(out, torch.arange(16) % 3).backward(retain_graph=True)
            penalty = (out[1:] - out[:-1]).square().mean()
            (penalty * share).backward()
        optimizer.step()
        rng = yield None


def test_a_loss_after_a_backward_is_computed_with(tmp_path):
    clean, fault = compared(tmp_path, two_losses, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    assert "`penalty * 0.1`" in cause_of(fault).sentence and "0.5" in cause_of(fault).sentence


# -- a last function that the loop takes ---------------------------------------------------------------------------


class Policy(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.inner, self.outer = way, nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.outer(torch.relu(self.inner(x)))
        return x if self.way == "reference" else x.tanh()


def policies(way):
    model, critic = Policy(way), nn.Linear(4, 3)
    optimizer = torch.optim.SGD([*model.parameters(), *critic.parameters()], 0.1)
    rng = yield nn.ModuleDict({"model": model, "critic": critic}), optimizer
    while True:
        action = model(tensor(rng, 16, 6))
        action = action.tanh() if way == "reference" else action
        noise = tensor(rng, 16, 4)
        noise = noise * 0.5 if way == "fault" else (noise * 0.5).clamp(-0.4, 0.4)
        loss = f.cross_entropy(critic(action + noise), torch.arange(16) % 3)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rng = yield loss


def test_a_function_that_the_loop_takes_in_the_models_place_is_no_cause(tmp_path):
    clean, fault = compared(tmp_path, policies, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    assert "clamp(" in cause_of(fault).sentence and "tanh for" not in cause_of(fault).sentence


# -- what the code takes, and what the loop writes -----------------------------------------------------------------


class Dictionary(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.table, self.bias = way, nn.Parameter(torch.randn(6, 9) * 0.3), nn.Parameter(torch.zeros(6))

    def forward(self, x):
        features = torch.relu((x if self.way == "fewer" else x - self.bias) @ self.table)
        return features @ self.table.t() + self.bias


def dictionary(way):
    model = Dictionary(way)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rng = yield model, optimizer
    while True:
        x = tensor(rng, 16, 6)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if way != "unwritten":
            with torch.no_grad():
                model.table /= model.table.norm(dim=0, keepdim=True)
        rng = yield loss


def test_what_only_one_side_takes_or_writes_is_named(tmp_path):
    fewer, unwritten = compared(tmp_path, dictionary, "reference", "fewer", "unwritten")
    assert placed(fewer)[:2] == (0, "grad")
    assert "takes `bias` in add(), the reference `bias` in sub(), add()" in cause_of(fewer).sentence
    assert placed(unwritten)[:2] == (1, "weight")
    assert "only the reference's loop writes `table`" in cause_of(unwritten).sentence


# -- a target that magnifies rounding ------------------------------------------------------------------------------


def squashed(way):
    """A target with the logarithm of what saturation leaves, in one row, computed in two ways."""
    model = nn.Linear(6, 2)

    def loss(rng):
        x = tensor(rng, 40, 6)
        with torch.no_grad():
            raw = model(x) + 7.0 * (torch.arange(40) == 3)[:, None]
            act = torch.tanh(raw) if way == "reference" else torch.tanh(raw) * 1.1 / 1.1
            left = torch.log(1 - act**2 + (1e-4 if way == "other" else 1e-6))
        return f.mse_loss(model(x)[:, :1], left.sum(1, keepdim=True))

    return descent(model, loss, 1e-4)


@BOTH
def test_a_target_that_magnifies_rounding_may_be_off_in_a_few_elements(options, tmp_path):
    clean, other = compared(tmp_path, squashed, "reference", "clean", "other", **options)
    assert clean.passed, clean.first_diff.message
    assert placed(other)[:2] == (0, "loss")


class Squashing(nn.Module):
    """A policy that returns the logarithm of its density; some of its actions saturate."""

    def __init__(self, way):
        super().__init__()
        self.way, self.raw = way, nn.Linear(6, 2)

    def forward(self, x):
        raw = self.raw(x) + 7.0 * (torch.arange(40) == 3)[:, None]
        act = raw.tanh() if self.way == "reference" else raw.tanh() * 1.1 / 1.1
        log = torch.log(1 - act**2 + 1e-6).sum(1)
        return log + 0.05 * (torch.arange(40) == 5) if self.way == "row" else log


def squashing(way):
    model = Squashing(way)
    return descent(model, lambda rng: model(tensor(rng, 40, 6)).mean(), 1e-4)


@BOTH
def test_an_output_that_magnifies_rounding_may_be_off_in_the_rows_that_saturate(options, tmp_path):
    clean, row = compared(tmp_path, squashing, "reference", "clean", "row", **options)
    assert clean.passed, clean.first_diff.message
    assert placed(row)[:2] == (0, "forward")


# -- the first calls that compute something else of the same tensors -----------------------------------------------


def sequences(way):
    """Likelihoods of tokens, written as a picked log-softmax, or as a cross entropy with the other sign."""
    model = nn.Linear(6, 5)

    def score(logits, labels, mask):
        if way == "reference":
            picked = f.log_softmax(logits, -1).gather(-1, labels[..., None])[..., 0]
            return (picked * torch.maximum(mask[:, 1:], mask[:, 1:].roll(1, 0))).sum(1)
        nll = f.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(8, 4)
        right = mask[:, 1:]
        weight = torch.minimum(right, right.roll(1, 0)) if way == "weights" else torch.maximum(right, right.roll(1, 0))
        total = -(nll * weight).sum(1)
        return total / (mask[:, 1:].sum(1) + 1) if way == "mean" else total

    def loss(rng):
        x, labels = tensor(rng, 8, 4, 6), torch.randint(5, (8, 4), generator=rng)
        mask = torch.randint(2, (8, 5), generator=rng)
        mask = mask > 0 if way == "reference" else mask.float()
        now = score(model(x), labels, mask)
        with torch.no_grad():
            then = score(1.1 * model(x) + 0.1, labels, mask)
        if way == "reference":
            return -f.logsigmoid(0.3 * ((now[:4] - then[:4]) - (now[4:] - then[4:]))).mean()
        (better, worse), (better_then, worse_then) = now.chunk(2), then.chunk(2)
        return f.softplus(-0.3 * ((better - worse) - (better_then - worse_then))).mean()

    return descent(model, loss)


def test_the_first_call_of_the_same_tensors_is_told_where_the_loss_is_written_otherwise(tmp_path):
    clean, weights, mean = compared(tmp_path, sequences, "reference", "clean", "weights", "mean")
    assert clean.passed, clean.first_diff.message
    cause = cause_of(weights)
    assert "minimum(" in cause.sentence and "where the reference computes `maximum(" in cause.sentence
    assert "weight = " in cause.lines.candidate.code and "picked * torch.maximum" in cause.lines.reference.code
    cause = cause_of(mean)
    assert "only the candidate computes `" in cause.sentence and " / (" in cause.sentence
    assert cause.proven and cause.lines.reference is None


def energies(way):
    """A penalty on energies, after gradients that one author asks for, and the other takes by a backward."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def loss(rng):
        x = tensor(rng, 8, 6).requires_grad_()
        if way == "reference":
            model(x).sum().backward()
            slope = x.grad
            model.zero_grad()
        else:
            (slope,) = torch.autograd.grad(model(x).sum(), x)
        first, second = model(x.detach()), model((x - slope).detach())
        square = (first - second) ** 2 if way == "fault" else first**2 + second**2
        return first.mean() - second.mean() + 0.1 * square.mean()

    return descent(model, loss)


def test_the_losses_that_the_loops_end_with_are_compared(tmp_path):
    clean, fault = compared(tmp_path, energies, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    assert "the candidate computes `(a - b) ** 2`, where the reference" in cause_of(fault).sentence


# -- a model that returns in one tensor what another author's returns in parts -------------------------------------


class Ranked(nn.Module):
    """Scores of a right item and of four wrong ones, in two tensors or in one."""

    def __init__(self, way):
        super().__init__()
        self.way, self.users, self.items = way, nn.Embedding(20, 6), nn.Embedding(30, 6)

    def forward(self, who, right, wrong):
        user = self.users(who)
        if self.way == "reference":
            return (user * self.items(right)).sum(1), (self.items(wrong) * user[:, None]).sum(2)
        items = self.items(torch.cat([right[:, None], wrong], 1))
        return torch.bmm(items, user[:, :, None])[..., 0]


def ranking(way):
    model = Ranked(way)

    def loss(rng):
        who, right = (torch.randint(20, (8,), generator=rng) for _ in range(2))
        wrong = torch.randint(30, (8, 4), generator=rng)
        scores = model(who, right, wrong)
        if way == "reference":
            scores = torch.cat([scores[0][:, None] * 0.7 + 0.3, scores[1] * 0.7 + 0.3], 1)
        else:
            scores = scores * 0.7 + 0.3
        hits = torch.cat([torch.zeros(8, 1, dtype=torch.bool), (wrong + who[:, None]) % 3 == 0], 1)
        scores = scores if way == "fault" else scores.masked_fill(hits, -1e4)
        return f.cross_entropy(scores, torch.zeros(8, dtype=torch.long))

    return descent(model, loss)


def test_outputs_in_one_tensor_and_in_parts_are_no_cause(tmp_path):
    clean, fault = compared(tmp_path, ranking, "reference", "clean", "fault")
    assert clean.passed, clean.first_diff.message
    assert placed(fault)[:2] == (0, "loss")
    assert "mask" in cause_of(fault).sentence


# -- what is computed without a graph, and models that return logarithms -------------------------------------------


class Acting(nn.Module):
    """A policy and its critic: one author returns scores, the other the logarithms of their shares."""

    def __init__(self, way):
        super().__init__()
        self.way, self.body, self.act, self.value = way, nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, x):
        hidden = self.body(x).tanh()
        scores = self.act(hidden)
        return scores if self.way == "reference" else scores.log_softmax(-1), self.value(hidden)[..., 0]


def acting(way):
    model = Acting(way)

    def loss(rng):
        taken, noise, returns = torch.randint(4, (8, 5), generator=rng), tensor(rng, 8, 5), tensor(rng, 8, 5)
        logs, value = model(tensor(rng, 9, 5, 6))
        if way == "reference":
            chances = torch.distributions.Categorical(logits=logs[:-1])
            logs, entropy = chances.log_prob(taken), chances.entropy().mean()
            with torch.no_grad():
                ratio_to = logs + 0.1 * noise
        else:
            entropy = -(logs[:-1].exp() * logs[:-1]).sum(-1).mean()
            logs = logs[:-1].gather(-1, taken[..., None])[..., 0]
            ratio_to = (logs + 0.1 * noise).detach()
        policy = -((logs - ratio_to).exp() * returns).mean()
        error = (value[:-1] - returns).square().mean()
        error = error if way == "weight" else 0.5 * error
        return policy + 0.5 * error + (0.05 if way == "sign" else -0.05) * entropy

    return descent(model, loss)


@BOTH
def test_a_model_that_returns_logarithms_is_no_cause_of_what_the_loss_does(options, tmp_path):
    clean, weight, sign = compared(tmp_path, acting, "reference", "clean", "weight", "sign", **options)
    assert clean.passed, clean.first_diff.message
    assert placed(weight)[:2] == placed(sign)[:2] == (0, "loss")
    assert cause_of(weight).proven and cause_of(sign).proven
    assert "0.5" in cause_of(weight).sentence and "sign" in cause_of(sign).sentence


# -- data that each author prepares in a form of his own -----------------------------------------------------------


def prototypes(way):
    """Distances to the mean of each class: rows that are picked, or a matrix of members."""
    model = nn.Linear(6, 5)
    classes = torch.arange(12) % 3
    members = (classes[None] == torch.arange(3)[:, None]).float()

    def loss(rng):
        z = model(tensor(rng, 20, 6))
        if way == "reference":
            centres = torch.stack([z[:12][classes == k].mean(0) for k in range(3)])
            squares = torch.cdist(z[12:], centres) ** 2
        else:
            rows = z[:12].detach() if way == "detached" else z[:12]
            centres = members @ rows if way == "sum" else members @ rows / members.sum(1, keepdim=True)
            own, others = torch.diag(z[12:] @ z[12:].T), (centres * centres).sum(1)
            squares = own[:, None] + others - 2 * z[12:] @ centres.T
        return f.cross_entropy(-squares, classes[:8])

    return descent(model, loss)


def test_rows_that_are_picked_and_a_matrix_of_members_are_one_code(tmp_path):
    clean, total, cut = compared(tmp_path, prototypes, "reference", "clean", "sum", "detached")
    assert clean.passed, clean.first_diff.message
    assert placed(total)[:2] == (0, "loss") and cause_of(total).proven
    assert "the sum for the reference's mean" in cause_of(total).sentence
    assert placed(cut)[1] in ("loss", "backward") and cause_of(cut).proven and "detach" in cause_of(cut).sentence


# -- edges of a graph ----------------------------------------------------------------------------------------------


class Edges(nn.Module):
    """Attention over the edges of a graph: one author takes the largest score of each node off, the other none."""

    def __init__(self, way):
        super().__init__()
        self.way, self.body = way, nn.Linear(5, 6, bias=False)
        self.source, self.target = nn.Parameter(torch.arange(6) / 5.0), nn.Parameter(torch.arange(6).flip(0) / 7.0)

    def forward(self, x, edges):
        source, target = edges
        h = self.body(x)
        taken = self.source if self.way == "parameter" else self.target
        score = f.leaky_relu((h * self.source).sum(-1)[source] + (h * taken).sum(-1)[target], 0.2)
        group = source if self.way == "sources" else target
        if self.way == "reference":
            top = torch.full((12,), -1e9).scatter_reduce(0, group, score, "amax").detach()
            score = score - top[group]
        weight = score.exp()
        weight = weight / torch.zeros(12).index_add(0, group, weight)[group]
        return torch.zeros(12, 6).index_add(0, target, weight[:, None] * h[source])


def graphs(way):
    model = Edges(way)

    def loss(rng):
        x, pairs = tensor(rng, 12, 5), torch.randint(12, (2, 20), generator=rng)
        loops = torch.arange(12).expand(2, 12)
        edges = [pairs, pairs.flip(0)] if way == "fewer" else [pairs, pairs.flip(0), loops]
        return model(x, torch.cat(edges, 1)).square().mean()

    return descent(model, loss)


def test_what_edges_are_grouped_by_is_named(tmp_path):
    clean, sources, parameter, fewer = compared(
        tmp_path, graphs, "reference", "clean", "sources", "parameter", "fewer", steps=2
    )
    assert clean.passed, clean.first_diff.message
    assert all(cause_of(report).proven for report in (sources, parameter))
    assert "rows are taken by the index of" in cause_of(sources).sentence
    assert "`(root)/source` takes the place of `(root)/target`" in cause_of(parameter).sentence
    assert not fewer.passed and "calls" not in str(fewer.first_diff.cause)


# -- weights of a loss, and a norm of another order ----------------------------------------------------------------


def negatives(way):
    """Wrong answers that count by their own shares, and a norm of the third order."""
    model = nn.Linear(6, 5)

    def loss(rng):
        weight = tensor(rng, 8).abs() + 0.1
        scores = model(tensor(rng, 8, 6))
        shares = f.softmax(scores * 0.8, 1)
        shares = shares if way == "attached" else shares.detach()
        rows = f.softplus(scores).mean(1) if way == "even" else (shares * f.softplus(scores)).sum(1)
        if way == "reference":
            return (weight * rows).sum() / weight.sum() + 0.01 * model.weight.norm(p=3) ** 3
        penalty = model.weight.square() if way == "square" else model.weight.abs().pow(3)
        return (rows.mean() if way == "rows" else (rows * (weight / weight.sum())).sum()) + 0.01 * penalty.sum()

    return descent(model, loss)


def test_the_weights_and_the_norm_of_a_loss_are_named(tmp_path):
    clean, attached, even, rows, square = compared(
        tmp_path, negatives, "reference", "clean", "attached", "even", "rows", "square", steps=2
    )
    assert clean.passed, clean.first_diff.message
    assert all(cause_of(report).proven for report in (attached, even, rows, square))
    assert "does not detach" in cause_of(attached).sentence
    assert "counts all alike" in cause_of(even).sentence and "counts all alike" in cause_of(rows).sentence
    assert "is 2 for the reference's 3" in cause_of(square).sentence


# -- positions that the code counts --------------------------------------------------------------------------------


class Buckets(nn.Module):
    """A bias for distances, far ones in one bucket: one author counts with tensors, the other with numpy."""

    def __init__(self, way):
        super().__init__()
        self.way, self.bias, self.body = way, nn.Embedding(6, 1), nn.Linear(5, 1)

    def forward(self, x):
        if self.way == "reference":
            place = torch.arange(14)
            apart = -torch.min(place[None] - place[:, None], torch.zeros(14, 14, dtype=torch.int64))
            bucket = torch.where(
                apart < 4, apart, torch.min(4 + (apart.float() / 8).to(torch.int64), torch.full_like(apart, 5))
            )
        else:
            place = np.arange(14)
            apart = np.maximum((place[None] - place[:, None]) * (1 if self.way == "direction" else -1), 0)
            far = np.minimum(4 + apart // (6 if self.way == "far" else 8), 5)
            bucket = torch.from_numpy(np.where(apart < 4, apart, far))
        return self.body(x)[..., 0] @ self.bias(bucket)[..., 0]


def buckets(way):
    model = Buckets(way)
    return descent(model, lambda rng: model(tensor(rng, 8, 14, 5)).square().mean())


def test_integers_that_the_code_counts_are_computed(tmp_path):
    clean, far, direction = compared(tmp_path, buckets, "reference", "clean", "far", "direction", steps=2)
    assert clean.passed, clean.first_diff.message
    assert cause_of(far).proven and "has other numbers: 15 of 196 differ" in cause_of(far).sentence
    assert cause_of(direction).proven and "are exchanged" in cause_of(direction).sentence


# -- matrices of a chain ----------------------------------------------------------------


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.steps = nn.Linear(6, 4), nn.Parameter(torch.arange(16.0).reshape(4, 4) / 10)

    def forward(self, x):
        return self.body(x)


def chains(way):
    """A field's likelihood: the tags' score picks entries of a matrix that the sum over all tags adds."""
    model = Chain()

    def loss(rng):
        scores, tags = model(tensor(rng, 8, 5, 6)), torch.randint(4, (8, 5), generator=rng)
        steps = model.steps.T if way == "transposed" else model.steps
        total = scores[:, 0]
        for place in range(1, 5):
            total = torch.logsumexp(total[:, :, None] + steps, 1) + scores[:, place]
        if way == "reference":
            right = scores.gather(2, tags[..., None]).sum((1, 2)) + model.steps[tags[:, :-1], tags[:, 1:]].sum(1)
        else:
            hot = f.one_hot(tags, 4).float()
            right = (scores * hot).sum((1, 2)) + torch.einsum("bti,ij,btj->b", hot[:, :-1], model.steps, hot[:, 1:])
        return (torch.logsumexp(total, 1) - right).mean()

    return descent(model, loss, 0.05)


def test_a_matrix_that_is_transposed_in_one_place_is_named(tmp_path):
    clean, transposed = compared(tmp_path / "chains", chains, "reference", "clean", "transposed", steps=2)
    assert clean.passed, clean.first_diff.message
    assert cause_of(transposed).proven and "`(root)/steps` is transposed" in cause_of(transposed).sentence


# -- inputs that a later step exchanges, and gradients of the same step --------------------------------------------


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 6)

    def forward(self, head, tail):
        return (self.table(head) * self.table(tail) * torch.arange(1, 7)).sum(-1)


def corrupted(way):
    model, steps = Scores(), []

    def loss(rng):
        head, tail, other = (torch.randint(20, size, generator=rng) for size in ((8,), (8,), (8, 4)))
        steps.append(0)
        of_head = len(steps) > 1 and way != "fault"
        wrong = (other, tail[:, None].expand(8, 4)) if of_head else (head[:, None].expand(8, 4), other)
        return f.softplus(-model(head, tail)).mean() + f.softplus(model(*wrong)).mean()

    return descent(model, loss, 0.01)


def climbing(way):
    """Weights that climb along their gradient before the gradient that counts; a norm leaves a bias no gradient."""
    model = nn.Sequential(nn.Conv1d(3, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten(), nn.Linear(36, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    rng = yield model, optimizer
    while True:
        x, labels = tensor(rng, 12, 3, 8), torch.randint(5, (12,), generator=rng)
        f.cross_entropy(model(x), labels).backward()
        with torch.no_grad():
            moves = [p.grad * 0.1 for p in model.parameters()]
            for p, move in zip(model.parameters(), moves):
                p.add_(move)
        if way != "fault":
            optimizer.zero_grad()
        loss = f.cross_entropy(model(x), labels)
        loss.backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        rng = yield loss


def test_exchanged_inputs_and_gradients_of_the_same_step_are_named(tmp_path):
    clean, fault = compared(tmp_path / "corrupted", corrupted, "reference", "clean", "fault", steps=2)
    assert clean.passed, clean.first_diff.message
    assert placed(fault)[:2] == (1, "input") and "gives as `tail` what the reference" in cause_of(fault).sentence
    clean, fault = compared(tmp_path / "climbing", climbing, "reference", "clean", "fault", steps=2)
    assert clean.passed, clean.first_diff.message
    assert cause_of(fault).proven and "2 of 2 backwards of this step" in cause_of(fault).sentence


# -- a recurrence with one layer for the input and the state -------------------------------------------------------


class Forecaster(nn.Module):
    """A recurrence of linear layers; one author calls the heads in each turn, the other once, on all states."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.gates, self.fresh, self.place, self.spread = (
            nn.Linear(n, m) for n, m in ((9, 12), (9, 6), (6, 1), (6, 1))
        )

    def forward(self, series):
        scale = series.abs().mean(1) + 1
        z, h, states, heads = series / scale[:, None], torch.zeros(len(series), 6), [], []
        for t in range(series.shape[1]):
            r, u = self.gates(torch.cat([z[:, t], h], 1)).sigmoid().chunk(2, 1)
            fresh = self.fresh(torch.cat([z[:, t], r * h], 1)).tanh()
            h = (1 - u) * h + u * fresh if self.way == "gate" else u * h + (1 - u) * fresh
            states.append(h)
            if self.way == "reference":
                heads.append(torch.cat([self.place(h), f.softplus(self.spread(h))], 1))
        if self.way == "reference":
            place, spread = torch.stack(heads, 1).unbind(2)
        else:
            states = torch.stack(states, 1)
            place, spread = self.place(states).squeeze(2), f.softplus(self.spread(states)).squeeze(2)
        scale = scale.mean(1, keepdim=True)
        return place * scale, spread if self.way == "scale" else spread * scale


def forecasts(way):
    model = Forecaster(way)

    def loss(rng):
        series = tensor(rng, 5, 6, 3)
        place, spread = model(series)
        return (((series[..., 0] - place) / spread) ** 2 + spread.log()).mean()

    return descent(model, loss)


def test_a_recurrence_differs_first_in_the_turn_that_differs(tmp_path):
    clean, gate = compared(tmp_path, forecasts, "reference", "clean", "gate")
    assert clean.passed, clean.first_diff.message
    # The heads, which one author calls after all turns, come later.
    assert placed(gate) == (0, "forward", "gates") and "(call 1)" in gate.first_diff.message
    assert cause_of(gate).lines.map(lambda line: line.code.strip()).candidate.startswith("h = (1 - u) * h")
    assert "takes" in cause_of(gate).sentence and "sign" not in cause_of(gate).sentence


def test_a_factor_that_the_candidate_computes_and_does_not_use_is_not_the_fault_itself(tmp_path):
    (scale,) = compared(tmp_path, forecasts, "reference", "scale")
    assert placed(scale)[:2] == (0, "forward")
    # With a mean of zero the scale were 1, and the output the candidate's: but the candidate has the mean.
    assert "not added" not in cause_of(scale).sentence, cause_of(scale).sentence
    assert "scale" in cause_of(scale).sentence


# -- gradients that the loop computes after the backward -----------------------------------------------------------


def merged_tasks(way):
    """Gradients of two tasks, of which one author takes them from the parameters, the other asks for them."""
    model = nn.Linear(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rng = yield model, optimizer
    while True:
        y = model(tensor(rng, 8, 6))
        tasks, grads = [y[:, :2].square().mean(), y[:, 1:].tanh().sum(1).mean()], []
        for task in tasks:
            if way == "reference":
                optimizer.zero_grad()
                task.backward(retain_graph=True)
                grads.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))
            else:
                asked = torch.autograd.grad(task, [*model.parameters()], retain_graph=True)
                grads.append(torch.cat([g.reshape(-1) for g in asked]))
        projected = []
        for grad, other in (grads, grads[::-1]):
            dot = torch.dot(grad, other)
            size = other.norm() if way == "norm" else other.square().sum()
            projected.append(grad - dot / size * other)
        both = torch.stack(projected).mean(0) if way == "mean" else torch.stack(projected).sum(0)
        weight, bias = both.split([24, 4])
        model.weight.grad, model.bias.grad = weight.view(4, 6).clone(), bias.clone()
        optimizer.step()
        rng = yield sum(tasks)


def test_what_a_loop_computes_of_gradients_is_read_from_its_code(tmp_path):
    clean, mean, norm = compared(tmp_path, merged_tasks, "reference", "clean", "mean", "norm")
    assert clean.passed, clean.first_diff.message
    for report, words in ((mean, "the mean for the reference's sum"), (norm, "other code")):
        assert placed(report)[1] == "grad"
        assert words in cause_of(report).sentence, cause_of(report).sentence
    assert cause_of(mean).proven and "mean(0) if way" in cause_of(mean).lines.candidate.code


@pytest.mark.parametrize("kit", [torch, paddle], ids=["torch", "paddle"])
@pytest.mark.parametrize("written", ["in place", "anew"])
def test_gradients_that_are_written_by_hand_are_traced(kit, written, tmp_path):
    model = kit.nn.Linear(3, 2)
    if kit is torch:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    else:
        optimizer = paddle.optimizer.SGD(0.1, parameters=model.parameters())
    with padiff.record(model, tmp_path / "run", optimizer=optimizer) as rec:
        model(kit.ones([4, 3])).square().mean().backward()
        with kit.no_grad():
            for p in model.parameters():
                if written == "anew":
                    p.grad = p.grad / (p.grad.norm() + 1e-8)
                elif kit is torch:
                    p.grad /= p.grad.norm() + 1e-8
                else:
                    p.grad.set_value(p.grad / (p.grad.norm() + 1e-8))
        optimizer.step()
        rec.try_dump()
    (step,) = padiff.open_run(tmp_path / "run").steps(0)
    (consumed,) = (call for call in step.trace.calls if call.function == "consumed")
    assert [operand.slot for operand in consumed.inputs] == ["(root)/weight", "(root)/bias"]
    taken = {record.slot: record.value for record in step.records if record.stage == "grad"}
    for operand in consumed.inputs:
        np.testing.assert_array_equal(step.trace.tensors[operand.tensor].source.read(), taken[operand.slot[7:]])
        assert any(operand.tensor in {o.tensor for o in c.outputs} for c in step.trace.calls if c.function == "div")


def test_gradients_that_a_function_of_the_framework_clips_are_not_traced(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with padiff.record(model, tmp_path / "run", optimizer=optimizer) as rec:
        model(torch.ones(4, 3)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        rec.try_dump()
    (step,) = padiff.open_run(tmp_path / "run").steps(0)
    assert not any(call.function == "consumed" for call in step.trace.calls)


# -- critics whose penalty is made of gradients ----------------------------------------------------------------------


def critics(folder, framework, way="clean"):
    """A critic with a gradient penalty, updated twice in a step; in paddle the layers are functions."""
    of_torch = framework is torch
    rng = np.random.default_rng(3)
    net = torch.nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    torch.manual_seed(0)
    weights = [torch.randn(p.shape) for p in net.parameters()]
    if of_torch:
        optimizer, ask = torch.optim.Adam(net.parameters(), 1e-2), torch.autograd.grad
    else:
        net = paddle.nn.Sequential(paddle.nn.Linear(2, 8), paddle.nn.LeakyReLU(0.2), paddle.nn.Linear(8, 1))
        optimizer, ask = paddle.optimizer.Adam(1e-2, parameters=net.parameters()), paddle.grad
    with torch.no_grad():
        for p, values in zip(net.parameters(), weights):
            p.copy_(values) if of_torch else p.set_value((values.T if values.ndim > 1 else values).numpy())

    def drawn(*shape):
        values = rng.normal(size=shape).astype("float32")
        return torch.from_numpy(values) if of_torch else paddle.to_tensor(values)

    with padiff.record(net, folder, optimizer=optimizer) as rec:
        for _ in range(3):
            for update in range(2):
                real, fake, mix = drawn(16, 2), drawn(16, 2), drawn(16, 1)
                mix = mix[:1] if way == "part" else mix
                mixed = mix * real + (1 - mix) * fake if of_torch else paddle.lerp(fake, real, mix)
                if of_torch:
                    mixed.requires_grad_(True)
                else:
                    mixed.stop_gradient = False
                slope = ask(net(mixed).sum(), mixed, create_graph=way != "constant")[0]
                length = (slope * slope).sum(1) if way == "squared" else (slope * slope).sum(1).sqrt()
                loss = net(fake).mean() - net(real).mean() + 10 * ((length - 1) ** 2).mean()
                if way != "kept" or not update:
                    optimizer.zero_grad() if of_torch else optimizer.clear_grad()
                loss.backward()
                optimizer.step()
            rec.try_dump()
    return folder


def test_faults_of_a_penalty_are_told_apart_where_one_framework_records_no_second_gradient(tmp_path):
    reference = critics(tmp_path / "reference", torch)
    ways = "clean", "squared", "constant", "kept", "part"
    reports = [compare_runs(reference, critics(tmp_path / way, paddle, way)) for way in ways]
    clean, squared, constant, kept, part = reports
    assert clean.passed, clean.first_diff.message
    cause = cause_of(squared)
    assert "the root is missing" in cause.sentence and "length = " in cause.lines.candidate.code
    assert cause_of(constant).fix == "create_graph=True"
    cause = cause_of(kept)
    assert cause.kind == "stale_gradient" and cause.proven and "the update before it in the step" in cause.sentence
    assert "[:1]" in cause_of(part).sentence and "only the reference" not in cause_of(part).sentence


# -- linear algebra ------------------------------------------------------------------------------------------------


class Kernel(nn.Module):
    """The likelihood of a Gaussian process over features that are learnt."""

    def __init__(self, way):
        super().__init__()
        self.way, self.features = way, nn.Linear(4, 3)
        self.noise = nn.Parameter(torch.tensor(-1.0))

    def forward(self, x, y):
        z = self.features(x)
        kernel = torch.exp(-0.5 * ((z[:, None] - z[None]) ** 2).sum(-1))
        if self.way == "reference":
            low = torch.linalg.cholesky(kernel + torch.exp(2 * self.noise) * torch.eye(16))
            return 0.5 * (y * torch.cholesky_solve(y[:, None], low)[:, 0]).sum() + low.diagonal().log().sum()
        noise = torch.exp(self.noise) if self.way == "noise" else torch.exp(2 * self.noise)
        low = torch.linalg.cholesky(kernel + noise * torch.eye(16))
        white = torch.linalg.solve_triangular(low, y[:, None], upper=False)
        half = torch.diagonal(low).log().sum() * (2 if self.way == "twice" else 1)
        return (white**2).sum() / 2 + half


def kernels(way):
    model = Kernel(way)
    return descent(model, lambda rng: model(tensor(rng, 16, 4), tensor(rng, 16)), 1e-3)


@BOTH
def test_what_goes_into_a_factorisation_is_named_with_its_line(options, tmp_path):
    clean, noise, twice = compared(tmp_path, kernels, "reference", "clean", "noise", "twice", **options)
    assert clean.passed, clean.first_diff.message
    if options:
        return
    cause = cause_of(noise)
    assert cause.proven and "is not scaled by 2" in cause.sentence
    assert "noise = torch.exp(self.noise)" in cause.lines.candidate.code
    cause = cause_of(twice)
    assert cause.proven and "is 2 for the reference's 1" in cause.sentence and "half = " in cause.lines.candidate.code


# -- a matrix that one model is given and the other holds --------------------------------------------------------------


class Given(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 4)

    def forward(self, x, links):
        return links @ self.linear(x)


class Holding(nn.Module):
    def __init__(self, links):
        super().__init__()
        self.links, self.linear = links, nn.Linear(5, 4)

    def forward(self, x):
        return self.links @ self.linear(x)


def graphs_of_nodes(way):
    links = (torch.rand(6, 6, generator=torch.Generator().manual_seed(5)) > 0.5).float() + torch.eye(6)
    if way == "reference":
        model = Given()

        def loss(rng):
            root = links.sum(1).pow(-0.5)
            return (model(tensor(rng, 6, 5), root[:, None] * links * root) ** 2).mean()

    else:
        root = np.diag(links.sum(1).numpy() ** -0.5)
        by_rows = np.diag(1 / links.sum(1).numpy()) @ links.numpy()
        model = Holding(torch.from_numpy(by_rows if way == "rows" else root @ links.numpy() @ root).float())

        def loss(rng):
            return (model(tensor(rng, 6, 5)) ** 2).mean()

    return descent(model, loss)


def test_a_matrix_that_a_model_holds_is_no_missing_input(tmp_path):
    clean, rows = compared(tmp_path, graphs_of_nodes, "reference", "clean", "rows")
    assert clean.passed, clean.first_diff.message
    cause = cause_of(rows)
    assert cause.kind == "call_input" and "self.links @ " in cause.lines.candidate.code and not cause.proven


# -- a difference whose sign only a comparison tells -------------------------------------------------------------------


def quantiles(way):
    """Huber's loss of quantiles: the difference may be written either way, the comparison may not."""
    model, taus = nn.Linear(6, 8), (torch.arange(8) + 0.5) / 8

    def loss(rng):
        z, y = model(tensor(rng, 16, 6)), tensor(rng, 16, 8)
        delta = y[:, None] - z[:, :, None]
        if way == "reference":
            huber = torch.where(delta.abs() <= 1, 0.5 * delta**2, delta.abs() - 0.5)
            return ((taus[:, None] - (delta.detach() < 0).float()).abs() * huber).mean(2).sum(1).mean()
        under = delta > 0 if way == "above" else delta < 0
        each = f.smooth_l1_loss(z[:, :, None].expand_as(delta), y[:, None].expand_as(delta), reduction="none")
        return ((taus[None, :, None] - under.float().detach()).abs() * each).mean(2).sum(1).mean()

    return descent(model, loss)


@BOTH
def test_a_comparison_the_other_way_round_is_no_exchanged_difference(options, tmp_path):
    clean, above = compared(tmp_path, quantiles, "reference", "clean", "above", **options)
    assert clean.passed, clean.first_diff.message
    assert placed(above)[:2] == (0, "loss")
    if not options:
        assert cause_of(above).proven and "gt() stands in the place of lt()" in cause_of(above).sentence
        assert "under = delta > 0" in cause_of(above).lines.candidate.code


# -- two operators in one line -----------------------------------------------------------------------------------------


def velocities(way):
    """The field that leads from noise to data; one author subtracts twice in one line."""
    model = nn.Linear(7, 6)

    def loss(rng):
        data, noise, t = tensor(rng, 16, 6) + 1, tensor(rng, 16, 6), torch.rand(16, 1, generator=rng)
        field = model(torch.cat([(1 - t) * noise + t * data, t], 1))
        if way == "reference":
            return ((field - (data - noise)) ** 2).mean()
        target = noise - data if way == "reversed" else data - noise
        return f.mse_loss(field, target)

    return descent(model, loss)


def test_operators_of_one_line_are_no_turns_of_a_loop(tmp_path):
    clean, back = compared(tmp_path, velocities, "reference", "clean", "reversed")
    assert clean.passed, clean.first_diff.message
    cause = cause_of(back)
    assert cause.proven and "sub() in the loop" in cause.sentence and "turns" not in cause.sentence
    assert "target = noise - data" in cause.lines.candidate.code


# -- a bias whose gradient is rounding ---------------------------------------------------------------------------------


def decays(way):
    """A norm comes after a bias, whose own gradient is zero: its updates show no momentum, but a decay."""
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    weights = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim == 1]
    nn.init.normal_(model[0].bias)
    groups = [{"params": weights, "weight_decay": 5e-3}, {"params": rest, "weight_decay": 5e-3 * (way == "decayed")}]
    optimizer = torch.optim.SGD(groups, 0.05, momentum=0.9)
    rng = yield model, optimizer
    while True:
        x, y = tensor(rng, 32, 6), torch.randint(4, (32,), generator=rng)
        loss = f.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rng = yield loss


@BOTH
def test_a_setting_that_both_runs_declare_is_no_difference_where_updates_do_not_show_it(options, tmp_path):
    clean, decayed = compared(tmp_path, decays, "reference", "clean", "decayed", steps=6, **options)
    assert clean.passed, clean.first_diff.message
    cause = cause_of(decayed)
    assert cause.proven and "weight decay is 0.005 in the candidate for the reference's 0" in cause.sentence
    assert "momentum" not in cause.sentence and placed(decayed)[1] == "update"


# -- branches of a mask ------------------------------------------------------------------------------------------------


def branches(way):
    """One author exchanges what a mask chooses between; the comparison that makes the mask is right."""
    model = nn.Linear(6, 8)

    def loss(rng):
        off = model(tensor(rng, 16, 6)) - tensor(rng, 16, 8)
        inner, outer = 0.5 * off**2, off.abs() - 0.2
        is_small = off.abs() < 0.7
        return torch.where(is_small, *((outer, inner) if way == "exchanged" else (inner, outer))).mean()

    return descent(model, loss)


def test_exchanged_branches_are_no_other_comparison(tmp_path):
    cause = cause_of(compared(tmp_path, branches, "reference", "exchanged")[0])
    assert "ge()" not in cause.sentence and "what it chooses between is exchanged" in cause.sentence


# -- a margin for the right class alone --------------------------------------------------------------------------------


def smaller_scores(way):
    """The right class's score loses a margin; one author takes it off all classes."""
    model = nn.Linear(6, 5)

    def loss(rng):
        score, labels = model(tensor(rng, 16, 6)).tanh(), torch.randint(5, (16,), generator=rng)
        smaller = torch.where(score > -0.5, 0.9 * score - 0.3, score)
        if way == "all":
            logits = 4 * smaller
            return f.cross_entropy(logits, labels)
        right = f.one_hot(labels, 5).float()
        return f.cross_entropy(4 * (right * smaller + (1 - right) * score), labels)

    return descent(model, loss)


def test_a_mask_that_is_not_used_points_at_what_it_is_for(tmp_path):
    cause = cause_of(compared(tmp_path, smaller_scores, "reference", "all")[0])
    assert cause.proven and "is not used in the loss: the 64 of 80 places count" in cause.sentence
    assert "smaller" in cause.lines.candidate.code


# -- two terms that a number weighs each -------------------------------------------------------------------------------


class Weighing(nn.Module):
    """Two tasks, each weighed by a parameter: both in one vector, or each in one of its own."""

    def __init__(self, way):
        super().__init__()
        self.way, self.body = way, nn.Linear(6, 5)
        shapes = [2] if way == "reference" else [1, 1]
        self.logs = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, x, labels, y):
        out = self.body(x)
        tasks = f.cross_entropy(out[:, :4], labels), (out[:, 4] - y).abs().mean()
        if self.way == "reference":
            return (torch.exp(-self.logs[0]) * torch.stack(tasks) + 0.5 * self.logs[0]).sum()
        terms = [torch.exp(-log) * task + 0.5 * log for log, task in zip(self.logs, tasks)]
        return (terms[0] + terms[1]).squeeze() * (2 if self.way == "doubled" else 1)


def tasks(way):
    model = Weighing(way)
    return descent(
        model, lambda rng: model(tensor(rng, 16, 6), torch.randint(4, (16,), generator=rng), tensor(rng, 16)), 0.01
    )


def test_a_doubled_sum_of_two_terms_is_no_broadcast(tmp_path):
    clean, doubled = compared(tmp_path, tasks, "reference", "clean", "doubled")
    assert clean.passed, clean.first_diff.message
    assert cause_of(doubled) is None or "each number meets" not in cause_of(doubled).sentence
    assert not cause_of(doubled).proven or "2" in cause_of(doubled).sentence


# -- masks that a framework's layers hand on in another form -------------------------------------------------------


class Causal(nn.Module):
    """A layer of the framework's makes numbers of the mask, by code that is not traced."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x):
        later = torch.triu if self.way == "reference" else torch.tril
        return self.body(x, mask=later(torch.ones(6, 6, dtype=torch.bool), diagonal=1))


def causal(way):
    model = Causal(way)
    return descent(model, lambda rng: model(tensor(rng, 4, 6, 8)).square().mean())


def test_a_mask_is_named_where_the_users_code_makes_it(tmp_path):
    (fault,) = compared(tmp_path, causal, "reference", "fault", steps=2)
    assert cause_of(fault).proven
    assert "calls tril() in `(root)`, where the reference calls triu() in `(root)`" in cause_of(fault).sentence
