"""The result of a comparison in brief: the first diff, its cause, its fix, and the lines of code, for machines."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from padiff.records.both import Both
from padiff.records.first_diff import FirstDiff
from padiff.records.models import Models
from padiff.records.recorded import LOOP
from padiff.records.report_data import ReportData
from padiff.system.frames import Frame
from padiff.system.printable import printable

#: Version of the schema of `Diagnostic`.
DIAGNOSTIC_VERSION = 1
#: Largest size of a diagnostic's JSON, in bytes.
LARGEST = 4096
# Characters of a text, and number of further faults, that are kept.
_LONGEST, _FAULTS = 400, 4
# Kinds of causes that the line of the optimizer's construction shows.
_OF_OPTIMIZER = ("optimizer", "learning_rate", "weight_decay", "momentum", "beta")
# Kinds of causes that the line of the layer's construction shows.
_OF_LAYER = ("layer_setting", "dropout", "batch_norm")
# Lines of calls in the evidence of a cause.
_CALLS = re.compile(r"reference (\S+?):(\d+),? (?:and )?candidate (\S+?):(\d+)")


@dataclass(frozen=True, slots=True)
class CodeLine:
    """A line of one side's code: the file, relative to the folder that the training was started in, and the text."""

    file: str
    line: int
    code: str


@dataclass(frozen=True, slots=True)
class CodeLines:
    """The line of either side that a fault points at; `None` if not known."""

    reference: CodeLine | None
    candidate: CodeLine | None


@dataclass(frozen=True, slots=True)
class BriefCause:
    """The cause: machine-readable kind, sentence, and True if a computation with it reproduces the values."""

    kind: str
    text: str
    proven: bool


@dataclass(frozen=True, slots=True)
class BriefFix:
    """The code that fixes the cause, in the candidate's framework."""

    text: str


@dataclass(frozen=True, slots=True)
class BriefFault:
    """A fault: where it is, how far beyond its limit (a factor), why, and how to fix it."""

    step: int
    stage: str
    reference: str | None
    candidate: str | None
    slot: str
    times_limit: float | None
    cause: BriefCause | None
    fix: BriefFix | None
    places: CodeLines


@dataclass(frozen=True, slots=True)
class BriefCompared:
    """What was compared: pairs of tensors, those that differ, steps, and the share of all records."""

    tensors: int
    differ: int
    steps: int
    share: float


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """The result of a comparison in brief; the fields of the first fault are `None` if the runs match.

    Attributes:
        schema_version: version of this form.
        outcome: ``match``, ``differ`` or ``cannot tell``.
        step, stage, reference, candidate, slot, times_limit, cause, fix, places: of the first fault (`BriefFault`).
        faults: further faults that do not follow from the first one, 4 at most.
        next: commands that tell more.
        compared: what was compared.
        artifacts: paths of files that hold the whole report.
    """

    schema_version: int
    outcome: Literal["match", "differ", "cannot tell"]
    step: int | None
    stage: str | None
    reference: str | None
    candidate: str | None
    slot: str | None
    times_limit: float | None
    cause: BriefCause | None
    fix: BriefFix | None
    places: CodeLines
    faults: list[BriefFault]
    next: list[str]
    compared: BriefCompared
    artifacts: list[str]


def diagnostic_of(report: ReportData, runs: Both[str] | None = None, artifacts: tuple[str, ...] = ()) -> Diagnostic:
    """Return a report in brief.

    Args:
        report: the report.
        runs: paths of both run folders, for the commands; `None` if the runs are in no folder.
        artifacts: paths of files that hold the whole report.
    """
    coverage = report.coverage
    compared = BriefCompared(coverage.compared, len(report.failed), len(coverage.steps), round(coverage.share, 4))
    first = None if report.first_diff is None else _fault(report.first_diff, report.models)
    return Diagnostic(
        schema_version=DIAGNOSTIC_VERSION,
        outcome=report.outcome,  # type: ignore[arg-type]
        step=None if first is None else first.step,
        stage=None if first is None else first.stage,
        reference=None if first is None else first.reference,
        candidate=None if first is None else first.candidate,
        slot=None if first is None else first.slot,
        times_limit=None if first is None else first.times_limit,
        cause=None if first is None else first.cause,
        fix=None if first is None else first.fix,
        places=CodeLines(None, None) if first is None else first.places,
        faults=[_fault(each, report.models) for each in report.independent[:_FAULTS]],
        next=[] if runs is None or first is None else _commands(runs),
        compared=compared,
        artifacts=[_short(path) for path in artifacts],
    )


def diagnostic_json(diagnostic: Diagnostic) -> str:
    """Return a diagnostic as JSON of at most 4,096 bytes; the last faults are left out if there is no room."""
    text = json.dumps(asdict(diagnostic), ensure_ascii=True)
    if len(text) <= LARGEST or not (diagnostic.faults or diagnostic.artifacts):
        return text
    if diagnostic.faults:
        return diagnostic_json(replace(diagnostic, faults=diagnostic.faults[:-1]))
    return diagnostic_json(replace(diagnostic, artifacts=[]))


def diagnostic_schema() -> dict[str, Any]:
    """Return the JSON Schema of a diagnostic, made from its types."""
    definitions: dict[str, Any] = {}
    schema = _schema(Diagnostic, definitions)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "padiff diagnostic", **schema,
            "$defs": definitions}  # fmt: skip


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    plain: Mapping[Any, str] = {int: "integer", float: "number", str: "string", bool: "boolean", NoneType: "null"}
    if kind in plain:
        return {"type": plain[kind]}
    if get_origin(kind) is Literal:
        return {"enum": list(get_args(kind))}
    if get_origin(kind) is UnionType:
        return {"anyOf": [_schema(each, definitions) for each in get_args(kind)]}
    if get_origin(kind) is list:
        return {"type": "array", "items": _schema(get_args(kind)[0], definitions)}
    if kind is not Diagnostic and kind.__name__ in definitions:
        return {"$ref": f"#/$defs/{kind.__name__}"}
    hints = get_type_hints(kind)
    properties = {each.name: _schema(hints[each.name], definitions) for each in fields(kind)}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    if kind is Diagnostic:
        return schema
    definitions[kind.__name__] = schema
    return {"$ref": f"#/$defs/{kind.__name__}"}


def code_lines(first: FirstDiff, models: Models | None) -> Both[Frame | None]:
    """Return the line of either side's code that a fault points at; `None` if not known.

    A setting or a weight is shown where the layer or the optimizer is constructed, everything else where it is called.
    """
    if models is None:
        return Both(None, None)
    kind = "" if first.cause is None else first.cause.kind
    evidence = "" if first.cause is None else first.cause.evidence
    calls = _CALLS.search(evidence)
    if calls is not None:
        return (
            Both((calls[1], calls[2]), (calls[3], calls[4]))
            .zip(models.stacks)
            .map(lambda side: _with_code(side[0][0], int(side[0][1]), side[1]))
        )
    paths = Both(first.reference, first.candidate)
    if kind.startswith(_OF_OPTIMIZER) or (first.stage == "update" and kind != "unknown"):
        return models.lines.map(_optimizer)
    made = paths.zip(models.lines).map(lambda side: side[1].get(side[0] or LOOP))
    if (kind.startswith(_OF_LAYER) or first.stage == "weight") and any(made):
        return made
    called = first.stacks.zip(models.stacks).map(_innermost)
    return called.zip(made).map(lambda side: side[0] or side[1])


def _optimizer(lines: Mapping[str, Frame]) -> Frame | None:
    found = [frame for key, frame in lines.items() if key.startswith("optimizer.")]
    return found[0] if len(found) == 1 else None


def _innermost(side: tuple[tuple[str, ...], Mapping[str, tuple[Frame, ...]]]) -> Frame | None:
    stack, stacks = side
    if not stack:
        return None
    file, _, line = stack[0].partition(" ")[0].rpartition(":")
    return _with_code(file, int(line), stacks) if line.isdecimal() else None


def _with_code(file: str, line: int, stacks: Mapping[str, tuple[Frame, ...]]) -> Frame:
    frames = (frame for stack in stacks.values() for frame in stack)
    return next((each for each in frames if (each.file, each.line) == (file, line)), Frame(file, line, "", ""))


def _fault(first: FirstDiff, models: Models | None) -> BriefFault:
    cause = first.cause
    times = math.nan if first.diff is None or first.diff.figures is None else first.diff.excess
    return BriefFault(
        step=first.step,
        stage=first.stage,
        reference=None if first.reference is None else _short(first.reference),
        candidate=None if first.candidate is None else _short(first.candidate),
        slot=_short(first.slot),
        times_limit=float(f"{times:.3g}") if math.isfinite(times) else None,
        cause=None if cause is None else BriefCause(cause.kind, _short(cause.sentence), cause.proven),
        fix=BriefFix(_short(cause.fix)) if cause is not None and cause.fix else None,
        places=CodeLines(*code_lines(first, models).map(_code_line)),
    )


def _code_line(frame: Frame | None) -> CodeLine | None:
    return None if frame is None else CodeLine(_short(frame.file), frame.line, _short(frame.code))


def _short(text: str) -> str:
    text = printable(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _commands(runs: Both[str]) -> list[str]:
    reference, candidate = (shlex.quote(printable(run)) for run in runs)
    command = f"padiff compare {reference} {candidate}"
    return [f"{command} --all", f"{command} --json report.json"]
