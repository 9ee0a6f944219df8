"""Kinds of training that are seldom ported: averages of clients, quantization, preferences, optical flow, retrieval."""

from __future__ import annotations

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
