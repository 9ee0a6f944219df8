"""``padiff atlas``: list operations that the installed torch and paddle compute differently."""

from __future__ import annotations

import argparse
import importlib
from typing import Any

from rich.console import Console

from padiff.errors import UsageError
from padiff_hooks.outputs import check_out


def add_arguments(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Run some hundred operations in the installed torch and paddle, called alike; print what differs, by how much, "
        "and the call that agrees. Exit code: 0 all such calls agree, 1 one does not, 2 misuse, or a framework is "
        "missing."
    )
    parser.add_argument(
        "--json", metavar="OUT", help="write the table, with what is the same, as JSON; - for standard output"
    )
    parser.add_argument(
        "--markdown", metavar="OUT", help="write it as a page; - the same. With --changes: the page of changes"
    )
    parser.add_argument(
        "--only", metavar="GROUP", action="append", default=[], help="only these probes, e.g. losses; may be repeated"
    )
    parser.add_argument(
        "--changes",
        metavar="OLD.json",
        help="say what is not as in this table, which --json wrote with other versions of torch or paddle",
    )
    parser.set_defaults(run=_atlas)


def _atlas(args: argparse.Namespace, console: Console) -> int:
    outputs = [args.json, args.markdown]
    for out in outputs:
        check_out(out)
    if outputs.count("-") > 1:
        raise UsageError("only one of --json and --markdown can go to standard output")
    atlas = importlib.import_module("padiff_atlas")
    code: int = atlas.run(console, args.only, args.json, args.markdown, args.changes)
    return code
