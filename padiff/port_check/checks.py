"""The checks of a port, in a fixed order, and the scope of a comparison: all that was left out."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np

from padiff import __version__
from padiff.compare import Tolerance, compare_runs
from padiff.compare.coverage import Steps
from padiff.dump import file_digests, open_run
from padiff.errors import NothingToCompareError, UsageError
from padiff.model.given_map import GivenMap
from padiff.port_check.receipt import MOST, Check, Coverage, Movement, Options, Receipt, Side, Without, short
from padiff.recorder.options import NOTHING
from padiff.records import LOOP, SIDES, STAGES, Both, FirstDiff, Record, Report, Run, RunInfo
from padiff.records.diagnostic import diagnostic_of
from padiff.records.diagnostic_text import summary_line
from padiff.records.recorded import is_label
from padiff.records.report_data import CANNOT_TELL, MATCH, Overview, StageCounts, Table, tables_of
from padiff.records.step_diffs import TENSORS

# Number of names that a line shows.
_SHOWN = 4
_LISTS = {"black_list": "black list", "white_list": "white list", "layer_map": "layer map"}


def left_out_by(info: RunInfo) -> tuple[str, list[str]]:
    """Return what left layers of a model out of its run, and the paths of these layers."""
    left_out = [layer.path for layer in info.layers if not layer.recorded]
    by = str(info.recording.get("list", "")) or ("layer_map" if info.layer_map else "")
    return (by if by in _LISTS else "black_list") if left_out else "", left_out


def exceptions(
    report: Report,
    infos: Both[RunInfo],
    sides: Both[Side],
    options: Options,
    checks: Sequence[Check],
    moved: Movement | None,
    default: Sequence[Check] | None,
) -> list[str]:
    """Return sentences that name everything that was left out or compared otherwise; at most `MOST`.

    Args:
        report: the report of the comparison.
        infos: descriptions of both runs.
        sides: the same for the receipt.
        options: the options of the comparison.
        checks: the rows of the result.
        moved: the reference's movement.
        default: the rows of the comparison without options; `None` if it was not made.
    """
    lines = [
        *_recordings(infos, sides),
        *_options(options, checks, default),
        *_uncompared(report),
        *(f"{check.name}: nothing to compare" for check in checks if check.outcome == "not checked"),
    ]
    if moved is not None and not moved.enough:
        lines.append(f"the training hardly moved: {moved.text}")
    lines = [short(line) for line in dict.fromkeys(lines)]
    return lines if len(lines) <= MOST else [*lines[: MOST - 1], f"and {len(lines) - MOST + 1} more"]


def _recordings(infos: Both[RunInfo], sides: Both[Side]) -> Iterator[str]:
    """Yield what the recordings left out."""
    for name, info, side in zip(SIDES, infos, sides):
        by, left_out = left_out_by(info)
        if left_out:
            yield f"{len(left_out)} of {side.layers} layers by the {name}'s {_LISTS[by]}: {_first(left_out)}"
        detail = info.recording.get("detail", {})
        nothing = [str(key) for key, level in detail.items() if level == NOTHING] if isinstance(detail, Mapping) else []
        if nothing:
            yield f"not recorded by the {name}'s detail: {_first(['everything' if n == '*' else n for n in nothing])}"
        if side.steps and side.last_step - side.first_step + 1 > side.steps:
            every = "" if side.every_n_steps in ("", "1") else f" (every_n_steps {side.every_n_steps})"
            yield f"{side.steps} of the {name}'s steps {side.first_step} to {side.last_step}{every} are recorded"
        if side.first_step:
            yield f"the {name} is recorded from step {side.first_step} on"
        if info.recording.get("replay_of"):
            yield f"the {name} is a replay: each of its steps begins from a recorded state"
        yield from (f"an error of padiff's own while the {name} was recorded: {line}" for line in info.errors)


def _options(options: Options, checks: Sequence[Check], default: Sequence[Check] | None) -> Iterator[str]:
    """Yield what the options of the comparison changed."""
    if options.layer_map:
        alone = [[side for side in pair if side is not None] for pair in options.layer_map if None in pair]
        text = f"{_counted(options.layer_map, 'pair')} of layers by the layer map"
        yield f"{text}, without a partner: {_first([str(pair[0]) for pair in alone])}" if alone else text
    if options.steps is not None:
        yield f"only the steps {options.steps} are compared"
    if options.stages is not None:
        left_out = [stage for stage in STAGES if stage not in options.stages]
        yield f"stages that are not compared: {', '.join(left_out)}" if left_out else "all stages were named"
    if options.layers is not None:
        yield f"only layers like {_first(options.layers)} are compared"
    if (options.atol, options.rtol, options.compare_mode) == (None, None, None):
        return
    others = {} if default is None else {check.name: check for check in default}
    for check in checks:
        other = others.get(check.name)
        if check.limit is None:
            continue
        text = f"tolerance {check.name}: {check.figure} {check.limit:.2g}"
        yield text if other is None or other.limit is None else f"{text} for {other.figure} {other.limit:.2g}"


def _uncompared(report: Report) -> Iterator[str]:
    """Yield what has no partner, and what was judged from less than full tensors."""
    coverage = report.coverage
    sides: list[tuple[str, Both[Sequence[object]]]] = [
        ("layer", Both(coverage.reference_layers, coverage.candidate_layers)),
        ("parameter", Both(coverage.reference_parameters, coverage.candidate_parameters)),
        ("recorded tensor", Both(coverage.reference_sites, coverage.candidate_sites)),
        ("step", Both(coverage.reference_steps, coverage.candidate_steps)),
    ]
    for what, both in sides:
        for name, reasons in zip(SIDES, both):
            if reasons:
                yield f"{_counted(reasons, what)} of the {name} without a partner: {_first(list(map(str, reasons)))}"
    for name, unrecorded in zip(SIDES, (coverage.reference_unrecorded, coverage.candidate_unrecorded)):
        if unrecorded:
            yield f"{_counted(unrecorded, 'trained parameter')} of the {name} without a record: {_first(unrecorded)}"
    if coverage.sketched:
        yield f"{coverage.sketched} of {coverage.compared} tensors judged from sketches"
    if coverage.unmeasured:
        yield f"{_counted(coverage.unmeasured, 'tensor')} not compared, as only sketches were kept"
    if coverage.cut_elsewhere:
        yield f"{_counted(coverage.cut_elsewhere, 'layer')} compared inside only, for another end of the computation"
    if coverage.uncalled:
        yield f"{_counted(coverage.uncalled, 'layer')} never called: {_first(coverage.uncalled)}"
    if coverage.zeros:
        yield f"{_counted(coverage.zeros, 'tensor')} accepted as rounding noise around zero"
    if coverage.amplified is not None:
        yield f"from step {coverage.amplified} on the training amplifies rounding, so that small faults do not show"
    if coverage.ranks:
        yield coverage.ranks
    yield from coverage.lost
    yield from (f"not recorded: {reason}" for reason in coverage.left_out)
    if report.outcome in (MATCH, CANNOT_TELL):
        yield from (f"set differently: {note}" for note in coverage.notes)


def _counted(items: Sized, noun: str) -> str:
    return f"{len(items)} {noun}{'s' if len(items) != 1 else ''}"


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"


class _Row(NamedTuple):
    """A check: its group, its name, its stages, and True if it is made of the first compared step."""

    group: str
    name: str
    stages: tuple[str, ...]
    is_first: bool = True


_ROWS = (
    _Row("structure", "start equal", ("input", "weight")),
    _Row("numbers", "forward", ("forward",)),
    _Row("numbers", "loss", ("loss",)),
    _Row("numbers", "gradients", ("backward", "grad")),
    _Row("numbers", "update", ("update",)),
    _Row("behaviour", "short training", STAGES, False),
)


def port_check(
    paths: Both[str], options: Options, progress: Callable[[float, int], None] | None = None
) -> tuple[Receipt, Report]:
    """Check a port on two runs; return the receipt and the report of the comparison.

    With options, the runs are compared without them, too, so that the receipt says what the options changed.

    Args:
        paths: the runs, as paths or places in a store.
        options: the options of the comparison.
        progress: called with ``(finished steps, all steps)``.

    Raises:
        RunFolderError: a folder cannot be read.
        NothingToCompareError: the runs have nothing in common.
        UsageError: an option is invalid, or both runs are one recording.
    """
    runs = paths.map(open_run)
    identities = runs.map(lambda run: run.info.identity)
    if identities.reference and identities.reference == identities.candidate:
        raise UsageError(
            f"{paths.reference} and {paths.candidate} hold one recording (id {short(identities.reference)}): a copy of "
            "the reference always matches. Record the candidate"
        )
    report = _compared(paths, options, progress)
    checks = _checks(report)
    default = None
    without = None
    if options != Options():
        try:
            plain = _compared(paths, Options(), progress)
            default = _checks(plain)
            without = Without(outcome=_outcome(plain, default), text=short(summary_line(diagnostic_of(plain), "en")))
        except NothingToCompareError as error:
            without = Without(outcome=None, text=short(str(error)))
    first, numbers = report.coverage.steps[0], report.coverage.steps
    records = Both(report.coverage.reference_records, report.coverage.candidate_records)
    sides = runs.zip(paths).zip(records).map(lambda side: _side(side[0][0], side[0][1], side[1], first, numbers))
    moved = _movement(report)
    equal, in_full = (sum(getattr(check, name) for check in checks) for name in ("equal", "in_full"))
    outcome = _outcome(report, checks)
    receipt = Receipt(
        schema_version=1,
        outcome=outcome,
        fault="" if outcome == MATCH else short(_fault(report, checks)),
        checks=checks,
        exceptions=exceptions(report, runs.map(lambda run: run.info), sides, options, checks, moved, default),
        without_options=without,
        options=options,
        padiff=__version__,
        python=sys.version.split()[0],
        reference=sides.reference,
        candidate=sides.candidate,
        coverage=Coverage(
            steps=len(numbers),
            tensors=report.coverage.compared,
            share=round(report.coverage.share, 6),
            equal=equal,
            in_full=in_full,
            sketched=report.coverage.sketched,
            equal_share=round(equal / in_full, 6) if in_full else None,
            tolerance=short(report.tolerance),
        ),
        moved=moved,
    )
    return receipt, report


def _compared(paths: Both[str], options: Options, progress: Callable[[float, int], None] | None) -> Report:
    chosen: dict[str, Any] = {} if options.steps is None else {"steps": Steps(options.steps)}
    if options.stages is not None:
        chosen["stages"] = options.stages
    return compare_runs(
        paths.reference,
        paths.candidate,
        layer_map=GivenMap(options.layer_map),
        policy=Tolerance.from_options(options.atol, options.rtol, options.compare_mode),
        layers=options.layers,
        progress=progress,
        **chosen,
    )


def _outcome(report: Report, checks: Sequence[Check]) -> Any:
    """Return the verdict: a match only if each row compared something."""
    unchecked = any(check.outcome == "not checked" for check in checks)
    return CANNOT_TELL if report.outcome == MATCH and unchecked else report.outcome


def _fault(report: Report, checks: Sequence[Check]) -> str:
    if report.outcome != MATCH:
        return summary_line(diagnostic_of(report), "en")
    names = ", ".join(check.name for check in checks if check.outcome == "not checked")
    return f"CANNOT TELL: nothing to compare for {names}"


# -- the rows ----------------------------------------------------------------------------------------------------------


def _checks(report: Report) -> list[Check]:
    tables = list(tables_of(report.diffs))
    first = min((table.step for table in tables), default=0)
    groups = [[table for table in tables if (table.step == first) is is_first] for is_first in (False, True)]
    stages = [Overview(group).stages for group in groups]
    declared = [each for each in (report.first_diff, *report.independent) if each is not None and each.diff is None]
    return [_check(row, stages[row.is_first], groups[row.is_first], declared, first) for row in _ROWS]


def _check(
    row: _Row, stages: dict[str, StageCounts], tables: Iterable[Table], declared: Sequence[FirstDiff], first: int
) -> Check:
    counts = [stages[stage] for stage in row.stages if stage in stages]
    numbers = [STAGES.index(stage) for stage in row.stages]
    equal = in_full = 0
    for table in tables:
        rows = table.rows[np.isin(table.stages, numbers) & table.complete]
        full = rows["basis"] == TENSORS
        in_full += int(full.sum())
        equal += int((full & (rows["l2"] == 0) & (rows["nonfinite"] == 0)).sum())
    compared, differ = sum(each.compared for each in counts), sum(each.differ for each in counts)
    settings = [each for each in declared if each.stage in row.stages and (each.step <= first) is row.is_first]
    differ += len(settings)
    worst = max((each for each in counts if each.worst is not None), key=lambda each: each.excess, default=None)
    diff = None if worst is None else worst.worst
    judged = None if diff is None else diff.judgement
    return Check(
        stage=row.group,  # type: ignore[arg-type]
        name=row.name,
        outcome="differ" if differ else "match" if compared else "not checked",
        tensors=compared,
        differ=differ,
        equal=equal,
        in_full=in_full,
        times_limit=None if diff is None else _number(diff.excess),
        limit=None if judged is None else _number(judged.limit),
        figure="" if judged is None else str(judged.figure),
        where="" if diff is None else short(f"step {diff.pair.step}, {diff.pair.anchor.site}"),
    )


def _number(value: float) -> float | None:
    """Return a number with six digits; `None` for infinity and NaN."""
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _movement(report: Report) -> Movement | None:
    moved = report.moved
    if moved is None or not math.isfinite(moved.weights):
        return None
    losses = moved.losses if moved.losses is not None and all(map(math.isfinite, moved.losses)) else None
    return Movement(
        weights=float(f"{moved.weights:.6g}"),
        limit=_number(moved.limit),
        losses=losses,
        enough=bool(moved.enough),
        text=short(moved.sentence),
    )


# -- a side ----------------------------------------------------------------------------------------------------------


def _side(run: Run, path: str, records: int, first: int, compared: Sequence[int]) -> Side:
    info, numbers = run.info, run.numbers()
    recording, environment = info.recording, info.environment
    by, left_out = left_out_by(info)
    return Side(
        name=short(run.name),
        path=short(path),
        identity=short(info.identity),
        framework=short(info.framework),
        framework_version=short(info.framework_version),
        python=short(str(environment.get("python", ""))),
        padiff=short(str(environment.get("padiff", ""))),
        sources={short(path): digest for path, digest in sorted(info.files.items())[:MOST] if _is_digest(digest)},
        files={short(name): digest for name, digest in file_digests(path, MOST).items()},
        weights=_digest(run, [first], lambda record: record.stage == "weight"),
        batches=_digest(run, compared, _is_of_batch),
        layers=len(info.layers),
        recorded_layers=sum(layer.recorded for layer in info.layers),
        left_out_by=by,
        left_out=[short(path) for path in left_out[:MOST]],
        every_n_steps=short(json.dumps(recording.get("every_n_steps", 1), default=str)),
        detail=short(json.dumps(recording.get("detail", {"*": "full"}), default=str)),
        steps=len(numbers),
        first_step=numbers[0] if numbers else 0,
        last_step=numbers[-1] if numbers else 0,
        processes=info.world_size,
        records=records,
    )


def _is_digest(text: object) -> bool:
    return isinstance(text, str) and len(text) == 64 and all(letter in "0123456789abcdef" for letter in text)


def _is_of_batch(record: Record) -> bool:
    return is_label(record) or (record.stage == "input" and record.layer != LOOP)


def _digest(run: Run, numbers: Iterable[int], chosen: Callable[[Record], bool]) -> str | None:
    """Return the SHA-256 of the chosen tensors of some steps, of their sketches where only these were recorded."""
    digest, count = hashlib.sha256(), 0
    for number in numbers:
        for step in run.steps(number):
            for record in sorted(filter(chosen, step.records), key=lambda record: (record.site, record.order)):
                sketch = record.sketch
                array = record.value if sketch is None else sketch.projection
                kept = "full" if sketch is None else "sketch"
                head = [number, step.rank, record.site, record.dtype, list(record.shape), kept]
                digest.update(json.dumps(head).encode("utf-8", "surrogatepass"))
                digest.update(np.ascontiguousarray(array).tobytes())
                count += 1
    return digest.hexdigest() if count else None
