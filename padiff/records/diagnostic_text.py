"""The result of a comparison in brief, as lines of text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import NamedTuple

from padiff.records.diagnostic import BriefFault, CodeLine, Diagnostic

# Columns of the labels, and width of the tag on the right.
_LABEL = 10
# Largest number of lines of a cause that stand before the code.
_SHORT = 2
# Columns of the code that are kept before the marked part if a line is cut.
_BEFORE = 24
#: Roles of parts of a line: the outcome, a label, whether a cause is proven, a file and line, a fix, a mark, and
#: secondary text.
OUTCOME, LABEL, CERTAINTY, PLACE, FIX, MARK, QUIET = (
    "outcome",
    "label",
    "certainty",
    "place",
    "fix",
    "mark",
    "quiet",
)

_NOTHING = "no step was compared yet"
# What commands show, by their last words.
_SHOWN = {" -v": "tables, trees, evidence", "--html report.html": "a page to look at"}


class Part(NamedTuple):
    """A part of a line.

    Attributes:
        text: the text.
        role: one of the roles of this module; empty for plain text.
    """

    text: str
    role: str = ""


Line = list[Part]


def diagnostic_text(diagnostic: Diagnostic, width: int = 80) -> str:
    """Return a diagnostic as text of some lines.

    Args:
        diagnostic: the result of a comparison.
        width: number of available columns.
    """
    lines = ("".join(part.text for part in line).rstrip() for line in diagnostic_lines(diagnostic, width))
    return "\n".join(lines)


def summary_line(diagnostic: Diagnostic) -> str:
    """Return a diagnostic in one line: the outcome, the position of the first fault, and its cause or size."""
    faults = diagnostic.all_faults
    if not faults:
        text = _amount(diagnostic) if diagnostic.outcome == "match" else diagnostic.notes[0]
        return f"{diagnostic.outcome.upper()}: {text}"
    first, *others = faults
    known = first.cause is not None and first.cause.kind != "unknown"
    why = first.cause.text if first.cause is not None and known else first.size
    more = f"; and {len(others)} other fault{'s' if len(others) > 1 else ''}" if others else ""
    return f"DIFFER {_position(first)}{f': {why}' if why else ''}{more}"


def diagnostic_lines(diagnostic: Diagnostic, width: int = 80) -> list[Line]:
    """Return the lines of a diagnostic, in parts with roles for colours.

    Args:
        diagnostic: the result of a comparison.
        width: number of available columns.
    """
    width = max(width, 40)
    faults = diagnostic.all_faults
    amount = _amount(diagnostic, " compared" if faults else "") if diagnostic.compared.steps else _NOTHING
    lines: list[Line] = []
    if faults:
        first, *others = faults
        count = f"{len(faults)} faults" if others else ""
        head = list(_labelled(diagnostic.outcome.upper(), _position(first), width, count, outcome=True))
        lines += [*head, *([[]] if len(head) == 1 else []), *_fault_lines(first, width)]
        if diagnostic.follows:
            lines += _labelled("follows", diagnostic.follows, width)
        for fault in others:
            lines += [[], *_labelled("also", _position(fault), width), *_fault_lines(fault, width)]
        lines.append([])
    else:
        title = "parameters that train have no record" if diagnostic.outcome == "cannot tell" else amount
        lines += _labelled(diagnostic.outcome.upper(), title, width, outcome=True)
    if diagnostic.closest:
        lines += _labelled("closest", diagnostic.closest, width)
    if diagnostic.moved:
        lines += _labelled("moved", diagnostic.moved, width)
    for note in diagnostic.notes:
        lines += _labelled("note", note, width)
    if diagnostic.environment:
        lines += _labelled("differs", f"environment: {'; '.join(diagnostic.environment)}", width)
    for k, command in enumerate(diagnostic.next):
        what = next((text for end, text in _SHOWN.items() if command.endswith(end)), "")
        room = max(width - _LABEL - len(what), len(command) + 2)
        shown = room + len(what) + _LABEL <= width
        lines.append([_label("next" if not k else ""), Part(command.ljust(room) if shown else command)])
        lines[-1] += [Part(what, QUIET)] if shown else []
    names = " against ".join(f"{name} ({side})" for name, side in zip(diagnostic.runs, ("reference", "candidate")))
    end = f"{names}: {amount}" if faults else names
    lines += [[Part(text, QUIET)] for text in _wrapped(end, width)]
    return lines


def _amount(diagnostic: Diagnostic, verb: str = "") -> str:
    """Return how much was compared, in words, with a word behind the steps."""
    compared = diagnostic.compared
    steps = f"{compared.steps:,} step{'s' if compared.steps != 1 else ''}"
    return f"{compared.tensors:,} tensors in {steps}{verb}, {compared.share:.0%} of what was recorded"


def _position(fault: BriefFault) -> str:
    return f"step {fault.step}, {fault.stage}: {fault.where}"


def _fault_lines(fault: BriefFault, width: int) -> Iterator[Line]:
    cause = fault.cause
    certainty = "" if cause is None or cause.kind == "unknown" else "proven" if cause.proven else "likely"
    causes = list(_labelled("cause", "unknown" if cause is None else cause.text, width, certainty))
    candidate, reference = fault.places.candidate, fault.places.reference
    places = [line for line in (candidate, reference) if line is not None]
    column = max((len(f"{line.file}:{line.line}") for line in places), default=0)
    code = [each for line in places for each in _code_lines(line, "-->" if line is candidate else "   ", column, width)]
    # The file and the line stand in the first lines that a reader sees, however long the cause is.
    yield from [*causes, *code] if len(causes) <= _SHORT else [*code, *causes]
    if fault.fix is not None:
        for k, text in enumerate(fault.fix.text.split("\n")):
            yield [_label("fix" if not k else ""), Part(text, FIX)]
    if fault.size:
        yield from _labelled("size", fault.size, width)


def _code_lines(line: CodeLine, arrow: str, column: int, width: int) -> Iterator[Line]:
    """Yield the position of a line and its code, and a line that marks the part that the fault is about."""
    place = f"{line.file}:{line.line}"
    head = [Part(f"  {arrow} ", LABEL), Part(place.ljust(column), PLACE)]
    if not line.code:
        yield [*head[:1], Part(place, PLACE)]
        return
    indent = 6 + column + 3
    if width - indent < 40:
        # The code starts a line of its own.
        yield [*head[:1], Part(place, PLACE)]
        head, indent = [], _LABEL
    room = max(width - indent, 20)
    start, end = line.span or (0, 0)
    code, start, end = _window(line.code, start, end, room)
    yield [*head, Part(" " * (3 if head else indent)), Part(code)]
    if end > start:
        yield [Part(" " * (indent + start)), Part("~" * (end - start), MARK)]


def _window(code: str, start: int, end: int, room: int) -> tuple[str, int, int]:
    """Return the part of a line of code that has room, around its marked part, and the place of the mark in it."""
    if len(code) <= room:
        return code, start, end
    first = max(0, min(start - _BEFORE, len(code) - room)) if end > room - 3 else 0
    head = "..." if first else ""
    shown = head + code[first + len(head) :]
    shown = shown if len(shown) <= room else f"{shown[: room - 3]}..."
    return shown, start - first, min(end - first, len(shown))


def _labelled(label: str, text: str, width: int, tag: str = "", outcome: bool = False) -> Iterator[Line]:
    """Yield lines of a text after its label, with a tag at the right end of the first line."""
    mark = _label(label, OUTCOME if outcome else LABEL, indent=0 if outcome else 2)
    room = width - len(mark.text)
    wrapped = _wrapped(text, room)
    tag_room = room - len(tag) - 2
    if tag and len(wrapped[0]) > tag_room:
        wrapped = _wrapped(text, tag_room)
    for k, each in enumerate(wrapped):
        head = mark if not k else Part(" " * len(mark.text))
        body = Part(each, OUTCOME if outcome else "")
        if tag and not k:
            yield [head, body, Part(" " * (room - len(each) - len(tag))), Part(tag, CERTAINTY)]
        else:
            yield [head, body]


def _label(label: str, role: str = LABEL, indent: int = 2) -> Part:
    return Part(f"{' ' * indent}{label}".ljust(_LABEL if indent else max(len(label) + 2, 8)), role)


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(width, 20), break_on_hyphens=False) or [""]
