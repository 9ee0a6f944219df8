"""Starting trainings in processes of their own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from hard.children import run_child
from kit.forking import python_with_frameworks

TESTS = Path(__file__).resolve().parents[2]


def run(module: str, *arguments: Any) -> list[dict[str, Any]]:
    """What a module of this package prints as JSON, line by line."""
    paths = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    command = [*python_with_frameworks(), "-W", "ignore", "-m", f"integrations.trainers.{module}", *map(str, arguments)]
    done = run_child(command, timeout=280, cwd=TESTS, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
