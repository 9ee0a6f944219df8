"""Feeding of choices: functions that choose (``topk``, ``argmax``, ``sort``) return the places that a source gives.

The function is called first, so that its own choice is known, and recorded if a recorder listens. See
`padiff.frameworks.interception`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np

from padiff.frameworks.api_names import parameters_of
from padiff.frameworks.interception import UNKNOWN_CALL, CallSource, InterceptedCall, OutermostCalls


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
