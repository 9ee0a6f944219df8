"""Interception of function calls, of methods of one object, and of direct calls of ``forward``."""

from __future__ import annotations

import inspect
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from inspect import CO_VARARGS, CO_VARKEYWORDS
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, Protocol

from padiff.system.frames import is_own, is_users, outside_frame
from padiff.system.guard import RAISING, Guard

# A placeholder among the constants of a code object, which `_code_like` replaces by the object to call.
_PLACE = "what is called instead"


@dataclass(frozen=True, slots=True)
class InterceptedCall:
    """An intercepted call.

    Attributes:
        function: the original function, without interception.
        args, kwargs: the arguments of the call.
        caller: the frame of the caller.
        entries: all listeners of the function, each with its name for the function.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    caller: FrameType | None
    entries: tuple[tuple[Listener, str], ...]

    @property
    def listeners(self) -> list[Listener]:
        """All listeners of the function."""
        return [listener for listener, _ in self.entries]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the function's positional parameters."""
        return _parameters(self.function)[0]

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by parameter name, defaults included. Arguments without a parameter name are omitted."""
        names, defaults = _parameters(self.function)
        return {**defaults, **dict(zip(names, self.args)), **self.kwargs}


#: Errors of reading the arguments of a call that has an unknown form. Such a call is not recorded.
UNKNOWN_CALL = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)


class Listener(Protocol):
    """A listener of a function's calls.

    A listener may also have a method ``instead(call, name)``, which returns a function without arguments to call in
    place of the intercepted function, or None.

    Attributes:
        guard: stops errors of the listener.
    """

    guard: Guard

    def enter(self, call: InterceptedCall) -> bool:
        """Note that a call begins; return True to have `exit` called at its end."""
        return False

    def exit(self, call: InterceptedCall, name: str, output: Any, failed: bool) -> None:
        """Note that a call has ended.

        Args:
            name: the listener's name for the function.
            output: the result; `None` if the call failed.
            failed: True if the call raised an exception, which still propagates afterwards.
        """
        return


class _Calls:
    """The object that the new code of an intercepted function calls.

    Attributes:
        original: the function without interception.
        listeners: the listeners, each with its name for the function. Replaced, never edited: other threads may read
            the tuple.
        restore: removes the interception.
    """

    def __init__(self, original: Callable[..., Any], restore: Callable[[], None]) -> None:
        self.original, self.restore = original, restore
        self.listeners: tuple[tuple[Listener, str], ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # The frame above this one is the intercepted function's.
        call = InterceptedCall(self.original, args, kwargs, sys._getframe(1).f_back, self.listeners)
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
                listener.guard.run(listener.exit, call, name, output, failed)
        return output


class Interception:
    """A registration of a listener on a function, until `remove`.

    Args:
        owner: the module or class that has the function.
        attribute: the function's name in the owner.
        listener: the listener to call.
        name: the listener's name for the function.
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
        """The original function (`InterceptedCall.function` of its calls); `None` after `remove`."""
        return self._calls.original if self._calls is not None else None

    def remove(self) -> None:
        calls = self._calls
        if calls is not None:
            calls.listeners = tuple(each for each in calls.listeners if each is not self._entry)
            if not calls.listeners:
                calls.restore()
        self._calls = None  # last, so that `remove` can be repeated after an error


def _calls_of(function: Any) -> _Calls | None:
    """Return the `_Calls` of a function that is intercepted already, else `None`."""
    code = getattr(function, "__code__", None)
    return next((const for const in getattr(code, "co_consts", ()) if isinstance(const, _Calls)), None)


#: By function: the original code, the intercepting code and its `_Calls`, from the last interception. The same code is
#: reused, because torch compiles a function once per code object and would recompile for a new one.
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
    # Interception changes only the code, so this copy with the old code behaves like the function.
    copy = FunctionType(old, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    copy.__dict__.update(function.__dict__)
    alive = weakref.ref(function)

    def restore() -> None:
        function = alive()
        if function is not None and function.__code__ is new:  # code that another program has set since stays
            function.__code__ = old

    calls = _Calls(copy, restore)
    new = _code_like(old, calls)
    return new, calls


@lru_cache(maxsize=256)
def _parameters(function: Callable[..., Any]) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the names of the positional parameters, and the defaults of all parameters."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a builtin without a signature
        return (), {}
    names = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    return names, {p.name: p.default for p in parameters if p.default is not p.empty}


def _in_place(owner: Any, attribute: str, function: Callable[..., Any]) -> _Calls:
    before = vars(owner).get(attribute)

    def restore() -> None:
        if vars(owner).get(attribute) is not stands_in:
            return
        # An inherited function becomes visible again, and is not copied onto the class.
        setattr(owner, attribute, before) if before is not None else delattr(owner, attribute)

    def stands_in(*args: Any, **kwargs: Any) -> Any: ...

    calls = _Calls(function, restore)
    stands_in.__code__ = _code_like(stands_in.__code__, calls)
    for name in ("__name__", "__qualname__", "__doc__", "__module__"):
        if isinstance(getattr(function, name, None), str):
            setattr(stands_in, name, getattr(function, name))
    setattr(owner, attribute, stands_in)
    return calls


def _code_like(old: CodeType, calls: _Calls) -> CodeType:
    """Return code with the parameters, name and source position of ``old``, which passes its arguments to ``calls``."""
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
    names = {*positional_only, *positional, *keyword_only, varargs, varkw, *free}
    called = next(name for name in (f"called{'_' * k}" for k in range(len(names) + 1)) if name not in names)
    star = [f"*{varargs}"] if varargs else ["*"] if keyword_only else []
    double = [f"**{varkw}"] if varkw else []
    slash = ["/"] if positional_only else []
    takes = ", ".join([*positional_only, *slash, *positional, *star, *keyword_only, *double])
    arguments = [*positional_only, *positional, *([f"*{varargs}"] if varargs else [])]
    gives = ", ".join([*arguments, *(f"{name}={name}" for name in keyword_only), *double])
    # A function's code must have as many free variables as the function: the code names them after the return.
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


class CallSource(Protocol):
    """A source of what the training's calls use instead of their own."""

    def is_active(self) -> bool:
        """Return True to feed a call that begins now."""


class OutermostCalls(Listener):
    """A listener of functions on one thread, until `remove`; of nested calls, only the outermost counts.

    Args:
        functions: the module or class that has each function, its name there, and the listener's name for it.
    """

    def __init__(self, functions: Iterable[tuple[Any, str, str]], guard: Guard = RAISING) -> None:
        self.guard = guard
        self._inside = False
        self._thread = threading.get_ident()
        self._listening: list[Interception] = []
        try:
            for owner, attribute, name in functions:
                self._listening.append(Interception(owner, attribute, self, name))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Stop listening."""
        while self._listening:
            self._listening[-1].remove()
            self._listening.pop()

    def _listens(self) -> bool:
        return not self._inside and threading.get_ident() == self._thread


def naming_users_line() -> OutermostCalls:
    """Return a listener that gives a warning whose place is in padiff that of the user's line, until `remove`.

    Functions warn of the line that called them, which is padiff's while their calls are recorded.
    """
    shown = "_showwarnmsg"  # what C code calls, too
    listener = OutermostCalls([(warnings, shown, shown)] if hasattr(warnings, shown) else [])
    listener.enter = _name_users_line  # type: ignore[method-assign]
    return listener


def _name_users_line(call: InterceptedCall) -> bool:
    (message,), frame = call.args, call.caller
    if is_own(message.filename):
        while frame is not None and frame.f_code.co_filename != message.filename:
            frame = frame.f_back
        frame = outside_frame(frame)
        if frame is not None:
            message.filename, message.lineno = frame.f_code.co_filename, frame.f_lineno
    return False


#: ``around(method, *args, **kwargs)``: calls the method, or does something else.
Around = Callable[..., Any]


class Override:
    """An override of a method of one object, until `remove` or until this instance is garbage collected.

    The override intercepts the function of the class, so the object stays unchanged, and its copies and pickles have no
    override. If the class does not define the method (it is an attribute of the object, or a wrapper forwards it), the
    override is set as an attribute of the object.

    Args:
        owner: the object.
        name: the method.
        around: called with the original method, followed by the arguments of the call.
        guard: stops errors of finding the override; the original method is called after such an error.
    """

    def __init__(self, owner: Any, name: str, around: Around, guard: Guard = RAISING) -> None:
        self._name, self.around = name, around
        method = getattr(owner, name)
        function = getattr(method, "__func__", None)
        self._remove: Callable[[], None]
        if isinstance(function, FunctionType) and method.__self__ is owner and name not in vars(owner):
            self.owner = weakref.ref(owner)
            holder = next((each for each in type(owner).__mro__ if vars(each).get(name) is function), type(owner))
            self._remove = Interception(holder, name, _Redirect(weakref.ref(self), guard), name).remove
            weakref.finalize(self, self._remove)
        else:
            self._remove = _set_on(owner, name, partial(around, method))

    def remove(self) -> None:
        self._remove()


class _Redirect(Listener):
    """A listener that redirects a function's calls on the owner to an override."""

    __slots__ = ("_override", "guard")

    def __init__(self, override: weakref.ref[Override], guard: Guard) -> None:
        self._override, self.guard = override, guard

    def serving(self, owner: Any) -> Override | None:
        """Return the override if it belongs to this object, else `None`."""
        override = self._override()
        return override if override is not None and override.owner() is owner else None

    def instead(self, call: InterceptedCall, name: str) -> Callable[[], Any] | None:
        owner = call.args[0] if call.args else None
        if self.serving(owner) is None:
            return None
        # Of several overrides the last one is the outermost; the listener that is called first combines them all.
        method: Callable[..., Any] = partial(call.function, owner)
        for each in call.listeners:
            override = each.serving(owner) if isinstance(each, _Redirect) else None
            if override is not None:
                method = partial(override.around, method)
        return partial(method, *call.args[1:], **call.kwargs)


def _set_on(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute in an object's `vars`, and return a function that restores the previous attribute.

    `setattr` would not do: wrappers forward it to the object that they wrap.
    """
    before = vars(owner).get(name)
    vars(owner)[name] = value

    def remove() -> None:
        if vars(owner).get(name) is not value:
            return  # another program has set the attribute since: its value stays
        if before is not None:
            vars(owner)[name] = before
        else:
            del vars(owner)[name]

    return remove


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
