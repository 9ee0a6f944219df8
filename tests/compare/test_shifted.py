"""Batches that are the reference's of another step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kit.records import memory_run, planted, toy_info, toy_run, toy_steps

from padiff import compare_runs


def shifted(by: int, numbers=range(6), paddle: bool = True):
    """A toy run whose steps are numbered by so many more than the training's own."""
    steps = [replace(one, number=one.number + by) for one in toy_steps(numbers, paddle)]
    return memory_run(toy_info(paddle), *steps)


@pytest.mark.parametrize(
    ("by", "step", "words"),
    [
        (1, 1, "the candidate's batches are the reference's of one step earlier (here that of step 0)"),
        (-1, 0, "the candidate's batches are the reference's of one step later (here that of step 1)"),
        (3, 3, "the candidate's batches are the reference's of 3 steps earlier (here that of step 0)"),
    ],
)
def test_steps_that_are_numbered_differently_are_named(by, step, words):
    candidate = shifted(by, range(max(0, -by), 6))
    first = compare_runs(toy_run(range(6)), candidate).first_diff
    assert (first.step, first.stage) == (step, "input")
    assert first.cause.sentence.startswith(words) and "start_step" in first.cause.sentence
    assert first.cause.proven and first.message.endswith(f"Cause, proven: {first.cause.sentence} (they are equal).")


def test_a_batch_that_was_left_out_is_named():
    """From step 3 on the candidate is a batch ahead; the reference's own next batch is one step later."""
    steps = {one.number: one for one in toy_steps(range(7), True)}
    moved = [replace(steps[n if n < 3 else n + 1], number=n) for n in range(6)]
    first = compare_runs(toy_run(range(6)), memory_run(toy_info(True), *moved)).first_diff
    assert first.step == 3 and "of one step later (here that of step 4)" in first.cause.sentence
    assert first.cause.sentence.endswith("or the candidate left a batch out")


def test_batches_in_another_order_are_not_called_shifted():
    """Step 2 has the batch of step 3 and the other way round: no one shift explains both."""
    steps = {one.number: one for one in toy_steps(range(6), True)}
    order = [0, 1, 3, 2, 4, 5]
    moved = [replace(steps[order[n]], number=n) for n in range(6)]
    first = compare_runs(toy_run(range(6)), memory_run(toy_info(True), *moved)).first_diff
    assert (first.step, first.stage) == (2, "input")
    assert first.cause.sentence.startswith(
        "the candidate's batch is the reference's of step 3: the batches come in another"
    )


def test_other_batches_are_not_called_shifted():
    other = planted("(root)/input/input.x", lambda v: np.random.default_rng(9).normal(size=v.shape), at=2)
    first = compare_runs(toy_run(range(6)), toy_run(range(6), paddle=True, plant=other)).first_diff
    assert first.cause.sentence.startswith("other batches")


def test_a_step_that_cannot_be_read_explains_nothing():
    class Damaged:
        def __init__(self, run):
            self._run, self._read = run, set()

        def steps(self, number):
            from padiff.errors import RunFolderError

            if number == 0:
                raise RunFolderError("step 0 is damaged")
            return self._run.steps(number)

        def __getattr__(self, name):
            return getattr(self._run, name)

    first = compare_runs(Damaged(toy_run(range(6))), shifted(1)).first_diff
    assert first.stage == "input" and first.cause.sentence.startswith("other batches")
