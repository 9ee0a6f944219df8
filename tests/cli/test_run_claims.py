"""Claims of launches of `padiff run`: those of killed processes are deleted, those of others stay."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import pytest

from padiff_cli.run.launch import Launch, delete_abandoned_claims

CHILD = """
import sys
from padiff_cli.run.launch import Launch
launch = Launch("train.py", "run", {})
assert launch.claim("0-run")
print(launch.claims, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="needs signals of POSIX")
def test_claims_of_a_killed_launch_are_deleted_and_those_of_a_live_one_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    children = [
        subprocess.Popen(  # noqa: TID251 - one is killed
            [sys.executable, "-c", CHILD], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    folders = [child.stdout.readline().strip() for child in children]
    own = Launch("train.py", "run", {})
    assert own.claim("0-run")
    stranger = tmp_path / "padiff-run-of-another-program"
    stranger.mkdir()
    try:
        children[0].kill()
        children[0].wait()
        assert all(os.path.isdir(folder) for folder in (*folders, own.claims))
        delete_abandoned_claims()
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {os.path.basename(folders[1]), os.path.basename(own.claims), stranger.name}
    finally:
        for child in children:
            child.kill()
            child.communicate()
