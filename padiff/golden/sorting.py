"""Sorting of a run against a golden run: equal, drift, or fault."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from padiff.compare import compare_runs
from padiff.dump import open_run
from padiff.golden.folder import Golden, mark_of_run, steps_of_run
from padiff.golden.noise import marks_of
from padiff.golden.policy import GoldenPolicy, Movement
from padiff.records import NO_TRACE, Both, Report, Run, Step, Trace, TracedCall
from padiff.records.diagnostic import Diagnostic, diagnostic_of
from padiff.records.environment_differences import differences

EQUAL, DRIFT, FAULT, UNKNOWN = "equal", "drift", "fault", "cannot tell"
_OF_PARAMETERS = ("weight", "grad", "update")


@dataclass(frozen=True)
class Sorted:
    """A run, sorted against a golden run.

    Attributes:
        golden: the golden run.
        run: the folder of the new run.
        sort: `EQUAL`, `DRIFT`, `FAULT` or `UNKNOWN`.
        mark: the digest of all tensors of the new run.
        report: the comparison; `None` if the runs are equal.
        moved: the tensors that are not equal to the bit, in causal order.
        environment: what differs around the training, that which can change numbers first.
        reason: what is wrong beside the report: other steps, another argument of a function; empty if nothing is.
    """

    golden: Golden
    run: Path
    sort: str
    mark: str
    report: Report | None
    moved: tuple[Movement, ...]
    environment: tuple[str, ...]
    reason: str = ""

    @property
    def first(self) -> Movement | None:
        """Return the first tensor to move."""
        return self.moved[0] if self.moved else None

    @property
    def largest(self) -> Movement | None:
        """Return the tensor that is nearest to its limit, or farthest beyond."""
        return max(self.moved, key=lambda each: each.share, default=None)

    @property
    def missing(self) -> tuple[str, ...]:
        """Return the tensors of the golden run that the new run has not recorded."""
        return () if self.report is None else self.report.coverage.reference_sites

    @property
    def diagnostic(self) -> Diagnostic | None:
        """Return the verdict of the comparison; `None` if the runs are equal."""
        return None if self.report is None else diagnostic_of(self.report, Both(str(self.golden.folder), str(self.run)))

    def layers(self) -> list[dict[str, Any]]:
        """Return the error of each tensor that moved, beside its noise and its limit, for JSON."""
        return [
            {
                "step": each.step,
                "site": each.site,
                "error": each.error,
                "units": round(each.units, 3),
                "errors": each.errors._asdict(),
                "limits": each.limits._asdict(),
                "share_of_limit": round(each.share, 5),
            }
            for each in self.moved
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the values for JSON."""
        diagnostic = self.diagnostic if self.sort in (FAULT, UNKNOWN) else None
        return {
            "name": self.golden.name,
            "sort": self.sort,
            "reason": self.reason,
            "first": self.layers()[0] if self.moved else None,
            "largest": None if self.largest is None else self.layers()[self.moved.index(self.largest)],
            "environment": list(self.environment),
            "not_compared": list(self.missing),
            "diagnostic": None if diagnostic is None else asdict(diagnostic),
            "mark": {"golden": self.golden.mark, "now": self.mark},
            "left_out": self.golden.left_out,
        }


def _changed_argument(golden: Golden, steps: Sequence[Step]) -> str:
    """Return a sentence on the first number that is another argument of the same call of a function; empty if none is.

    A number may change less than rounding does, and is another training all the same.
    """
    for step in steps:
        if step.number not in golden.steps:
            continue
        before, now = (_functions(each.trace) for each in (golden.run.steps(step.number)[0], step))
        for place, calls in now.items():
            old = before.get(place, [])
            if len(old) != len(calls):  # the code was written otherwise
                continue
            for was, call in zip(old, calls):
                for name in sorted(was.arguments.keys() & call.arguments.keys()):
                    values = was.arguments[name], call.arguments[name]
                    if any(type(value) not in (int, float) for value in values):
                        continue
                    if repr(values[0]) != repr(values[1]) and not math.isclose(*values):
                        line = f", {call.line.file}:{call.line.line}" if call.line is not None else ""
                        return (
                            f"step {step.number}, {call.layer}: {call.function}() is called with {name} {values[1]!r}, "
                            f"it was {values[0]!r}{line}"
                        )
    return ""


def _functions(trace: Trace) -> dict[tuple[str, int, str], list[TracedCall]]:
    """Return the calls of functions, by layer, call of the layer and function."""
    calls: dict[tuple[str, int, str], list[TracedCall]] = {}
    for call in trace.calls:
        if call.function:
            calls.setdefault((call.layer, call.call, call.function), []).append(call)
    return calls


class _Thinned:
    """A run without the tensors that are left out of a golden run."""

    def __init__(self, run: Run, golden: Golden) -> None:
        self._run, self._golden = run, golden
        self.name, self.info, self.numbers, self.finished = run.name, run.info, run.numbers, run.finished

    def steps(self, number: int) -> list[Step]:
        """Return a step with the tensors that the golden run has."""
        sites = self._golden.marks.get(number, {})
        return [
            replace(step, records=tuple(r for r in step.records if r.site in sites), trace=NO_TRACE)
            for step in self._run.steps(number)
        ]


def sort_run(golden: Golden, folder: Path) -> Sorted:
    """Sort a run against a golden run.

    Raises:
        RunFolderError: the run can't be read.
        UsageError: several processes recorded it.
    """
    steps = steps_of_run(folder)
    run = open_run(folder)
    environment = differences(golden.run.info, run.info)
    mark = mark_of_run(steps)
    numbers = Both(golden.steps, [step.number for step in steps])
    reason = ""
    if numbers.reference != numbers.candidate:
        reason = f"the golden run has the steps {numbers.reference}, the one of now {numbers.candidate}"
    unequal: dict[int, set[str]] = {}
    for step in steps:
        before = golden.marks.get(step.number, {})
        unequal[step.number] = {site for site, now in marks_of(step).items() if before.get(site) != now}
    reason = reason or _changed_argument(golden, steps)
    policy = GoldenPolicy(golden.noise, golden.dtype, golden.steps[0], unequal, not golden.left_out)
    report = compare_runs(golden.run, _Thinned(run, golden) if golden.left_out else run, policy=policy)
    moved = tuple(policy.moved)
    first = report.first_diff
    if mark == golden.mark and not reason and (first is None or first.diff is not None):
        return Sorted(golden, folder, EQUAL, mark, None, (), environment)
    if reason or first is not None:
        sort = FAULT
    else:
        # What a thinned golden run has not recorded shows in the tensors that it has, if the new run has them, too.
        has_parameters = not any(site.split("/")[-2] in _OF_PARAMETERS for site in report.coverage.reference_sites)
        sort = DRIFT if report.passed or (golden.left_out and has_parameters) else UNKNOWN
    return Sorted(golden, folder, sort, mark, report, moved, environment, reason)
