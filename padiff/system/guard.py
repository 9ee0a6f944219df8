"""Guards that keep errors of padiff from the user's training."""

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
    """An error of padiff, as text, because the exception object would keep the training's tensors alive.

    Attributes:
        text: type and message of the error, and the line of padiff that raised it.
        modules: names of padiff's modules on the error's traceback, outermost first.
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
    """A guard that stops errors of padiff in hooks, wrappers and methods that the user's code calls.

    Such a function calls padiff's code by `run`. A function whose speed matters uses ``try: ... except Exception as
    error: guard.catch(error)`` instead, and does nothing while the guard is tripped.

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
            Exception: the error, if the guard raises errors, or if a signal handler of the user raised it.
        """
        if self._raises:
            raise
        reraise_from_signal_handler(error)
        self.tripped = True
        if self._failed is not None:
            self._failed(Failure.from_error(error))

    def reset(self) -> None:
        """Clear `tripped`, so that hooks work again."""
        self.tripped = False


class Strictness:
    """Whether an error in the search for a cause ends a comparison: in the project's own tests only.

    Attributes:
        raises: True to raise the error.
    """

    raises = False


def failure_of(error: Exception) -> Failure:
    """Return the description of an error in a search whose result a comparison can do without.

    Raises:
        Exception: the error, where `Strictness.raises` is set, or a signal handler of the user raised it.
    """
    reraise_from_signal_handler(error)
    if Strictness.raises:
        raise error
    return Failure.from_error(error)


def weakly(method: Callable[[Failure], None]) -> Callable[[Failure], None]:
    """Return a function that calls a method only while the method's object lives.

    Hooks on a model hold this function, so that they do not keep a recorder alive.
    """
    alive = weakref.WeakMethod(method)

    def call(failure: Failure) -> None:
        living = alive()
        if living is not None:
            living(failure)

    return call


#: A guard that raises each error, for tools that a person calls directly.
RAISING = Guard(raises=True)


def guarded(
    default: Any = None, passing: tuple[type[Exception], ...] = ()
) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Return a decorator for methods of objects with an attribute `guard`, which stops the method's errors.

    Args:
        default: the result after an error.
        passing: errors that are raised to the caller.
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
    """Raise an error again if a signal handler raised it, as such an error is the user's.

    A signal handler may interrupt any line of padiff. Call this in an ``except Exception`` clause.
    """
    codes = {frame.f_code for frame, _ in _frames(error.__traceback__)}
    if any(_code(signal.getsignal(number)) in codes for number in signal.valid_signals()):
        raise error


class Tolerated:
    """Context manager that suppresses errors of its block, except errors that a signal handler raised."""

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
