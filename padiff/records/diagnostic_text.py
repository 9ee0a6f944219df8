"""The result of a comparison in brief, as lines of text."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from padiff.records.diagnostic import BriefFault, CodeLine, Diagnostic
from padiff.system.language import language, translated

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
# What commands show, by a part of them.
_SHOWN = {
    "padiff fix": "a patch, tried on a copy",
    "--html report.html": "a page to look at",
    " -v": "tables, trees, evidence",
}
# Parts of a text that no line end divides: words, and wide characters with the punctuation that follows them.
_UNIT = re.compile(r"[\u2e80-\uffef][，。；：、）？！]*|[（]?[^\s\u2e80-\uffef]+[，。；：、）？！]*|\s+")


class Part(NamedTuple):
    """A part of a line.

    Attributes:
        text: the text.
        role: one of the roles of this module; empty for plain text.
    """

    text: str
    role: str = ""


Line = list[Part]


class _Page(NamedTuple):
    """The number of columns, and the language of what is written in them."""

    width: int
    language: str

    def say(self, text: str, context: str = "") -> str:
        """Return a message in the page's language."""
        return translated(text, context, self.language)


def diagnostic_text(diagnostic: Diagnostic, width: int = 80, to: str | None = None) -> str:
    """Return a diagnostic as text of some lines.

    Args:
        diagnostic: the result of a comparison.
        width: number of available columns.
        to: language, ``en`` or ``zh``; `None` for the user's.
    """
    lines = ("".join(part.text for part in line).rstrip() for line in diagnostic_lines(diagnostic, width, to))
    return "\n".join(lines)


def summary_line(diagnostic: Diagnostic, to: str | None = None) -> str:
    """Return a diagnostic in one line: the outcome, the position of the first fault, and its cause or size.

    Args:
        diagnostic: the result of a comparison.
        to: language, ``en`` or ``zh``; `None` for the user's.
    """
    page = _Page(0, to or language())
    outcome = page.say(diagnostic.outcome.upper(), "outcome")
    faults = diagnostic.all_faults
    if not faults:
        text = _amount(diagnostic) if diagnostic.outcome == "match" else diagnostic.notes[0]
        return f"{outcome}: {page.say(text)}"
    first, *others = faults
    known = first.cause is not None and first.cause.kind != "unknown"
    why = page.say(first.cause.text if first.cause is not None and known else first.size)
    more = page.say(f"; and {len(others)} other fault{'s' if len(others) > 1 else ''}") if others else ""
    return f"{outcome} {_position(first, page)}{f': {why}' if why else ''}{more}"


def diagnostic_lines(diagnostic: Diagnostic, width: int = 80, to: str | None = None) -> list[Line]:
    """Return the lines of a diagnostic, in parts with roles for colours.

    Args:
        diagnostic: the result of a comparison.
        width: number of available columns.
        to: language, ``en`` or ``zh``; `None` for the user's.
    """
    page = _Page(max(width, 40), to or language())
    outcome = page.say(diagnostic.outcome.upper(), "outcome")
    faults = diagnostic.all_faults
    amount = _amount(diagnostic, " compared" if faults else "") if diagnostic.compared.steps else _NOTHING
    lines: list[Line] = []
    if faults:
        first, *others = faults
        count = page.say(f"{len(faults)} faults") if others else ""
        head = list(_labelled(outcome, _position(first, page), page, count, outcome=True))
        lines += [*head, *([[]] if len(head) == 1 else []), *_fault_lines(first, page)]
        if diagnostic.follows:
            lines += _labelled("follows", diagnostic.follows, page)
        for fault in others:
            lines += [[], *_labelled("also", _position(fault, page), page), *_fault_lines(fault, page)]
        lines.append([])
    else:
        title = "parameters that train have no record" if diagnostic.outcome == "cannot tell" else amount
        lines += _labelled(outcome, title, page, outcome=True)
    if diagnostic.closest:
        lines += _labelled("closest", diagnostic.closest, page)
    if diagnostic.moved:
        lines += _labelled("moved", diagnostic.moved, page)
    for note in diagnostic.notes:
        lines += _labelled("note", note, page)
    if diagnostic.environment:
        lines += _labelled("differs", f"environment: {'; '.join(diagnostic.environment)}", page)
    for k, command in enumerate(diagnostic.next):
        what = next((text for part, text in _SHOWN.items() if part in command), "")
        what = page.say(what)
        room = max(page.width - _LABEL - columns(what), columns(command) + 2)
        shown = room + columns(what) + _LABEL <= page.width
        lines.append([_label("next" if not k else "", page), Part(_filled(command, room) if shown else command)])
        lines[-1] += [Part(what, QUIET)] if shown else []
    names = " against ".join(f"{name} ({side})" for name, side in zip(diagnostic.runs, ("reference", "candidate")))
    end = page.say(f"{names}: {amount}" if faults else names)
    lines += [[Part(text, QUIET)] for text in _wrapped(end, page.width)]
    return lines


def _amount(diagnostic: Diagnostic, verb: str = "") -> str:
    """Return how much was compared, in words, with a word behind the steps."""
    compared = diagnostic.compared
    steps = f"{compared.steps:,} step{'s' if compared.steps != 1 else ''}"
    return f"{compared.tensors:,} tensors in {steps}{verb}, {compared.share:.0%} of what was recorded"


def _position(fault: BriefFault, page: _Page) -> str:
    return page.say(f"step {fault.step}, {page.say(fault.stage, 'stage')}: {fault.where}")


def _fault_lines(fault: BriefFault, page: _Page) -> Iterator[Line]:
    cause = fault.cause
    certainty = "" if cause is None or cause.kind == "unknown" else "proven" if cause.proven else "likely"
    causes = list(_labelled("cause", "unknown" if cause is None else cause.text, page, certainty))
    candidate, reference = fault.places.candidate, fault.places.reference
    places = [line for line in (candidate, reference) if line is not None]
    column = max((columns(f"{line.file}:{line.line}") for line in places), default=0)
    arrows = {False: "   " if candidate else "ref", True: "-->"}
    code = [each for line in places for each in _code_lines(line, arrows[line is candidate], column, page.width)]
    # The file and the line stand in the first lines that a reader sees, however long the cause is.
    yield from [*causes, *code] if len(causes) <= _SHORT else [*code, *causes]
    if fault.fix is not None:
        texts = (_wrapped(page.say(text), page.width - _LABEL) for text in fault.fix.text.split("\n"))
        for k, text in enumerate(chain.from_iterable(texts)):
            yield [_label("fix" if not k else "", page), Part(text, FIX)]
    if fault.size:
        yield from _labelled("size", fault.size, page)


def _code_lines(line: CodeLine, arrow: str, column: int, width: int) -> Iterator[Line]:
    """Yield the position of a line and its code, and a line that marks the part that the fault is about."""
    place = f"{line.file}:{line.line}"
    head = [Part(f"  {arrow} ", LABEL), Part(_filled(place, column), PLACE)]
    if not line.code:
        yield [*head[:1], Part(place, PLACE)]
        return
    indent = 6 + column + 3
    if width - indent < 40:
        # The code starts a line of its own.
        yield [*head[:1], Part(place, PLACE)]
        head, indent = [], _LABEL
    room = max(width - indent - (columns(line.code) - len(line.code)), 20)
    start, end = line.span or (0, 0)
    code, start, end = _window(line.code, start, end, room)
    yield [*head, Part(" " * (3 if head else indent)), Part(code)]
    if end > start:
        yield [Part(" " * (indent + columns(code[:start]))), Part("~" * columns(code[start:end]), MARK)]


def _window(code: str, start: int, end: int, room: int) -> tuple[str, int, int]:
    """Return the part of a line of code that has room, around its marked part, and the place of the mark in it."""
    if len(code) <= room:
        return code, start, end
    first = max(0, min(start - _BEFORE, len(code) - room)) if end > room - 3 else 0
    head = "..." if first else ""
    shown = head + code[first + len(head) :]
    shown = shown if len(shown) <= room else f"{shown[: room - 3]}..."
    return shown, start - first, min(end - first, len(shown))


def _labelled(label: str, text: str, page: _Page, tag: str = "", outcome: bool = False) -> Iterator[Line]:
    """Yield lines of a text after its label, with a tag at the right end of the first line."""
    mark = _label(label, page, OUTCOME if outcome else LABEL, indent=0 if outcome else 2)
    text, tag = page.say(text), page.say(tag, "tag") if tag else ""
    room = page.width - columns(mark.text)
    wrapped = _wrapped(text, room)
    tag_room = room - columns(tag) - 2
    if tag and columns(wrapped[0]) > tag_room:
        wrapped = _wrapped(text, tag_room)
    for k, each in enumerate(wrapped):
        head = mark if not k else Part(" " * columns(mark.text))
        body = Part(each, OUTCOME if outcome else "")
        if tag and not k:
            yield [head, body, Part(" " * (room - columns(each) - columns(tag))), Part(tag, CERTAINTY)]
        else:
            yield [head, body]


def _label(label: str, page: _Page, role: str = LABEL, indent: int = 2) -> Part:
    text = label if not indent else page.say(label, "label")
    return Part(_filled(f"{' ' * indent}{text}", _LABEL if indent else max(columns(text) + 2, 8)), role)


def columns(text: str) -> int:
    """Return the number of columns of a text in a terminal: two for Chinese characters."""
    return len(text) if text.isascii() else sum(1 + (unicodedata.east_asian_width(each) in "WF") for each in text)


def _filled(text: str, width: int) -> str:
    return text + " " * (width - columns(text))


def _wrapped(text: str, width: int) -> list[str]:
    width = max(width, 20)
    if columns(text) == len(text):
        return textwrap.wrap(text, width, break_on_hyphens=False) or [""]
    lines, line = [], ""
    for unit in _UNIT.findall(text):
        if line and columns(line + unit.rstrip()) > width:
            lines.append(line.rstrip())
            line = ""
        line += unit if line else unit.lstrip()
        while columns(line.rstrip()) > width:
            cut = next(k for k in range(len(line), 0, -1) if columns(line[:k]) <= width)
            lines.append(line[:cut])
            line = line[cut:]
    return [*lines, line.rstrip()] if line.strip() else lines
