"""Searches for what makes two trainings differ: along a line of states, and in a set of changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from padiff.errors import PadiffError

State = TypeVar("State", bound=Hashable)
_Judged = TypeVar("_Judged", bound=Hashable, contravariant=True)
#: Verdicts on a state: it agrees with the good one at the place, it differs there, it cannot be judged.
GOOD, BAD, SKIP = "good", "bad", "skip"


# Number of changes that are tried one by one.
_PAIR = 2


class TrialError(PadiffError):
    """A trial that cannot be judged; the message says why."""


@dataclass(frozen=True)
class Finding(Generic[State]):
    """The cause of a difference.

    Attributes:
        place: where it shows.
        before, after: states without and with it.
        culprits: changes that make the difference together; of a line, empty.
        suspects: states of a line of which one is to blame: the others could not be judged. It holds the culprit alone
            if that is certain; of a set it is empty.
    """

    place: Any
    before: State
    after: State
    culprits: tuple[str, ...] = ()
    suspects: tuple[Any, ...] = ()


class Line(Protocol[State]):
    """States in an order: commits, versions."""

    def middle(self, good: Collection[State], bad: State, skipped: Collection[State]) -> State | None:
        """Return the state to try next; `None` if none is left."""

    def suspects(self, good: Collection[State], bad: State) -> list[State]:
        """Return the states that are not known to be good, up to the bad one, in their order."""

    def before(self, state: State) -> State | None:
        """Return the state before another one; `None` if there is none."""


class Judge(Protocol[_Judged]):
    """Runs states and compares them."""

    def difference(self, reference: _Judged, state: _Judged) -> Any:
        """Return the place where two states first differ, in all steps; `None` if they match.

        Raises:
            TrialError: one of them cannot be judged.
        """

    def verdict(self, reference: _Judged, end: _Judged, place: Any, state: _Judged) -> str:
        """Return the verdict on a state at the place where the end differs from the reference."""

    def check_repeats(self, state: _Judged, place: Any) -> None:
        """Check that two runs of one state agree at a place, unless a comparison has shown it already.

        Raises:
            TrialError: they do not.
        """

    def expect(self, count: int) -> None:
        """Tell among how many states the search goes on."""

    def remark(self, text: str) -> None:
        """Add a remark to the result."""


@dataclass
class LineSearch(Generic[State]):
    """Finds the states of a line at which the training changes.

    Args:
        line: the states.
        judge: runs and compares them.
        is_complete: False to end at the first finding.
        on_finding: called when a culprit is known.
    """

    line: Line[State]
    judge: Judge[State]
    is_complete: bool = True
    on_finding: Callable[[], None] = field(default=lambda: None)

    def between(self, start: State, end: State) -> list[Finding[State]]:
        """Return the findings between two states, that of the first difference first.

        Raises:
            TrialError: one of the two cannot be judged, or does not repeat itself.
        """
        place = self.judge.difference(start, end)
        if place is None:
            return []
        good, bad, skipped, last_good = {start}, end, set[State](), start
        while (state := self.line.middle(good, bad, skipped)) is not None:
            self.judge.expect(len(self.line.suspects(good, bad)))
            verdict = self.judge.verdict(start, end, place, state)
            if verdict == BAD:
                bad = state
            elif verdict == GOOD:
                good.add(state)
                last_good = state
            else:
                skipped.add(state)
        suspects = tuple(self.line.suspects(good, bad))
        self.on_finding()
        before = self.line.before(bad) if len(suspects) == 1 else last_good
        before = last_good if before is None else before
        finding = Finding(place, before, bad, suspects=suspects)
        if not self.is_complete:
            self.judge.check_repeats(start, place)
            return [finding]
        later = self._more(bad, end)
        self.judge.check_repeats(start, place)
        return [finding, *self._searched(start, before, self._more(start, before)), *self._searched(bad, end, later)]

    def _more(self, start: State, end: State) -> bool:
        """Return True if two states differ, too."""
        return start != end and _differ(self.judge, start, end)

    def _searched(self, start: State, end: State, differ: bool) -> list[Finding[State]]:
        return self.between(start, end) if differ else []


@dataclass
class ChangeSearch(Generic[State]):
    """Finds the smallest sets of changes that make the training differ.

    Args:
        make: makes the state that has some of the changes.
        judge: runs and compares states.
        is_complete: False to end at the first finding.
        on_finding: called when a culprit is known.
        suspect: returns a change that a place names by itself, which is tried first; `None` if there is none.
    """

    make: Callable[[frozenset[str]], State]
    judge: Judge[State]
    is_complete: bool = True
    on_finding: Callable[[], None] = field(default=lambda: None)
    suspect: Callable[[Any], str | None] = field(default=lambda _: None)

    def among(self, changes: Sequence[str], base: frozenset[str] = frozenset()) -> list[Finding[State]]:
        """Return the findings among changes, that of the first difference first.

        Args:
            changes: the changes.
            base: changes that both sides have.

        Raises:
            TrialError: the state with all or with none of the changes cannot be judged, or does not repeat itself.
        """
        start, end = self.make(base), self.make(base.union(changes))
        place = self.judge.difference(start, end)
        if place is None:
            return []

        def verdict(subset: Sequence[str]) -> str:
            return self.judge.verdict(start, end, place, self.make(base.union(subset)))

        suspect = self.suspect(place)
        if suspect is not None and suspect in changes and len(changes) > 1 and verdict((suspect,)) == BAD:
            culprits: tuple[str, ...] = (suspect,)
            self.on_finding()
        else:
            culprits, joined = smallest(tuple(changes), verdict, self.judge.expect, self.on_finding)
            if joined:
                self.judge.remark(
                    f"{' and '.join(joined)} are named together: with some of them alone the command does not run"
                )
        others = tuple(change for change in changes if change not in culprits)
        # Without the culprits, for a change that they hide; and on top of them, for one that acts only with them.
        alone = self.is_complete and bool(others) and _differ(self.judge, start, self.make(base.union(others)))
        self.judge.check_repeats(start, place)
        finding = Finding(place, start, self.make(base.union(culprits)), culprits)
        if not self.is_complete:
            return [finding]
        findings = [finding, *(self.among(others, base) if alone else [])]
        effective = base.union(*(each.culprits for each in findings))
        others = tuple(change for change in others if change not in effective)
        if others and _differ(self.judge, self.make(effective), end):
            findings += self.among(others, effective)
        return findings


def smallest(
    changes: tuple[str, ...],
    verdict: Callable[[Sequence[str]], str],
    expect: Callable[[int], None] = lambda _: None,
    on_finding: Callable[[], None] = lambda: None,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return changes that make the difference, none of which can be left out; and those of them not tried apart.

    The second part is empty if each trial that matters can be judged. Without one of its changes no state that runs
    makes the difference. Each change that is found takes about
    ``log2(len(changes))`` trials, and one that shows whether it makes the difference by itself.

    Args:
        changes: all changes; together they make the difference.
        verdict: the verdict on a subset.
        expect: called with the number of changes that are left.
        on_finding: called when a culprit is known, before it is tried alone.
    """
    culprits: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    while True:
        low, high, skipped = 0, len(changes), set[int]()
        while (middle := _nearest(low, high, skipped)) is not None:
            expect(high - low)
            if low and not culprits and high - low == _PAIR:
                # One of two, each tried alone: the trial that tells them apart also shows that it acts by itself.
                single = next(((x,) for x in changes[low:high] if verdict((x,)) == BAD), None)
                if single is not None:
                    on_finding()
                    return single, joined
            answer = verdict((*culprits, *changes[:middle]))
            if answer == BAD:
                high = middle
            elif answer == GOOD:
                low = middle
            else:
                skipped.add(middle)
        context, last = changes[:low], changes[high - 1 : high]
        if high - low > 1:
            singles = reversed(changes[low:high])
            last = next(((x,) for x in singles if verdict((*culprits, *context, x)) == BAD), changes[low:high])
            for x in last if len(last) > 2 else ():
                rest = tuple(each for each in last if each != x)
                if len(rest) > 1 and verdict((*culprits, *context, *rest)) == BAD:
                    last = rest
            joined = (*joined, *last) if len(last) > 1 else joined
        on_finding()
        culprits, changes = (*last, *culprits), context
        if not changes or verdict(culprits) == BAD:
            return culprits, joined


def _nearest(low: int, high: int, skipped: Collection[int]) -> int | None:
    """Return the number between two others that is nearest to their middle and was not skipped."""
    numbers = [number for number in range(low + 1, high) if number not in skipped]
    return min(numbers, key=lambda number: abs(2 * number - low - high), default=None)


def _differ(judge: Judge[Any], start: Any, end: Any) -> bool:
    """Return True if two states differ; False, with a note, if they cannot be compared."""
    try:
        return judge.difference(start, end) is not None
    except TrialError as error:
        judge.remark(f"whether there is another cause is not known: {error}")
        return False


@dataclass(frozen=True)
class Values:
    """A line of values in their order."""

    values: tuple[Any, ...]

    def middle(self, good: Collection[Any], bad: Any, skipped: Collection[Any]) -> Any:
        """Return the value in the middle between the last good one and the bad one."""
        low = max(self.values.index(value) for value in good if value in self.values[: self.values.index(bad)])
        high = self.values.index(bad)
        number = _nearest(low, high, {self.values.index(value) for value in skipped})
        return None if number is None else self.values[number]

    def suspects(self, good: Collection[Any], bad: Any) -> list[Any]:
        """Return the values after the last good one, up to the bad one."""
        high = self.values.index(bad)
        low = max(self.values.index(value) for value in good if value in self.values[:high])
        return list(self.values[low + 1 : high + 1])

    def before(self, state: Any) -> Any:
        """Return the value before another one."""
        number = self.values.index(state)
        return self.values[number - 1] if number else None
