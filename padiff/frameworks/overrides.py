"""A function around the calls of a method of one object, of which the object knows nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

from padiff.frameworks.listening import Heard, Listening
from padiff.system.guard import RAISING, Guard

#: ``around(method, *args, **kwargs)``: calls the method, or does something else.
Around = Callable[..., Any]


class Override:
    """Has a function called in the place of a method of one object, until `remove`, or until nobody holds this.

    The class's function is listened to, so the object is as it was: copies and pickles of it have nothing of this. Only
    where the method is none of the object's class (set on the object, or handed on by a wrapper) it is set on the
    object.

    Args:
        owner: the object.
        name: the method.
        around: called with the method as it was, then with what the method is called with.
        guard: stops errors of the look-up; then the method is called as it was.
    """

    def __init__(self, owner: Any, name: str, around: Around, guard: Guard = RAISING) -> None:
        self._name, self.around = name, around
        method = getattr(owner, name)
        function = getattr(method, "__func__", None)
        self._remove: Callable[[], None]
        if isinstance(function, FunctionType) and method.__self__ is owner and name not in vars(owner):
            self.owner = weakref.ref(owner)
            holder = next((each for each in type(owner).__mro__ if vars(each).get(name) is function), type(owner))
            self._remove = Listening(holder, name, _Redirect(weakref.ref(self), guard), name).remove
            weakref.finalize(self, self._remove)
        else:
            self._remove = _set_on(owner, name, partial(around, method))

    def remove(self) -> None:
        self._remove()


class _Redirect:
    """Hears the calls of a function for an override, and answers for those of the owner."""

    __slots__ = ("_override", "guard")

    def __init__(self, override: weakref.ref[Override], guard: Guard) -> None:
        self._override, self.guard = override, guard

    def serving(self, owner: Any) -> Override | None:
        """The override, if it is of this object."""
        override = self._override()
        return override if override is not None and override.owner() is owner else None

    def enter(self, call: Heard) -> bool:
        return False

    def leave(self, call: Heard, name: str, output: Any, failed: bool) -> None:
        """Never called, as `enter` does not ask for it."""

    def instead(self, call: Heard, name: str) -> Callable[[], Any] | None:
        owner = call.args[0] if call.args else None
        if self.serving(owner) is None:
            return None
        # Of several the last one is the outermost; whichever is asked first answers for all.
        method: Callable[..., Any] = partial(call.function, owner)
        for each in call.listeners:
            override = each.serving(owner) if isinstance(each, _Redirect) else None
            if override is not None:
                method = partial(override.around, method)
        return partial(method, *call.args[1:], **call.kwargs)


def _set_on(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute on an object; returns what uncovers what was there before.

    On the very object: wrappers hand what is set as an attribute on to what they wrap.
    """
    before = vars(owner).get(name)
    vars(owner)[name] = value

    def remove() -> None:
        if vars(owner).get(name) is not value:
            return  # somebody set another one over this: that one stays
        if before is not None:
            vars(owner)[name] = before
        else:
            del vars(owner)[name]

    return remove
