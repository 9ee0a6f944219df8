"""``padiff port-check REFERENCE CANDIDATE``: the judge of a port, with a receipt."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from padiff.errors import UsageError
from padiff.model.given_map import GivenMap
from padiff.port_check import Options, Receipt, port_check, receipt_json, table_lines, to_markdown
from padiff.records.diagnostic import diagnostic_of
from padiff_cli.arguments import CODES, add_pair, add_selection, check_pair, paths_of, policy_of, steps_of
from padiff_cli.collecting import few_collections
from padiff_hooks.outputs import Progress, check_out, write_out
from padiff_hooks.show import STYLES

_DESCRIPTION = (
    "Judge a port on two runs, for reviewers and CI: equal start, forward, loss, gradients, update and short training, "
    "in this order. Everything that was left out or compared otherwise is listed as an exception. Exit code: 0 the "
    "runs match in every check, 1 they differ, 2 misuse, 3 cannot tell: a check had nothing to compare"
)


def add_arguments(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.description = _DESCRIPTION
    add_pair(parser)
    add_selection(parser)
    parser.add_argument("--markdown", metavar="OUT", help="write a table for a pull request; - for standard output")
    parser.add_argument("--json", metavar="OUT", help="write the receipt and the first faults as JSON; - the same")
    parser.add_argument("--receipt", metavar="OUT", help="write the receipt, for padiff verify; - the same")
    parser.set_defaults(run=_port_check)


@few_collections()
def _port_check(args: argparse.Namespace, console: Console) -> int:
    outputs = [args.markdown, args.json, args.receipt]
    for out in outputs:
        check_out(out)
    if outputs.count("-") > 1:
        raise UsageError("only one of --markdown, --json and --receipt can go to standard output")
    check_pair(args)
    paths = paths_of(args)
    shown = Console(stderr=True) if "-" in outputs else console
    with Progress(shown, "comparing") as progress:
        receipt, report = port_check(paths, options_of(args), progress)
    show(receipt, shown)
    if args.markdown:
        write_out(args.markdown, to_markdown(receipt))
    if args.receipt:
        write_out(args.receipt, receipt_json(receipt))
    if args.json:
        diagnostic = asdict(diagnostic_of(report, paths))
        write_out(args.json, json.dumps({**msgspec.to_builtins(receipt), "diagnostic": diagnostic}, indent=1))
    return CODES[receipt.outcome]


def options_of(args: argparse.Namespace) -> Options:
    """Return the options of the comparison in the form of a receipt.

    Raises:
        UsageError: an option is invalid.
    """
    policy_of(args)  # raises an error for a tolerance that is no number of at least 0
    selected = steps_of(args)
    pairs = [[_listed(side) for side in pair] for pair in GivenMap.from_value(args.layer_map)]
    return msgspec.convert(
        {
            "layer_map": pairs,
            "atol": args.atol,
            "rtol": args.rtol,
            "compare_mode": args.compare_mode,
            "steps": args.steps,
            "stages": selected.get("stages"),
            "layers": args.layer,
        },
        Options,
    )


def show(receipt: Receipt, console: Console) -> None:
    """Print a receipt's table; the verdict in its colour."""
    for k, line in enumerate(table_lines(receipt)):
        console.print(Text(line, style=STYLES[receipt.outcome] if not k else ""), soft_wrap=True)


def _listed(side: Any) -> Any:
    return list(side) if isinstance(side, tuple) else side
