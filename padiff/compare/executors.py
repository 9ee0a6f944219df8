"""Adapters that turn others' executors (process pools, dask's and ray's clients) into one interface.

Their workers read the two runs themselves, so tasks carry paths or addresses that the workers can see.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

from padiff.dump import open_run
from padiff.dump.remote_path import is_location
from padiff.errors import PadiffError, UsageError
from padiff.records import SIDES, Both, Run

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
