"""The lines of the user's code that construct layers and optimizers, found by reading the source."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from padiff.system.frames import Frame, is_users, short_path

# Limits of what is read: files, bytes of a file, characters of a line.
_MOST_FILES, _LARGEST, _LONGEST = 60, 400_000, 200
_FRAMEWORKS = {"torch", "paddle"}
# Methods that add a child layer by name.
_ADDING = ("add_module", "register_module", "add_sublayer")


class Built(NamedTuple):
    """A layer whose construction is searched for.

    Attributes:
        path: path of the layer.
        type: name of its class.
        package: package that defines the class, e.g. ``torch``.
        file: file that defines the class; empty if not known.
        bases: names of the class and of its base classes, the class first.
    """

    path: str
    type: str
    package: str
    file: str
    bases: tuple[str, ...]


@dataclass
class _Source:
    """A parsed file: its calls by the last part of the called name, its functions and its classes by name."""

    file: str
    lines: list[str]
    calls: dict[str, list[ast.Call]] = field(default_factory=dict)
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    #: By class and name of the attribute: the expressions that are assigned to ``self.name``.
    assigned: dict[tuple[str, str], list[ast.expr]] = field(default_factory=dict)
    #: By name in the file: the package that the name is imported from.
    imports: dict[str, set[str]] = field(default_factory=dict)

    def may_call(self, call: ast.Call, package: str) -> bool:
        """Return False if a call is known to be of another package."""
        node: ast.expr = call.func
        while isinstance(node, ast.Attribute):
            node = node.value
        packages = self.imports.get(node.id, set()) if isinstance(node, ast.Name) else set()
        return not packages or package in packages or not packages <= _FRAMEWORKS

    def frame(self, node: ast.expr) -> Frame:
        return Frame(short_path(self.file), node.lineno, "", self.lines[node.lineno - 1].strip()[:_LONGEST])


class _Found(NamedTuple):
    source: _Source
    node: Any


def construction_lines(layers: Sequence[Built], optimizers: Mapping[str, type]) -> dict[str, Frame]:
    """Return the line that constructs each layer and optimizer, by path or key, as far as the source tells.

    A line is given only if the source leaves no choice: the assignment to an attribute of the class, the item of a list
    or a `Sequential`, the `return` of a helper function, or the only call of the class.

    Args:
        layers: the layers, the model itself first.
        optimizers: the class of each optimizer, by key.
    """
    sources = [source for source in map(_parsed, _files(layers)) if source is not None]
    search = _Search(layers, sources)
    lines: dict[str, Frame] = {}
    for layer in layers:
        found = search.expression(layer.path)
        if found is not None:
            lines[layer.path] = found.source.frame(found.node)
    for kind in set(optimizers.values()):
        keys = [key for key, each in optimizers.items() if each == kind]
        found_calls = search.calls(kind.__name__, package_of(kind))
        if len(found_calls) == len(keys):
            lines |= {key: one.source.frame(one.node) for key, one in zip(keys, found_calls)}
    return lines


def package_of(kind: type) -> str:
    """Return the name of the package that defines a class."""
    return kind.__module__.partition(".")[0]


class _Search:
    def __init__(self, layers: Sequence[Built], sources: Sequence[_Source]) -> None:
        self._layers = {layer.path: layer for layer in layers}
        self._root = layers[0].path if layers else ""
        self._sources = sources
        self._known: dict[str, _Found | None] = {}

    def calls(self, name: str, package: str) -> list[_Found]:
        """Return the calls of a class of a package."""
        found = [_Found(source, call) for source in self._sources for call in source.calls.get(name, ())]
        return [each for each in found if each.source.may_call(each.node, package)]

    def expression(self, path: str) -> _Found | None:
        """Return the expression that constructs a layer."""
        if path not in self._known:
            self._known[path] = None  # against a layer that contains itself
            self._known[path] = self._construction(self._layers[path])
        return self._known[path]

    def _construction(self, layer: Built) -> _Found | None:
        found = None if layer.path == self._root else self._written_in_parent(layer.path)
        if found is not None:
            found = self._call_in(found, layer.type) or found
            if _called(found.node) == layer.type:
                return found
        calls = self.calls(layer.type, layer.package)
        return calls[0] if len(calls) == 1 else found

    def _written_in_parent(self, path: str) -> _Found | None:
        above, _, name = path.rpartition(".")
        parent = self._layers.get(above or self._root)
        if parent is None:
            return None
        for base in parent.bases:
            for source in self._sources:
                nodes = source.assigned.get((base, name), [])
                if nodes:
                    return _Found(source, nodes[0]) if len(nodes) == 1 else None
        holder = self.expression(parent.path) if name.isdigit() else None
        item = None if holder is None else _item(holder.node, int(name))
        return None if holder is None or item is None else _Found(holder.source, item)

    def _call_in(self, found: _Found, name: str) -> _Found | None:
        """Return the only call of a class in an expression, or in the function that the expression calls."""
        calls = [node for node in ast.walk(found.node) if isinstance(node, ast.Call) and _called(node) == name]
        if calls:
            # The outermost one: arguments come after it.
            return _Found(found.source, calls[0])
        helper = _called(found.node)
        for source in self._sources:
            function = source.functions.get(helper)
            if function is not None:
                inside = [node for node in ast.walk(function) if isinstance(node, ast.Call) and _called(node) == name]
                return _Found(source, inside[0]) if len(inside) == 1 else None
        return None


def _called(node: ast.AST) -> str:
    """Return the last part of the name that an expression calls; empty if it is no call of a name."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _item(node: ast.expr, number: int) -> ast.expr | None:
    """Return the expression of one item of a list, or of a call that takes the items."""
    if isinstance(node, ast.Call):
        if len(node.args) == 1 and not isinstance(node.args[0], ast.Call):
            return _item(node.args[0], number)
        return _item(ast.List(node.args), number)
    if isinstance(node, ast.Starred):
        return _item(node.value, number)
    if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
        return node.elt
    if isinstance(node, (ast.List, ast.Tuple)) and number < len(node.elts):
        before = node.elts[: number + 1]
        return None if any(isinstance(each, ast.Starred) for each in before) else before[-1]
    return None


def _files(layers: Iterable[Built]) -> list[str]:
    """Return the files of the user's code: those of the layers' classes, of the call stack, and beside the script."""
    found = dict.fromkeys(layer.file for layer in layers)
    frame = sys._getframe(1)
    while frame is not None:
        found[frame.f_code.co_filename] = None
        frame = frame.f_back  # type: ignore[assignment]
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script and is_users(os.path.abspath(script)):
        folder = os.path.join(os.path.dirname(os.path.abspath(script)), "")
        found[os.path.abspath(script)] = None
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if isinstance(file, str) and file.startswith(folder):
                found[file] = None
    paths = (os.path.abspath(file) for file in found if file and file.endswith(".py") and is_users(file))
    return list(dict.fromkeys(paths))[:_MOST_FILES]


def _parsed(file: str) -> _Source | None:
    try:
        state = os.stat(file)
        return _parse(file, state.st_mtime_ns) if state.st_size <= _LARGEST else None
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None


@lru_cache(maxsize=_MOST_FILES)
def _parse(file: str, changed: int) -> _Source:
    with open(file, "rb") as opened:
        content = opened.read()
    tree = ast.parse(content)
    source = _Source(file, content.decode("utf-8", "replace").splitlines())
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            source.calls.setdefault(_called(node), []).append(node)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                where = node.module or "" if isinstance(node, ast.ImportFrom) else alias.name
                name = alias.asname or alias.name.partition(".")[0]
                source.imports.setdefault(name, set()).add(where.partition(".")[0])
        elif isinstance(node, ast.FunctionDef):
            source.functions[node.name] = node
        elif isinstance(node, ast.ClassDef):
            for name, value in _attributes(node):
                source.assigned.setdefault((node.name, name), []).append(value)
    for calls in source.calls.values():
        calls.sort(key=lambda call: (call.lineno, call.col_offset))
    return source


def _attributes(definition: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """Yield the name and the expression of each ``self.name = ...`` and ``self.add_module("name", ...)``."""
    for node in ast.walk(definition):
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        elif isinstance(node, ast.Call) and _called(node) in _ADDING and len(node.args) == 2:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value, node.args[1]
            continue
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                yield target.attr, value
