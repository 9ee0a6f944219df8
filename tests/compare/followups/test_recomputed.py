"""Layers computed again in float64, and which side the message says is off."""

from __future__ import annotations

import json

import numpy as np
import paddle
import pytest
import torch

import padiff
from compare.followups.programs import reference, trained
from padiff.compare.diagnose.recompute.of_layers import Recorded, recorded
from padiff.compare.diagnose.recompute.of_layers import off_by as part_off_by
from padiff.records import Both
from padiff.report_formats import to_json

T, P = torch.nn, paddle.nn
IMAGE, ROWS, SIGNAL = (4, 6, 7, 7), (5, 3, 8), (4, 6, 9)

# What is called alike in both, with the shape of what goes in; of some only one framework has it.
LAYERS = [
    (lambda: T.Linear(8, 5), lambda: P.Linear(8, 5), ROWS),
    (lambda: T.Linear(8, 8, bias=False), lambda: P.Linear(8, 8, bias_attr=False), ROWS),
    (lambda: T.Conv2d(6, 4, 3, stride=2, padding=1), lambda: P.Conv2D(6, 4, 3, stride=2, padding=1), IMAGE),
    (lambda: T.Conv2d(6, 6, 3, groups=3, dilation=2), lambda: P.Conv2D(6, 6, 3, groups=3, dilation=2), IMAGE),
    (
        lambda: T.Conv2d(6, 4, 3, padding=1, padding_mode="reflect"),
        lambda: P.Conv2D(6, 4, 3, padding=1, padding_mode="reflect"),
        IMAGE,
    ),
    (lambda: T.Conv1d(6, 4, 3, padding=1), lambda: P.Conv1D(6, 4, 3, padding=1), SIGNAL),
    (lambda: T.BatchNorm2d(6), lambda: P.BatchNorm2D(6), IMAGE),
    (lambda: T.BatchNorm2d(6).eval(), lambda: _evaluating(P.BatchNorm2D(6)), IMAGE),
    (lambda: T.BatchNorm1d(6), lambda: P.BatchNorm1D(6), SIGNAL),
    (lambda: T.LayerNorm(8), lambda: P.LayerNorm(8), ROWS),
    (lambda: T.LayerNorm((3, 8), eps=1e-3), lambda: P.LayerNorm((3, 8), epsilon=1e-3), ROWS),
    (lambda: T.RMSNorm(8), None, ROWS),
    (lambda: T.GroupNorm(3, 6), lambda: P.GroupNorm(3, 6), IMAGE),
    (lambda: T.InstanceNorm2d(6, affine=True), lambda: P.InstanceNorm2D(6), IMAGE),
    (lambda: T.ReLU(), lambda: P.ReLU(), ROWS),
    (lambda: T.ReLU6(), lambda: P.ReLU6(), ROWS),
    (lambda: T.LeakyReLU(0.2), lambda: P.LeakyReLU(0.2), ROWS),
    (lambda: T.GELU(), lambda: P.GELU(), ROWS),
    (lambda: T.GELU(approximate="tanh"), lambda: P.GELU(approximate=True), ROWS),
    (lambda: T.SiLU(), lambda: P.Silu(), ROWS),
    (lambda: T.Mish(), lambda: P.Mish(), ROWS),
    (lambda: T.Tanh(), lambda: P.Tanh(), ROWS),
    (lambda: T.Sigmoid(), lambda: P.Sigmoid(), ROWS),
    (lambda: T.ELU(0.7), lambda: P.ELU(0.7), ROWS),
    (lambda: T.CELU(0.7), lambda: P.CELU(0.7), ROWS),
    (lambda: T.SELU(), lambda: P.SELU(), ROWS),
    (lambda: T.Softplus(2.0), lambda: P.Softplus(2.0), ROWS),
    (lambda: T.Softsign(), lambda: P.Softsign(), ROWS),
    (lambda: T.LogSigmoid(), lambda: P.LogSigmoid(), ROWS),
    (lambda: T.Tanhshrink(), lambda: P.Tanhshrink(), ROWS),
    (lambda: T.Hardswish(), lambda: P.Hardswish(), ROWS),
    (lambda: T.Hardsigmoid(), lambda: P.Hardsigmoid(), ROWS),
    (lambda: T.PReLU(6), lambda: P.PReLU(6), IMAGE),
    (lambda: T.Softmax(-1), lambda: P.Softmax(-1), ROWS),
    (lambda: T.Softmax(1), lambda: P.Softmax(1), ROWS),
    (lambda: T.LogSoftmax(-1), lambda: P.LogSoftmax(-1), ROWS),
    (lambda: T.Flatten(), lambda: P.Flatten(), IMAGE),
    (lambda: T.MaxPool2d(3, 2, 1), lambda: P.MaxPool2D(3, 2, 1), IMAGE),
    (lambda: T.MaxPool2d(3, 2, ceil_mode=True), lambda: P.MaxPool2D(3, 2, ceil_mode=True), (2, 3, 8, 8)),
    (lambda: T.MaxPool2d(2, 2, dilation=2), None, IMAGE),
    (lambda: T.Conv2d(6, 4, 3, padding="same"), lambda: P.Conv2D(6, 4, 3, padding="SAME"), IMAGE),
    (lambda: T.Conv2d(6, 4, 3, padding="valid"), lambda: P.Conv2D(6, 4, 3, padding="VALID"), IMAGE),
    (lambda: T.ConvTranspose2d(6, 3, 2), lambda: P.Conv2DTranspose(6, 3, 2), IMAGE),
    (lambda: T.AvgPool2d(3, 2, 1), lambda: P.AvgPool2D(3, 2, 1), IMAGE),
    (
        lambda: T.AvgPool2d(3, 2, 1, count_include_pad=False),
        lambda: P.AvgPool2D(3, 2, 1, exclusive=False),
        IMAGE,
    ),
    (lambda: T.AdaptiveAvgPool2d(3), lambda: P.AdaptiveAvgPool2D(3), IMAGE),
    (lambda: T.AdaptiveMaxPool2d(2), lambda: P.AdaptiveMaxPool2D(2), IMAGE),
    (lambda: T.Dropout(0.5).eval(), lambda: _evaluating(P.Dropout(0.5)), ROWS),
    (lambda: T.Embedding(9, 4), lambda: P.Embedding(9, 4), (5, 3)),
    (lambda: T.Embedding(9, 4, padding_idx=0), lambda: P.Embedding(9, 4, padding_idx=0), (5, 3)),
]


def _evaluating(layer):
    layer.eval()
    return layer


def off_by(framework, layer, shape):
    """What a layer's recorded output is off by, beside float64."""
    rng = np.random.default_rng(0)
    plain = len(shape) == 2
    x = rng.integers(0, 9, shape) if plain else rng.normal(size=shape).astype("float32")
    model = (torch.nn if framework is torch else paddle.nn).Sequential(layer)
    with padiff.record(model) as rec:
        model(torch.from_numpy(x) if framework is torch else paddle.to_tensor(x))
        rec.try_dump()
    run = rec.run
    step = run.steps(0)[0]
    side: Recorded = recorded(Both(step, step), Both(run.info, run.info)).reference
    [record] = [r for r in step.records if r.stage == "forward" and r.layer == "0"]
    part = side.part(record)
    return None if part is None else part_off_by(part, record)


@pytest.mark.parametrize(("of_torch", "of_paddle", "shape"), LAYERS)
def test_layers_of_both_frameworks_agree_with_float64_and_what_they_are_not_does_not(of_torch, of_paddle, shape):
    for framework, make in ((torch, of_torch), (paddle, of_paddle)):
        if make is None:
            continue
        assert off_by(framework, make(), shape) < 2e-6
        wrong = make()
        own = wrong.forward
        wrong.forward = lambda x, own=own: own(x) * 1.01
        assert off_by(framework, wrong, shape) == pytest.approx(0.01, rel=0.05)


def test_what_is_not_known_is_not_computed():
    assert off_by(torch, T.Dropout(0.5), ROWS) is None
    assert off_by(torch, T.LPPool2d(2, 2), IMAGE) is None


def test_large_layers_are_computed_in_part():
    wide = T.Conv2d(6, 64, 3, padding=1)
    assert off_by(torch, wide, (32, 6, 48, 48)) < 2e-6
    assert off_by(torch, T.BatchNorm2d(6), (32, 6, 48, 48)) < 2e-6
    assert off_by(torch, T.LayerNorm(512), (40, 40, 512)) < 2e-6


# -- which side ----------------------------------------------------------------------------------------------------

WRONG = [
    ("towers", "conv:no_bias", "layer"),
    ("towers", "bn:shifted", "layer"),
    ("towers", "pool:halved", "layer"),
    ("towers", "up:negated", "layer"),
    ("towers", "norm:eps", "layer"),
    ("towers", "act:tanh_gelu", "layer"),
    ("stack", "2:relu", "layer"),
    ("words", "emb:scaled", "layer"),
    ("words", "second.down:shifted", "layer"),
    ("stack", "reload", "weight"),
]
SET = [
    ("towers", "norm:declared_eps", "layer"),
    ("towers", "bn:eval", "layer"),
    ("towers", "no_smoothing", "loss"),
    ("stack", "no_decay", "update"),
    ("stack", "rate", "update"),
    ("words", "decay_on_norms", "update"),
]


def both_ways(style, fault, framework="torch"):
    """The first diffs of a fault in the candidate, and of the same fault in the reference."""
    wrong = trained(framework, style, "sgd", frozenset([fault]))
    return [padiff.compare_runs(*runs).first_diff for runs in ((reference(style), wrong), (wrong, reference(style)))]


def by_turns(faults):
    """Each in one framework: what is computed again is computed alike."""
    return [(*fault, ("torch", "paddle")[k % 2]) for k, fault in enumerate(faults)]


@pytest.mark.parametrize(("style", "fault", "what", "framework"), by_turns(WRONG))
def test_the_side_with_the_fault_is_the_one_that_is_off(style, fault, what, framework):
    for first, wrong, right in zip(
        both_ways(style, fault, framework), ("candidate", "reference"), ("reference", "candidate")
    ):
        found = first.recomputed
        assert (found.what, found.wrong) == (what, wrong)
        near, far = getattr(found.errors, right), getattr(found.errors, wrong)
        assert near < 1e-6 < 1e-4 < far
        assert f"The {right}" in found.text and found.text in first.message
        assert f"off by {far:.2g}" in first.message


@pytest.mark.parametrize(("style", "fault", "what", "framework"), by_turns(SET))
def test_runs_that_are_set_differently_are_both_right(style, fault, what, framework):
    for first in both_ways(style, fault, framework):
        assert (first.recomputed.what, first.recomputed.wrong) == (what, "")
        assert max(first.recomputed.errors) < 1e-3
        assert "the runs are set differently" in first.message and "off by" not in first.recomputed.text


def test_an_update_that_departs_from_its_own_rule_is_reported():
    def lost(model, optimizer, step):
        optimizer.state.clear()

    from compare.hypotheses.trainings import torch_run

    def adam(model):
        return torch.optim.AdamW(model.parameters(), 1e-2)

    runs = [torch_run(adam), torch_run(adam, after_step=lost)]
    for pair, wrong in ((runs, "candidate"), (runs[::-1], "reference")):
        found = padiff.compare_runs(*pair).first_diff.recomputed
        assert (found.what, found.wrong) == ("update", wrong)
        assert f"the {wrong} departs from its own declared AdamW by" in found.text


def test_a_loss_in_code_of_ones_own_is_held_against_the_others_function():
    def run(factor):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
        with padiff.record(model) as rec:
            scores = model(x)
            if factor:
                loss = -factor * torch.log_softmax(scores, -1)[torch.arange(6), y].mean()
            else:
                loss = torch.nn.functional.cross_entropy(scores, y)
            loss.backward()
            rec.log_loss(loss)
            rec.try_dump()
        return rec.run

    for pair, wrong in (((run(0), run(1.1)), "candidate"), ((run(1.1), run(0)), "reference")):
        first = padiff.compare_runs(*pair).first_diff
        assert (first.stage, first.recomputed.what, first.recomputed.wrong) == ("loss", "loss", wrong)
        assert "agrees with a cross_entropy in float64" in first.message
        assert getattr(first.recomputed.errors, wrong) == pytest.approx(0.1, rel=1e-3)
    assert padiff.compare_runs(run(0), run(1.0)).passed


def test_nothing_is_said_where_what_goes_in_differs_or_is_not_there():
    for fault in ("first.out:scaled", "emb:scaled"):
        wrong = trained("torch", "words", "sgd", frozenset([fault]), detail="sketch", functions=False)
        same = trained("torch", "words", "sgd", detail="sketch", functions=False)
        assert padiff.compare_runs(same, wrong).first_diff.recomputed is None
    first = padiff.compare_runs(
        reference("towers"), trained("torch", "towers", "sgd", frozenset(["flipped"]))
    ).first_diff
    assert first.stage == "input" and first.recomputed is None


def test_json_says_whose_figures_agree():
    first = both_ways("towers", "norm:eps")[0]
    found = to_json(
        padiff.compare_runs(reference("towers"), trained("torch", "towers", "sgd", frozenset(["norm:eps"])))
    )
    reported = json.loads(json.dumps(found))["first_diff"]["recomputed"]
    assert (
        reported["wrong"] == "candidate" and reported["what"] == "layer" and reported["text"] == first.recomputed.text
    )
    assert reported["rules"] == {"reference": "LayerNorm", "candidate": "LayerNorm"} and set(reported["errors"]) == set(
        reported["rules"]
    )
