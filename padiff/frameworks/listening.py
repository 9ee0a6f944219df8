"""Listening to the calls of functions, wherever and however they were bound before.

A function that somebody imported by name, or keeps in a class, a default argument, a dictionary or a
`functools.partial`, is the same object everywhere. So no other is put in its place: for as long as somebody listens,
the object has other code, which takes the same parameters and calls the old code between the listeners. Identity, name,
signature and source stay as they are, and afterwards the object has its old code object again. All state lies in the
code: two that listen to one function share it, and the last one to go restores it, in whatever order they go.

What is written in C has no code of Python's. It is replaced where it is named, by a function that has some: whoever
bound it before calls what it was, and is not heard.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FrameType, FunctionType
from typing import Any, Protocol

from padiff.system.guard import Guard

# Stands among a code's constants where the object that it calls will be.
_PLACE = "what is called instead"


@dataclass(frozen=True, slots=True)
class Heard:
    """A call that is heard.

    Attributes:
        function: what was called, as it is when nobody listens.
        args, kwargs: what it was called with.
        caller: the frame that called it.
        entries: all who listen to the function, and what they call it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    caller: FrameType | None
    entries: tuple[tuple[Listener, str], ...]

    @property
    def listeners(self) -> list[Listener]:
        """All who listen to the function."""
        return [listener for listener, _ in self.entries]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parameters that may be given by position."""
        return _parameters(self.function)[0]

    def arguments(self) -> dict[str, Any]:
        """What each parameter was given, by its name, and the default of those that were given nothing.

        What has no name is left out.
        """
        names, defaults = _parameters(self.function)
        return {**defaults, **dict(zip(names, self.args)), **self.kwargs}


#: Errors of reading the arguments of a call whose form padiff does not know. Such a call is not recorded.
UNKNOWN_CALL = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)


class Listener(Protocol):
    """Hears of a function's calls.

    One with a method ``instead(call, name)`` may return a function to call in the place of the function, without
    arguments; or None.

    Attributes:
        guard: stops errors of the listener.
    """

    guard: Guard

    def enter(self, call: Heard) -> bool:
        """A call begins. Returns whether to hear of its end."""

    def leave(self, call: Heard, name: str, output: Any, failed: bool) -> None:
        """It ended; ``name`` is what the listener called the function. An exception that it ended in goes on."""


class _Calls:
    """What the code that is put into a function calls.

    Attributes:
        original: the function as it was.
        listeners: who listens, and what they call the function. Replaced, never edited: other threads may read it.
        restore: has the function be as it was.
    """

    def __init__(self, original: Callable[..., Any], restore: Callable[[], None]) -> None:
        self.original, self.restore = original, restore
        self.listeners: tuple[tuple[Listener, str], ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Above this frame is the function's own.
        call = Heard(self.original, args, kwargs, sys._getframe(1).f_back, self.listeners)
        hearing, instead = [], None
        for listener, name in call.entries:
            if listener.guard.run(listener.enter, call):
                hearing.append((listener, name))
            if instead is None and hasattr(listener, "instead"):
                instead = listener.guard.run(listener.instead, call, name)
        output, failed = None, True
        try:
            output = instead() if instead is not None else self.original(*args, **kwargs)
            failed = False
        finally:
            for listener, name in hearing:
                listener.guard.run(listener.leave, call, name, output, failed)
        return output


class Listening:
    """Has a listener hear of a function's calls, until `remove`.

    Args:
        owner: the module or class that has the function.
        attribute: what it is called there.
        listener: who hears.
        name: what the listener calls it.
    """

    def __init__(self, owner: Any, attribute: str, listener: Listener, name: str) -> None:
        function = getattr(owner, attribute)
        calls = _calls_of(function)
        if calls is None:
            calls = _in_code(function) if isinstance(function, FunctionType) else _in_place(owner, attribute, function)
        self._entry = (listener, name)
        calls.listeners = (*calls.listeners, self._entry)
        self._calls: _Calls | None = calls

    @property
    def function(self) -> Callable[..., Any] | None:
        """What `Heard.function` is in its calls; `None` once it is removed."""
        return self._calls.original if self._calls is not None else None

    def remove(self) -> None:
        calls = self._calls
        if calls is not None:
            calls.listeners = tuple(each for each in calls.listeners if each is not self._entry)
            if not calls.listeners:
                calls.restore()
        self._calls = None  # if this fails, it can be done again


def _calls_of(function: Any) -> _Calls | None:
    """What a function calls that is listened to already."""
    code = getattr(function, "__code__", None)
    return next((const for const in getattr(code, "co_consts", ()) if isinstance(const, _Calls)), None)


#: The code that a function was given when it was last listened to, and its own then. It is given the same again: what
#: torch compiles is compiled for one code object, and would be compiled anew for each that it meets.
_given: weakref.WeakKeyDictionary[FunctionType, tuple[CodeType, CodeType, _Calls]] = weakref.WeakKeyDictionary()


def _in_code(function: FunctionType) -> _Calls:
    old, new, calls = _given.get(function, (None, None, None))
    if old is not function.__code__ or new is None or calls is None:
        old = function.__code__
        new, calls = _listened_to(function, old)
        _given[function] = old, new, calls
    function.__code__ = new
    return calls


def _listened_to(function: FunctionType, old: CodeType) -> tuple[CodeType, _Calls]:
    # Nothing but its code is ever another: so this one, with the old code, does what the function does.
    copy = FunctionType(old, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    copy.__dict__.update(function.__dict__)
    alive = weakref.ref(function)

    def restore() -> None:
        function = alive()
        if function is not None and function.__code__ is new:  # somebody may have set another one meanwhile: it stays
            function.__code__ = old

    calls = _Calls(copy, restore)
    new = _code_like(old, calls)
    return new, calls


@lru_cache(maxsize=256)
def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names of the parameters that may be given by position, and the defaults of all."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return (), {}
    names = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    return names, {p.name: p.default for p in parameters if p.default is not p.empty}


def _in_place(owner: Any, attribute: str, function: Callable[..., Any]) -> _Calls:
    own = vars(owner).get(attribute)

    def restore() -> None:
        if vars(owner).get(attribute) is not stands_in:
            return
        # What was inherited is uncovered again, not copied onto the class.
        setattr(owner, attribute, own) if own is not None else delattr(owner, attribute)

    def stands_in(*args: Any, **kwargs: Any) -> Any: ...

    calls = _Calls(function, restore)
    stands_in.__code__ = _code_like(stands_in.__code__, calls)
    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        if isinstance(getattr(function, name, None), str):
            setattr(stands_in, name, getattr(function, name))
    setattr(owner, attribute, stands_in)
    return calls


def _code_like(old: CodeType, calls: _Calls) -> CodeType:
    """Code with another's parameters, name and place in the source, which calls an object with what it is given."""
    names = old.co_varnames
    keywords = old.co_argcount + old.co_kwonlyargcount
    varargs = bool(old.co_flags & CO_VARARGS)
    code = _template(
        names[: old.co_posonlyargcount],
        names[old.co_posonlyargcount : old.co_argcount],
        names[old.co_argcount : keywords],
        names[keywords] if varargs else "",
        names[keywords + varargs] if old.co_flags & CO_VARKEYWORDS else "",
        old.co_freevars,
    )
    consts = tuple(calls if const == _PLACE else const for const in code.co_consts)
    more: dict[str, Any] = {"co_qualname": old.co_qualname} if hasattr(old, "co_qualname") else {}
    return code.replace(
        co_consts=consts,
        co_name=old.co_name,
        co_filename=old.co_filename,
        co_firstlineno=old.co_firstlineno,
        **more,
    )


@lru_cache(maxsize=1024)
def _template(
    positional_only: tuple[str, ...],
    positional: tuple[str, ...],
    keyword_only: tuple[str, ...],
    varargs: str,
    varkw: str,
    free: tuple[str, ...],
) -> CodeType:
    taken = {*positional_only, *positional, *keyword_only, varargs, varkw, *free}
    called = next(name for name in (f"called{'_' * k}" for k in range(len(taken) + 1)) if name not in taken)
    star = [f"*{varargs}"] if varargs else ["*"] if keyword_only else []
    double = [f"**{varkw}"] if varkw else []
    slash = ["/"] if positional_only else []
    takes = ", ".join([*positional_only, *slash, *positional, *star, *keyword_only, *double])
    given = [*positional_only, *positional, *([f"*{varargs}"] if varargs else [])]
    gives = ", ".join([*given, *(f"{name}={name}" for name in keyword_only), *double])
    # A function's code must have as many free variables as the function: they are named, after the return.
    source = (
        f"def around({', '.join(free)}):\n"
        f"    def function({takes}):\n"
        f"        {called} = {_PLACE!r}\n"
        f"        return {called}({gives})\n"
        f"        ({''.join(f'{name}, ' for name in free)})\n"
        "    return function\n"
    )
    code = compile(source, "<padiff>", "exec", dont_inherit=True)
    for _ in range(2):
        code = next(const for const in code.co_consts if isinstance(const, CodeType))
    return code
