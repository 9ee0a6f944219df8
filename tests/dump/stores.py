"""Places that runs are recorded to in the tests of stores: one in memory, and moto's S3 on this machine."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from padiff.dump.store import FsspecStore

fsspec = pytest.importorskip("fsspec")


@contextlib.contextmanager
def s3_server() -> Iterator[tuple[str, Any]]:
    """moto's server on the loopback address, where the environment looks for S3: a bucket's url, and the server."""
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    moto = pytest.importorskip("moto.server", reason="moto is not installed")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    gc.freeze()  # what moto imports: a recorder that is refused collects
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "nobody")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        with contextlib.suppress(FileExistsError):  # moto's objects outlive its server
            fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
        try:
            yield "s3://bucket", server
        finally:
            server.stop()


def objects(url: str) -> list[str]:
    """The keys of what a run in a store holds."""
    return sorted(FsspecStore(url).list())
