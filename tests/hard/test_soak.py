"""A long training: memory, threads, handles and objects stay what they are; ``benchmarks/soaking.py`` is longer."""

from __future__ import annotations

import json

import pytest
from kit.forking import python_with_frameworks

from .children import run_child
from .killing import ROOT
from .soaking import verdict


@pytest.mark.parametrize(
    ("framework", "options"), [("torch", {}), ("paddle", {"detail": "sketch"})], ids=["torch, full", "paddle, sketched"]
)
def test_nothing_grows_in_300_steps(tmp_path, framework, options):
    command = ["-W", "ignore", "-m", "tests.hard.soaking", framework, str(tmp_path / "run"), "300", "--every", "75"]
    command += ["--options", json.dumps(options)]
    done = run_child([*python_with_frameworks(), *command], timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.endswith("nothing grew\n")


FLAT = {"resident_kb": 100_000, "threads": 2, "system_threads": 9, "handles": 8, "objects": 50_000}


@pytest.mark.parametrize(
    ("what", "grown"),
    [("resident_kb", 109_000), ("threads", 3), ("system_threads", 10), ("handles", 9), ("objects", 60_000)],
)
def test_what_grows_is_reported(what, grown):
    flat = [{"step": step, **FLAT} for step in (0, 100, 200, 300, 300)]
    assert verdict(flat) == []
    flat[2:-1] = [{**line, what: grown} for line in flat[2:-1]]
    assert len(verdict(flat)) == 1 and what.replace("resident_kb", "resident").split("_")[0] in verdict(flat)[0]
