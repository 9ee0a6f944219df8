"""Choices of the reference in a replay: the candidate takes them where rounding explains its own."""

from __future__ import annotations

import numpy as np
import pytest
from compare.test_choices import EXPERTS, LIBRARY, TOKENS, Program, X
from kit.frameworks import KITS

import padiff

OTHER = {"torch": "paddle", "paddle": "torch"}


def replayed(kit, folder, other=None, **faults):
    reference = Program(kit)
    reference.run(dir_path=folder / "reference", replay_every_n_steps=1)
    candidate = Program(other or kit, flips=True, **faults)
    optimizer = candidate.kit.sgd(candidate.model.parameters(), 0.01)
    with padiff.replay(folder / "reference", candidate.model, folder / "candidate", optimizer=optimizer) as replay:
        for step in replay:
            (candidate.model(*step.inputs) ** 2).mean().backward()
            optimizer.step()
            candidate.kit.zero(optimizer)
    return replay


@pytest.mark.parametrize("across", [False, True], ids=["", "other framework"])
def test_all_rows_are_compared_where_the_candidate_takes_the_choices(kit, tmp_path, across):
    replay = replayed(kit, tmp_path, KITS[OTHER[kit.name]] if across else None)
    assert replay.report.passed, str(replay.report)
    assert any("topk() of 1 layer takes the reference's places" in note for note in replay.notes)
    errors = [d.figures.rel_l2 for d in replay.report.diffs if d.pair.stage == "forward" and d.figures is not None]
    assert max(errors) < 1e-5


def test_a_fault_of_half_a_percent_shows_beside_pinned_choices(kit, tmp_path):
    assert not replayed(kit, tmp_path, end=1.005).report.passed


def test_another_number_of_places_is_left(kit, tmp_path):
    assert not replayed(kit, tmp_path, k=3).report.passed


def test_a_choice_that_rounding_does_not_explain_is_left(kit, tmp_path):
    scores = np.zeros((TOKENS, EXPERTS), np.float32)
    scores[: TOKENS // 2, 4] = 5.0
    replay = replayed(kit, tmp_path, scores=scores)
    assert not replay.report.passed
    assert any("(topk, beyond rounding) keeps its own choice" in note for note in replay.notes)


def test_functions_are_as_before_after_a_replay(kit, tmp_path):
    library = LIBRARY[kit.name]
    before = library.topk, library.argmax
    replayed(kit, tmp_path)
    assert (library.topk, library.argmax) == before
    values, places = library.topk(kit.tensor(X[0]), 2)
    assert values.shape == places.shape
