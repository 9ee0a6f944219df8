"""``padiff show RUN``: print the contents of a run."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from padiff.dump import open_run
from padiff.dump.store import run_folder
from padiff_cli.collecting import few_collections
from padiff_hooks.show import print_run


def add_arguments(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("path", metavar="RUN")
    parser.set_defaults(run=_show)


@few_collections()
def _show(args: argparse.Namespace, console: Console) -> int:
    print_run(open_run(args.path), run_folder(args.path, "run"), console)
    return 0
