"""Layers as language models write them: a norm with an epsilon of its own name, a table of rotary frequencies."""

from __future__ import annotations

import numpy as np
import pytest
from kit.frameworks import KITS

import padiff

WIDTH, WORDS = 16, 20


def model(kit, eps=1e-6, theta=10000.0):
    class RMSNorm(kit.Layer):
        def __init__(self):
            super().__init__()
            ones = np.ones(WIDTH, np.float32)
            if kit.name == "torch":
                self.weight = kit.nn.Parameter(kit.tensor(ones))
            else:
                self.weight = self.create_parameter([WIDTH], default_initializer=kit.nn.initializer.Assign(ones))
            self.variance_epsilon = eps

        def forward(self, x):
            return self.weight * x / kit.sqrt((x * x).mean(-1, keepdim=True) + self.variance_epsilon)

    class Rotary(kit.Layer):
        def __init__(self):
            super().__init__()
            self.rope_theta = theta
            table = kit.tensor(theta ** -(np.arange(0, WIDTH, 2) / WIDTH))
            if kit.name == "torch":
                self.register_buffer("inv_freq", table, persistent=False)
            else:
                self.register_buffer("inv_freq", table, persistable=False)

        def forward(self, x):
            angles = kit.tensor(np.arange(x.shape[1])[:, None]) * self.inv_freq
            return kit.cat([angles, angles], -1).cos(), kit.cat([angles, angles], -1).sin()

    class Net(kit.Layer):
        def __init__(self):
            super().__init__()
            self.embed = kit.nn.Embedding(WORDS, WIDTH)
            self.norm = RMSNorm()
            self.up = kit.linear(WIDTH, WIDTH)
            self.rotary_emb = Rotary()
            self.head = kit.linear(WIDTH, WORDS)

        def forward(self, words):
            x = self.embed(words)
            cos, sin = self.rotary_emb(x)
            y = self.up(self.norm(x))
            one, other = y[..., : WIDTH // 2], y[..., WIDTH // 2 :]
            return self.head(x + y * cos + kit.cat([-1 * other, one], -1) * sin)

    made, random = Net(), np.random.default_rng(0)
    for parameter in (made.embed.weight, made.up.bias, made.head.bias):
        kit.set(parameter, random.normal(size=tuple(parameter.shape)).astype(np.float32))
    for linear in (made.up, made.head):
        matrix = random.normal(size=(linear.bias.shape[0], WIDTH)).astype(np.float32) / 4
        kit.set_weight(linear, matrix)
    return made


def recorded(kit, **options):
    net, random = model(kit, **options), np.random.default_rng(1)
    optimizer = kit.sgd(net.parameters())
    with padiff.record(net, optimizer=optimizer) as rec:
        for _ in range(2):
            words = kit.tensor(random.integers(0, WORDS, (3, 5)), "int64")
            logits = net(words)
            loss = kit.cross_entropy(logits.reshape([-1, WORDS]), words.reshape([-1]))
            loss.backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()
    return rec.run


@pytest.fixture(params=[("torch", "torch"), ("paddle", "paddle"), ("torch", "paddle")], ids="-".join)
def sides(request):
    return [KITS[name] for name in request.param]


def test_two_that_are_equal_match_and_everything_is_compared(sides):
    report = padiff.compare_runs(*map(recorded, sides))
    assert report.passed, report.first_diff.message
    assert report.coverage.share == 1.0


def test_an_epsilon_of_another_name_is_a_setting_that_differs(sides):
    reference, candidate = sides
    first = padiff.compare_runs(recorded(reference), recorded(candidate, eps=1e-5)).first_diff
    assert first.slot == "eps"
    assert "eps 1e-06 against 1e-05" in first.cause.sentence


def test_other_frequencies_are_no_other_weights(sides):
    reference, candidate = sides
    first = padiff.compare_runs(recorded(reference), recorded(candidate, theta=500000.0)).first_diff
    assert (first.stage, first.candidate) == ("weight", "rotary_emb")
    assert first.cause.kind == "layer_setting"
    assert "rope_theta 10000.0 against 500000.0" in first.cause.sentence
    assert not first.cause.fix  # a class of one's own takes what it takes


def test_a_table_that_is_made_otherwise_is_called_that(kit):
    def made(theta):
        net = kit.net(lambda self, x: self.fc(x) * self.table, fc=kit.linear(4, 4))
        kit.set_weight(net.fc, np.eye(4, dtype=np.float32))
        kit.set(net.fc.bias, np.zeros(4, np.float32))
        net.register_buffer("table", kit.tensor(theta ** -np.arange(4.0)))
        with padiff.record(net) as rec:
            net(kit.tensor(np.ones((2, 4)))).sum().backward()
            rec.try_dump()
        return rec.run

    assert padiff.compare_runs(made(2.0), made(3.0)).first_diff.cause.kind == "other_table"
