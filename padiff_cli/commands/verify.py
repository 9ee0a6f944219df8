"""``padiff verify RECEIPT [REFERENCE CANDIDATE]``: check a receipt of ``padiff port-check`` again."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console
from rich.text import Text

from padiff.dump import open_run
from padiff.errors import UsageError
from padiff.port_check import changes, contradictions, other_recordings, port_check, read_receipt
from padiff.records import SIDES
from padiff.system.construction import has_changed
from padiff.system.terminal import printable
from padiff_cli.arguments import check_pair, paths_of
from padiff_cli.collecting import few_collections
from padiff_cli.commands.port_check import show
from padiff_hooks.outputs import Progress

HOLDS, CHANGED = 0, 1
_DESCRIPTION = (
    "Check a receipt of padiff port-check again: compare the two runs with the receipt's options, and name each field "
    "that differs now. Without runs only the form of the receipt is checked, and whether it contradicts itself: its "
    "paths are shown, and never opened. Exit code: 0 the receipt holds, whatever its outcome is, 1 something differs, "
    "2 misuse, or no receipt"
)


def add_arguments(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.description = _DESCRIPTION
    parser.add_argument("receipt", metavar="RECEIPT", help="the file that port-check --receipt wrote")
    parser.add_argument("reference", metavar="REFERENCE", nargs="?", help="the run to trust")
    parser.add_argument("candidate", metavar="CANDIDATE", nargs="?", help="the run in question")
    parser.set_defaults(run=_verify)


@few_collections()
def _verify(args: argparse.Namespace, console: Console) -> int:
    receipt = read_receipt(args.receipt)
    if (args.reference is None) != (args.candidate is None):
        raise UsageError("verify takes both runs, or none: padiff verify receipt.json runs/torch runs/paddle")
    changed = contradictions(receipt)
    remarks: list[str] = []
    others: list[str] = []
    if args.reference is not None:
        check_pair(args)
        paths = paths_of(args)
        with Progress(console, "comparing") as progress:
            now, _ = port_check(paths, receipt.options, progress)
        differing, remarks = changes(receipt, now)
        changed += differing
        others = other_recordings(receipt, now)
        for side, run in zip(SIDES, paths.map(open_run)):
            files = [file for file, digest in run.info.files.items() if has_changed(file, digest)]
            remarks += [f"{file} has changed since the {side}'s run" for file in files]
    show(receipt, console)
    console.print()
    for line in changed:
        console.print(Text(printable(f"differs  {line}"), style="bold red"), soft_wrap=True)
    for line in remarks:
        console.print(Text(printable(f"note     {line}"), style="yellow"), soft_wrap=True)
    if args.reference is None:
        what = "the receipt contradicts itself" if changed else "the receipt does not contradict itself"
        console.print(f"{what}; the runs were not compared: give them to compare them again")
    elif others and not changed:
        names = " and ".join(f"the {side}'s" for side in others)
        text = f"the receipt holds for another recording: {names} files are not those judged"
        console.print(text, style="bold", soft_wrap=True)
    else:
        console.print("the receipt does not hold" if changed else "the receipt holds", style="bold")
    return CHANGED if changed else HOLDS
