"""Copies of a model that is being recorded: hooks do not travel, and averages of weights are neutral."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import TORCH

import padiff

from .loops import Frozen
from .training import Training, assert_neutral, counts, train


class Copied(Training):
    """Each step makes a deep copy of the model and works with it, as people do for a moving average."""

    def optimize(self):
        self.average = copy.deepcopy(self.model)
        return [self.kit.sgd(self.model.parameters(), 0.1)]

    def step(self, number, log):
        kit = self.kit
        loss = self.loss(number)
        self.use(number)
        loss.backward()
        log(loss)
        self.update()
        with kit.no_grad():
            for mean, parameter in zip(self.average.parameters(), self.model.parameters()):
                new = mean * 0.9 + parameter * 0.1
                mean.copy_(new) if kit.name == "torch" else mean.set_value(new)
            # Evaluated in training mode, the copy is no call of the recorded model for all that.
            self.average(self.batch(50 + number)[0])
        return float(loss.detach())

    def use(self, number):
        twin = copy.deepcopy(self.model)
        self.kit.cross_entropy(twin(self.batch(number)[0]), self.batch(number)[1]).backward()


class Saved(Copied):
    """Each step saves a checkpoint and loads it into another model."""

    def use(self, number):
        file = io.BytesIO()
        if self.kit.name == "torch":
            torch.save(self.model.state_dict(), file)
            file.seek(0)
            state = torch.load(file)
            self.average.load_state_dict(state)
        else:
            paddle.save(self.model.state_dict(), file)
            file.seek(0)
            self.average.set_state_dict(paddle.load(file))


class Pickled(Copied):
    def use(self, number):
        if self.kit.name == "torch":
            twin = pickle.loads(pickle.dumps(self.model))
            twin(self.batch(number)[0])
        else:
            super().use(number)  # paddle's layers can't be pickled, recorded or not


@pytest.mark.parametrize("way", [Copied, Saved, Pickled], ids=lambda way: way.__name__.lower())
def test_copies_change_neither_the_training_nor_the_records(kit, way, level, tmp_path):
    plain, recorded = train(way(kit)), train(way(kit), tmp_path / "run", level)
    assert_neutral(plain, recorded)
    for number in recorded.run.numbers():
        assert counts(recorded.run, number) == {
            "input": 1,
            "weight": 4,
            "forward": 4,
            "loss": 1,
            "backward": 4,
            "grad": 4,
            "update": 4,
            "rate": 1,
        }


def test_a_hand_written_average_is_the_same_with_and_without_recording(kit, level, tmp_path):
    trainings = [Copied(kit), Copied(kit)]
    train(trainings[0])
    train(trainings[1], tmp_path / "run", level)
    states = [kit.state(training.average) for training in trainings]
    for name, value in states[0].items():
        np.testing.assert_array_equal(states[1][name], value)


class Averaged(Frozen):
    """torch's own averages; the fault trains on with the averaged weights."""

    def optimize(self):
        self.average = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        return [self.kit.sgd(self.model.parameters(), 0.1)]

    def step(self, number, log):
        loss = super().step(number, log)
        self.average.update_parameters(self.model)
        self.average(self.batch(number)[0])
        if self.fault and number == 1:
            self.model.load_state_dict(self.average.module.state_dict())
        return loss


def test_torchs_averaged_model(options, tmp_path):
    first = Averaged(TORCH)
    plain = train(first)
    second = Averaged(TORCH)
    recorded = train(second, tmp_path / "run", options)
    assert_neutral(plain, recorded)
    for reference, candidate in zip(first.average.parameters(), second.average.parameters()):
        assert torch.equal(reference, candidate)
    assert all(counts(recorded.run, n)["forward"] == 4 for n in recorded.run.numbers())
    train(Averaged(TORCH, fault=True), tmp_path / "wrong", options)
    first = padiff.compare_runs(tmp_path / "run", tmp_path / "wrong").first_diff
    assert (first.step, first.stage) == (2, "weight"), first.message


def test_an_average_made_while_the_model_is_recorded_averages_and_records_nothing(options, tmp_path):
    training = Frozen(TORCH)
    with padiff.record(training.model, tmp_path / "run", optimizer=training.optimizers, **options) as rec:
        training.step(0, rec.log_loss)
        average = torch.optim.swa_utils.AveragedModel(training.model)
        average(training.batch(0)[0])
        rec.try_dump()
    assert counts(padiff.open_run(tmp_path / "run"), 0)["forward"] == 4
    average.update_parameters(training.model)
    average(training.batch(0)[0])
