"""Override of a method of one object, without setting an attribute on the object."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

from padiff.frameworks.interception import InterceptedCall, Interception, Listener
from padiff.system.guard import RAISING, Guard

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
