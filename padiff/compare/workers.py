"""Measuring on several cores or machines: workers or executors measure the next steps while one is judged."""

from __future__ import annotations

import math
import os
import pickle
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from padiff.align import Alignment
from padiff.compare.measure.measure_step import measured
from padiff.dump import open_run
from padiff.dump.store import is_location
from padiff.errors import PadiffError, UsageError
from padiff.pair.merge_ranks import merge_ranks
from padiff.pair.plans import PairPlans, pairs_in_one
from padiff.records import SIDES, Both, Pair, Problem, Record, Run, Step
from padiff.records.pair_table import fact_of_pairs, pair_schema_of
from padiff.records.step_diffs import StepDiffs, empty_rows
from padiff.system.process import exit_with_parent
from padiff.system.terminal import warn

# Assumed number of parallel tasks of an executor that does not report it.
_USUAL = 8
_FORMS = (
    "a concurrent.futures.Executor, a dask.distributed Client or a ray.util.multiprocessing.Pool "
    "(whose import of ray stays with you)"
)


class NotVisibleError(UsageError):
    """Error of an executor's worker that can't see a run."""


def executor_of(given: Any) -> Executor:
    """Return the executor for the argument of ``compare_runs(executor=...)``.

    Args:
        given: a `concurrent.futures.Executor`; a ``dask.distributed.Client``; a ``ray.util.multiprocessing.Pool``.

    Raises:
        UsageError: the argument is none of these.
    """
    if isinstance(given, Executor):
        return given
    if callable(getattr(given, "get_executor", None)):  # dask's client, whose `submit` returns futures of another kind
        inner = given.get_executor()
        if isinstance(inner, Executor):
            return inner
    module = type(given).__module__
    if module.startswith("multiprocessing"):
        raise UsageError(
            f"executor has to be {_FORMS}, got a multiprocessing.Pool: it never says that one of its processes was "
            "killed. Take concurrent.futures.ProcessPoolExecutor"
        )
    if callable(getattr(given, "apply_async", None)):
        return _PoolExecutor(given)
    raise UsageError(f"executor has to be {_FORMS}, got {module}.{type(given).__qualname__}")


class _PoolExecutor(Executor):
    """Executor for a pool with ``apply_async(function, arguments, {}, callback, error_callback)``, such as ray's.

    Args:
        pool: the pool, which stays open.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._max_workers = getattr(pool, "_processes", None)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def failed(error: object) -> None:
            future.set_exception(error if isinstance(error, BaseException) else RuntimeError(str(error)))

        self._pool.apply_async(fn, args, kwargs, callback=future.set_result, error_callback=failed)
        return future


def width_of(executor: Executor) -> int:
    """Return the number of tasks an executor works on at a time, or a default if unknown."""
    client = getattr(executor, "_client", None)
    if client is not None and callable(getattr(client, "nthreads", None)):  # dask's
        return max(1, int(sum(client.nthreads().values())))
    count = getattr(executor, "_max_workers", None)
    return count if isinstance(count, int) and count > 0 else _USUAL


def shown_to_workers(given: Sequence[object]) -> list[str]:
    """Return the paths of the two runs for workers elsewhere: addresses of stores, and absolute paths.

    Raises:
        UsageError: a run is not a path, so that only this process can read it.
    """
    addresses = []
    for side, run in zip(SIDES, given):
        if not is_location(run):
            raise UsageError(
                f"with an executor, the {side} has to be a path or a store's address that its workers can see, too; "
                f"got {type(run).__qualname__}, which is in this process alone. Record it into a folder, or leave the "
                "executor away"
            )
        addresses.append(str(run) if "://" in str(run) else os.path.abspath(str(run)))
    return addresses


def opened(paths: Sequence[str], identities: Sequence[str] | None) -> Both[Run]:
    """Open the two runs in a worker.

    Args:
        identities: expected identities of the recordings; `None` if the worker runs on the caller's machine.

    Raises:
        NotVisibleError: the worker finds no run at a path, or another recording.
    """
    if identities is None:
        return Both(*map(open_run, paths))
    runs: list[Run] = []
    for side, path, identity in zip(SIDES, paths, identities):
        try:
            run = open_run(path)
        except (PadiffError, OSError, ImportError, ValueError) as error:
            raise NotVisibleError(_not_seen(side, path, f"it can't be opened there: {error}")) from None
        if run.info.identity != identity:
            raise NotVisibleError(_not_seen(side, path, "another recording lies there"))
        runs.append(run)
    return Both(*runs)


def _not_seen(side: str, path: str, why: str) -> str:
    return (
        f"a worker of the executor (process {os.getpid()} on {socket.gethostname()}) does not see the {side} at "
        f"{path}: {why}. Workers read the runs themselves: put both where every worker sees them under the same path "
        "(a shared file system, a store such as s3://), or compare without an executor"
    )


# Seconds of measuring on one core: for a pair of tensors, for each of its elements, and for a pair of sketches among
# many; and seconds to send a step to another process and back.
_PAIR, _ELEMENT, _AMONG_MANY, _SENT = 5e-5, 2e-9, 4e-6, 1e-3
# Seconds of measuring that justify one more process, which takes some 0.3 s to start; and seconds more for each record
# of a step, because each process pairs the records itself.
_EACH, _PAIRED = 0.75, 2.5e-5
# Least seconds of measuring for each process, if a step is divided among processes.
_PART = 0.1
# Most processes for each core, even if more are requested.
_PER_CORE = 4
# Environment that keeps numpy in the worker processes from starting threads.
_ALONE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class _Part(NamedTuple):
    """Measurements of some pairs of a step, as arrays, which cross process boundaries faster than objects.

    Attributes:
        places: indices of the pairs among the step's pairs.
        rows, problems, odd: fields of `StepDiffs`, for these pairs.
    """

    places: np.ndarray
    rows: np.ndarray
    problems: dict[int, Problem]
    odd: dict[int, tuple[int, ...]]


# Number of the step's pairs, and measurements of some of them.
_Measured = tuple[int, _Part]
_Job = tuple[Both[Run], Alignment, frozenset[str], tuple[float, float] | None, PairPlans]


def check_workers(workers: int | None) -> None:
    """Check a number of processes.

    Raises:
        UsageError: the value is no whole number of at least 1.
    """
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 1):
        raise UsageError(f"workers is how many processes measure, at least 1, got {workers!r}")


class Workers:
    """Workers that measure later steps of two runs while one step is judged; a context manager.

    Without an executor the workers are processes, which start if this saves time and end with the context. A given
    executor is used from the second step on, or at once for a large step, and stays open. Steps that the workers fail
    to measure are measured by the caller, so reports and errors do not depend on the workers.

    Args:
        paths: paths of the two runs, in the form that `padiff.dump.open_run` accepts.
        numbers: the numbers in each run of the steps to compare, in order.
        count: most processes; 1 for no workers. Default: one for each core, if this saves time. There are never more
            processes than parts of steps, nor more than four for each core. With an executor: number of tasks that it
            runs at a time. Default: the executor's own number.
        executor: executor that measures in place of processes. Default: none.
        identities: with an executor, the identities of the two recordings, so that no worker measures other ones.
    """

    def __init__(
        self,
        paths: Sequence[str],
        numbers: Iterable[Both[int]],
        count: int | None = None,
        executor: Executor | None = None,
        identities: Sequence[str] | None = None,
    ) -> None:
        self._paths, self._count = list(paths), count
        self._given, self._identities = executor, identities
        self._left = deque(numbers)
        self._ahead: deque[tuple[Both[int], list[Future[_Measured]]]] = deque()
        self._pool: Executor | None = None
        self._started = self._said = False
        self._job: tuple[Any, bytes] = (None, b"")

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # An idle process ends by itself; a process that is killed while it starts may print a traceback.
        self._close(kill=kind is not None or bool(self._ahead))

    def start(self, step: Step) -> None:
        """Start the processes, if they save time for the remaining steps; the processes become ready later."""
        if self._started or (self._count == 1 and self._given is None):
            return
        self._started = True
        if self._given is not None:
            self._pool, self._count = self._given, self._count or width_of(self._given)
            return
        seconds = (_seconds(step.records) - _SENT) * len(self._left)
        each = _EACH + len(step.records) * _PAIRED
        if self._count is None and seconds < 2 * each:
            return
        try:
            from loky import ProcessPoolExecutor, cpu_count  # takes too long to import for short comparisons

            count = self._count or min(cpu_count(), int(seconds / each))
            # More processes than parts of steps would idle; too many for each core would only use memory.
            count = min(count, len(self._left) * _parts(step), _PER_CORE * cpu_count())
            if count > 1:
                self._count = count
                self._pool = ProcessPoolExecutor(
                    count, env=_ALONE, initializer=exit_with_parent, initargs=(os.getpid(),)
                )
                self._pool.submit(_ready)
        except Exception:  # no semaphores, no memory, no more processes: the comparison goes on in this one
            self._close()

    @property
    def at_work(self) -> bool:
        """Return True if workers are running."""
        return self._pool is not None

    def diffs(
        self,
        numbers: Both[int],
        pairs: Sequence[Pair],
        alignment: Alignment,
        stages: Collection[str],
        elementwise: tuple[float, float] | None,
    ) -> StepDiffs | None:
        """Return the diffs of one step's pairs, not judged yet; `None` if the workers have not measured the step.

        The call also submits the following steps, with the same alignment, stages and elementwise tolerance.
        """
        if self._pool is None:
            return None
        if self._job[0] is not alignment:
            self._again()
            plain = replace(alignment, storage=None)  # all storage ambiguities are resolved
            self._job = alignment, pickle.dumps((self._paths, self._identities, plain, frozenset(stages), elementwise))
        try:
            self._submit(numbers, fact_of_pairs(pairs, _seconds_of))
            if not self._ahead or self._ahead[0][0] != numbers:
                return None
            parts = [future.result() for future in self._ahead.popleft()[1]]
        except NotVisibleError:
            raise  # every worker has the same problem
        except BrokenExecutor as error:  # a process was killed, for example out of memory
            self._say(numbers, error, "all that is left is measured in this process")
            self._close()
            return None
        except _failures() as error:  # this process measures the step again and raises its error
            self._say(numbers, error, "such steps are measured in this process")
            return None
        if sum(len(part.places) for _, part in parts) != len(pairs) or any(total != len(pairs) for total, _ in parts):
            return None  # the step was recorded again after the workers read it
        rows = empty_rows(len(pairs))
        problems: dict[int, Problem] = {}
        odd: dict[int, tuple[int, ...]] = {}
        for _, part in parts:
            rows[part.places] = part.rows
            places = part.places.tolist()
            problems.update((places[k], problem) for k, problem in part.problems.items())
            odd.update((places[k], index) for k, index in part.odd.items())
        return StepDiffs(pairs, pair_schema_of(pairs), rows, problems, odd)

    def _say(self, numbers: Both[int], error: BaseException, so: str) -> None:
        """Warn, once, that an executor fails to measure. (Failures of padiff's own processes need no warning.)"""
        if self._given is not None and not self._said:
            self._said = True
            # Lines after the first are the worker's traceback.
            about = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
            text = f"the executor did not measure step {numbers.reference} ({about}); {so}. The report is the same"
            warn(text)

    def _submit(self, numbers: Both[int], seconds: float) -> None:
        """Submit the next steps, including the requested step if it is large."""
        assert self._pool is not None and self._count is not None
        if self._left and self._left[0] == numbers:
            parts = min(self._count, int(seconds / _PART))
            if parts < 2:
                self._left.popleft()  # too small to divide: the caller measures this step
        while self._left and len(self._ahead) < 2 * self._count:
            step = self._left.popleft()
            # The last steps are divided, so that all processes finish at the same time.
            parts = max(1, min(self._count // (len(self._left) + 1), int(seconds / _PART)))
            futures = [self._pool.submit(measure_part, self._job[1], step, part, parts) for part in range(parts)]
            self._ahead.append((step, futures))

    def _again(self) -> None:
        """Cancel the submitted steps, and queue them again, because the alignment has changed."""
        for step, futures in reversed(self._ahead):
            self._left.appendleft(step)
            for future in futures:
                future.cancel()
        self._ahead.clear()

    def _close(self, kill: bool = True) -> None:
        if self._pool is not None and self._pool is not self._given:
            self._pool.shutdown(wait=True, kill_workers=kill)  # type: ignore[call-arg]  # loky's
        elif self._pool is not None:
            for _, futures in self._ahead:
                for future in futures:
                    future.cancel()  # so that the owner's next tasks need not wait
        self._pool = None
        self._ahead.clear()


def measure_part(job: bytes, numbers: Both[int], part: int, parts: int) -> _Measured:
    """Measure one part of a step's pairs; runs in a worker.

    Pairs are dealt out by decreasing size, so that the parts take equally long.

    Args:
        job: the pickled paths of the runs, their identities, alignment, stages, elementwise tolerance.
        numbers: the step's number in each run.
        part, parts: index of the part, and number of parts.

    Returns:
        The number of the step's pairs, and the measurements of the part.
    """
    runs, alignment, stages, elementwise, plans = _opened(job)
    steps = runs.zip(numbers).map(lambda side: merge_ranks(side[0].steps(side[1])))
    pairs = pairs_in_one(steps, runs.map(lambda run: run.info), alignment, stages, plans)
    chosen: Sequence[int] = range(len(pairs))
    if parts > 1:
        chosen = sorted(chosen, key=lambda k: -_seconds([pairs[k].anchor]))[part::parts]
    diffs = measured([pairs[k] for k in chosen] if parts > 1 else pairs, elementwise)
    return len(pairs), _Part(np.array(chosen, np.intp), diffs.rows, dict(diffs.problems), dict(diffs.odd))


# Latest job of each thread, because an executor's workers may be threads of one process.
_LATEST = threading.local()


def _opened(job: bytes) -> _Job:
    if getattr(_LATEST, "job", None) != job:
        paths, identities, alignment, stages, elementwise = pickle.loads(job)
        _LATEST.opened = opened(paths, identities), alignment, stages, elementwise, PairPlans()
        _LATEST.job = job
    job_objects: _Job = _LATEST.opened
    return job_objects


def _failures() -> tuple[type[BaseException], ...]:
    """Return the exception types of a failed task, including asyncio's cancellation, which is no `Exception`.

    Only a process that imported asyncio can raise the latter.
    """
    asyncio = sys.modules.get("asyncio")
    return (Exception,) if asyncio is None else (Exception, asyncio.CancelledError)


def _ready() -> None:
    """Do nothing: a process that finishes this first task has imported all its modules."""


def _parts(step: Step) -> int:
    """Return the number of parts into which a step like this one may be divided."""
    return max(1, int(_seconds(step.records) / _PART))


def _seconds_of(pairs: Sequence[Pair]) -> float:
    """Estimate the seconds to measure pairs."""
    return _seconds([pair.anchor for pair in pairs])


def _seconds(records: Iterable[Record]) -> float:
    """Estimate the seconds to measure the pairs of these records on one core."""
    return sum(map(_seconds_of_record, records))


def _seconds_of_record(record: Record) -> float:
    if record.source.sketched:
        return _AMONG_MANY
    return _PAIR + _ELEMENT * math.prod(record.shape)
