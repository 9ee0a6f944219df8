"""Gradients that are left over when a step begins, and the norm of all gradients before an optimizer clips them."""

from __future__ import annotations

import numpy as np
import paddle
import pytest
from kit.nets import batch, mlp

import padiff


def steps(kit, rec, model, optimizer, clear, count=3):
    for _ in range(count):
        if clear == "before":
            kit.zero(optimizer)
        out = model(batch(kit)[0])
        if clear == "after forward":
            kit.zero(optimizer)
        (out**2).mean().backward()
        optimizer.step()
        if clear == "after":
            kit.zero(optimizer)
        rec.try_dump()


@pytest.mark.parametrize("clear", ["before", "after forward", "after", "never"])
def test_gradients_that_nobody_clears_are_noted_wherever_others_clear_theirs(kit, clear):
    model = mlp(kit)
    optimizer = kit.sgd(model.parameters())
    with padiff.record(model, optimizer=optimizer) as rec:
        steps(kit, rec, model, optimizer, clear)
    run = rec.run
    found = [run.steps(number)[0].settings.get("gradients.left_over") for number in run.numbers()]
    assert found == [None, *(["of the step before"] * 2 if clear == "never" else [None] * 2)]


def test_forgetting_to_clear_is_named_where_gradients_part(kit):
    runs = []
    for clear in ("after", "never"):
        kit.seed(0)
        model = mlp(kit)
        optimizer = kit.sgd(model.parameters(), 0.0)
        with padiff.record(model, optimizer=optimizer) as rec:
            steps(kit, rec, model, optimizer, clear)
        runs.append(rec.run)
    report = padiff.compare_runs(*runs)
    assert (report.first_diff.step, report.first_diff.stage) == (1, "grad")
    assert "gradients left over" in str([one.name for one in report.settings_differ])


def test_the_norm_is_that_of_the_gradients_before_paddle_clips_them():
    linear = paddle.nn.Linear(3, 2)
    clip = paddle.nn.ClipGradByGlobalNorm(1e-3)
    optimizer = paddle.optimizer.SGD(0.1, parameters=linear.parameters(), grad_clip=clip)
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    with padiff.record(linear, optimizer=optimizer) as rec:
        linear(paddle.to_tensor(x)).sum().backward()
        optimizer.step()
        optimizer.clear_grad()
        rec.try_dump()
    (step,) = rec.run.steps(0)
    (norm,) = [float(r.value) for r in step.records if r.slot == "clip_grad_norm().0"]
    # Of a sum, the weight's gradient is the sum of the inputs for each output, the bias's the number of rows.
    expected = np.sqrt(2 * (x.sum(0).astype(np.float64) ** 2).sum() + 2 * 4.0**2)
    assert norm == pytest.approx(expected, rel=1e-6)
    assert "_dygraph_clip" not in vars(clip)
