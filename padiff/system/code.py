"""Checks of generated code, as text from an untrusted run folder must never become code."""

from __future__ import annotations

import ast
import math
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from padiff.errors import UsageError


class ForeignCodeError(UsageError):
    """Error of a run with names or values that would become part of generated code."""


def refused(what: str, value: object) -> ForeignCodeError:
    """Return the error for a word that is in no catalog.

    Args:
        what: kind of the word, such as ``the function``.
        value: the word.
    """
    text = ascii(value)
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return ForeignCodeError(f"{what} {text} is not known to padiff, and never becomes code: do not trust this run")


def literal(value: Any) -> str:
    """Return a plain value as source text, in ASCII and on one line; all values of runs enter code this way.

    Raises:
        ForeignCodeError: the value's type has no literal.
    """
    if value is None or isinstance(value, (bool, int)):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f'float("{value!r}")'
    if isinstance(value, str):
        return ascii(value)
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' if len(value) == 1 else ''})"
    raise refused("a value of type", type(value).__name__)


@dataclass(frozen=True)
class Vocabulary:
    """The words that generated code may contain.

    Attributes:
        variables: names that are read or set.
        functions: names that are called.
        chains: dotted names that begin with a module.
        members: attributes of values.
        keywords: names of arguments.
    """

    variables: frozenset[str] = frozenset()
    functions: frozenset[str] = frozenset()
    chains: frozenset[str] = frozenset()
    members: frozenset[str] = frozenset()
    keywords: frozenset[str] = frozenset()
    _modules: frozenset[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_modules", frozenset(chain.partition(".")[0] for chain in self.chains))

    def with_variables(self, names: Collection[str]) -> Vocabulary:
        """Return a copy of the vocabulary with additional variables."""
        return replace(self, variables=self.variables.union(names))

    def check_code(self, code: str) -> None:
        """Parse code, and check every name, attribute chain, call and argument in it.

        Raises:
            ForeignCodeError: the code has a word, or a construct, that is not in this vocabulary.
        """
        self.check_tree(parsed(code))

    def check_tree(self, tree: ast.AST) -> None:
        """Check parsed code.

        Raises:
            ForeignCodeError: the code has a word, or a construct, that is not in this vocabulary.
        """
        waiting = [tree]
        while waiting:
            node = waiting.pop()
            if not isinstance(node, _PLAIN):
                raise refused("the construct", type(node).__name__)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                self._require("the function", node.func.id, self.functions)
                waiting += [*node.args, *node.keywords]
                continue
            if isinstance(node, ast.Attribute):
                chain = _chain(node)
                if chain is not None and chain.partition(".")[0] in self._modules:
                    self._require("the name", chain, self.chains)
                    continue
                self._require("the attribute", node.attr, self.members)
            elif isinstance(node, ast.Name):
                self._require("the name", node.id, self.variables)
            elif isinstance(node, ast.keyword):
                self._require("the argument", node.arg, self.keywords)
            waiting += ast.iter_child_nodes(node)

    @staticmethod
    def _require(what: str, word: str | None, words: frozenset[str]) -> None:
        if word not in words:
            raise refused(what, word)


def parsed(code: str) -> ast.Module:
    """Return code as a syntax tree.

    Raises:
        ForeignCodeError: the text is not valid Python.
    """
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ForeignCodeError(
            f"the script would not be valid Python ({type(error).__name__}): do not trust this run"
        ) from None


# Nodes of calls, assignments and arithmetic on literals. No import, function, lambda, comprehension or `*`.
_PLAIN = (
    ast.Module, ast.Expr, ast.Assign, ast.For, ast.With, ast.withitem, ast.Name, ast.Attribute, ast.Call, ast.keyword,
    ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Subscript, ast.Slice, ast.JoinedStr, ast.FormattedValue, ast.BinOp,
    ast.UnaryOp, ast.Compare, ast.BoolOp, ast.operator, ast.unaryop, ast.cmpop, ast.boolop, ast.expr_context,
)  # fmt: skip


def _chain(node: ast.expr) -> str | None:
    """Return the dotted name of an attribute chain; `None` if the chain does not begin with a plain name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else None
