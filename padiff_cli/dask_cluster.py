"""Client of the dask cluster that measures for ``padiff compare --dask ADDRESS``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from padiff.errors import UsageError

# Seconds in which the scheduler has to answer.
_ANSWER = 20


@contextmanager
def dask_client(address: str | None) -> Iterator[Any]:
    """Yield a client of the cluster at an address, and close it at the end; yield `None` for no address.

    Raises:
        UsageError: the package ``distributed`` is missing, no scheduler answers, or the cluster has no worker.
    """
    if address is None:
        yield None
        return
    try:
        from distributed import Client
    except ImportError as error:
        raise UsageError(f'--dask needs the package distributed: pip install "padiff-hooks[dask]" ({error})') from error
    try:
        client = Client(address, timeout=_ANSWER, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"--dask: no scheduler answers at {address} ({error}). Give the address that `dask scheduler` printed, "
            "e.g. tcp://host:8786"
        ) from error
    with client:
        if not client.nthreads():
            raise UsageError(f"--dask: the cluster at {address} has no worker: start some with `dask worker {address}`")
        yield client
