"""PaDiffCallback in transformers' Trainer."""

from __future__ import annotations

import time

import numpy as np
import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'padiff-hooks[transformers]'")

import torch
from transformers import TrainerCallback

import padiff
from padiff.dump.weight_files import read_floors
from padiff.errors import RunsDifferError
from padiff_hooks.own_curves import OwnCurves
from padiff_transformers import PaDiffCallback

from .tensorboards import events
from .trainers import hf
from .trainers.table import samples

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of the Trainer's own
]


def train(folder, callbacks=(), how="means", **options):
    made = hf.trainer(folder / "out", callbacks, how=how, **options)
    made.train()
    return made


def values(folder, number=0):
    (step,) = padiff.open_run(folder).steps(number)
    return {record.site: record.value for record in step.records}


def test_losses_and_weights_are_the_same_to_the_bit_with_and_without_the_callback(tmp_path, capfd):
    plain = train(tmp_path)
    recorded = train(tmp_path, [PaDiffCallback(tmp_path / "run", every_n_steps=2)])
    assert "for all 3 recorded steps: full tensors" in capfd.readouterr().err
    assert hf.losses(plain) == hf.losses(recorded) and len(hf.losses(plain)) == 6
    for one, other in zip(hf.weights(plain), hf.weights(recorded)):
        np.testing.assert_array_equal(one, other)
    assert hf.hooks(recorded) == 0
    run = padiff.open_run(tmp_path / "run")
    assert run.numbers() == [0, 2, 4]
    assert run.finished()


def test_losses_are_those_that_the_trainer_logs_and_micro_batches_those_that_it_is_given(tmp_path):
    made = train(tmp_path, [PaDiffCallback(tmp_path / "run")])
    for number, logged in enumerate(hf.losses(made)):
        found = values(tmp_path / "run", number)
        own = [float(found["(loop)/loss/loss"]), float(found["(loop)/loss/loss#1"])]
        assert np.mean(own) == pytest.approx(logged, rel=1e-6)
    (step,) = padiff.open_run(tmp_path / "run").steps(0)
    assert step.micro_batches == 2
    np.testing.assert_array_equal(values(tmp_path / "run")["(root)/input/input.input_ids#1"], samples()[0][2:4])


def test_the_norm_before_clipping_is_the_one_that_the_trainer_logs(tmp_path):
    made = train(tmp_path, [PaDiffCallback(tmp_path / "run")])
    logged = [line["grad_norm"] for line in made.state.log_history if "grad_norm" in line]
    found = [float(values(tmp_path / "run", n)["(loop)/grad/clip_grad_norm().0"]) for n in range(6)]
    assert found == pytest.approx(logged)
    assert min(logged) > 1  # and the gradients are those that were clipped to 1
    grads = [value for site, value in values(tmp_path / "run").items() if "/grad/" in site and "(loop)" not in site]
    assert np.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads)) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize(("how", "divided"), [("means", 2), ("tokens", 2), ("as it is", 4)])
def test_what_the_loss_is_divided_by_is_seen(tmp_path, how, divided):
    train(tmp_path, [PaDiffCallback(tmp_path / "run", every_n_steps=3)], how)
    assert padiff.open_run(tmp_path / "run").info.settings["trainer.loss_divided_by"] == divided


class Failing(torch.nn.Module):
    """Raises in the forward that is asked for."""

    def __init__(self, model, at):
        super().__init__()
        self.inner, self.at, self.calls, self.config = model, at, 0, model.config

    def forward(self, input_ids, labels):
        self.calls += 1
        if self.calls == self.at:
            raise ZeroDivisionError("in the model")
        return self.inner(input_ids=input_ids, labels=labels)


@pytest.mark.parametrize("added_later", [False, True])
def test_an_exception_leaves_no_hooks_and_a_second_train_goes_on(tmp_path, added_later):
    plain = hf.trainer(tmp_path / "out")
    callback = PaDiffCallback(tmp_path / "run")
    made = hf.trainer(tmp_path / "out", () if added_later else [callback], model=Failing(plain.model, 6))
    if added_later:
        made.add_callback(callback)
    with pytest.raises(ZeroDivisionError, match="in the model"):
        made.train()
    assert hf.hooks(made) == 0
    assert padiff.open_run(tmp_path / "run").numbers() == [0, 1]
    assert not padiff.open_run(tmp_path / "run").finished()
    made.train()
    assert hf.hooks(made) == 0
    assert padiff.open_run(tmp_path / "run").finished()
    assert padiff.open_run(tmp_path / "run").numbers() == list(range(8))


class Raising(TrainerCallback):
    """Somebody else's callback, that fails in an event."""

    def __init__(self, event):
        self.event, self.left = event, True

    def __getattribute__(self, name):
        if name.startswith("on_") and name == object.__getattribute__(self, "event"):
            return self.fail
        return object.__getattribute__(self, name)

    def fail(self, args, state, control, **kwargs):
        if state.global_step >= 1 and self.left:
            self.left = False
            raise KeyError("in a callback")


EVENTS = ["on_step_begin", "on_substep_end", "on_pre_optimizer_step", "on_optimizer_step", "on_step_end", "on_log"]


@pytest.mark.parametrize(("event", "first"), [(EVENTS[0], True), *((event, False) for event in EVENTS)])
def test_an_exception_of_another_callback_leaves_no_hooks_and_another_recorder_may_come(tmp_path, event, first):
    """Before one event of ours is as after the one before it."""
    callback = PaDiffCallback(tmp_path / "run")
    made = hf.trainer(tmp_path / "out", [Raising(event), callback] if first else [callback, Raising(event)])
    with pytest.raises(KeyError, match="in a callback"):
        made.train()
    assert hf.hooks(made) == 0
    again = hf.trainer(tmp_path / "out", [PaDiffCallback(tmp_path / "again")], model=made.model)
    again.train()
    assert hf.hooks(again) == 0
    assert padiff.open_run(tmp_path / "again").finished()


def test_a_callback_that_was_added_later_and_left_in_the_middle_gives_the_model_to_the_next(tmp_path):
    made = hf.trainer(tmp_path / "out", [Raising("on_log")])
    made.add_callback(PaDiffCallback(tmp_path / "run"))
    with pytest.raises(KeyError, match="in a callback"):
        made.train()
    again = hf.trainer(tmp_path / "out", [PaDiffCallback(tmp_path / "again")], model=made.model)
    again.train()
    assert padiff.open_run(tmp_path / "again").finished()
    assert hf.hooks(again) == 0


def test_evaluation_in_between_is_not_recorded(tmp_path):
    made = hf.trainer(tmp_path / "out", [PaDiffCallback(tmp_path / "run")], eval_strategy="steps", eval_steps=1)
    made.train()
    run = padiff.open_run(tmp_path / "run")
    assert run.numbers() == list(range(6))
    for number in run.numbers():
        (step,) = run.steps(number)
        assert step.micro_batches == 2
        assert not step.notes


def test_stop_ends_the_training_at_the_step_that_parts(tmp_path):
    train(tmp_path, [PaDiffCallback(tmp_path / "reference")])
    callback = PaDiffCallback(tmp_path / "run", reference=tmp_path / "reference", on_diff="stop")
    with pytest.warns(RuntimeWarning, match="clip limit 1.0 against 0.5"):
        made = train(tmp_path, [callback], max_grad_norm=0.5)
    assert made.state.global_step == 1
    assert callback.first_diff.stage == "grad"
    assert callback.first_report.first_diff is callback.first_diff
    assert hf.hooks(made) == 0


def test_raise_ends_the_training_with_the_report(tmp_path):
    train(tmp_path, [PaDiffCallback(tmp_path / "reference")])
    callback = PaDiffCallback(tmp_path / "run", reference=tmp_path / "reference", on_diff="raise")
    made = hf.trainer(tmp_path / "out", [callback], adam_beta2=0.9)
    with pytest.raises(RunsDifferError, match="beta2"):
        made.train()
    assert hf.hooks(made) == 0


def test_a_resumed_training_goes_on_with_the_number_of_its_step(tmp_path):
    made = train(tmp_path, [PaDiffCallback(tmp_path / "run")], max_steps=2, save_strategy="steps", save_steps=2)
    assert padiff.open_run(tmp_path / "run").numbers() == [0, 1]
    again = hf.trainer(tmp_path / "out", [PaDiffCallback(tmp_path / "run")], max_steps=4)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert padiff.open_run(tmp_path / "run").numbers() == [0, 1, 2, 3]
    assert hf.hooks(made) == hf.hooks(again) == 0


def test_scalars_go_to_the_trainers_own_tensorboard(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    train(tmp_path, [PaDiffCallback(tmp_path / "run", every_n_steps=3)], report_to=["tensorboard"])
    assert [step for step, _ in events(tmp_path / "tb")["0_verdict/loss"]] == [0, 3]


def test_the_trainers_tensorboard_is_closed_after_the_last_point(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    write = OwnCurves.write

    def late(curves, step):
        time.sleep(0.3)
        write(curves, step)

    monkeypatch.setattr(OwnCurves, "write", late)
    train(tmp_path, [PaDiffCallback(tmp_path / "run", every_n_steps=5)], report_to=["tensorboard"])
    # A point after the writer was closed would open it again: a second file, which nobody closes.
    (file,) = (tmp_path / "tb").rglob("events.out.tfevents.*")
    assert [step for step, _ in events(file.parent)["0_verdict/loss"]] == [0, 5]


def test_start_from_puts_the_model_where_another_run_began(tmp_path):
    train(tmp_path, [PaDiffCallback(tmp_path / "reference")])
    other = hf.trainer(tmp_path / "out", [PaDiffCallback(tmp_path / "run", start_from=tmp_path / "reference")])
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.add_(0.5)
    other.train()
    report = padiff.compare_runs(tmp_path / "reference", tmp_path / "run")
    assert report.passed and report.coverage.complete, str(report)


@pytest.mark.parametrize(("how", "floors"), [("means", {}), ("tokens", {"floors": 2, "float64": True})])
def test_packed_steps_are_done_again_in_a_trainer(tmp_path, how, floors):
    train(tmp_path, [PaDiffCallback(tmp_path / "reference", replay_every_n_steps=2)], how)
    callback = PaDiffCallback(tmp_path / "run", replay=tmp_path / "reference", **floors)
    # Six steps an epoch; three steps, each four times.
    made = hf.trainer(tmp_path / "out", [callback], how=how, data={"order": 5}, num_train_epochs=2)
    before = hf.weights(made)
    made.train()
    assert callback.report.passed, callback.report.first_diff.message
    assert callback.report.coverage.steps == (0, 2, 4)
    for one, other in zip(before, hf.weights(made)):
        np.testing.assert_array_equal(one, other)
    assert hf.hooks(made) == 0
    for number in (0, 2, 4) if floors else ():
        found = read_floors(tmp_path / "run", number)
        assert found.units == (1, 16) and len(found.exact) > 50 and not found.notes, found.notes


def test_lists_and_details_are_those_of_every_callback(tmp_path):
    train(tmp_path, [PaDiffCallback(tmp_path / "run", white_list=["model.layers.0.*"], detail={"backward": "nothing"})])
    (step,) = padiff.open_run(tmp_path / "run").steps(0)
    layers = {record.layer for record in step.records if record.layer != "(loop)" and record.stage != "input"}
    assert layers and all(layer.startswith("model.layers.0.") for layer in layers)
    assert not [record for record in step.records if record.stage == "backward"]
