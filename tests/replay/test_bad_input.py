"""What can't be replayed is refused before anything is changed, with what was expected and what to do."""

from __future__ import annotations

import shutil

import numpy as np
import paddle
import pytest
import torch

import padiff
from padiff.errors import RunFolderError, UsageError
from replay.trainings import Paddle, Torch, images, replayed, train
from replay.vits import PaddleViT, TorchViT


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    train(Torch, folder / "torch", steps=3, packs=2)
    return folder / "torch"


def refused(side, match, reference, folder, net=None, optimizer=None, error=UsageError, **options):
    """Refused, and the model and its optimizer are as they were."""
    net = side.ViT() if net is None else net
    optimizer = side.adamw(net, 0.5) if optimizer is None else optimizer
    before = side.values(net)
    with pytest.raises(error, match=match), padiff.replay(reference, net, folder, optimizer=optimizer, **options):
        pass
    assert all((one == other).all() for one, other in zip(before, side.values(net)))
    rates = [group["lr"] for group in optimizer.param_groups] if side is Torch else [optimizer.get_lr()]
    assert rates == [0.5]
    return net, optimizer


def test_a_run_without_packs(tmp_path):
    train(Torch, tmp_path / "run", steps=1)
    refused(Paddle, "it has no replay packs. Record it with", tmp_path / "run", tmp_path / "c")
    with pytest.raises(RunFolderError, match="there is no run folder"):
        padiff.replay(tmp_path / "none", PaddleViT(), tmp_path / "c")


def test_a_packed_step_that_was_not_recorded_whole(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "steps" / "00000002")
    report = replayed(Paddle, tmp_path / "run", tmp_path / "c")
    assert report.passed and report.coverage.steps == (0,)
    shutil.rmtree(tmp_path / "run" / "steps" / "00000000")
    refused(Paddle, "its packed steps were not recorded whole", tmp_path / "run", tmp_path / "d")


def test_steps_that_are_not_packed(run, tmp_path):
    refused(Paddle, r"has no pack of step 1: packed are 0, 2", run, tmp_path / "c", steps=[0, 1])


def test_the_reference_is_never_written_to(run, tmp_path):
    for place in (run, run / "again", run / "steps"):
        refused(Paddle, "reference's folder: that is never written to", run, place)
    link = tmp_path / "link"
    link.symlink_to(run)
    refused(Paddle, "that is never written to", run, link)
    assert "packs" in {entry.name for entry in run.iterdir()} and len(list(run.iterdir())) == 4


def test_a_folder_that_holds_a_run(run, tmp_path):
    train(Torch, tmp_path / "own", steps=1)
    refused(Paddle, "holds a run already", run, tmp_path / "own", error=RunFolderError)
    refused(Paddle, "'error' or 'overwrite', got 'resume'", run, tmp_path / "own", existing="resume")


def test_a_pack_of_another_model(run, tmp_path):
    class Other(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.a, self.b = paddle.nn.Linear(5, 7), paddle.nn.Linear(7, 3)

        def forward(self, x):
            return self.b(self.a(x))

    net = Other()
    refused(Paddle, "(?s)Error occurred between|no partner", run, tmp_path / "c", net, Paddle.adamw(net, 0.5))
    assert not (tmp_path / "c").exists()


def test_a_layer_more_or_less(run, tmp_path):
    net = PaddleViT()
    net.extra = paddle.nn.Linear(2, 2)
    refused(Paddle, "extra", run, tmp_path / "c", net, Paddle.adamw(net, 0.5))
    net = TorchViT()
    net.norm = torch.nn.LayerNorm(16, elementwise_affine=False)
    refused(Torch, "norm", run, tmp_path / "c", net, Torch.adamw(net, 0.5))


def test_what_only_one_side_has_is_left_where_that_is_asked_for(run, tmp_path, capfd):
    net = PaddleViT()
    net.extra = paddle.nn.Linear(2, 2)
    before = net.extra.weight.numpy()
    report = replayed(Paddle, run, tmp_path / "c", net=net, partial=True)
    assert "left as it is, having no partner: extra/weight [2, 2], extra/bias [2]" in capfd.readouterr().err
    assert report.first_diff is None and (net.extra.weight.numpy() == before).all()


@pytest.mark.filterwarnings("ignore:padiff:RuntimeWarning")
def test_a_model_that_is_changed_between_two_steps(run, tmp_path):
    net = TorchViT()
    optimizer = Torch.adamw(net)
    with (
        pytest.raises(UsageError, match=r"other layers than when the replay began \(head\)"),
        padiff.replay(run, net, tmp_path / "c", optimizer=optimizer) as replay,
    ):
        for step in replay:
            for batch in step.batches:
                Torch.cross_entropy(net(*batch.inputs), *batch.labels).backward()
            optimizer.step()
            net.head = torch.nn.Linear(16, 5)


def test_a_state_that_is_missing(tmp_path):
    net, (x, y) = TorchViT(), images(0)
    optimizer = Torch.adamw(net)
    with padiff.record(net, tmp_path / "run", replay_every_n_steps=1) as rec:  # without the optimizer
        Torch.cross_entropy(net(Torch.tensor(x)), Torch.tensor(y)).backward()
        optimizer.step()
        rec.try_dump()
    refused(Paddle, "optimizer", tmp_path / "run", tmp_path / "c")


def test_an_optimizer_of_another_rule(run, tmp_path):
    net = PaddleViT()
    refused(Paddle, "AdamW.*Momentum|Momentum.*AdamW|SGD", run, tmp_path / "c", net, Paddle.momentum(net, 0.5))


def test_an_optimizer_of_another_model(run, tmp_path):
    refused(Torch, "steps no parameter of this model", run, tmp_path / "c", None, Torch.adamw(TorchViT(), 0.5))
    net = TorchViT()
    with pytest.raises(UsageError, match="expected an optimizer of torch"):
        padiff.replay(run, net, tmp_path / "c", optimizer=Paddle.adamw(PaddleViT()))


def test_a_batch_of_another_shape_is_the_models_own_error_and_the_model_is_given_back(run, tmp_path):
    class Narrow(TorchViT):
        def forward(self, images):
            return super().forward(images[:, :2])

    net = Narrow()
    optimizer = Torch.adamw(net, 0.5)
    before = Torch.values(net)
    with pytest.raises(RuntimeError, match="channels"), padiff.replay(run, net, tmp_path / "c") as replay:
        for step in replay:
            net(*step.batches[0].inputs)
    assert all((one == other).all() for one, other in zip(before, Torch.values(net)))
    assert not any(layer._forward_hooks for layer in net.modules()) and optimizer is not None


def test_what_is_not_known_of_a_batch_is_said_when_it_is_asked_for(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    with padiff.record(net, tmp_path / "run", replay_every_n_steps=1) as rec:
        rec.log_batch((torch.ones(2, 4), np.float32, {"deep": object()}))
        (net(torch.ones(2, 4)) ** 2).sum().backward()
        rec.try_dump()
    with padiff.replay(tmp_path / "run", torch.nn.Sequential(*net), tmp_path / "c") as replay:
        for step in replay:
            with pytest.raises(UsageError, match=r"step 0 holds a builtins\.type, which a pack can't hold"):
                _ = step.inputs
            with pytest.raises(UsageError, match="no loss function of the framework was called"):
                _ = step.labels
            net(torch.ones(2, 4))


def test_one_batch_is_asked_for_where_there_are_two(run, tmp_path):
    with padiff.replay(run, PaddleViT(), tmp_path / "c") as replay:
        for step in replay:
            with pytest.raises(UsageError, match=r"2 micro-batches: go through step\.batches"):
                _ = step.inputs
            break


def test_it_is_used_in_a_with(run, tmp_path):
    replay = padiff.replay(run, PaddleViT(), tmp_path / "c")
    with pytest.raises(UsageError, match=r"inside of `with padiff\.replay"):
        next(iter(replay))
    with replay, pytest.raises(UsageError, match="open already"):
        replay.open()


def test_no_model(run, tmp_path):
    for wrong in (3, PaddleViT):
        with pytest.raises(UsageError):
            padiff.replay(run, wrong, tmp_path / "c")


def test_random_numbers_that_can_not_be_fed_are_named_before_anything_runs(tmp_path, capfd):
    class Path(torch.nn.Module):
        def forward(self, x):
            return x * torch.rand(len(x), 1).round()

    def net():
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), Path(), torch.nn.Linear(4, 2))

    model = net()
    optimizer = Torch.momentum(model)
    with padiff.record(model, tmp_path / "run", optimizer=optimizer, replay_every_n_steps=1) as rec:
        for _ in range(2):
            torch.nn.functional.mse_loss(model(torch.ones(3, 4)), torch.ones(3, 2)).backward()
            Torch.update(model, optimizer, clip=0)
            rec.try_dump()
    capfd.readouterr()
    other = net()
    optimizer = Torch.momentum(other)
    with padiff.replay(tmp_path / "run", other, tmp_path / "c", optimizer=optimizer) as replay:
        said = capfd.readouterr().err
        assert "random numbers that the reference drew in 2 (Path) can't be fed" in said
        assert "from the same state of the generators" in said
        for step in replay:
            torch.nn.functional.mse_loss(other(*step.inputs), *step.labels).backward()
            Torch.update(other, optimizer, clip=0)
    # Drawn once more, after the mask that was fed: the same.
    assert replay.report.passed, str(replay.report)

    class Same(paddle.nn.Layer):
        def forward(self, x):
            return x * paddle.rand([x.shape[0], 1]).round()

    ported = paddle.nn.Sequential(paddle.nn.Linear(4, 4), paddle.nn.Dropout(0.5), Same(), paddle.nn.Linear(4, 2))
    with padiff.replay(tmp_path / "run", ported, tmp_path / "d"):
        assert "their values differ here" in capfd.readouterr().err


def test_layers_that_draw_and_can_not_be_fed_are_named(run, tmp_path, capfd):
    fused = paddle.incubate.nn.FusedDropoutAdd
    for layer, named in (
        (paddle.nn.RReLU(), True),
        (fused(0.5), True),
        (fused(0.0), False),
        (paddle.nn.Dropout(0.5), False),
        (paddle.nn.LSTM(4, 4, num_layers=2, dropout=0.5), False),
        (torch.nn.RReLU(), True),
        (torch.nn.LSTM(4, 4, 2, dropout=0.5), False),
    ):
        assert padiff.frameworks.framework_of(layer).masks.unfed(layer) == named, layer
    net = PaddleViT()
    net.layers[0].dropout = paddle.nn.RReLU()
    with padiff.replay(run, net, tmp_path / "c"):
        assert "random numbers that this model draws in layers.0.dropout can't be fed" in capfd.readouterr().err


def test_a_run_of_several_processes(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    file = tmp_path / "run" / "run.json"
    file.write_text(file.read_text().replace('"world_size": 1', '"world_size": 2'))
    refused(Paddle, "recorded by 2 processes", tmp_path / "run", tmp_path / "c")


@pytest.mark.parametrize("steps", [2, "2"])
def test_steps_are_a_list(run, tmp_path, steps):
    refused(Paddle, "steps is a list of the steps' numbers, or a range of them, got", run, tmp_path / "c", steps=steps)


def test_a_loop_that_is_left_by_an_error_says_what_it_was_given(run, tmp_path, capfd):
    class OwnError(Exception):
        pass

    net = PaddleViT()
    for exact in (False, True):
        with (
            pytest.raises(OwnError),
            padiff.replay(run, net, tmp_path / f"{exact}", float64=exact, steps=[2]) as replay,
        ):
            for step in replay:
                for batch in step.batches:
                    Paddle.cross_entropy(net(*batch.inputs), *batch.labels).backward()
                if step.exact == exact:
                    raise OwnError
        said = capfd.readouterr().err
        assert "the loop was left by OwnError at step 2" in said and "model and optimizer are as they were" in said
        # By hand: images(number) of trainings.py.
        assert ("inputs [4, 3, 8, 8] float32; labels [4] int64" in said) == (not exact)
        assert ("replay.give_up(why)" in said) == exact


def test_a_loop_that_calls_nothing_is_reported(run, tmp_path, capfd):
    with (
        pytest.warns(RuntimeWarning, match="no layer of the recorded model was called"),
        padiff.replay(run, PaddleViT(), tmp_path / "d") as replay,
    ):
        for _ in replay:
            pass
    with pytest.raises(padiff.PadiffError, match="the loop over the replay has to call the model in each step"):
        str(replay.report)
    assert "was left by" not in capfd.readouterr().err


def test_what_a_replay_says_of_its_folder_and_of_partial_is_true_of_it(run, tmp_path):
    shutil.copytree(run, tmp_path / "there")
    refused(Paddle, "existing='overwrite' to replace it$", run, tmp_path / "there", error=RunFolderError)
    other = paddle.nn.Sequential(paddle.nn.Linear(3, 4))
    refused(
        Paddle,
        "partial=True, for start_from and replay alike",
        run,
        tmp_path / "c",
        other,
        optimizer=Paddle.adamw(other, 0.5),
    )
