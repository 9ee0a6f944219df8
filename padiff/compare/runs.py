"""Comparison of all common steps of two runs, also of runs whose steps hold their tokens in other layouts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from padiff.compare.comparison import RunComparison
from padiff.compare.coverage import Findings
from padiff.compare.diagnose.known_differences import RegionsOfSteps, with_regions
from padiff.compare.diagnose.shifted import token_cause
from padiff.compare.judge.policy import Policy
from padiff.compare.workers import Workers, check_workers, executor_of, shown_to_workers
from padiff.dump import FolderRun, SingleDump
from padiff.dump.medium import incomplete_steps
from padiff.dump.read import opened
from padiff.dump.store import AnyPath, is_location, is_remote
from padiff.errors import NothingToCompareError, RunFolderError, UsageError
from padiff.model.given_map import GivenMap
from padiff.pair.plans import processes_differ
from padiff.pair.tokens import SKETCHED, TokenAlignment, TokenRows, TokenSteps, align_tokens, in_token_order
from padiff.records import (
    PARAMETER_STAGES,
    ROOT,
    SIDES,
    STAGES,
    Both,
    Diff,
    FirstDiff,
    Record,
    Report,
    Run,
    RunInfo,
    Step,
)
from padiff.records.step_diffs import StepDiffs


def aligned_by_tokens(runs: Both[Run], numbers: Sequence[Both[int]]) -> TokenRuns | None:
    """Return views of two runs whose rows are in the order of the tokens; `None` if the runs' layouts are alike in
    their first common step, or if they have no tokens in common.
    """
    if not numbers:
        return None
    try:
        steps = runs.zip(numbers[0]).map(lambda side: side[0].steps(side[1]))
        if any(len(ranks) != 1 for ranks in steps) or align_tokens(steps.map(lambda ranks: ranks[0])) is None:
            return None
    except RunFolderError:
        return None  # the comparison says what is damaged
    return TokenRuns(runs, numbers)


class TokenRuns:
    """Views of two runs in the order of their tokens.

    Args:
        runs: reference and candidate.
        numbers: the common steps.

    Attributes:
        views: the runs, with rewritten steps.
    """

    def __init__(self, runs: Both[Run], numbers: Sequence[Both[int]]) -> None:
        self._runs = runs
        self._partners = Both(*({pair[k]: pair for pair in map(tuple, numbers)} for k in range(2)))
        self._latest: tuple[tuple[int, ...], Both[Step]] | None = None
        #: What was aligned in each step, and the distance of the log probabilities there.
        self._aligned: dict[int, TokenSteps] = {}
        self._distances: dict[int, Distance] = {}
        #: Number of each side's tensors of the steps whose ids were not recorded in full.
        self._unread: dict[int, Both[int]] = {}
        self.views: Both[Run] = Both(_View(runs.reference, self, 0), _View(runs.candidate, self, 1))

    def step(self, side: int, number: int) -> list[Step]:
        """Return a step of a run in the order of the tokens."""
        numbers = self._partners.reference.get(number) if side == 0 else self._partners.candidate.get(number)
        if numbers is None:
            return (self._runs.candidate if side else self._runs.reference).steps(number)
        if self._latest is None or self._latest[0] != numbers:
            self._latest = numbers, self._rewritten(numbers)
        steps = self._latest[1]
        return [steps.candidate if side else steps.reference]

    def _rewritten(self, numbers: tuple[int, ...]) -> Both[Step]:
        steps = Both(*(run.steps(number)[0] for run, number in zip(self._runs, numbers)))
        alignment = align_tokens(steps)
        if alignment is not None:
            self._aligned[numbers[0]] = aligned = in_token_order(steps, alignment)
            return aligned.steps
        if not any(_has_sketched_tokens(step) for step in steps):
            return steps
        kept = steps.map(lambda step: [r for r in step.records if r.stage in PARAMETER_STAGES])
        self._unread[numbers[0]] = steps.map(
            lambda step: len({(r.layer, r.stage, r.slot) for r in step.records if r.stage not in PARAMETER_STAGES})
        )
        return steps.zip(kept).map(lambda side: replace(side[0], records=side[1], floors=None))

    def notes(self) -> list[str]:
        """Return what was aligned, what was left out, and how far the log probabilities are apart, as sentences."""
        alignments = [aligned.alignment for aligned in self._aligned.values()]
        tokens = sum(len(each) for each in alignments)
        sequences = sum(len(set(each.sequence.tolist())) for each in alignments)
        notes = [f"Compared token by token: {_count(tokens, 'token')} in {_count(sequences, 'sequence')}"]
        for side, *counts in zip(
            SIDES,
            [sum(each.padding.reference for each in alignments), sum(each.padding.candidate for each in alignments)],
            [sum(each.surplus.reference for each in alignments), sum(each.surplus.candidate for each in alignments)],
        ):
            if counts[0]:
                notes.append(f"Left out: {_count(counts[0], 'row')} of padding of the {side}")
            if counts[1]:
                notes.append(f"Not compared: {_count(counts[1], 'token')} that only the {side} has")
        left_out: Counter[str] = Counter()
        for aligned in self._aligned.values():
            left_out += aligned.left_out.reference | aligned.left_out.candidate
        notes += [f"Not compared by tokens: {_count(count, 'tensor')} {why}" for why, count in left_out.items()]
        if self._unread:
            steps = ", ".join(map(str, [*self._unread][:4])) + (", ..." if len(self._unread) > 4 else "")
            notes.append(f"Not compared by tokens: the ids of the tokens of step {steps} {SKETCHED}")
        distances = {number: each for number in self._aligned if (each := self._distance(number)) is not None}
        if distances:
            number, most = max(distances.items(), key=lambda item: item[1].largest)
            mean = sum(each.mean * each.count for each in distances.values()) / sum(d.count for d in distances.values())
            notes.append(
                f"Largest difference of a token's log probability: {most.largest:.2g} nats, at step {number}, "
                f"sequence {most.sequence}, token {most.token}; mean {mean:.2g}"
            )
        return notes

    def _distance(self, number: int) -> Distance | None:
        if number not in self._distances:
            aligned = self._aligned[number]
            logits = aligned.steps.map(lambda step: _logits(step, aligned))
            if logits.reference is None or logits.candidate is None:
                return None
            distance = _nats(Both(logits.reference, logits.candidate), aligned)
            if distance is None:
                return None
            self._distances[number] = distance
        return self._distances[number]

    def described(self, report: Report) -> Report:
        """Return a report with the notes on the tokens, and its first diff with its tokens and their cause."""
        first = report.first_diff
        lost = [aligned.left_out.map(lambda side: side.total()) for aligned in self._aligned.values()]
        lost += self._unread.values()
        coverage = replace(
            report.coverage,
            reference_records=report.coverage.reference_records + sum(each.reference for each in lost),
            candidate_records=report.coverage.candidate_records + sum(each.candidate for each in lost),
        )
        report = replace(report, tokens=tuple(self.notes()), coverage=coverage)
        if first is None or first.diff is None or first.step not in self._aligned:
            return report
        alignment = self._aligned[first.step].alignment
        differing = _differing(first.diff, len(alignment))
        cause = token_cause(first, alignment, differing)
        if cause is not None and (first.cause is None or not first.cause.proven):
            first = replace(first, cause=cause)
        return replace(report, first_diff=replace(first, tokens=_place(first, alignment, differing)))


class _View:
    """A run whose steps are in the order of the tokens."""

    def __init__(self, run: Run, runs: TokenRuns, side: int) -> None:
        self._run, self._runs, self._side = run, runs, side

    @property
    def name(self) -> str:
        return self._run.name

    @property
    def info(self) -> RunInfo:
        return self._run.info

    def numbers(self) -> list[int]:
        return self._run.numbers()

    def steps(self, number: int) -> list[Step]:
        return self._runs.step(self._side, number)

    def finished(self) -> bool:
        return self._run.finished()


@dataclass(frozen=True, slots=True)
class Distance:
    """Distance of the log probabilities of the next tokens, in nats.

    Attributes:
        largest, mean: the largest and the mean distance.
        sequence, token: the token with the largest distance.
        count: number of tokens.
    """

    largest: float
    mean: float
    sequence: int
    token: int
    count: int


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def _has_sketched_tokens(step: Step) -> bool:
    return any(r.stage == "input" and r.layer == ROOT and r.source.sketched for r in step.records)


def _logits(step: Step, aligned: TokenSteps) -> Record | None:
    """Return the model's output that scores each token of the vocabulary; `None` without such an output."""
    outputs = [
        record
        for record in step.records
        if record.stage == "forward" and record.layer == ROOT and len(record.shape) == 2
        and record.shape[1] > int(aligned.alignment.ids.max()) and isinstance(record.source, TokenRows)
    ]  # fmt: skip
    return next((record for record in outputs if "logits" in record.slot), outputs[0] if outputs else None)


def _nats(logits: Both[Record], aligned: TokenSteps) -> Distance | None:
    alignment = aligned.alignment
    known = aligned.known.get(logits.reference.shape[1:], np.ones(len(alignment), bool))
    follows = (alignment.sequence[1:] == alignment.sequence[:-1]) & (alignment.index[1:] == alignment.index[:-1] + 1)
    places = np.flatnonzero(follows & known[:-1])
    rows = np.cumsum(known)[places] - 1
    if not len(places) or logits.reference.shape != logits.candidate.shape:
        return None
    next_ids = alignment.ids[places + 1]
    scores = logits.map(lambda record: _log_probabilities(record.value[rows], next_ids))
    apart = np.abs(scores.candidate - scores.reference)
    if not np.isfinite(apart).any():
        return None
    worst = int(np.nanargmax(apart))
    token = places[worst] + 1
    return Distance(
        float(apart[worst]), float(np.nanmean(apart)), int(alignment.sequence[token]), int(alignment.index[token]),
        len(places),
    )  # fmt: skip


def _log_probabilities(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    return np.asarray(logits[np.arange(len(ids)), ids] - np.log(np.exp(logits).sum(axis=1)))


def _differing(diff: Diff, tokens: int) -> np.ndarray | None:
    """Return the tokens at which a tensor exceeds its limit, in order; `None` if it has no row for each token."""
    pair = diff.pair
    sides = [side for side in pair.sides if side is not None and isinstance(side.source, TokenRows)]
    if len(sides) != 2 or sides[0].shape != sides[1].shape or sides[0].shape[0] != tokens:
        return None
    a, b = (side.value.astype(np.float64).reshape(tokens, -1) for side in sides)
    scale = math.sqrt(float(np.square(a).sum()) / tokens) or 1.0
    errors = np.sqrt(np.square(b - a).sum(axis=1)) / scale
    errors[~np.isfinite(errors)] = np.inf
    limit = diff.judgement.limit if diff.judgement is not None and str(diff.judgement.figure) == "rel_l2" else 0.0
    # Where no single row exceeds the limit of the whole tensor, the rows that carry most of the error do.
    least = limit if (errors > limit).any() and limit else float(errors.max()) / 10
    return np.flatnonzero(errors > least)


def _place(first: FirstDiff, alignment: TokenAlignment, differing: np.ndarray | None) -> str:
    if differing is None or not len(differing):
        return ""
    token = differing[0]
    return f"first at sequence {alignment.sequence[token]}, token {alignment.index[token]}"


def compare_runs(
    reference: str | AnyPath | Run,
    candidate: str | AnyPath | Run,
    *,
    layer_map: GivenMap | Mapping[Any, Any] | Iterable[Any] | str | None = None,
    policy: Policy | None = None,
    stages: Collection[str] = STAGES,
    progress: Callable[[float, int], None] | None = None,
    each: Callable[[Report], None] | None = None,
    workers: int | None = None,
    steps: Container[int] | None = None,
    layers: Collection[str] | None = None,
    alone: bool | None = None,
    executor: Any = None,
) -> Report:
    """Compare all common steps of two runs, in the order of their numbers.

    Args:
        reference: the run to trust: a run folder, one step of it, a dump folder, or a run in memory.
        candidate: the run in question, in the same forms.
        layer_map: layers to pair: a mapping or pairs of paths (reference, candidate), or the
            YAML file that ``padiff map`` wrote. Given pairs have priority; other pairs are found automatically.
        policy: the rule that passes or fails a diff. Default: `NoisePolicy`; `Tolerance` has fixed limits.
        stages: stages to report; the limits of a policy may also depend on other stages.
        progress: called with ``(finished steps, all steps)``, with fractions while a large step is measured.
        each: called with the report of each common step.
        workers: number of processes that measure later steps of run folders while a step is judged; 1 for this process
            alone. The number does not change the report. Default: one for each core, as far as there is enough work; a
            comparison of a second or two starts none.
        steps: numbers of the common steps to compare. Default: all.
        layers: path patterns (``encoder.*``); only records of layers that match a pattern, in either run, are reported.
        alone: True to judge each step by itself, with the limits of a first step. Default: True if the candidate is
            a replay of the reference (`padiff.replay`).
        executor: executor whose workers read and measure later steps while a step is judged here: a
            `concurrent.futures.Executor`, a ``dask.distributed.Client`` or a ``ray.util.multiprocessing.Pool``. Its
            workers need access to both runs, as paths or stores, and an installed padiff; ``workers`` is then the
            number of tasks at a time. The executor stays open, and does not change the report. If a worker is lost,
            padiff warns and measures the step in this process.

    Returns:
        The report, with ``first_diff`` and ``coverage``; true in a condition if the runs match.

    Raises:
        RunFolderError: a folder can't be read.
        NothingToCompareError: the runs have no common step, or the steps no common quantity.
        UsageError: the layer map does not fit the runs, ``workers`` or ``executor`` is invalid, a pattern matches no
            layer, or the executor's workers can't read a run.
    """
    check_workers(workers)
    pool = None if executor is None else executor_of(executor)
    sources = Both(reference, candidate)
    runs = sources.map(opened)
    for side, run in zip(SIDES, runs):
        if not hasattr(run, "numbers"):
            raise UsageError(
                f"the {side} has to be the path of a run folder (or a run in memory, `rec.run`), got "
                f"{type(run).__module__}.{type(run).__qualname__}. To compare two models, use padiff.auto_diff"
            )
    numbers = runs.map(lambda run: run.numbers())
    common = _common(runs, numbers, steps)
    # Other processes can't read a run in memory.
    paths = [str(run) for run in sources if is_location(run)]
    tokens = aligned_by_tokens(runs, common)
    if tokens is not None:
        runs = tokens.views
    in_folders = len(paths) == 2 and tokens is None
    identities = None
    if tokens is not None:
        pool = None  # both sides of a step are read together, in this process
    if pool is not None:
        paths, identities = shown_to_workers(list(sources)), [run.info.identity for run in runs]
    findings, first = None, None
    regions: Both[RegionsOfSteps] = Both([], [])
    done = 0

    def report_progress(share: float = 0.0) -> None:
        if progress is not None:
            progress(done + share if share else done, len(common))

    if pool is None and any(is_remote(path) for path in paths):
        # A store is read in this process, ahead of measuring, and once: each worker would fetch the same data again.
        workers = 1
    with Workers(paths, common, workers if in_folders else 1, pool, identities) as ahead:
        comparison = RunComparison(
            runs.reference,
            runs.candidate,
            layer_map,
            policy,
            stages,
            workers=ahead,
            layers=layers,
            measuring=report_progress,
            alone=_is_replay(runs) if alone is None else alone,
        )
        for number in common:
            report_progress()
            ranks = comparison.rank_diffs(number)
            diffs = StepDiffs.joined(ranks)
            for found, step in zip(regions, comparison.latest):
                if step.regions:
                    found.append((number.reference, step.regions))
            if findings is None:
                again = in_folders and not (comparison.spread or processes_differ(runs.map(lambda run: run.info)))
                findings = Findings(comparison.alignment, runs if again else None)
            findings.add(ranks, number)
            if first is None:
                first = comparison.first(diffs)
            else:
                first = comparison.explain_later(diffs) or first
            if each is not None:
                each(comparison.report(diffs, [number.reference]))
            del ranks, diffs  # before the next step is read
            done += 1
    report_progress()
    if findings is None or not findings.tally.compared:
        raise NothingToCompareError(
            f"the steps of {runs.reference.name} and {runs.candidate.name} have no quantity in common: no layer of one "
            "answers to one of the other. Give a layer_map (`padiff map` writes one to start from)"
        )
    compared = Both({number.reference for number in common}, {number.candidate for number in common})
    only = numbers.zip(compared).map(
        lambda side: [n for n in side[0] if n not in side[1] and (steps is None or n in steps)]
    )
    report = comparison.report_of(findings, first, [number.reference for number in common], only)
    report = report if tokens is None else tokens.described(report)
    return with_regions(report, regions)


def _is_replay(runs: Both[Run]) -> bool:
    """Return True if the candidate is a replay of the reference's packed steps, each from the reference's state."""
    of = runs.candidate.info.recording.get("replay_of")
    return bool(of) and of == runs.reference.info.identity


def _common(runs: Both[Run], numbers: Both[list[int]], chosen: Container[int] | None) -> list[Both[int]]:
    """Return the steps to compare, as pairs of numbers."""
    shared = set(numbers.candidate)
    numbers_in_both = [number for number in numbers.reference if number in shared]
    if numbers_in_both and chosen is not None:
        available, numbers_in_both = numbers_in_both, [number for number in numbers_in_both if number in chosen]
        if not numbers_in_both:
            raise NothingToCompareError(
                f"none of the steps asked for ({chosen}) is one that both runs have: these are {_listed(available)}"
            )
    if not numbers_in_both and all(isinstance(run, SingleDump) for run in runs):
        # Two single dumps are compared regardless of their step numbers.
        return [numbers.map(lambda side: side[0])]
    if not numbers_in_both:
        raise NothingToCompareError(
            f"the runs have no common step: {runs.reference.name} has {_listed(numbers.reference)}, "
            f"{runs.candidate.name} has {_listed(numbers.candidate)}. "
            + (_recorded_alike(numbers) if all(numbers) else _why_none(runs))
        )
    return [Both(number, number) for number in numbers_in_both]


def _why_none(runs: Both[Run]) -> str:
    for run in runs:
        lacking = incomplete_steps(run.path) if isinstance(run, FolderRun) and not run.numbers() else {}
        if lacking:
            number, ranks_present = next(iter(lacking.items()))
            wrote = (
                f"only rank{'s' if len(ranks_present) > 1 else ''} {', '.join(map(str, ranks_present))}"
                if ranks_present
                else "none"
            )
            return (
                f"A step is whole when all ranks have written it: of the {run.info.world_size} ranks of {run.name} "
                f"{wrote} wrote step {number}. Record on every rank into one folder; or, to keep one process alone, "
                "give record() rank=0, world_size=1"
            )
    return "Did its training run, and is it the right folder?"


def _recorded_alike(numbers: Both[list[int]]) -> str:
    """Return advice on recording two runs so that they have common steps."""
    gaps = {later - earlier for steps in numbers for earlier, later in pairwise(steps)}
    if len(gaps) != 1:
        return (
            "Record both with the same every_n_steps. (A proxy's try_dump(per_step=N) dumps in every N-th call, as "
            "every_n_steps=padiff.Schedule(every=N, first=N - 1) does.)"
        )
    every = gaps.pop()
    return (
        f"Record both with the same every_n_steps: padiff.Schedule(every={every}, first={numbers.reference[0]}) gives "
        f"the reference's steps. (A proxy's try_dump(per_step={every}) dumps in every {every}th call, steps "
        f"{every - 1}, {2 * every - 1}, ...; its dump_freq={every} is every_n_steps={every}.)"
    )


def _listed(numbers: Sequence[int]) -> str:
    if not numbers:
        return "no step"
    shown = ", ".join(str(n) for n in numbers[:4])
    return f"steps {shown}{', ...' if len(numbers) > 4 else ''}"
