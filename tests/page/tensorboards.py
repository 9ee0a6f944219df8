"""A TensorBoard with the page's plugin, as a user starts it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

from hard.children import started

ROOT = Path(__file__).resolve().parents[2]


def declared() -> str:
    """What `pyproject.toml` has an installer declare for TensorBoard."""
    found = re.search(r"\[project\.entry-points\.tensorboard_plugins\]\n(.+)\n", (ROOT / "pyproject.toml").read_text())
    assert found is not None
    return found[1].replace('"', "")


def _as_installed(folder: Path) -> Path:
    """A folder that declares the plugin, for an environment that was installed before there was one."""
    metadata = folder / "padiff_tab-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: padiff-tab\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(f"[tensorboard_plugins]\n{declared()}\n")
    return folder


@contextlib.contextmanager
def tensorboard(logdir: Path, folder: Path) -> Iterator[str]:
    """The address of a TensorBoard over a log folder.

    Args:
        folder: an empty one, for what it needs.
    """
    path = list(filter(None, sys.path))
    if not any(one.name == "padiff" for one in entry_points(group="tensorboard_plugins")):
        path.append(str(_as_installed(folder)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", logdir, "--port", str(port), "--host", "127.0.0.1"]
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with started(
        [*command, "--load_fast=false"], env=os.environ | {"PYTHONPATH": os.pathsep.join(path)}, **options
    ) as process:
        address, end = f"http://127.0.0.1:{port}/", time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}data/plugins_listing") as answer:
                assert answer.status == 200
                break
            assert process.poll() is None, "TensorBoard has ended"
            assert time.monotonic() < end, "TensorBoard does not answer"
            time.sleep(0.2)
        yield address
