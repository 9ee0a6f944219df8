"""The scope of a comparison: everything that was left out, or compared otherwise than by default, in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized

from padiff.port_check.receipt import MOST, Check, Movement, Options, Side, short
from padiff.recorder.detail import NOTHING
from padiff.records import SIDES, STAGES, Both, Report, RunInfo
from padiff.records.report_data import CANNOT_TELL, MATCH

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
        for name, found in zip(SIDES, both):
            if found:
                yield f"{_counted(found, what)} of the {name} without a partner: {_first(list(map(str, found)))}"
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
