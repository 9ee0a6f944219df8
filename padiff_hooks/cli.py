"""The command line: ``padiff demo | show | compare | watch | map | doctor``.

Exit codes: 0 the runs match, 1 they differ, 2 misuse or something that can't be read.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import sys
import threading
import time
import traceback
from collections.abc import Collection, Sequence
from pathlib import Path

from rich.console import Console

from padiff import __version__
from padiff.compare import NoisePolicy, Policy, RunComparison, Tolerance, compare_runs
from padiff.distribution import warn_of_older
from padiff.dump import open_run
from padiff.dump.format import RUN_FILE
from padiff.errors import PadiffError, UsageError
from padiff.records import Report
from padiff.report import to_json, to_junit, to_markdown
from padiff_hooks.doctor import add_doctor, split_arguments
from padiff_hooks.log_folder import Streaming, explained, quiet_threads
from padiff_hooks.map_text import map_to_yaml
from padiff_hooks.outputs import check_out, console_for, give_up_output, show_anything, write_out
from padiff_hooks.paired import PairedRuns
from padiff_hooks.show import print_report, print_run
from padiff_hooks.stream import DiffStream

MATCH, DIFFER, MISUSE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    show_anything()
    try:
        code = _run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()  # a full disk is told here, and not when the interpreter ends
        return code
    except BrokenPipeError:  # the reader of our output left
        give_up_output()
        return MISUSE
    except (PadiffError, OSError) as error:  # also a disk that is full, a name that is too long
        give_up_output(error)
        print(f"padiff: {error}", file=sys.stderr)
        return MISUSE
    except MemoryError:
        print(
            "padiff: out of memory; record less (detail, white_list), or compare on a larger machine", file=sys.stderr
        )
        return MISUSE
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # never the exit code that says that the runs differ
        told = f"padiff: this should not have happened, please report it: {type(error).__name__}: {error}"
        print(f"{told}\n\npadiff {__version__}, python {sys.version.split()[0]}", file=sys.stderr)
        traceback.print_exc()
        return MISUSE


def _run(arguments: Sequence[str]) -> int:
    warn_of_older()
    own, behind = split_arguments(arguments)
    args = _parser().parse_args(own)
    if behind is not None:
        args.args = [*args.args, *behind]
    reports = [getattr(args, name, None) for name in ("json", "junit", "markdown")]
    with quiet_threads():
        code: int = args.run(args, console_for(stderr="-" in reports))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="padiff", description="Where do two training runs that should be equal part?")
    parser.add_argument("--version", action="version", version=f"padiff {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train two real runs and compare them; nothing to prepare")
    demo.add_argument("dir", nargs="?", default="padiff-demo", help="where the runs go (default: %(default)s)")
    demo.set_defaults(run=_demo)

    show = commands.add_parser("show", help="what a run holds: layers, steps, sizes")
    show.add_argument("path", metavar="RUN")
    show.set_defaults(run=_show)

    compare = commands.add_parser("compare", help="compare two runs; exit code 0 match, 1 differ, 2 misuse")
    _add_pair(compare)
    compare.add_argument("--json", metavar="OUT", help="write the report as JSON; - for standard output")
    compare.add_argument("--junit", metavar="OUT", help="write the report as JUnit XML; - likewise")
    compare.add_argument("--markdown", metavar="OUT", help="write the report as Markdown; - likewise")
    compare.add_argument("--logdir", metavar="TB", help="write every step's diffs for TensorBoard")
    compare.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that measure, at most (default: one for each core, if that pays)",
    )
    compare.add_argument("--all", action="store_true", help="list every pair that differs, not only the first ones")
    compare.set_defaults(run=_compare)

    watch = commands.add_parser("watch", help="follow two growing runs and stream their diffs to TensorBoard")
    _add_pair(watch)
    watch.add_argument("--logdir", metavar="TB", required=True, help="where scalars and first-diff events go")
    watch.add_argument("--interval", type=float, default=0.5, metavar="S", help="seconds between looks (%(default)s)")
    watch.add_argument(
        "--timeout", type=float, metavar="S", help="end after so many seconds without a new step (default: never)"
    )
    watch.set_defaults(run=_watch)

    add_doctor(commands)

    layer_map = commands.add_parser("map", help="print the found layer map as YAML, to edit and give back")
    layer_map.add_argument("reference", metavar="REFERENCE")
    layer_map.add_argument("candidate", metavar="CANDIDATE")
    layer_map.add_argument("--layer-map", metavar="MAP.yaml", help="pairs to start from; the rest is found around them")
    layer_map.set_defaults(run=_map)
    return parser


def _add_pair(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reference", metavar="REFERENCE", help="the run to trust")
    parser.add_argument("candidate", metavar="CANDIDATE", help="the run in question")
    parser.add_argument("--layer-map", metavar="MAP.yaml", help="which layer answers to which (see `padiff map`)")
    parser.add_argument("--atol", type=float, help="absolute tolerance, instead of the default policy")
    parser.add_argument("--rtol", type=float, help="relative tolerance, instead of the default policy")
    parser.add_argument("--compare-mode", choices=("mean", "strict"), help="mean of the error, or every element")


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
    outputs = [args.json, args.junit, args.markdown]
    for out in outputs:
        check_out(out)
    if outputs.count("-") > 1:
        raise UsageError("only one of --json, --junit and --markdown can go to standard output")
    if Path(args.reference).resolve() == Path(args.candidate).resolve():
        console.print(f"Mind: {args.reference} and {args.candidate} are one folder, a run compared with itself.")
    streaming = Streaming(args.logdir, (args.reference, args.candidate), _names(args), console)
    with console.status("comparing") as status, contextlib.closing(streaming):
        report = compare_runs(
            args.reference,
            args.candidate,
            layer_map=args.layer_map,
            policy=_policy(args),
            progress=lambda done, total: status.update(f"comparing: {done} of {total} steps"),
            each=streaming.write if args.logdir else None,
            workers=args.workers,
        )
    print_report(report, console, everything=args.all)
    if args.json:
        write_out(args.json, json.dumps(to_json(report), indent=1))
    if args.junit:
        write_out(args.junit, to_junit(report))
    if args.markdown:
        write_out(args.markdown, to_markdown(report))
    if streaming.trouble is not None:
        raise streaming.trouble  # last: it is no reason to keep the report back
    if args.logdir:
        console.print(f"TensorBoard: tensorboard --logdir {args.logdir}")
    return MATCH if report.passed else DIFFER


def _watch(args: argparse.Namespace, console: Console) -> int:
    if not 0 < args.interval < threading.TIMEOUT_MAX:
        raise UsageError(f"--interval has to be a number of seconds above 0, got {args.interval}")
    if args.timeout is not None and not args.timeout >= 0:
        raise UsageError(f"--timeout has to be a number of seconds of at least 0, got {args.timeout}")
    with explained(args.logdir):
        stream = DiffStream(args.logdir, _names(args))
    failed: Report | None = None

    def begin(recordings: tuple[str, str]) -> Collection[int]:
        nonlocal failed
        failed = None
        with explained(args.logdir):
            done = stream.begin(recordings)
        if stream.replaced:
            console.print(stream.replaced)
        return done

    console.print(f"watching {args.reference} and {args.candidate}; tensorboard --logdir {args.logdir}; Ctrl-C ends")
    try:
        pairs = PairedRuns(args.reference, args.candidate, layer_map=args.layer_map, policy=_policy(args), begin=begin)
        for path, started in zip((args.reference, args.candidate), pairs.started):
            if not started:
                console.print(f"waiting for {path} to start (there is no {RUN_FILE} in it yet)")
        last_news = time.monotonic()
        while True:
            for report in pairs.poll():
                failed = _tell_step(report, failed, console)
                with explained(args.logdir):
                    stream.write(report)
                last_news = time.monotonic()
                if pairs.asked is not None:
                    layers = ", ".join(sorted(pairs.asked.layers)[:5])
                    console.print(f"asked for full tensors around it, from step {pairs.asked.from_step} on: {layers}")
            if pairs.finished():
                console.print(f"both runs have ended; {len(stream.done)} steps compared")
                break
            if args.timeout is not None and time.monotonic() - last_news > args.timeout:
                console.print(f"no new step for {args.timeout:g} s; {len(stream.done)} steps compared")
                break
            time.sleep(args.interval)
    except KeyboardInterrupt:
        console.print(f"stopped; {len(stream.done)} steps compared")
    finally:
        with explained(args.logdir):
            stream.close()
    if not stream.done:
        raise UsageError(f"no step was compared: {_missing_side(pairs, args)}")
    return DIFFER if stream.differs else MATCH


def _tell_step(report: Report, failed: Report | None, console: Console) -> Report | None:
    step = report.coverage.steps[0]
    if report.first_diff is None:
        worst = report.worst
        figure = f", worst relative L2 {worst.figures.rel_l2:.2g}" if worst and worst.figures else ""
        console.print(f"step {step}: match, {report.coverage.compared} tensors{figure}")
        return failed
    if failed is None:
        console.print(report.first_diff.message)
    else:
        console.print(f"step {step}: {len(report.failed)} of {len(report.diffs)} pairs differ")
    return failed or report


def _missing_side(pairs: PairedRuns, args: argparse.Namespace) -> str:
    there = pairs.started
    absent = [path for path, started in zip((args.reference, args.candidate), there) if not started]
    return f"{' and '.join(absent)} never started" if absent else "the runs have no common step"


def _map(args: argparse.Namespace, console: Console) -> int:
    runs = (open_run(args.reference), open_run(args.candidate))
    comparison = RunComparison(runs[0], runs[1], args.layer_map)
    for number in comparison.common()[:1]:
        # The first common step shows which layers are called; wrappers that never are get no partner.
        comparison.diffs(number)
    sys.stdout.write(map_to_yaml(comparison.alignment, runs[0].name, runs[1].name))
    return MATCH


def _policy(args: argparse.Namespace) -> Policy:
    if args.atol is None and args.rtol is None and args.compare_mode is None:
        return NoisePolicy()
    given = args.atol is not None or args.rtol is not None
    return Tolerance(
        atol=args.atol if args.atol is not None else (0.0 if given else Tolerance.atol),
        rtol=args.rtol if args.rtol is not None else (0.0 if given else Tolerance.rtol),
        mode=args.compare_mode or Tolerance.mode,
    )


def _names(args: argparse.Namespace) -> tuple[str, str]:
    return str(Path(args.reference).resolve()), str(Path(args.candidate).resolve())


if __name__ == "__main__":
    sys.exit(main())
