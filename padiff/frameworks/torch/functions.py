"""Seeing torch's functional calls and tensor methods, by torch's own means for it.

Every function of torch that takes tensors asks for a mode first, those written in Python too: so it does not matter
how a call reaches it (by ``F.softmax``, a name that was imported before, a default argument, a `functools.partial`).
While the mode hears of a call it is off: what a function calls itself is not seen.

Not seen are calls on other threads, ``torch.autograd.Function.apply``, operators called as such
(``torch.ops.aten...``), and what is compiled or scripted.
"""

from __future__ import annotations

from typing import Any

from torch import overrides
from torch.overrides import TorchFunctionMode

from padiff.frameworks.api_names import common_name
from padiff.frameworks.hooking import OnCall
from padiff.system.guard import RAISING, Guard


class _Mode(TorchFunctionMode):
    """Calls back after each call made from Python."""

    def __init__(self, called: OnCall, guard: Guard) -> None:
        super().__init__()
        self._called, self._guard = called, guard

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._guard.run(self._ended, func, output)
        return output

    def _ended(self, func: Any, output: Any) -> None:
        name = common_name(getattr(func, "__name__", ""))
        if name is not None:
            self._called(name, output)


class Seeing:
    """The mode, switched on when made and off by `remove`."""

    def __init__(self, called: OnCall, guard: Guard = RAISING) -> None:
        self._mode: _Mode | None = _Mode(called, guard)
        self._mode.__enter__()

    def remove(self) -> None:
        mode, self._mode = self._mode, None
        if mode is None or all(one is not mode for one in overrides._get_current_function_mode_stack()):
            return
        # Leaving a mode leaves the last one, whichever it is: others (``with torch.device(...)``) stay.
        above = []
        while (last := overrides._pop_mode()) is not mode:
            above.append(last)
        while above:
            overrides._push_mode(above.pop())
