"""``padiff watch``: compare two growing runs and stream their diffs."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from rich.console import Console

from padiff.compare.diagnose import shows
from padiff.dump.format import RUN_FILE
from padiff.errors import UsageError
from padiff.records import CANNOT_TELL, Both, Report, Standing, count_text, printable, verdict
from padiff.records.diagnostic import diagnostic_of, position_text
from padiff.records.diagnostic_text import diagnostic_text
from padiff.system.language import translated
from padiff_cli.arguments import CODES, EXIT_CODES, add_pair, add_tags, check_pair, names_of, paths_of, policy_of
from padiff_cli.log_folder import check_logdir, explained
from padiff_hooks.news import CAUSE_KNOWN
from padiff_hooks.paired import PairedRuns
from padiff_hooks.show import QUIET, STYLES, WIDEST
from padiff_hooks.stream import DiffStream


def add_arguments(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.description = f"Compare two runs while they grow. Exit code: {EXIT_CODES}."
    add_pair(parser)
    parser.add_argument("--logdir", metavar="TB", required=True, help="where scalars and first-diff events go")
    add_tags(parser)
    parser.add_argument("--interval", type=float, default=0.5, metavar="S", help="seconds between looks (%(default)s)")
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="end after so many seconds without a new step (default: never)"
    )
    parser.set_defaults(run=run_watch)


class _Watched:
    """Summary of the steps that this watch has compared."""

    def __init__(self, width: int) -> None:
        self._width = min(width, WIDEST)
        self.begin_anew()

    def begin_anew(self) -> None:
        """Reset the summary, because one of the folders holds a new recording."""
        self._first: Report | None = None
        self._doubt, self._worst, self._failed = "", 0.0, 0
        self._follows = False
        #: Sentences about steps that a rank did not write.
        self.lost: list[str] = []

    def add(self, report: Report, known: bool) -> str:
        """Add the report of one step, and return the lines that describe its result.

        Args:
            known: True if an earlier step differs, including steps that an earlier watch compared.
        """
        text = self._added(report, known)
        if report.explained is not None:
            text += f"\n{CAUSE_KNOWN}: {printable(report.explained.message)}"
            if self._first is not None:
                self._first = replace(self._first, first_diff=report.explained)
        return text

    @property
    def first(self) -> str:
        """Return the position of the first difference; empty if none was found."""
        first_diff = None if self._first is None else self._first.first_diff
        return "" if first_diff is None else printable(position_text(first_diff))

    def _added(self, report: Report, known: bool) -> str:
        step = report.coverage.steps[0]
        if report.first_diff is None:
            worst = report.worst
            figure = f", worst relative L2 {worst.figures.rel_l2:.2g}" if worst and worst.figures else ""
            self._worst = max(self._worst, worst.figures.rel_l2 if worst and worst.figures else 0.0)
            if report.outcome == CANNOT_TELL:
                self._doubt = verdict(report)
            return translated(f"step {step}: {report.outcome}, {report.coverage.compared} tensors{figure}")
        self._failed += 1
        more = "".join(f"\n{Standing.NEW}: {printable(diff.message)}" for diff in report.independent)
        if self._first is None:
            self._first = report
            return diagnostic_text(diagnostic_of(report), self._width)
        if shows(report, self._first):
            self._first = report  # the tensors that a setting of an earlier step makes differ
            return f"it shows now: {self.first}{more}"
        if not report.failed:
            return f"step {step}: {printable(report.first_diff.message)}{more}"
        # Said once: all later diffs follow, too.
        suffix = "" if self._follows else f", which {Standing.FOLLOWS} from it"
        self._follows = True
        return f"{translated(f'step {step}: {count_text(report)}{suffix}')}{more}"

    def verdict(self, differs: bool) -> str:
        """Return the result of all steps in one sentence.

        Args:
            differs: True if one of the steps differs, including steps that an earlier watch compared.
        """
        if self._first is not None:
            return translated(f"{self._failed} of them differ, first at {self.first}.")
        if differs:
            return translated("A step that was compared before differs (see diffs.jsonl).")
        lost = "".join(f" {line[0].upper()}{line[1:]}." for line in self.lost)
        return translated((self._doubt or f"The runs match, largest relative L2 {self._worst:.2g}.") + lost)


def run_watch(args: argparse.Namespace, console: Console) -> int:
    """Run the command and return its exit code.

    Raises:
        PadiffError: a run can't be read, or nothing was compared.
    """
    if not 0 < args.interval < threading.TIMEOUT_MAX:
        raise UsageError(f"--interval has to be a number of seconds above 0, got {args.interval}")
    if args.timeout is not None and not args.timeout >= 0:
        raise UsageError(f"--timeout has to be a number of seconds of at least 0, got {args.timeout}")
    check_logdir(args.logdir)
    policy = policy_of(args)
    check_pair(args)
    with explained(args.logdir):
        stream = DiffStream(args.logdir, names_of(paths_of(args)), tags=args.tags)
    watched = _Watched(console.width)

    def begin(recordings: Both[str]) -> Collection[int]:
        watched.begin_anew()
        with explained(args.logdir):
            done = stream.begin(recordings)
        if stream.replaced:
            console.print(stream.replaced)
        return done

    console.print(f"watching {args.reference} and {args.candidate}; tensorboard --logdir {args.logdir}; Ctrl-C ends")
    try:
        pairs = PairedRuns(args.reference, args.candidate, layer_map=args.layer_map, policy=policy, begin=begin)
        for path, started in paths_of(args).zip(pairs.started):
            if not started:
                console.print(f"waiting for {path} to start (there is no {RUN_FILE} in it yet)")
        ended = _follow(pairs, stream, watched, args, console)
    except KeyboardInterrupt:
        ended = "stopped"
    finally:
        with explained(args.logdir):
            stream.close()
    if not stream.done:
        raise UsageError(f"no step was compared: {_missing_side(pairs, args)}")
    came_to = watched.verdict(stream.differs)
    console.print(f"{ended}; {len(stream.done)} steps compared. {came_to}", style=STYLES[stream.outcome])
    return CODES[stream.outcome]


def _follow(
    pairs: PairedRuns, stream: DiffStream, watched: _Watched, args: argparse.Namespace, console: Console
) -> str:
    """Compare steps as they arrive until the watch ends, and return the reason for the end."""
    last_news = time.monotonic()
    while True:
        for report in pairs.poll():
            console.print(watched.add(report, stream.differs), style=QUIET if report.first_diff is None else "red")
            with explained(args.logdir):
                stream.write(report)
            last_news = time.monotonic()
            for line in pairs.ranks:
                console.print(printable(line), style="red")
            if pairs.asked is not None:
                layers = ", ".join(sorted(pairs.asked.layers)[:5])
                console.print(f"asked for full tensors around it, from step {pairs.asked.from_step} on: {layers}")
        for line in pairs.lost():
            console.print(printable(line), style="red")
            watched.lost.append(printable(line))
        if pairs.finished():
            return "both runs have ended"
        if args.timeout is not None and time.monotonic() - last_news > args.timeout:
            return f"no new step for {args.timeout:g} s"
        time.sleep(args.interval)


def _missing_side(pairs: PairedRuns, args: argparse.Namespace) -> str:
    absent = [path for path, started in paths_of(args).zip(pairs.started) if not started]
    return f"{' and '.join(absent)} never started" if absent else "the runs have no common step"
