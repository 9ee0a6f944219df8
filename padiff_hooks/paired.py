"""Comparison of two run folders that may still grow, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from padiff.compare import Policy, RunComparison
from padiff.compare.replicas import ReplicaCheck
from padiff.dump.format import RUN_FILE
from padiff.dump.prepare import Zoom, missing_steps_lines
from padiff.dump.store import AnyPath, absolute, run_folder
from padiff.errors import RunFolderError
from padiff.model.given_map import GivenMap
from padiff.records import Both, Report, Run, RunInfo
from padiff_hooks.replaced import Recording
from padiff_hooks.zooming import Zooming

#: Seconds to wait after a step can't be read, until a folder that is being removed is gone.
_SETTLING = 0.5


class PairedRuns:
    """A comparison of two runs that compares each step once, as soon as both runs have written the step.

    Either run may start later, pause, or end early. If a folder gets a new recording (it is overwritten, or removed and
    created again), the comparison starts from the beginning. A resumed recording continues the comparison.

    Args:
        reference, candidate: run folders, which need not exist yet.
        layer_map: layers that correspond to each other, in a form that `padiff.model.given_map.GivenMap.from_value`
            accepts.
        policy: rule for when a diff passes. Default: `padiff.NoisePolicy`.
        done: steps that were compared before a restart.
        zoom: True to request full tensors from running recorders when a sketch is beyond its limit.
        begin: called with the identities of the two recordings once both exist, and again when a folder gets a new
            recording; returns the steps that were compared before, which replace ``done``.

    Attributes:
        asked: the last request for full tensors, or `None`.
        ranks: after a report, new findings on the ranks of one run that disagree with each other, a sentence each.
    """

    def __init__(
        self,
        reference: str | AnyPath,
        candidate: str | AnyPath,
        *,
        layer_map: GivenMap | Mapping[Any, Any] | Iterable[Any] | str | None = None,
        policy: Policy | None = None,
        done: Collection[int] = (),
        zoom: bool = True,
        begin: Callable[[Both[str]], Collection[int]] | None = None,
    ) -> None:
        paths = Both(run_folder(reference, "reference"), run_folder(candidate, "candidate"))
        self._paths = paths.map(absolute)
        self._map = GivenMap.from_value(layer_map)
        self._policy = policy
        self._first_done: Collection[int] = done
        self._done: set[int] = set()
        self._begin = begin
        self._comparison: RunComparison | None = None
        self._recordings: Iterable[Recording] = ()
        self._zoom, self._zooming = zoom, Zooming(self._paths)
        self.asked: Zoom | None = None
        self._replicas: Both[_Replicas] | None = None
        self.ranks: list[str] = []
        self._lost: set[str] = set()

    @property
    def started(self) -> Both[bool]:
        """Return for each run True if its run file exists."""
        return self._paths.map(_is_begun)

    @property
    def runs(self) -> Both[Run] | None:
        """Return the two runs, or `None` until both exist."""
        comparison = self._opened()
        return comparison.runs if comparison is not None else None

    def before(self, step: int, candidate: RunInfo) -> Report | None:
        """Return a report of the settings that differ before the first step (`RunComparison.before`).

        Returns `None` if the settings agree or if a run does not exist yet.
        """
        comparison = self._opened()
        return comparison.before(step, candidate) if comparison is not None else None

    def poll(self) -> Iterator[Report]:
        """Yield a report for each step that both runs have and that was not compared before.

        Raises:
            RunFolderError: a step can't be read.
            UsageError: the layer map does not fit the runs.
        """
        again = True
        while again:
            again = False
            comparison = self._opened()
            for number in comparison.common() if comparison is not None else ():
                if number in self._done or comparison is None:
                    continue
                report = self._compared(comparison, number)
                # A step that was read while a new recording began may mix both recordings.
                again = self._began_anew()
                if again:
                    break
                if report is not None:
                    self._done.add(number)
                    for recording in self._recordings:
                        recording.latest = max(recording.latest, number)
                    if self._zoom:
                        self.asked = self._zooming.request(report, comparison.runs)
                    if self._replicas is not None:
                        self.ranks = [line for replicas in self._replicas for line in replicas.check_step(number)]
                    yield report

    def lost(self) -> list[str]:
        """Return new sentences on steps that can't be compared because a rank did not write them."""
        runs = self.runs
        lines = (
            [line for run, path in runs.zip(self._paths) for line in missing_steps_lines(run, str(path))]
            if runs
            else []
        )
        new = [line for line in lines if line not in self._lost]
        self._lost.update(new)
        return new

    def finished(self) -> bool:
        """Return True if both runs have ended and every common step is compared."""
        comparison = self._opened()
        if comparison is None or not all(run.finished() for run in comparison.runs):
            return False
        return all(number in self._done for number in comparison.common())

    def _compared(self, comparison: RunComparison, number: int) -> Report | None:
        """Return the report of a step, or `None` if the step was removed in the meantime."""
        try:
            return comparison.compare(number)
        except RunFolderError:
            # A recorder with a max_bytes limit may remove a step while the step is read.
            if number not in comparison.common():
                return None
            time.sleep(_SETTLING)
            if self._began_anew() or not all(self.started) or number not in comparison.common():
                return None
            raise

    def _opened(self) -> RunComparison | None:
        if self._comparison is not None and self._began_anew():
            self._comparison = None
            self._first_done = ()
            self._zooming, self.asked = Zooming(self._paths), None
            self._lost.clear()
        if self._comparison is None and all(self.started):
            recordings = self._paths.map(Recording)
            runs = recordings.map(lambda recording: recording.run)
            self._comparison = RunComparison(runs.reference, runs.candidate, self._map, self._policy)
            self._recordings = recordings
            self._replicas = runs.zip(self._paths).map(lambda both: _Replicas(*both))
            done = self._first_done
            if self._begin is not None:
                done = self._begin(runs.map(lambda run: run.info.identity))
            self._done = set(done)
        return self._comparison

    def _began_anew(self) -> bool:
        return any(recording.is_replaced() for recording in self._recordings)


def _is_begun(path: AnyPath) -> bool:
    try:
        return (path / RUN_FILE).exists()
    except OSError as error:
        raise RunFolderError(f"{path} can't be read ({error})") from error


class _Replicas:
    """Check of the ranks of one run against each other, step by step (`padiff.compare.replicas`)."""

    def __init__(self, run: Run, path: AnyPath) -> None:
        self._run, self._path = run, path
        self._check = ReplicaCheck(run.info) if run.info.world_size > 1 else None
        self._begun = False

    def check_step(self, number: int) -> list[str]:
        """Return the new findings of a step, a sentence each."""
        if self._check is None:
            return []
        numbers = [number]
        if not self._begun:
            # A restart may begin in the middle; the first step shows the weights that the ranks started with.
            self._begun = True
            numbers = sorted({*self._run.numbers()[:1], number})
        before = len(self._check.findings)
        try:
            for step in numbers:
                self._check.check(self._run.steps(step))
        except RunFolderError:  # the step was removed meanwhile; damaged steps are reported by the comparison
            return []
        return [f"{self._path}: {finding}" for finding in self._check.findings[before:]]
