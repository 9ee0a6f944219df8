"""Faults that were given the wrong cause, or none: precision, padding, division by the accumulation, tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import padiff
from padiff.compare.declared.layers import layer_fix
from padiff.records import Layer

TOKENS, WIDTH, ROWS = 10, 8, 24


class Tagger(torch.nn.Module):
    """Where ``cast``, it enters autocast by itself, as trainers have models do."""

    def __init__(self, padding: int | None = None, zero: bool = False, cast: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(TOKENS, WIDTH)
        self.inner, self.drop = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(drop)
        self.head, self.cast = torch.nn.Linear(WIDTH, TOKENS), cast
        if padding is not None:
            weight = self.table.weight.data.clone()
            self.table = torch.nn.Embedding(TOKENS, WIDTH, padding_idx=padding)
            self.table.weight.data = weight
            if zero:
                weight[padding] = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.cast):
            return self.head(self.drop(torch.relu(self.inner(self.table(ids))))).float()


def trained(batches: int = 1, divided: float = 1.0, **options):
    model, data = Tagger(**options), np.random.default_rng(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with padiff.record(model, optimizer=optimizer) as rec:
        for _ in range(2):
            for _ in range(batches):
                ids, labels = (torch.tensor(data.integers(0, TOKENS, ROWS)) for _ in range(2))
                (torch.nn.functional.cross_entropy(model(ids), labels) / divided).backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()
    return rec.run


def test_a_run_in_a_coarser_precision_matches_and_it_is_said():
    runs = [trained(cast=cast) for cast in (False, True)]
    assert runs[1].info.environment["autocast.dtype"] == "bfloat16"
    report = padiff.compare_runs(*runs)
    assert report.passed
    (found,) = [one for one in report.settings_differ if one.kind == "precision"]
    assert tuple(found.values) == ("float32", "bfloat16") and found.about == "outputs of 3 of 5 layers"
    assert f"But one run computes in another precision: {found.text}." in " ".join(str(report).split())
    for run in runs:
        again = padiff.compare_runs(run, run)
        assert not [one for one in again.settings_differ if one.kind == "precision"]


def test_what_autocast_rounds_is_not_blamed_for_a_dropout():
    first = padiff.compare_runs(trained(), trained(cast=True, drop=0.3)).first_diff
    assert (first.reference, first.cause.kind) == ("drop", "dropout")


@pytest.mark.parametrize(("zero", "stage"), [(False, "grad"), (True, "weight")])
def test_the_row_of_a_padding_is_named(zero, stage):
    first = padiff.compare_runs(trained(), trained(padding=3, zero=zero)).first_diff
    assert (first.stage, first.reference, first.cause.proven) == (stage, "table", True)
    assert first.cause.sentence == "the layers are set differently: padding_idx none against 3"
    assert first.cause.evidence == "only row 3 of 10 differs, and that is the padding"


def test_a_table_that_differs_elsewhere_too_is_no_matter_of_padding():
    other = trained(padding=3)
    reference = trained()
    record = next(r for r in other.steps(0)[0].records if r.stage == "weight" and r.layer == "table")
    record.value[5] += 1.0
    first = padiff.compare_runs(reference, other).first_diff
    assert (first.stage, first.reference) == ("weight", "table") and first.cause.kind == "start_weights"


@pytest.mark.parametrize(
    ("divided", "kind", "said"),
    [
        ((4, 16), "scale", "the number in the first div() in the loop is 16 for the reference's 4"),
        ((16, 4), "scale", "the number in the first div() in the loop is 4 for the reference's 16"),
        ((4, 1), "accumulation", "the reference divides by 4, the candidate not at all"),
    ],
)
def test_by_what_either_side_divides_its_loss_is_said(divided, kind, said):
    runs = [trained(4, by) for by in divided]
    first = padiff.compare_runs(*runs).first_diff
    assert (first.stage, first.cause.kind, first.cause.proven) == ("backward", kind, True)
    assert first.cause.sentence.endswith(said)


def test_no_line_is_made_up_for_a_class_of_the_users():
    named = [
        ("BatchNorm2D", "paddle"),
        ("LayerNorm", "torch"),
        ("LlamaRMSNorm", "torch"),
        ("RotaryEmbedding", "paddle"),
    ]
    fixes = [layer_fix(framework, Layer("x", type=name, kind=name.lower()), "eps", 1e-5) for name, framework in named]
    assert fixes == ["paddle.nn.BatchNorm2D(..., epsilon=1e-05)", "torch.nn.LayerNorm(..., eps=1e-05)", "", ""]


def test_lines_that_lead_to_all_of_a_training_are_not_what_was_edited(monkeypatch):
    """Two trainings of one script: the lines that start them differ, and make no difference."""

    def trained():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
        with padiff.record(model) as rec:
            model(torch.randn(16, 6, generator=torch.Generator().manual_seed(1))).pow(2).mean().backward()
        return rec.run

    reference = trained()
    norm = torch.nn.functional.layer_norm
    monkeypatch.setattr(torch.nn.functional, "layer_norm", lambda x, s, w, b, eps: norm(x, s, w, b, 0.1))
    candidate = trained()
    cause = padiff.compare_runs(reference, candidate).first_diff.cause
    assert cause.proven and "epsilon" in cause.sentence, cause
    assert not any("trained()" in (line.code or "") for line in cause.lines if line is not None), cause
