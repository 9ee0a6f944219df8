"""Executors that others own: the same report, byte for byte, whatever becomes of their workers."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import shutil
import signal
import threading
import warnings
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pytest
from kit.records import info, plain, record, root, step, write_run

import padiff.compare.workers
from padiff import Tolerance, compare_runs
from padiff.dump import open_run
from padiff.errors import UsageError
from padiff.report_formats import to_json
from padiff_cli.main import main

STEPS = 6


def made(path: Path, noise: float) -> Path:
    """A run of a few small steps; the candidate's last step is wrong, and a value of it is infinite."""
    steps = []
    for number in range(STEPS):
        rng = np.random.default_rng(number)
        records = []
        for stage in ("forward", "backward"):
            for k in range(3):
                values = rng.normal(size=(4, 20 * (k + 1)))
                off = 1 + noise * rng.normal(size=values.shape) * (1e5 if number == STEPS - 1 else 1)
                found = (values * off).astype(np.float32)
                if noise and number == STEPS - 1 and k == 2:
                    found[0, 0] = np.inf
                records.append(record(f"l{k}", stage, "output.0", found))
        steps.append(step(number, records))
    return write_run(path, info(root(3), *(plain(f"l{k}", "relu") for k in range(3))), steps)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return made(folder / "a", 0), made(folder / "b", 1e-7)


@pytest.fixture(scope="module")
def here(runs) -> str:
    """The report that this process makes by itself."""
    return text(compare_runs(*runs, workers=1))


def text(report) -> str:
    assert report.first_diff.step == STEPS - 1
    return json.dumps(to_json(report)) + str(report)


@pytest.mark.parametrize("policy", [None, Tolerance(1e-6, 1e-6, "strict")], ids=["noise", "fixed"])
def test_an_executor_measures_all_steps_but_the_first_to_the_same_report(runs, policy, measured_here):
    alone = text(compare_runs(*runs, policy=policy, workers=1))
    measured_here.clear()
    with ThreadPoolExecutor(2) as pool, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert text(compare_runs(*runs, policy=policy, executor=pool)) == alone
        assert pool.submit(int, "1").result() == 1  # it stays open
    assert set(measured_here) == {0}


def test_parts_of_a_large_step_are_measured_by_an_executor(runs, here, measured_here, monkeypatch):
    monkeypatch.setattr(padiff.compare.workers, "_PART", 1e-6)
    with ThreadPoolExecutor(3) as pool:
        assert text(compare_runs(*runs, executor=pool)) == here
    assert measured_here == []


def test_relative_paths_are_sent_as_seen_from_the_root(runs, here, monkeypatch):
    monkeypatch.chdir(runs[0].parent)
    with ThreadPoolExecutor(1) as pool:
        assert text(compare_runs("a", "b", executor=pool)) == here


class Aside(Executor):
    """Does each task at once, with a folder where the workers of another machine would see something else."""

    def __init__(self, folder: Path, instead: Path | None = None) -> None:
        self._folder, self._instead = folder, instead

    def submit(self, fn, /, *args, **kwargs):
        future: Future = Future()
        away = self._folder.with_name("away")
        self._folder.rename(away)
        try:
            if self._instead is not None:
                shutil.copytree(self._instead, self._folder)
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)
            away.rename(self._folder)
        return future


def in_a_new_thread(call):
    """What the call gives: a thread of its own has opened no run before."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@pytest.mark.parametrize("side", [0, 1])
def test_a_run_that_workers_do_not_see_is_an_error_that_says_so(runs, side):
    with pytest.raises(UsageError, match="does not see the") as caught:
        in_a_new_thread(lambda: compare_runs(*runs, executor=Aside(runs[side])))
    assert ["reference", "candidate"][side] in str(caught.value) and str(runs[side]) in str(caught.value)
    assert "shared" in str(caught.value)


def test_another_recording_under_the_same_path_is_an_error(runs, tmp_path):
    other = made(tmp_path / "other", 1e-3)
    with pytest.raises(UsageError, match="another recording lies there"):
        in_a_new_thread(lambda: compare_runs(*runs, executor=Aside(runs[1], other)))


def test_a_run_in_memory_is_refused(runs):
    with ThreadPoolExecutor(1) as pool, pytest.raises(UsageError, match="the candidate has to be a path"):
        compare_runs(runs[0], open_run(runs[1]), executor=pool)


@pytest.mark.parametrize("given", [3, "tcp://here:8786", object()])
def test_what_is_no_executor_is_refused(runs, given):
    with pytest.raises(UsageError, match=r"executor has to be a concurrent\.futures\.Executor"):
        compare_runs(*runs, executor=given)


def test_a_pool_that_does_not_say_when_a_process_is_killed_is_refused(runs):
    with multiprocessing.get_context("spawn").Pool(1) as pool, pytest.raises(UsageError, match="ProcessPoolExecutor"):
        compare_runs(*runs, executor=pool)


class Failing(Executor):
    """Does the first task, and fails in those after it."""

    def __init__(self, error: BaseException) -> None:
        self._error, self.count = error, 0

    def submit(self, fn, /, *args, **kwargs):
        future: Future = Future()
        self.count += 1
        if self.count == 1:
            future.set_result(fn(*args, **kwargs))
        else:
            future.set_exception(self._error)
        return future


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError("lost\nits traceback"), "such steps"),
        (asyncio.CancelledError("dask's, which is no Exception"), "such steps"),
        (BrokenProcessPool("killed"), "all that is left"),
    ],
)
def test_steps_that_are_not_measured_are_measured_here_and_one_warning_says_so(runs, here, error, words, measured_here):
    with pytest.warns(RuntimeWarning) as warned:
        assert text(compare_runs(*runs, executor=Failing(error), workers=2)) == here
    (only,) = [str(one.message) for one in warned]
    assert "the executor did not measure step 2" in only and str(error).splitlines()[0] in only and words in only
    assert "traceback" not in only and set(measured_here) == {0, *range(2, STEPS)}


def test_a_process_that_is_killed_changes_nothing(runs, here):
    with ProcessPoolExecutor(1, multiprocessing.get_context("forkserver")) as pool:
        pid = pool.submit(os.getpid).result()

        def kill(done, total):
            if done == 2:
                os.kill(pid, signal.SIGKILL)

        with pytest.warns(RuntimeWarning, match="did not measure step"):
            assert text(compare_runs(*runs, executor=pool, workers=1, progress=kill)) == here


def test_after_an_error_no_task_is_left_waiting(runs):
    waiting = threading.Event()

    def stop(done, total):
        if done == 1:
            raise KeyboardInterrupt

    class Noting(ThreadPoolExecutor):
        def submit(self, *args, **kwargs):
            given.append(super().submit(*args, **kwargs))
            return given[-1]

    given: list[Future] = []
    with Noting(1) as pool:
        pool.submit(waiting.wait, 60)  # the tasks of the comparison wait behind it
        try:
            with pytest.raises(KeyboardInterrupt):
                compare_runs(*runs, executor=pool, progress=stop)
            assert len(given) > 1 and all(future.cancelled() for future in given[1:])
        finally:
            waiting.set()


class PoolLikeRays:
    """As ``ray.util.multiprocessing.Pool`` gives out tasks; ray itself is too large to be tested with everywhere."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2)

    def apply_async(self, func, args=None, kwargs=None, callback=None, error_callback=None):
        def done(future):
            if future.exception() is not None:
                error_callback(future.exception())
            else:
                callback(future.result())

        self._threads.submit(func, *args, **kwargs).add_done_callback(done)


def test_a_pool_like_rays_is_taken(runs, here, measured_here):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert text(compare_runs(*runs, executor=PoolLikeRays())) == here
    assert set(measured_here) == {0}


def test_a_pool_like_rays_tells_what_failed(runs):
    pool = PoolLikeRays()
    pool._threads = Aside(runs[0])
    with pytest.raises(UsageError, match="does not see the reference"):
        in_a_new_thread(lambda: compare_runs(*runs, executor=pool))


@pytest.fixture(scope="module")
def cluster():
    """Dask's scheduler and workers in this process."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=2, processes=False, dashboard_address=":0", silence_logs=50
    ) as made:
        yield made


def test_a_client_of_dask_is_taken(runs, here, cluster, measured_here):
    with cluster.get_client() as client, warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert text(compare_runs(*runs, executor=client)) == here
        assert set(measured_here) == {0}
        measured_here.clear()
        assert text(compare_runs(*runs, executor=client.get_executor())) == here
    assert set(measured_here) == {0}


def test_the_command_takes_the_address_of_a_dask_cluster(runs, cluster, measured_here, tmp_path):
    out = tmp_path / "out.json"
    assert main(["compare", *map(str, runs), "--dask", cluster.scheduler_address, "--json", str(out)]) == 1
    assert set(measured_here) == {0}
    alone = tmp_path / "alone.json"
    assert main(["compare", *map(str, runs), "--workers", "1", "--json", str(alone)]) == 1
    assert out.read_bytes() == alone.read_bytes()


def test_an_address_where_nothing_answers_is_refused(runs, cluster, monkeypatch, capsys):
    monkeypatch.setattr("padiff_cli.dask_cluster._ANSWER", 0.2)
    assert main(["compare", *map(str, runs), "--dask", "tcp://127.0.0.1:9"]) == 2
    assert "no scheduler answers at tcp://127.0.0.1:9" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_processes_of_dask_measure_and_one_that_is_killed_changes_nothing(runs, here):
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=50
        ) as cluster,
        cluster.get_client() as client,
    ):
        (pid,) = client.run(os.getpid).values()
        assert pid != os.getpid()
        assert text(compare_runs(*runs, executor=client)) == here

        def kill(done, total):
            if done == 2:
                os.kill(pid, signal.SIGKILL)  # its nanny starts another one

        # Whether the nanny's new process finishes the tasks, or dask fails in them, depends on the moment.
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            assert text(compare_runs(*runs, executor=client, progress=kill)) == here
    assert all("the executor did not measure step" in str(one.message) for one in warned if one.filename == "padiff")
