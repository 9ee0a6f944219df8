"""Comparison of all common steps of two runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from padiff.compare.comparison import RunComparison
from padiff.compare.diagnose.regions import RegionsOfSteps, with_regions
from padiff.compare.executors import executor_of, shown_to_workers
from padiff.compare.findings import Findings
from padiff.compare.judge.policy import Policy
from padiff.compare.measuring import STEPS_AT_A_TIME
from padiff.compare.token_runs import aligned_by_tokens
from padiff.compare.workers import Workers, check_workers
from padiff.dump import FolderRun, SingleDump
from padiff.dump.local import is_remote
from padiff.dump.medium import incomplete_steps
from padiff.dump.opening import opened
from padiff.dump.remote_path import AnyPath, is_location
from padiff.errors import NothingToCompareError, UsageError
from padiff.model.given_map import GivenMap
from padiff.pair.processes import processes_differ
from padiff.records import SIDES, STAGES, Both, Report, Run
from padiff.records.step_diffs import StepDiffs


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
        for place, number in enumerate(common):
            report_progress()
            ranks = comparison.rank_diffs(number, common[place + 1 : place + STEPS_AT_A_TIME])
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
