"""Micro-batches, norms before clipping, prepared labels, a decay under warm-up: what trainers' users run into."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import padiff

TOKENS, LENGTH = 11, 6


class Model(torch.nn.Module):
    """Tells the next token, and shifts its labels by itself if it is asked to."""

    def __init__(self, shifts=False):
        super().__init__()
        torch.manual_seed(0)
        self.shifts, self.embed, self.head = shifts, torch.nn.Embedding(TOKENS, 8), torch.nn.Linear(8, TOKENS)

    def forward(self, ids, labels):
        logits = self.head(torch.tanh(self.embed(ids)))
        if self.shifts:
            labels = torch.cat([labels[:, 1:], torch.full((len(labels), 1), -100)], 1)
        return torch.nn.functional.cross_entropy(logits.reshape(-1, TOKENS), labels.reshape(-1))


def ids(number, count=4):
    return torch.from_numpy(np.random.default_rng(number).integers(0, TOKENS, (count, LENGTH)))


def shifted(tokens):
    return torch.cat([tokens[:, 1:], torch.full((len(tokens), 1), -100)], 1)


def run(shifts=False, labels=shifted, micro_batches=1, scale=1.0, clip=0.05, rates=(0.1,) * 3, decay=0.0):
    model = Model(shifts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rates[0], weight_decay=decay)
    with padiff.record(model, optimizer=optimizer) as rec:
        for step, rate in enumerate(rates):
            optimizer.param_groups[0]["lr"] = rate
            for part in range(micro_batches):
                tokens = ids(2 * step + part)
                loss = model(tokens, labels(tokens))
                (loss / micro_batches).backward()
            for parameter in model.parameters():
                parameter.grad.mul_(scale)
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()
    return rec.run


def test_labels_that_the_model_shifts_and_labels_that_are_given_shifted_are_the_same():
    report = padiff.compare_runs(run(shifts=True, labels=lambda tokens: tokens), run())
    assert report.passed, report.first_diff.message
    rules = {d.judgement.rule.name for d in report.diffs if d.pair.anchor.slot == "input.labels" and d.judgement}
    assert rules == {"PREPARED"}


def test_labels_that_nobody_shifts_are_reported():
    report = padiff.compare_runs(run(shifts=True, labels=lambda tokens: tokens), run(labels=lambda tokens: tokens))
    cause = report.first_diff.cause
    assert (report.first_diff.step, cause.kind) == (0, "labels_shifted")
    assert cause.proven and "the candidate's labels are not shifted" in cause.sentence


def test_other_labels_at_the_input_are_other_labels_where_the_loss_has_them_too():
    def other(tokens):
        return shifted((tokens + 1) % TOKENS)

    report = padiff.compare_runs(run(), run(labels=other))
    assert (report.first_diff.stage, report.first_diff.slot) == ("input", "input.labels")


def test_gradients_that_clipping_hides_show_in_the_norm_before_it():
    report = padiff.compare_runs(run(), run(scale=2.0))
    first = report.first_diff
    assert (first.step, first.stage, first.slot) == (0, "grad", "clip_grad_norm().0")
    assert "before they are clipped, all gradients together are 2 times the reference's" in first.cause.sentence
    # Nothing else of the step differs.
    assert [d.pair.anchor.slot for d in report.diffs if d.pair.step == 0 and not d.passed] == ["clip_grad_norm().0"]


def test_a_norm_that_nothing_is_clipped_by_is_no_news_where_gradients_show_the_same():
    report = padiff.compare_runs(run(clip=1e3), run(clip=1e3, scale=2.0))
    assert report.first_diff.stage == "grad"
    assert not all(d.passed for d in report.diffs if d.pair.stage == "grad" and d.pair.anchor.layer != "(loop)")


@pytest.mark.parametrize(("reference", "candidate"), [(2, 1), (1, 2)])
def test_a_step_of_more_micro_batches_is_reported_at_its_input(reference, candidate):
    runs = run(micro_batches=reference), run(micro_batches=candidate)
    report = padiff.compare_runs(*runs)
    assert (report.first_diff.step, report.first_diff.stage) == (0, "input")
    assert f"micro-batches {reference} against {candidate}" in report.first_diff.message


def test_a_decay_is_reported_though_the_first_rates_of_a_warm_up_are_zero():
    rates = (0.0, 5e-4, 1e-3, 1e-3)
    report = padiff.compare_runs(run(rates=rates, decay=0.1), run(rates=rates, decay=0.01))
    (found,) = [one for one in report.settings_differ if one.name == "weight_decay"]
    assert found.changes and not found.note
    assert not report.passed
