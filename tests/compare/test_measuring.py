"""Small steps are measured several at a time: the report is the one that each step by itself gives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kit.records import info, parameter, plain, record, root, sketched_run, toy_info, toy_run, write_run

from padiff import Tolerance, compare_runs
from padiff.compare.comparison import RunComparison
from padiff.compare.judge.policy import NoisePolicy
from padiff.compare.measuring import STEPS_AT_A_TIME
from padiff.dump import open_run
from padiff.dump.storage import Storage
from padiff.errors import RunFolderError
from padiff.records import Both, Sketched, Step
from padiff.records.step_diffs import StepDiffs

STEPS = 12


def changed(steps: list[Step], number: int, site: str, factor: float) -> list[Step]:
    """The steps, with one tensor's sketch in one of them larger."""

    def of(one):
        if one.site != site or not isinstance(one.source, Sketched):
            return one
        return replace(one, source=Sketched(one.source.row * factor, one.source.size, one.source.transposed))

    return [replace(s, records=tuple(map(of, s.records))) if s.number == number else s for s in steps]


def sketched(path: Path, paddle: bool, change=lambda steps: steps) -> Path:
    run = sketched_run(toy_run(range(STEPS), paddle))
    steps = [run.steps(number)[0] for number in run.numbers()]
    return write_run(path, toy_info(paddle), change(steps), storage=Storage(pack=True))


def without_a_layer(steps: list[Step]) -> list[Step]:
    """Steps of which some lack the gradients of a layer, so that they are paired otherwise."""
    kept = [[r for r in s.records if s.number not in (5, 6) or r.stage != "backward"] for s in steps]
    return [replace(s, records=tuple(records)) for s, records in zip(steps, kept)]


CHANGES = {
    "alike": lambda steps: steps,
    "a fault": lambda steps: changed(steps, 7, "head/grad/weight", 1.1),
    "no number": lambda steps: changed(steps, 7, "head/forward/output.0", np.nan),
    "zeros": lambda steps: changed(steps, 7, "head/backward/output.0", 0.0),
    "other scales": lambda steps: [replace(s, loss_scale=2.0**s.number) for s in steps],
    "another structure": without_a_layer,
    "a gradient of rounding": lambda steps: changed(steps, 7, "body.0/grad/bias", -1e-9),
    "a step is missing": lambda steps: [s for s in steps if s.number != 4],
}

OF_REFERENCE = {"a gradient of rounding": lambda steps: changed(steps, 7, "fc1/grad/bias", 1e-9)}


def rows_of(a: Path, b: Path, together: bool, **rest) -> list[StepDiffs]:
    """The judged diffs of all steps, measured together or one step after the other."""
    runs = Both(open_run(a), open_run(b))
    comparison = RunComparison(runs.reference, runs.candidate, **rest)
    numbers = [Both(number, number) for number in comparison.common()]
    found = []
    for place, each in enumerate(numbers):
        found += comparison.rank_diffs(each, numbers[place + 1 :] if together else ())
    return found


@pytest.mark.parametrize("policy", [NoisePolicy(), NoisePolicy(0.01), Tolerance()], ids=repr)
@pytest.mark.parametrize("change", CHANGES)
def test_each_step_has_the_diffs_that_it_has_by_itself(change, policy, tmp_path):
    of_reference = OF_REFERENCE.get(change, lambda steps: steps)
    a, b = sketched(tmp_path / "a", False, of_reference), sketched(tmp_path / "b", True, CHANGES[change])
    alone, together = (rows_of(a, b, each, policy=policy) for each in (False, True))
    assert len(alone) == len(together) == (STEPS - 1 if change == "a step is missing" else STEPS)
    for one, other in zip(alone, together):
        assert one.rows.tobytes() == other.rows.tobytes()
        assert one.problems == other.problems and one.odd == other.odd
        assert [d.pair.anchor.site for d in one] == [d.pair.anchor.site for d in other]
        assert {d.pair.step for d in one} == {d.pair.step for d in other} == {one.number}


def test_steps_alike_lie_in_one_block(tmp_path):
    found = rows_of(sketched(tmp_path / "a", False), sketched(tmp_path / "b", True), True)
    # The first step shows what answers to what, and is measured by itself.
    assert len(found[0].block.rows) == 1
    assert len({id(diffs.block) for diffs in found[1:]}) == 1
    assert [diffs.in_block for diffs in found[1:]] == list(range(STEPS - 1))


@pytest.mark.parametrize("number", [1, 2, 9])
@pytest.mark.parametrize("harm", ["cut off", "gone"])
def test_what_is_wrong_with_a_later_step_shows_when_it_is_compared(number, harm, tmp_path):
    a, b = sketched(tmp_path / "a", False), sketched(tmp_path / "b", True)
    file = b / f"steps/{number:08d}/rank_0/step.safetensors"
    if harm == "cut off":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        file.unlink()
    seen: list[int] = []
    with pytest.raises(RunFolderError, match=f"{number:08d}"):
        compare_runs(a, b, each=lambda report: seen.append(report.coverage.steps[0]), workers=1)
    assert seen == list(range(number))


def full_tensors(path: Path, noise: float) -> Path:
    """A run of which half of the tensors are kept in full."""
    layers = [plain(f"fc{k}", "linear", parameters=(parameter("weight", 40, 30),)) for k in range(4)]
    steps = []
    for number in range(6):
        rng = np.random.default_rng(number)
        off = 1 + noise * np.random.default_rng(100 + number).normal(size=(40, 30))
        records = [
            record(f"fc{k}", "weight", "weight", (rng.normal(size=(40, 30)) * off).astype("f")) for k in range(4)
        ]
        steps.append(Step(number, tuple(replace(r, order=k) for k, r in enumerate(records))))
    return write_run(path, info(root(4), *layers), steps, storage=Storage(pack=True))


def test_full_tensors_are_measured_step_by_step(tmp_path):
    found = rows_of(full_tensors(tmp_path / "a", 0.0), full_tensors(tmp_path / "b", 1e-7), True)
    assert [len(diffs.block.rows) for diffs in found] == [1] * 6


def test_no_more_steps_are_read_than_are_measured_together(tmp_path):
    run = sketched_run(toy_run((0, 1)))
    first, later = run.steps(0)[0], run.steps(1)[0]
    steps = [first, *(replace(later, number=number) for number in range(1, 2 * STEPS_AT_A_TIME))]
    a, b = (write_run(tmp_path / side, toy_info(), steps, storage=Storage(pack=True)) for side in "ab")
    sizes = [len(diffs.block.rows) for diffs in rows_of(a, b, True)]
    assert sizes[0] == 1 and max(sizes) == STEPS_AT_A_TIME
