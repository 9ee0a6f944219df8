"""Verdict on a trial: does it differ from the good run at the place where the bad run differs first?"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from padiff.compare import compare_runs
from padiff.compare.coverage import first_failed, ranks_of
from padiff.records import STAGES, Diff, Report
from padiff.records.diagnostic import Diagnostic, diagnostic_of
from padiff_cli.bisect.search import BAD, GOOD, SKIP, TrialError


@dataclass(frozen=True)
class Place:
    """The place of the first difference of two runs.

    Attributes:
        step, stage, layer, slot: position; the layer by the reference's path, ``slot`` also names a setting.
        is_setting: the difference is in what the runs declare, and no tensor shows it.
        where: the position in words.
        cause: the cause in words; empty if none is known.
        rank: number of the process.
        recorded: layer and slot of the recorded tensor that differs first: the position may be a call before it.
    """

    step: int
    stage: str
    layer: str | None
    slot: str
    is_setting: bool
    where: str
    cause: str
    rank: int = 0
    recorded: tuple[str, str] | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Return the position in causal order."""
        return self.step, STAGES.index(self.stage)

    @property
    def description(self) -> str:
        """Return the position and the cause in words."""
        text = f"step {self.step}, {self.stage}: {self.where}"
        return f"{text}: {self.cause}" if self.cause else text

    def to_json(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return asdict(self)


def compare(reference: Path, candidate: Path, steps: int) -> Report:
    """Compare the first steps of two runs."""
    return compare_runs(reference, candidate, steps=range(steps))


def place_of(report: Report) -> Place | None:
    """Return the place of a report's first difference; `None` if the runs match.

    Raises:
        TrialError: the comparison cannot tell.
    """
    first = report.first_diff
    if first is None:
        if not report.passed:
            raise TrialError("parameters that train have no record, so the comparison cannot tell")
        return None
    brief: Diagnostic = diagnostic_of(report)
    cause = "" if brief.cause is None else brief.cause.text
    where = brief.where or first.slot or first.statement
    rank = 0 if first.diff is None else _rank_of(first.diff, report)
    failed = None if first.diff is None else first_failed(report.diffs)
    recorded = None if failed is None else (failed.pair.anchor.layer, failed.pair.anchor.slot)
    return Place(first.step, first.stage, first.reference, first.slot, first.diff is None, where, cause, rank, recorded)


def judge(place: Place, report: Report, against_bad: Path, trial: Path) -> tuple[str, str]:
    """Return the verdict on a trial, and the reason in words.

    Args:
        place: the place of the first difference of the good and the bad run.
        report: the comparison of the good run and the trial, up to this step.
        against_bad: the bad run, which the trial is compared with if it differs earlier.
        trial: the trial's run.
    """
    if place.step not in report.coverage.steps:
        return SKIP, f"it recorded no step {place.step}"
    if place.is_setting:
        names = {difference.name for difference in report.settings_differ if difference.changes}
        return (BAD, "the setting differs") if place.slot in names else (GOOD, "")
    found = place_of(report)
    if found is None:
        return GOOD, ""
    diff = _diff_at(place, report)
    recorded = diff if diff is not None or place.recorded is None else _diff_at(_recorded(place), report)
    if recorded is not None and recorded.passed:
        return GOOD, f"differs elsewhere: {found.description}"
    if found.order > place.order:
        return GOOD, f"differs later: {found.description}"
    if found.order == place.order and (found.layer, found.slot, found.rank) == (place.layer, place.slot, place.rank):
        return BAD, found.description
    if found.order == place.order and diff is not None and not _is_before(found, place, report):
        return BAD, found.description
    # Another difference comes first. The tensor at the place tells more if it is the bad run's.
    same = _diff_at(_recorded(place) if diff is None else place, compare(against_bad, trial, place.step + 1))
    if same is not None and same.passed:
        return BAD, found.description
    return SKIP, f"another difference hides the place: {found.description}"


def _recorded(place: Place) -> Place:
    """Return the place of the recorded tensor that differs first."""
    layer, slot = place.recorded or (place.layer, place.slot)
    return replace(place, layer=layer, slot=slot)


def _diff_at(place: Place, report: Report) -> Diff | None:
    """Return the compared diff of the tensor at a place; `None` if the tensor was not compared."""
    ranks = ranks_of([diff for diff in report.diffs if diff.pair.step == place.step])
    for diff in ranks[place.rank] if place.rank < len(ranks) else ():
        record = diff.pair.anchor
        if diff.compared and (record.stage, record.layer, record.slot) == (place.stage, place.layer, place.slot):
            return diff
    return None


def _rank_of(first: Diff, report: Report) -> int:
    """Return the number of the process that a diff is of."""
    ranks = ranks_of([diff for diff in report.diffs if diff.pair.step == first.pair.step])
    place = (first.pair.step, first.pair.anchor.site)
    failed = ([(d.pair.step, d.pair.anchor.site) for d in diffs if not d.passed] for diffs in ranks)
    return next((rank for rank, places in enumerate(failed) if place in places), 0)


def _is_before(found: Place, place: Place, report: Report) -> bool:
    """Return True if a place comes before another one in the causal order of a report."""
    for diff in report.diffs:
        for record in diff.pair.sides:
            if record is not None and diff.pair.step == place.step and record.stage == place.stage:
                if (record.layer, record.slot) == (place.layer, place.slot):
                    return False
                if (record.layer, record.slot) == (found.layer, found.slot):
                    return True
    return False
