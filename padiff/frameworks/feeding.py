"""Recording and feeding of what functions draw or choose: dropout masks, and the results of topk, argmax and sort."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from padiff.frameworks.catalog import parameters_of
from padiff.frameworks.interception import UNKNOWN_CALL, CallSource, InterceptedCall, OutermostCalls
from padiff.system.guard import Guard


@dataclass(frozen=True, slots=True)
class DropoutCall:
    """A call of a function that applies dropout.

    Attributes:
        function: the function's common name.
        rate: the dropout rate, above 0.
        shape: the shape of the tensor that dropout applies to; for attention, the shape of its weights.
        between: the number of dropouts between the layers of a recurrent network, one after the other; 0 for any other
            function, which applies dropout once.
    """

    function: str
    rate: float
    shape: tuple[int, ...]
    between: int = 0


class MaskObserver(Protocol):
    """An observer of dropout masks.

    Attributes:
        guard: stops errors of the observer and of the code that calls the observer.
    """

    guard: Guard

    def is_active(self) -> bool:
        """Return True to observe a call that begins now."""

    def begins(self) -> None:
        """Note that an observed call begins."""

    def aside(self) -> AbstractContextManager[None]:
        """Return a context for calls that are padiff's, not the training's."""

    def ended(self, call: DropoutCall | None, kept: np.ndarray | None) -> None:
        """Note that an observed call has ended.

        Args:
            call: the call; `None` if it drew no mask.
            kept: the mask, nonzero where an element was kept; `None` if the mask can't be read.
        """


class MaskSource(CallSource, Protocol):
    """A source of masks that dropout functions use instead of drawing.

    Attributes:
        draws: True if a call with a fed mask also draws and discards random numbers, so that later draws stay the same.
    """

    draws: bool

    def mask(self, call: DropoutCall) -> np.ndarray | None:
        """Return the mask for a call; `None` lets the call draw its own mask."""


class DropoutFunctions(Protocol):
    """A framework's dropout functions."""

    def functions(self) -> Iterable[tuple[Any, str, str]]:
        """Yield the module, the name in the module and the common name of each dropout function."""

    def about(self, name: str, heard: InterceptedCall) -> DropoutCall | None:
        """Describe a call; return `None` if the call draws no mask (eval mode, a rate of 0 or 1)."""

    def kept(self, name: str, heard: InterceptedCall, output: Any, state: Any) -> np.ndarray | None:
        """Return the mask of a call that began in this state of the generators; `None` if it can't be read.

        The method sets the generators to the state, and does not restore them. For a recurrent network, the masks after
        each layer are stacked along the first axis.
        """

    def draw(self, name: str, heard: InterceptedCall) -> None:
        """Draw the random numbers that the call would draw, and discard them."""

    def handed_on(self, name: str, heard: InterceptedCall) -> Callable[[], Any] | None:
        """Return a function that makes the call through the framework's function overrides, or `None` if none apply.

        An override (such as a torch function mode) gets the call first, and then makes the call again.
        """

    def keeping(self, name: str, heard: InterceptedCall, kept: np.ndarray) -> Any:
        """Return the output of the call with this mask."""

    def state(self) -> Any:
        """Return the state of the random generators."""

    def restore(self, state: Any) -> None:
        """Set the random generators to a state."""


class MasksSeen(OutermostCalls):
    """Listener that passes dropout masks to an observer, without changing numbers or random generators."""

    def __init__(self, framework: DropoutFunctions, observer: MaskObserver) -> None:
        self._framework = framework
        self._observer: MaskObserver | None = observer
        self._before: Any = None
        super().__init__(framework.functions(), observer.guard)

    def remove(self) -> None:
        self._observer = None
        super().remove()

    def enter(self, call: InterceptedCall) -> bool:
        if self._observer is None or not self._listens() or not self._observer.is_active():
            return False
        self._observer.begins()
        self._before, self._inside = self._framework.state(), True
        return True

    def exit(self, call: InterceptedCall, name: str, output: Any, failed: bool) -> None:
        before, self._before = self._before, None
        try:
            if not failed and self._observer is not None:
                self._tell(call, name, output, before)
        finally:
            self._inside = False

    def _tell(self, call: InterceptedCall, name: str, output: Any, before: Any) -> None:
        assert self._observer is not None
        after = self._framework.state()
        mask = about = None
        try:
            with self._observer.aside(), suppress(*UNKNOWN_CALL):
                about = self._framework.about(name, call)
                if about is not None:
                    mask = self._framework.kept(name, call, output, before)
        finally:
            self._framework.restore(after)
        for part in mask if about is not None and about.between and mask is not None else [mask]:
            self._observer.ended(about, part)


class MasksFed(OutermostCalls):
    """Listener that makes dropout functions use the masks of a source."""

    def __init__(self, framework: DropoutFunctions, source: MaskSource) -> None:
        self._framework = framework
        self._source: MaskSource | None = source
        super().__init__(framework.functions())

    def remove(self) -> None:
        self._source = None
        super().remove()

    def instead(self, call: InterceptedCall, name: str) -> Callable[[], Any] | None:
        """Return a function that applies the source's mask, or None to let the call draw its own mask."""
        if self._source is None or not self._listens() or not self._source.is_active():
            return None
        handed_on = self._framework.handed_on(name, call)
        if handed_on is not None:
            return handed_on
        about = self._framework.about(name, call)
        mask = self._kept(about) if about is not None else None
        return None if mask is None else partial(self._drop, call, name, mask)

    def _drop(self, call: InterceptedCall, name: str, mask: np.ndarray) -> Any:
        assert self._source is not None
        self._inside = True
        try:
            if self._source.draws:
                self._framework.draw(name, call)
            return self._framework.keeping(name, call, mask)
        finally:
            self._inside = False

    def _kept(self, call: DropoutCall) -> np.ndarray | None:
        assert self._source is not None
        if not call.between:
            return self._source.mask(call)
        masks = [mask for mask in (self._source.mask(call) for _ in range(call.between)) if mask is not None]
        return np.stack(masks) if len(masks) == call.between else None


class ChoiceSource(CallSource, Protocol):
    """A source of places that functions choose."""

    def places(self, name: str, arguments: Mapping[str, Any], output: Any) -> tuple[int | None, np.ndarray] | None:
        """Return the axis and the places to choose, in the shape of the places that the function returned.

        Args:
            name: the function's common name.
            arguments: its arguments by parameter name, the scores first.
            output: what the function returned.

        Returns:
            `None` to leave the function its own choice.
        """

    def refuse(self, name: str) -> None:
        """Note that the places could not be put into a function's output, which keeps its own choice."""


class ChoosingFunctions(Protocol):
    """A framework's functions that choose."""

    def functions(self) -> Iterable[tuple[Any, str, str]]:
        """Yield the module or class, the name in it and the common name of each function that returns places."""

    def choosing(self, scores: Any, output: Any, axis: int | None, places: np.ndarray) -> Any:
        """Return the output of a function that chooses these places: of the type of its own output."""


class ChoicesFed(OutermostCalls):
    """Listener that makes functions choose the places of a source, until `remove`."""

    def __init__(self, framework: ChoosingFunctions, source: ChoiceSource) -> None:
        self._framework, self._source = framework, source
        super().__init__(framework.functions())

    def instead(self, call: InterceptedCall, name: str) -> Callable[[], Any] | None:
        """Return a function that makes the call and chooses the source's places; `None` to leave the call alone."""
        if not self._listens() or not self._source.is_active():
            return None
        return partial(self._called, call, name)

    def _called(self, call: InterceptedCall, name: str) -> Any:
        self._inside = True
        try:
            output = call.function(*call.args, **call.kwargs)
            try:
                names = call.names or parameters_of(name)
                arguments = {**dict(zip(names, call.args)), **call.kwargs}
                chosen = self._source.places(name, arguments, output) if arguments else None
                if chosen is None:
                    return output
                return self._framework.choosing(next(iter(arguments.values())), output, *chosen)
            except UNKNOWN_CALL:  # a form of the call that is not known
                self._source.refuse(name)
                return output
        finally:
            self._inside = False
