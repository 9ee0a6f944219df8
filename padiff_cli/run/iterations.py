"""Ends of the iterations of a loop in which several optimizers step.

An iteration ends with the last ``step()`` in it. The source of the loop tells which one that is: a call of ``step()``
is the last one if no other can follow it before the loop begins anew. Where the source does not tell, an iteration
ends once each optimizer has stepped.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from padiff.system.frames import is_users, locals_of, user_frames

_STEPS = ("step", "minimize")
_CLEARS = ("zero_grad", "clear_grad", "clear_gradients")
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_ENDS = (ast.Continue, ast.Break, ast.Return, ast.Raise)
# Functions that call functions that call step().
_DEEPEST = 4
# Steps of optimizers in one iteration, from which on an optimizer that has not stepped is not waited for: a critic
# takes 5 to 10.
_MOST = 25
_UNKNOWN = object()


class Iterations:
    """Tells of each step of an optimizer, whether the iteration ends with it.

    Args:
        optimizers: those that step in the loop.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self._optimizers: dict[int, Any] = {}
        self.watch(optimizers)
        self._stepped: set[int] = set()
        self._absent: set[int] = set()
        self._count = 0
        self._known: dict[Any, tuple[bool, set[int]]] = {}

    def watch(self, optimizers: Sequence[Any]) -> None:
        """Add optimizers that step in the loop."""
        self._optimizers |= {id(optimizer): optimizer for optimizer in optimizers}

    def optimizer_stepped(self, optimizer: Any, frame: FrameType | None) -> bool:
        """Note that an optimizer has stepped; return True if it is the iteration's last one to do so.

        Args:
            frame: a frame inside of the call of ``step()``.
        """
        if len(self._optimizers) == 1:
            return True
        self._stepped.add(id(optimizer))
        self._absent.discard(id(optimizer))
        self._count += 1
        missing = self._optimizers.keys() - self._stepped - self._absent
        frames = user_frames(frame)
        site = (tuple((f.f_code, f.f_lasti) for f in frames), frozenset(missing))
        if site not in self._known:
            optimizers = [*self._optimizers.values()] if missing else []
            cleared = {id(each) for each in clearing_around(frame, optimizers)}
            idle = missing & cleared - {id(each) for each in stepping_around(frame, optimizers)}
            self._known[site] = _is_last(frames, self._optimizers, missing - idle), idle
        last, idle = self._known[site]
        self._absent |= idle
        if not last and self._count >= _MOST:
            self._absent |= missing
            last = True
        if last:
            self._stepped.clear()
            self._count = 0
        return last


def stepping_around(frame: FrameType | None, optimizers: Sequence[Any]) -> list[Any]:
    """Return those of the optimizers that the loops around a frame call ``step()`` of, as far as the source tells."""
    return _used_around(frame, optimizers, _stepping)


def clearing_around(frame: FrameType | None, optimizers: Sequence[Any]) -> list[Any]:
    """Return those of the optimizers that the loops around a frame clear the gradients of, as far as the source tells.

    An optimizer that a loop clears is the loop's, though its ``step()`` is missing.
    """
    return _used_around(frame, optimizers, _clearing)


def called_around(frame: FrameType | None, layers: Sequence[Any]) -> list[Any]:
    """Return those of the layers that the loops around a frame call, as far as the source tells."""
    return _used_around(frame, layers, _calling)


def _used_around(frame: FrameType | None, things: Sequence[Any], using: _Using) -> list[Any]:
    watched = {id(thing): thing for thing in things}
    sites: set[int] = set()
    for user in user_frames(frame):
        loops = [node for node in _path(user) or () if isinstance(node, _LOOPS)]
        if loops:
            sites |= _sites([loops[0]], _Scope(locals_of(user), user.f_globals), watched, using)
    return [thing for key, thing in watched.items() if key in sites]


def _is_last(frames: Sequence[FrameType], watched: Mapping[int, Any], missing: set[int]) -> bool:
    for caller, frame in zip((None, *frames), frames):
        if missing and caller is not None and caller.f_back is not frame:
            return False  # code of others calls back: a hook in a backward, for each parameter, say
        path = _path(frame)
        if path is None:
            return not missing
        scope = _Scope(locals_of(frame), frame.f_globals)
        for place in range(len(path) - 1, 0, -1):
            node, parent = path[place], path[place - 1]
            if _sites(_after(node, parent), scope, watched):
                return False
            if isinstance(parent, _COMPREHENSIONS) or (isinstance(parent, _LOOPS) and _holds(parent, scope, watched)):
                if missing:
                    return False
            elif isinstance(parent, _LOOPS) and node not in parent.orelse:
                outer = [loop for loop in path[: place - 1] if isinstance(loop, _LOOPS)]
                return not (missing and outer and _is_short(parent, scope) and _sites(outer, scope, watched) & missing)
    return not missing


def _after(node: ast.AST, parent: ast.AST) -> list[ast.AST]:
    """Return what can run after a part of a node, in the same run through it."""
    blocks = [block for _, block in ast.iter_fields(parent) if isinstance(block, list) and node in block]
    if not blocks:
        return []
    following: list[ast.AST] = blocks[0][blocks[0].index(node) + 1 :]
    end = next((k for k, statement in enumerate(following) if isinstance(statement, _ENDS)), len(following))
    following = following[:end]
    if isinstance(parent, ast.Try) and node not in parent.finalbody:
        following += [*(parent.orelse if node in parent.body else ()), *parent.finalbody]
    return following


def _is_short(loop: ast.AST, scope: _Scope) -> bool:
    """Return True for a loop that may stand inside of an iteration, as a critic's does: not for one over data."""
    if isinstance(loop, ast.While):
        return True
    call = loop.iter if isinstance(loop, ast.For) else None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range"):
        return False
    numbers = [scope.value(argument) for argument in call.args]
    if not all(isinstance(number, int) for number in numbers):
        return True
    return len(range(*numbers)) < _MOST


def _holds(loop: ast.AST, scope: _Scope, watched: Mapping[int, Any]) -> bool:
    """Return True for a loop over optimizers, over their places in a list, or over objects that hold them."""
    if not isinstance(loop, (ast.For, ast.AsyncFor)):
        return False
    if _optimizers_in(_iterated(loop.iter, scope), watched):
        return True
    return len({frozenset(sites) for sites in _of_items(loop, scope, watched)}) > 1


# -- the source ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _module(file: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return None


def _path(frame: FrameType) -> list[ast.AST] | None:
    """Return the nodes around the place where a frame is, outermost first, within its function; None: no source."""
    return _path_of(frame.f_code, frame.f_lasti, frame.f_lineno)


@lru_cache(maxsize=1024)
def _path_of(code: CodeType, instruction: int, line: int) -> list[ast.AST] | None:
    node: ast.AST | None = _module(code.co_filename)
    if node is None or not getattr(node, "body", None):
        return None
    place = _position(code, instruction, line)
    path: list[ast.AST] = []
    while node is not None:
        path = [] if isinstance(node, _SCOPES) else path
        path.append(node)
        node = next((child for child in ast.iter_child_nodes(node) if _spans(child, place)), None)
    return path


def _position(code: CodeType, instruction: int, line: int) -> tuple[tuple[int, int], tuple[int, int]]:
    positions = getattr(code, "co_positions", None)  # from Python 3.11 on
    if positions is not None:
        start, end, column, end_column = list(positions())[instruction // 2]
        if None not in (start, end, column, end_column):
            return (start, column), (end, end_column)
    return (line, 10**6), (line, 0)


def _spans(node: ast.AST, place: tuple[tuple[int, int], tuple[int, int]]) -> bool:
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    if first is None or last is None:
        return False
    start, end = place
    if start > end:  # the line alone is known
        return bool(first <= start[0] <= last)
    return bool((first, node.col_offset) <= start and end <= (last, node.end_col_offset))  # type: ignore[attr-defined]


class _Scope:
    """Variables of a function, by which expressions of names and attributes have values; nothing is called."""

    def __init__(self, local: Mapping[str, Any], outer: Mapping[str, Any]) -> None:
        self.local, self.outer = dict(local), outer

    def value(self, node: ast.AST) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self.local.get(node.id, self.outer.get(node.id, _UNKNOWN))
        if isinstance(node, ast.Attribute):
            return _attribute(self.value(node.value), node.attr)
        if isinstance(node, (ast.Tuple, ast.List)):
            return [self.value(item) for item in node.elts]
        if isinstance(node, ast.Subscript):
            held, key = self.value(node.value), self.value(node.slice)
            if type(held) in (list, tuple) and isinstance(key, int) and -len(held) <= key < len(held):
                return held[key]
            return held.get(key, _UNKNOWN) if type(held) is dict and isinstance(key, (str, int)) else _UNKNOWN
        return _UNKNOWN


def _attribute(value: Any, name: str) -> Any:
    if value is _UNKNOWN:
        return value
    held = getattr(value, "__dict__", {})
    if name in held:
        return held[name]
    if isinstance(value, (ModuleType, type)):
        return _UNKNOWN
    member = inspect.getattr_static(type(value), name, _UNKNOWN)
    return MethodType(member, value) if isinstance(member, FunctionType) else _UNKNOWN


def _iterated(node: ast.AST, scope: _Scope) -> Any:
    """Return what a loop goes over: of ``enumerate(x)``, ``zip(x, y)``, ``x.values()`` what they are called with."""
    if isinstance(node, ast.Call):
        parts = [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
        return [scope.value(part) for part in parts]
    return scope.value(node)


def _optimizers_in(value: Any, watched: Mapping[int, Any], depth: int = 2) -> set[int]:
    """Return those of the optimizers that a value is, or holds."""
    if id(value) in watched and watched[id(value)] is value:
        return {id(value)}
    if not depth:
        return set()
    if isinstance(value, (list, tuple)):
        held: Iterable[Any] = value[:64]
    elif isinstance(value, dict):
        held = list(value.values())[:64]
    elif isinstance(value, (type, ModuleType, FunctionType, MethodType)) or not all(
        callable(getattr(type(value), name, None)) for name in ("step", "zero_grad")
    ):
        return set()
    else:  # a wrapper; a scheduler, say, holds an optimizer, too
        held = list(vars(value).values()) if hasattr(value, "__dict__") else []
    return {key for item in held for key in _optimizers_in(item, watched, depth - 1)}


def _stepping(call: ast.Call, scope: _Scope, watched: Mapping[int, Any]) -> set[int]:
    """Return the optimizers that a call is ``step()`` of."""
    return _of_method(call, scope, watched, _STEPS)


def _clearing(call: ast.Call, scope: _Scope, watched: Mapping[int, Any]) -> set[int]:
    """Return the optimizers that a call clears the gradients of."""
    return _of_method(call, scope, watched, _CLEARS)


def _of_method(call: ast.Call, scope: _Scope, optimizers: Mapping[int, Any], methods: Sequence[str]) -> set[int]:
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in methods:
        return set()
    sites: set[int] = set()
    # Of a scaler, the optimizer is the first argument.
    for part in (call.func.value, *call.args[:1]):
        value = scope.value(part)
        if value is _UNKNOWN and isinstance(part, ast.Subscript):
            value = scope.value(part.value)  # any of a list
        sites |= _optimizers_in(value, optimizers)
    return sites


def _calling(call: ast.Call, scope: _Scope, watched: Mapping[int, Any]) -> set[int]:
    """Return the layer that a call is of."""
    return {id(scope.value(call.func))} & watched.keys()


#: ``using(call, scope, known)``: the ids of what a call uses of some optimizers or layers, by id.
_Using = Callable[[ast.Call, _Scope, Mapping[int, Any]], set[int]]


def _sites(
    nodes: Sequence[ast.AST], scope: _Scope, watched: Mapping[int, Any], using: _Using = _stepping, depth: int = 0
) -> set[int]:
    """Return the optimizers that some code calls ``step()`` of, by itself or in functions that it calls; or what else
    it uses.
    """
    everything = [node for top in nodes for node in ast.walk(top)]
    scope = _Scope(scope.local, scope.outer)
    for node in everything:
        if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
            held = _iterated(node.iter, scope)
            if _optimizers_in(held, watched):
                scope.local.update((name.id, held) for name in ast.walk(node.target) if isinstance(name, ast.Name))
    sites: set[int] = set()
    for loop in everything if depth < _DEEPEST else ():
        if isinstance(loop, (ast.For, ast.AsyncFor)):
            sites |= set().union(*_of_items(loop, scope, watched, using, depth))
    for call in everything:
        if not isinstance(call, ast.Call):
            continue
        sites |= using(call, scope, watched)
        if depth < _DEEPEST:
            for body, inner in _called(call, scope):
                sites |= _sites(body, inner, watched, using, depth + 1)
    return sites


def _of_items(
    loop: ast.For | ast.AsyncFor, scope: _Scope, watched: Mapping[int, Any], using: _Using = _stepping, depth: int = 0
) -> Iterator[set[int]]:
    """Yield what a loop uses with each item: with each agent that has optimizers of its own, or each place in a list of
    agents or optimizers.
    """
    names = [name.id for name in ast.walk(loop.target) if isinstance(name, ast.Name)]
    for item in _items(loop, names, scope, watched)[:_MOST]:
        inner = _Scope({**scope.local, **dict.fromkeys(names, item)}, scope.outer)
        yield _sites(loop.body, inner, watched, using, depth + 1)


def _items(loop: ast.For | ast.AsyncFor, names: Sequence[str], scope: _Scope, watched: Mapping[int, Any]) -> list[Any]:
    """Return the places of a list that a loop takes items of, or the user's objects that it goes over."""
    for node in ast.walk(loop):
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name) and node.slice.id in names:
            held = scope.value(node.value)
            if isinstance(held, (list, tuple)) and (_optimizers_in(held, watched) or any(map(_is_of_users, held))):
                return [*range(len(held))]
    iterated = _iterated(loop.iter, scope)
    values = iterated if isinstance(iterated, (list, tuple)) else []
    items = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
    return [item for item in items if _is_of_users(item)]


def _is_of_users(item: Any) -> bool:
    """Return True for an object of a class of the user's."""
    return is_users(getattr(sys.modules.get(type(item).__module__), "__file__", None) or "<")


def _called(call: ast.Call, scope: _Scope) -> Iterator[tuple[list[ast.AST], _Scope]]:
    """Yield the body of the user's function that a call calls, and its variables as far as they are known."""
    target = scope.value(call.func)
    function = target.__func__ if isinstance(target, MethodType) else target
    if isinstance(function, FunctionType):
        function = inspect.unwrap(function)
    if not isinstance(function, FunctionType) or not is_users(function.__code__.co_filename):
        return
    definition = _definition(function.__code__)
    if definition is None:
        return
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    values = [target.__self__] if isinstance(target, MethodType) else []
    values += [scope.value(argument) for argument in call.args]
    local = dict(zip(names, values))
    local.update((keyword.arg, scope.value(keyword.value)) for keyword in call.keywords if keyword.arg)
    if function.__closure__:
        cells = zip(code.co_freevars, function.__closure__)
        local.update((name, cell.cell_contents) for name, cell in cells if _is_filled(cell))
    yield list(definition.body), _Scope(local, function.__globals__)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not _UNKNOWN
    except ValueError:
        return False


@lru_cache(maxsize=256)
def _definition(code: CodeType) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    module = _module(code.co_filename)
    for node in ast.walk(module) if module is not None else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if (node.name, first) == (code.co_name, code.co_firstlineno):
                return node
    return None
