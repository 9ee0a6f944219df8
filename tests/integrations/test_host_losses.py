"""What hosts compute losses of, in Lightning's Trainer and in paddle.Model.fit, and of one host against the other."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch
from torch import nn

import padiff

from . import hapi, lit

SLOTS = {f"(loop)/loss/cross_entropy().{slot}" for slot in ("input.logits", "input.labels", "0")} | {"(loop)/loss/loss"}


class Layered(lit.Lit):
    """The loss is a layer of the module."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.125)

    def training_step(self, batch, batch_idx):
        return self.criterion(self.net(batch[0]), batch[1])


def of_losses(values):
    return {site: value for site, value in values.items() if site.startswith("(loop)/loss/")}


@pytest.mark.parametrize("module", [lit.Lit, Layered])
def test_lightning(module, tmp_path):
    lit.fit(tmp_path / "run", module(), options={"every_n_steps": 2})
    batches = list(lit.loader())
    for number in (0, 2, 4):
        found = of_losses(lit.values(tmp_path / "run", number))
        assert set(found) == SLOTS
        np.testing.assert_array_equal(found["(loop)/loss/cross_entropy().input.labels"], batches[number][1].numpy())
        np.testing.assert_array_equal(found["(loop)/loss/cross_entropy().0"], found["(loop)/loss/loss"])
    settings = padiff.open_run(tmp_path / "run").info.settings
    assert settings["loss.function"] == "cross_entropy"
    assert settings["loss.label_smoothing"] == (0.125 if module is Layered else 0.0)
    assert settings["clip.kind"] == "none"


def test_lightning_clips_and_accumulates(tmp_path):
    options = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2}
    lit.fit(tmp_path / "run", **options)
    found = lit.values(tmp_path / "run")
    assert {"(loop)/loss/cross_entropy().0", "(loop)/loss/cross_entropy().0#1"} <= set(found)
    assert found["(loop)/grad/clip_grad_norm().0"] > 0.05
    settings = padiff.open_run(tmp_path / "run").info.settings
    assert (settings["clip.kind"], settings["clip.limit"]) == ("global_norm", 0.05)


def test_manual_optimization(tmp_path):
    """Such a training step gives no loss to the host."""

    class Manual(lit.Lit):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.losses.append(loss.detach().clone())
            self.manual_backward(loss)
            optimizer.step()

    _, _, module = lit.fit(tmp_path / "run", Manual())
    for number in range(6):
        found = of_losses(lit.values(tmp_path / "run", number))
        assert set(found) == SLOTS
        assert float(found["(loop)/loss/loss"]) == float(module.losses[number])


def test_hapi(tmp_path):
    hapi.fit(tmp_path / "run", options={"every_n_steps": 2})
    data = hapi.Batches()
    for number in (0, 2, 4):
        found = of_losses(hapi.values(tmp_path / "run", number))
        assert set(found) == SLOTS
        labels = data.y[8 * number : 8 * number + 8]
        np.testing.assert_array_equal(found["(loop)/loss/cross_entropy().input.labels"], labels)
        assert float(found["(loop)/loss/cross_entropy().0"]) == float(found["(loop)/loss/loss"])
    assert padiff.open_run(tmp_path / "run").info.settings["loss.function"] == "cross_entropy"


def test_hapi_with_accumulation_and_evaluation(tmp_path):
    hapi.fit(tmp_path / "run", accumulate_grad_batches=2, eval_data=hapi.Batches(2), eval_freq=1)
    found = of_losses(hapi.values(tmp_path / "run"))
    assert set(found) == SLOTS | {f"{site}#1" for site in SLOTS}


class Ported(hapi.Net):
    """The network of the Lightning module, with its weights."""

    def __init__(self):
        super().__init__()
        network = lit.net()
        for candidate, reference in ((self.first, network[0]), (self.second, network[2])):
            candidate.weight.set_value(reference.weight.detach().numpy().T.copy())
            candidate.bias.set_value(reference.bias.detach().numpy())


class SameBatches(paddle.io.Dataset):
    """The Lightning module's batches; the fault changes one label."""

    def __init__(self, fault=False):
        self.x, self.y = (torch.cat([batch[k] for batch in lit.loader()]).numpy().copy() for k in (0, 1))
        if fault:
            self.y[11] = (self.y[11] + 1) % 3

    def __getitem__(self, index):
        return self.x[index], self.y[index : index + 1]

    def __len__(self):
        return len(self.x)


def test_one_host_against_the_other(tmp_path):
    lit.fit(tmp_path / "torch")
    hapi.fit(tmp_path / "clean", Ported(), data=SameBatches())
    report = padiff.compare_runs(tmp_path / "torch", tmp_path / "clean")
    assert report.passed, report.first_diff
    hapi.fit(tmp_path / "fault", Ported(), data=SameBatches(fault=True))
    first = padiff.compare_runs(tmp_path / "torch", tmp_path / "fault").first_diff
    assert (first.step, first.stage, first.slot) == (1, "loss", "cross_entropy().input.labels")
    assert (first.cause.kind, first.cause.proven) == ("labels", True)
    assert "1 of 8 differ, the first at [3]" in first.cause.sentence
