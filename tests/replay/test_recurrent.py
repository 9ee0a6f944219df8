"""Recurrent networks that drop between their layers: what they drop is fed, from one framework to the other."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch

import padiff
from replay.trainings import Paddle, Torch

WORDS, WIDTH, HIDDEN, TIME, BATCH = 11, 6, 5, 4, 3


class TorchNet(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding = torch.nn.Embedding(WORDS, WIDTH)
        self.recurrent = getattr(torch.nn, kind)(WIDTH, HIDDEN, 3, dropout=0.4, bidirectional=True, batch_first=True)
        self.head = torch.nn.Linear(2 * HIDDEN, WORDS)

    def forward(self, words):
        return self.head(self.recurrent(self.embedding(words))[0])


class PaddleNet(paddle.nn.Layer):
    def __init__(self, kind):
        super().__init__()
        self.words = paddle.nn.Embedding(WORDS, WIDTH)
        kind = {"RNN": "SimpleRNN"}.get(kind, kind)
        self.rnn = getattr(paddle.nn, kind)(WIDTH, HIDDEN, 3, "bidirect", dropout=0.4)
        self.out = paddle.nn.Linear(2 * HIDDEN, WORDS)

    def forward(self, words):
        return self.out(self.rnn(self.words(words))[0])


NETS = {Torch: TorchNet, Paddle: PaddleNet}


def loss(side, net, words, labels):
    return side.cross_entropy(net(words).reshape((-1, WORDS)), labels.reshape((-1,)))


def recorded(side, kind, folder, **options):
    side.seed(3)
    net = NETS[side](kind)
    optimizer = side.momentum(net)
    losses = []
    with padiff.record(net, folder, optimizer=optimizer, **options) as rec:
        for step in range(3):
            random = np.random.RandomState(step)
            words, labels = (side.tensor(random.randint(0, WORDS, (BATCH, TIME))) for _ in range(2))
            losses.append(loss(side, net, words, labels))
            losses[-1].backward()
            side.update(net, optimizer, clip=0)
            rec.try_dump()
    return [each.item() for each in losses], side.values(net), side.drawn()


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize(("there", "here"), [(Torch, Paddle), (Paddle, Torch)], ids=["there", "back"])
def test_masks_between_layers_are_fed(kind, there, here, tmp_path, capfd):
    recorded(there, kind, tmp_path / "there", replay_every_n_steps=2)
    pack = padiff.open_run(tmp_path / "there").packs[2]
    assert len(pack.masks) == 2 and not pack.unseen and not pack.notes
    assert {mask.shape for mask in pack.masks} == {(TIME, BATCH, 2 * HIDDEN)}
    here.seed(8)
    net = NETS[here](kind)
    optimizer = here.momentum(net, 0.5)
    with padiff.replay(tmp_path / "there", net, tmp_path / "here", optimizer=optimizer) as replay:
        for step in replay:
            loss(here, net, *step.inputs, *step.labels).backward()
            here.update(net, optimizer, clip=0)
    assert replay.report.passed, str(replay.report)
    assert not replay.notes and "can't be fed" not in capfd.readouterr().err


@pytest.mark.parametrize("side", [Torch, Paddle], ids=lambda side: side.name)
def test_the_training_is_the_same_to_the_bit(side, tmp_path):
    plain, packed = (
        recorded(side, "LSTM", tmp_path / name, **more)
        for name, more in (("a", {}), ("b", {"replay_every_n_steps": 1}))
    )
    assert plain[0] == packed[0] and (plain[2] == packed[2]).all()
    assert all((one == other).all() for one, other in zip(plain[1], packed[1]))


def test_another_mask_goes_red(tmp_path, monkeypatch):
    """What is fed is what makes them agree."""
    recorded(Torch, "LSTM", tmp_path / "there", replay_every_n_steps=2)
    from padiff.frameworks.feeding import MasksFed

    monkeypatch.setattr(MasksFed, "_kept", lambda self, call: None)
    net = PaddleNet("LSTM")
    with padiff.replay(tmp_path / "there", net, tmp_path / "here") as replay:
        for step in replay:
            loss(Paddle, net, *step.inputs, *step.labels).backward()
    assert replay.report.first_diff.candidate == "rnn"
