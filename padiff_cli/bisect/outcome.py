"""Result of a bisection, as text and as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from padiff.records import Both, Report
from padiff.records.diagnostic import diagnostic_of
from padiff_cli.bisect.laboratory import Attempt
from padiff_cli.bisect.verdict import Place
from padiff_hooks.show import print_report

SCHEMA_VERSION = 1
FOUND, MATCHES, UNKNOWN = "found", "match", "cannot tell"
# Lines of a culprit's diff that are printed.
_DIFF_LINES = 30
_FRAMEWORKS = re.compile(r"(torch|paddlepaddle(-gpu)?)==")


@dataclass(frozen=True)
class Culprit:
    """A cause of the difference.

    Attributes:
        place: where it shows.
        names: commit, ``package==version``, or keys that make the difference together; empty if not certain.
        labels: the names as messages print them.
        suspects: if not certain, those of which one is to blame.
        details: commit with its diff, lines of the changelog, or the values.
        diff: path of the whole diff; empty if there is none.
        notes: remarks.
    """

    place: Place
    names: tuple[str, ...]
    labels: tuple[str, ...]
    suspects: tuple[str, ...] = ()
    details: str = ""
    diff: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The result of a bisection.

    Attributes:
        kind: ``commits``, ``packages``, ``config`` or ``environment``.
        folder: the folder of the bisection.
        culprits: the causes, that of the first difference first.
        trouble: why it cannot be told; empty if it can.
        report: the comparison of the good and the bad run; `None` if there was none.
        runs: the two run folders.
        attempts: what was run.
        search_runs, run_count, new_runs: number of runs until the first culprit was found, of all runs, and of those
            that were made now.
        seconds: how long it took.
        steps: number of compared steps.
        notes: remarks.
    """

    kind: str
    folder: Path
    culprits: Sequence[Culprit]
    trouble: str
    report: Report | None
    runs: Both[str]
    attempts: Sequence[Attempt]
    search_runs: int
    run_count: int
    new_runs: int
    seconds: float
    steps: int
    notes: Sequence[str]

    @property
    def outcome(self) -> str:
        """Return ``found``, ``match`` or ``cannot tell``."""
        if self.trouble or any(not culprit.names for culprit in self.culprits):
            return UNKNOWN
        return FOUND if self.culprits else MATCHES

    def to_json(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return {
            "schema_version": SCHEMA_VERSION,
            "kind": self.kind,
            "outcome": self.outcome,
            "culprits": [name for culprit in self.culprits for name in culprit.names],
            "findings": [
                {
                    "culprits": list(culprit.names),
                    "suspects": list(culprit.suspects),
                    "place": culprit.place.to_json(),
                    "details": culprit.details,
                    "diff": culprit.diff,
                    "notes": list(culprit.notes),
                }
                for culprit in self.culprits
            ],
            "trouble": self.trouble,
            "diagnostic": None if self.report is None else asdict(diagnostic_of(self.report, self.runs)),
            "trials": [asdict(attempt) for attempt in self.attempts],
            "runs": self.run_count,
            "search_runs": self.search_runs,
            "new_runs": self.new_runs,
            "seconds": round(self.seconds, 1),
            "steps": self.steps,
            "notes": list(self.notes),
            "folder": str(self.folder),
        }

    def show(self, console: Console) -> None:
        """Print the result."""
        console.print()
        if self.report is not None and self.report.first_diff is not None:
            console.print("The bad run against the good one:\n")
            print_report(self.report, console, runs=self.runs)
            console.print()
        for number, culprit in enumerate(self.culprits):
            self._show_culprit(culprit, number, console)
        if self.trouble:
            console.print(f"CANNOT TELL  {self.trouble}", style="bold yellow")
        elif not self.culprits:
            console.print(
                f"MATCH  the good and the bad run match in the first {self.steps} steps. "
                "If the fault shows later, give more --steps",
                style="bold green",
            )
        for note in self.notes:
            console.print(f"note: {note}")
        count = f"{self.run_count} run{'s' * (self.run_count != 1)}"
        console.print(f"{count}, {self.new_runs} of them now, {self.seconds:.0f} s; all of it is in {self.folder}")

    def _show_culprit(self, culprit: Culprit, number: int, console: Console) -> None:
        if not culprit.names:
            head = "SUSPECTS  one of these, which could not all be judged:"
        elif len(culprit.names) > 1:
            head = f"CULPRITS{' (another cause)' * (number > 0)}  only together:"
        else:
            head = f"CULPRIT{' (another cause)' * (number > 0)}"
        labels = culprit.labels
        if len(labels) == 1:
            console.print(f"{head}  {labels[0]}", style="bold red")
        else:
            console.print(head, style="bold red")
            for label in labels:
                console.print(f"  {label}", style="bold red")
        console.print(f"  shows at {culprit.place.description}")
        lines = culprit.details.splitlines()
        for line in lines[:_DIFF_LINES]:
            console.print(f"    {line}")
        if len(lines) > _DIFF_LINES:
            console.print(f"    ... {len(lines) - _DIFF_LINES} more lines")
        if culprit.diff:
            console.print(f"  the whole diff: {culprit.diff}")
        for note in culprit.notes:
            console.print(f"  note: {note}")
        console.print()


def notes_of(names: Sequence[str], before: Mapping[str, str]) -> tuple[str, ...]:
    """Return where to read on about a culprit: for a framework the commands that write the page of its changes.

    Args:
        names: the culprits, ``package==version``.
        before: the version before of each package that is known, by name.
    """
    notes = []
    for name in names:
        if _FRAMEWORKS.match(name):
            package = name.partition("==")[0]
            old = before.get(package, "OLD")
            notes.append(
                f"what changed in {package}, operation by operation, with torch and paddle in both environments: "
                f"with {package}=={old}: padiff atlas --json old.json; with {name}: "
                "padiff atlas --changes old.json --markdown changes.md"
            )
    return tuple(notes)
