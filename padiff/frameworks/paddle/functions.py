"""Hooks on paddle's functions and tensor methods.

paddle has no function modes. So only while recording is on, the functions in its modules and the methods of its tensor
class have other code (`padiff.frameworks.interception`). The way of reaching a function does not matter: ``F.relu``, a
name imported before, a default argument, a dictionary, a `functools.partial`.

Calls by the model and by paddle's layers are recorded. Calls inside of paddle's functions are not, as in torch.

Further calls that are not recorded:

* functions written in C that were bound before: ``from paddle.linalg import matmul`` (``paddle.matmul`` is a Python
  function and is recorded), ``add = paddle.Tensor.__add__``, all of ``paddle._C_ops``;
* calls on other threads, and calls in code compiled by `to_static`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType, ModuleType
from typing import Any

import paddle

from padiff.errors import UsageError
from padiff.frameworks.api_names import common_name
from padiff.frameworks.hooking import OnCall
from padiff.frameworks.interception import InterceptedCall, OutermostCalls
from padiff.system.guard import RAISING, Guard

# Modules of paddle's functions: a call from one of these modules is made by paddle.
_INTERNAL = (
    "paddle.nn.functional.", "paddle.tensor.", "paddle.linalg", "paddle.utils.decorator_utils", "paddle.base.",
    "paddle.incubate.nn.functional.",
)  # fmt: skip


class FunctionHooks(OutermostCalls):
    """A listener of the functions, active from its creation until `remove`.

    Args:
        called: called with the common name and the output of each outermost call on this thread.
        third_party: dotted names of further functions (``my_ops.fused``), or of modules, which stand for all their
            public functions.
    """

    def __init__(self, called: OnCall, third_party: Sequence[str] = (), guard: Guard = RAISING) -> None:
        # In a tuple, because to_static traces these calls too, and treats a method in an attribute as one of this
        # object's.
        self._called = (called,)
        super().__init__(_distinct((*_framework_calls(), *_third_party_calls(third_party))), guard)

    def enter(self, call: InterceptedCall) -> bool:
        if not self._listens() or is_internal(call.caller) or not paddle.in_dynamic_mode():
            return False
        self._inside = True
        return True

    def exit(self, call: InterceptedCall, name: str, output: Any, failed: bool) -> None:
        self._inside = False
        if not failed:
            self._called[0](name, output)


def is_internal(caller: FrameType | None) -> bool:
    return caller is not None and str(caller.f_globals.get("__name__", "")).startswith(_INTERNAL)


def _distinct(calls: Iterable[tuple[Any, str, str]]) -> Iterator[tuple[Any, str, str]]:
    """Yield each function once, as one function may have several names; its code is another one once it was yielded."""
    seen: set[int] = set()
    for owner, name, common in calls:
        function = getattr(owner, name)
        if id(function) not in seen:
            yield owner, name, common
            seen |= {id(function), id(getattr(owner, name))}


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
