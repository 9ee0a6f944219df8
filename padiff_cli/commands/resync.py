"""``padiff resync RUN MODULE:FUNCTION``: find which item, copied from the reference, keeps two trainings equal."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console

import padiff
from padiff.model.given_map import GivenMap
from padiff.replaying.resync_experiments import STEPS
from padiff_cli.arguments import add_layer_map
from padiff_cli.commands.replay import RETURNS, made_by
from padiff_hooks.outputs import check_out, write_out


def add_arguments(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Train on from a packed step of a run with the model that a function makes: as it does by itself, "
        "then with its weights, its optimizer's state, its batches, its learning rate or its dropout's "
        "masks taken from the run in every step, and say which keeps the two together. FUNCTION takes "
        f"nothing; {RETURNS}. What the step function does itself (a rate that it sets) is the candidate's "
        "own; all else is the run's, or that of --own. Exit code: 0, or 2 where it can't be done."
    )
    parser.add_argument("reference", metavar="RUN", help="the run to trust, with a pack of each of the steps")
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="e.g. port.train:replayed, or port/train.py:replayed")
    parser.add_argument("--own", metavar="RUN", help="a run of the candidate, with packs of the same steps")
    parser.add_argument("--step", metavar="N", type=int, help="where to begin (default: the first packed one)")
    parser.add_argument("--steps", metavar="N", type=int, default=STEPS, help="for how many (default: %(default)s)")
    add_layer_map(parser)
    parser.add_argument("--json", metavar="OUT", help="write the table as JSON; - for standard output")
    parser.set_defaults(run=_resync)


def _resync(args: argparse.Namespace, console: Console) -> int:
    check_out(args.json)
    layer_map = GivenMap.from_value(args.layer_map)
    model, optimizer, train = made_by(args.target)

    table = padiff.resync(
        args.reference,
        model,
        train,
        optimizer=optimizer,
        own=args.own,
        step=args.step,
        steps=args.steps,
        layer_map=layer_map,
    )
    for line in str(table).splitlines():
        console.print(line, markup=False, emoji=False, soft_wrap=True)
    if args.json:
        write_out(args.json, json.dumps(table.plain(), indent=1))
    return 0
