"""Numbers that expressions of the candidate's source have, with some literals changed; nothing is executed."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from padiff_cli.fix.source import Project, Source, dotted, last_name
from padiff_cli.fix.vocabulary import number_of

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: math.pow, ast.USub: operator.neg,
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Eq: operator.eq,
}  # fmt: skip
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min, "max": max, "abs": abs, "int": int, "float": float, "round": round,
    **{name: getattr(math, name) for name in ("cos", "sin", "sqrt", "exp", "log", "floor", "ceil", "pow")},
}  # fmt: skip
_DEPTH = 8


def defined_function(source: Source, function: ast.AST) -> ast.AST:
    """Return the only function that a name stands for; else the node itself."""
    name = function.id if isinstance(function, ast.Name) else ""
    defined = [*source.functions(name), *source.assigned(name)] if name else []
    return defined[0] if len(defined) == 1 else function


class UnknownError(Exception):
    """An expression whose number cannot be said."""


@dataclass
class Arithmetic:
    """Computes the numbers of expressions.

    Attributes:
        project: the files.
        changed: other numbers for some literals.
        literals: the literals that went into the numbers so far.
    """

    project: Project
    changed: Mapping[ast.expr, float] = field(default_factory=dict)
    literals: dict[ast.expr, Source] = field(default_factory=dict)

    def evaluate(
        self, source: Source, node: ast.AST, variables: Mapping[str, float] | None = None, depth: int = _DEPTH
    ) -> Any:
        """Return the number, or the list of numbers, of an expression.

        Args:
            source: the file of the expression.
            node: the expression.
            variables: numbers of some names.
            depth: number of expressions to follow.

        Raises:
            UnknownError: the expression has no number that is known.
        """
        if not depth:
            raise UnknownError
        try:
            return self._evaluated(source, node, variables or {}, depth - 1)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise UnknownError from error

    def _evaluated(self, source: Source, node: ast.AST, variables: Mapping[str, float], depth: int) -> Any:
        def of(each: ast.AST) -> Any:
            return self.evaluate(source, each, variables, depth)

        number = number_of(node) if isinstance(node, ast.expr) else None
        if number is not None and isinstance(node, ast.expr):
            self.literals.setdefault(node, source)
            return self.changed.get(node, number)
        if isinstance(node, (ast.Tuple, ast.List)):
            return [of(each) for each in node.elts]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](of(node.left), of(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](of(node.operand))
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
            return _OPERATORS[type(node.ops[0])](of(node.left), of(node.comparators[0]))
        if isinstance(node, ast.IfExp):
            return of(node.body) if of(node.test) else of(node.orelse)
        if isinstance(node, ast.Call) and not node.keywords:
            name = last_name(node.func)
            if name in ("list", "tuple") and len(node.args) == 1:
                return of(node.args[0])
            if name in _FUNCTIONS and dotted(node.func) in (name, f"math.{name}"):
                return _FUNCTIONS[name](*map(of, node.args))
        if isinstance(node, ast.Name) and node.id in variables:
            return variables[node.id]
        if dotted(node) in ("math.pi", "np.pi"):
            return math.pi
        return self._defined(source, node, depth)

    def _defined(self, source: Source, node: ast.AST, depth: int) -> Any:
        """Return the number of a name: all places that define it have to agree."""
        if not isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
            raise UnknownError
        values: list[tuple[Source, ast.expr]] = [*self.project.definitions(source, node)]
        if not values and dotted(node):
            scope = source.class_around(node) if isinstance(node, ast.Attribute) else source.function(node)
            values = [(source, value) for value in source.assigned(dotted(node), scope)]
        numbers = [self.evaluate(place, value, None, depth) for place, value in values]
        if not numbers or any(each != numbers[0] for each in numbers):
            raise UnknownError
        return numbers[0]

    def solved(self, source: Source, node: ast.AST, number: float) -> Iterator[tuple[Source, ast.expr, float]]:
        """Yield literals of an expression, each with the value with which the expression has another number; of those
        in which it is linear.

        Raises:
            UnknownError: the expression has no number that is known.
        """
        start = self.evaluate(source, node)
        for literal, place in [*self.literals.items()]:
            before = number_of(literal) or 0.0
            try:
                slope = Arithmetic(self.project, {literal: before + 1.0}).evaluate(source, node) - start
                value = float(f"{before + (number - start) / slope:.6g}")
                end = Arithmetic(self.project, {literal: value}).evaluate(source, node)
            except (UnknownError, ArithmeticError, TypeError):
                continue
            if math.isclose(end, number, rel_tol=1e-5):
                yield place, literal, value

    def result(self, source: Source, function: ast.AST, argument: float, parameter: str = "") -> Any:
        """Return what a function of a number returns: a lambda, or a function of `if` and `return`.

        Args:
            source: the file of the function.
            function: the function.
            argument: the number.
            parameter: the parameter that takes the number; empty for the last one.

        Raises:
            UnknownError: the function does something else.
        """
        function = defined_function(source, function)
        if not isinstance(function, (ast.Lambda, ast.FunctionDef)) or not function.args.args:
            raise UnknownError
        variables = {parameter or function.args.args[-1].arg: argument}
        if isinstance(function, ast.Lambda):
            return self.evaluate(source, function.body, variables)
        return self._returned(source, function.body, variables)

    def _returned(self, source: Source, body: list[ast.stmt], variables: dict[str, float]) -> Any:
        for statement in body:
            if isinstance(statement, ast.Return) and statement.value is not None:
                return self.evaluate(source, statement.value, variables)
            if isinstance(statement, ast.If):
                branch = statement.body if self.evaluate(source, statement.test, variables) else statement.orelse
                answer = self._returned(source, branch, variables)
                if answer is not None:
                    return answer
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                variables[statement.targets[0].id] = self.evaluate(source, statement.value, variables)
            elif not isinstance(statement, ast.Expr):
                raise UnknownError
        return None
