"""The boundary between padiff and the user's training: an error of padiff's own stops there."""

from __future__ import annotations

import functools
import signal
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

# Characters of an error's text that a message repeats.
_LETTERS = 200


@dataclass(frozen=True, slots=True)
class Failure:
    """An error of padiff's own, as text: the error itself would keep the training's tensors alive.

    Attributes:
        text: type and message of the error, and the line of padiff that raised it.
        modules: names of padiff's modules that the error passed, outermost first.
    """

    text: str
    modules: tuple[str, ...]

    @classmethod
    def from_error(cls, error: BaseException) -> Failure:
        frames = [(frame, line) for frame, line in _frames(error.__traceback__) if _module(frame).startswith("padiff")]
        message = " ".join(str(error).split())
        text = f"{type(error).__name__}: {message[:_LETTERS]}" if message else type(error).__name__
        if frames:
            frame, line = frames[-1]
            text += f" ({_module(frame).replace('.', '/')}.py:{line})"
        return cls(text, tuple(dict.fromkeys(_module(frame) for frame, _ in frames)))


class Guard:
    """Stops errors of padiff's own where the user's code calls padiff: in hooks, wrappers and a recorder's methods.

    Such a function calls padiff's part by `run`. Where each call counts it has ``try: ... except Exception as error:
    guard.catch(error)`` instead, and does nothing while the guard is tripped.

    Args:
        failed: called with each failure.
        raises: raise errors instead (``on_error="raise"``).

    Attributes:
        tripped: True after an error, until `reset`.
    """

    def __init__(self, failed: Callable[[Failure], None] | None = None, raises: bool = False) -> None:
        self._failed, self._raises = failed, raises
        self.tripped = False

    def run(self, call: Callable[..., _Result], *args: Any) -> _Result | None:
        """Call a function, unless the guard is tripped; return its result, or None after an error."""
        return None if self.tripped else self.attempt(call, *args)

    def attempt(self, call: Callable[..., _Result], *args: Any) -> _Result | None:
        """Call a function, tripped or not; return its result, or None after an error."""
        try:
            return call(*args)
        except Exception as error:
            self.catch(error)
            return None

    def catch(self, error: Exception) -> None:
        """Stop an error. Call this in the ``except`` clause.

        Raises:
            Exception: the error, where errors are raised, or where a signal handler of the user's raised it.
        """
        if self._raises:
            raise
        reraise_from_signal_handler(error)
        self.tripped = True
        if self._failed is not None:
            self._failed(Failure.from_error(error))

    def reset(self) -> None:
        """Let hooks work again."""
        self.tripped = False


def weakly(method: Callable[[Failure], None]) -> Callable[[Failure], None]:
    """Return a function that calls a method as long as its object lives: hooks on a model must not keep a recorder."""
    alive = weakref.WeakMethod(method)

    def call(failure: Failure) -> None:
        living = alive()
        if living is not None:
            living(failure)

    return call


#: For callers who want each error: tools that a person calls, as opposed to a training.
RAISING = Guard(raises=True)


def guarded(
    default: Any = None, passing: tuple[type[Exception], ...] = ()
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Guard a method of an object with an attribute `guard`.

    Args:
        default: the result after an error.
        passing: errors that the caller asked for, which are raised.
    """

    def decorate(method: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        @functools.wraps(method)
        def call(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            try:
                return method(*args, **kwargs)
            except passing:
                raise
            except Exception as error:
                guard: Guard = args[0].guard  # type: ignore[attr-defined]
                guard.catch(error)
                return default  # type: ignore[no-any-return]

        return call

    return decorate


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def reraise_from_signal_handler(error: BaseException) -> None:
    """Raise an error that a signal handler raised, which may interrupt any line of padiff's: the error is the user's.

    Call this in an ``except Exception`` clause.
    """
    codes = {frame.f_code for frame, _ in _frames(error.__traceback__)}
    if any(_code(signal.getsignal(number)) in codes for number in signal.valid_signals()):
        raise error


class Tolerated:
    """Suppress the errors of a block, other than those that a signal handler raised."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        reraise_from_signal_handler(error)
        return True


def _code(handler: Any) -> CodeType | None:
    function = getattr(handler, "__func__", handler)
    return getattr(function, "__code__", None)
