from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from hard.children import Child, started
from kit.forking import python_with_frameworks
from kit.records import planted, toy_folder, toy_info, toy_steps

from padiff import Tolerance
from padiff.dump import RunWriter
from padiff.errors import PadiffError, UsageError
from padiff.records import Both
from padiff_hooks.paired import PairedRuns

from .test_stream import lines, points


def polled(pairs: PairedRuns) -> list[int]:
    return [report.coverage.steps[0] for report in pairs.poll()]


class Growing:
    """A run that grows step by step."""

    def __init__(self, path: Path, paddle: bool = False, existing: str = "error", **rest: Any) -> None:
        self.path, self.steps = path, toy_steps(range(8), paddle, **rest)
        self.writer = RunWriter(path, toy_info(paddle), existing=existing)

    def write(self, *numbers: int) -> None:
        for number in numbers:
            self.writer.add_step(self.steps[number])
        self.writer.flush()

    def close(self, finished: bool = True) -> None:
        self.writer.close(finished)


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "torch", tmp_path / "paddle"


def test_a_candidate_that_starts_later_is_waited_for(paths):
    pairs = PairedRuns(*paths)
    assert pairs.started == Both(False, False) and polled(pairs) == [] and pairs.runs is None
    reference = Growing(paths[0])
    reference.write(0, 1)
    assert pairs.started == Both(True, False) and polled(pairs) == []
    candidate = Growing(paths[1], paddle=True)
    assert polled(pairs) == []
    candidate.write(0)
    assert polled(pairs) == [0]
    candidate.write(1)
    assert polled(pairs) == [1]
    assert [run.name for run in pairs.runs] == ["torch", "paddle"]
    reference.close()
    candidate.close()


def test_each_step_is_compared_once_when_the_later_side_has_it(paths):
    pairs, reference, candidate = PairedRuns(*paths), Growing(paths[0]), Growing(paths[1], paddle=True)
    seen = []
    for run, numbers in ((candidate, (0, 1, 2)), (reference, (0,)), (reference, (1, 2, 3)), (candidate, (3,))):
        run.write(*numbers)
        seen.append(polled(pairs))
    assert seen == [[], [0], [1, 2], [3]]
    assert polled(pairs) == []
    reference.close()
    candidate.close()


def test_a_pause_of_the_reference_loses_nothing_and_ends_nothing(paths):
    pairs, reference, candidate = PairedRuns(*paths), Growing(paths[0]), Growing(paths[1], paddle=True)
    reference.write(0)
    candidate.write(0, 1, 2)
    candidate.close()
    assert polled(pairs) == [0] and not pairs.finished()
    assert polled(pairs) == [] and not pairs.finished()
    reference.write(1, 2)
    reference.close()
    assert not pairs.finished()  # both have ended, but two steps wait
    assert polled(pairs) == [1, 2] and pairs.finished()


def test_a_run_that_ends_early_ends_the_pair_when_the_other_ends(paths):
    pairs, reference, candidate = PairedRuns(*paths), Growing(paths[0]), Growing(paths[1], paddle=True)
    reference.write(0, 1, 2)
    candidate.write(0)
    candidate.close()
    assert polled(pairs) == [0] and not pairs.finished()
    reference.close()
    assert polled(pairs) == [] and pairs.finished()


def test_steps_that_one_side_has_alone_are_passed_over(paths):
    toy_folder(paths[0], [0, 2, 4])
    toy_folder(paths[1], [0, 3, 4], paddle=True)
    pairs = PairedRuns(*paths)
    assert polled(pairs) == [0, 4] and pairs.finished()


def test_steps_that_were_done_before_are_not_compared_again(paths):
    toy_folder(paths[0])
    toy_folder(paths[1], paddle=True)
    pairs = PairedRuns(*paths, done=[0, 1])
    assert polled(pairs) == [2] and pairs.finished()


def test_policy_and_layer_map_reach_the_comparison(paths):
    toy_folder(paths[0], [0])
    toy_folder(paths[1], [0], paddle=True, plant=planted("head/forward/output.0", lambda v: v + 0.01))
    assert not next(PairedRuns(*paths).poll())
    assert next(PairedRuns(*paths, policy=Tolerance(atol=0.1)).poll())
    with pytest.raises(UsageError, match=r"the reference has no layer 'nosuch'"):
        polled(PairedRuns(*paths, layer_map={"nosuch": "head"}))


def test_a_damaged_run_is_reported(paths):
    toy_folder(paths[0])
    toy_folder(paths[1]).joinpath("run.json").write_text("{")
    with pytest.raises(PadiffError, match=r"run\.json is damaged"):
        polled(PairedRuns(*paths))


# -- padiff watch, as a process of its own ---------------------------------------------------------------------------


def watch(paths: tuple[Path, Path], logdir: Path, *more: str) -> AbstractContextManager[Child]:
    command = [*python_with_frameworks(), "-m", "padiff_cli.main", "watch", *map(str, paths), "--logdir", str(logdir)]
    return started([*command, "--timeout", "100", *more])  # else it waits for ever for runs that went with the tests


def wait_for(condition: Callable[[], bool], seconds: float) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "it took too long"
        time.sleep(0.05)
    return time.monotonic() - start


def shown(logdir: Path) -> list[int]:
    if not any((logdir / "diff").glob("events.*")):
        return []
    return [number for number, _ in points(logdir, "diff").get("forward_rel_l2/000 fc1", [])]


def ended(process: Child) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=30)
    assert "Traceback" not in err
    return process.returncode, out, err


def watched(paths: tuple[Path, Path], logdir: Path, *more: str) -> tuple[int, str, str]:
    with watch(paths, logdir, *more) as process:
        return ended(process)


def test_a_steps_scalars_are_out_while_the_runs_grow_and_a_match_exits_with_0(paths, tmp_path):
    logdir, reference, candidate = tmp_path / "tb", Growing(paths[0]), Growing(paths[1], paddle=True)
    with watch(paths, logdir) as process:
        reference.write(0, 1, 2)
        candidate.write(0)
        wait_for(lambda: shown(logdir) == [0], 30)  # the process has started
        for number in (1, 2):
            candidate.write(number)
            wait_for(lambda number=number: number in shown(logdir), 60)
        assert process.poll() is None
        reference.close()
        candidate.close()
        code, out, _ = ended(process)
    assert code == 0 and "both runs have ended; 3 steps compared" in out
    assert shown(logdir) == [0, 1, 2]


@pytest.mark.slow
def test_a_diff_is_reported_and_exits_with_1_and_a_restart_remembers_it(paths, tmp_path):
    toy_folder(paths[0])
    toy_folder(paths[1], paddle=True, plant=planted("body.0/forward/output.0", lambda v: v + 1, at=1))
    code, out, _ = watched(paths, tmp_path / "tb")
    assert code == 1
    assert "step 0: match" in out
    assert "DIFFER  step 1, forward: fc1 against body.0" in out
    code, out, _ = watched(paths, tmp_path / "tb")
    assert code == 1 and "3 steps compared" in out and "DIFFER  " not in out
    assert shown(tmp_path / "tb") == [0, 1, 2] and len(lines(tmp_path / "tb")) == 4


def test_a_killed_watch_goes_on_where_it_was(paths, tmp_path):
    logdir, reference, candidate = tmp_path / "tb", Growing(paths[0]), Growing(paths[1], paddle=True)
    with watch(paths, logdir):
        reference.write(0, 1, 2, 3)
        candidate.write(0, 1)
        wait_for(lambda: len(shown(logdir)) == 2, 30)
    candidate.write(2, 3)
    reference.close()
    candidate.close()
    assert watched(paths, logdir)[0] == 0
    assert shown(logdir) == [0, 1, 2, 3]
    assert [line.get("step") for line in lines(logdir)] == [None, 0, 1, 2, 3]


def test_a_watch_of_runs_that_never_start_ends_with_2_after_its_timeout(paths, tmp_path):
    toy_folder(paths[0])
    code, _, err = watched(paths, tmp_path / "tb", "--timeout", "0.2", "--interval", "0.1")
    assert code == 2
    assert re.fullmatch(r"padiff: no step was compared: .*paddle never started\n", err)
