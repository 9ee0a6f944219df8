"""Calls of a layer's ``forward`` that bypass the layer's ``__call__``, and so its hooks: ``net.forward(x)``."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

from padiff.frameworks.interception import InterceptedCall, Interception, Listener
from padiff.system.frames import is_users
from padiff.system.guard import RAISING

# ``super().forward(...)`` is a part of a call, and no call of a layer.
_DIRECT = re.compile(r"(?<!\))\.forward\(")
# A compiler would follow the interception.
_COMPILES = re.compile(r"torch\.compile|(?<!\bre)\.compile\(|to_static|jit\.script")
_listeners: weakref.WeakKeyDictionary[FunctionType, _Forward] = weakref.WeakKeyDictionary()


class DirectCalls:
    """A registration of a layer's hooks for direct calls of its ``forward``, until `remove`.

    Args:
        before, after: the hooks of the layer. ``before.called`` is True from a call of the hook to the call of
            ``forward`` that follows it. ``after`` is called with the layer and its output.
    """

    @staticmethod
    def of_layer(layer: Any, before: Any, after: Any) -> list[DirectCalls]:
        """Return the registration in a list, which is empty where no direct call is to be expected."""
        expected = called_directly(type(layer)) and "forward" not in vars(layer)
        return [DirectCalls(layer, before, after)] if expected else []

    def __init__(self, layer: Any, before: Any, after: Any) -> None:
        function = type(layer).forward
        listener = _listeners.get(function)
        if listener is None:
            listener = _listeners[function] = _Forward(type(layer))
        self._listener, self._key, self._hooks = listener, id(layer), (before, after)
        listener.layers.setdefault(self._key, []).append(self._hooks)

    def remove(self) -> None:
        """Remove the registration; may be called twice."""
        hooks = self._listener.layers.get(self._key, [])
        if self._hooks in hooks:
            hooks.remove(self._hooks)
        if not hooks:
            self._listener.layers.pop(self._key, None)
        if not self._listener.layers:
            self._listener.remove()


class _Forward(Listener):
    """Listener of one ``forward``, for all recorded layers that have it."""

    guard = RAISING

    def __init__(self, kind: Any) -> None:
        #: The hooks of the recorders of each layer, by the layer's identity.
        self.layers: dict[int, list[tuple[Any, Any]]] = {}
        self._function = weakref.ref(kind.forward)
        self._interception = Interception(kind, "forward", self, "forward")

    def remove(self) -> None:
        self._interception.remove()
        _listeners.pop(self._function(), None)  # type: ignore[arg-type]

    def enter(self, call: InterceptedCall) -> bool:
        layer = call.args[0] if call.args else None
        direct = False
        for before, _ in self.layers.get(id(layer), ()):
            if not before.called:
                before(layer, call.args[1:], call.kwargs)
                direct = True
            before.called = False
        return direct

    def exit(self, call: InterceptedCall, name: str, output: Any, failed: bool) -> None:
        layer = call.args[0]
        for _, after in self.layers.get(id(layer), ()):
            after(layer, None if failed else output)


def called_directly(kind: Any) -> bool:
    """Return True if the user's code defines the ``forward`` of a class of layers and may call it directly.

    Where nothing in the text of the user's modules looks like such a call, ``forward`` stays as it is.
    """
    function = getattr(kind, "forward", None)
    if not isinstance(function, FunctionType):
        return False
    return is_users(function.__code__.co_filename) and _is_called_directly(len(sys.modules))


@lru_cache(maxsize=1)
def _is_called_directly(_: int) -> bool:
    files = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
    texts = [_text(file) for file in files if isinstance(file, str) and is_users(file)]
    return any(map(_DIRECT.search, texts)) and not any(map(_COMPILES.search, texts))


@cache
def _text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace") if file.endswith(".py") else ""
    except OSError:
        return ""


class DirectCallWatch(Listener):
    """A watch of direct calls of ``forward``, of layers that nobody has hooks on yet, until `remove`.

    Hooks that the callback sets on the layer are called in the same call.

    Args:
        base: the framework's class of layers; the classes of the user's code that derive from it are watched.
        called: called with the layer before each call.
    """

    guard = RAISING

    def __init__(self, base: Any, called: Callable[[Any], None]) -> None:
        self._called, self._again = called, False
        functions = {kind.forward: kind for kind in _below(base) if called_directly(kind)}
        self._interceptions = [Interception(kind, "forward", self, "forward") for kind in functions.values()]

    def remove(self) -> None:
        while self._interceptions:
            self._interceptions.pop().remove()

    def instead(self, call: InterceptedCall, name: str) -> Callable[[], Any] | None:
        """Report the call, and begin it again if hooks were set on the layer."""
        layer = call.args[0] if call.args else None
        if self._again or layer is None:
            return None
        self._called(layer)
        listener = _listeners.get(type(layer).forward)
        if listener is None or any(each is listener for each in call.listeners) or id(layer) not in listener.layers:
            return None
        return partial(self._begin_again, type(layer).forward, call)

    def _begin_again(self, forward: Callable[..., Any], call: InterceptedCall) -> Any:
        self._again = True
        try:
            return forward(*call.args, **call.kwargs)
        finally:
            self._again = False


def _below(base: Any) -> Iterator[Any]:
    for kind in base.__subclasses__():
        yield kind
        yield from _below(kind)
