"""Interception of paddle's functions and operators while a model's own code runs.

`padiff.frameworks.paddle.functions` explains the mechanism, and lists the calls that it misses.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any

import paddle

from padiff.frameworks.api_names import heard_name, parameters_of
from padiff.frameworks.hooking import FunctionListener
from padiff.frameworks.interception import InterceptedCall, Interception
from padiff.frameworks.paddle.functions import is_internal

_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)


class FunctionTracing:
    """An interceptor of functions on the thread that creates it; see `padiff.frameworks.hooking.Hearing`."""

    def __init__(self, listener: FunctionListener) -> None:
        self.listener, self.guard = listener, listener.guard
        #: `on`: calls go to the listener. `inside`: a function is running; calls that it makes are not intercepted.
        self.on = self.inside = False
        self.thread = threading.get_ident()
        self._listening: list[Interception] = []
        try:
            for owner, attribute, common in _functions():
                self._listening.append(Interception(owner, attribute, _Function(self, common), common))
        except BaseException:
            self.remove()
            raise

    def listen(self, on: bool) -> None:
        if threading.get_ident() == self.thread:
            self.on = on

    def listen_outside(self, on: bool) -> None:
        self.listen(on)

    def remove(self) -> None:
        self.on = False
        while self._listening:
            self._listening[-1].remove()
            self._listening.pop()


class _Function:
    """The listener of one function."""

    __slots__ = ("_begun", "_hearing", "_name", "guard")

    def __init__(self, hearing: FunctionTracing, name: str) -> None:
        self._hearing, self._name, self.guard = hearing, name, hearing.guard
        self._begun: Any = None

    def enter(self, call: InterceptedCall) -> bool:
        hearing = self._hearing
        if not hearing.on or hearing.inside or threading.get_ident() != hearing.thread or is_internal(call.caller):
            return False
        if not paddle.in_dynamic_mode():
            return False
        hearing.inside = True
        names = call.names or parameters_of(self._name)
        self._begun = hearing.listener.function_begins(self._name, names, call.args, call.kwargs)
        return True

    def exit(self, call: InterceptedCall, name: str, output: Any, failed: bool) -> None:
        begun, self._begun = self._begun, None
        try:
            if begun is not None and not failed:
                self._hearing.listener.function_ended(begun, output)
        finally:
            self._hearing.inside = False


@functools.cache
def _heard(owner: Any) -> tuple[tuple[str, str], ...]:
    """Return the names of an owner's functions with their common names. Cached, because an owner has thousands."""
    return tuple((name, common) for name in dir(owner) if (common := heard_name(name)) is not None)


def _functions() -> Iterator[tuple[Any, str, str]]:
    functions: set[int] = set()
    for owner in (paddle, paddle.nn.functional, paddle.linalg, paddle.Tensor):
        for name, common in _heard(owner):
            function = getattr(owner, name, None)
            # Skip ``paddle.tensor``, which is callable but also a module.
            if isinstance(function, _FUNCTIONS) and id(function) not in functions:
                functions.add(id(function))
                yield owner, name, common
    for name in ("T", "mT"):
        attribute = getattr(paddle.Tensor, name, None)
        if isinstance(attribute, property):
            yield attribute, "fget", "transpose"
