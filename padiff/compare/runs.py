"""Comparing two runs, step by step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from padiff.align import Alignment, Seen, align, settled
from padiff.compare.coverage import Tally
from padiff.compare.cuts import cut_elsewhere
from padiff.compare.drift import NONE, doubted, drift
from padiff.compare.explain import first_diff, setting_diff
from padiff.compare.findings import Findings
from padiff.compare.noise import NoisePolicy
from padiff.compare.ranks import ranks_told
from padiff.compare.sketched import measure_pair
from padiff.compare.step_pairs import left_out, rank_steps, step_pairs, weights_known
from padiff.compare.surroundings import blamed
from padiff.compare.tolerance import Policy
from padiff.compare.workers import Workers, check_workers
from padiff.dump import SingleDump, open_run
from padiff.environment import differences
from padiff.errors import NothingToCompareError, UsageError
from padiff.layer_map import LayerMap
from padiff.records import LOOP, STAGES, Diff, FirstDiff, Pair, Report, Run, Step
from padiff.selection import nearest


class RunComparison:
    """Compares two runs a step at a time, so that runs that still grow can be compared.

    Args:
        reference, candidate: the run to trust, the run in question.
        layer_map: layers that answer to each other, as `padiff.layer_map.LayerMap.of` takes them.
        policy: when a diff passes. Default: `NoisePolicy`.
        stages: only these stages are told; a policy may look at the others for what it allows these.
        cuts: whether to look for all layers that end at other places of the computation (`padiff.compare.cuts`); where
            one side's layers run on the other's values, only for those whose outputs have other shapes.
        aligned: what pairs the layers, called as `padiff.align.align` is.
        workers: processes that measure steps ahead of the one that is judged.

    Raises:
        UsageError: the layer map does not fit the runs; an unknown stage.
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
    ) -> None:
        self._workers = workers
        self.reference, self.candidate = reference, candidate
        self._map = LayerMap.of(layer_map)
        self._policy: Policy = policy if policy is not None else NoisePolicy()
        self.stages = frozenset(stages)
        unknown = sorted(self.stages - set(STAGES))
        if unknown:
            raise UsageError(f"unknown stage {unknown[0]!r}. {nearest(unknown[0], STAGES)}")
        # A limit comes from the rest of the step, too.
        self._measured_stages = frozenset(STAGES) if self._policy.in_context else self.stages
        self._cuts, self._aligned = cuts, aligned
        self._alignment: Alignment | None = None
        self._called: tuple[set[str], set[str]] = (set(), set())
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
        sides = rank_steps(references, candidates, infos)
        ranks = step_pairs(sides, alignment, self._measured_stages)
        measured = self._measured([pair for rank in ranks for pair in rank], numbers, alignment)
        judged = self._judged(measured, ranks)
        if first:
            cut = cut_elsewhere(judged[0], alignment, self._cuts)
            if cut:
                self._alignment = replace(alignment, cut_elsewhere=cut)
                ranks = step_pairs(sides, self._alignment, self._measured_stages)
                judged = self._judged(self._again(measured, [pair for rank in ranks for pair in rank]), ranks)
        alone = left_out(references, candidates, infos, sides, self._measured_stages)
        found = [alone, *judged] if alone else judged
        known = all(map(weights_known, infos, (references, candidates)))
        # Only now: every rank of a step is judged by the step before it, none by another rank.
        self._drift = drift([diff for diffs in found for diff in diffs], self._drift, known)
        return [[diff for diff in diffs if diff.pair.stage in self.stages] for diffs in found]

    def _align(self, references: Sequence[Step], candidates: Sequence[Step]) -> Alignment:
        """The alignment; the first step shows what is called, in which order, and whether both start equal."""
        if self._alignment is None:
            if self._workers is not None:
                self._workers.start(references[0])  # they import while this process aligns
            seen = Seen.of(references[0]), Seen.of(candidates[0])
            infos = self.reference.info, self.candidate.info
            self._alignment = settled(lambda choices: self._aligned(*infos, self._map, seen, choices=choices), seen)
        for called, steps in zip(self._called, (references, candidates)):
            called.update(*map(_called, steps))
        return self._alignment

    def _measured(self, pairs: Sequence[Pair], numbers: tuple[int, int] | None, alignment: Alignment) -> Sequence[Diff]:
        elementwise = self._policy.elementwise
        if self._workers is not None and numbers is not None:
            diffs = self._workers.diffs(numbers, pairs, alignment, self._measured_stages, elementwise)
            if diffs is not None:
                return diffs
        return [measure_pair(pair, elementwise) for pair in pairs]

    def _again(self, measured: Sequence[Diff], pairs: Sequence[Pair]) -> list[Diff]:
        """Diffs of the pairs of a step that was measured by another alignment: most of them are the same."""
        known = {_key(diff.pair): diff for diff in measured}
        return [
            replace(known[_key(pair)], pair=pair)
            if _key(pair) in known
            else measure_pair(pair, self._policy.elementwise)
            for pair in pairs
        ]

    def _judged(self, measured: Sequence[Diff], ranks: Sequence[Sequence[Pair]]) -> list[list[Diff]]:
        """The judged diffs of each rank."""
        left = iter(measured)
        return [self._policy.judge(list(islice(left, len(rank))), self._drift) for rank in ranks]

    def report(
        self,
        diffs: Sequence[Diff],
        steps: Sequence[int],
        only: tuple[Sequence[int], Sequence[int]] = ((), ()),
        settings: bool = False,
    ) -> Report:
        """Put diffs of several steps together.

        Args:
            only: steps that only one run has.
            settings: whether hyper-parameters that differ between layers that ran are a diff, too, where no tensor is.
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
        settings: bool,
    ) -> Report:
        """The report of all that was found, given the first diff among it."""
        return self._reported(findings.diffs, findings.tally, first, steps, only, settings)

    def first(self, diffs: Sequence[Diff]) -> FirstDiff | None:
        """The first diff that did not pass, in words; `None` if all passed."""
        infos = self.reference.info, self.candidate.info
        first = first_diff(diffs, self.alignment, infos)
        if first is not None:
            first = blamed(first, next((d for d in diffs if not d.passed), None), infos)
        return first

    def _reported(
        self,
        diffs: Sequence[Diff],
        tally: Tally,
        first: FirstDiff | None,
        steps: Sequence[int],
        only: tuple[Sequence[int], Sequence[int]],
        settings: bool,
    ) -> Report:
        infos = self.reference.info, self.candidate.info
        if first is None and settings and steps:
            first = setting_diff(self.alignment, self._called, steps[0])
        coverage = tally.coverage(steps, only, self.alignment, infos, self._called)
        if first is not None:
            first = doubted(first, coverage)
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
    progress: Callable[[int, int], None] | None = None,
    each: Callable[[Report], None] | None = None,
    workers: int | None = None,
) -> Report:
    """Compare two runs: all of their common steps, in the order of their numbers.

    Args:
        reference: the run to trust: a run folder, one step of it, a dump folder, or a run in memory.
        candidate: the run in question, likewise.
        layer_map: layers that answer to each other: a mapping or pairs of paths (reference, candidate), or the
            YAML file that ``padiff map`` wrote. Given pairs win, the rest is found around them.
        policy: when a diff passes. Default: `NoisePolicy`; `Tolerance` is a fixed one.
        stages: only these stages are told; a policy may look at the others for what it allows these.
        progress: called with ``(steps done, steps in all)``.
        each: called with the report of each common step.
        workers: how many processes measure steps of run folders, ahead of the one that is judged; the report is the
            same whatever the number, and 1 is this process alone. Default: as many as there are cores for it, and as
            there is work for: a comparison of a second or two starts none.

    Returns:
        The report: true in a condition if nothing parted, with ``first_diff`` and ``coverage``.

    Raises:
        RunFolderError: a folder can't be read.
        NothingToCompareError: no common step, or steps without a common quantity.
        UsageError: the layer map does not fit the runs; no number of workers.
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
    steps = _common(runs, numbers)
    # A run in memory is nothing that other processes could read.
    paths = [str(run) for run in (reference, candidate) if isinstance(run, (str, Path))]
    findings, first = None, None
    with Workers(paths, steps, workers if len(paths) == 2 else 1) as ahead:
        comparison = RunComparison(runs[0], runs[1], layer_map, policy, stages, workers=ahead)
        for done, (ours, theirs) in enumerate(steps):
            if progress is not None:
                progress(done, len(steps))
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
    if progress is not None:
        progress(len(steps), len(steps))
    if findings is None or not findings.tally.compared:
        raise NothingToCompareError(
            f"the steps of {runs[0].name} and {runs[1].name} have no quantity in common: no layer of one answers to "
            "one of the other. Give a layer_map (`padiff map` writes one to start from)"
        )
    sides = [{pair[k] for pair in steps} for k in (0, 1)]
    only = [n for n in numbers[0] if n not in sides[0]], [n for n in numbers[1] if n not in sides[1]]
    # A tolerance that was given says itself what counts as equal.
    settings = policy is None and "forward" in comparison.stages
    return comparison.report_of(findings, first, [ours for ours, _ in steps], only, settings)


def _common(runs: Sequence[Run], numbers: tuple[Sequence[int], Sequence[int]]) -> list[tuple[int, int]]:
    """The steps that are compared, as each run numbers them."""
    shared = set(numbers[1])
    found = [(number, number) for number in numbers[0] if number in shared]
    if not found and all(isinstance(run, SingleDump) for run in runs):
        # Two single dumps are compared whatever steps they were.
        return [(numbers[0][0], numbers[1][0])]
    if not found:
        raise NothingToCompareError(
            f"the runs have no common step: {runs[0].name} has {_told(numbers[0])}, {runs[1].name} has "
            f"{_told(numbers[1])}. "
            + (
                "Record both with the same every_n_steps"
                if all(numbers)
                else "Did its training run, and is it the right folder?"
            )
        )
    return found


def _key(pair: Pair) -> tuple[int, int, str, tuple[float, float]]:
    """What is measured of a pair depends on nothing else."""
    return id(pair.reference), id(pair.candidate), pair.transform, pair.scales


def _called(step: Step) -> set[str]:
    return {record.layer for record in step.records if record.stage == "forward" and record.layer != LOOP}


def _told(numbers: Sequence[int]) -> str:
    if not numbers:
        return "no step"
    shown = ", ".join(str(n) for n in numbers[:4])
    return f"steps {shown}{', ...' if len(numbers) > 4 else ''}"
