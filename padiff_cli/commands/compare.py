"""``padiff compare A B``: compare two runs step by step."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from rich.console import Console

from padiff.compare import compare_runs
from padiff.compare.workers import check_workers
from padiff.errors import UsageError
from padiff.model.given_map import GivenMap
from padiff.records import Both
from padiff.records.diagnostic import diagnostic_json, diagnostic_of
from padiff.report_formats import head_to_json, json_parts, page_words, steps_to_json, to_junit, to_markdown
from padiff_cli.arguments import (
    CODES,
    EXIT_CODES,
    add_pair,
    add_selection,
    add_tags,
    check_pair,
    paths_of,
    policy_of,
    steps_of,
)
from padiff_cli.collecting import few_collections
from padiff_cli.dask_cluster import dask_client
from padiff_cli.log_folder import Streaming, check_logdir
from padiff_hooks.outputs import Progress, check_out, write_out
from padiff_hooks.show import print_report
from padiff_hooks.step_lines import page_lines


def add_arguments(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.description = f"Compare two runs, step by step. Exit code: {EXIT_CODES}."
    add_pair(parser)
    add_selection(parser)
    parser.add_argument(
        "--brief",
        action="store_true",
        help="write the result in brief on standard output: JSON, 4 kB at most; padiff schema prints its schema",
    )
    parser.add_argument("--json", metavar="OUT", help="write the report as JSON; - for standard output")
    parser.add_argument("--junit", metavar="OUT", help="write the report as JUnit XML; - the same")
    parser.add_argument("--markdown", metavar="OUT", help="write the report as Markdown; - the same")
    parser.add_argument("--html", metavar="OUT", help="write the report as a page in one file, to look at; - the same")
    parser.add_argument("--logdir", metavar="TB", help="write every step's diffs for TensorBoard")
    add_tags(parser)
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes that measure, at most (default: one for each core, if that pays)",
    )
    parser.add_argument(
        "--dask",
        metavar="ADDRESS",
        help="let the workers of this dask cluster read and measure (tcp://host:8786): they have to see both runs "
        "under these paths, on a shared file system or in a store, and have padiff installed",
    )
    parser.add_argument(
        "--exit-codes",
        choices=("git",),
        help="for `git bisect run`: 0 the runs match, 1 they differ, 125 that cannot be judged, an error included",
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="add the table of stages, the first pairs that differ, both layer trees and the evidence; -vv every pair",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--all", action="store_true", help="list every pair that differs, not only the first ones")
    shown.add_argument("--top", type=int, metavar="N", help="list the N pairs furthest beyond their limits")
    parser.set_defaults(run=_compare)


@few_collections()
def _compare(args: argparse.Namespace, console: Console) -> int:
    outputs = [args.json, args.junit, args.markdown, args.html]
    for out in outputs:
        check_out(out)
    if outputs.count("-") + args.brief > 1:
        raise UsageError("only one of --brief, --json, --junit, --markdown and --html can go to standard output")
    if args.top is not None and args.top < 1:
        raise UsageError(f"--top has to be at least 1, got {args.top}")
    policy, layer_map = policy_of(args), GivenMap.from_value(args.layer_map)
    check_workers(args.workers)
    check_logdir(args.logdir)
    check_pair(args)
    streaming = Streaming(args.logdir, paths_of(args), console, args.tags)
    with (
        Progress(console, "comparing") as progress,
        contextlib.closing(streaming),
        dask_client(args.dask) as cluster,
    ):
        report = compare_runs(
            args.reference,
            args.candidate,
            layer_map=layer_map,
            policy=policy,
            progress=progress,
            each=streaming.write if args.logdir else None,
            workers=args.workers,
            executor=cluster,
            layers=args.layer,
            **steps_of(args),
        )
    runs = Both(str(args.reference), str(args.candidate))
    if args.brief:
        print(diagnostic_json(diagnostic_of(report, runs, tuple(out for out in outputs if out))))
    else:
        everything = args.all or args.verbose > 1
        print_report(report, console, everything, args.top, bool(args.verbose), runs)
    if args.json:
        write_out(args.json, json_parts(report))
    if args.html:
        from padiff_page import page_parts  # few comparisons write one

        head = head_to_json(report)
        head |= {"words": words} if (words := page_words(head)) else {}
        write_out(args.html, page_parts(head, page_lines(steps_to_json(report))))
    if args.junit:
        write_out(args.junit, to_junit(report))
    if args.markdown:
        write_out(args.markdown, to_markdown(report))
    if streaming.trouble is not None:
        raise streaming.trouble  # last, so that the report is still written
    if args.logdir:
        console.print(f"TensorBoard: tensorboard --logdir {args.logdir}")
    return CODES[report.outcome]
