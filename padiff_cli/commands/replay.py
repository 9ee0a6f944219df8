"""``padiff replay RUN MODULE:FUNCTION``: replay packed steps with the model that a function makes."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console

import padiff
from padiff.compare.coverage import Steps
from padiff.errors import PadiffError, UsageError
from padiff.model.given_map import GivenMap
from padiff.replaying.step_runner import RUNS
from padiff.report_formats import json_parts, to_junit, to_markdown
from padiff.system.terminal import nearest
from padiff_cli.arguments import CODES, EXIT_CODES, add_layer_map, policy_of
from padiff_hooks.outputs import check_out, write_out
from padiff_hooks.show import print_report

RETURNS = (
    "it has to return (model, optimizer, step): a torch Module or a paddle Layer; its optimizer, or None; and a "
    "function that trains on one replayed step, as in `for batch in step.batches: loss = ...; loss.backward()`, then "
    "`optimizer.step()`"
)


def add_arguments(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.description = (
        "Do the packed steps of a run (recorded with replay_every_n_steps) again with the model that a "
        f"function makes, and compare each by itself. FUNCTION takes nothing; {RETURNS}. Exit code: "
        f"{EXIT_CODES}."
    )
    parser.add_argument("reference", metavar="RUN", help="the run to trust")
    parser.add_argument("target", metavar="MODULE:FUNCTION", help="e.g. port.train:replayed, or port/train.py:replayed")
    parser.add_argument("--dir", default="padiff-replay", help="where the candidate is recorded (default: %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace the run that --dir holds")
    parser.add_argument("--partial", action="store_true", help="leave what only one side has as it is")
    parser.add_argument("--steps", metavar="N", help="only these: numbers and ranges, e.g. 0,500,1000-2000")
    parser.add_argument(
        "--floors",
        metavar="N",
        type=int,
        nargs="?",
        const=RUNS,
        default=0,
        help="do each step N times more (default: %(const)s), moved by units in the last place: what rounding makes of "
        "each tensor, which the report then judges by",
    )
    parser.add_argument("--float64", action="store_true", help="do each step once more in float64, as the third side")
    add_layer_map(parser)
    parser.add_argument("--atol", type=float, help="absolute tolerance, instead of the default policy")
    parser.add_argument("--rtol", type=float, help="relative tolerance, instead of the default policy")
    parser.add_argument("--compare-mode", choices=("mean", "strict"), help="mean of the error, or every element")
    parser.add_argument("--json", metavar="OUT", help="write the report as JSON; - for standard output")
    parser.add_argument("--junit", metavar="OUT", help="write the report as JUnit XML; - the same")
    parser.add_argument("--markdown", metavar="OUT", help="write the report as Markdown; - the same")
    parser.set_defaults(run=_replay)


def _replay(args: argparse.Namespace, console: Console) -> int:
    outputs = [args.json, args.junit, args.markdown]
    for out in outputs:
        check_out(out)
    if outputs.count("-") > 1:
        raise UsageError("only one of --json, --junit and --markdown can go to standard output")
    policy, layer_map = policy_of(args), GivenMap.from_value(args.layer_map)
    model, optimizer, train = made_by(args.target)
    replay = padiff.replay(
        args.reference,
        model,
        args.dir,
        optimizer=optimizer,
        layer_map=layer_map,
        steps=None if args.steps is None else Steps(args.steps),
        policy=policy,
        existing="overwrite" if args.overwrite else "error",
        partial=args.partial,
        floors=args.floors,
        float64=args.float64,
    )
    with replay:
        for step in replay:
            try:
                train(step)
            except PadiffError:
                raise
            except Exception as error:  # in float64 alone: see `made_by`
                replay.give_up(f"not run in float64: {type(error).__name__}: {error}")
    report = replay.report
    print_report(report, console)
    if args.json:
        write_out(args.json, json_parts(report))
    if args.junit:
        write_out(args.junit, to_junit(report))
    if args.markdown:
        write_out(args.markdown, to_markdown(report))
    return CODES[report.outcome]


def made_by(target: str) -> tuple[Any, Any, Callable[[Any], object]]:
    """Return the model, the optimizer and the step function that the target function returns.

    An error of the step function becomes a `UsageError` that names the target and the step. In a float64 step the
    error stays as it is, so that the caller can go on without float64.

    Args:
        target: ``MODULE:FUNCTION`` or ``FILE.py:FUNCTION``.

    Raises:
        UsageError: the function does not exist, failed, or returned something else.
    """
    name, _, function = target.rpartition(":")
    if not name or not function:
        raise UsageError(f"expected MODULE:FUNCTION (port.train:replayed, or port/train.py:replayed), got {target!r}")
    module = _imported(name)
    make = getattr(module, function, None)
    if not callable(make):
        functions = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise UsageError(f"{name} has no function {function!r}. {nearest(function, functions)}")
    try:
        parts = make()
    except PadiffError:
        raise
    except Exception as error:
        raise UsageError(f"{target} failed: {type(error).__name__}: {error}") from error
    if not isinstance(parts, tuple) or len(parts) != 3 or not callable(parts[2]):
        raise UsageError(f"{target} returned {type(parts).__name__}: {RETURNS}")
    model, optimizer, train = parts

    def trained(step: Any) -> None:
        try:
            train(step)
        except PadiffError:
            raise
        except Exception as error:
            if step.exact:
                raise
            raise UsageError(
                f"{target}: the step function failed at step {step.number}: {type(error).__name__}: {error}"
            ) from error

    return model, optimizer, trained


def _imported(name: str) -> ModuleType:
    try:
        if name.endswith(".py"):
            path = Path(name)
            spec = importlib.util.spec_from_file_location(path.stem, path)
            if not path.is_file() or spec is None or spec.loader is None:
                raise UsageError(f"there is no file {name}")
            sys.path.insert(0, str(path.resolve().parent))
            module = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = module
            spec.loader.exec_module(module)
            return module
        sys.path.insert(0, os.getcwd())
        return importlib.import_module(name)
    except PadiffError:
        raise
    except Exception as error:
        raise UsageError(f"{name} can't be imported: {type(error).__name__}: {error}") from error
