"""The receipt of a port check: all that was compared, how, with which result; its text and its verification."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from padiff.dump.medium import read_text
from padiff.errors import UsageError
from padiff.records import SIDES
from padiff.records.report_data import DIFFER, MATCH
from padiff.report_markdown import markdown_table, markdown_text
from padiff.system.terminal import printable

#: Largest size of a receipt in bytes. Chosen: all lists at their bounds take less.
LARGEST = 4 << 20
#: Largest number of names that a list of a receipt holds; further ones are counted.
MOST = 200
# Largest number of characters of a text.
_LONGEST = 1000

Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=_LONGEST)]
Texts: TypeAlias = Annotated[list[Text], msgspec.Meta(max_length=MOST)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Digest: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
Outcome: TypeAlias = Literal["match", "differ", "cannot tell"]


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of the comparison; `None` stands for the default.

    Attributes:
        layer_map: pairs of paths of layers, the reference's first; a list of paths for parts, `None` for no partner.
        atol, rtol, compare_mode: the fixed tolerance.
        steps, stages, layers: the compared steps, stages and patterns of layers.
    """

    layer_map: Annotated[list[tuple[Text | Texts | None, Text | Texts | None]], msgspec.Meta(max_length=100_000)] = []
    atol: Annotated[float, msgspec.Meta(ge=0)] | None = None
    rtol: Annotated[float, msgspec.Meta(ge=0)] | None = None
    compare_mode: Literal["mean", "strict"] | None = None
    steps: Text | None = None
    stages: Texts | None = None
    layers: Texts | None = None


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A row of the result.

    Attributes:
        stage, name: group and name of the check.
        outcome: ``match``, ``differ`` or ``not checked``.
        tensors, differ, equal: number of compared tensors, of those that differ, of those equal to the bit.
        in_full: number of tensors that were recorded in full; the others are sketches, whose bits are not known.
        times_limit: the largest error as a multiple of its limit; `None` if it has none.
        limit, figure: limit of that tensor, and the quantity that it limits.
        where: that tensor.
    """

    stage: Literal["structure", "numbers", "behaviour"]
    name: Text
    outcome: Literal["match", "differ", "not checked"]
    tensors: Count = 0
    differ: Count = 0
    equal: Count = 0
    in_full: Count = 0
    times_limit: float | None = None
    limit: float | None = None
    figure: Text = ""
    where: Text = ""


class Side(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A run: what it is, and what was recorded of it.

    Attributes:
        name, path: name of the run, and its path as it was given; only shown.
        identity: identity of the recording; another one if the training was recorded again.
        framework, framework_version, python, padiff: the versions that the training ran with.
        sources: SHA-256 of the files of source code that the recording read, by path; not all that the script imports.
        files: SHA-256 of the files of the run's folder, by name; the files of a step are one. Of a run in a store,
            that of its description only.
        weights: SHA-256 of the weights and buffers of the first compared step; `None` if none were recorded.
        batches: SHA-256 of the inputs and labels of the compared steps; `None` if none were recorded.
        layers, recorded_layers: number of layers of the model, and of those that the lists let record.
        left_out_by: what left the others out: ``black_list``, ``white_list``, ``layer_map``; empty if nothing did.
        left_out: paths of these layers.
        every_n_steps, detail: the schedule and the levels of the recording, as text.
        steps, first_step, last_step: number of recorded steps, the first one and the last one.
        processes: number of processes.
        records: number of tensors recorded in the compared steps.
    """

    name: Text
    path: Text
    identity: Text
    framework: Text
    framework_version: Text
    python: Text
    padiff: Text
    sources: Annotated[dict[Text, Digest], msgspec.Meta(max_length=MOST)]
    files: Annotated[dict[Text, Digest], msgspec.Meta(max_length=MOST)]
    weights: Digest | None
    batches: Digest | None
    layers: Count
    recorded_layers: Count
    left_out_by: Text
    left_out: Texts
    every_n_steps: Text
    detail: Text
    steps: Count
    first_step: Count
    last_step: Count
    processes: Count
    records: Count


class Coverage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Amount of both runs that was compared.

    Attributes:
        steps: number of compared steps.
        tensors, share: number of compared pairs, and their share of all records.
        equal, in_full, sketched: number of pairs that are equal to the bit, recorded in full, judged from sketches.
        equal_share: share of the pairs recorded in full that are equal to the bit; `None` if there are none.
        tolerance: the rule that judged, in words.
    """

    steps: Count
    tensors: Count
    share: float
    equal: Count
    in_full: Count
    sketched: Count
    equal_share: float | None
    tolerance: Text


class Movement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How far the reference's training moved in the compared steps (`padiff.records.report_data.Movement`)."""

    weights: float
    limit: float | None
    losses: tuple[float, float] | None
    enough: bool
    text: Text


class Without(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The result of the same runs without the options; `outcome` is `None` if they cannot be compared so."""

    outcome: Outcome | None
    text: Text


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The result of a port check.

    Attributes:
        schema_version: version of this form.
        outcome: the verdict.
        fault: the first fault in one line; empty if the runs match.
        checks: the rows, in their order.
        exceptions: everything that was left out, or compared otherwise than by default, in words.
        without_options: the result without the options; `None` if there are no options.
        options: the options of the comparison.
        padiff, python: versions that judged.
        reference, candidate: both runs.
        coverage, moved: how much was compared, and how far the reference moved; `None` if not known.
    """

    schema_version: Literal[1]
    outcome: Outcome
    fault: Text
    checks: Annotated[list[Check], msgspec.Meta(max_length=16)]
    exceptions: Texts
    without_options: Without | None
    options: Options
    padiff: Text
    python: Text
    reference: Side
    candidate: Side
    coverage: Coverage
    moved: Movement | None


def receipt_json(receipt: Receipt) -> str:
    """Return a receipt as JSON, a field on a line."""
    return msgspec.json.format(msgspec.json.encode(receipt), indent=1).decode()


def read_receipt(path: str) -> Receipt:
    """Return the receipt in a file.

    Raises:
        UsageError: the file cannot be read, is too large, or is no receipt.
    """
    try:
        text = read_text(Path(os.path.realpath(path)), LARGEST)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the receipt {printable(path)}: {error}") from error
    try:
        return msgspec.json.decode(text, type=Receipt)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"{printable(path)} is no receipt of this version: {printable(str(error))}. Expected a file that "
            "`padiff port-check --receipt` wrote"
        ) from error


def short(text: str) -> str:
    """Return a printable text of the largest length of a receipt's texts."""
    text = printable(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


_HEAD = ("stage", "check", "outcome", "tensors", "to the bit", "worst / limit", "limit")
# Columns of numbers.
_RIGHT = range(3, 7)


def table_lines(receipt: Receipt) -> list[str]:
    """Return the result as lines of text: verdict, table, first fault, and what was compared otherwise."""
    rows = [_HEAD, *map(_cells, receipt.checks)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(_HEAD))]
    lines = [headline(receipt), ""]
    for row in rows:
        cells = [
            cell.rjust(width) if k in _RIGHT else cell.ljust(width) for k, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    lines.append("")
    lines += [f"  {label:<11}{text}" for label, text in _remarks(receipt)]
    return lines


def headline(receipt: Receipt) -> str:
    """Return the verdict, with the number of exceptions, and both frameworks."""
    count = len(receipt.exceptions)
    text = f", {count} exception{'s' if count != 1 else ''}" if count else ""
    return f"{receipt.outcome.upper()}{text}: {_named(receipt.reference)} against {_named(receipt.candidate)}"


def to_markdown(receipt: Receipt) -> str:
    """Return the result as Markdown; names of a run have no effect in it."""
    lines = [f"### padiff port-check: {markdown_text(headline(receipt))}", ""]
    lines += markdown_table(_HEAD, map(_cells, receipt.checks))
    lines += ["", *(f"- **{label}** {markdown_text(text)}" for label, text in _remarks(receipt))]
    return "\n".join(lines) + "\n"


def _remarks(receipt: Receipt) -> Iterator[tuple[str, str]]:
    if receipt.fault:
        yield "fault", receipt.fault
    for exception in receipt.exceptions:
        yield "exception", exception
    without = receipt.without_options
    if without is not None:
        yield (
            "without",
            f"options: {without.text}" if without.outcome else f"options they do not compare: {without.text}",
        )
    if receipt.moved is not None and receipt.moved.enough:  # else it is an exception
        yield "moved", receipt.moved.text
    coverage = receipt.coverage
    steps = f"{coverage.steps} step{'s' if coverage.steps != 1 else ''}"
    equal = (
        "" if coverage.equal_share is None else f"; {coverage.equal_share:.0%} of those in full are equal to the bit"
    )
    yield "compared", f"{coverage.tensors} tensors in {steps}, {coverage.share:.0%} of what was recorded{equal}"


def _named(side: Side) -> str:
    return f"{side.path} ({side.framework} {side.framework_version})"


def _cells(check: Check) -> tuple[str, ...]:
    if check.outcome == "not checked":
        return (check.stage, check.name, check.outcome, "", "", "", "")
    tensors = f"{check.differ} of {check.tensors} differ" if check.differ else str(check.tensors)
    worst = "" if check.times_limit is None else f"{check.times_limit:.2g}"
    limit = "" if check.limit is None else f"{check.limit:.1e}"
    return (check.stage, check.name, check.outcome, tensors, f"{check.equal} of {check.in_full}", worst, limit)


# Fields of a run that say where it lies and which recording it is: the same training may be recorded again elsewhere.
_REMARKS = ("padiff", "python", "reference.name", "reference.path", "reference.identity", "candidate.name",
            "candidate.path", "candidate.identity")  # fmt: skip
# Largest relative difference of two figures. Chosen: another numpy adds in another order.
_CLOSE = 1e-4


def changes(receipt: Receipt, now: Receipt) -> tuple[list[str], list[str]]:
    """Return each field that differs now, as sentences, and remarks: other versions, names and recordings.

    The files of another recording are other ones, and are not compared.

    Args:
        receipt: the receipt.
        now: the result of the same check, made again.
    """
    changed: list[str] = []
    remarks: list[str] = []
    others = tuple(f"{side}.files" for side in other_recordings(receipt, now))
    for name, before, after in _differences(msgspec.to_builtins(receipt), msgspec.to_builtins(now), ""):
        if others and name.startswith(others):
            continue
        line = short(f"{name}: {_shown(before)} in the receipt, {_shown(after)} now")
        (remarks if name in _REMARKS else changed).append(line)
    return changed, remarks


def other_recordings(receipt: Receipt, now: Receipt) -> list[str]:
    """Return the sides whose run is another recording than that of the receipt."""
    return [side for side in SIDES if getattr(receipt, side).identity != getattr(now, side).identity]


def contradictions(receipt: Receipt) -> list[str]:
    """Return sentences on fields of a receipt that contradict each other."""
    rows = [check.outcome for check in receipt.checks]
    problems = []
    if receipt.outcome == MATCH and set(rows) != {MATCH}:
        problems.append("the outcome is match, but not that of every check")
    if receipt.outcome == DIFFER and DIFFER not in rows:
        problems.append("the outcome is differ, but every check matches")
    for check in receipt.checks:
        if bool(check.differ) != (check.outcome == DIFFER) or check.equal > check.in_full:
            problems.append(short(f"{check.name}: its outcome and its numbers contradict each other"))
    if receipt.coverage.tensors != sum(check.tensors for check in receipt.checks):
        problems.append("the checks hold another number of tensors than were compared")
    return problems


def _differences(before: Any, after: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name and both values of each field that differs."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            yield from _differences(before.get(key), after.get(key), f"{name}.{key}" if name else str(key))
    elif isinstance(before, list) and isinstance(after, list) and name == "checks" and len(before) == len(after):
        for one, other in zip(before, after):
            yield from _differences(one, other, f"check {one['name']}")
    elif isinstance(before, float) and isinstance(after, float):
        if not math.isclose(before, after, rel_tol=_CLOSE):
            yield name, before, after
    elif before != after:
        yield name, before, after


def _shown(value: Any) -> str:
    if isinstance(value, dict) and "text" in value:
        value = value["text"]
    if isinstance(value, str) and len(value) == 64 and " " not in value:
        value = f"{value[:12]}..."  # a digest
    text = "none" if value in (None, "") else f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
