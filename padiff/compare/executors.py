"""Executors that others own: pools of processes, dask's and ray's clients, as one thing that takes tasks.

Their workers read the two runs themselves, so what they are given are paths or addresses that they can see.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

from padiff.dump import open_run
from padiff.dump.remote_path import RemotePath
from padiff.errors import PadiffError, UsageError
from padiff.records import SIDES, Both, Run

# Tasks that an executor works on at a time where it does not say.
_USUAL = 8
_FORMS = (
    "a concurrent.futures.Executor, a dask.distributed Client or a ray.util.multiprocessing.Pool "
    "(whose import of ray stays with you)"
)


class NotVisibleError(UsageError):
    """A worker of an executor can't see a run that it is to read."""


def executor_of(given: Any) -> Executor:
    """The executor that ``compare_runs(executor=...)`` means.

    Args:
        given: a `concurrent.futures.Executor`; a ``dask.distributed.Client``; a ``ray.util.multiprocessing.Pool``.

    Raises:
        UsageError: it is none of these.
    """
    if isinstance(given, Executor):
        return given
    if callable(getattr(given, "get_executor", None)):  # dask's, whose own `submit` gives other futures
        found = given.get_executor()
        if isinstance(found, Executor):
            return found
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
    """A pool with ``apply_async(function, arguments, {}, callback, error_callback)``, which ray's has.

    Args:
        pool: it; it stays its owner's, and open.
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
    """How many tasks an executor works on at a time, as far as it says."""
    client = getattr(executor, "_client", None)
    if client is not None and callable(getattr(client, "nthreads", None)):  # dask's
        return max(1, int(sum(client.nthreads().values())))
    count = getattr(executor, "_max_workers", None)
    return count if isinstance(count, int) and count > 0 else _USUAL


def shown_to_workers(given: Sequence[object]) -> list[str]:
    """The two runs as workers elsewhere can open them: addresses of stores, and paths from the root.

    Raises:
        UsageError: one is not a path: nobody but this process sees a run in memory.
    """
    found = []
    for side, run in zip(SIDES, given):
        if not isinstance(run, (str, Path, RemotePath)):
            raise UsageError(
                f"with an executor, the {side} has to be a path or a store's address that its workers can see, too; "
                f"got {type(run).__qualname__}, which is in this process alone. Record it into a folder, or leave the "
                "executor away"
            )
        found.append(str(run) if isinstance(run, RemotePath) or "://" in str(run) else os.path.abspath(run))
    return found


def opened(paths: Sequence[str], identities: Sequence[str] | None) -> Both[Run]:
    """The two runs, as a worker sees them.

    Args:
        identities: which recordings they are; `None`: the worker runs beside the process that asks.

    Raises:
        NotVisibleError: the worker sees none there, or another one.
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
