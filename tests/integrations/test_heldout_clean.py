"""Right pairs of other kinds, 40 steps each, every 4th recorded: no false alarm, and nothing left out."""

from __future__ import annotations

import warnings

import paddle
import pytest
import torch

import padiff

from .pair import CLASSES, Mixer, MixerPort, Recipe, batches, carry_over, train_paddle, train_torch

pytestmark = pytest.mark.slow

T, P = torch.nn, paddle.nn


class Attention(T.Module):
    """Self-attention with biases in query, key and value: the key's bias has a gradient of rounding noise only."""

    def __init__(self):
        super().__init__()
        self.norm = T.LayerNorm(16)
        self.q, self.k, self.v, self.out = (T.Linear(16, 16) for _ in range(4))
        self.head = T.Linear(16, CLASSES)

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (f(y).reshape(*y.shape[:2], 4, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = (torch.softmax(q @ k.transpose(-1, -2) / 2, -1) @ v).transpose(1, 2).reshape(x.shape)
        return self.head((x + self.out(y)).mean(1))


class AttentionPort(P.Layer):
    def __init__(self):
        super().__init__()
        self.ln = P.LayerNorm(16)
        self.query, self.key, self.value, self.proj = (P.Linear(16, 16) for _ in range(4))
        self.classifier = P.Linear(16, CLASSES)

    def forward(self, x):
        y = self.ln(x)
        shape = [y.shape[0], y.shape[1], 4, 4]
        q, k, v = (f(y).reshape(shape).transpose([0, 2, 1, 3]) for f in (self.query, self.key, self.value))
        y = P.functional.softmax(q @ k.transpose([0, 1, 3, 2]) / 2, -1) @ v
        return self.classifier((x + self.proj(y.transpose([0, 2, 1, 3]).reshape(x.shape))).mean(1))


def mixer():
    return Mixer(), MixerPort({}), (6, 12)


def attention():
    return Attention(), AttentionPort(), (6, 16)


def cnn_with_bias():
    reference = T.Sequential(
        T.Conv2d(1, 8, 3, padding=1), T.BatchNorm2d(8), T.ReLU(inplace=True), T.MaxPool2d(2),
        T.Conv2d(8, 16, 3, padding=1), T.BatchNorm2d(16), T.ReLU(inplace=True),
        T.Flatten(), T.Linear(16 * 16, CLASSES),
    )  # fmt: skip
    first = P.Sequential(P.Conv2D(1, 8, 3, padding=1), P.BatchNorm2D(8), P.ReLU(), P.MaxPool2D(2))
    second = P.Sequential(P.Conv2D(8, 16, 3, padding=1), P.BatchNorm2D(16), P.ReLU())
    return reference, P.Sequential(first, second, P.Flatten(), P.Linear(16 * 16, CLASSES)), (1, 8, 8)


def mlp():
    reference = T.Sequential(T.Linear(12, 32), T.Tanh(), T.Linear(32, 32), T.ReLU(), T.Linear(32, CLASSES))
    candidate = P.Sequential(P.Linear(12, 32), P.Tanh(), P.Linear(32, 32), P.ReLU(), P.Linear(32, CLASSES))
    return reference, candidate, (12,)


def batch_norm_1d():
    reference = T.Sequential(T.Linear(12, 32), T.BatchNorm1d(32), T.ReLU(), T.Linear(32, CLASSES))
    candidate = P.Sequential(P.Linear(12, 32), P.BatchNorm1D(32), P.ReLU(), P.Linear(32, CLASSES))
    return reference, candidate, (12,)


def adam(rate=1e-3):
    return Recipe(lambda p: torch.optim.Adam(p, rate), lambda p: paddle.optimizer.Adam(rate, parameters=p))


def adamw(rate=1e-3):
    return Recipe(
        lambda p: torch.optim.AdamW(p, rate, weight_decay=0.01),
        lambda p: paddle.optimizer.AdamW(rate, parameters=p, weight_decay=0.01),
    )


def momentum(rate=0.05):
    return Recipe(
        lambda p: torch.optim.SGD(p, rate, momentum=0.9), lambda p: paddle.optimizer.Momentum(rate, 0.9, parameters=p)
    )


def clipped(rate=1e-3):
    clip = P.ClipGradByGlobalNorm(0.5)
    return Recipe(
        lambda p: torch.optim.Adam(p, rate),
        lambda p: paddle.optimizer.Adam(rate, parameters=p, grad_clip=clip),
        {"gradient_clip_val": 0.5},
    )


PAIRS = {
    "mixer with AdamW": (mixer, adamw),
    "convolution bias before BatchNorm with Adam": (cnn_with_bias, adam),
    "convolution bias before BatchNorm with momentum": (cnn_with_bias, momentum),
    "attention with a key bias and AdamW": (attention, adamw),
    "MLP with SGD and momentum": (mlp, momentum),
    "BatchNorm1d on batches of 16 with Adam": (batch_norm_1d, adam),
    "clipping by norm on both sides": (mixer, clipped),
}


@pytest.mark.parametrize(("name", "seed"), [(name, number % 2) for number, name in enumerate(PAIRS)])
def test_a_right_pair_matches_and_all_of_its_parameters_are_compared(tmp_path, name, seed):
    make, recipe = PAIRS[name][0], PAIRS[name][1]()
    torch.manual_seed(seed)
    reference, candidate, shape = make()
    carry_over(reference, candidate)
    data = batches(shape, seed=seed)
    train_torch(tmp_path / "torch", reference, recipe, data)
    optimizer = recipe.paddle(candidate.parameters())
    with warnings.catch_warnings():
        # Live, too: a false alarm would be a warning, and here an error.
        warnings.filterwarnings("error", message="padiff")
        train_paddle(tmp_path / "paddle", candidate, optimizer, data, reference=tmp_path / "torch", on_diff="raise")
    report = padiff.compare_runs(tmp_path / "torch", tmp_path / "paddle")
    assert report.passed, report.first_diff.message
    assert report.coverage.steps == tuple(range(0, 40, 4))
    assert report.coverage.reference_parameters == report.coverage.candidate_parameters == ()
    compared = {d.pair.reference.site for d in report.diffs if d.compared and d.pair.stage == "update"}
    assert len(compared) == len(list(reference.parameters())) + 1  # and the learning rate


def test_the_pairs_learn(tmp_path):
    # A pair whose losses stand still would pass for the wrong reason.
    torch.manual_seed(0)
    reference, _, shape = mixer()
    train_torch(tmp_path / "torch", reference, adamw(1e-2), batches(shape))
    run = padiff.open_run(tmp_path / "torch")
    losses = [float(r.value) for n in run.numbers() for r in run.steps(n)[0].records if r.slot == "loss"]
    assert losses[-1] < 0.5 * losses[0]
