"""The quick tier imports no framework."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hard.children import run_child

FOUND = """
def test_one():
    import torch
"""
CAUGHT = """
def test_one():
    import sys
    sys.modules["torch"] = sys
"""


@pytest.mark.parametrize(
    ("code", "reported", "status"),
    [("import paddle", "1 skipped", 5), (FOUND, "1 skipped", 0), (CAUGHT, "a framework was imported all the same", 1)],
    ids=["a file", "a test", "past the guard"],
)
def test_what_imports_a_framework_is_skipped_or_caught(tmp_path, code, reported, status):
    (tmp_path / "test_it.py").write_text(code)
    options = ["--no-frameworks", "-p", "conftest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    paths = {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = run_child([sys.executable, "-m", "pytest", *options, str(tmp_path)], cwd=tmp_path, env=os.environ | paths)
    assert reported in done.stdout + done.stderr and done.returncode == status, done.stdout + done.stderr
