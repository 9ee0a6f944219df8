"""The command line: ``padiff demo | run | show | compare | watch | replay | ... | doctor | atlas``.

Exit codes: 0 the runs match, 1 they differ, 2 misuse, or something can't be read or written, 3 cannot tell
(parameters that train have no record).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from padiff import __version__
from padiff.compare import RunComparison, compare_runs
from padiff.compare.workers import check_workers
from padiff.dump import open_run
from padiff.errors import PadiffError, UsageError
from padiff.model.given_map import GivenMap
from padiff.records import printable
from padiff.report_formats import head_to_json, steps_to_json, to_json, to_junit, to_markdown
from padiff.system.distribution import warn_of_older
from padiff_hooks.arguments import (
    CODES,
    EXIT_CODES,
    Parser,
    add_pair,
    add_tags,
    check_pair,
    paths_of,
    policy_of,
    steps_of,
)
from padiff_hooks.calibrate_command import add_calibrate
from padiff_hooks.doctor.command import add_doctor, split_arguments
from padiff_hooks.log_folder import Streaming, check_logdir, quiet_threads
from padiff_hooks.map_yaml import map_to_yaml
from padiff_hooks.outputs import Progress, check_out, console_for, give_up_output, show_anything, write_out
from padiff_hooks.replay_command import add_replay
from padiff_hooks.repro_command import add_repro
from padiff_hooks.resync_command import add_resync
from padiff_hooks.run.command import add_run
from padiff_hooks.run.command import main as run_main
from padiff_hooks.show import print_report, print_run
from padiff_hooks.step_lines import page_lines
from padiff_hooks.watch import add_watch

MATCH, MISUSE, INTERRUPTED = 0, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["run"]:
        return run_main(given[1:])  # its output, its exit code and its errors are the script's
    show_anything()
    try:
        code = _run(given)
        sys.stdout.flush()  # a full disk is an error here, and not when the interpreter ends
        return code
    except BrokenPipeError:  # the reader of our output left
        give_up_output()
        return MISUSE
    except (PadiffError, OSError) as error:  # also a disk that is full, a name that is too long
        give_up_output(error)
        print(f"padiff: {printable(str(error), lines=True)}", file=sys.stderr)
        return MISUSE
    except MemoryError:
        print(
            "padiff: out of memory; record less (detail, white_list), or compare on a larger machine", file=sys.stderr
        )
        return MISUSE
    except KeyboardInterrupt:
        print("padiff: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # never the exit code that says that the runs differ
        text = f"padiff: this should not have happened, please report it: {type(error).__name__}: {error}"
        print(f"{text}\n\npadiff {__version__}, python {sys.version.split()[0]}", file=sys.stderr)
        traceback.print_exc()
        return MISUSE


def _run(arguments: Sequence[str]) -> int:
    warn_of_older()
    own, behind = split_arguments(arguments)
    args = _parser().parse_args(own)
    if behind is not None:
        args.args = [*args.args, *behind]
    reports = [getattr(args, name, None) for name in ("json", "junit", "markdown", "html")]
    with quiet_threads():
        code: int = args.run(args, console_for(stderr="-" in reports))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="padiff", description="Where do two training runs that should be equal part?")
    parser.add_argument("--version", action="version", version=f"padiff {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train two real runs and compare them; nothing to prepare")
    demo.add_argument("dir", nargs="?", default="padiff-demo", help="where the runs go (default: %(default)s)")
    demo.set_defaults(run=_demo)

    add_run(commands)

    show = commands.add_parser("show", help="what a run holds: layers, steps, sizes")
    show.add_argument("path", metavar="RUN")
    show.set_defaults(run=_show)

    compare = commands.add_parser(
        "compare", help="compare two runs", description=f"Compare two runs, step by step. Exit code: {EXIT_CODES}."
    )
    add_pair(compare)
    compare.add_argument("--steps", metavar="N", help="only these: numbers and ranges, e.g. 0,8,100-200")
    compare.add_argument("--stage", metavar="S", help="only these stages, e.g. forward,grad")
    compare.add_argument(
        "--layer", metavar="PATTERN", action="append", help="only layers like this, e.g. 'encoder.*'; may be repeated"
    )
    compare.add_argument("--json", metavar="OUT", help="write the report as JSON; - for standard output")
    compare.add_argument("--junit", metavar="OUT", help="write the report as JUnit XML; - likewise")
    compare.add_argument("--markdown", metavar="OUT", help="write the report as Markdown; - likewise")
    compare.add_argument("--html", metavar="OUT", help="write the report as a page in one file, to look at; - likewise")
    compare.add_argument("--logdir", metavar="TB", help="write every step's diffs for TensorBoard")
    add_tags(compare)
    compare.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that measure, at most (default: one for each core, if that pays)",
    )
    shown = compare.add_mutually_exclusive_group()
    shown.add_argument("--all", action="store_true", help="list every pair that differs, not only the first ones")
    shown.add_argument("--top", type=int, metavar="N", help="list the N pairs furthest beyond their limits")
    compare.set_defaults(run=_compare)

    add_watch(commands)
    add_replay(commands)
    add_calibrate(commands)
    add_resync(commands)
    add_repro(commands)
    add_doctor(commands)

    layer_map = commands.add_parser("map", help="print the found layer map as YAML, to edit and give back")
    layer_map.add_argument("reference", metavar="REFERENCE")
    layer_map.add_argument("candidate", metavar="CANDIDATE")
    layer_map.add_argument("--layer-map", metavar="MAP.yaml", help="pairs to start from; the rest is found around them")
    layer_map.set_defaults(run=_map)

    atlas = commands.add_parser(
        "atlas",
        help="what the installed torch and paddle do differently when they are called alike, and how to call them",
        description="Run some hundred operations in the installed torch and paddle, called alike; print what differs, "
        "by how much, and the call that agrees. Exit code: 0 all such calls agree, 1 one does not, 2 misuse, or a "
        "framework is missing.",
    )
    atlas.add_argument(
        "--json", metavar="OUT", help="write the table, with what is the same, as JSON; - for standard output"
    )
    atlas.add_argument("--markdown", metavar="OUT", help="write it as a page; - likewise")
    atlas.add_argument(
        "--only", metavar="GROUP", action="append", default=[], help="only these probes, e.g. losses; may be repeated"
    )
    atlas.set_defaults(run=_atlas)
    return parser


def _demo(args: argparse.Namespace, console: Console) -> int:
    try:
        demo = importlib.import_module("padiff_demo")
    except ImportError as error:
        raise UsageError(
            f"the demo trains in both frameworks, and {error.name} is not installed: pip install 'padiff-hooks[demo]'"
        ) from error
    code: int = demo.run(Path(args.dir), console)
    return code


def _show(args: argparse.Namespace, console: Console) -> int:
    print_run(open_run(args.path), Path(args.path), console)
    return MATCH


def _compare(args: argparse.Namespace, console: Console) -> int:
    outputs = [args.json, args.junit, args.markdown, args.html]
    for out in outputs:
        check_out(out)
    if outputs.count("-") > 1:
        raise UsageError("only one of --json, --junit, --markdown and --html can go to standard output")
    if args.top is not None and args.top < 1:
        raise UsageError(f"--top has to be at least 1, got {args.top}")
    policy, layer_map = policy_of(args), GivenMap.of(args.layer_map)
    check_workers(args.workers)
    check_logdir(args.logdir)
    check_pair(args)
    streaming = Streaming(args.logdir, paths_of(args), console, args.tags)
    with Progress(console, "comparing") as progress, contextlib.closing(streaming):
        report = compare_runs(
            args.reference,
            args.candidate,
            layer_map=layer_map,
            policy=policy,
            progress=progress,
            each=streaming.write if args.logdir else None,
            workers=args.workers,
            layers=args.layer,
            **steps_of(args),
        )
    print_report(report, console, everything=args.all, top=args.top)
    if args.json:
        write_out(args.json, json.dumps(to_json(report), indent=1))
    if args.html:
        from padiff_page import page_parts  # few comparisons write one

        write_out(args.html, page_parts(head_to_json(report), page_lines(steps_to_json(report))))
    if args.junit:
        write_out(args.junit, to_junit(report))
    if args.markdown:
        write_out(args.markdown, to_markdown(report))
    if streaming.trouble is not None:
        raise streaming.trouble  # last: it is no reason to keep the report back
    if args.logdir:
        console.print(f"TensorBoard: tensorboard --logdir {args.logdir}")
    return CODES[report.outcome]


def _map(args: argparse.Namespace, console: Console) -> int:
    reference, candidate = paths_of(args).map(open_run)
    comparison = RunComparison(reference, candidate, args.layer_map)
    for number in comparison.common()[:1]:
        # The first common step shows which layers are called; wrappers that never are get no partner.
        comparison.diffs(number)
    sys.stdout.write(map_to_yaml(comparison.alignment, reference.name, candidate.name))
    return MATCH


def _atlas(args: argparse.Namespace, console: Console) -> int:
    outputs = [args.json, args.markdown]
    for out in outputs:
        check_out(out)
    if outputs.count("-") > 1:
        raise UsageError("only one of --json and --markdown can go to standard output")
    atlas = importlib.import_module("padiff_atlas")
    code: int = atlas.run(console, args.only, args.json, args.markdown)
    return code


if __name__ == "__main__":
    sys.exit(main())
