"""Detection of torch's tracers, and contexts that hide calls from the user's modes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.fx import _symbolic_trace
from torch.utils import _python_dispatch

# Looked up once, because each call of a layer calls these functions.
_tracing = torch._C._get_tracing_state
_dispatch_modes = torch._C._len_torch_dispatch_stack
_dispatch_mode = torch._C._get_dispatch_mode
_KEYS = torch._C._TorchDispatchModeKey
#: ``torch.compiler.is_compiling``, which torch 2.2 has under another name.
is_compiling: Callable[[], bool] = getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling
# Since torch 2.14 the flag is one of each thread, and this private call reads it.
_fx_tracing: Callable[[], bool] = getattr(_symbolic_trace, "_get_is_fx_tracing", None) or (
    lambda: bool(_symbolic_trace._is_fx_tracing_flag)
)
_WithoutFunctions: Any = torch._C.DisableTorchFunction


def building() -> bool:
    """Return True while tensors are placeholders without values: in torch.jit.trace, torch.fx, export, under a fake
    tensor mode and while a CUDA graph is captured. (For torch.compile, use `is_compiling`.)
    """
    if _tracing() is not None or _fx_tracing():
        return True
    if capturing():
        return True
    return _dispatch_modes() > 0 and any(_dispatch_mode(key) is not None for key in (_KEYS.FAKE, _KEYS.PROXY))


def capturing() -> bool:
    """Return True while a CUDA graph is captured, which some operations on a device would break."""
    # Asking for the capture would initialize CUDA in a process that uses no device yet.
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def aside() -> AbstractContextManager[Any]:
    """Return a context that hides calls from the user's modes and from tensor subclasses."""
    if not _dispatch_modes():
        without: AbstractContextManager[Any] = _WithoutFunctions()
        return without
    stack = ExitStack()
    stack.enter_context(_WithoutFunctions())
    stack.enter_context(_python_dispatch._disable_current_modes())
    return stack


def call_aside(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in `aside`, and return what the function returns."""
    with aside():
        return function(*args)
