"""transformers' Trainer against PaddleFormers', each with its own LLaMA: clean, and with planted faults."""

from __future__ import annotations

import importlib.util

import pytest

import padiff

from .trainers.running import run
from .trainers.table import FAULTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("transformers", "paddleformers")),
        reason="transformers and PaddleFormers are not both installed: .ci/run says how they are",
    ),
]

OF_TRANSFORMERS = [name for name, fault in FAULTS.items() if fault.of_reference or fault.both]
OF_PADDLEFORMERS = [name for name, fault in FAULTS.items() if not fault.of_candidate]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    run("child", "hf", folder, "clean", *OF_TRANSFORMERS)
    run("child", "pf", folder, "clean", *OF_PADDLEFORMERS)
    return folder


@pytest.mark.timeout(900)
def test_the_clean_pair_matches_and_faults_are_placed_and_named(folder):
    # One test: the trainings take longer than all comparisons.
    report = padiff.compare_runs(folder / "hf_clean", folder / "pf_clean")
    assert report.passed, report.first_diff.message
    assert report.coverage.steps == tuple(range(6))
    assert not report.coverage.reference_unrecorded and not report.coverage.candidate_unrecorded
    for stage, parameters in (("weight", 21), ("grad", 21), ("update", 21)):
        compared = {d.pair.anchor.layer for d in report.diffs if d.pair.stage == stage and d.compared}
        compared -= {"(loop)", "model.rotary_emb"}  # the one has norms and rates, the other a table and no parameter
        assert len(compared) == parameters

    wrong = {}
    for name, fault in FAULTS.items():
        reference = folder / (f"hf_{name}" if name in OF_TRANSFORMERS else "hf_clean")
        first = padiff.compare_runs(reference, folder / f"pf_{name}").first_diff
        assert first is not None, name
        cause = f"{first.cause.sentence} ({first.cause.evidence})" if first.cause else ""
        placed = (first.step, first.stage) == (fault.step, fault.stage) and fault.layer in ("", first.reference)
        named = any(word in cause for word in fault.words)
        if not placed or not named:
            wrong[name] = first.message
    assert not wrong
