"""The quick tier imports no framework."""

from __future__ import annotations

import os
import sys
from pathlib import Path

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


def test_what_imports_a_framework_is_skipped_or_caught(tmp_path):
    for name, code in (("a_file", "import paddle"), ("a_test", FOUND), ("past_the_guard", CAUGHT)):
        (tmp_path / f"test_{name}.py").write_text(code)
    options = ["--no-frameworks", "-p", "conftest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    paths = {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = run_child([sys.executable, "-m", "pytest", *options, str(tmp_path)], cwd=tmp_path, env=os.environ | paths)
    printed = done.stdout + done.stderr
    assert done.returncode == 1 and "1 passed, 2 skipped, 1 error" in printed, printed
    assert "a framework was imported all the same" in printed
