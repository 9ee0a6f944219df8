"""``PaDiffCallback(..., start_from=...)`` in Lightning and hapi: the other run's start, before anything is recorded."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch

import padiff
from padiff.errors import RunFolderError, UsageError

from . import hapi, lit


def momentum_lit(rate=0.1):
    class Momentum(lit.Lit):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)

    return Momentum(rate=rate)


def momentum(rate):
    return lambda parameters: paddle.optimizer.Momentum(rate, 0.9, parameters=parameters)


def test_hapi_starts_where_lightning_did(tmp_path, capsys):
    lit.fit(tmp_path / "torch")
    options = {"start_from": tmp_path / "torch", "reference": tmp_path / "torch", "on_diff": "raise"}
    callback, _ = hapi.fit(tmp_path / "paddle", network=hapi.Net(seed=5), options=options)
    assert callback.first_diff is None
    assert padiff.compare_runs(tmp_path / "torch", tmp_path / "paddle").passed
    assert "starts from step 0 of" in capsys.readouterr().err


def test_lightning_starts_where_hapi_did(tmp_path):
    hapi.fit(tmp_path / "paddle")
    options = {"start_from": tmp_path / "paddle", "reference": tmp_path / "paddle", "on_diff": "raise"}
    callback, _, _ = lit.fit(tmp_path / "torch", lit.Lit(lit.net(seed=7)), options=options)
    assert callback.first_diff is None
    assert padiff.compare_runs(tmp_path / "paddle", tmp_path / "torch").passed


def test_without_it_they_part_at_the_weights(tmp_path):
    lit.fit(tmp_path / "torch")
    hapi.fit(tmp_path / "paddle", network=hapi.Net(seed=5))
    assert padiff.compare_runs(tmp_path / "torch", tmp_path / "paddle").first_diff.stage == "weight"


def test_a_callback_carries_the_state_of_a_later_start(tmp_path, capsys):
    """The recorded training was a resumed one: before its first recorded step there are moments."""
    _, trainer, _ = lit.fit(tmp_path / "before", momentum_lit(), lit.loader(3))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    lit.fit(tmp_path / "torch", momentum_lit(), lit.loader(3), ckpt_path=tmp_path / "last.ckpt", max_epochs=2,
            options={"replay_every_n_steps": 3})  # fmt: skip
    assert padiff.open_run(tmp_path / "torch").numbers() == [3, 4, 5]
    for start, passed in ((tmp_path / "torch", True), (None, False)):
        net = hapi.Net(seed=5)
        if start is None:  # the weights alone
            padiff.start_from(tmp_path / "torch", net)
        hapi.fit(tmp_path / f"paddle {passed}", network=net, optimizer=momentum(0.1), data=hapi.Batches(3),
                 options={"start_from": start, "start_step": 3})  # fmt: skip
        report = padiff.compare_runs(tmp_path / "torch", tmp_path / f"paddle {passed}")
        assert report.passed is passed
    assert "SGD: state of 4 parameters, learning rate 0.1" in capsys.readouterr().err


def test_the_learning_rate_is_the_trainings_own(tmp_path):
    """A rate that is wrong is what the comparison is to find."""
    lit.fit(tmp_path / "torch")
    hapi.fit(tmp_path / "paddle", network=hapi.Net(seed=5), options={"start_from": tmp_path / "torch"},
             optimizer=lambda p: paddle.optimizer.SGD(0.05, parameters=p))  # fmt: skip
    report = padiff.compare_runs(tmp_path / "torch", tmp_path / "paddle")
    assert report.first_diff.step == 0
    assert report.first_diff.stage == "update"


@pytest.mark.parametrize("files", [False, True], ids=["missing", "another model"])
def test_a_start_that_fails_ends_the_fit_before_it_begins(files, tmp_path):
    if files:
        from safetensors.torch import save_file

        save_file({"layer.weight": torch.zeros(3, 3)}, tmp_path / "model.safetensors", {"format": "pt"})
    source = tmp_path if files else tmp_path / "nothing"
    net = hapi.Net(seed=5)
    before = [p.numpy() for p in net.parameters()]
    with pytest.raises(UsageError if files else RunFolderError):
        hapi.fit(tmp_path / "paddle", network=net, options={"start_from": source})
    assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, net.parameters()))
    assert not (tmp_path / "paddle").exists()
    module = lit.Lit()
    with pytest.raises(UsageError if files else RunFolderError):
        lit.fit(tmp_path / "torch", module, options={"start_from": source})
    assert not (tmp_path / "torch").exists()
    assert not any(layer._forward_hooks for layer in module.modules())


def test_a_resumed_training_goes_on_from_its_own_checkpoint(tmp_path):
    lit.fit(tmp_path / "other", lit.Lit(lit.net(seed=9)))
    _, trainer, module = lit.fit(tmp_path / "run", data=lit.loader(3))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    after = module.net[0].weight.detach().numpy().copy()
    lit.fit(tmp_path / "run", lit.Lit(lit.net(seed=2)), lit.loader(3), ckpt_path=tmp_path / "last.ckpt", max_epochs=2,
            options={"start_from": tmp_path / "other"})  # fmt: skip
    (step,) = padiff.open_run(tmp_path / "run").steps(3)
    found = next(r.value for r in step.records if r.site == "net.0/weight/weight")
    np.testing.assert_array_equal(found, after)
