"""The differences of two expressions that should compute the same, as edits of the second one."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from padiff_cli.fix.source import Edit, Source, config_value, dotted, last_name
from padiff_cli.fix.vocabulary import (
    KEYWORDS,
    argument_name,
    argument_place,
    common_argument,
    common_call,
    converted,
    kind_of,
    loss_like,
    number_of,
    value_text,
    whole_name,
)

#: Cost of expressions that have nothing in common.
FOREIGN = 1e6
# Costs: another name; another literal, argument or function; a call or an operator around; a whole expression.
_NAME, _ONE, _AROUND, _WHOLE = 0.1, 1.0, 1.5, 4.0
_DEPTH = 12
_COMMUTATIVE = (ast.Add, ast.Mult)
_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**", ast.MatMult: "@"}
# Methods that compute and are no function of the catalog.
_METHODS = frozenset(("detach", "contiguous", "float", "abs", "square", "item", "size", "dim", "parameters", "astype"))
# Attributes that each tensor has.
_ATTRIBUTES = frozenset(("shape", "ndim", "T"))
_MODULES = frozenset(
    ("torch", "paddle", "nn", "F", "functional", "np", "numpy", "optim", "optimizer", "lr_scheduler", "init", "utils")
)
# Calls that are not left out: what they hold is no value of the same kind.
_UNWRAPPED_NEVER = ("optimizer", "schedule", "convert", "loss", "clip")
# Variable of a loop in an expression.
_EACH = "each"
#: Marks a call of which only some arguments are known.
PARTIAL = "..."


class Change(NamedTuple):
    """A difference, as a change of the candidate's expression.

    Attributes:
        kind: ``value``, ``add``, ``insert``, ``remove``, ``rename``, ``unwrap``, ``wrap`` or ``whole``.
        node: the candidate's node that changes.
        name: the argument or the function that it is about.
        reference: the reference's node; `None` if the candidate has something that the reference has not.
        inner: for ``unwrap``, the node that stays; for ``wrap``, the reference's node that the candidate's replaces.
    """

    kind: str
    node: ast.AST
    name: str = ""
    reference: ast.AST | None = None
    inner: ast.AST | None = None


class Match(NamedTuple):
    """The result of comparing two expressions: cost, changes, and pairs of names in the same place."""

    cost: float
    changes: tuple[Change, ...] = ()
    names: tuple[tuple[str, str], ...] = ()

    def plus(self, other: Match, cost: float = 0.0) -> Match:
        """Return both results as one."""
        return Match(self.cost + other.cost + cost, self.changes + other.changes, self.names + other.names)


_EQUAL = Match(0.0)


@dataclass
class Matcher:
    """Compares expressions of two authors.

    Attributes:
        frameworks: of the reference and the candidate.
    """

    frameworks: tuple[str, str]

    def __post_init__(self) -> None:
        self._known: dict[tuple[int, int], Match] = {}
        self._nodes: list[ast.AST] = []

    def statement(self, reference: ast.AST, candidate: ast.AST) -> Match:
        """Compare two statements, or what is left of them in one line."""
        if isinstance(candidate, (ast.FunctionDef, ast.AsyncFunctionDef)) and isinstance(
            reference, (ast.FunctionDef, ast.AsyncFunctionDef)
        ):
            return self._defaults(reference, candidate)
        pair = [_value(node) for node in (reference, candidate)]
        if pair[0] is None or pair[1] is None:
            return Match(FOREIGN)
        return self.match(pair[0], pair[1])

    def match(self, r: ast.AST, c: ast.AST, depth: int = 0) -> Match:
        """Return the cheapest way to make the candidate's expression compute what the reference's does."""
        key = (id(r), id(c))
        if key not in self._known:
            self._nodes += [r, c]  # ids are of living objects
            self._known[key] = Match(FOREIGN)
            options = [self._direct(r, c, depth)]
            if depth < _DEPTH and options[0].cost > 0.5:
                options += [*self._unwrapped(r, c, depth), *self._wrapped(r, c, depth)]
            if isinstance(r, ast.expr) and isinstance(c, ast.expr) and c.lineno == c.end_lineno:
                options.append(Match(_WHOLE + 0.2 * _size(r), (Change("whole", c, "", r),)))
            self._known[key] = min(options, key=lambda option: option.cost)
        return self._known[key]

    def _direct(self, r: ast.AST, c: ast.AST, depth: int) -> Match:
        numbers = [number_of(node) if isinstance(node, ast.expr) else None for node in (r, c)]
        if numbers[0] is not None and numbers[1] is not None:
            return _EQUAL if numbers[0] == numbers[1] else Match(_ONE, (Change("value", c, "", r),))
        if isinstance(r, ast.Constant) and isinstance(c, ast.Constant):
            same = r.value == c.value and type(r.value) is type(c.value)
            return _EQUAL if same else Match(_ONE, (Change("value", c, "", r),))
        plain = isinstance(r, ast.expr) and bool(value_text(r))
        if isinstance(r, (ast.Tuple, ast.List)) and isinstance(c, (ast.Tuple, ast.List)):
            if len(r.elts) == len(c.elts):
                return self._all(r.elts, c.elts, depth)
            if any(isinstance(each, ast.Call) for each in c.elts):
                return self._sequence(r.elts, c.elts, depth)
            return Match(_ONE, (Change("value", c, "", r),)) if plain else Match(FOREIGN)
        if plain and isinstance(c, (ast.Name, ast.Attribute, ast.Subscript)):
            return Match(0.6, (Change("value", c, "", r),))
        if numbers[0] is not None and isinstance(c, ast.BinOp):
            return Match(_ONE, (Change("value", c, "", r),))
        if isinstance(c, ast.expr) and value_text(c) and (isinstance(r, (ast.Name, ast.Attribute)) or _is_entry(r)):
            return Match(0.6)
        if isinstance(r, (ast.Name, ast.Attribute)) and isinstance(c, (ast.Name, ast.Attribute)):
            return self._variables(r, c, depth)
        if type(r) is not type(c):
            return Match(FOREIGN)
        if isinstance(r, ast.Call) and isinstance(c, ast.Call):
            return self._calls(r, c, depth)
        if isinstance(r, ast.BinOp) and isinstance(c, ast.BinOp):
            if type(r.op) is not type(c.op):
                return Match(FOREIGN)
            options = [self._all([r.left, r.right], [c.left, c.right], depth)]
            if isinstance(r.op, _COMMUTATIVE):
                swapped = self._all([r.left, r.right], [c.right, c.left], depth)
                options.append(swapped._replace(cost=swapped.cost + 0.05))
            return min(options, key=lambda option: option.cost)
        if isinstance(r, ast.UnaryOp) and isinstance(c, ast.UnaryOp) and type(r.op) is type(c.op):
            return self.match(r.operand, c.operand, depth + 1)
        if isinstance(r, ast.Subscript) and isinstance(c, ast.Subscript):
            part = self.match(r.value, c.value, depth + 1)
            return part.plus(self.match(r.slice, c.slice, depth + 1))
        if isinstance(r, ast.Dict) and isinstance(c, ast.Dict):
            return self._entries(r, c, depth)
        if isinstance(r, ast.Starred) and isinstance(c, ast.Starred):
            return self.match(r.value, c.value, depth + 1)
        if isinstance(r, ast.Yield) and isinstance(c, ast.Yield) and r.value is not None and c.value is not None:
            return self.match(r.value, c.value, depth + 1)
        if isinstance(r, (ast.GeneratorExp, ast.ListComp)) and isinstance(c, (ast.GeneratorExp, ast.ListComp)):
            return self.match(r.elt, c.elt, depth + 1)
        return _EQUAL if ast.dump(r) == ast.dump(c) else Match(FOREIGN)

    def _all(self, r: Sequence[ast.AST], c: Sequence[ast.AST], depth: int) -> Match:
        result = _EQUAL
        for one, other in zip(r, c):
            result = result.plus(self.match(one, other, depth + 1))
        return result

    def _sequence(self, r: Sequence[ast.expr], c: Sequence[ast.expr], depth: int) -> Match:
        """Compare lists of layers of which some are missing on one side."""
        # Row by row, the cheapest way to make the candidate's first items like the reference's.
        row = [_EQUAL]
        for one in c:
            row.append(row[-1].plus(Match(_AROUND, (Change("remove", one, _outer(one)),))))
        for one in r:
            above, row = row, []
            for n in range(len(c) + 1):
                anchor = c[n - 1] if n else c[0]
                insert = Change("insert", anchor, "after" if n else "before", one)
                options = [above[n].plus(Match(_AROUND + 0.1, (insert,)))]
                if n:
                    options.append(above[n - 1].plus(self.match(one, c[n - 1], depth + 1)))
                    options.append(row[n - 1].plus(Match(_AROUND, (Change("remove", c[n - 1], _outer(c[n - 1])),))))
                row.append(min(options, key=lambda option: option.cost))
        return row[-1]

    def _variables(self, r: ast.Name | ast.Attribute, c: ast.Name | ast.Attribute, depth: int) -> Match:
        names = (dotted(r), dotted(c))
        if all(names):
            return Match(0.0 if names[0] == names[1] else _NAME, (), ((names[0], names[1]),))
        if isinstance(r, ast.Attribute) and isinstance(c, ast.Attribute) and r.attr == c.attr:
            return self.match(r.value, c.value, depth + 1)
        return Match(FOREIGN)

    def _entries(self, r: ast.Dict, c: ast.Dict, depth: int) -> Match:
        mine = {key.value: value for key, value in zip(c.keys, c.values) if isinstance(key, ast.Constant)}
        result = _EQUAL
        for key, value in zip(r.keys, r.values):
            if isinstance(key, ast.Constant) and key.value in mine:
                part = self.match(value, mine[key.value], depth + 1)
                changes = tuple(each._replace(name=each.name or str(key.value)) for each in part.changes)
                result = result.plus(part._replace(changes=changes))
            else:
                result = Match(result.cost + 0.5, result.changes, result.names)
        return result

    def _defaults(self, r: ast.FunctionDef | ast.AsyncFunctionDef, c: ast.FunctionDef | ast.AsyncFunctionDef) -> Match:
        sides = [dict(_defaults_of(node)) for node in (r, c)]
        result = _EQUAL
        for name, value in sides[0].items():
            own = sides[1].get(name) or next(
                (each for key, each in sides[1].items() if common_argument(key) == common_argument(name)), None
            )
            if own is not None:
                part = self.match(value, own)
                result = result.plus(part._replace(changes=tuple(x._replace(name=name) for x in part.changes)))
        return result

    # -- calls ---------------------------------------------------------------------------------------------------

    def _calls(self, r: ast.Call, c: ast.Call, depth: int) -> Match:
        names = (last_name(r.func), last_name(c.func))
        sides = (_receiver(r), _receiver(c))
        kinds = (_kind(r), _kind(c))
        r_args, c_args = list(r.args), list(c.args)
        result = _EQUAL
        same = names[0] == names[1] or (all(kinds) and common_call(names[0]) == common_call(names[1]))
        if kinds == ("function", "function") or (same and "function" in kinds):
            # A method computes what the function of its name does with the object first.
            r_args = [*([sides[0]] if sides[0] is not None else []), *r_args]
            c_args = [*([sides[1]] if sides[1] is not None else []), *c_args]
        elif sides[0] is not None and sides[1] is not None and not all(kinds):
            result = self._all(sides[:1], sides[1:], depth)  # type: ignore[arg-type]
        if c_args and isinstance(c_args[-1], ast.List) and len(c_args) - 1 + len(c_args[-1].elts) == len(r_args):
            c_args = [*c_args[:-1], *c_args[-1].elts]  # a shape, which torch takes number by number, too
        if not same:
            together = {*kinds} <= {"layer"} or {*kinds} <= {"optimizer"} or {*kinds} <= {"function"}
            together = together or {*kinds} <= {"loss"} or {*kinds} <= {"clip"} or {*kinds} <= {"schedule"}
            users = sides[0] is None and sides[1] is None and not any(kinds)
            if users and all(names):
                # Classes and functions of either author's own, and layers that are called.
                result = result.plus(Match(_NAME, (), ((dotted(r.func), dotted(c.func)),)))
            elif together and all(kinds):
                result = result.plus(Match(_ONE, (Change("rename", c, names[0], r),)))
            else:
                return Match(FOREIGN)
        elif dotted(r.func) and dotted(c.func) and not all(kinds):
            result = result.plus(Match(0.0, (), ((dotted(r.func), dotted(c.func)),)))
        return result.plus(self._arguments(r, r_args, c, c_args, names, depth))

    def _arguments(
        self, r: ast.Call, r_args: list[ast.expr], c: ast.Call, c_args: list[ast.expr], names: tuple[str, str],
        depth: int,
    ) -> Match:  # fmt: skip
        is_partial = any(map(_is_dots, r_args)) or any(_is_dots(each.value) for each in r.keywords)
        r_args = [each for each in r_args if not _is_dots(each)]
        is_catalog = bool(_kind(r))
        theirs = {common_argument(k.arg, names[0]): k for k in r.keywords if k.arg and not _is_dots(k.value)}
        mine = {common_argument(k.arg, names[1]): k for k in c.keywords if k.arg}
        if _kind(r) in ("optimizer", "schedule"):
            r_args = _without_rate(r_args, theirs, self.frameworks[0], _kind(r))
            c_args = _without_rate(c_args, mine, self.frameworks[1], _kind(r))
        if _kind(r) == _kind(c) == "clip" and self.frameworks[0] != self.frameworks[1]:
            # Torch clips parameters, which are given first; paddle's optimizer has them.
            r_args, c_args = (
                args[1:] if name.startswith("clip_grad") else args for name, args in zip(names, (r_args, c_args))
            )
        betas = theirs.get("betas")
        if self.frameworks[1] == "paddle" and betas is not None and isinstance(betas.value, (ast.Tuple, ast.List)):
            del theirs["betas"]
            theirs |= {name: ast.keyword(name, value) for name, value in zip(("beta1", "beta2"), betas.value.elts)}
        result = _EQUAL
        if names == ("Sequential", "Sequential") and len(r_args) != len(c_args) and r_args and c_args:
            return self._sequence(r_args, c_args, depth)
        for one, other in zip(r_args, c_args):
            result = result.plus(self.match(one, other, depth + 1))
        left_r, left_c = r_args[len(c_args) :], [] if is_partial else c_args[len(r_args) :]
        for name in [each for each in theirs if each not in mine]:
            place = argument_place(names[1], name)
            if place is not None and len(r_args) <= place < len(c_args):
                value = converted(self.frameworks, names[1], name, theirs.pop(name).value)
                part = self.match(value, c_args[place], depth + 1)
                changes = tuple(each._replace(name=each.name or name) for each in part.changes)
                result = result.plus(part._replace(changes=changes))
                left_c = [each for each in left_c if each is not c_args[place]]
        for name in list(theirs):
            if name in mine:
                theirs_value = converted(self.frameworks, names[1], name, theirs.pop(name).value)
                part = self.match(theirs_value, mine.pop(name).value, depth + 1)
                changes = tuple(x._replace(name=x.name or name) for x in part.changes)
                result = result.plus(part._replace(changes=changes))
        # Arguments by place against those by name, which authors write in the order of the places. A learning rate by
        # place, which only paddle's schedules have, is none of them.
        names_mine = [name for name, keyword in mine.items() if not _is_objects(keyword) and hasattr(keyword, "lineno")]
        for _, name in zip(list(left_r), names_mine):
            result = result.plus(self.match(left_r.pop(0), mine.pop(name).value, depth + 1), 0.3)
        names_theirs = [name for name, keyword in theirs.items() if not _is_objects(keyword)]
        for _, name in zip(list(left_c), names_theirs):
            value = converted(self.frameworks, names[1], name, theirs.pop(name).value)
            result = result.plus(self.match(value, left_c.pop(0), depth + 1), 0.3)
        for name, keyword in theirs.items():
            if keyword.arg in KEYWORDS and not _is_objects(keyword):
                # Classes of the users' have arguments of these names, too.
                value = converted(self.frameworks, names[1], name, keyword.value)
                result = result.plus(Match(_ONE, (Change("add", c, str(keyword.arg), value),)))
            else:
                result = result.plus(Match(0.7))
        if not is_partial:
            for name, keyword in mine.items():
                is_other = _is_objects(keyword) or (name == "grad_clip" and self.frameworks[0] != self.frameworks[1])
                # A learning rate by place stays.
                is_other = is_other or not hasattr(keyword, "lineno")
                removed = (Change("remove", keyword, name),) if is_catalog and not is_other else ()
                result = result.plus(Match(0.1 if is_other else _ONE if is_catalog else 0.7, removed))
        for argument in left_r:
            result = result.plus(Match(_ONE, (Change("add", c, "", argument),) if is_catalog else ()))
        for argument in left_c:
            result = result.plus(Match(_ONE, (Change("remove", argument),) if is_catalog else ()))
        return result

    # -- calls and operators around --------------------------------------------------------------------------------

    def _unwrapped(self, r: ast.AST, c: ast.AST, depth: int) -> Iterator[Match]:
        for inner in inner_expressions(c):
            part = self.match(r, inner, depth + 1)
            yield Match(_AROUND, (Change("unwrap", c, _outer(c), None, inner),)).plus(part)

    def _wrapped(self, r: ast.AST, c: ast.AST, depth: int) -> Iterator[Match]:
        for inner in inner_expressions(r):
            part = self.match(inner, c, depth + 1)
            yield Match(_AROUND + 0.1, (Change("wrap", c, _outer(r), r, inner),)).plus(part)


class UnwritableError(Exception):
    """An expression that may not become code."""


@dataclass
class Writer:
    """Writes changes as edits of the candidate's file, from the catalog, numbers, and names of that file.

    Attributes:
        source: the file.
        framework: the candidate's framework.
        names: the candidate's name for each name of the reference.
    """

    source: Source
    framework: str
    names: Mapping[str, str]
    _function: ast.FunctionDef | ast.AsyncFunctionDef | None = None

    def edits(self, change: Change) -> tuple[Edit, ...]:
        """Return the edits of a change.

        Raises:
            UnwritableError: it needs a name that neither the catalog nor the file has.
        """
        node, source = change.node, self.source
        self._function = source.function(node)
        if change.kind in ("value", "whole"):
            assert change.reference is not None
            text = self.expression(change.reference)
            return self._with_imports([self._at(node, self._bracketed(text, change.reference, node))], text)
        if change.kind == "rename":
            return self._renamed(change)
        if change.kind == "remove":
            return (self._removed(node),)
        if change.kind == "insert":
            assert change.reference is not None
            text = self.expression(change.reference)
            return self._with_imports([self._inserted(node, text, change.name == "before")], text)
        if change.kind == "add":
            assert isinstance(node, ast.Call) and change.reference is not None
            text = self.expression(change.reference)
            if change.name:
                text = f"{argument_name(self.framework, common_argument(change.name), change.name)}={text}"
            return self._with_imports([self._added(node, text)], text)
        if change.kind == "unwrap":
            assert change.inner is not None
            (start, end), (first, last) = source.span(node), self._whole_span(change.inner, node)
            return (Edit(source.file, start, first, ""), Edit(source.file, last, end, ""))
        assert change.kind == "wrap" and change.reference is not None and change.inner is not None
        mark = "_padiff_place_"
        text = self.expression(change.reference, {change.inner: mark})
        before, _, after = text.partition(mark)
        start, end = source.span(node)
        if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp)) and not (
            before.endswith("(") and after.startswith((")", ","))
        ):
            before, after = f"{before}(", f"){after}"
        edits = [Edit(source.file, start, start, before), Edit(source.file, end, end, after)]
        return self._with_imports(edits, text)

    def argument(self, call: ast.Call, text: str) -> tuple[Edit, ...]:
        """Return the edits that add an argument, written as code, to a call.

        Raises:
            UnwritableError: the call has a generator without brackets.
        """
        return (self._added(call, text),)

    def expression(self, node: ast.AST, places: Mapping[ast.AST, str] | None = None) -> str:
        """Return an expression of the reference as code of the candidate.

        Args:
            node: the expression.
            places: text for some nodes in it.

        Raises:
            UnwritableError: a name in it is neither in the catalog nor in the file.
        """
        places = places or {}
        if node in places:
            return places[node]
        if isinstance(node, ast.expr) and value_text(node):
            return value_text(node)
        if isinstance(node, (ast.Name, ast.Attribute)):
            return self._variable(node, places)
        if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
            sides = [self.expression(each, places) for each in (node.left, node.right)]
            both = [
                f"({text})" if isinstance(each, ast.BinOp) and _binds(each, node, k) else text
                for k, (each, text) in enumerate(zip((node.left, node.right), sides))
            ]
            return f"{both[0]} {_SIGNS[type(node.op)]} {both[1]}"
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return f"-{self.expression(node.operand, places)}"
        if isinstance(node, ast.Subscript):
            inner = value_text(node.slice)
            if inner:
                return f"{self.expression(node.value, places)}[{inner}]"
        if isinstance(node, ast.Call):
            return self._call(node, places)
        if isinstance(node, ast.GeneratorExp) and len(node.generators) == 1:
            part = node.generators[0]
            if isinstance(part.target, ast.Name) and not part.ifs and not part.is_async:
                # The variable's name is the writer's own.
                writer = replace(self, names={**self.names, part.target.id: _EACH})
                return f"{writer.expression(node.elt, places)} for {_EACH} in {self.expression(part.iter, places)}"
        raise UnwritableError(type(node).__name__)

    def _variable(self, node: ast.Name | ast.Attribute, places: Mapping[ast.AST, str]) -> str:
        name = dotted(node)
        if not name:
            assert isinstance(node, ast.Attribute)
            return f"{self.expression(node.value, places)}.{self._own(node.attr)}"
        mapped = self.names.get(name)
        if mapped is not None:
            return mapped
        if isinstance(node, ast.Attribute) and node.attr in _ATTRIBUTES:
            return f"{self.expression(node.value, places)}.{node.attr}"
        function = self._function
        if isinstance(node, ast.Name) and function is not None:
            # A name that the function does not have stands for what nothing reads, or for its only parameter.
            own = {each.id for each in ast.walk(function) if isinstance(each, ast.Name)}
            parameters = [each.arg for each in function.args.args if each.arg != "self"]
            if name not in {*own, *parameters} and name not in self.source.modules:
                unread = unread_variables(function)
                if len(unread) == 1 or len(parameters) == 1:
                    return unread[0] if len(unread) == 1 else parameters[0]
        if name.startswith("self.") and ".".join(name.split(".")[:2]) not in self.source.attributes:
            raise UnwritableError(name)
        return ".".join(
            part if k == 0 and part == "self" else self._own(part) for k, part in enumerate(name.split("."))
        )

    def _own(self, name: str) -> str:
        if name in self.source.names:
            return name
        raise UnwritableError(name)

    def _call(self, node: ast.Call, places: Mapping[ast.AST, str]) -> str:
        name = last_name(node.func)
        receiver = _receiver(node)
        if dotted(node.func) == "sum" and len(node.args) == 1 and isinstance(node.args[0], ast.GeneratorExp):
            return f"sum({self.expression(node.args[0], places)})"
        if dotted(node.func) == "len" and len(node.args) == 1 and not node.keywords:
            return f"len({self.expression(node.args[0], places)})"
        if name == "size" and receiver is not None and self.framework == "paddle" and len(node.args) == 1:
            return f"{self.expression(receiver, places)}.shape[{self.expression(node.args[0], places)}]"
        if receiver is not None and (_kind(node) == "function" or name in _METHODS):
            head = self.expression(receiver, places)
            head = f"({head})" if isinstance(receiver, (ast.BinOp, ast.UnaryOp)) else head
            head = f"{head}.{name}"
        elif _kind(node):
            head = self._spelled(name)
        else:
            is_name = isinstance(node.func, (ast.Name, ast.Attribute))
            # A function that the file does not have is none of the variables.
            is_known = dotted(node.func) in {*self.names, *self.source.names} or isinstance(node.func, ast.Attribute)
            head = self._variable(node.func, places) if is_name and is_known else ""  # type: ignore[arg-type]
        if not head:
            raise UnwritableError(name)
        arguments = [self.expression(each, places) for each in node.args]
        for keyword in node.keywords:
            if keyword.arg not in KEYWORDS:
                raise UnwritableError(str(keyword.arg))
            own = argument_name(self.framework, common_argument(str(keyword.arg)), str(keyword.arg))
            arguments.append(f"{own}={self.expression(keyword.value, places)}")
        return f"{head}({', '.join(arguments)})"

    def _spelled(self, name: str) -> str:
        whole = whole_name(self.framework, name)
        if not whole:
            raise UnwritableError(name)
        return self.source.spelled(whole) or whole

    def _with_imports(self, edits: list[Edit], text: str) -> tuple[Edit, ...]:
        head = self.framework
        if (
            not self.source.is_config
            and f"{head}." in text
            and not self.source.spelled(head)
            and f" {head}." in f" {text}".replace("(", " ")
        ):
            edits.append(self.source.import_edit(head))
        return tuple(edits)

    def _renamed(self, change: Change) -> tuple[Edit, ...]:
        call = change.node
        assert isinstance(call, ast.Call)
        function = call.func
        whole = whole_name(self.framework, loss_like(change.name, last_name(function)))
        if not whole:
            raise UnwritableError(change.name)
        module, _, name = whole.rpartition(".")
        if self.source.is_mapping(call) and isinstance(function, ast.Name):
            return (self._at(function, name),)
        if isinstance(function, ast.Attribute):
            head = self.source.full_name(function.value)
            if head == module or _receiver(call) is not None:
                end = self.source.span(function)[1]
                return (Edit(self.source.file, end - len(function.attr), end, name),)
        text = self.source.spelled(whole) or whole
        return self._with_imports([self._at(function, text)], f"{text}(")

    def _at(self, node: ast.AST, text: str) -> Edit:
        start, end = self.source.span(node)
        return Edit(self.source.file, start, end, text)

    def _bracketed(self, text: str, reference: ast.AST, node: ast.AST) -> str:
        around = self.source.parents.get(node)
        needs = isinstance(reference, ast.BinOp) and isinstance(around, (ast.BinOp, ast.UnaryOp, ast.Attribute))
        return f"({text})" if needs else text

    def _whole_span(self, inner: ast.AST, outer: ast.AST) -> tuple[int, int]:
        """Return the span of a node with the brackets that it needs, where it stands by itself."""
        start, end = self.source.span(inner)
        around = self.source.parents.get(outer)
        text = self.source.text
        needs = isinstance(inner, (ast.BinOp, ast.UnaryOp)) and isinstance(
            around, (ast.BinOp, ast.UnaryOp, ast.Attribute)
        )
        if needs and text[:start].rstrip().endswith("(") and text[end:].lstrip().startswith(")"):
            return text.rindex("(", 0, start), text.index(")", end) + 1
        return start, end

    def _removed(self, node: ast.AST) -> Edit:
        """Return the edit that removes an argument, with its comma, and its line if nothing else stands there."""
        source = self.source
        start, end = source.span(node)
        text = source.text
        line = text.rfind("\n", 0, start) + 1
        if source.is_config and not text[line:start].strip():
            return Edit(source.file, line, text.find("\n", end) + 1 or len(text), "")
        after = end
        while after < len(text) and text[after] in " \t":
            after += 1
        if after < len(text) and text[after] == ",":
            end = after + 1
            while end < len(text) and text[end] in " \t":
                end += 1
            line = text.rfind("\n", 0, start) + 1
            if not text[line:start].strip() and text[end : end + 1] in ("\n", "\r"):
                return Edit(source.file, line, text.index("\n", end) + 1, "")
            return Edit(source.file, start, end, "")
        before = start
        while before > 0 and text[before - 1] in " \t\r\n":
            before -= 1
        if before > 0 and text[before - 1] == ",":
            return Edit(source.file, before - 1, end, "")
        return Edit(source.file, start, end, "")

    def _inserted(self, node: ast.AST, text: str, before: bool) -> Edit:
        """Return the edit that puts an item beside another one, on its own line where the other one has one."""
        source = self.source
        start, end = source.span(node)
        line = source.text.rfind("\n", 0, start) + 1
        indent = source.text[line:start]
        behind = source.text[end:].partition("\n")[0].partition("#")[0].strip()
        if not indent.strip() and behind == ",":
            at = line if before else source.text.index("\n", end) + 1
            return Edit(source.file, at, at, f"{indent}{text},\n")
        return Edit(source.file, start, start, f"{text}, ") if before else Edit(source.file, end, end, f", {text}")

    def _added(self, call: ast.Call, text: str) -> Edit:
        """Return the edit that adds an argument at the end of a call, on its own line where others have one."""
        source = self.source
        if source.is_mapping(call):
            return self._entry(call, *text.partition("=")[::2])
        arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
        arguments = sorted(arguments, key=lambda node: (node.lineno, node.col_offset))
        end = source.span(call)[1]
        if not arguments:
            return Edit(source.file, end - 1, end - 1, text)
        last = source.span(arguments[-1])[1]
        if isinstance(arguments[-1], ast.GeneratorExp) and source.text[last - 1 : last] == ")" and last == end:
            raise UnwritableError("a generator without brackets")
        lines = {node.lineno for node in arguments}
        tail = source.text[last : end - 1]
        if len(lines) == len(arguments) and "\n" in tail:
            line = source.text.rfind("\n", 0, source.span(arguments[-1])[0]) + 1
            indent = source.text[line : source.span(arguments[-1])[0]]
            if not indent.strip():
                if tail.lstrip().startswith(","):
                    comma = source.text.index(",", last) + 1
                    stop = source.text.index("\n", comma) + 1
                    return Edit(source.file, stop, stop, f"{indent}{text},\n")
                return Edit(source.file, last, last, f",\n{indent}{text}")
        return Edit(source.file, last, last, f", {text}")

    def _entry(self, call: ast.Call, name: str, value: str) -> Edit:
        """Return the edit that adds an argument to a mapping that stands for a call, behind another or the name."""
        source, text = self.source, self.source.text
        start, (first, at) = source.span(call)[0], source.span(call.func)
        quote = text[at : at + 1].strip("\n\r\t ,}")
        at, is_flow = at + len(quote), text[start] == "{" or not source.is_config
        plain = [each for each in call.keywords if isinstance(each.value, ast.Constant)]
        if plain:
            start, at = source.span(plain[-1])
            is_flow = is_flow or text[:start].rstrip().endswith(("{", ","))
        if source.file.endswith(".py"):
            is_display = text[source.span(call)[0]] == "{"
            entry = f"{quote}{name}{quote}: {value}" if is_display else f"{name}={value}"
        else:
            mark = '"' if source.file.endswith(".json") else ""
            sign = " =" if source.file.endswith(".toml") else ":"
            entry = f"{mark}{name}{mark}{sign} {config_value(value)}"
            if not call.keywords and text[:first].rstrip("\"': ").endswith("class_path"):
                entry = f"{mark}init_args{mark}: {{{entry}}}"
        if is_flow:
            return self._inserted(plain[-1], entry, False) if plain else Edit(source.file, at, at, f", {entry}")
        indent = 0 if source.file.endswith(".toml") else start - text.rfind("\n", 0, start) - 1
        at = text.find("\n", at) if "\n" in text[at:] else len(text)
        return Edit(source.file, at, at, f"\n{' ' * indent}{entry}")


def _value(node: ast.AST) -> ast.AST | None:
    """Return the expression of a statement."""
    if isinstance(node, ast.AugAssign):
        target = node.target
        if isinstance(target, ast.Name):
            return ast.copy_location(
                ast.BinOp(ast.copy_location(ast.Name(target.id), target), node.op, node.value), node
            )
        return node.value
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)):
        return node.value
    if isinstance(node, (ast.For, ast.AsyncFor)):
        return node.iter
    if isinstance(node, (ast.If, ast.While)):
        return node.test
    if isinstance(node, ast.keyword):
        return node.value
    return node if isinstance(node, ast.expr) else None


def _defaults_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[str, ast.expr]]:
    names = [*node.args.posonlyargs, *node.args.args]
    yield from ((each.arg, value) for each, value in zip(reversed(names), reversed(node.args.defaults)))
    for each, value in zip(node.args.kwonlyargs, node.args.kw_defaults):
        if value is not None:
            yield each.arg, value


def _receiver(call: ast.Call) -> ast.expr | None:
    """Return the object of a method's call; `None` for a function of a module, or a name."""
    if not isinstance(call.func, ast.Attribute):
        return None
    head = dotted(call.func.value)
    if head == "self" or head.partition(".")[0] in _MODULES:
        return None
    return call.func.value


def _kind(call: ast.Call) -> str:
    """Return the family of the called function; empty for a layer or method of the user's class."""
    own = isinstance(call.func, ast.Attribute) and dotted(call.func.value) == "self"
    return "" if own else kind_of(last_name(call.func))


def unread_variables(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the variables that a function assigns and never reads."""
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    return list(dict.fromkeys(node.id for node in names if isinstance(node.ctx, ast.Store) and node.id not in read))


def inner_expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that an operator or a call is around."""
    if isinstance(node, ast.BinOp):
        yield from (node.left, node.right)
    elif isinstance(node, ast.IfExp):
        yield from (node.body, node.orelse)
    elif isinstance(node, ast.Call):
        receiver = _receiver(node)
        name = last_name(node.func)
        if receiver is not None and (_kind(node) == "function" or name in _METHODS):
            yield receiver
        elif (
            node.args
            and not isinstance(node.args[0], (ast.Starred, ast.Constant))
            and kind_of(name) not in _UNWRAPPED_NEVER
            # Of several tensors a function of the user's makes something else.
            and (_kind(node) or len(node.args) + len(node.keywords) == 1)
        ):
            yield node.args[0]


def _outer(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        return last_name(node.func)
    return _SIGNS.get(type(node.op), "") if isinstance(node, ast.BinOp) else ""


def _size(node: ast.AST) -> int:
    return sum(1 for _ in ast.walk(node))


def _is_entry(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
    )


def _is_dots(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _without_rate(
    arguments: list[ast.expr], named: dict[str, ast.keyword], framework: str, kind: str
) -> list[ast.expr]:
    """Return the arguments by place without the learning rate, which is added to those by name, and without parameters
    or an optimizer, which the other framework takes elsewhere.
    """
    place = 0 if framework == "paddle" else 1
    if (framework == "paddle" or kind == "optimizer") and place < len(arguments):
        named.setdefault("lr", ast.keyword("learning_rate" if framework == "paddle" else "lr", arguments[place]))
        return arguments[place + 1 :]
    return arguments[place:]


def _is_objects(keyword: ast.keyword) -> bool:
    return keyword.arg in ("parameters", "params", "optimizer", "model", "name")


def _binds(inner: ast.BinOp, outer: ast.BinOp, side: int) -> bool:
    """Return True if an operand needs brackets."""
    ranks = {ast.Add: 1, ast.Sub: 1, ast.Mult: 2, ast.Div: 2, ast.MatMult: 2, ast.Pow: 3}
    ranked = (ranks.get(type(inner.op), 0), ranks.get(type(outer.op), 0))
    return ranked[0] < ranked[1] or (ranked[0] == ranked[1] and side == 1)
