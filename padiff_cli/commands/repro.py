"""``padiff repro REFERENCE CANDIDATE --out DIR``: write the first diff as two small scripts."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from padiff.model.given_map import GivenMap
from padiff.repro import write_repro
from padiff_cli.arguments import add_pair, check_pair, policy_of
from padiff_cli.collecting import few_collections

_DESCRIPTION = (
    "Write the first diff of two runs as two short scripts, one for each side, with the recorded tensors (safetensors) "
    "and the environments, ready for an upstream issue. Each computes what differs as its run did, and exits with 1 if "
    "that is apart from what the other run recorded; they need the framework, numpy and safetensors. Exit code: 0 the "
    "runs match and nothing was written, 1 they differ and scripts were written, 2 misuse, or there is no script for "
    "this diff"
)


def add_arguments(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.description = _DESCRIPTION
    add_pair(parser)
    parser.add_argument("--out", metavar="DIR", default="repro", help="the folder to write (default: %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace the scripts that the folder holds")
    parser.set_defaults(run=_repro)


@few_collections()
def _repro(args: argparse.Namespace, console: Console) -> int:
    check_pair(args)
    repro = write_repro(
        args.reference,
        args.candidate,
        args.out,
        layer_map=GivenMap.from_value(args.layer_map),
        policy=policy_of(args),
        overwrite=args.overwrite,
    )
    if repro is None:
        console.print("The runs match: there is nothing to reproduce.", style="bold green")
        return 0
    console.print(f"The runs differ first at {repro.first.place_text}", style="bold red")
    for name, path in repro.scripts.items():
        console.print(f"  {name}: python {path}")
    for name, why in repro.reasons.items():
        console.print(f"  {name}: no script: {why}", style="yellow")
    console.print(f"Tensors, environments and a text for an issue: {repro.folder}")
    return 1
