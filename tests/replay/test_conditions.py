"""Replays under recomputation, autocast, shared layers, named inputs, compiled models."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
from paddle.distributed.fleet.utils import recompute
from pairs import PAIRS

import padiff
from replay.trainings import Paddle, Torch, images, replayed, train
from replay.vits import PaddleViT, TorchViT


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conditions")
    train(Torch, folder / "torch", steps=4, packs=3)
    train(Paddle, folder / "paddle", steps=4, packs=3)
    return folder


class Checkpointed(TorchViT):
    def forward(self, images):
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = self.drop(x + self.position)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x)[:, 0])


class Recomputed(PaddleViT):
    def forward(self, x):
        x = self.embed(x).flatten(2).transpose((0, 2, 1))
        x = paddle.concat([self.cls_token.expand((x.shape[0], -1, -1)), x], 1)
        x = self.pos_drop(x + self.pos)
        for layer in self.layers:
            x = recompute(layer, x)
        return self.classifier(self.ln(x)[:, 0])


@pytest.mark.parametrize("side", [Torch, Paddle], ids=lambda side: side.name)
def test_recomputation_gets_the_same_masks(run, tmp_path, side):
    source = run / ("paddle" if side is Torch else "torch")
    report = replayed(side, source, tmp_path / "c", net=Checkpointed() if side is Torch else Recomputed())
    assert report.passed, str(report)


@pytest.mark.parametrize("side", [Torch, Paddle], ids=lambda side: side.name)
def test_a_recomputed_reference(tmp_path, side):
    def made():
        side.seed(5)
        return Checkpointed() if side is Torch else Recomputed()

    plain = train(side, tmp_path / "plain", steps=2, net=made())
    packed = train(side, tmp_path / "run", steps=2, packs=1, net=made())
    assert plain[0] == packed[0] and all((a == b).all() for a, b in zip(plain[1], packed[1]))
    masks = padiff.open_run(tmp_path / "run").packs[1].masks
    assert len(masks) == 2 * (1 + 4)  # those of the first time alone
    other = Paddle if side is Torch else Torch
    assert replayed(other, tmp_path / "run", tmp_path / "c").passed


def test_half_precision(tmp_path):
    def step(net, optimizer, batches):
        for x, y in batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(net(x), y)
            loss.backward()
        Torch.update(net, optimizer)

    torch.manual_seed(1)
    net = TorchViT().train()
    optimizer = Torch.adamw(net)
    with padiff.record(net, tmp_path / "run", optimizer=optimizer, replay_every_n_steps=2) as rec:
        for number in range(3):
            step(net, optimizer, [tuple(map(torch.from_numpy, images(number)))])
            rec.try_dump()
    other = TorchViT().train()
    own = Torch.adamw(other)
    with padiff.replay(tmp_path / "run", other, tmp_path / "c", optimizer=own) as replay:
        for packed in replay:
            step(other, own, [(*packed.inputs, *packed.labels)])
    assert replay.report.passed, str(replay.report)
    # Of bfloat16, a mask that is fed gives the very same; but for attention.
    dropped = [d for d in replay.report.diffs if d.pair.stage == "forward" and d.pair.anchor.layer == "drop"]
    assert dropped and all(diff.figures.max_abs == 0 for diff in dropped)


class Texts(torch.nn.Module):
    """Named inputs, and a loss of its own inside, as Hugging Face's models have it."""

    def __init__(self):
        super().__init__()
        self.embed, self.drop = torch.nn.Embedding(11, 8), torch.nn.Dropout(0.2)
        self.head = torch.nn.Linear(8, 11)

    def forward(self, input_ids=None, attention_mask=None, labels=None, use_cache=False):
        logits = self.head(self.drop(self.embed(input_ids) * attention_mask.unsqueeze(-1)))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class PaddleTexts(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.tokens, self.dropout = paddle.nn.Embedding(11, 8), paddle.nn.Dropout(0.2)
        self.output = paddle.nn.Linear(8, 11)

    def forward(self, input_ids=None, attention_mask=None, labels=None, use_cache=False):
        assert use_cache is False
        logits = self.output(self.dropout(self.tokens(input_ids) * attention_mask.unsqueeze(-1)))
        loss = paddle.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def test_inputs_by_name(tmp_path):
    net = Texts()
    optimizer = Torch.adamw(net)
    ids = torch.from_numpy(np.random.RandomState(0).randint(0, 11, (4, 6)))
    with padiff.record(net, tmp_path / "run", optimizer=optimizer, replay_every_n_steps=1) as rec:
        for _ in range(2):
            batch = {"input_ids": ids, "attention_mask": torch.ones(4, 6), "labels": ids, "use_cache": False}
            net(**batch)["loss"].backward()
            Torch.update(net, optimizer)
            rec.try_dump()
    other = PaddleTexts()
    own = Paddle.adamw(other)
    with padiff.replay(tmp_path / "run", other, tmp_path / "c", optimizer=own) as replay:
        for step in replay:
            assert step.labels == () and step.kwargs["use_cache"] is False
            other(*step.inputs, **step.kwargs)["loss"].backward()
            Paddle.update(other, own)
    assert replay.report.passed, str(replay.report)


@pytest.fixture
def compiling():
    """Nothing that was compiled is left: where something is, no functions are heard."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("compiling")
def test_a_golden_run_of_what_is_compiled_now(tmp_path, capfd):
    def net():
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

    plain = net()
    optimizer = Torch.momentum(plain)
    x = torch.from_numpy(np.random.RandomState(0).randn(6, 4).astype("float32"))
    with padiff.record(plain, tmp_path / "run", optimizer=optimizer, replay_every_n_steps=1) as rec:
        for _ in range(3):
            torch.nn.functional.mse_loss(plain(x), torch.ones(6, 2)).backward()
            Torch.update(plain, optimizer, clip=0)
            rec.try_dump()
    fast = net()
    fast[0].compile(backend="eager")
    own = Torch.momentum(fast, 1.0)
    with padiff.replay(tmp_path / "run", fast, tmp_path / "c", optimizer=own) as replay:
        for step in replay:
            torch.nn.functional.mse_loss(fast(*step.inputs), *step.labels).backward()
            Torch.update(fast, own, clip=0)
    assert replay.report.passed, str(replay.report)
    assert "dropout in what is compiled can't be fed" in capfd.readouterr().err


@pytest.mark.parametrize("side", [Torch, Paddle], ids=lambda side: side.name)
def test_a_schedule_of_the_candidates_own(run, tmp_path, side):
    """The rate is the reference's in each step, and the candidate's own again afterwards."""
    net = side.ViT().train() if side is Torch else side.ViT()
    if side is Torch:
        optimizer = Torch.adamw(net, 0.3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    else:
        schedule = paddle.optimizer.lr.StepDecay(0.3, 1, 0.5)
        optimizer = Paddle.adamw(net, schedule)
    source = run / ("paddle" if side is Torch else "torch")
    with padiff.replay(source, net, tmp_path / "c", optimizer=optimizer) as replay:
        for step in replay:
            for batch in step.batches:
                (side.cross_entropy(net(*batch.inputs), *batch.labels) / 2).backward()
            side.update(net, optimizer)
    assert replay.report.passed, str(replay.report)
    rate = optimizer.param_groups[0]["lr"] if side is Torch else optimizer.get_lr()
    assert rate == 0.3 and schedule is not None


def test_groups_with_rates_of_their_own(tmp_path):
    def groups(net, first, second):
        names = dict(net.named_parameters())
        chosen = [p for name, p in names.items() if name.startswith(("head", "classifier"))]
        others = [p for name, p in names.items() if not name.startswith(("head", "classifier"))]
        if isinstance(net, TorchViT):
            return torch.optim.AdamW([{"params": others, "lr": first}, {"params": chosen, "lr": second}])
        rates = [{"params": others, "learning_rate": first}, {"params": chosen, "learning_rate": second}]
        return paddle.optimizer.AdamW(1.0, parameters=rates)

    torch.manual_seed(1)
    net = TorchViT().train()
    optimizer = groups(net, 0.01, 0.001)
    with padiff.record(net, tmp_path / "run", optimizer=optimizer, replay_every_n_steps=2) as rec:
        for number in range(3):
            x, y = map(torch.from_numpy, images(number))
            torch.nn.functional.cross_entropy(net(x), y).backward()
            Torch.update(net, optimizer, clip=0)
            rec.try_dump()
    assert sorted(rate for (rate,) in [padiff.open_run(tmp_path / "run").packs[2].learning_rates[0][:1]]) == [0.01]
    other = PaddleViT()
    own = groups(other, 0.5, 0.5)
    with padiff.replay(tmp_path / "run", other, tmp_path / "c", optimizer=own) as replay:
        for step in replay:
            Paddle.cross_entropy(other(*step.inputs), *step.labels).backward()
            Paddle.update(other, own)
    worst = [
        d
        for d in replay.report.diffs
        if d.pair.stage == "update" and not d.passed and d.pair.anchor.slot != "learning_rate"
    ]
    assert not worst, str(replay.report)


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("name", ["letters_mislead", "attention_scrambled"])
def test_what_runs_when_is_trusted_more_than_names(tmp_path, name, back):
    pair = next(pair for pair in PAIRS if pair.name == name)
    models, inputs = list(pair.build()), list(pair.inputs())
    if back:
        models.reverse(), inputs.reverse()
    sides = [Torch if isinstance(model, torch.nn.Module) else Paddle for model in models]
    optimizers = [side.momentum(model, 1e-3) for side, model in zip(sides, models)]
    with padiff.record(models[0], tmp_path / "r", optimizer=optimizers[0], replay_every_n_steps=1) as rec:
        (models[0](*inputs[0]) ** 2).mean().backward()
        sides[0].update(models[0], optimizers[0], clip=0)
        rec.try_dump()
    with padiff.replay(tmp_path / "r", models[1], tmp_path / "c", optimizer=optimizers[1]) as replay:
        for _ in replay:
            (models[1](*inputs[1]) ** 2).mean().backward()
            sides[1].update(models[1], optimizers[1], clip=0)
    assert replay.report.passed, str(replay.report)
