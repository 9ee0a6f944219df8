"""The functions that a model's own code calls, and the loop's between the model and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from padiff.frameworks.base import Framework
from padiff.frameworks.hooking import Hearing
from padiff.model.selection import Node
from padiff.recorder.calls import Call
from padiff.recorder.copying import COPYING
from padiff.recorder.tracer import Begun, Tracer
from padiff.recorder.watched import Watched
from padiff.records import LOOP
from padiff.system.guard import Guard


class Functions:
    """Has the tracer write down functions, where it is to: only while code of the user's runs.

    Args:
        running: the calls of layers that are under way, the outermost first.
        watched: the layers; functions are looked at within calls of the chosen ones.
    """

    def __init__(
        self, framework: Framework, tracer: Tracer, running: Sequence[Call], watched: Watched, guard: Guard
    ) -> None:
        self.guard = guard
        self._hooks, self._layers = framework.hooks, framework.layers
        self._tracer, self._running, self._watched = tracer, running, watched
        self._hearing: Hearing | None = None
        #: The loop, as what calls functions after the model was called and before its backward.
        self._in_loop: Call | None = None

    @property
    def attached(self) -> bool:
        """Whether functions are heard at all."""
        return self._hearing is not None

    def attach(self) -> None:
        """Hear functions from now on, if the tracer looks at them."""
        if self._tracer.functions and self._hearing is None:
            self._hearing = self._hooks.hear_functions(self)

    def remove(self) -> None:
        """Hear nothing any more."""
        if self._hearing is not None:
            self._hearing.remove()
        self._hearing = self._in_loop = None

    def pause(self) -> None:
        """What is called from now on is not the model's."""
        if self._hearing is not None:
            self._hearing.listen(False)

    def resume(self) -> None:
        """What is called from now on is a layer's own code, if one is under way."""
        if self._hearing is not None and self._running:
            inside = self._running[-1]
            heard = inside.node.path in self._watched.chosen and not inside.recomputed and not inside.transformed
            if heard and not self._tracer.full and not self._layers.is_builtin(inside.node.layer):
                self._hearing.listen(True)

    def enter_loop(self) -> None:
        """The outermost call has ended: what is called now, up to a backward, may be the loss."""
        if self._hearing is None:
            return
        self._in_loop = Call(Node(LOOP, None), 0, True, False)
        if not self._tracer.full:
            self._hearing.listen_outside(True)

    def leave_loop(self) -> None:
        """The loop calls the model, goes back, or steps."""
        if self._hearing is not None and self._in_loop is not None:
            self._hearing.listen_outside(False)
        self._in_loop = None

    # -- what is heard ---------------------------------------------------------------------------------------

    def function_begins(
        self, name: str, parameters: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Begun | None:
        """A function is called; `None` where that is not looked at."""
        inside = self._running[-1] if self._running else self._in_loop
        if COPYING.now or inside is None or self._hooks.transforming():
            return None
        return self._tracer.function_begins(name, parameters, inside, args, kwargs)

    def function_ended(self, begun: Begun, output: Any) -> None:
        """The function has given this."""
        self._tracer.function_ended(begun, output)
