"""Seeing paddle's functional calls and tensor methods.

paddle has no means for it: for as long as recording is on, and no longer, the functions in its modules and the methods
of its tensor class are replaced by ones that call back. A name that somebody imported before (``from
paddle.nn.functional import relu``) is not seen.
"""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import paddle

from padiff.errors import UsageError
from padiff.frameworks.api_names import common_name
from padiff.frameworks.base import OnCall


class Seeing:
    """The replacements, made when this is, and undone by `remove`.

    Args:
        called: called with the common name and the output of each call made on this thread, from outside another one.
        third_party: dotted names of further functions (``my_ops.fused``), or of modules, whose public functions
            all count.
    """

    def __init__(self, called: OnCall, third_party: Sequence[str] = ()) -> None:
        self._called = called
        self._thread = threading.get_ident()
        self._depth = 0
        self._undo: list[Callable[[], None]] = []
        try:
            for owner, name, common in (*_framework_calls(), *_third_party_calls(third_party)):
                self._replace(owner, name, common)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, common: str) -> None:
        original = getattr(owner, name)
        own = vars(owner).get(name)

        @functools.wraps(original)
        def seen(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            self._depth += 1
            try:
                output = original(*args, **kwargs)
            finally:
                self._depth -= 1
            if not self._depth:
                self._called(common, output)
            return output

        setattr(owner, name, seen)
        # What was inherited is uncovered again, not copied onto the class.
        self._undo.append((lambda: setattr(owner, name, own)) if own is not None else (lambda: delattr(owner, name)))


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
