"""Bugs that trainings in public had: what a loop clips and zeroes, layers in a list, masks."""

from __future__ import annotations

import pytest
import torch
from hard.children import run_script
from torch import nn
from torch.nn import functional as f

from padiff.compare import compare_runs
from tests.compare.test_public_bugs import cause, descent, tensor


def accumulated(how):
    """Two micro-batches a step; the faults clip after or before each, or zero in between."""

    def train(fault, rng):
        model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 1, 3))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        yield model, optimizer
        while True:
            for _ in range(2):
                if fault and how == "zeroed":
                    optimizer.zero_grad()
                x, y = tensor(rng, 4, 1, 6, 6), tensor(rng, 4, 1, 4, 4)
                loss = f.mse_loss(model(x), y) / 2
                if fault and how == "clipped early":
                    nn.utils.clip_grad_norm_(model.parameters(), 0.2)
                loss.backward()
                if fault and how == "clipped":
                    nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            if how in ("clipped", "clipped early") and not fault:
                nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad()
            yield loss

    return train


def updated_twice(fault, rng):
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    yield model, optimizer
    while True:
        for update in range(2):
            loss = f.mse_loss(model(tensor(rng, 8, 6)), 3 + tensor(rng, 8, 1))
            if not (fault and update):
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        yield loss


class Branches(nn.Module):
    def __init__(self, registered):
        super().__init__()
        layers = [nn.Linear(6, 5), nn.Linear(6, 7)]
        self.branches = nn.ModuleList(layers) if registered else layers
        self.out = nn.Linear(12, 1)

    def forward(self, x):
        return self.out(torch.cat([torch.tanh(branch(x)) for branch in self.branches], -1))


def in_a_list(fault, rng):
    model = Branches(not fault)
    return descent(model, lambda: f.mse_loss(model(tensor(rng, 8, 6)), tensor(rng, 8, 1)))


class Residual(nn.Module):
    def __init__(self, inplace):
        super().__init__()
        self.start = nn.Linear(6, 6)
        self.block = nn.Sequential(nn.ReLU(inplace), nn.Linear(6, 6))

    def forward(self, x):
        x = self.start(x)
        return x + self.block(x)


def overwritten(fault, rng):
    model = Residual(fault)
    return descent(model, lambda: f.mse_loss(model(tensor(rng, 8, 6)), tensor(rng, 8, 6)))


class Scores(nn.Module):
    """Scores, or their sigmoid with a loss that is a layer of the model."""

    def __init__(self, squashed):
        super().__init__()
        self.linear = nn.Linear(6, 12)
        self.loss = nn.BCELoss() if squashed else nn.BCEWithLogitsLoss()
        self.squashed = squashed

    def forward(self, x):
        return torch.sigmoid(self.linear(x)) if self.squashed else self.linear(x)


def smoothed(fault, rng):
    model = Scores(fault)

    def loss():
        x, y = tensor(rng, 8, 6), (tensor(rng, 8, 12) > 1).float()
        return model.loss(model(x), 0.9 * y + (1.0 if fault else 0.1) / 12)

    return descent(model, loss)


class Rounds(nn.Module):
    """Passes messages in rounds; the faults have one round less, or one more."""

    def __init__(self, rounds):
        super().__init__()
        self.rounds, self.message, self.update, self.out = rounds, nn.Linear(8, 8), nn.GRUCell(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        for _ in range(self.rounds):
            x = self.update(self.message(x.roll(1, 0)), x)
        return self.out(torch.tanh(x))


def in_rounds(other):
    def train(fault, rng):
        model = Rounds(other if fault else 3)
        return descent(model, lambda: f.mse_loss(model(tensor(rng, 6, 8)), 3 + tensor(rng, 6, 2)))

    return train


class Attention(nn.Module):
    def __init__(self, of_queries):
        super().__init__()
        self.embed, self.key, self.value = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.axis = 2 if of_queries else 1

    def forward(self, ids):
        x = self.embed(ids)
        scores = x @ self.key(x).transpose(1, 2)
        scores = scores.masked_fill((ids == 0).unsqueeze(self.axis), -1e4)
        return scores.softmax(-1) @ self.value(x)


class Positions(nn.Module):
    def __init__(self, inverted):
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.register_buffer("table", torch.randn(6, 8))
        self.inverted = inverted

    def forward(self, ids):
        words = (ids != 0).float()[..., None]
        return self.out(self.embed(ids) * words + self.table * (1 - words if self.inverted else words))


class Rotary(nn.Module):
    def __init__(self, halves):
        super().__init__()
        self.embed, self.query, self.value, self.out = nn.Embedding(20, 8), *(nn.Linear(8, 8) for _ in range(3))
        self.halves = halves
        angles = torch.arange(6)[:, None] / 10000 ** (torch.arange(0, 8, 2) / 8)
        self.register_buffer("angles", angles.repeat_interleave(2, -1))

    def turned(self, x):
        first, second = (x[..., :4], x[..., 4:]) if self.halves else (x[..., ::2], x[..., 1::2])
        rotated = torch.cat([-second, first], -1) if self.halves else torch.stack([-second, first], -1).flatten(-2)
        return x * self.angles.cos() + rotated * self.angles.sin()

    def forward(self, ids):
        x = self.turned(self.query(self.embed(ids)))
        return self.out((x @ x.transpose(1, 2)).softmax(-1) @ self.value(self.embed(ids)))


def of_words(make):
    def train(fault, rng):
        model = make(fault)

        def loss():
            ids = torch.from_numpy(rng.integers(1, 20, (4, 6)))
            ids[:, 4:] = 0
            return f.mse_loss(model(ids), tensor(rng, 4, 6, 8))

        return descent(model, loss)

    return train


@pytest.mark.parametrize(
    ("train", "kind", "text"),
    [
        (accumulated("clipped"), "clip_each_backward", "the candidate clips after each of the 2 backwards of a step"),
        (accumulated("clipped early"), "clip_each_backward", "clips before each of the 2 backwards of a step"),
        (accumulated("zeroed"), "micro_batch_missing", "only the last micro-batch is in the candidate's gradients"),
        (updated_twice, "stale_gradient", "those of the update before are not zeroed"),
        (in_a_list, "unregistered", "layers in a plain list or dict are not registered"),
        (overwritten, "in_place", "`block.0` (ReLU) overwrites its input in place"),
        (in_rounds(2), "layer_missing", "in the candidate, `update` is called 2 times there, not 3 times"),
        (in_rounds(4), "layer_added", "if, in the candidate, `update` is called 3 times there, not 4 times"),
        (smoothed, "scale", "is 0.0833333 for the reference's 0.00833333"),
        (of_words(Attention), "code", "the mask of shape (4, 6, 1) for the reference's (4, 1, 6)"),
        (of_words(Positions), "mask_inverted", "the mask is inverted"),
        (of_words(Rotary), "rotary_form", "are interleaved (each with its neighbour), not in halves"),
    ],
)  # fmt: skip
def test_the_cause_is_named(tmp_path, train, kind, text):
    found = cause(tmp_path, train)
    assert found.kind == kind and found.proven and text in found.sentence, found


LOOP = """import padiff, torch
torch.manual_seed(0)
model = torch.nn.Linear(6, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
with padiff.record(model, __file__ + ".run", optimizer=optimizer) as rec:
    for _ in range(3):
        loss = (model(torch.randn(8, 6)) - 3).square().mean()
        optimizer.zero_grad()
        {}
        {}
        {}
        rec.try_dump()
"""
BACKWARD, CLIP, STEP = "loss.backward()", "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)", "optimizer.step()"


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        ((BACKWARD, STEP, CLIP), "it clips in line 11, after its optimizer's step in line 10"),
        ((CLIP, BACKWARD, STEP), "it clips in line 9, before its backward, when gradients are still zero"),
    ],
)
def test_clipping_at_the_wrong_place_is_said_with_its_line(lines, where, tmp_path):
    runs = []
    for name, ordered in (("before", (BACKWARD, CLIP, STEP)), ("after", lines)):
        script = tmp_path / f"{name}.py"
        script.write_text(LOOP.format(*ordered))
        assert run_script(tmp_path, script).returncode == 0
        runs.append(f"{script}.run")
    found = compare_runs(*runs).first_diff.cause
    assert found.kind == "clip_missing" and found.proven, found
    assert found.sentence.endswith(where), found
