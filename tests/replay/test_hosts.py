"""Callbacks: packs are recorded in a real fit, and replayed in another host's."""

from __future__ import annotations

import lightning.pytorch as pl
import numpy as np
import paddle
import pytest
import torch

import padiff
from padiff.dump.weight_files import read_floors
from padiff_hapi import PaDiffCallback as HapiCallback
from padiff_lightning import PaDiffCallback as LightningCallback
from replay.trainings import ACCUMULATED, CLIP, Paddle, Torch, images
from replay.vits import SIZE, PaddleViT, TorchViT

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
BATCHES = 8


class Lit(pl.LightningModule):
    """Which calls a part of itself, as most do."""

    def __init__(self, rate=0.01, drop=0.1, seen=None):
        super().__init__()
        self.vit, self.rate, self.seen = TorchViT(drop), rate, seen

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.seen is not None:
            self.seen.append(x.detach().clone())
        return torch.nn.functional.cross_entropy(self.vit(x), y)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.rate, weight_decay=0.05)


class Data(torch.utils.data.Dataset):
    def __init__(self, shift=0):
        self.shift = shift

    def __getitem__(self, index):
        x, y = images(index + self.shift)
        return torch.from_numpy(x), torch.from_numpy(y)

    def __len__(self):
        return BATCHES


class Samples(paddle.io.Dataset):
    """Labels as a column, as paddle's own data have them."""

    def __init__(self, shift=0, column=True):
        parts = [images(index + shift) for index in range(BATCHES)]
        self.x, self.y = (np.concatenate(part) for part in zip(*parts))
        self.y = self.y[:, None] if column else self.y

    def __getitem__(self, index):
        return self.x[index], self.y[index]

    def __len__(self):
        return len(self.x)


def lightning_fit(callback, rate=0.01, shift=0, module=None, **more):
    torch.manual_seed(1)
    module = Lit(rate) if module is None else module
    data = torch.utils.data.DataLoader(Data(shift), batch_size=None)
    options = {"max_epochs": 1, "accumulate_grad_batches": ACCUMULATED, "gradient_clip_val": CLIP, **QUIET, **more}
    pl.Trainer(callbacks=[callback], **options).fit(module, data)
    return module


def hapi_fit(callback, rate=0.01, shift=0, net=None, column=True, **more):
    paddle.seed(1)
    net = PaddleViT() if net is None else net
    model = paddle.Model(net)
    # Lightning divides the loss by the micro-batches, hapi does not.
    model.prepare(Paddle.adamw(net, rate), lambda out, y: paddle.nn.functional.cross_entropy(out, y) / ACCUMULATED)
    options = {"epochs": 1, "batch_size": 4, "shuffle": False, "verbose": 0, "accumulate_grad_batches": ACCUMULATED}
    model.fit(Samples(shift, column), callbacks=[callback], **{**options, **more})
    return net


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    lightning_fit(LightningCallback(folder / "lightning", every_n_steps=100, replay_every_n_steps=3))
    hapi_fit(HapiCallback(folder / "hapi", every_n_steps=100, replay_every_n_steps=3))
    return folder


def test_packs_of_a_fit(references):
    for name in ("lightning", "hapi"):
        run = padiff.open_run(references / name)
        assert list(run.packs) == [0, 3] == run.numbers()
        pack = run.packs[3]
        assert len(pack.batches) == ACCUMULATED and not pack.unseen and not pack.notes, pack.notes
        for micro, batch in enumerate(pack.batches):
            x, y = images(3 * ACCUMULATED + micro)
            assert (batch.args[0].read() == x).all() and (batch.labels[0].read().ravel() == y).all()
        assert len(pack.masks) == 5 * ACCUMULATED


def test_lightning_is_replayed_in_hapi(references, tmp_path, capfd):
    net = PaddleViT()
    before = Paddle.values(net)
    callback = HapiCallback(tmp_path / "hapi", replay=references / "lightning")
    # Other data, which tick; another rate, which is not used.
    hapi_fit(callback, rate=0.5, shift=100, net=net)
    assert callback.report.passed, str(callback.report)
    assert callback.report.coverage.steps == (0, 3) and callback.first_diff is None
    assert all((one == other).all() for one, other in zip(before, Paddle.values(net)))
    assert "replay of" in capfd.readouterr().err


def test_hapi_is_replayed_in_lightning(references, tmp_path):
    seen = []
    module = Lit(0.5, seen=seen)
    before = Torch.values(module)
    callback = LightningCallback(tmp_path / "lightning", replay=references / "hapi")
    lightning_fit(callback, shift=100, module=module)
    assert callback.report.passed, str(callback.report)
    assert callback.report.coverage.steps == (0, 3)
    assert all((one == other).all() for one, other in zip(before, Torch.values(module)))
    # It stopped when all was done, and each batch was the reference's.
    assert len(seen) == 2 * ACCUMULATED
    expected = [images(number)[0] for number in (0, 1, 6, 7)]
    assert all((one.numpy() == other).all() for one, other in zip(seen, expected))
    assert "training_step" not in vars(module)


@pytest.mark.parametrize("host", ["hapi", "lightning"])
def test_a_fault_in_a_fit_is_found(references, tmp_path, host):
    if host == "hapi":
        net = PaddleViT()
        net.layers[0].ln2._epsilon = 1e-3
        callback = HapiCallback(tmp_path / "c", replay=references / "lightning", on_diff="raise")
        with pytest.raises(padiff.PadiffError) as error:
            hapi_fit(callback, net=net)
        assert "layers.0.ln2" in str(error.value)
        assert error.value.report.first_diff.step == 0
    else:
        module = Lit()
        module.vit.blocks[0].norm2.eps = 1e-2
        callback = LightningCallback(tmp_path / "c", replay=references / "hapi")
        lightning_fit(callback, module=module)
        assert callback.first_diff.candidate == "vit.blocks.0.norm2"


def test_what_a_host_can_not_do_is_refused(references, tmp_path):
    with pytest.raises(padiff.PadiffError, match="has 2 micro-batches, this training accumulates 1: let it accumul"):
        hapi_fit(HapiCallback(tmp_path / "a", replay=references / "lightning"), accumulate_grad_batches=1)
    with pytest.raises(padiff.PadiffError, match="has 2 micro-batches, this training accumulates 4"):
        lightning_fit(LightningCallback(tmp_path / "b", replay=references / "hapi"), accumulate_grad_batches=4)
    for more in ({"reference": references / "hapi"}, {"start_from": references / "hapi"}):
        with pytest.raises(padiff.PadiffError, match="leave reference and start_from away"):
            LightningCallback(tmp_path / "c", replay=references / "lightning", **more)


def test_other_batches_are_refused_and_the_model_is_given_back(references, tmp_path):
    class Three(Lit):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch[:2], batch_idx)

    class Triples(Data):
        def __getitem__(self, index):
            return (*super().__getitem__(index), torch.zeros(3))

    module = Three()
    before = Torch.values(module)
    trainer = pl.Trainer(
        callbacks=[LightningCallback(tmp_path / "a", replay=references / "hapi")],
        **{"max_epochs": 1, "accumulate_grad_batches": ACCUMULATED, **QUIET},
    )
    data = torch.utils.data.DataLoader(Triples(), batch_size=None)
    with pytest.raises(padiff.PadiffError, match="batch has 2 tensors, this training's 3"):
        trainer.fit(module, data)
    assert all((one == other).all() for one, other in zip(before, Torch.values(module)))

    class Flat(Samples):
        def __getitem__(self, index):
            return self.x[index].ravel(), self.y[index].astype("float32")

    net = PaddleViT()
    model = paddle.Model(net)
    model.prepare(Paddle.adamw(net), paddle.nn.CrossEntropyLoss())
    callback = HapiCallback(tmp_path / "b", replay=references / "lightning")
    with pytest.raises(padiff.PadiffError, match=r"int64 where this training's has \[4, 1\] float32"):
        model.fit(
            Flat(), batch_size=4, verbose=0, accumulate_grad_batches=ACCUMULATED, shuffle=False, callbacks=[callback]
        )
    assert SIZE == 8 and padiff.open_run(tmp_path / "b").numbers() == []


def test_a_fit_that_ends_early_says_so(references, tmp_path, capfd):
    callback = HapiCallback(tmp_path / "a", replay=references / "lightning")
    hapi_fit(callback, num_iters=ACCUMULATED)
    assert "the training ended after 1 of 2 packed steps" in capfd.readouterr().err
    assert callback.report.coverage.steps == (0,) and callback.report.passed


@pytest.mark.parametrize("host", ["hapi", "lightning"])
def test_floors_are_measured_in_a_fit(references, tmp_path, host, capfd):
    options = {"floors": 2, "float64": True}
    if host == "hapi":
        net = PaddleViT()
        before = Paddle.values(net)
        callback = HapiCallback(tmp_path / "c", replay=references / "lightning", **options)
        hapi_fit(callback, shift=100, net=net, epochs=3)
        after = Paddle.values(net)
    else:
        module = Lit(0.5)
        before = Torch.values(module)
        callback = LightningCallback(tmp_path / "c", replay=references / "hapi", **options)
        lightning_fit(callback, shift=100, module=module, max_epochs=3)
        after = Torch.values(module)
    report = callback.report
    assert report.passed, str(report)
    assert "ended after" not in capfd.readouterr().err
    # In both steps, each once by one unit and once by sixteen, and in float64; only the step itself was recorded.
    run = padiff.open_run(tmp_path / "c")
    assert run.numbers() == [0, 3]
    for number in (0, 3):
        floors = read_floors(tmp_path / "c", number)
        assert floors.units == (1, 16) and not floors.notes, floors.notes
        sites = {record.site for record in run.steps(number)[0].records if record.stage == "grad"}
        assert sites and sites <= set(floors.sites) and sites <= set(floors.exact)
    measured = [diff for diff in report.diffs if diff.floors is not None]
    assert len(measured) > 100
    assert all((one == other).all() and one.dtype == other.dtype for one, other in zip(before, after))


@pytest.mark.parametrize("host", ["hapi", "lightning"])
def test_the_fit_is_the_same_with_floors(references, tmp_path, host):
    for name, more in (("plain", {}), ("floors", {"floors": 1})):
        if host == "hapi":
            hapi_fit(HapiCallback(tmp_path / name, replay=references / "lightning", **more), epochs=2)
        else:
            lightning_fit(LightningCallback(tmp_path / name, replay=references / "hapi", **more), max_epochs=2)
    plain, floors = (padiff.open_run(tmp_path / name) for name in ("plain", "floors"))
    for number in (0, 3):
        values = [{r.site: r.value for r in run.steps(number)[0].records} for run in (plain, floors)]
        assert values[0].keys() == values[1].keys()
        assert all((value == values[1][site]).all() for site, value in values[0].items())


def test_a_fit_that_is_too_short_for_floors_says_how_long(references, tmp_path, capfd):
    callback = HapiCallback(tmp_path / "a", replay=references / "lightning", floors=4)
    hapi_fit(callback)
    said = capfd.readouterr().err
    assert "1 of 2 packed steps, each 5 times to measure its floors: let it run for 10 optimizer steps" in said
    assert callback.report.coverage.steps == (0,) and callback.report.passed


def test_floors_belong_to_a_replay(tmp_path):
    for options in ({"floors": True}, {"float64": True}):
        with pytest.raises(padiff.PadiffError, match="measured by doing steps again: give replay"):
            HapiCallback(tmp_path / "a", **options)
    with pytest.raises(padiff.PadiffError, match="floors is True, False or a number of runs"):
        LightningCallback(tmp_path / "a", replay=tmp_path / "b", floors=-1)


def test_what_can_not_be_done_in_float64_is_said(references, tmp_path, capfd):
    class Narrow(Lit):
        """A loss with a tensor of a dtype that it chose itself."""

        def training_step(self, batch, batch_idx):
            x, y = batch
            features = self.vit(x)
            return torch.nn.functional.cross_entropy(features @ torch.eye(3, dtype=torch.float32), y)

    module = Narrow()
    before = Torch.values(module)
    callback = LightningCallback(tmp_path / "a", replay=references / "hapi", float64=True)
    with pytest.raises(RuntimeError):
        lightning_fit(callback, module=module)
    assert "Leave float64 out" in capfd.readouterr().err
    assert all((one == other).all() for one, other in zip(before, Torch.values(module)))
