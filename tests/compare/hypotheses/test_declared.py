"""What optimizers declare differently is proven where the updates come out with it, and not where they do not."""

from __future__ import annotations

import torch

import padiff
from compare.hypotheses.trainings import changed, torch_run

STEPS = 4


def adam(beta2, **more):
    return lambda model: torch.optim.Adam(model.parameters(), 1e-3, betas=(0.9, beta2), **more)


def damped(momentum, dampening):
    return lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=momentum, dampening=dampening)


def cause_of(one, other):
    return padiff.compare_runs(one, other).first_diff.cause


def test_a_setting_that_is_declared_is_proven_by_the_updates():
    cause = cause_of(torch_run(adam(0.999), STEPS), torch_run(adam(0.9), STEPS))
    assert (cause.kind, cause.proven) == ("optimizer_setting", True), cause.text
    assert "beta2 0.999 against 0.9" in cause.sentence and "explains the difference" in cause.evidence


def test_it_is_proven_where_every_tensor_passes_as_well():
    report = padiff.compare_runs(torch_run(adam(0.999), STEPS), torch_run(adam(0.9985), STEPS))
    first = report.first_diff
    assert first.diff is None and "No tensor differs" in first.message
    assert (first.cause.kind, first.cause.proven) == ("optimizer_setting", True), first.cause.text


def test_several_settings_are_proven_together():
    cause = cause_of(torch_run(damped(0.8, 0.1), STEPS), torch_run(damped(0.0, 0.0), STEPS))
    assert (cause.kind, cause.proven) == ("optimizer_setting", True), cause.text


def test_what_is_declared_and_not_done_is_not_proven():
    other = torch_run(adam(0.9), STEPS)
    # The updates are not those of what is declared: they shrink as well.
    wrong = changed(
        other, lambda r, v: v * (0.9 + 0.02 * (v > 0)) if r.stage == "update" and r.layer != "(loop)" else None
    )
    cause = cause_of(torch_run(adam(0.999), STEPS), wrong)
    assert not cause.proven, cause.text
