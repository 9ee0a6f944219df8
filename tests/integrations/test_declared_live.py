"""What a host is set to is recorded; what a reference is set to otherwise is said before the first step."""

from __future__ import annotations

import warnings

import lightning.pytorch as pl
import paddle
import pytest
import torch

import padiff
from padiff.errors import RunsDifferError
from padiff_cli.main import main
from padiff_lightning import PaDiffCallback

from .hapi import Net, fit
from .lit import QUIET, Lit, loader


def sgd(decay):
    return lambda parameters: paddle.optimizer.SGD(0.1, parameters=parameters, weight_decay=decay)


@pytest.fixture
def reference(tmp_path):
    fit(tmp_path / "reference", optimizer=sgd(1e-7))
    return tmp_path / "reference"


def said_by(caught):
    return [" ".join(str(w.message).split()) for w in caught if "padiff" in str(w.message)]


def test_raise_ends_the_training_before_its_first_batch(reference, tmp_path):
    network = Net()
    options = {"reference": reference, "on_diff": "raise"}
    with pytest.raises(RunsDifferError, match=r"weight decay 1e-07 +(likely\n +)?against 2e-07") as caught:
        fit(tmp_path / "run", network, sgd(2e-7), options)
    assert network.calls == 0
    assert "fix     paddle.optimizer.SGD(..., weight_decay=1e-07)" in str(caught.value)
    assert caught.value.report.settings_differ[0].name == "weight_decay"
    # Nothing is left behind: the same network trains on.
    fit(None, network, sgd(2e-7))


def test_warn_says_it_once_and_the_training_goes_on(reference, tmp_path):
    network, seen = Net(), []

    class Listen(paddle.callbacks.Callback):
        def on_train_batch_begin(self, step, logs=None):
            seen.append(len(said_by(caught)))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback, _ = fit(tmp_path / "run", network, sgd(2e-7), {"reference": reference}, callbacks=[Listen()])
    (said,) = [text for text in said_by(caught) if "set differently" in text]
    assert "no step was compared yet" in said and "SGD: weight decay 1e-07 likely against 2e-07" in said
    assert seen[0] == 1 and network.calls == 6
    # The first step's own report takes the place of what was said before it.
    first = callback.first_diff
    assert (first.step, first.stage, first.slot) == (0, "update", "weight_decay")
    assert callback.first_report.coverage.compared > 0


def test_stop_ends_the_training_with_its_first_step(reference, tmp_path):
    network = Net()
    with pytest.warns(RuntimeWarning, match="set differently"):
        fit(tmp_path / "run", network, sgd(2e-7), {"reference": reference, "on_diff": "stop"})
    assert network.calls == 1


def test_alike_nothing_is_said(reference, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback, _ = fit(tmp_path / "run", optimizer=sgd(1e-7), options={"reference": reference, "on_diff": "raise"})
    assert callback.first_diff is None and not any("set differently" in text for text in said_by(caught))


def test_a_tolerance_is_taken_at_its_word(reference, tmp_path):
    options = {"reference": reference, "on_diff": "raise", "policy": padiff.Tolerance(1e-2)}
    callback, _ = fit(tmp_path / "run", optimizer=sgd(2e-7), options=options)
    assert callback.first_diff is None


def test_what_is_set_otherwise_for_some_parameters_is_said_with_the_first_step(reference, tmp_path):
    network = Net()
    network.second.bias.regularizer = paddle.regularizer.L2Decay(2e-7)
    with pytest.warns(RuntimeWarning, match="set differently") as caught:
        fit(tmp_path / "run", network, sgd(1e-7), {"reference": reference})
    assert "no step was compared" not in " ".join(said_by(caught))


def test_a_resumed_training_is_held_against_the_step_that_it_goes_on_with(reference, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        callback, model = fit(tmp_path / "run", optimizer=sgd(1e-7), options={"reference": reference}, num_iters=3)
        model.prepare(sgd(2e-7)(model.network.parameters()), paddle.nn.CrossEntropyLoss())
        model.fit([], epochs=1, verbose=0, callbacks=[callback])
    (said,) = [text for text in said_by(caught) if "set differently" in text]
    assert "weight decay 1e-07 likely against 2e-07" in said


def test_watch_tells_it_with_the_first_step(reference, tmp_path, capsys):
    fit(tmp_path / "run", optimizer=sgd(2e-7))
    arguments = ["watch", str(reference), str(tmp_path / "run"), "--logdir", str(tmp_path / "log"), "--timeout", "0"]
    assert main(arguments) == 1
    assert "weight decay 1e-07 against 2e-07" in " ".join(capsys.readouterr().out.replace("likely", "").split())


def test_show_prints_it(reference, capsys):
    assert main(["show", str(reference)]) == 0
    shown = capsys.readouterr().out.replace("\n", " ")
    assert "optimizer.0: rule SGD" in shown and "decay.coupled 1e-07" in shown


def lightning(folder, clip=None, **options):
    trainer = pl.Trainer(max_epochs=1, callbacks=[PaDiffCallback(folder)], gradient_clip_val=clip, **options, **QUIET)
    trainer.fit(Lit(), loader())
    return padiff.open_run(folder)


def test_what_a_trainer_is_set_to_is_recorded_and_compared(tmp_path):
    runs = [lightning(tmp_path / str(limit), limit, accumulate_grad_batches=2) for limit in (1000.0, 2000.0)]
    settings = runs[0].info.settings
    assert (settings["clip.kind"], settings["clip.limit"], settings["accumulation"]) == ("global_norm", 1000.0, 2)
    assert settings["precision"] == "32-true"
    first = padiff.compare_runs(*runs).first_diff
    assert (first.stage, first.slot) == ("grad", "clip limit")
    assert first.cause.fix == "torch.nn.utils.clip_grad_norm_(model.parameters(), 1000.0)"
    by_value = lightning(tmp_path / "value", 1000.0, gradient_clip_algorithm="value").info.settings
    assert by_value["clip.kind"] == "value" and "clip.norm_type" not in by_value


def test_how_many_batches_make_a_step_is_compared(tmp_path):
    runs = [lightning(tmp_path / str(batches), accumulate_grad_batches=batches) for batches in (1, 2)]
    said = [one for one in padiff.compare_runs(*runs).settings_differ if one.name == "accumulation"]
    assert [(tuple(one.values), one.changes) for one in said] == [((1, 2), False)]


def test_the_class_of_a_trainers_schedule_is_recorded(tmp_path):
    class Scheduled(Lit):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    trainer = pl.Trainer(max_epochs=1, callbacks=[PaDiffCallback(tmp_path / "run")], **QUIET)
    trainer.fit(Scheduled(), loader())
    assert padiff.open_run(tmp_path / "run").info.settings["optimizer.0.schedule"] == "StepLR"


def test_what_a_paddle_model_is_fitted_with_is_recorded(tmp_path):
    fit(tmp_path / "run", accumulate_grad_batches=2)
    assert padiff.open_run(tmp_path / "run").info.settings["accumulation"] == 2
