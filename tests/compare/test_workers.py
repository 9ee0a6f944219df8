"""Comparing by several processes: the same report, nothing left behind, and nothing lost when one is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hard.children import started
from kit.forking import interpreter
from kit.records import info, plain, record, root, step, toy_folder, write_run

import padiff.compare.comparison
import padiff.compare.workers
from padiff import Tolerance, compare_runs
from padiff.dump import RunWriter, open_run
from padiff.dump.storage import Storage
from padiff.errors import TensorFileError, UsageError
from padiff.records import Sketched
from padiff.sketches.sketch import sketch_of

LAYERS, STEPS = 6, 7
PYTHON = sys.executable
pytestmark = pytest.mark.slow
linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes as Linux tells them")


def made(path: Path, noise: float, kind: str = "files") -> Path:
    """A run of a few steps; the candidate's noise differs from step to step, and the last step is wrong."""
    steps = []
    for number in range(STEPS):
        rng = np.random.default_rng(number)
        records = []
        for stage in ("forward", "backward"):
            for k in range(LAYERS):
                values = rng.normal(size=(8, 50 * (k + 1)))
                off = 1 + noise * rng.normal(size=values.shape) * (1e5 if number == STEPS - 1 else 1)
                records.append(record(f"l{k}", stage, "output.0", (values * off).astype(np.float32)))
        steps.append(step(number, records))
    about = info(root(LAYERS), *(plain(f"l{k}", "relu") for k in range(LAYERS)))
    if kind == "ranks":
        writer = RunWriter(path, replace(about, world_size=2))
        for one in steps:
            for rank in (0, 1):
                writer.add_step(replace(one, rank=rank))
        writer.close()
        return path
    return packed(path, about, steps) if kind == "packed" else write_run(path, about, steps)


def packed(path: Path, about, steps) -> Path:
    writer = RunWriter(path, about, storage=Storage(pack=True))
    for one in steps:
        writer.add_step(one)
    writer.close()
    return path


@pytest.fixture(autouse=True)
def _forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring processes have padiff already."""
    monkeypatch.setattr(sys, "executable", str(interpreter()))


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    return made(tmp_path / "a", 0), made(tmp_path / "b", 1e-7)


def reported(report):
    """All that a report says of its pairs."""
    return [(d.pair.step, d.pair.anchor.site, d.figures, d.passed, d.judgement, d.problem) for d in report.diffs]


def children() -> set[int]:
    """Processes that this one has started and that still run, without those that only clean up after it."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (entry / "cmdline").read_text()
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z" and "resource_tracker" not in command:
            found.add(int(entry.name))
    return found


FIXED = Tolerance(1e-6, 1e-6, "strict")


@pytest.mark.parametrize(
    ("kind", "policy", "count"),
    [("files", FIXED, 3), ("packed", None, 2), ("ranks", None, 2)],
    ids=["fixed", "noise, packed", "noise, ranks"],
)
def test_the_report_is_the_same_whatever_the_number_of_processes(kind, policy, count, tmp_path, measured_here):
    folders = made(tmp_path / "a", 0, kind), made(tmp_path / "b", 1e-7, kind)
    one = compare_runs(*folders, policy=policy, workers=1)
    assert one.first_diff.step == STEPS - 1 and len(one.diffs) == STEPS * LAYERS * 2 * (1 + (kind == "ranks"))
    assert len(measured_here) == len(one.diffs)
    measured_here.clear()
    several = compare_runs(*folders, policy=policy, workers=count)
    assert set(measured_here) == {0}  # the others measured all but the first step, which is too small to share
    assert reported(several) == reported(one) and str(several.first_diff) == str(one.first_diff)
    assert several.coverage == one.coverage


def test_one_large_step_is_shared_out_among_the_processes(runs, measured_here, monkeypatch):
    steps = [run / "steps" / f"{number:08d}" for run, number in zip(runs, (2, 3))]
    one = reported(compare_runs(*steps, workers=1))
    measured_here.clear()
    monkeypatch.setattr(padiff.compare.workers, "_PART", 1e-6)
    assert reported(compare_runs(*steps, workers=2)) == one
    assert measured_here == []


def test_sketches_are_measured_by_the_processes_too(tmp_path, measured_here):
    def sketched(path, noise):
        run = open_run(made(path.with_name(path.name + "_full"), noise))
        steps = []
        for number in run.numbers():
            (whole,) = run.steps(number)
            some = [
                replace(r, source=Sketched(sketch_of(r.value).row(), r.value.size)) if r.stage == "forward" else r
                for r in whole.records
            ]
            steps.append(replace(whole, records=tuple(some)))
        return packed(path, run.info, steps)

    folders = sketched(tmp_path / "a", 0), sketched(tmp_path / "b", 1e-7)
    one = compare_runs(*folders, workers=1)
    assert one.coverage.sketched == STEPS * LAYERS
    measured_here.clear()
    assert reported(compare_runs(*folders, workers=2)) == reported(one)
    assert set(measured_here) == {0}


@linux
def test_small_comparisons_start_no_process(runs, measured_here):
    before = children()
    seen = []
    compare_runs(*runs, progress=lambda done, total: seen.append(children()))
    assert set(map(frozenset, seen)) == {frozenset(before)}
    assert set(measured_here) == set(range(STEPS))


@linux
def test_runs_in_memory_are_measured_here(runs, measured_here):
    before = children()
    seen = []
    opened = [open_run(run) for run in runs]
    compare_runs(*opened, workers=2, progress=lambda done, total: seen.append(children()))
    assert set(map(frozenset, seen)) == {frozenset(before)}
    assert set(measured_here) == set(range(STEPS))


@linux
def test_no_process_and_no_handle_is_left(runs):
    compare_runs(*runs, workers=2)  # what the library keeps for the next time is there from now on
    before, handles = children(), len(os.listdir("/proc/self/fd"))
    during = []

    def progress(done, total):
        during.append(len(children() - before))

    def failing(done, total):
        progress(done, total)
        if done == 3:
            raise KeyboardInterrupt

    for how in (progress, failing):
        with pytest.raises(KeyboardInterrupt) if how is failing else contextlib.nullcontext():
            compare_runs(*runs, workers=2, progress=how)
        assert max(during) == 2
        end = time.monotonic() + 20
        while (children() - before or len(os.listdir("/proc/self/fd")) > handles) and time.monotonic() < end:
            time.sleep(0.01)
        assert children() == before and len(os.listdir("/proc/self/fd")) <= handles
        during.clear()


STUCK = """
import sys, time
import padiff
if __name__ == "__main__":
    def progress(done, total):
        if done == 2:
            print("measuring", flush=True)
            time.sleep(600)
    padiff.compare_runs(*sys.argv[1:], workers=2, progress=progress)
"""


def working(parent: int) -> set[int]:
    """Measuring processes that a process has started."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, ppid = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (entry / "cmdline").read_text()
            if int(ppid) == parent and state != "Z" and "LokyProcess" in command:
                found.add(int(entry.name))
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@linux
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_measuring_processes_end_with_the_one_that_started_them(runs, how, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(STUCK)
    with started([PYTHON, str(script), *map(str, runs)]) as process:
        assert process.stdout.readline() == "measuring\n"
        pids = working(process.pid)
        assert len(pids) == 2
        process.send_signal(how)
        process.wait()
        end = time.monotonic() + 20
        while any(map(alive, pids)) and time.monotonic() < end:
            time.sleep(0.05)
        assert not [pid for pid in pids if alive(pid)]


@linux
def test_a_process_that_is_killed_changes_nothing(runs):
    one = reported(compare_runs(*runs, workers=1))
    before = children()

    def kill(done, total):
        if done == 3:
            for pid in children() - before:
                os.kill(pid, signal.SIGKILL)

    assert reported(compare_runs(*runs, workers=2, progress=kill)) == one


@linux
@pytest.mark.parametrize(("count", "cores", "started"), [(9999, 64, STEPS), (9999, 1, 4), (3, 64, 3)])
def test_no_more_processes_are_started_than_there_is_work_and_cores_for(runs, count, cores, started, monkeypatch):
    import loky

    monkeypatch.setattr(loky, "cpu_count", lambda: cores)
    asked = []

    def noted(number, *rest, **more):
        asked.append(number)
        raise PermissionError("how many were asked for is enough")

    monkeypatch.setattr(loky, "ProcessPoolExecutor", noted)
    assert compare_runs(*runs, workers=count).first_diff.step == STEPS - 1
    assert asked == [started]


def test_where_no_process_can_be_started_this_one_measures(runs, monkeypatch, measured_here):
    import loky

    def refused(*_, **__):
        raise PermissionError("no semaphores here")

    monkeypatch.setattr(loky, "ProcessPoolExecutor", refused)
    assert compare_runs(*runs, workers=2).first_diff.step == STEPS - 1
    assert set(measured_here) == set(range(STEPS))


@pytest.mark.parametrize("workers", [1, 2])
def test_of_several_damaged_tensors_the_first_is_reported_whatever_the_number_of_workers(runs, workers):
    dump = runs[1] / "steps" / "00000004" / "rank_0" / "tensors"
    for path in dump.glob("*-forward-l[135]-*"):
        path.write_bytes(b"")
    with pytest.raises(TensorFileError, match=r"l1/forward/output\.0"):
        compare_runs(*runs, workers=workers)


@pytest.mark.parametrize("workers", [0, -1, True, 1.5, "2"])
def test_a_number_of_workers_that_is_none_is_refused(runs, workers):
    with pytest.raises(UsageError, match="workers is how many processes measure, at least 1, got"):
        compare_runs(*runs, workers=workers)


def test_a_script_without_a_guard_is_not_run_again_and_imports_no_asyncio(tmp_path):
    toy_folder(tmp_path / "a", range(6))
    toy_folder(tmp_path / "b", range(6))
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, padiff\nprint('once')\nreport = padiff.compare_runs('a', 'b', workers=2)\n"
        "print(bool(report), 'asyncio' in sys.modules)\n"
    )
    done = subprocess.run([PYTHON, script], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.stdout, done.stderr, done.returncode) == ("once\nTrue False\n", "", 0)


def test_what_the_first_step_shows_of_the_alignment_holds_for_the_processes(runs, measured_here, monkeypatch):
    cut = frozenset({("l1", "l1")})
    monkeypatch.setattr(padiff.compare.comparison, "other_boundaries", lambda *_: cut)
    one, several = (compare_runs(*runs, workers=count) for count in (1, 2))
    assert reported(several) == reported(one)
    forward = {d.pair.step for d in several.diffs if d.pair.anchor.site == "l1/forward/output.0" and d.compared}
    assert forward == set()
    monkeypatch.setattr(padiff.compare.workers, "_PART", 1e-6)
    measured_here.clear()
    assert reported(compare_runs(*runs, workers=2)) == reported(one)
    assert measured_here == [0] * 4  # outputs and gradients of l1, which have no partner any more
