"""A fault, what is known around it, and recorded lines as syntax trees, which are compared and never run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from padiff.records import Both, Difference, FirstDiff, Models
from padiff.records.diagnostic import code_lines
from padiff.system.frames import Frame
from padiff_cli.fix.source import Project, Source, last_name
from padiff_cli.fix.vocabulary import number_of

# Characters of a line in a run folder: a longer line was cut.
_LONGEST = 200
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_OPENS_BLOCK = re.compile(r"(async\s+)?(def|for|while|if|elif|with|class|else|try)\b.*:\s*(#.*)?$")


@dataclass(frozen=True)
class Fault:
    """A fault and what is known around it.

    Attributes:
        first: the fault.
        models: both layer trees, and lines of code.
        reference_run: the reference's folder, as the user wrote it.
        reference_code: the reference's own files, where they lie in the working folder as they were recorded.
        settings: the settings that the runs declare differently.
        length: the number of steps that were compared, from the first one on; 0 if not known.
    """

    first: FirstDiff
    models: Models
    reference_run: str
    reference_code: Project
    settings: Sequence[Difference] = ()
    length: int = 0

    @property
    def kind(self) -> str:
        """Return the kind of the cause; empty if there is none."""
        return "" if self.first.cause is None else self.first.cause.kind

    @property
    def words(self) -> str:
        """Return the kind and the sentence of the cause."""
        return "" if self.first.cause is None else f"{self.kind} {self.first.cause.sentence}"

    @property
    def values(self) -> Both[Any] | None:
        """Return what either side has, as the cause says; `None` if the cause is about no values."""
        return None if self.first.cause is None else self.first.cause.values

    @property
    def numbers(self) -> list[Both[float]]:
        """Return the numbers that the cause is about, of both sides."""
        if self.values is None:
            return []
        sides = [side if isinstance(side, tuple) else (side,) for side in self.values]
        pairs = [Both(*pair) for pair in zip(*sides)] if len({*map(len, sides)}) == 1 else []
        return [pair.map(float) for pair in pairs] if all(_is_number(each) for pair in pairs for each in pair) else []

    @property
    def calls(self) -> Both[list[tuple[str, Mapping[str, Any]]]]:
        """Return the calls that the cause is about: the function of each, and its arguments."""
        sides = Both((), ()) if self.values is None else self.values
        return sides.map(
            lambda side: [
                (str(each[0]), each[1])
                for each in (side if isinstance(side, tuple) else ())
                if isinstance(each, tuple) and len(each) == 2 and isinstance(each[1], Mapping)
            ]
        )

    @property
    def rates(self) -> Both[float]:
        """Return the first learning rate of either side, if they differ; else zeros."""
        is_about = self.values is not None and self.kind.startswith("learning_rate")
        sides = [] if self.values is None or not is_about else [side[0] for side in self.values]
        return (
            Both(*map(float, sides))
            if len({*sides}) == 2 and all(_is_number(each) for each in sides)
            else Both(0.0, 0.0)
        )

    @property
    def fix(self) -> str:
        """Return the line of code by which the cause is fixed; empty if it is not known."""
        return "" if self.first.cause is None else self.first.cause.fix

    @property
    def clipping(self) -> tuple[str, float]:
        """Return the function or class by which the reference clips, and its limit; an empty name if not known."""
        call = parsed_call(self.fix) if self.kind.startswith("clip") else None
        numbers = [] if call is None else [number_of(node) for node in ast.walk(call) if isinstance(node, ast.expr)]
        limits = [each for each in numbers if each is not None]
        return ("", 0.0) if call is None or not limits else (last_name(call.func), limits[0])

    @property
    def frameworks(self) -> tuple[str, str]:
        """Return the names of both frameworks."""
        names = [name.partition(" ")[0] for name in self.models.frameworks]
        return names[0], names[1]

    @cached_property
    def lines(self) -> Both[Frame | None]:
        """Return the lines of code of the fault on both sides."""
        return code_lines(self.first, self.models)

    def partner_of(self, layer: str) -> str:
        """Return the candidate's path of a layer of the reference; empty if it has none."""
        return next((each.candidate for each in self.models.partners if each.reference == layer), "")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def parsed_line(code: str) -> ast.AST | None:
    """Return what a line of code is: a statement, or a part of one; `None` if it is no whole part of any.

    The code may go on in further lines. Code that ends in the middle of a call is closed, with an argument `_` that
    stands for the rest.
    """
    lines = code.strip().split("\n")
    code = " ".join(lines)
    if not code or max(map(len, lines)) >= _LONGEST:
        return None
    for text in _forms(code):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if len(tree.body) == 1:
            return _part(tree.body[0], text)
    return None


def parsed_call(fix: str) -> ast.Call | None:
    """Return the call that a fix of the diagnostic shows, such as ``LayerNorm(..., eps=1e-05)``."""
    try:
        tree = ast.parse(fix.partition("  #")[0].partition(", or ")[0].strip())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    node = tree.body[0] if len(tree.body) == 1 else None
    # An argument, such as `grad_clip=...`, is read as an assignment.
    return node.value if isinstance(node, (ast.Expr, ast.Assign)) and isinstance(node.value, ast.Call) else None


def nodes_at(source: Source, line: int, reference: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a file that a line of the reference may be compared with: the statement, and its parts.

    Args:
        source: the candidate's file.
        line: number of the line.
        reference: the reference's node.
    """
    statement = source.statement(line)
    if statement is None:
        return
    if isinstance(reference, ast.stmt):
        yield statement
        if not isinstance(reference, ast.Expr):
            return
    for node in ast.walk(statement):
        if isinstance(node, (ast.expr, ast.keyword)) and type(node) is type(getattr(reference, "value", reference)):
            yield node


def _forms(code: str) -> Iterator[str]:
    bare = code.rstrip(",").rstrip()
    if bare == code:
        yield code
    if _OPENS_BLOCK.match(code):
        yield f"{code} pass" if "#" not in code else f"{code.partition('#')[0]} pass"
    yield f"_({bare})"
    yield f"{{{bare}}}"
    closing = _missing(bare)
    if closing:
        for rest in (", _=...", "_=...", ""):
            yield f"{bare}{rest}{closing}"
            yield f"_({bare}{rest}{closing})"
        yield f"{code} pass"


def _missing(code: str) -> str:
    """Return the brackets that a line leaves open, as they are closed; empty if it closes others."""
    left: list[str] = []
    quote = ""
    for character in code:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character == "#":
            break
        elif character in _CLOSING:
            left.append(_CLOSING[character])
        elif character in ")]}" and (not left or left.pop() != character):
            return ""
    return "".join(reversed(left))


def _part(node: ast.stmt, text: str) -> ast.AST:
    if not isinstance(node, ast.Expr):
        return node
    value = node.value
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "_":
        if len(value.keywords) == 1 and not value.args:
            return value.keywords[0]
        if len(value.args) == 1 and not value.keywords:
            return value.args[0]
    return node
