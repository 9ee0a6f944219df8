"""The calls of dropout functions: which elements they keep, and keeping those that somebody else kept.

All dropout of the frameworks goes through a few functions of Python's, whoever calls them: a dropout layer, a model's
own code, an attention's. They are listened to (`padiff.frameworks.listening`).

What a call kept is found by calling the same again on ones, from the same state of the random generators: its output
alone does not tell, where its input is zero. The generators are put back to where the call left them.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from padiff.frameworks.listening import UNKNOWN_CALL, Heard, Listening
from padiff.system.guard import RAISING, Guard


@dataclass(frozen=True, slots=True)
class DropoutCall:
    """A call of a function that drops something.

    Attributes:
        function: its common name.
        rate: the share that it drops, above 0.
        shape: of what it drops from; for an attention, of its weights.
        between: how many times it does, one after the other, between the layers of a recurrent network; 0: it is no
            such network, and drops once.
    """

    function: str
    rate: float
    shape: tuple[int, ...]
    between: int = 0


class MaskObserver(Protocol):
    """Hears of the masks that are drawn.

    Attributes:
        guard: stops errors of the observer and of what calls it.
    """

    guard: Guard

    def wants(self) -> bool:
        """Whether to look at a call that is made now."""

    def begins(self) -> None:
        """A call begins that is looked at."""

    def aside(self) -> AbstractContextManager[None]:
        """What is called inside is not the training's."""

    def ended(self, call: DropoutCall | None, kept: np.ndarray | None) -> None:
        """It has ended.

        Args:
            call: what it dropped; `None`: nothing, or by no chance.
            kept: the elements that it kept; `None`: that can't be seen.
        """


class MaskSource(Protocol):
    """Says what dropout is to keep.

    Attributes:
        draws: whether a call that is given what to keep draws all the same, so that what is drawn after it is what it
            would be.
    """

    draws: bool

    def wants(self) -> bool:
        """Whether to look at a call that is made now."""

    def mask(self, call: DropoutCall) -> np.ndarray | None:
        """What it is to keep; `None`: what it draws itself."""


class DropoutFunctions(Protocol):
    """A framework's dropout functions."""

    def functions(self) -> Iterable[tuple[Any, str, str]]:
        """Each as the module that has it, its name there, and its common name."""

    def about(self, name: str, heard: Heard) -> DropoutCall | None:
        """What a call drops; `None` where it drops nothing, or draws nothing (a rate of 0 or 1)."""

    def kept(self, name: str, heard: Heard, output: Any, state: Any) -> np.ndarray | None:
        """What a call kept that began with the generators in a state. They are put back there for it, and left.

        Of a recurrent network, what it kept after each layer, below each other.
        """

    def draw(self, name: str, heard: Heard) -> None:
        """Draw what the call would, and forget it."""

    def handed_on(self, name: str, heard: Heard) -> Callable[[], Any] | None:
        """Return what makes the call where the framework hands it to somebody else first, who then makes it again; else
        None.
        """

    def keeping(self, name: str, heard: Heard, kept: np.ndarray) -> Any:
        """What the call gives where it keeps these elements."""

    def state(self) -> Any:
        """The random generators' state."""

    def restore(self, state: Any) -> None:
        """Put the generators back."""


class _Calls(ABC):
    """Listens to dropout functions until `remove`; of calls inside of one another, the outermost counts."""

    def __init__(self, framework: DropoutFunctions, guard: Guard = RAISING) -> None:
        self._framework, self.guard = framework, guard
        self._inside = False
        self._thread = threading.get_ident()
        self._listening: list[Listening] = []
        try:
            for owner, attribute, name in framework.functions():
                self._listening.append(Listening(owner, attribute, self, name))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        while self._listening:
            self._listening[-1].remove()
            self._listening.pop()

    def _listens(self) -> bool:
        return not self._inside and threading.get_ident() == self._thread

    @abstractmethod
    def enter(self, call: Heard) -> bool:
        """Whether `leave` is to be called."""

    def leave(self, call: Heard, name: str, output: Any, failed: bool) -> None:  # noqa: B027
        """A call that was entered has ended."""


class MasksSeen(_Calls):
    """Tells an observer what dropout kept. The training's numbers, and its generators, are what they are without."""

    def __init__(self, framework: DropoutFunctions, observer: MaskObserver) -> None:
        self._observer: MaskObserver | None = observer
        self._before: Any = None
        super().__init__(framework, observer.guard)

    def remove(self) -> None:
        self._observer = None
        super().remove()

    def enter(self, call: Heard) -> bool:
        if self._observer is None or not self._listens() or not self._observer.wants():
            return False
        self._observer.begins()
        self._before, self._inside = self._framework.state(), True
        return True

    def leave(self, call: Heard, name: str, output: Any, failed: bool) -> None:
        before, self._before = self._before, None
        try:
            if not failed and self._observer is not None:
                self._tell(call, name, output, before)
        finally:
            self._inside = False

    def _tell(self, call: Heard, name: str, output: Any, before: Any) -> None:
        assert self._observer is not None
        after = self._framework.state()
        kept = about = None
        try:
            with self._observer.aside(), suppress(*UNKNOWN_CALL):
                about = self._framework.about(name, call)
                if about is not None:
                    kept = self._framework.kept(name, call, output, before)
        finally:
            self._framework.restore(after)
        for part in kept if about is not None and about.between and kept is not None else [kept]:
            self._observer.ended(about, part)


class MasksFed(_Calls):
    """Has dropout keep what a source says."""

    def __init__(self, framework: DropoutFunctions, source: MaskSource) -> None:
        self._source: MaskSource | None = source
        super().__init__(framework)

    def remove(self) -> None:
        self._source = None
        super().remove()

    def enter(self, call: Heard) -> bool:
        return False

    def instead(self, call: Heard, name: str) -> Callable[[], Any] | None:
        """Return a function that drops what the source says, or None to drop by chance."""
        if self._source is None or not self._listens() or not self._source.wants():
            return None
        handed_on = self._framework.handed_on(name, call)
        if handed_on is not None:
            return handed_on
        about = self._framework.about(name, call)
        kept = self._kept(about) if about is not None else None
        return None if kept is None else partial(self._drop, call, name, kept)

    def _drop(self, call: Heard, name: str, kept: np.ndarray) -> Any:
        assert self._source is not None
        self._inside = True
        try:
            if self._source.draws:
                self._framework.draw(name, call)
            return self._framework.keeping(name, call, kept)
        finally:
            self._inside = False

    def _kept(self, call: DropoutCall) -> np.ndarray | None:
        assert self._source is not None
        if not call.between:
            return self._source.mask(call)
        masks = [mask for mask in (self._source.mask(call) for _ in range(call.between)) if mask is not None]
        return np.stack(masks) if len(masks) == call.between else None
