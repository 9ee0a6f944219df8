"""One planted fault at a time in the held-out pair; the first diff has to name its step, stage and layer."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
import torch

import padiff

from .pair import Mixer, MixerPort, Recipe, Smoothed, batches, carry_over, train_paddle, train_torch

STEPS = 9


@pytest.fixture(scope="module")
def weights():
    torch.manual_seed(0)
    return Mixer().state_dict()


def fresh(weights):
    network = Mixer()
    network.load_state_dict(weights)
    return network


@pytest.fixture(scope="module")
def reference(weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("heldout") / "torch"
    train_torch(folder, fresh(weights), Recipe(), batches(steps=STEPS))
    return folder


@pytest.fixture
def candidate(weights, tmp_path):
    """Train the port with a fault; returns its run folder."""

    def train(change=lambda network: None, data=None, loss=None, **faults):
        paddle.seed(0)
        network = MixerPort(faults)
        carry_over(fresh(weights), network)
        change(network)
        optimizer = Recipe().paddle(network.parameters(), **faults)
        train_paddle(tmp_path / "paddle", network, optimizer, data or batches(steps=STEPS), loss=loss)
        return tmp_path / "paddle"

    return train


def first(reference, candidate):
    report = padiff.compare_runs(reference, candidate)
    assert not report.passed
    found = report.first_diff
    return (found.step, found.stage, found.reference, found.candidate), found.message


def test_without_a_fault_the_pair_matches_with_all_of_its_parameters_covered(reference, candidate):
    report = padiff.compare_runs(reference, candidate())
    assert report.passed, report.first_diff.message
    assert report.coverage.steps == (0, 4, 8)
    for side in ("reference", "candidate"):
        assert getattr(report.coverage, f"{side}_parameters") == ()
        assert getattr(report.coverage, f"{side}_steps") == ()
    compared = {d.pair.reference.site for d in report.diffs if d.compared and d.pair.stage == "grad"}
    assert len(compared) == len(list(Mixer().parameters()))
    assert not [note for note in report.coverage.notes if "against" in note]


def test_without_a_fault_and_with_layers_defined_in_another_order_than_they_are_called(reference, candidate):
    report = padiff.compare_runs(reference, candidate(norms_first=True))
    assert report.passed, report.first_diff.message
    assert report.coverage.reference_parameters == ()


def test_another_layer_norm_epsilon(reference, candidate):
    place, message = first(reference, candidate(epsilon=1e-3))
    assert place == (0, "forward", "network.blocks.0.tokens.0", "body.0.ln1")
    assert "eps 1e-05 against 0.001" in message


def test_gelu_by_its_tanh_approximation(reference, candidate):
    place, message = first(reference, candidate(approximate=True))
    assert place == (0, "forward", "network.blocks.0.tokens.3", "body.0.mix_act")
    assert "approximate none against tanh" in message


def test_a_learning_rate_off_by_eight_percent(reference, candidate):
    place, message = first(reference, candidate(rate=1.08e-2))
    assert place == (0, "update", "network.inp", "stem")
    assert "the learning rates differ: 0.01 against 0.0108" in message


def test_no_weight_decay(reference, candidate):
    place, message = first(reference, candidate(decay=0.0))
    assert place == (0, "update", "network.inp", "stem")
    assert "weight decay" in message


def test_label_smoothing(reference, candidate):
    place, message = first(reference, candidate(loss=Smoothed()))
    assert place == (0, "loss", "(loop)", "(loop)")
    assert "Cause, proven: in the candidate, the label smoothing of cross_entropy() in the loop is 0.1" in message


def test_a_square_weight_that_was_not_transposed(reference, candidate):
    def transpose(network):
        weight = network.body[1].expand.weight
        weight.set_value(weight.numpy().T.copy())

    place, message = first(reference, candidate(transpose))
    assert place == (0, "weight", "network.blocks.1.channels.1", "body.1.expand")
    assert "is at the start transposed" in message


def test_gradient_clipping_on_one_side_only(weights, candidate, tmp_path):
    recipe = Recipe(trainer={"gradient_clip_val": 0.1})
    train_torch(tmp_path / "torch", fresh(weights), recipe, batches(steps=STEPS))
    place, message = first(tmp_path / "torch", candidate())
    assert place == (0, "grad", "network.inp", "stem")
    # The norm that was clipped to 0.1 was 20.868 times as large.
    assert "clip" in message and "0.1" in message
    assert "ClipGradByGlobalNorm(0.1)" in message


def test_another_batch_norm_momentum_shows_at_the_next_recorded_step(reference, candidate):
    place, message = first(reference, candidate(momentum=0.1))
    assert place == (4, "weight", "network.norm", "top.0")
    assert "momentum 0.1 against 0.9" in message


def test_batches_in_another_order(reference, candidate):
    x, y = batches(steps=STEPS)
    order = np.roll(np.arange(STEPS), 1)
    place, message = first(reference, candidate(data=(x[order], y[order])))
    assert place[:2] == (0, "input")
    assert "the candidate's batch is the reference's of step 8: the batches come in another order" in message


def test_samples_of_a_batch_in_another_order(reference, candidate):
    x, y = batches(steps=STEPS)
    place, message = first(reference, candidate(data=(x[:, ::-1], y[:, ::-1])))
    assert place[:2] == (0, "input")
    assert "the candidate's input is the same samples in reverse" in message


def test_a_gradient_times_seven_in_a_middle_layer(reference, candidate):
    place, message = first(reference, candidate(times_seven=True))
    assert place == (0, "backward", "network.blocks.1.channels.2", "body.1.act")
    assert "7 times the reference's" in message


def test_dropout_on_one_side_only(reference, candidate):
    place, message = first(reference, candidate(dropout=0.2))
    assert place == (0, "forward", "network.drop", "top.1")
    assert "dropout" in message.lower() and "0.2" in message


def test_a_middle_bias_off_by_fifty(reference, candidate):
    def shift(network):
        bias = network.body[0].mix_out.bias
        bias.set_value(bias.numpy() + 50.0)

    place, message = first(reference, candidate(shift))
    assert place == (0, "weight", "network.blocks.0.tokens.4", "body.0.mix_out")
    assert "max |diff| 50," in message


def test_a_bias_off_by_fifty_that_only_forward_adds(reference, candidate):
    def shift(network):
        network.body[0].mix_out.register_forward_post_hook(lambda layer, given, output: output + 50.0)

    place, _ = first(reference, candidate(shift))
    assert place == (0, "forward", "network.blocks.0.tokens.4", "body.0.mix_out")
