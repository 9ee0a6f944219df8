"""Tracing of functions called by a model's own code, and by the loop between the model's forward and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from padiff.frameworks.base import Framework
from padiff.frameworks.hooking import Hearing
from padiff.model.selection import Node
from padiff.recorder.calls import Call
from padiff.recorder.copying import COPYING
from padiff.recorder.tracer import Begun, Tracer
from padiff.recorder.tracked_layers import TrackedLayers
from padiff.records import LOOP
from padiff.system.guard import Guard


class Functions:
    """Listener that passes function calls to the tracer, but only those made by the user's code.

    Args:
        running: stack of the running layer calls, the outermost first.
        watched: the layers; functions are traced inside of calls of the chosen layers.
    """

    def __init__(
        self, framework: Framework, tracer: Tracer, running: Sequence[Call], watched: TrackedLayers, guard: Guard
    ) -> None:
        self.guard = guard
        self._hooks, self._layers = framework.hooks, framework.layers
        self._tracer, self._running, self._watched = tracer, running, watched
        self._hearing: Hearing | None = None
        #: The loop as a caller of functions, after the model's call and before backward; None otherwise.
        self._in_loop: Call | None = None

    @property
    def attached(self) -> bool:
        """Return True if the framework's functions are hooked."""
        return self._hearing is not None

    def hook(self) -> None:
        """Hook the framework's functions, if the tracer records functions, or those that choose."""
        if (self._tracer.functions or self._tracer.choosing) and self._hearing is None:
            self._hearing = self._hooks.hear_functions(self)

    def remove(self) -> None:
        """Unhook the framework's functions."""
        if self._hearing is not None:
            self._hearing.remove()
        self._hearing = self._in_loop = None

    def pause(self) -> None:
        """Stop listening: the next functions are not called by the model's code."""
        if self._hearing is not None:
            self._hearing.listen(False)

    def resume(self) -> None:
        """Listen again if the innermost running layer is recorded and runs the user's own code."""
        if self._hearing is not None and self._running:
            inside = self._running[-1]
            path = inside.node.path
            heard = path in self._watched.chosen and not inside.recomputed and not inside.transformed
            heard = heard and (self._tracer.functions or path in self._tracer.choosing)
            if heard and not self._tracer.full and not self._layers.is_builtin(inside.node.layer):
                self._hearing.listen(True)

    def enter_loop(self) -> None:
        """Listen to the loop after the outermost call: functions before backward may compute the loss."""
        if self._hearing is None or not (self._tracer.functions or LOOP in self._tracer.choosing):
            return
        self._in_loop = Call(Node(LOOP, None), 0, True, False)
        if not self._tracer.full:
            self._hearing.listen_outside(True)

    def leave_loop(self) -> None:
        """Stop listening to the loop: the model is called, or backward or an optimizer's step begins."""
        if self._hearing is not None and self._in_loop is not None:
            self._hearing.listen_outside(False)
        self._in_loop = None

    # -- function calls -------------------------------------------------------------------------------------

    def function_begins(
        self, name: str, parameters: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Begun | None:
        """Handle the beginning of a function call; return the traced call, or None if the call is not traced."""
        inside = self._running[-1] if self._running else self._in_loop
        if COPYING.now or inside is None or self._hooks.transforming():
            return None
        return self._tracer.function_begins(name, parameters, inside, args, kwargs)

    def function_ended(self, begun: Begun, output: Any) -> None:
        """Handle the output of a traced function call."""
        self._tracer.function_ended(begun, output)
