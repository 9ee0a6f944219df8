"""Losses of both frameworks with one meaning and other names or shapes."""

from __future__ import annotations

import numpy as np
import paddle
import torch

import padiff
from padiff.compare.declared.run import loss_differences
from padiff.records import Both

RNG = np.random.default_rng(2)
WEIGHT, BIAS = RNG.normal(size=(5, 5)).astype("float32"), RNG.normal(size=5).astype("float32")
X, Y = RNG.normal(size=(6, 7, 5)).astype("float32"), RNG.normal(size=(6, 7)).astype("float32")
LABELS = RNG.integers(0, 4, (6, 7))
MASK = (RNG.random((6, 7)) < 0.7).astype("float32")


def torch_run():
    net = torch.nn.Linear(5, 5)
    net.load_state_dict({"weight": torch.tensor(WEIGHT.T.copy()), "bias": torch.tensor(BIAS)})
    with padiff.record(net) as rec:
        for _ in range(2):
            net.zero_grad()
            z, mask = net(torch.tensor(X)), torch.tensor(MASK)
            rows = torch.nn.functional.cross_entropy(z[..., :4].transpose(1, 2), torch.tensor(LABELS), reduction="none")
            errors = torch.nn.functional.smooth_l1_loss(z[..., 4], torch.tensor(Y), reduction="none")
            loss = (rows * mask).sum() / mask.sum() + 0.5 * (errors * mask).sum() / mask.sum()
            loss.backward()
            rec.log_loss(loss)
            rec.try_dump()
    return rec.run


def paddle_run(weight=0.5):
    net = paddle.nn.Linear(5, 5)
    net.weight.set_value(WEIGHT)
    net.bias.set_value(BIAS)
    with padiff.record(net) as rec:
        for _ in range(2):
            net.clear_gradients()
            z, mask = net(paddle.to_tensor(X)), paddle.to_tensor(MASK)
            labels = paddle.to_tensor(LABELS).unsqueeze(-1)
            rows = paddle.nn.functional.cross_entropy(z[..., :4], labels, reduction="none").squeeze(-1)
            errors = paddle.nn.functional.smooth_l1_loss(z[..., 4], paddle.to_tensor(Y), reduction="none")
            loss = (rows * mask).sum() / mask.sum() + weight * (errors * mask).sum() / mask.sum()
            loss.backward()
            rec.log_loss(loss)
            rec.try_dump()
    return rec.run


def test_the_huber_loss_of_delta_1_is_the_smooth_l1_loss():
    runs = Both(torch_run(), paddle_run())
    assert padiff.compare_runs(*runs).outcome == "match"
    settings = runs.map(lambda run: run.info.settings)
    assert {settings.reference["loss.1.function"], settings.candidate["loss.1.function"]} == {
        "smooth_l1_loss",
        "huber_loss",
    }
    assert [*loss_differences(settings, "paddle")] == []
    other = Both(settings.reference, {**settings.candidate, "loss.1.delta": 2.0})
    assert [difference.name for difference in loss_differences(other, "paddle")] == ["function"]


def test_labels_with_an_axis_for_the_class_are_computed_again():
    cause = padiff.compare_runs(torch_run(), paddle_run(weight=0.2)).first_diff.cause
    assert (cause.kind, cause.proven) == ("loss_term_weight", True) and "0.2 for the reference's 0.5" in cause.sentence
