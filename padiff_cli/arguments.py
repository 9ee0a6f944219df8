"""What the commands' arguments have in common: how they are read, and what is said where they can't be meant."""

from __future__ import annotations

import argparse
import re
from typing import Any

from padiff.compare import Policy, Tolerance
from padiff.dump.local import run_folder
from padiff.errors import UsageError
from padiff.records import CANNOT_TELL, DIFFER, MATCH, STAGES, Both
from padiff.system.spelling import nearest
from padiff_hooks.tags import LAYERS, TAGS

#: The exit code of each outcome of a comparison. (2 is misuse, or something that can't be read or written.)
CODES = {MATCH: 0, DIFFER: 1, CANNOT_TELL: 3}
EXIT_CODES = (
    "0 the runs match, 1 they differ, 2 misuse, or something can't be read or written, 3 cannot tell, because "
    "parameters that train have no record"
)

_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


def add_pair(parser: argparse.ArgumentParser) -> None:
    """Add what every comparison of two runs takes."""
    parser.add_argument("reference", metavar="REFERENCE", help="the run to trust")
    parser.add_argument("candidate", metavar="CANDIDATE", help="the run in question")
    parser.add_argument("--layer-map", metavar="MAP.yaml", help="which layer answers to which (see `padiff map`)")
    parser.add_argument("--atol", type=float, help="absolute tolerance, instead of the default policy")
    parser.add_argument("--rtol", type=float, help="relative tolerance, instead of the default policy")
    parser.add_argument("--compare-mode", choices=("mean", "strict"), help="mean of the error, or every element")


def add_tags(parser: argparse.ArgumentParser) -> None:
    """Add what says which curves a command with ``--logdir`` writes."""
    parser.add_argument(
        "--tags",
        choices=TAGS,
        default=LAYERS,
        help="curves for TensorBoard: one for each layer and stage (layers), of the ten worst layers of each stage "
        "(worst), or norms of each run and maxima too (all); default: %(default)s",
    )


def check_pair(args: argparse.Namespace) -> None:
    """Refuse a folder that is compared with itself.

    Raises:
        UsageError: both are one folder.
    """
    names = names_of(paths_of(args))
    if names.reference == names.candidate:
        raise UsageError(
            f"{args.reference} and {args.candidate} are one folder: a run that is compared with itself always matches. "
            "Give the folders of two runs"
        )


def policy_of(args: argparse.Namespace) -> Policy | None:
    """The tolerance that was given; `None` for the default policy."""
    if args.atol is None and args.rtol is None and args.compare_mode is None:
        return None
    given = args.atol is not None or args.rtol is not None
    return Tolerance(
        atol=args.atol if args.atol is not None else (0.0 if given else Tolerance.atol),
        rtol=args.rtol if args.rtol is not None else (0.0 if given else Tolerance.rtol),
        mode=args.compare_mode or Tolerance.mode,
    )


def paths_of(args: argparse.Namespace) -> Both[str]:
    """The two runs, as they were given."""
    return Both(args.reference, args.candidate)


def names_of(paths: Both[str]) -> Both[str]:
    """What distinguishes the two runs from others."""
    return paths.map(lambda path: str(run_folder(path, "run").resolve()))


def steps_of(args: argparse.Namespace) -> dict[str, Any]:
    """``steps`` and ``stages`` for `padiff.compare_runs`, as far as they were given.

    Raises:
        UsageError: no numbers, or an unknown stage.
    """
    found: dict[str, Any] = {}
    if args.steps is not None:
        found["steps"] = Steps(args.steps)
    if args.stage is not None:
        found["stages"] = [stage.strip() for stage in args.stage.split(",")]
        for stage in found["stages"]:
            if stage not in STAGES:
                raise UsageError(f"--stage: unknown stage {stage!r}. {nearest(stage, STAGES)}")
    return found


class Steps:
    """Numbers of steps, as ``0,8,100-200`` names them."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._ranges: list[tuple[int, int]] = []
        for part in text.split(","):
            match = _RANGE.fullmatch(part.strip())
            if match is None or int(match[2] or match[1]) < int(match[1]):
                raise UsageError(f"--steps takes numbers and ranges, such as 0,8,100-200; got {text!r}")
            self._ranges.append((int(match[1]), int(match[2] or match[1])))

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and any(first <= number <= last for first, last in self._ranges)

    def __repr__(self) -> str:
        return self._text
