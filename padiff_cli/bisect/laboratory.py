"""Runs states and compares them, and tells what comes of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from padiff.errors import PadiffError
from padiff.records import Report
from padiff_cli.bisect.search import BAD, GOOD, SKIP, TrialError
from padiff_cli.bisect.trials import Setup, Trials
from padiff_cli.bisect.verdict import Place, compare, judge, place_of
from padiff_hooks.outputs import duration_text


class Subject(Protocol):
    """The subject of a bisection: commits, versions, keys of a config, environment variables."""

    def prepare(self, state: Any) -> Setup:
        """Return how a state is run.

        Raises:
            TrialError: it cannot be made.
        """

    def label(self, state: Any) -> str:
        """Return what messages call a state."""

    def folder_name(self, state: Any) -> str:
        """Return the name of a state's folder."""


@dataclass
class Attempt:
    """A state that was run, for the result.

    Attributes:
        label: the state.
        verdict: ``good``, ``bad``, ``skip``, or ``end`` for a state that was compared as a whole.
        reason: why, in words.
        seconds: how long it took.
        new: it was run now, not by an earlier bisection.
    """

    label: str
    verdict: str
    reason: str
    seconds: float
    new: bool


class Laboratory:
    """Runs and compares states for a search.

    Args:
        subject: what is bisected.
        trials: runs states.
        steps: number of steps of the runs that are compared as a whole.
        say: prints a line.

    Attributes:
        attempts: the states that were run, in their order.
        notes: remarks for the result.
    """

    def __init__(self, subject: Subject, trials: Trials, steps: int, say: Callable[[str], None]) -> None:
        self._subject, self._trials, self._steps, self._say = subject, trials, steps, say
        self.attempts: list[Attempt] = []
        self.notes: list[str] = []
        self._places: dict[tuple[Any, Any], Place | None] = {}
        self._reports: dict[tuple[Any, Any], Report] = {}
        self._ran: set[tuple[str, int]] = set()
        self._agreed: set[Any] = set()

    # -- the search's questions -----------------------------------------------------------------------------------

    def difference(self, reference: Any, state: Any) -> Place | None:
        if (reference, state) not in self._places:
            place = self._difference(reference, state)
            self._places[reference, state] = place
            if place is None:
                self._agreed.add(reference)
        return self._places[reference, state]

    def _difference(self, reference: Any, state: Any) -> Place | None:
        names = [self._subject.folder_name(each) for each in (reference, state)]
        if all(name in {ran for ran, _ in self._ran} for name in names):
            # What trials of few steps have recorded may show it already.
            runs = [self._record(each, 1)[0] for each in (reference, state)]
            place = self._compared(reference, state, *runs)
            if place is not None:
                return place
        (good, _), (bad, attempt) = self._record(reference, self._steps), self._record(state, self._steps)
        place = self._compared(reference, state, good, bad)
        if attempt is not None:
            self._told(attempt, "end", "matches" if place is None else f"differs at {place.description}")
        return place

    def _compared(self, reference: Any, state: Any, good: Any, bad: Any) -> Place | None:
        try:
            report = compare(good.run, bad.run, self._steps)
        except PadiffError as error:
            raise TrialError(f"{self._subject.label(state)} cannot be compared: {error}") from error
        self._reports[reference, state] = report
        return place_of(report)

    def verdict(self, reference: Any, end: Any, place: Place, state: Any) -> str:
        try:
            good, bad = (self._record(each, 1)[0] for each in (reference, end))
            # More steps than show the fault are worth it only if they cost nothing: they show other causes.
            steps = self._steps if good.is_mostly_start else place.step + 1
            # A command that fails behind the place is judged all the same.
            trial, attempt = self._record(state, steps, place.step + 1)
            verdict, reason = judge(place, compare(good.run, trial.run, place.step + 1), bad.run, trial.run)
        except PadiffError as error:
            verdict, reason, attempt = SKIP, str(error), None
        if verdict == GOOD:
            self._agreed.add(reference)
        if attempt is None:
            attempt = Attempt(self._subject.label(state), verdict, reason, 0.0, verdict == SKIP)
            self.attempts.append(attempt)
        self._told(attempt, verdict, reason)
        return verdict

    def check_repeats(self, state: Any, place: Place) -> None:
        if state in self._agreed or self._bad_runs_agree(place):
            return
        name = f"{self._subject.folder_name(state)}-again"
        self._say(f"no run agreed with {self._subject.label(state)} so far: running it again, as a control")
        first, _ = self._record(state, place.step + 1)
        again = self._trials.record(name, state, place.step + 1)
        report = compare(first.run, again.run, place.step + 1)
        verdict, reason = judge(place, report, again.run, again.run)
        self.attempts.append(Attempt(f"{self._subject.label(state)}, again", verdict, reason, again.seconds, True))
        if verdict != GOOD:
            raise TrialError(
                f"the training does not repeat itself: two runs of {self._subject.label(state)} differ at "
                f"{reason}. Seed all random numbers, in data loaders too"
            )
        self._agreed.add(state)

    def expect(self, count: int) -> None:
        seconds = [attempt.seconds for attempt in self.attempts if attempt.seconds]
        runs = math.ceil(math.log2(count)) if count > 1 else 0
        average = sum(seconds) / len(seconds) if seconds else 0.0
        self._say(f"{count} left; about {runs} run{'s' * (runs != 1)}, {duration_text(runs * average)}")

    def remark(self, text: str) -> None:
        self.notes.append(text)

    # -- running --------------------------------------------------------------------------------------------------

    def report_of(self, reference: Any, state: Any) -> Report | None:
        """Return the comparison of two states; `None` if there was none."""
        return self._reports.get((reference, state))

    def run_of(self, state: Any) -> Any:
        """Return the trial of a state that was recorded."""
        return self._record(state, 1)[0]

    @property
    def run_count(self) -> int:
        """Return the number of runs that the search needed, those of an earlier bisection included."""
        return len(self._ran)

    def _record(self, state: Any, steps: int, enough: int | None = None) -> tuple[Any, Attempt | None]:
        name = self._subject.folder_name(state)
        is_new = not self._trials.has(name, steps)
        if is_new:
            self._say(f"running {self._subject.label(state)}, {steps} step{'s' * (steps > 1)} ...")
        try:
            trial = self._trials.record(name, state, steps, enough)
        except TrialError:
            self._ran.add((name, steps))
            raise
        if (name, trial.asked) in self._ran:
            return trial, None
        self._ran.add((name, trial.asked))
        attempt = Attempt(self._subject.label(state), "end", "", trial.seconds, is_new)
        self.attempts.append(attempt)
        return trial, attempt

    def _bad_runs_agree(self, place: Place) -> bool:
        """Return True if two runs with the fault agree with each other, beyond the place where both differ."""
        return any(other is None or other.order > place.order for (_, _), other in self._places.items())

    def _told(self, attempt: Attempt, verdict: str, reason: str) -> None:
        attempt.verdict, attempt.reason = verdict, reason
        word = {GOOD: "good", BAD: "bad", SKIP: "cannot be judged", "end": ""}[verdict]
        text = ": ".join(part for part in (word, reason) if part)
        self._say(f"  {text}{f'  ({attempt.seconds:.1f} s)' if attempt.seconds else ''}")


def most_runs(count: int) -> int:
    """Return the number of runs that a search among so many states needs."""
    return math.ceil(math.log2(count)) + 2 if count > 1 else 2
