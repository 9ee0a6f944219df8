"""Texts that the packages can print: string literals and f-strings of their source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .pages import ROOT

PACKAGES = (
    "padiff",
    "padiff_hooks",
    "padiff_cli",
    "padiff_page",
    "padiff_demo",
    "padiff_atlas",
    "padiff_pytest",
    "integrations",
)
#: Stands for the values in an f-string.
VALUE = "\0"


@dataclass(frozen=True)
class Raised:
    """A raised error.

    Attributes:
        place: file and line.
        error: name of the error's class, or of the function that makes the error.
        text: template of the message; empty if it is no literal.
    """

    place: str
    error: str
    text: str


def source_files(root: Path = ROOT) -> list[Path]:
    """Return the Python files of the packages."""
    return sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))


def nodes_of(source: str) -> list[ast.AST]:
    """Return all nodes of a module."""
    return list(ast.walk(ast.parse(source)))


def templates(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield the texts of a module, one line each, with `VALUE` for each value; docstrings are left out."""
    skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp)) and id(node) not in skipped:
            text = template(node)
            if text:
                yield text


def template(node: ast.expr) -> str:
    """Return the text of an expression, with `VALUE` for each value; empty if it holds no text."""
    return " ".join(_text(node).split()) if _has_text(node) else ""


def raised(nodes: Iterable[ast.AST], file: str) -> Iterator[Raised]:
    """Yield the errors that a module raises."""
    for node in nodes:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            error = ast.unparse(node.exc.func).rpartition(".")[2]
            text = template(node.exc.args[0])
            yield Raised(f"{file}:{node.lineno}", error, text)


def occurs(quote: str, texts: Iterable[str]) -> bool:
    """Return True if a text holds the quote, whose ``...`` stand for anything."""
    pattern = re.compile(r".*?".join(re.escape(part.strip()) for part in quote.split("...")))
    return any(pattern.search(text) for text in texts)


def _has_text(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in ast.walk(node))


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else VALUE
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return VALUE
