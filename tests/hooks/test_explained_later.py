"""A first diff that sketches showed, and whose cause a later step proves, which both recorders kept in full."""

from __future__ import annotations

import json

import numpy as np
import pytest
from kit.frameworks import TORCH

import padiff
from padiff_hooks.news import News
from padiff_hooks.paired import PairedRuns
from padiff_hooks.stream import DiffStream

# Larger than what is kept whole of the first step.
ROWS, INPUTS, WIDTH, CLASSES, STEPS = 64, 40, 72, 10, 7


def net(kit, fault=""):
    class Block(kit.Layer):
        def __init__(self, fault=""):
            super().__init__()
            self.norm, self.up, self.down = (
                kit.layernorm(WIDTH),
                kit.Linear(WIDTH, 2 * WIDTH),
                kit.Linear(2 * WIDTH, WIDTH),
            )
            self.fault = fault

        def forward(self, x):
            fault = self.fault
            y = self.down(kit.gelu(self.up(self.norm(x)), approximate=fault == "tanh"))
            y = y * 0.9 if fault == "scaled" else y
            return y if fault == "residual" else y - x if fault == "sign" else x + y

    return kit.Sequential(kit.Linear(INPUTS, WIDTH), Block(), Block(fault), kit.Linear(WIDTH, CLASSES))


def trained(kit, fault, folder, zoom=True, logdir=None):
    """Both trainings in step, compared as they go on; yields the reports."""
    start, other = net(TORCH), net(kit, fault)
    padiff.assign_weight(start, other)
    rng = np.random.default_rng(0)
    runs = folder / "one", folder / "other"
    pairs = PairedRuns(*runs, zoom=zoom)
    models = [(TORCH, start, TORCH.sgd(start.parameters(), 0.1)), (kit, other, kit.sgd(other.parameters(), 0.1))]
    recorders = [
        padiff.record(model, path, optimizer=optimizer, detail="sketch")
        for (_, model, optimizer), path in zip(models, runs)
    ]
    reports = []
    with recorders[0] as one, recorders[1] as two:
        for _ in range(STEPS):
            x, y = rng.standard_normal((ROWS, INPUTS)).astype("float32"), rng.integers(0, CLASSES, ROWS)
            for rec, (own, model, optimizer) in zip((one, two), models):
                loss = own.cross_entropy(model(own.tensor(x)), own.tensor(y, dtype="int64"))
                loss.backward()
                rec.log_loss(loss)
                optimizer.step()
                own.zero(optimizer)
                rec.try_dump()
                rec.flush()
            reports += pairs.poll()
    return reports, runs


FAULTS = {
    "tanh": ("activation", "tanh-form GELU"),
    "residual": ("residual_missing", "the residual is missing"),
    "scaled": ("scale", "scaled by 0.9|is 0.9"),
    "sign": ("scale", "its sign is flipped"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_cause_is_proven_by_the_step_that_was_asked_for(kit, fault, tmp_path):
    reports, runs = trained(kit, fault, tmp_path)
    kind, words = FAULTS[fault]
    first = reports[0].first_diff
    assert (first.step, first.stage) == (0, "forward") and not first.cause.proven
    (explained,) = (report for report in reports if report.explained is not None)
    assert explained.coverage.steps[0] > 0
    for found in (explained.explained, padiff.compare_runs(*runs, workers=1).first_diff):
        assert (found.step, found.reference, found.stage) == (first.step, first.reference, first.stage)
        assert found.cause.proven and any(found.cause.kind.startswith(one) for one in kind.split("|")), found.cause
        assert any(word in found.cause.sentence for word in words.split("|")), found.cause
        assert found.cause.evidence.startswith(f"at step {explained.coverage.steps[0]}, which was recorded in full, ")


def test_nothing_is_proven_where_nobody_was_asked(kit, tmp_path):
    reports, runs = trained(kit, "tanh", tmp_path, zoom=False)
    assert not any(report.explained for report in reports)
    assert not padiff.compare_runs(*runs, workers=1).first_diff.cause.proven


def test_clean_runs_are_asked_for_nothing(kit, tmp_path):
    reports, _ = trained(kit, "", tmp_path)
    assert all(report.passed and report.explained is None for report in reports)


def test_what_is_known_now_is_reported(tmp_path):
    reports, _ = trained(TORCH, "tanh", tmp_path)
    news = News()
    texts = [news.markdown(report, number > 0) for number, report in enumerate(reports)]
    (number,) = (k for k, report in enumerate(reports) if report.explained is not None)
    assert "its cause is known now: The runs differ first at step 0" in texts[number]
    assert "Cause, proven: the candidate uses tanh-form GELU" in texts[number]
    stream = DiffStream(tmp_path / "tb", padiff.records.Both("one", "other"))
    stream.begin()
    for report in reports:
        stream.write(report)
    stream.close()
    lines = [json.loads(line) for line in (tmp_path / "tb" / "diffs.jsonl").read_text().splitlines()]
    reported = [line for line in lines if "explained" in line]
    assert [line["step"] for line in reported] == [reports[number].coverage.steps[0]]
    assert reported[0]["explained"]["why"]["proven"]
