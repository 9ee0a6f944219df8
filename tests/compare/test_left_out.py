"""What one side leaves out: a call of a layer in several places, a function, gradients; and masks in another form."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as f

import padiff
from padiff.compare import compare_runs
from tests.compare.test_public_bugs import cause, descent, recorded, tensor


class Reuses(nn.Module):
    """One activation in three places; the second one may be left out, or a dropout that drops nothing."""

    def __init__(self, rate):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.act, self.drop, self.out = nn.Tanh(), nn.Dropout(rate), nn.Linear(8, 2)

    def forward(self, x, without):
        h = self.act(self.a(x))
        h = h if without == "drop" else self.drop(h)
        h = self.b(h)
        h = h if without == "act" else self.act(h)
        return self.out(self.drop(self.act(self.c(h))))


def reuses(without):
    def train(fault, rng):
        model = Reuses(0.0)
        return descent(model, lambda: f.mse_loss(model(tensor(rng, 8, 6), without if fault else ""), tensor(rng, 8, 2)))

    return train


def test_a_layer_that_is_used_in_several_places_is_paired_by_what_is_called_around_it(tmp_path):
    found = cause(tmp_path, reuses("act"))
    assert found.proven and "no activation" in found.sentence, found
    runs = [recorded(tmp_path / f"drop {fault}", reuses("drop"), fault) for fault in (False, True)]
    assert compare_runs(*runs).passed  # a dropout that drops nothing


class Scores(nn.Module):
    """Attention by the scores of a network, in two ways of writing; one ends with an activation, or calls more."""

    def __init__(self, form, fault):
        super().__init__()
        self.form, self.fault = form, fault
        self.a, self.b, self.out = nn.Linear(6, 8), nn.Linear(8, 1), nn.Linear(6, 3)
        self.last = nn.Sigmoid() if fault == "layer" else None

    def forward(self, x):
        scores = self.b(torch.tanh(self.a(x)))
        scores = scores if self.last is None else self.last(scores)
        if not self.form:
            return self.out((torch.softmax((scores / 2).transpose(1, 2), -1) @ x).squeeze(1))
        scores = scores.squeeze(-1)
        scores = torch.relu(scores) if self.fault == "function" else scores
        scores = scores.exp().log1p() if self.fault == "two" else scores
        return self.out((f.softmax(scores / 2, -1).unsqueeze(-1) * x).sum(1))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("layer", "the candidate has the activation sigmoid (`last`), the reference none"),
        ("function", "the candidate has the activation ReLU (relu() in `(root)`), the reference none"),
        ("two", "the candidate calls exp(), then log1p() in `(root)` besides, before div() in `(root)`"),
    ],
)
def test_calls_that_the_candidate_makes_besides_are_named_alone(tmp_path, fault, words):
    def train(faulty, rng):
        model = Scores(faulty, fault if faulty else "")
        return descent(model, lambda: f.mse_loss(model(tensor(rng, 8, 5, 6)), tensor(rng, 8, 3)))

    found = cause(tmp_path, train)
    assert found.proven and words in found.sentence, found
    assert (found.kind == "activation_added") == ("activation" in words)


def without_log(fault, rng):
    model, weights = nn.Sequential(nn.Linear(6, 5), nn.Softmax(-1)), torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2])

    def loss():
        y = model(tensor(rng, 8, 6))
        y = y.reshape(8, 5)
        if fault:
            return -(weights * y.clamp(1e-5, 1 - 1e-5)).sum(-1).mean()
        return -(weights * y.clamp(1e-5, 1 - 1e-5).log()).sum(-1).mean()

    return descent(model, loss)


def test_the_line_of_a_missing_call_is_the_one_that_goes_on_without_it(tmp_path):
    found = cause(tmp_path, without_log)
    assert found.proven and "log() in the loop is left out" in found.sentence, found
    assert found.lines.candidate.code.startswith("return -(weights * y.clamp(1e-5, 1 - 1e-5)).sum(-1)"), found.lines


def own_count(fault, rng):
    model = nn.Linear(6, 1)

    def loss():
        x, y, counts = tensor(rng, 12, 6), tensor(rng, 12, 1), torch.tensor([1.0, 0.0, 1.0] * 4)[:, None]
        total = ((model(x) - y).abs().log1p() * counts).sum()
        return total if fault else total / counts.sum()

    return descent(model, loss)


def test_a_sum_that_is_not_divided_by_the_number_of_its_labels_is_no_sum_for_a_mean(tmp_path):
    found = cause(tmp_path, own_count)
    assert found.proven and "divided by 8" in found.sentence.replace("divides it by 8", "divided by 8"), found
    assert "mean(" not in found.fix, found


def clipped(fault, rng):
    """Choices (`clamp`) excuse updates of other rows, and no missing update."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    yield model, optimizer
    while True:
        logs = f.log_softmax(model(tensor(rng, 8, 6)), -1)
        logs = logs.detach().requires_grad_() if fault else logs
        ratio = torch.exp(logs - logs.detach() + 0.3 * tensor(rng, 8, 3))
        loss = -torch.minimum(ratio, ratio.clamp(0.8, 1.2)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def test_a_loss_that_is_detached_from_the_model_is_named(tmp_path):
    runs = [recorded(tmp_path / f"{fault}", clipped, fault) for fault in (False, True)]
    first = compare_runs(*runs).first_diff
    assert first.step == 0 and first.cause.kind == "detached" and first.cause.proven, first
    assert first.cause.lines.candidate.code.startswith("logs = logs.detach()"), first.cause.lines


class Encoder(nn.Module):
    """An encoder layer that is given the places to keep, or those to hide."""

    def __init__(self, keeps, activation="relu"):
        super().__init__()
        self.keeps = keeps
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, activation, batch_first=True)
        self.out = nn.Linear(8, 2)

    def forward(self, x, mask):
        return self.out(self.layer(x, src_key_padding_mask=~mask if self.keeps else mask))


def encoders(how):
    def train(fault, rng):
        model = Encoder(keeps=fault, activation="gelu" if fault and how == "activation" else "relu")
        if fault and how == "weights":
            nn.init.ones_(model.layer.linear2.weight)

        def loss():
            hidden = torch.arange(6)[None] >= torch.from_numpy(rng.integers(3, 6, 4))[:, None]
            given = ~hidden if model.keeps and how != "inverted" else hidden
            return model(tensor(rng, 4, 6, 8), given)[:, 0].square().mean()

        return descent(model, loss)

    return train


@pytest.mark.parametrize(("how", "stage", "words"), [
    ("weights", "weight", "different weights"),
    ("activation", "forward", "GELU"),
    ("inverted", "forward", "only the candidate calls logical_not() there"),
])  # fmt: skip
def test_a_mask_in_another_form_takes_no_blame_for_another_fault(tmp_path, how, stage, words):
    runs = [recorded(tmp_path / f"{fault}", encoders(how), fault) for fault in (False, True)]
    first = compare_runs(*runs).first_diff
    assert first.stage == stage and words in first.cause.sentence, first
    runs[1] = recorded(tmp_path / "clean", encoders("form"), True)
    assert compare_runs(*runs).passed


def shorter(fault, rng):
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))

    def loss():
        ids = torch.from_numpy(np.stack([rng.integers(0, 9, 8) for _ in range(3)]))[:, : 7 if fault else 8]
        return f.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    return descent(model, loss)


def test_a_batch_of_another_size_is_said_to_be_one(tmp_path):
    found = cause(tmp_path, shorter)
    assert "(3, 6)" in found.sentence and "(3, 7)" in found.sentence, found


class Attends(nn.Module):
    """A decoder that computes the keys in each turn, or once, with other axes first."""

    def __init__(self, once):
        super().__init__()
        self.once, self.start, self.key, self.out = once, nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        memory = torch.tanh(self.start(x)).transpose(0, 1)
        turns, keys = [], self.key(memory.transpose(0, 1)) if self.once else None
        for t in range(4):
            key = keys if self.once else self.key(memory).transpose(0, 1)
            turns.append(torch.softmax((key * memory[t][:, None]).sum(-1), -1)[:, :, None] * memory.transpose(0, 1))
        return self.out(torch.stack(turns).sum((0, 2)))


def test_what_is_computed_in_each_turn_or_once_is_no_difference_in_sketches(tmp_path):
    def train(fault, rng):
        model = Attends(fault)
        return descent(model, lambda: f.cross_entropy(model(tensor(rng, 8, 7, 6)), torch.arange(8) % 3))

    runs = [recorded(tmp_path / f"{fault}", train, fault, detail="sketch") for fault in (False, True)]
    report = compare_runs(*runs)
    assert report.passed, report.first_diff


def test_another_activation_is_named_by_sketches_too(tmp_path):
    def train(fault, rng):
        model = nn.Sequential(nn.Linear(60, 80), nn.GELU() if fault else nn.ReLU(), nn.Linear(80, 3))
        return descent(model, lambda: f.cross_entropy(model(tensor(rng, 60, 60)), torch.arange(60) % 3))

    runs = [recorded(tmp_path / f"{fault}", train, fault, detail="sketch") for fault in (False, True)]
    found = compare_runs(*runs).first_diff.cause
    assert "gelu" in found.sentence.lower() and "relu" in found.sentence.lower(), found


def test_a_mask_in_another_form_is_no_difference_in_sketched_steps(tmp_path):
    def train(fault, rng):
        model = Encoder(keeps=False)

        class Flipped(nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self, x, mask):
                return self.model(x, mask == 0)

        flipped = Flipped()

        def loss():
            hidden = torch.arange(9)[None] >= torch.from_numpy(rng.integers(3, 9, 64))[:, None]
            mask = torch.where(hidden, 0.0, 5.0) if fault else torch.where(hidden, 0.0, 1.0)
            return flipped(tensor(rng, 64, 9, 8), mask)[:, 0].square().mean()

        return descent(flipped, loss)

    runs = [recorded(tmp_path / f"{fault}", train, fault, detail="sketch") for fault in (False, True)]
    report = compare_runs(*runs)
    assert report.passed, report.first_diff


def test_gradients_below_the_limit_lack_no_clipping(tmp_path):
    def train(fault, rng):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        yield model, optimizer
        while True:
            loss = 50 * f.cross_entropy(model(tensor(rng, 8, 6)), torch.arange(8) % 3)
            optimizer.zero_grad()
            loss.backward()
            for p in model.parameters():
                p.grad.mul_(0.001 if fault else 1.0)  # an unscaling that the loss did not need
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            yield loss

    runs = [recorded(tmp_path / f"{fault}", train, fault) for fault in (False, True)]
    found = compare_runs(*runs).first_diff.cause
    assert "not clipped" not in found.sentence, found


def test_a_loss_that_is_not_reduced_is_named_where_its_code_differs_too(tmp_path):
    """Paddle's backward takes several numbers and sums them up."""
    paddle = pytest.importorskip("paddle")
    kits = ((torch, torch.tensor, nn.Linear(6, 1)), (paddle, paddle.to_tensor, paddle.nn.Linear(6, 1)))
    for kit, make, net in kits:
        values = np.linspace(-0.5, 0.5, 6, dtype="float32")
        with torch.no_grad(), paddle.no_grad():
            net.weight.copy_(make(values[None])) if kit is torch else net.weight.set_value(values[:, None])
            net.bias.copy_(make([0.1])) if kit is torch else net.bias.set_value(np.array([0.1], "float32"))
        rng = np.random.default_rng(0)
        if kit is torch:
            optimizer = torch.optim.SGD(net.parameters(), 0.01)
        else:
            optimizer = paddle.optimizer.SGD(0.01, parameters=net.parameters())
        with padiff.record(net, tmp_path / kit.__name__, optimizer=optimizer) as rec:
            for _ in range(2):
                x, y = (make(rng.normal(size=(8, k)).astype("float32")) for k in (6, 1))
                scores = net(x)
                loss = kit.nn.functional.softplus(scores * y).mean() if kit is torch else scores.exp() - y.mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad() if kit is torch else optimizer.clear_grad()
                rec.try_dump()
    first = compare_runs(tmp_path / "torch", tmp_path / "paddle").first_diff
    assert (first.stage, first.cause.kind, first.cause.proven) == ("backward", "reduction", False), first.message
    assert "the candidate's backward begins at a tensor of shape (8, 1)" in first.cause.sentence
