"""``padiff demo``: record two real trainings and compare them."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from rich.console import Console

from padiff.errors import UsageError


def add_arguments(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("dir", nargs="?", default="padiff-demo", help="where the runs go (default: %(default)s)")
    parser.set_defaults(run=_demo)


def _demo(args: argparse.Namespace, console: Console) -> int:
    try:
        demo = importlib.import_module("padiff_demo")
    except ImportError as error:
        raise UsageError(
            f"the demo trains in both frameworks, and {error.name} is not installed: pip install 'padiff-hooks[demo]'"
        ) from error
    code: int = demo.run(Path(args.dir), console)
    return code
