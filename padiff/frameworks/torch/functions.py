"""Hooks on torch's functions and tensor methods, by a torch function mode.

Every torch function with tensor arguments, even one written in Python, passes its call to the active mode first. So the
way of reaching the function does not matter (``F.softmax``, a name imported before, a default argument, a
`functools.partial`). The mode is off during a call: calls inside of torch's functions are not recorded.

The mode misses calls on other threads, ``torch.autograd.Function.apply``, direct calls of operators
(``torch.ops.aten...``), and compiled or scripted code.
"""

from __future__ import annotations

from typing import Any

from torch import overrides
from torch.overrides import TorchFunctionMode

from padiff.frameworks.api_names import common_name
from padiff.frameworks.hooking import OnCall
from padiff.system.guard import RAISING, Guard


class _Mode(TorchFunctionMode):
    """A torch function mode that calls a callback after each call made from Python."""

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


class FunctionHooks:
    """A registration of the mode: switched on at creation, and off by `remove`."""

    def __init__(self, called: OnCall, guard: Guard = RAISING) -> None:
        self._mode: _Mode | None = _Mode(called, guard)
        self._mode.__enter__()

    def remove(self) -> None:
        mode, self._mode = self._mode, None
        if mode is None or all(active is not mode for active in overrides._get_current_function_mode_stack()):
            return
        # torch can only pop the innermost mode, so pop and push back the modes inside (``with torch.device(...)``).
        above = []
        while (last := overrides._pop_mode()) is not mode:
            above.append(last)
        while above:
            overrides._push_mode(above.pop())
