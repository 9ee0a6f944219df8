"""Mixed precision: loss scaling with steps that are skipped, autocast, models in bfloat16; and gradients of zero."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
import torch
from kit.frameworks import PADDLE, TORCH

import padiff

from .loops import Frozen, Skipping
from .training import Training, assert_neutral, counts, train

# paddle's autocast is off on the CPU, where it has no 16-bit kernels, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:.*can only be enabled on CUDAPlace")

SCALE = 2.0**16


@pytest.fixture(autouse=True)
def scaling(monkeypatch):
    """Let paddle's own GradScaler scale on the CPU: it switches itself off there, though all of it works."""
    place = SimpleNamespace(is_gpu_place=lambda: True)
    monkeypatch.setattr(paddle.amp.grad_scaler, "_dygraph_tracer", lambda: SimpleNamespace(_expected_place=place))


class Scaled(Training):
    """A scaler, clipping, and one step that overflows; the fault clips before unscaling."""

    overflowing = 2

    def optimize(self):
        if self.kit.name == "torch":
            self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
        else:
            self.scaler = paddle.amp.GradScaler(
                init_loss_scaling=SCALE, incr_every_n_steps=2, decr_every_n_nan_or_inf=2
            )
        return super().optimize()

    def loss(self, number):
        return super().loss(number) * (1e37 if number == self.overflowing else 1.0)

    def step(self, number, log):
        kit, (optimizer,) = self.kit, self.optimizers
        # paddle scales within autocast only, which casts nothing on the CPU.
        with nullcontext() if kit.name == "torch" else paddle.amp.auto_cast(level="O1"):
            loss = self.loss(number)
            scaled = self.scaler.scale(loss)
        scaled.backward()
        log(loss)
        if not self.fault:
            self.scaler.unscale_(optimizer)
        clip = torch.nn.utils.clip_grad_norm_ if kit.name == "torch" else paddle.nn.utils.clip_grad_norm_
        clip(self.model.parameters(), 0.1)
        self.scaler.step(optimizer)
        self.scaler.update()
        kit.zero(optimizer)
        return float(loss.detach())


def test_with_a_scaler_the_training_is_the_same_to_the_bit(kit, level, tmp_path):
    plain, recorded = train(Scaled(kit)), train(Scaled(kit), tmp_path / "run", level)
    assert_neutral(plain, recorded)
    # Nobody told the recorder: it sees the loop's calls of the scaler.
    scales = [recorded.run.steps(n)[0].loss_scale for n in recorded.run.numbers()]
    # Grown after two; torch halves it after one overflow, paddle after two.
    assert scales == [SCALE, SCALE, 2 * SCALE, SCALE if kit.name == "torch" else 2 * SCALE]


def test_a_skipped_step_is_recorded_without_gradient_and_update(kit, level, tmp_path):
    run = train(Scaled(kit), tmp_path / "run", level).run
    whole = {"input": 1, "weight": 4, "forward": 4, "loss": 1, "backward": 4, "grad": 4, "update": 4, "rate": 1}
    skipped = {stage: n for stage, n in whole.items() if stage not in ("grad", "update", "rate")}
    assert [counts(run, n) for n in run.numbers()] == [whole, whole, skipped, whole]
    weights = [{r.site: r for r in run.steps(n)[0].records if r.stage == "weight"} for n in (2, 3)]
    if not level:
        for site, record in weights[0].items():
            np.testing.assert_array_equal(weights[1][site].value, record.value)


class Finite(Scaled):
    overflowing = None


class Unscaled(Training):
    """The same training without a scaler."""

    def step(self, number, log):
        kit = self.kit
        loss = self.loss(number)
        loss.backward()
        log(loss)
        clip = torch.nn.utils.clip_grad_norm_ if kit.name == "torch" else paddle.nn.utils.clip_grad_norm_
        clip(self.model.parameters(), 0.1)
        self.update()
        return float(loss.detach())


def test_a_scaler_on_one_side_only_is_no_difference(kit, level, tmp_path):
    train(Unscaled(TORCH), tmp_path / "plain", level)
    train(Finite(kit), tmp_path / "scaled", level)
    report = padiff.compare_runs(tmp_path / "plain", tmp_path / "scaled")
    assert report.passed, report.first_diff.message


@pytest.mark.parametrize("kind", [Scaled, Finite], ids=["a step overflows", "none does"])
def test_with_a_scaler_torch_and_paddle_match(kind, options, tmp_path):
    train(kind(TORCH), tmp_path / "torch", options)
    train(kind(PADDLE), tmp_path / "paddle", options)
    report = padiff.compare_runs(tmp_path / "torch", tmp_path / "paddle")
    assert report.passed, report.first_diff.message


def test_clipping_before_unscaling_is_found(kit, level, tmp_path):
    train(Scaled(TORCH), tmp_path / "right", level)
    train(Scaled(kit, fault=True), tmp_path / "wrong", level)
    first = padiff.compare_runs(tmp_path / "right", tmp_path / "wrong").first_diff
    assert (first.step, first.stage) == (0, "grad"), first.message


class Unskipped(Scaled):
    """Another step overflows."""

    overflowing = 3


def test_a_step_that_one_side_skips_is_found(kit, level, tmp_path):
    train(Scaled(TORCH), tmp_path / "right", level)
    train(Unskipped(kit), tmp_path / "wrong", level)
    first = padiff.compare_runs(tmp_path / "right", tmp_path / "wrong").first_diff
    assert first.step == Scaled.overflowing, first.message


class Fused(Scaled):
    """An optimizer that unscales inside of its kernel, and there skips a step that overflows; the fault is its rate."""

    make, clips, fuses = torch.optim.SGD, False, True

    def optimize(self):
        super().optimize()
        return [self.make(self.model.parameters(), 0.12 if self.fault else 0.1, fused=self.fuses)]

    def step(self, number, log):
        (optimizer,) = self.optimizers
        self.scale = self.scaler.get_scale()
        loss = self.loss(number)
        self.scaler.scale(loss).backward()
        log(loss)
        if self.clips:
            self.scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.scaler.step(optimizer)
        self.scaler.update()
        self.kit.zero(optimizer)
        return float(loss.detach())


class FusedAdam(Fused):
    make = torch.optim.Adam


class FusedClipped(Fused):
    clips = True


FUSED = pytest.mark.parametrize("kind", [Fused, FusedAdam, FusedClipped], ids=lambda kind: kind.__name__.lower())


def unfused(kind):
    return type("Unfused", (kind,), {"fuses": False})(TORCH)


@FUSED
def test_a_fused_optimizer_trains_the_same_and_its_gradients_are_recorded_unscaled(kind, options, tmp_path):
    plain, recorded = train(kind(TORCH)), train(kind(TORCH), tmp_path / "fused", options)
    assert_neutral(plain, recorded)
    whole = train(unfused(kind), tmp_path / "unfused", options).run
    assert [counts(recorded.run, n) for n in whole.numbers()] == [counts(whole, n) for n in whole.numbers()]
    assert "grad" not in counts(whole, kind.overflowing)
    report = padiff.compare_runs(tmp_path / "unfused", tmp_path / "fused")
    assert report.passed, report.first_diff.message


@FUSED
def test_a_fused_optimizers_mistake_is_found(kind, options, tmp_path):
    train(unfused(kind), tmp_path / "right", options)
    train(kind(TORCH, fault=True), tmp_path / "wrong", options)
    first = padiff.compare_runs(tmp_path / "right", tmp_path / "wrong").first_diff
    assert (first.step, first.stage) == (0, "update"), first.message


class Autocast(Frozen):
    """The forward under autocast; the fault is a learning rate a fifth too large."""

    cast = True

    def optimize(self):
        return [self.kit.sgd(self.model.parameters(), 0.12 if self.fault else 0.1)]

    def loss(self, number):
        if not self.cast:
            context = nullcontext()
        elif self.kit.name == "torch":
            context = torch.autocast("cpu", dtype=torch.bfloat16)
        else:
            context = paddle.amp.auto_cast(level="O1")
        with context:
            return super().loss(number)


class Full(Autocast):
    cast = False


def test_under_autocast_the_training_is_the_same_to_the_bit(kit, level, tmp_path):
    assert_neutral(train(Autocast(kit)), train(Autocast(kit), tmp_path / "run", level))


def test_under_autocast_dtypes_are_the_true_ones(kit, level, tmp_path):
    (step,) = train(Autocast(kit), tmp_path / "run", level).run.steps(0)
    dtypes = {record.site: record.dtype for record in step.records}
    assert dtypes["2/forward/output.0"] == ("bfloat16" if kit.name == "torch" else "float32")
    assert dtypes["2/weight/weight"] == dtypes["2/grad/weight"] == "float32"


def test_a_run_under_autocast_matches_one_in_full_precision_but_for_a_mistake(kit, level, tmp_path):
    train(Full(TORCH), tmp_path / "full", level)
    train(Autocast(kit), tmp_path / "cast", level)
    train(Autocast(kit, fault=True), tmp_path / "wrong", level)
    report = padiff.compare_runs(tmp_path / "full", tmp_path / "cast")
    assert report.passed, report.first_diff.message
    first = padiff.compare_runs(tmp_path / "full", tmp_path / "wrong").first_diff
    assert (first.step, first.stage) == (0, "update"), first.message


class Bfloat16(Autocast):
    """A model in bfloat16. paddle's CPU has no bfloat16 matmul, so this is torch's alone."""

    cast = False

    def build(self):
        return super().build().to(torch.bfloat16)

    def batch(self, number, shape=(6, 4), classes=3):
        x, y = super().batch(number, shape, classes)
        return x.to(torch.bfloat16), y


def test_a_model_in_bfloat16(options, tmp_path):
    plain, recorded = train(Bfloat16(TORCH)), train(Bfloat16(TORCH), tmp_path / "run", options)
    assert_neutral(plain, recorded)
    (step,) = recorded.run.steps(1)
    assert {r.dtype for r in step.records if r.stage in ("input", "weight", "forward", "grad")} == {"bfloat16"}
    train(Bfloat16(TORCH), tmp_path / "again", options)
    train(Bfloat16(TORCH, fault=True), tmp_path / "wrong", options)
    assert padiff.compare_runs(tmp_path / "run", tmp_path / "again").passed
    first = padiff.compare_runs(tmp_path / "run", tmp_path / "wrong").first_diff
    assert (first.step, first.stage) == (0, "update"), first.message


# -- gradients of zero, where the other side has none ----------------------------------------------------------------


class Zeros(Skipping):
    zeros = True


def test_a_gradient_of_zero_that_moved_nothing_matches_none(options, tmp_path):
    train(Zeros(TORCH), tmp_path / "torch", options)
    train(Zeros(PADDLE), tmp_path / "paddle", options)
    report = padiff.compare_runs(tmp_path / "torch", tmp_path / "paddle")
    assert report.passed, report.first_diff.message
