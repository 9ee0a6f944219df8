"""``padiff calibrate RUN MODULE:FUNCTION``: measure how rounding changes each tensor of a run, with its own model."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

import padiff
from padiff.compare.coverage import Steps
from padiff.model.given_map import GivenMap
from padiff.replaying.step_runner import RUNS
from padiff_cli.arguments import add_layer_map
from padiff_cli.commands.replay import RETURNS, made_by


def add_arguments(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Do the packed steps of a run again with its own model, moved by units in the last place and in "
        f"float64, and write what comes of it into the run. FUNCTION takes nothing; {RETURNS}. Exit code: 0, "
        "or 2 where it can't be done."
    )
    parser.add_argument("run_folder", metavar="RUN", help="a run with packs, of the framework that is installed here")
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="e.g. train:replayed, or train.py:replayed")
    parser.add_argument("--steps", metavar="N", help="only these: numbers and ranges, e.g. 0,500,1000-2000")
    parser.add_argument("--runs", metavar="N", type=int, default=RUNS, help="how often each (default: %(default)s)")
    parser.add_argument("--no-float64", action="store_true", help="not in float64")
    add_layer_map(parser)
    parser.set_defaults(run=_calibrate)


def _calibrate(args: argparse.Namespace, console: Console) -> int:
    layer_map = GivenMap.from_value(args.layer_map)
    model, optimizer, train = made_by(args.target)

    step_floors = padiff.calibrate(
        args.run_folder,
        model,
        train,
        optimizer=optimizer,
        steps=None if args.steps is None else Steps(args.steps),
        runs=args.runs,
        float64=not args.no_float64,
        layer_map=layer_map,
    )
    for floors in step_floors:
        exact = f", {len(floors.exact)} of them in float64, too" if floors.exact else ""
        text = f"step {floors.step}: floors of {len(floors.sites)} tensors, {floors.runs} runs{exact}"
        for line in (text, *floors.notes):
            console.print(line, markup=False, emoji=False)
    return 0
