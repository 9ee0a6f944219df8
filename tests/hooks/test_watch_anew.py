"""Runs that begin anew while they are followed."""

from __future__ import annotations

import shutil

import pytest
from kit.records import planted, toy_folder, toy_info, toy_steps, write_run

from padiff_hooks.paired import PairedRuns

from .test_begun_anew import judged
from .test_identity import without_identity
from .test_paired import Growing, ended, paths, polled, shown, wait_for, watch
from .test_stream import events

# Each waits for processes of its own.
pytestmark = pytest.mark.slow

__all__ = ["paths"]

WRONG = planted("body.0/forward/output.0", lambda v: v + 1, at=1)


def killed(run: Growing) -> None:
    run.close(finished=False)


@pytest.mark.parametrize("removed", [False, True])
def test_a_run_that_begins_anew_is_compared_from_its_start(paths, removed):
    begun = []
    pairs = PairedRuns(*paths, begin=lambda recordings: begun.append(recordings) or ())
    toy_folder(paths[0], range(4))
    wrong = Growing(paths[1], paddle=True, plant=WRONG)
    wrong.write(0, 1, 2)
    assert [report.passed for report in pairs.poll()] == [True, False, True]
    killed(wrong)
    if removed:
        shutil.rmtree(paths[1])
        assert polled(pairs) == [] and not pairs.finished()
    mended = Growing(paths[1], paddle=True, existing="overwrite")
    assert polled(pairs) == [] and not pairs.finished()
    mended.write(0, 1)
    assert [report.passed for report in pairs.poll()] == [True, True]
    mended.write(2, 3)
    mended.close()
    assert polled(pairs) == [2, 3] and pairs.finished()
    assert len(begun) == 2 and begun[0].reference == begun[1].reference and begun[0].candidate != begun[1].candidate


def test_another_model_in_the_same_folder_is_aligned_anew(paths):
    toy_folder(paths[0], range(3))
    pairs, first = PairedRuns(*paths), Growing(paths[1], paddle=True)
    first.write(0)
    assert polled(pairs) == [0]
    killed(first)
    write_run(paths[1], toy_info(), toy_steps(range(3)), existing="overwrite")
    again = list(pairs.poll())
    assert [report.coverage.steps[0] for report in again] == [0, 1, 2] and all(again)
    assert all(report.coverage.share == 1 for report in again)


def test_a_resume_goes_on(paths):
    toy_folder(paths[0], range(4))
    pairs, first = PairedRuns(*paths), Growing(paths[1], paddle=True)
    first.write(0, 1)
    assert polled(pairs) == [0, 1]
    killed(first)
    resumed = Growing(paths[1], paddle=True, existing="resume")
    assert polled(pairs) == []
    resumed.write(1, 2, 3)  # from a checkpoint that is a step older
    resumed.close()
    assert polled(pairs) == [2, 3] and pairs.finished()


def test_a_run_that_begins_anew_while_a_step_is_compared_is_not_mixed_with_the_one_before(paths, monkeypatch):
    toy_folder(paths[0], range(3))
    toy_folder(paths[1], range(3), paddle=True, plant=WRONG)
    pairs = PairedRuns(*paths)
    found = pairs.poll()
    assert next(found).coverage.steps == (0,)
    toy_folder(paths[1], range(3), paddle=True, existing="overwrite")
    assert [(report.coverage.steps[0], report.passed) for report in found] == [(0, True), (1, True), (2, True)]


@pytest.mark.parametrize("other", [False, True])
def test_runs_of_an_older_padiff_begin_anew_where_steps_go_back_or_the_model_is_another(paths, other):
    toy_folder(paths[0], range(4))
    without_identity(toy_folder(paths[1], range(3), paddle=True, plant=WRONG))
    pairs = PairedRuns(*paths)
    assert polled(pairs) == [0, 1, 2]
    made = (toy_info(), toy_steps(range(3))) if other else (toy_info(True), toy_steps(range(2), paddle=True))
    shutil.rmtree(paths[1])
    without_identity(write_run(paths[1], *made))
    assert all(report.passed for report in pairs.poll()) and pairs.finished()
    assert polled(pairs) == []


def test_a_step_that_can_not_be_read_is_still_reported(paths):
    toy_folder(paths[0])
    for tensor in toy_folder(paths[1]).glob("steps/00000001/rank_0/report.json"):
        tensor.write_text("{")
    with pytest.raises(OSError, match=r"report\.json is damaged"):
        polled(PairedRuns(*paths))


@pytest.mark.parametrize("removed", [False, True])
def test_padiff_watch_says_so_and_judges_the_new_recording_only(paths, tmp_path, removed):
    logdir = tmp_path / "tb"
    toy_folder(paths[0], range(4))
    wrong = Growing(paths[1], paddle=True, plant=WRONG)
    wrong.write(0, 1, 2)
    with watch(paths, logdir) as process:
        wait_for(lambda: shown(logdir) == [0, 1, 2], 60)
        killed(wrong)
        if removed:
            shutil.rmtree(paths[1])
        mended = Growing(paths[1], paddle=True, existing="overwrite")
        mended.write(*range(4))
        mended.close()
        code, out, _ = ended(process)
    assert code == 0 and "both runs have ended; 4 steps compared" in out
    reported = out.splitlines()
    [place] = [k for k, line in enumerate(reported) if f"{paths[1]} was recorded anew: the log folder" in line]
    assert "DIFFER  step 1" in "".join(reported[:place])
    assert [line.split(",")[0] for line in reported[place + 1 : -1]] == [f"step {k}: match" for k in range(4)]
    assert judged(logdir) == [(number, True) for number in range(4)] and shown(logdir) == [0, 1, 2, 3]
    assert not [tag for tag in events(logdir, "diff").Tags()["tensors"] if tag == "0_verdict/first_diff"]
