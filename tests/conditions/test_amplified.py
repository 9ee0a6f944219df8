"""Trainings that amplify rounding: right runs come apart within a few steps, and nothing is wrong with them."""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any

import numpy as np
import paddle
import pytest
import torch

import padiff
from padiff.records import STAGES
from padiff.report_formats import verdict

# So deep, and normalised over so few values, that an error of the weights is a hundred times as large in the outputs.
WIDTHS = (*[32] * 4, *[64] * 8)
STEPS, BATCH = 8, 4


def torch_net() -> torch.nn.Module:
    layers: list[torch.nn.Module] = []
    for k, (before, width) in enumerate(zip((3, *WIDTHS), WIDTHS)):
        layers += [torch.nn.Conv2d(before, width, 3, 1 + k % 2, 1, bias=False), torch.nn.BatchNorm2d(width)]
        layers.append(torch.nn.ReLU())
    return torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(WIDTHS[-1], 10))


def paddle_net() -> paddle.nn.Layer:
    layers: list[paddle.nn.Layer] = []
    for k, (before, width) in enumerate(zip((3, *WIDTHS), WIDTHS)):
        layers += [paddle.nn.Conv2D(before, width, 3, 1 + k % 2, 1, bias_attr=False), paddle.nn.BatchNorm2D(width)]
        layers.append(paddle.nn.ReLU())
    return paddle.nn.Sequential(*layers, paddle.nn.Flatten(), paddle.nn.Linear(WIDTHS[-1], 10))


def trained(
    detail: Any, seed: int = 0, every: int = 1, fault: int | None = None, stages: Collection[str] = STAGES
) -> padiff.Report:
    """Both frameworks train the same network; in step ``fault`` a weight of paddle's is changed behind its back."""
    runs = recorded(detail if isinstance(detail, str) else tuple(detail.items()), seed, every, fault)
    return padiff.compare_runs(*runs, stages=stages)


@functools.cache
def recorded(detail: str | tuple[tuple[str, str], ...], seed: int, every: int, fault: int | None) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    one, other = torch_net(), paddle_net()
    padiff.assign_weight(one, other)
    optimizers = (
        torch.optim.SGD(one.parameters(), 0.1, momentum=0.9),
        paddle.optimizer.Momentum(0.1, 0.9, parameters=other.parameters()),
    )
    options: dict[str, Any] = {"detail": detail if isinstance(detail, str) else dict(detail), "every_n_steps": every}
    with (
        padiff.record(one, optimizer=optimizers[0], **options) as reference,
        padiff.record(other, optimizer=optimizers[1], **options) as candidate,
    ):
        for step in range(STEPS):
            images = rng.normal(size=(BATCH, 3, 16, 16)).astype(np.float32)
            labels = rng.integers(0, 10, BATCH)
            loss = torch.nn.functional.cross_entropy(one(torch.tensor(images)), torch.tensor(labels))
            reference.log_loss(loss)
            loss.backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
            reference.try_dump()
            if step == fault:
                weight = other[9].weight
                weight.set_value(weight * 1.05)
            loss = paddle.nn.functional.cross_entropy(other(paddle.to_tensor(images)), paddle.to_tensor(labels))
            candidate.log_loss(loss)
            loss.backward()
            optimizers[1].step()
            optimizers[1].clear_grad()
            candidate.try_dump()
    return reference.run, candidate.run


# The other tests look at the first of these, too.
@pytest.mark.parametrize(("detail", "seed", "every"), [("full", 0, 1), ("sketch", 1, 1), ("sketch", 0, 3)])
def test_a_training_that_amplifies_rounding_is_not_reported_apart(detail, seed, every):
    report = trained(detail, seed, every)
    assert report, verdict(report)
    # It did come apart: the last outputs have little in common, and the verdict says from where on that is so.
    last = [d for d in report.diffs if d.pair.step == max(report.coverage.steps) and d.pair.stage == "forward"]
    assert max(d.figures.rel_l2 for d in last) > 0.1
    assert report.coverage.amplified in report.coverage.steps[1:]
    assert f"From step {report.coverage.amplified} on" in verdict(report)


@pytest.mark.parametrize("stages", [["forward"], ["loss"], ["backward"], ["grad", "update"]])
def test_what_is_not_asked_for_counts_in_what_is(stages):
    report = trained("full", stages=stages)
    assert report, verdict(report)
    assert {diff.pair.stage for diff in report.diffs} == set(stages)


@pytest.mark.parametrize("kept", ["weight", "weight update grad"])
def test_where_weights_are_not_recorded_a_step_may_start_from_anything(kept):
    report = trained({"*": "full", **dict.fromkeys(kept.split(), "nothing")})
    assert report, verdict(report)


@pytest.mark.parametrize("detail", ["full", "sketch"])
def test_a_weight_that_is_changed_is_found_though_rounding_has_grown_large(detail):
    report = trained(detail, fault=6)
    assert report.coverage.amplified < 6
    assert (report.first_diff.step, report.first_diff.stage) == (6, "weight")
    assert (report.first_diff.reference, report.first_diff.slot) == ("9", "weight")
