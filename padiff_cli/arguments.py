"""Arguments that several commands share: adding, checking and reading them."""

from __future__ import annotations

import argparse
from typing import Any

from padiff.compare import Policy, Tolerance
from padiff.compare.coverage import Steps
from padiff.dump.store import run_folder
from padiff.errors import UsageError
from padiff.records import CANNOT_TELL, DIFFER, MATCH, STAGES, Both
from padiff.system.terminal import nearest
from padiff_hooks.tags import LAYERS, TAGS

#: The exit code of each outcome of a comparison. (2 is misuse, or something that can't be read or written.)
CODES = {MATCH: 0, DIFFER: 1, CANNOT_TELL: 3}
EXIT_CODES = (
    "0 the runs match, 1 they differ, 2 misuse, or something can't be read or written, 3 cannot tell, because "
    "parameters that train have no record"
)


def add_pair(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a comparison of two runs: the runs, the layer map and the tolerance."""
    parser.add_argument("reference", metavar="REFERENCE", help="the run to trust")
    parser.add_argument("candidate", metavar="CANDIDATE", help="the run in question")
    add_layer_map(parser)
    parser.add_argument("--atol", type=float, help="absolute tolerance, instead of the default policy")
    parser.add_argument("--rtol", type=float, help="relative tolerance, instead of the default policy")
    parser.add_argument("--compare-mode", choices=("mean", "strict"), help="mean of the error, or every element")


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that select what is compared: ``--steps``, ``--stage`` and ``--layer``."""
    parser.add_argument("--steps", metavar="N", help="only these: numbers and ranges, e.g. 0,8,100-200")
    parser.add_argument("--stage", metavar="S", help="only these stages, e.g. forward,grad")
    parser.add_argument(
        "--layer", metavar="PATTERN", action="append", help="only layers like this, e.g. 'encoder.*'; may be repeated"
    )


def add_layer_map(parser: argparse.ArgumentParser) -> None:
    """Add ``--layer-map``."""
    parser.add_argument("--layer-map", metavar="MAP.yaml", help="which layer answers to which (see `padiff map`)")


def add_tags(parser: argparse.ArgumentParser) -> None:
    """Add ``--tags``, which selects the curves that a command with ``--logdir`` writes."""
    parser.add_argument(
        "--tags",
        choices=TAGS,
        default=LAYERS,
        help="curves for TensorBoard: one for each layer and stage (layers), of the ten worst layers of each stage "
        "(worst), or norms of each run and maxima too (all); default: %(default)s",
    )


def check_pair(args: argparse.Namespace) -> None:
    """Raise an error if both runs are the same folder.

    Raises:
        UsageError: both paths lead to one folder.
    """
    names = names_of(paths_of(args))
    if names.reference == names.candidate:
        raise UsageError(
            f"{args.reference} and {args.candidate} are one folder: a run that is compared with itself always matches. "
            "Give the folders of two runs"
        )


def policy_of(args: argparse.Namespace) -> Policy | None:
    """Return the tolerance from the arguments, or `None` for the default policy."""
    return Tolerance.from_options(args.atol, args.rtol, args.compare_mode)


def paths_of(args: argparse.Namespace) -> Both[str]:
    """Return the paths of the two runs as the user wrote them."""
    return Both(args.reference, args.candidate)


def names_of(paths: Both[str]) -> Both[str]:
    """Return the two runs' resolved paths, which identify the runs."""
    return paths.map(lambda path: str(run_folder(path, "run").resolve()))


def steps_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options ``steps`` and ``stages`` of `padiff.compare_runs` that the arguments contain.

    Raises:
        UsageError: ``--steps`` contains no step numbers, or ``--stage`` an unknown stage.
    """
    options: dict[str, Any] = {}
    if args.steps is not None:
        options["steps"] = Steps(args.steps)
    if args.stage is not None:
        options["stages"] = [stage.strip() for stage in args.stage.split(",")]
        for stage in options["stages"]:
            if stage not in STAGES:
                raise UsageError(f"--stage: unknown stage {stage!r}. {nearest(stage, STAGES)}")
    return options
