"""Comparing two runs, step by step."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from padiff.align import Alignment, Seen, align, resolved
from padiff.compare.boundaries import cut_elsewhere
from padiff.compare.coverage import Tally
from padiff.compare.diagnose.causes import first_diff, setting_diff
from padiff.compare.findings import Findings
from padiff.compare.judge.absent import AbsentStages
from padiff.compare.judge.drift import NONE, doubted, drift
from padiff.compare.judge.noise import NoisePolicy
from padiff.compare.judge.policy import Policy
from padiff.compare.judge.unrecorded import Unrecorded, excused, with_unrecorded
from padiff.compare.measure.sketches import measure_pair
from padiff.compare.workers import Workers, check_workers
from padiff.dump import SingleDump, open_run
from padiff.environment import differences
from padiff.errors import NothingToCompareError, UsageError
from padiff.model.layer_map import LayerMap
from padiff.model.selection import nearest
from padiff.pair.processes import ranks_told
from padiff.pair.ranks import left_out, rank_steps, step_pairs, weights_known
from padiff.records import LOOP, PARAMETER_STAGES, STAGES, Both, Diff, FirstDiff, Pair, Report, Run, RunInfo, Step

# Seconds between two looks at how much of a step is measured.
_TICK = 0.2


class RunComparison:
    """Compares two runs a step at a time, so that runs that still grow can be compared.

    Args:
        reference, candidate: the run to trust, the run in question.
        layer_map: layers that answer to each other, as `padiff.model.layer_map.LayerMap.of` takes them.
        policy: when a diff passes. Default: `NoisePolicy`.
        stages: only these stages are reported; a policy may look at the others for what it allows these.
        layers: only layers whose paths in either run match one of these patterns are reported; likewise.
        cuts: whether to look for all layers that end at other places of the computation (`padiff.compare.boundaries`);
            where one side's layers run on the other's values, only for those whose outputs have other shapes.
        aligned: what pairs the layers, called as `padiff.align.align` is.
        workers: processes that measure steps ahead of the one that is judged.
        measuring: called now and then while a step is measured, with the share of it that is done.

    Raises:
        UsageError: the layer map does not fit the runs; an unknown stage; a pattern that matches no layer.
    """

    def __init__(
        self,
        reference: Run,
        candidate: Run,
        layer_map: LayerMap | Mapping[Any, Any] | Iterable[Any] | str | None = None,
        policy: Policy | None = None,
        stages: Collection[str] = STAGES,
        cuts: bool = True,
        aligned: Callable[..., Alignment] = align,
        workers: Workers | None = None,
        layers: Collection[str] | None = None,
        measuring: Callable[[float], None] | None = None,
    ) -> None:
        self._workers, self._measuring = workers, measuring
        self.reference, self.candidate = reference, candidate
        self._map = LayerMap.of(layer_map)
        self._policy: Policy = policy if policy is not None else NoisePolicy()
        self.stages = frozenset(stages)
        unknown = sorted(self.stages - set(STAGES))
        if unknown:
            raise UsageError(f"unknown stage {unknown[0]!r}. {nearest(unknown[0], STAGES)}")
        # A limit comes from the rest of the step, too.
        self._measured_stages = frozenset(STAGES) if self._policy.in_context else self.stages
        self._layers = None if layers is None else _matching(layers, (reference.info, candidate.info))
        self._cuts, self._aligned = cuts, aligned
        self._alignment: Alignment | None = None
        self._called: tuple[set[str], set[str]] = (set(), set())
        self._unrecorded = Unrecorded("reference", reference.info), Unrecorded("candidate", candidate.info)
        self._absent = AbsentStages(reference, candidate)
        self._drift = NONE
        aligned(reference.info, candidate.info, self._map)  # a map that does not fit is told before any step is there

    @property
    def alignment(self) -> Alignment:
        """Which layers answer to each other; as of the first compared step, which shows what is called."""
        if self._alignment is None:
            return self._aligned(self.reference.info, self.candidate.info, self._map)
        return self._alignment

    def common(self) -> list[int]:
        """Numbers of the steps that both runs have by now."""
        theirs = set(self.candidate.numbers())
        return [number for number in self.reference.numbers() if number in theirs]

    def compare(self, number: int) -> Report:
        """Compare one step, all ranks; what a rank recorded that only one run has stands alone."""
        return self.report(self.diffs(number), [number])

    def diffs(self, number: int) -> list[Diff]:
        """The judged diffs of one step, in causal order."""
        return [diff for diffs in self.rank_diffs(number, number) for diff in diffs]

    def rank_diffs(self, ours: int, theirs: int) -> list[list[Diff]]:
        """The judged diffs of each rank of two steps of whatever numbers; first, what is not compared of any."""
        return self._diffs(self.reference.steps(ours), self.candidate.steps(theirs), (ours, theirs))

    def step_diffs(self, reference: Step, candidate: Step) -> list[Diff]:
        """The judged diffs of two given steps."""
        return [diff for diffs in self._diffs([reference], [candidate]) for diff in diffs]

    def _diffs(
        self, references: Sequence[Step], candidates: Sequence[Step], numbers: tuple[int, int] | None = None
    ) -> list[list[Diff]]:
        infos = self.reference.info, self.candidate.info
        first = self._alignment is None
        alignment = self._align(references, candidates)
        for unrecorded, steps in zip(self._unrecorded, (references, candidates)):
            unrecorded.look(steps)
        sides = rank_steps(references, candidates, infos)
        ranks = step_pairs(sides, alignment, self._measured_stages)
        measured = self._measured([pair for rank in ranks for pair in rank], numbers, alignment)
        judged = self._judged(measured, ranks, sides)
        if first:
            cut = cut_elsewhere(judged[0], alignment, self._cuts)
            if cut:
                self._alignment = replace(alignment, cut_elsewhere=cut)
                ranks = step_pairs(sides, self._alignment, self._measured_stages)
                judged = self._judged(self._again(measured, [pair for rank in ranks for pair in rank]), ranks, sides)
        alone = left_out(references, candidates, infos, sides, self._measured_stages)
        found = [alone, *judged] if alone else judged
        known = all(map(weights_known, infos, (references, candidates)))
        # Only now: every rank of a step is judged by the step before it, none by another rank.
        self._drift = drift([diff for diffs in found for diff in diffs], self._drift, known)
        return [[diff for diff in diffs if self._is_asked_for(diff.pair)] for diffs in found]

    def _is_asked_for(self, pair: Pair) -> bool:
        if pair.stage not in self.stages:
            return False
        sides = zip(self._layers or (), (pair.reference, pair.candidate))
        return self._layers is None or any(record is not None and record.layer in paths for paths, record in sides)

    def _align(self, references: Sequence[Step], candidates: Sequence[Step]) -> Alignment:
        """The alignment; the first step shows what is called, in which order, and whether both start equal."""
        if self._alignment is None:
            if self._workers is not None:
                self._workers.start(references[0])  # they import while this process aligns
            seen = Both(Seen.of(references[0]), Seen.of(candidates[0]))
            infos = self.reference.info, self.candidate.info
            self._alignment = resolved(self._aligned(*infos, self._map, seen), seen)
        for called, steps in zip(self._called, (references, candidates)):
            called.update(*map(_called, steps))
        return self._alignment

    def _measured(self, pairs: Sequence[Pair], numbers: tuple[int, int] | None, alignment: Alignment) -> Sequence[Diff]:
        elementwise = self._policy.elementwise
        if self._workers is not None and numbers is not None:
            diffs = self._workers.diffs(numbers, pairs, alignment, self._measured_stages, elementwise)
            if diffs is not None:
                return diffs
        diffs, looked = [], time.monotonic()
        for pair in pairs:
            diffs.append(measure_pair(pair, elementwise))
            if self._measuring is not None and time.monotonic() - looked > _TICK and len(diffs) < len(pairs):
                self._measuring(len(diffs) / len(pairs))
                looked = time.monotonic()
        return diffs

    def _again(self, measured: Sequence[Diff], pairs: Sequence[Pair]) -> list[Diff]:
        """Diffs of the pairs of a step that was measured by another alignment: most of them are the same."""
        known = {_key(diff.pair): diff for diff in measured}
        return [
            replace(known[_key(pair)], pair=pair)
            if _key(pair) in known
            else measure_pair(pair, self._policy.elementwise)
            for pair in pairs
        ]

    def _judged(
        self, measured: Sequence[Diff], ranks: Sequence[Sequence[Pair]], sides: Sequence[tuple[Step, Step]]
    ) -> list[list[Diff]]:
        """The judged diffs of each rank, given its pairs and its records."""
        left, found = iter(measured), []
        for rank, both in zip(ranks, sides):
            judged = self._policy.judge(list(islice(left, len(rank))), self._drift)
            judged = excused(judged, self._unrecorded, both, self.alignment)
            found.append(self._absent.judge(judged, both))
        return found

    def report(
        self,
        diffs: Sequence[Diff],
        steps: Sequence[int],
        only: tuple[Sequence[int], Sequence[int]] = ((), ()),
        settings: bool | None = None,
    ) -> Report:
        """Put diffs of several steps together.

        Args:
            only: steps that only one run has.
            settings: whether hyper-parameters that differ between layers that ran are a diff, too, where no tensor is.
                Default: as the policy says, where outputs are compared.
        """
        tally = Tally(self.alignment)
        tally.add(diffs)
        return self._reported(tuple(diffs), tally, self.first(diffs), steps, only, settings)

    def report_of(
        self,
        findings: Findings,
        first: FirstDiff | None,
        steps: Sequence[int],
        only: tuple[Sequence[int], Sequence[int]],
    ) -> Report:
        """The report of all that was found, given the first diff among it."""
        return self._reported(findings.diffs, findings.tally, first, steps, only, None)

    def first(self, diffs: Sequence[Diff]) -> FirstDiff | None:
        """The first diff that did not pass, in words; `None` if all passed."""
        return first_diff(diffs, self.alignment, (self.reference, self.candidate))

    def _reported(
        self,
        diffs: Sequence[Diff],
        tally: Tally,
        first: FirstDiff | None,
        steps: Sequence[int],
        only: tuple[Sequence[int], Sequence[int]],
        settings: bool | None,
    ) -> Report:
        infos = self.reference.info, self.candidate.info
        coverage = tally.coverage(steps, only, self.alignment, infos, self._called)
        if self.stages & PARAMETER_STAGES:
            coverage = with_unrecorded(coverage, self._unrecorded, self._layers)
        if first is not None:
            first = doubted(first, coverage)
        if settings is None:
            settings = self._policy.settings_count and "forward" in self.stages
        if first is None and settings and steps:
            first = setting_diff(self.alignment, self._called, steps[0])
            # Runs whose layers are set differently come apart for that reason.
            coverage = replace(coverage, amplified=None) if first is not None else coverage
        return Report(
            diffs=diffs,
            coverage=coverage,
            first_diff=first,
            tolerance=self._policy.describe(),
            reference=self.reference.name,
            candidate=self.candidate.name,
            environment=differences(*infos),
        )


def compare_runs(
    reference: str | Path | Run,
    candidate: str | Path | Run,
    *,
    layer_map: LayerMap | Mapping[Any, Any] | Iterable[Any] | str | None = None,
    policy: Policy | None = None,
    stages: Collection[str] = STAGES,
    progress: Callable[[float, int], None] | None = None,
    each: Callable[[Report], None] | None = None,
    workers: int | None = None,
    steps: Container[int] | None = None,
    layers: Collection[str] | None = None,
) -> Report:
    """Compare two runs: all of their common steps, in the order of their numbers.

    Args:
        reference: the run to trust: a run folder, one step of it, a dump folder, or a run in memory.
        candidate: the run in question, likewise.
        layer_map: layers that answer to each other: a mapping or pairs of paths (reference, candidate), or the
            YAML file that ``padiff map`` wrote. Given pairs win, the rest is found around them.
        policy: when a diff passes. Default: `NoisePolicy`; `Tolerance` is a fixed one.
        stages: only these stages are reported; a policy may look at the others for what it allows these.
        progress: called with ``(steps done, steps in all)``; while a large step is measured, with parts of a step too.
        each: called with the report of each common step.
        workers: how many processes measure steps of run folders, ahead of the one that is judged; the report is the
            same whatever the number, and 1 is this process alone. Default: as many as there are cores for it, and as
            there is work for: a comparison of a second or two starts none.
        steps: only these of the common steps are compared.
        layers: path patterns (``encoder.*``); only what layers of either run that match one recorded is reported.

    Returns:
        The report: true in a condition if the runs match, with ``first_diff`` and ``coverage``.

    Raises:
        RunFolderError: a folder can't be read.
        NothingToCompareError: no common step, or steps without a common quantity.
        UsageError: the layer map does not fit the runs; no number of workers; a pattern that matches no layer.
    """
    check_workers(workers)
    runs = [open_run(run) if isinstance(run, (str, Path)) else run for run in (reference, candidate)]
    for side, run in zip(("reference", "candidate"), runs):
        if not hasattr(run, "numbers"):
            raise UsageError(
                f"the {side} has to be the path of a run folder (or a run in memory, `rec.run`), got "
                f"{type(run).__module__}.{type(run).__qualname__}. To compare two models, use padiff.auto_diff"
            )
    numbers = (runs[0].numbers(), runs[1].numbers())
    common = _common(runs, numbers, steps)
    # A run in memory is nothing that other processes could read.
    paths = [str(run) for run in (reference, candidate) if isinstance(run, (str, Path))]
    findings, first = None, None
    done = 0

    def report_progress(share: float = 0.0) -> None:
        if progress is not None:
            progress(done + share if share else done, len(common))

    with Workers(paths, common, workers if len(paths) == 2 else 1) as ahead:
        comparison = RunComparison(
            runs[0], runs[1], layer_map, policy, stages, workers=ahead, layers=layers, measuring=report_progress
        )
        for ours, theirs in common:
            report_progress()
            ranks = comparison.rank_diffs(ours, theirs)
            found = [diff for diffs in ranks for diff in diffs]
            if findings is None:
                again = len(paths) == 2 and not ranks_told((runs[0].info, runs[1].info))
                findings = Findings(comparison.alignment, (runs[0], runs[1]) if again else None)
            findings.add(ranks, (ours, theirs))
            if first is None:
                first = comparison.first(found)
            if each is not None:
                each(comparison.report(found, [ours]))
            done += 1
    report_progress()
    if findings is None or not findings.tally.compared:
        raise NothingToCompareError(
            f"the steps of {runs[0].name} and {runs[1].name} have no quantity in common: no layer of one answers to "
            "one of the other. Give a layer_map (`padiff map` writes one to start from)"
        )
    sides = [{pair[k] for pair in common} for k in (0, 1)]
    only = tuple(
        [n for n in side if n not in compared and (steps is None or n in steps)]
        for side, compared in zip(numbers, sides)
    )
    return comparison.report_of(findings, first, [ours for ours, _ in common], (only[0], only[1]))


def _common(
    runs: Sequence[Run], numbers: tuple[Sequence[int], Sequence[int]], chosen: Container[int] | None
) -> list[tuple[int, int]]:
    """The steps that are compared, as each run numbers them."""
    shared = set(numbers[1])
    found = [(number, number) for number in numbers[0] if number in shared]
    if found and chosen is not None:
        there, found = found, [pair for pair in found if pair[0] in chosen]
        if not found:
            raise NothingToCompareError(
                f"none of the steps asked for ({chosen}) is one that both runs have: these are "
                f"{_told([number for number, _ in there])}"
            )
    if not found and all(isinstance(run, SingleDump) for run in runs):
        # Two single dumps are compared whatever steps they were.
        return [(numbers[0][0], numbers[1][0])]
    if not found:
        raise NothingToCompareError(
            f"the runs have no common step: {runs[0].name} has {_told(numbers[0])}, {runs[1].name} has "
            f"{_told(numbers[1])}. "
            + (_recorded_alike(numbers) if all(numbers) else "Did its training run, and is it the right folder?")
        )
    return found


def _recorded_alike(numbers: tuple[Sequence[int], Sequence[int]]) -> str:
    """How to record two runs so that they have steps in common."""
    gaps = {later - earlier for steps in numbers for earlier, later in pairwise(steps)}
    if len(gaps) != 1:
        return (
            "Record both with the same every_n_steps. (A proxy's try_dump(per_step=N) dumps in every N-th call, as "
            "every_n_steps=padiff.Schedule(every=N, first=N - 1) does.)"
        )
    every = gaps.pop()
    return (
        f"Record both with the same every_n_steps: padiff.Schedule(every={every}, first={numbers[0][0]}) gives the "
        f"reference's steps. (A proxy's try_dump(per_step={every}) dumps in every {every}th call, steps {every - 1}, "
        f"{2 * every - 1}, ...; its dump_freq={every} is every_n_steps={every}.)"
    )


def _key(pair: Pair) -> tuple[int, int, str, tuple[float, float]]:
    """What is measured of a pair depends on nothing else."""
    return id(pair.reference), id(pair.candidate), pair.transform, pair.scales


def _matching(patterns: Collection[str], infos: tuple[RunInfo, RunInfo]) -> tuple[set[str], set[str]]:
    """Paths of the reference's and of the candidate's layers that match one of the patterns.

    Raises:
        UsageError: a pattern matches no layer of either.
    """
    found: tuple[set[str], set[str]] = (set(), set())
    paths = [{path for layer in info.layers for path in (layer.path, *layer.aliases)} for info in infos]
    for pattern in patterns:
        matching = [{path for path in side if fnmatch.fnmatchcase(path, pattern)} for side in paths]
        if not any(matching):
            raise UsageError(
                f"no layer of either run matches {pattern!r}. {nearest(pattern, sorted(set().union(*paths)))}"
            )
        for side, more in zip(found, matching):
            side |= more
    return found


def _called(step: Step) -> set[str]:
    return {record.layer for record in step.records if record.stage == "forward" and record.layer != LOOP}


def _told(numbers: Sequence[int]) -> str:
    if not numbers:
        return "no step"
    shown = ", ".join(str(n) for n in numbers[:4])
    return f"steps {shown}{', ...' if len(numbers) > 4 else ''}"
