"""Seeing paddle's functional calls and tensor methods.

paddle has no means for it: for as long as recording is on, and no longer, the functions in its modules and the methods
of its tensor class have other code (`padiff.frameworks.listening`). So it does not matter how a call reaches them: by
``F.relu``, by a name that was imported before, by a default argument, a dictionary, a `functools.partial`.

Seen are calls that a model makes, and the layers of paddle; not what paddle's functions call themselves, as in torch.

Not seen are:

* what is written in C and was bound before: ``from paddle.linalg import matmul`` (``paddle.matmul`` is a function of
  Python's and is seen), ``add = paddle.Tensor.__add__``, anything of ``paddle._C_ops``;
* calls on other threads, and calls inside of what `to_static` compiled.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any

import paddle

from padiff.errors import UsageError
from padiff.frameworks.api_names import common_name
from padiff.frameworks.hooking import OnCall
from padiff.frameworks.listening import Heard, Listening
from padiff.system.guard import RAISING, Guard

# Where paddle's functions are: what is called from there is called by one of them.
_INTERNAL = (
    "paddle.nn.functional.", "paddle.tensor.", "paddle.linalg", "paddle.utils.decorator_utils", "paddle.base.",
    "paddle.incubate.nn.functional.",
)  # fmt: skip


class Seeing:
    """Listens to the functions from when it is made until `remove`.

    Args:
        called: called with the common name and the output of each call made on this thread, from outside another one.
        third_party: dotted names of further functions (``my_ops.fused``), or of modules, whose public functions
            all count.
    """

    def __init__(self, called: OnCall, third_party: Sequence[str] = (), guard: Guard = RAISING) -> None:
        self.guard = guard
        # In a tuple: to_static follows what is called here, too, and mistakes a method that is an attribute for one of
        # the object's own.
        self._called = (called,)
        self._thread = threading.get_ident()
        self._inside = False
        self._listening: list[Listening] = []
        known: set[int] = set()
        try:
            for owner, name, common in (*_framework_calls(), *_third_party_calls(third_party)):
                function = getattr(owner, name)
                if id(function) not in known:  # one function may have several names
                    self._listening.append(Listening(owner, name, self, common))
                    known |= {id(function), id(getattr(owner, name))}
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        while self._listening:
            self._listening[-1].remove()
            self._listening.pop()

    def enter(self, call: Heard) -> bool:
        if self._inside or threading.get_ident() != self._thread or is_internal(call.caller):
            return False
        if not paddle.in_dynamic_mode():
            return False
        self._inside = True
        return True

    def leave(self, call: Heard, name: str, output: Any, failed: bool) -> None:
        self._inside = False
        if not failed:
            self._called[0](name, output)


def is_internal(caller: FrameType | None) -> bool:
    return caller is not None and str(caller.f_globals.get("__name__", "")).startswith(_INTERNAL)


def _framework_calls() -> Iterator[tuple[Any, str, str]]:
    for owner in (paddle, paddle.nn.functional, paddle.linalg, paddle.Tensor):
        for name in dir(owner):
            common = common_name(name)
            if (
                common is not None
                and callable(getattr(owner, name, None))
                and not isinstance(getattr(owner, name), type)
            ):
                yield owner, name, common


def _third_party_calls(names: Sequence[str]) -> Iterator[tuple[Any, str, str]]:
    for dotted in names:
        module, function = _resolved(dotted)
        if function is not None:
            yield module, function, function
        else:
            for name, value in vars(module).items():
                if not name.startswith("_") and callable(value) and not isinstance(value, type):
                    yield module, name, name


def _resolved(dotted: str) -> tuple[ModuleType, str | None]:
    try:
        return importlib.import_module(dotted), None
    except ImportError:
        pass
    path, _, function = dotted.rpartition(".")
    try:
        module = importlib.import_module(path)
        if callable(getattr(module, function)):
            return module, function
    except (ImportError, ValueError, AttributeError):
        pass
    raise UsageError(
        f"PADDLE_THIRDPARTY_API: {dotted!r} is neither a module nor a function of one; give dotted names, "
        "separated by commas"
    )
