"""Runs of the user's command, sorted against a golden run (equal, drift or fault), and blessed."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from padiff import __version__
from padiff.compare import NoisePolicy, compare_runs
from padiff.compare.judge.drift import NONE, Drift
from padiff.compare.judge.policy import ByNoise
from padiff.dump import open_run
from padiff.dump.medium import write_json
from padiff.errors import PadiffError, UsageError
from padiff.golden.folder import (
    FACTOR,
    PROOF_FILE,
    UNITS,
    Errors,
    Golden,
    check_name,
    errors_between,
    is_golden,
    limits_of,
    limits_of_first,
    mark_of_run,
    marks_of,
    read_golden,
    sketch_of_record,
    steps_of_run,
    unit_of,
    write_golden,
)
from padiff.records import (
    NO_TRACE,
    PARAMETER_STAGES,
    Both,
    Diff,
    Figure,
    Judgement,
    Pair,
    Report,
    Rule,
    Run,
    Step,
    Trace,
    TracedCall,
)
from padiff.records.declared import differences
from padiff.records.diagnostic import Diagnostic, diagnostic_of
from padiff.records.sources import SAME
from padiff.records.step_diffs import StepDiffs
from padiff.records.traces import DRAWS
from padiff.replaying.calibrating import computed_in
from padiff.replaying.step_runner import MOVE_VARIABLE, RANDOM_VARIABLE
from padiff.system.terminal import first_few


@dataclass(frozen=True)
class Movement:
    """How far a tensor has moved from the golden run's.

    Attributes:
        step, site, layer, stage: the tensor.
        error: its relative L2 error.
        units: the error in units of rounding noise, as measured.
        share: the largest of its errors as a share of its limit; above 1 rounding does not explain it.
        errors, limits: the errors, and what rounding explains of each.
    """

    step: int
    site: str
    layer: str
    stage: str
    error: float
    units: float
    share: float
    errors: Errors
    limits: Errors


@dataclass(frozen=True)
class GoldenPolicy(ByNoise):
    """Policy that judges tensors by measured noise, and all that has none as `NoisePolicy` does.

    Args:
        noise: by step and site, the errors of the moved runs.
        dtype: the coarsest dtype that the training computes in.
        first: number of the first step.
        unequal: by step, the sites of the tensors that are not equal to the bit.
        is_whole: every tensor was recorded, so that the inputs of the first one that is unequal are equal.

    Attributes:
        moved: the tensors that were judged so and are unequal, in causal order.
        first_sites: by step, the site of the first tensor of all that is unequal; empty for another step.
    """

    noise: Mapping[int, Mapping[str, Errors]]
    dtype: str
    first: int
    unequal: Mapping[int, Container[str]]
    is_whole: bool = True
    moved: list[Movement] = field(default_factory=list)
    first_sites: dict[int, str] = field(default_factory=dict)

    def describe(self) -> str:
        return "rounding noise, measured with the golden run"

    def judge(self, diffs: Sequence[Diff], before: Drift = NONE) -> StepDiffs:
        judged = NoisePolicy().judge(diffs, before)
        number = judged.number
        # A step is judged once as it is; after that, only with what a hypothesis predicts of it.
        is_hypothesis = number is None or number in self.first_sites
        if number is not None and not is_hypothesis:
            moved = self.unequal.get(number, ())
            sites = (diff.pair.anchor.site for diff in judged)
            has_moved = any(site for site in self.first_sites.values())
            self.first_sites[number] = "" if has_moved else next((site for site in sites if site in moved), "")
        result = []
        for diff in judged:
            movement = None if diff.problem is not None else self._movement(diff.pair)
            if movement is not None and not is_hypothesis and movement.site in self.unequal.get(movement.step, ()):
                self.moved.append(movement)
            result.append(_judged(diff, movement))
        return judged.replaced(result)

    def _movement(self, pair: Pair) -> Movement | None:
        golden, now = pair.reference, pair.candidate
        if golden is None or now is None or pair.layout != SAME:
            return None
        noise = self.noise.get(pair.step, {}).get(golden.site)
        if noise is None:
            return None
        before = sketch_of_record(golden)
        errors = errors_between(before, sketch_of_record(now, before.transposed))
        if errors is None:
            return None
        limits = limits_of(noise, self.dtype, golden.stage == "weight" and pair.step == self.first, before.size)
        is_first = self.is_whole and golden.site == self.first_sites.get(pair.step)
        if is_first and golden.stage in ("forward", "loss", "backward"):
            limits = limits_of_first(limits, self.dtype, before.size)
        share = max(error / limit for error, limit in zip(errors, limits))
        units = errors.l2 / unit_of(noise, self.dtype)
        return Movement(pair.step, golden.site, golden.layer, golden.stage, errors.l2, units, share, errors, limits)


def _judged(diff: Diff, movement: Movement | None) -> Diff:
    if movement is None or (diff.judgement is not None and diff.judgement.rule is Rule.SYSTEMATIC):
        return diff
    place = max(range(3), key=lambda place: movement.errors[place] / movement.limits[place])
    figure = Figure.REL_L2 if place == 0 else Figure.RATIO if place == 1 else Figure.MEAN
    judgement = Judgement(figure, movement.errors[place], movement.limits[place], Rule.MEASURED)
    return replace(diff, passed=movement.share <= 1, judgement=judgement)


EQUAL, DRIFT, FAULT, UNKNOWN = "equal", "drift", "fault", "cannot tell"


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
        draws_as_eager: True if compiled code was made to draw the random numbers of eager code.
    """

    golden: Golden
    run: Path
    sort: str
    mark: str
    report: Report | None
    moved: tuple[Movement, ...]
    environment: tuple[str, ...]
    reason: str = ""
    draws_as_eager: bool = False

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
            "draws_as_eager": self.draws_as_eager,
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
        has_parameters = not any(site.split("/")[-2] in PARAMETER_STAGES for site in report.coverage.reference_sites)
        sort = DRIFT if report.passed or (golden.left_out and has_parameters) else UNKNOWN
    return Sorted(golden, folder, sort, mark, report, moved, environment, reason)


def check_run(golden: Golden, folder: Path, command: Sequence[str], scratch: Path) -> Sorted:
    """Sort a run against a golden run. Where only the run's compiled code draws random numbers, which are others than
    those of eager code, a fault is sorted again, in a run that draws as eager code does.

    Args:
        folder: the run.
        command: the command that recorded the run.
        scratch: a folder for another run.
    """
    result = sort_run(golden, folder)
    draws = [
        any(region.note == DRAWS for number in run.numbers() for step in run.steps(number) for region in step.regions)
        for run in (golden.run, open_run(folder))
    ]
    if result.sort != FAULT or draws[0] == draws[1]:
        return result
    if draws[0]:
        reason = "the golden run is of compiled code, which draws other random numbers: record it anew with eager code"
        return replace(result, sort=UNKNOWN, reason=reason)
    again = record_run(command, scratch / f"{golden.name}-eager-numbers", len(golden.steps), {RANDOM_VARIABLE: "eager"})
    return replace(sort_run(golden, again), draws_as_eager=True)


# Differences of the environment that are named.
_MOST = 6


def sorted_text(result: Sorted) -> Iterator[str]:
    """Yield the lines that say why a run is sorted as it is."""
    if result.reason:
        yield result.reason
    if result.draws_as_eager:
        yield "again          compiled code draws other random numbers: this run drew those of eager code"
    first, largest = result.first, result.largest
    if first is not None and largest is not None and result.sort != EQUAL:
        where = f"{first.site}, step {first.step}"
        yield f"first to move  {where}: by {first.error:.2g}, {first.units:.3g} units of its rounding noise"
        if result.sort == DRIFT:
            yield (
                f"largest        {largest.site}, step {largest.step}: {largest.share:.2g} times what rounding "
                f"explains, {largest.units:.3g} units"
            )
        elif largest.share > 1:
            beyond = next(each for each in result.moved if each.share > 1)
            yield (
                f"first beyond   {beyond.site}, step {beyond.step}: {beyond.share:.3g} times what rounding "
                f"explains, {beyond.units:.3g} units"
            )
    if result.sort == EQUAL:
        return
    if result.sort == DRIFT and first is None:
        yield "first to move  nothing: all tensors that both runs have are equal to the bit"
    changed = result.environment[:_MOST]
    for name in changed:
        yield f"changed        {name}"
    if len(result.environment) > _MOST:
        yield f"               and {len(result.environment) - _MOST} more"
    if not changed and result.sort != FAULT and first is not None:
        yield "changed        nothing that is known of the environment: the code computes in another order"
    if result.missing:
        few = first_few(result.missing, 1)
        yield f"not compared   the new run has not recorded {few}, which the golden run has (compiled code?)"
    if result.golden.left_out:
        yield f"not judged     left out of the golden run for its size: {result.golden.left_out}"


#: Steps of a golden run: the second one shows momentum, and what else an optimizer hands on.
STEPS = 2
#: Runs with moved weights. Chosen: the largest error of 4 is seldom small by chance.
RUNS = 4
#: Variables of the runs that measure rounding, in turns: other kernels and threads add in another order.
KERNELS: tuple[Mapping[str, str], ...] = (
    {"OMP_NUM_THREADS": "2"},
    {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"},
    {"OMP_NUM_THREADS": "1"},
    {},
)
#: What stands for the name of a golden run in a command.
PLACEHOLDER = "{golden}"
# Lines of a failed command's output that a message has.
_LAST_LINES = 5


def record_run(command: Sequence[str], folder: Path, steps: int, environment: Mapping[str, str] | None = None) -> Path:
    """Run a command until it has recorded so many steps.

    Raises:
        UsageError: it recorded fewer steps.
    """
    words = [
        *(sys.executable, "-m", "padiff", "run", "--dir", str(folder.resolve()), "--stop-after", str(steps)),
        *("--existing", "overwrite", "--", *command),
    ]
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PADIFF_RUN_")}
    done = subprocess.run(
        words,
        env={**mine, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    try:
        count = len(open_run(folder).numbers())
    except PadiffError:
        count = 0
    if count < steps:
        lines = " / ".join(line.strip() for line in done.stdout.strip().splitlines()[-_LAST_LINES:])
        raise UsageError(
            f"golden: the command recorded {count} of {steps} steps, and ended with exit code {done.returncode}"
            f"{f' ({lines})' if lines else ''}. Let it train for that many, or record with another --steps"
        )
    return folder


def record_golden(
    command: Sequence[str],
    target: Path,
    scratch: Path,
    steps: int = STEPS,
    runs: int = RUNS,
    base: Path | None = None,
    name: str = "",
) -> Golden:
    """Record a golden run: the training, the same once more, and with moved weights.

    Args:
        target: its folder, which must not exist.
        scratch: a folder for the runs.
        base: a run of this training that was recorded already.
        name: name of the golden run. Default: that of its folder.
    """
    if base is None:
        base = record_run(command, scratch / "base", steps)
    run = open_run(base)
    dtype = computed_in(run.steps(run.numbers()[0])[0], run.info.environment)
    again = record_run(command, scratch / "again", steps)
    moved = [
        record_run(
            command,
            scratch / f"moved-{number}",
            steps,
            {MOVE_VARIABLE: f"{number} {UNITS} {dtype}", **KERNELS[number % len(KERNELS)]},
        )
        for number in range(runs)
    ]
    fresh = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        write_golden(fresh, name or target.name, base, again, moved)
        os.rename(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return read_golden(target)


def command_for(command: Sequence[str], name: str) -> list[str]:
    """Return a command with the name of a golden run in the place of ``{golden}``.

    Raises:
        UsageError: the name has characters that no golden run has.
    """
    check_name(name)
    return [word.replace(PLACEHOLDER, name) for word in command]


def check_target(folder: Path, replace: bool) -> None:
    """Raise an error if a golden run can't be recorded into a folder.

    Raises:
        UsageError: there is one already, or something else.
    """
    check_name(folder.name)
    if is_golden(folder) and not replace:
        raise UsageError(
            f"{folder} holds a golden run. `padiff golden check {folder} --bless` replaces it if rounding explains "
            "the change; remove the folder to record it anew whatever has changed"
        )
    if folder.exists() and not is_golden(folder):
        raise UsageError(f"{folder} exists and is no golden run: give another folder")


PROOF_VERSION = 1
# The name of a golden run while it is replaced, with the number of the process that does it.
_OLD = re.compile(r"\.(.+)\.\d+\.old")


def proof_of(result: Sorted, left_out: str) -> dict[str, Any]:
    """Return the proof that a run is a drift: both environments, and the error of each tensor beside its limit."""
    golden, now = result.golden.run.info, open_run(result.run).info
    return {
        "schema_version": PROOF_VERSION,
        "sort": result.sort,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "padiff": __version__,
        "recorded": result.golden.created,
        "marks": {"old": result.golden.mark, "new": result.mark},
        "environments": {"old": dict(golden.environment), "new": dict(now.environment)},
        "changed": list(result.environment),
        "rule": f"each error is at most {FACTOR:g} times the largest one after moves by {UNITS} units",
        "left_out": left_out,
        "not_compared": list(result.missing),
        "tensors": result.layers(),
    }


def bless(result: Sorted, command: Sequence[str], scratch: Path) -> Path:
    """Replace a golden run by the run of now, with the proof in it; until the last moment the old one stays.

    Returns:
        The path of the proof.

    Raises:
        UsageError: the run is no drift, or the training does not repeat itself any more.
    """
    if result.sort != DRIFT:
        raise UsageError(f"golden: {result.golden.name} is no drift, but {result.sort}: only a drift is blessed")
    if result.draws_as_eager:
        raise UsageError(
            f"golden: {result.golden.name} is a drift only if compiled code draws the random numbers of eager code, "
            "which it does not by itself. Bless with eager code, or remove the folder and record it anew"
        )
    folder = result.golden.folder
    # Beside the old one, so that a rename suffices.
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.blessed")
    try:
        steps = len(result.golden.steps)
        new = record_golden(command, fresh, scratch, steps, base=result.run, name=folder.name)
        if new.mark != result.mark or (result.golden.repeats and not new.repeats):
            raise UsageError(f"golden: {folder.name} changed while it was blessed. Check it again")
        write_json(fresh / PROOF_FILE, proof_of(result, new.left_out))
        swap(folder, fresh)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder / PROOF_FILE


def swap(folder: Path, fresh: Path) -> None:
    """Put a new folder in the place of an old one; if that fails, the old one is there again."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    os.rename(folder, old)
    try:
        os.rename(fresh, folder)
    except BaseException:
        os.rename(old, folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Put back golden runs whose replacement was cut off between its two renames."""
    with contextlib.suppress(OSError):
        for old in folder.glob(".*.old"):
            match = _OLD.fullmatch(old.name)
            if match is not None and is_golden(old) and not (folder / match[1]).exists():
                os.rename(old, folder / match[1])
