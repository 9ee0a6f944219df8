"""``padiff mcp FOLDER ...``: read-only tools on run folders, for agents."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from padiff.errors import UsageError
from padiff_cli.mcp.tools import Tools

_DESCRIPTION = (
    "Serve five read-only tools on run folders over standard input and output, by the Model Context Protocol: compare, "
    "explain, tensor, what_if, next_experiment. Each answer has at most 4 kB and names a file with the rest. Only the "
    "given folders are read"
)


def add_arguments(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.description = _DESCRIPTION
    parser.add_argument("folders", metavar="FOLDER", nargs="+", help="a run, or a folder above runs, that may be read")
    parser.set_defaults(run=_mcp)


def _mcp(args: argparse.Namespace, console: Console) -> int:
    try:
        from padiff_cli.mcp.server import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("mcp", "anyio"):
            raise
        raise UsageError("padiff mcp needs the package mcp 2 or newer: pip install 'padiff-hooks[mcp]'") from error
    with Tools(args.folders) as tools:
        serve(tools)
    return 0
