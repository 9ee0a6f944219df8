"""``padiff bisect -- COMMAND``: find the commit, version, keys or variables that make two trainings differ."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from padiff.errors import UsageError
from padiff.records import Both
from padiff_cli.bisect.changes import ConfigKeys, Environments, read_variables
from padiff_cli.bisect.commits import Commits
from padiff_cli.bisect.config_files import ConfigPair
from padiff_cli.bisect.laboratory import Laboratory, most_runs
from padiff_cli.bisect.outcome import FOUND, MATCHES, Culprit, Outcome, notes_of
from padiff_cli.bisect.packages import Package, Packages
from padiff_cli.bisect.search import ChangeSearch, Finding, LineSearch, TrialError
from padiff_cli.bisect.trials import Trials, digest_of_files, open_folder
from padiff_cli.collecting import few_collections
from padiff_hooks.outputs import check_out, write_out

CODES = {FOUND: 0, MATCHES: 1}
CANNOT_TELL = 3
#: Steps of the good and the bad run.
STEPS = 20


def add_arguments(parser: Any) -> None:
    """Add the command's arguments to its parser."""
    parser.usage = "padiff bisect [options] -- COMMAND"
    parser.description = (
        "Run a training command in several states, record each, and find what makes the bad one differ from the good "
        "one. A trial is judged at the place where the bad run differs first; one that fails is skipped. "
        "Exit code: 0 what makes the runs differ was found, 1 they match, 2 misuse, or the good or the bad state can't "
        "be run, 3 cannot tell."
    )
    parser.add_argument("--good", metavar="REV", help="between commits: one whose training is right")
    parser.add_argument("--bad", metavar="REV", help="one whose training is not (default: HEAD)")
    parser.add_argument(
        "--package",
        metavar="NAME==GOOD..BAD",
        action="append",
        help="between versions of a package, e.g. transformers==4.47..4.48; may be repeated",
    )
    parser.add_argument(
        "--config",
        nargs=2,
        metavar=("GOOD", "BAD"),
        help="between the keys of two configs (YAML, JSON or TOML); {config} in the command is the one that is tried",
    )
    parser.add_argument(
        "--env",
        nargs="+",
        metavar="NAME=GOOD..BAD",
        help="between environment variables, e.g. OMP_NUM_THREADS=1..8 FLAG=..1, or two files of NAME=VALUE",
    )
    parser.add_argument(
        "--dir", default="runs/bisect", metavar="FOLDER", help="holds all of it, to go on there (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=STEPS, metavar="N", help="steps of the good and the bad run (default: %(default)s)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="S",
        help="seconds after which a trial is skipped (default: 5 times the longest)",
    )
    parser.add_argument(
        "--link",
        action="append",
        default=[],
        metavar="PATH",
        help="between commits: a path that is in no commit and that the command needs, such as data; may be repeated",
    )
    parser.add_argument("--first", action="store_true", help="end at the first culprit: look for no other causes")
    parser.add_argument("--json", metavar="OUT", help="write the result as JSON; - for standard output")
    parser.add_argument("args", nargs="*", metavar="COMMAND", help="the training, behind --")
    parser.set_defaults(run=_bisect)


@few_collections()
def _bisect(args: argparse.Namespace, console: Console) -> int:
    kind = _checked(args)
    folder = Path(args.dir)
    request = {
        "kind": kind,
        "command": args.args,
        "states": [args.good, args.bad, args.package, args.env],
        "files": digest_of_files([*args.args, *(args.config or ()), *(args.env or ())]),
    }
    began = time.monotonic()
    subject: Any
    if kind == "commits":
        subject = Commits(args.good, args.bad, (folder / "worktree").resolve(), args.args, args.link)
        request["states"] = [subject.good, subject.bad, args.link]
    elif kind == "packages":
        subject = Packages([Package.from_text(text) for text in args.package], folder / "environments", args.args)
        request["states"] = [[package.name, *package.versions] for package in subject.packages.values()]
    elif kind == "config":
        pair = ConfigPair(*args.config)
        subject = ConfigKeys(pair, folder / "configs", args.args)
    else:
        subject = Environments(read_variables(args.env), args.args)
        request["states"] = [[v.name, v.good, v.bad] for v in subject.variables.values()]
    open_folder(folder, request)
    trials = Trials(folder / "trials", subject.prepare, args.timeout)
    laboratory = Laboratory(subject, trials, args.steps, lambda text: console.print(text))
    bisection = Bisection(subject, laboratory, folder, not args.first)
    trouble = ""
    culprits: Sequence[Culprit] = ()
    try:
        start, end, search = _search_of(kind, bisection, subject, console)
        bisection.run_ends(start, end)
        try:
            culprits = search()
        except TrialError as error:
            trouble = str(error)
    except KeyboardInterrupt:
        console.print(f"finished trials are kept: the same command goes on in {folder}")
        raise
    finally:
        if kind == "commits":
            subject.close()
    report = laboratory.report_of(start, end)
    runs = Both(start, end).map(lambda state: str(laboratory.run_of(state).run))
    outcome = Outcome(
        kind,
        folder,
        culprits,
        trouble,
        report,
        runs,
        laboratory.attempts,
        bisection.search_runs or laboratory.run_count,
        laboratory.run_count,
        trials.count,
        time.monotonic() - began,
        args.steps,
        laboratory.notes,
    )
    outcome.show(console)
    if args.json:
        write_out(args.json, json.dumps(outcome.to_json(), indent=1))
    return CODES.get(outcome.outcome, CANNOT_TELL)


class Bisection:
    """A bisection that runs: it collects the culprits of a search.

    Attributes:
        search_runs: number of runs until the first culprit was found; 0 before.
    """

    def __init__(self, subject: Any, laboratory: Laboratory, folder: Path, is_complete: bool) -> None:
        self._subject, self._laboratory, self._folder = subject, laboratory, folder
        self._is_complete = is_complete
        self.search_runs = 0

    def run_ends(self, start: Any, end: Any) -> None:
        """Run the two states that everything is about.

        Raises:
            UsageError: one of them cannot be run.
        """
        try:
            self._laboratory.difference(start, end)
        except TrialError as error:
            raise UsageError(f"the good and the bad state have to run: {error}") from error

    def commits(self, commits: Commits) -> list[Culprit]:
        """Search among commits."""
        search = LineSearch(commits, self._laboratory, self._is_complete, self._count)
        return [self._commit(commits, finding) for finding in search.between(commits.start, commits.end)]

    def changes(self, subject: Any, names: Sequence[str]) -> list[Culprit]:
        """Search among changes; of a package or a number of threads, for the first value that makes the difference."""
        search = ChangeSearch(subject.make, self._laboratory, self._is_complete, self._count)
        if isinstance(subject, ConfigKeys):
            search.suspect = lambda place: subject.suspect(place.cause)
        findings = search.among(names) if len(names) > 1 else self._alone(subject, names[0])
        culprits: list[Culprit] = []
        for finding in findings:
            culprits += self._change(subject, finding)
        return culprits

    def _alone(self, subject: Any, name: str) -> list[Finding[Any]]:
        """Return the finding of a single change, which needs no search."""
        start, end = subject.make(frozenset()), subject.make(frozenset({name}))
        place = self._laboratory.difference(start, end)
        if place is None:
            return []
        if not hasattr(subject, "line_of") or subject.line_of(name, frozenset({name})) is None:
            self._laboratory.check_repeats(start, place)
        return [Finding(place, start, end, (name,))]

    def _count(self) -> None:
        self.search_runs = self.search_runs or self._laboratory.run_count

    def _commit(self, commits: Commits, finding: Finding[str]) -> Culprit:
        labels = tuple(commits.label(each) for each in finding.suspects)
        if len(finding.suspects) > 1:
            return Culprit(finding.place, (), labels, finding.suspects)
        (commit,) = finding.suspects
        text = commits.description(commit)
        reverting = commits.reverted_by(commit)
        notes = (f"{reverting} says that it reverts this commit",) if reverting else ()
        path = self._write(f"{commit[:12]}.diff", text)
        return Culprit(finding.place, (commit,), labels, (), text, path, notes)

    def _change(self, subject: Any, finding: Finding[Any]) -> list[Culprit]:
        names, is_package = finding.culprits, isinstance(subject, Packages)
        lines = {name: subject.line_of(name, frozenset(names)) for name in names if hasattr(subject, "line_of")}
        if len(names) == 1 and lines.get(names[0]) is not None:
            line = lines[names[0]]
            search = LineSearch(line, self._laboratory, self._is_complete, self._count)
            # Below other changes the values may be others than those that were compared.
            inner = search.between(line.values[0], line.values[-1])
            if inner:
                return [self._value(subject, names[0], each) for each in inner]
        details = "\n".join(subject.description(name) for name in names) if not is_package else ""
        state, before = (dict(finding.after), dict(finding.before)) if is_package else ({}, {})
        labels = tuple(f"{name}=={state[name]}" for name in names) if is_package else names
        return [Culprit(finding.place, labels, labels, (), details, "", notes_of(labels, before))]

    def _value(self, subject: Any, name: str, finding: Finding[Any]) -> Culprit:
        """Return the culprit for a value of a package or a variable."""
        values = [dict(state)[name] for state in finding.suspects]
        before, value = dict(finding.before).get(name), values[-1]
        if not isinstance(subject, Packages):
            labels = tuple(subject.setting(name, each) for each in values)
            names = (name,) if len(values) == 1 else ()
            text = f"{subject.description(name)}; from {labels[-1]} on" if names else ""
            return Culprit(finding.place, names, labels, () if names else labels, text)
        labels = tuple(f"{name}=={each}" for each in values)
        if len(values) > 1:
            return Culprit(finding.place, (), labels, labels)
        diff = subject.description(finding.before, finding.after, name)
        path = self._write(f"{name}-{before}-{value}.diff", diff) if diff else ""
        details = subject.changelog(finding.after, name) or f"{name} {value} ships no changelog that names it"
        return Culprit(finding.place, labels, labels, (), details, path, notes_of(labels, dict(finding.before)))

    def _write(self, name: str, text: str) -> str:
        path = self._folder / name
        path.write_text(text, encoding="utf-8")
        return str(path)


def _search_of(
    kind: str, bisection: Bisection, subject: Any, console: Console
) -> tuple[Any, Any, Callable[[], list[Culprit]]]:
    """Return the good and the bad state, and the search; say how long it may take."""
    if kind == "commits":
        count = len(subject.suspects({subject.start}, subject.end))
        console.print(f"{count} commits; {most_runs(count)} runs at most find one that can be judged")
        return subject.start, subject.end, lambda: bisection.commits(subject)
    names = subject.names
    if kind == "packages":
        counts = [f"{len(package.versions)} versions of {package.name}" for package in subject.packages.values()]
        console.print(", ".join(counts))
    else:
        console.print(f"{len(names)} {'keys' if kind == 'config' else 'variables'} differ: {', '.join(names)}")
    start, end = subject.make(frozenset()), subject.make(frozenset(names))
    return start, end, lambda: bisection.changes(subject, names)


def _checked(args: argparse.Namespace) -> str:
    """Check the arguments and return what is bisected.

    Raises:
        UsageError: there is no command, or not exactly one thing to bisect.
    """
    check_out(args.json)
    kinds = {"commits": args.good or args.bad, "packages": args.package, "config": args.config, "environment": args.env}
    chosen = [kind for kind, value in kinds.items() if value]
    if len(chosen) != 1:
        raise UsageError(
            "padiff bisect takes --good and --bad, or --package, or --config, or --env; "
            f"got {' and '.join(chosen) or 'none of them'}"
        )
    if not args.args:
        raise UsageError("padiff bisect: the training's command is missing; it stands behind --")
    if args.steps < 1:
        raise UsageError(f"--steps has to be at least 1, got {args.steps}")
    if chosen == ["commits"]:
        if not args.good:
            raise UsageError("--good is missing: a commit whose training is right")
        args.bad = args.bad or "HEAD"
    return chosen[0]
