"""A fault that begins late in a training that amplifies rounding."""

from __future__ import annotations

import pytest

import padiff
from replay.resnets import PaddleResNet, TorchResNet, batch
from replay.trainings import Paddle, Torch

STEPS, BEGINS, RATE = 41, 25, 0.2


def trained(side, net, folder, begins=None, **options):
    optimizer = side.momentum(net, RATE)
    with padiff.record(net, folder, optimizer=optimizer, **options) as rec:
        for step in range(STEPS):
            faulty(net, begins is not None and step >= begins)
            x, y = batch(step)
            side.cross_entropy(net(side.tensor(x)), side.tensor(y)).backward()
            side.update(net, optimizer, clip=0)
            rec.try_dump()


def faulty(net, on):
    """An activation that lets a little through where it should not."""
    if isinstance(net, PaddleResNet):
        net.stages[1].slope = 0.003 if on else 0.0


def replayed(net, reference, folder, begins=None):
    optimizer = Paddle.momentum(net, 1.0)
    with padiff.replay(reference, net, folder, optimizer=optimizer) as replay:
        for step in replay:
            faulty(net, begins is not None and step.number >= begins)
            Paddle.cross_entropy(net(*step.inputs), *step.labels).backward()
            Paddle.update(net, optimizer)
    return replay.report


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resnet") / "torch"
    Torch.seed(1)
    trained(Torch, TorchResNet(), folder, every_n_steps=10, replay_every_n_steps=10)
    return folder


def test_a_clean_pair_matches(reference, tmp_path):
    report = replayed(PaddleResNet(), reference, tmp_path / "replayed")
    assert report.passed, str(report)
    assert report.coverage.steps == (0, 10, 20, 30, 40)
    # Momentum, and the statistics of the normalisations, are the reference's.
    updates = [diff for diff in report.diffs if diff.pair.stage == "update" and diff.pair.step == 40 and diff.figures]
    assert len(updates) > 20 and max(diff.figures.rel_l2 for diff in updates) < 1e-3


def test_it_is_found_at_the_next_packed_step_where_it_is(reference, tmp_path):
    Paddle.seed(1)
    net = PaddleResNet()
    padiff.start_from(reference, net)
    trained(Paddle, net, tmp_path / "plain", BEGINS, every_n_steps=10)
    plain = padiff.compare_runs(reference, tmp_path / "plain")
    # Compared from step to step, what the steps before left hides it.
    forward = [d for d in plain.diffs if d.pair.stage == "forward" and d.pair.step == 30 and d.figures]
    assert max(diff.figures.rel_l2 for diff in forward) > 0.05
    assert plain.passed or plain.first_diff.candidate != "stages.1.bn_a"
    report = replayed(PaddleResNet(), reference, tmp_path / "replayed", BEGINS)
    first = report.first_diff
    assert first.step == 30 and first.stage == "forward", str(first)
    assert first.candidate == "stages.1.conv_b" and "leaky ReLU of slope 0.003" in str(first.cause), str(first)
