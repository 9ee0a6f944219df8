"""Each layer of the candidate by itself, on the reference's recorded inputs."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

import padiff
from padiff.errors import UsageError
from replay.resnets import PaddleResNet, TorchResNet, batch
from replay.trainings import SIDES, Paddle, Torch, train
from replay.vits import PaddleViT, TorchViT


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("isolated")
    for name, side in SIDES.items():
        train(side, folder / name, steps=3, packs=2)
    net = TorchResNet()
    optimizer = Torch.momentum(net)
    with padiff.record(net, folder / "resnet", optimizer=optimizer, every_n_steps=9, replay_every_n_steps=2) as rec:
        for step in range(3):
            x, y = batch(step)
            Torch.cross_entropy(net(Torch.tensor(x)), Torch.tensor(y)).backward()
            Torch.update(net, optimizer, clip=0)
            rec.try_dump()
    return folder


def isolated(side, reference, folder, net, optimizer=None, isolate=True):
    found = []
    optimizer = side.adamw(net) if optimizer is None else optimizer
    with padiff.replay(reference, net, folder, optimizer=optimizer) as replay:
        for step in replay:
            if isolate:
                found.append(replay.isolate(step))
            for one in step.batches:
                (side.cross_entropy(net(*one.inputs), *one.labels) / len(step.batches)).backward()
            side.update(net, optimizer)
    return found, replay.report


@pytest.mark.parametrize(("source", "target"), [("torch", "paddle"), ("paddle", "torch")])
def test_a_clean_layer_has_no_error_of_its_own(runs, tmp_path, source, target):
    side = SIDES[target]
    found, report = isolated(side, runs / source, tmp_path / "c", side.ViT())
    assert report.passed and [one.step for one in found] == [0, 2]
    for one in found:
        assert not one.failed and "no layer has an error of its own beyond rounding" in str(one), str(one)
        measured = [layer for layer in one.layers.values() if layer.forward is not None]
        assert len(measured) > 11 and max(layer.forward for layer in measured) < 2e-6
        backward = [layer.backward for layer in one.layers.values() if layer.backward is not None]
        assert len(backward) >= 4 and max(backward) < 2e-6


def test_a_fault_is_in_its_layer_and_inherited_nowhere(runs, tmp_path):
    net = PaddleViT()
    net.layers[0].ln1._epsilon = 1e-3
    (first, _), report = isolated(Paddle, runs / "torch", tmp_path / "c", net)
    assert report.first_diff.candidate == "layers.0.ln1"
    # In the step as a whole all outputs after it differ.
    whole = [d for d in report.diffs if d.pair.stage == "forward" and d.pair.step == 0 and d.pair.candidate]
    assert not any(diff.passed for diff in whole if diff.pair.candidate.layer == "classifier")
    own = first.layers
    assert first.failed[0].candidate == "layers.0.ln1" and own["layers.0.ln1"].forward > 1e-4
    assert all(own[path].passed for path in ("layers.0.attention.qkv", "layers.0.ln2", "ln", "classifier"))
    assert not own["layers.0"].passed and not own["(root)"].passed  # around it
    assert "layers.0.ln1 (LayerNorm): own error" in str(first)


def test_a_fault_in_backward_alone_is_found(runs, tmp_path):
    class Scaled(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 1.5

    class Broken(paddle.nn.Linear):
        def forward(self, x):
            return super().forward(Scaled.apply(x))

    net = PaddleViT()
    net.layers[0].mlp.fc2 = Broken(32, 16)
    (first, _), _ = isolated(Paddle, runs / "torch", tmp_path / "c", net)
    assert first.layers["layers.0.mlp.fc2"].forward < 1e-6
    assert first.layers["layers.0.mlp.fc2"].backward == pytest.approx(0.5, rel=1e-3)
    backward = {path: layer.backward for path, layer in first.layers.items() if layer.backward is not None}
    # It, and what is around it.
    assert [path for path, error in backward.items() if error > 1e-6] == ["layers.0.mlp.fc2", "layers.0"]
    assert len(backward) >= 4


def test_the_step_is_the_same_with_it(runs, tmp_path):
    """Masks, statistics of normalisations and random numbers: the second runs leave no trace."""
    for reference, side, make in (("torch", Paddle, PaddleViT), ("paddle", Torch, TorchViT), ("resnet", Paddle, None)):
        values = []
        for isolate in (False, True):
            side.seed(1)
            net = PaddleResNet() if make is None else make()
            optimizer = Paddle.momentum(net) if make is None else None
            folder = tmp_path / f"{reference}{isolate}"
            found, report = isolated(side, runs / reference, folder, net, optimizer, isolate)
            assert report.passed and all(not one.failed for one in found)
            steps = [padiff.open_run(folder).steps(number)[0] for number in (0, 2)]
            values.append([(record.site, record.value) for step in steps for record in step.records])
        assert [site for site, _ in values[0]] == [site for site, _ in values[1]]
        assert all(np.array_equal(one, other) for (_, one), (_, other) in zip(*values))


def test_it_is_called_in_the_loop(runs, tmp_path):
    net = PaddleViT()
    with padiff.replay(runs / "torch", net, tmp_path / "c") as replay:
        steps = iter(replay)
        step = next(steps)
        net(*step.batches[0].inputs)
        with pytest.raises(UsageError, match="before the step is done"):
            replay.isolate(step)
        other = next(steps)
        with pytest.raises(UsageError, match="before the step is done"):
            replay.isolate(step)
        replay.isolate(other)
    functional = paddle.nn.functional.dropout
    assert not any(layer._forward_pre_hooks for layer in net.sublayers()) and callable(functional)
