"""The lines of the user's code that give the batches of a training, found by reading the source around its loop."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterator
from functools import lru_cache
from types import FrameType

from padiff.system.construction import Source, argument, called_name, parsed
from padiff.system.frames import Frame, is_users

# Most lines, and most calls from the loop to a line. Chosen.
_MOST, _DEEPEST = 80, 6
# Most places of the source whose lines are kept for the next recording in this process. Chosen.
_KEPT = 64
# Functions of a class that give batches.
_GIVING = ("__init__", "__getitem__", "__iter__", "__next__", "__call__")


def data_lines(sources: Collection[Source], models: Collection[str]) -> dict[str, Frame]:
    """Return the lines that give the batches, as ``@data:0`` and on, in the order of the source.

    ``@batch`` is the line of the loop; of a loop that only counts, the last line before the model is called.

    The lines are what the loops around the current call run over, with the functions and classes of the user's code
    that this uses, and what the loops assign before the model is called.

    Args:
        sources: the files of the user's code.
        models: the names of variables that hold the model.
    """
    return dict(_batches(tuple(sources), frozenset(models), tuple(_users_frames(sys._getframe(1)))))


@lru_cache(maxsize=_KEPT)
def _batches(
    sources: tuple[Source, ...], models: frozenset[str], places: tuple[tuple[Source, ast.AST, int], ...]
) -> dict[str, Frame]:
    search = _Search(sources, models)
    for source, function, line in places:
        for loop in _loops(function, line):
            if isinstance(loop, ast.For):
                search.follow(source, function, loop.iter, 0)
            statements = list(_before_the_model(loop.body, search))
            for statement in statements:
                search.follow(source, function, statement, 0)
            if search.lines:
                search.lines.setdefault((source.file, loop.lineno), source)
                data = {f"@data:{k}": frame for k, frame in enumerate(search.frames())}
                given = [loop] if not _counts(loop) else statements[-1:]
                return {"@batch": source.frame_at(given[0].lineno), **data} if given else data
    search.follow_loader()
    return {f"@data:{k}": frame for k, frame in enumerate(search.frames())}


def used_lines(sources: Collection[Source], call: Frame, key: str) -> dict[str, Frame]:
    """Return the lines of the user's functions that a call is made of, e.g. a schedule, as ``key:0`` and on.

    Of a learning rate that code sets itself, the lines that compute the rate.
    """
    return dict(_used(tuple(sources), call, key))


@lru_cache(maxsize=_KEPT)
def _used(sources: tuple[Source, ...], call: Frame, key: str) -> dict[str, Frame]:
    search = _Search(sources, ())
    for source in sources:
        if source.short == call.file:
            for node in (each for calls in source.calls.values() for each in calls if each.lineno == call.line):
                search.follow_functions(source, source.scopes.get(node), node)
            for rate in (each for each in source.rates if each.lineno == call.line):
                search.follow(source, source.scopes.get(rate) or source.tree, rate, 0)
    return {f"{key}:{k}": frame for k, frame in enumerate(search.frames())}


def _users_frames(frame: FrameType | None) -> Iterator[tuple[Source, ast.AST, int]]:
    """Yield the functions of the user's code on the call stack, the innermost first, each with its current line."""
    while frame is not None:
        code = frame.f_code
        source = parsed(code.co_filename) if is_users(code.co_filename) else None
        if source is not None:
            functions = [each for each in source.functions.values() if each.name == code.co_name]
            around = [each for each in functions if each.lineno <= frame.f_lineno <= (each.end_lineno or 0)]
            yield source, around[0] if around else source.tree, frame.f_lineno
        frame = frame.f_back


def _loops(function: ast.AST, line: int) -> list[ast.For | ast.While]:
    """Return the loops around a line, the innermost first."""
    loops = [
        node
        for node in ast.walk(function)
        if isinstance(node, (ast.For, ast.While)) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return sorted(loops, key=lambda loop: loop.lineno, reverse=True)


def _counts(loop: ast.For | ast.While) -> bool:
    """Return True if a loop gives no data: it counts, or goes on while something holds."""
    return isinstance(loop, ast.While) or called_name(loop.iter) in ("range", "trange", "count")


def _before_the_model(statements: list[ast.stmt], search: _Search) -> Iterator[ast.stmt]:
    """Yield the assignments of a loop up to the one that calls the model."""
    for statement in statements:
        if search.trains(statement):
            return
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            yield statement


class _Search:
    """The lines found so far.

    Attributes:
        lines: the file of each line, by its name and number.
    """

    def __init__(self, sources: Collection[Source], models: Collection[str]) -> None:
        self._models, self._sources = models, sources
        self._functions = {name: (source, node) for source in sources for name, node in source.functions.items()}
        self._classes = {name: (source, node) for source in sources for name, node in source.classes.items()}
        self._visited: set[ast.AST] = set()
        self._trains: dict[tuple[ast.AST, int], bool] = {}  # asked again of each function that another one calls
        self._called: dict[ast.AST, frozenset[str]] = {}
        self.lines: dict[tuple[str, int], Source] = {}

    def frames(self) -> list[Frame]:
        """Return the lines in the order of the source."""
        places = sorted(self.lines.items(), key=lambda item: item[0])
        # One file may have been imported by two paths.
        return list(dict.fromkeys(source.frame_at(line) for (_, line), source in places))[:_MOST]

    def follow_loader(self) -> None:
        """Add the lines of the only data loader, else of the only class whose objects are indexed."""
        loaders = [(source, call) for source in self._sources for call in source.calls.get("DataLoader", ())]
        indexed = [
            each
            for each in self._classes.values()
            if any(isinstance(method, ast.FunctionDef) and method.name == "__getitem__" for method in each[1].body)
        ]
        if len(loaders) == 1:
            ((source, call),) = loaders
            self.follow(source, source.scopes.get(call) or source.tree, call, 0)
        elif len(indexed) == 1:
            self._methods(*indexed[0], 0)
            name = indexed[0][1].name
            for source in self._sources:
                for call in source.calls.get(name, ()):
                    self.follow(source, source.scopes.get(call) or source.tree, call, 0)

    def follow_functions(self, source: Source, scope: ast.FunctionDef | None, node: ast.AST) -> None:
        """Add the lines of the functions of the user's that a piece of code has, or names, itself or by a variable."""
        for each in ast.walk(node):
            if isinstance(each, ast.Lambda):
                self.follow(source, scope or source.tree, each, 0)
        for name in [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]:
            if name in self._functions:
                self._function(*self._functions[name], 0)
            for value in source.variables.get((scope, name)) or source.variables.get((None, name), []):
                if isinstance(value, ast.Lambda) or any(
                    called_name(part) in self._functions for part in ast.walk(value)
                ):
                    self.follow(source, scope or source.tree, value, 0)

    def trains(self, node: ast.AST, depth: int = 0) -> bool:
        """Return True if code calls the model, itself or through a function of the user's."""
        if (node, depth) not in self._trains:
            self._trains[node, depth] = self._calls_the_model(node, depth)
        return self._trains[node, depth]

    def _calls_the_model(self, node: ast.AST, depth: int) -> bool:
        if node not in self._called:
            self._called[node] = frozenset(map(called_name, ast.walk(node)))
        called = self._called[node]
        if not called.isdisjoint((*self._models, "backward", "zero_grad", "clear_grad")):
            return True
        functions = (self._functions[name][1] for name in called if name in self._functions)
        return depth < _DEEPEST and any(self.trains(function, depth + 1) for function in functions)

    def follow(self, source: Source, function: ast.AST, node: ast.AST, depth: int) -> None:
        """Add the lines of a piece of code, and of what it uses."""
        if node in self._visited or depth > _DEEPEST:
            return
        self._visited.add(node)
        for each in ast.walk(node):
            if isinstance(each, ast.expr):
                self.lines[source.file, each.lineno] = source
            name = called_name(each)
            if name in self._classes:
                self._methods(*self._classes[name], depth)
            if isinstance(each, ast.Name):
                self._name(source, function, each.id, depth)
            elif isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name):
                self._attribute(source, each.value.id, each.attr, depth)

    def _attribute(self, source: Source, owner: str, name: str, depth: int) -> None:
        """Add the lines of a method or an attribute of the user's class, or of a function of the user's module."""
        if name in self._functions and (owner == "self" or owner in source.imports):
            self._function(*self._functions[name], depth)
        plain = [
            (each, value) for each in self._sources for kind, _, value in each.defined.get(name, ()) if kind != "call"
        ]
        if owner != "self" and len(plain) == 1:  # of a config
            self.lines[plain[0][0].file, plain[0][1].lineno] = plain[0][0]
        for each in self._sources if owner == "self" else ():
            for (_, assigned), values in each.assigned.items():
                if assigned == name and len(values) == 1 and not self.trains(values[0]):
                    self.follow(each, each.scopes.get(values[0]) or each.tree, values[0], depth + 1)

    def _name(self, source: Source, function: ast.AST, name: str, depth: int) -> None:
        """Add the lines that a name of a piece of code stands for: of a variable or a function."""
        scope = function if isinstance(function, ast.FunctionDef) else None
        for owner in dict.fromkeys((scope, None)):
            values = source.variables.get((owner, name), [])
            for value in values:
                if not self.trains(value):
                    self.follow(source, function if owner is not None else source.tree, value, depth + 1)
            if values:
                return
        if scope is not None and name in (names := [each.arg for each in scope.args.args]):
            self._parameter(scope, name, names.index(name) - (names[0] in ("self", "cls")), depth)
        elif name in self._functions:
            self._function(*self._functions[name], depth)

    def _parameter(self, function: ast.FunctionDef, name: str, place: int, depth: int) -> None:
        """Add the lines of what the calls of a function give for a parameter."""
        for source in self._sources:
            for call in source.calls.get(source.names.get(function, function.name), ()):
                several = (each.value for each in call.args[: place + 1] if isinstance(each, ast.Starred))
                value = argument(call, name, place) or next(several, None)
                if value is not None and not self.trains(value):
                    self.follow(source, source.scopes.get(call) or source.tree, value, depth + 1)

    def _function(self, source: Source, function: ast.FunctionDef, depth: int) -> None:
        if not self.trains(function):
            for part in (*function.args.defaults, *function.body):
                self.follow(source, function, part, depth + 1)

    def _methods(self, source: Source, node: ast.ClassDef, depth: int) -> None:
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name in _GIVING:
                self._function(source, method, depth)
