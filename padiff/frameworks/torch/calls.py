"""Hooks on the calls of torch modules, compiled ones too, and checks that modules and modes have not changed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch.fx import _symbolic_trace
from torch.utils import _python_dispatch

from padiff.frameworks.hooking import AfterCall, BeforeCall, Handle, Hook, HookEntry
from padiff.frameworks.interception import DirectCalls, Override
from padiff.system.guard import RAISING, Guard, reraise_from_signal_handler

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


def original(module: Any) -> Any:
    """Return the module inside ``torch.compile``'s wrapper; any other module itself."""
    # Not imported here: the import takes seconds, and is needed only if something was compiled.
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    while dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        module = module._orig_mod
    return module


def compiled_in_place(module: Any) -> bool:
    """Return True if ``module.compile()`` was called."""
    return vars(module).get("_compiled_call_impl") is not None


def compiling_is_off() -> bool:
    """Return True if what was compiled runs eagerly now: ``torch.compiler.set_stance``, ``TORCH_COMPILE_DISABLE``."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    stance = getattr(getattr(dynamo, "_stance", None), "stance", "")
    config = sys.modules.get("torch._dynamo.config")
    return stance == "force_eager" or bool(getattr(config, "disable", False))


def on_calls(module: Any, key: Any, before: BeforeCall, after: AfterCall, guard: Guard = RAISING) -> list[Handle]:
    """Call ``before`` and ``after`` around each call of a module."""
    first, last = _Before(key, before, module, guard), _After(key, after, module, guard)
    if compiled_in_place(module):
        return [Override(module, "_compiled_call_impl", partial(_called, module, first, last), guard)]
    befores = [module._forward_pre_hooks_with_kwargs]
    afters = [module._forward_hooks_with_kwargs, module._forward_hooks_always_called]
    direct = DirectCalls.of_layer(module, first, partial(_ended, last))  # first: if it fails, no hook is left on
    return [
        *direct,
        HookEntry(module._forward_pre_hooks, first, befores, listed=False),
        HookEntry(module._forward_hooks, last, afters, listed=False),
    ]


class _Hook(Hook):
    __slots__ = ()

    def _is_meant(self, module: Any) -> bool:
        # DataParallel creates a replica for each device.
        return id(module) == self._layer or "_is_replica" in vars(module)


class _Before(_Hook):
    __slots__ = ()

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        if is_compiling() or self._guard.tripped:
            return
        self.called = True
        try:
            if self._is_meant(module) and not building():
                with aside():
                    self._call(self._key, module, args, kwargs)
        except Exception as error:
            self._guard.catch(error)


class _After(_Hook):
    __slots__ = ()

    def __call__(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if is_compiling() or self._guard.tripped:
            return
        # This hook is also called after an exception in forward, without an output.
        failed = output is None and sys.exc_info()[0] is not None
        try:
            if self._is_meant(module) and not building():
                with aside():
                    self._call(self._key, module, output, failed)
        except Exception as error:
            self._guard.catch(error)


def _called(module: Any, before: _Before, after: _After, compiled: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a module that is compiled in place, with padiff's hooks outside, because its own hooks are compiled too."""
    before(module, args, kwargs)
    try:
        output = compiled(*args, **kwargs)
    except BaseException:
        after(module, args, kwargs, None)
        raise
    after(module, args, kwargs, output)
    return output


def _ended(after: _After, module: Any, output: Any) -> None:
    after(module, (), {}, output)


def compiled_paths(model: Any) -> Iterator[str]:
    """Yield the paths of the compiled modules that have submodules."""
    if "torch._dynamo.eval_frame" not in sys.modules:  # nothing is compiled without it
        return
    for name, module in model.named_modules():
        compiled = original(module) is not module or compiled_in_place(module)
        if compiled and any(True for _ in original(module).children()):
            yield ".".join(part for part in name.split(".") if part != "_orig_mod")


# An undocumented name of torch, so it may be missing.
TensorGuards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)

# The smallest size of a tensor, in bytes, for which the size of its storage is checked. If a smaller tensor was freed
# and a smaller block allocated at the same address, reading beyond the block still stays in the process's memory.
_LARGE = 1 << 15
# Number of guards to remember: the same tensors are checked inside and outside of autocast.
_MOST = 4

_Tensor = torch.Tensor
_TRAINS = attrgetter("requires_grad")
#: Classes of tensors whose memory is their own.
OWN_CLASSES = frozenset({torch.Tensor, torch.nn.Parameter})


def _ordinary(tensor: Any) -> bool:
    # torch's guards crash the process on a nested tensor.
    return type(tensor) in OWN_CLASSES and tensor.layout is torch.strided and not tensor.is_nested


class Kinds:
    """Properties of a list of tensors, checked by the guards of `torch.compile`.

    The properties are class, dtype, device, shape, strides, trainability, pending negation or conjugation, and
    function transforms.
    """

    __slots__ = ("_guards",)

    def __init__(self) -> None:
        self._guards: list[Any] = []

    def known(self, tensors: Sequence[Any]) -> bool:
        """Return True if the tensors have the same properties as a list passed to `learn`; `False` if unknown."""
        return any(guard.check(*tensors) for guard in self._guards)

    def learn(self, tensors: Sequence[Any]) -> None:
        """Remember the current properties of the tensors, if all of them are ordinary strided tensors."""
        if TensorGuards is None or self.known(tensors) or not all(map(_ordinary, tensors)):
            return
        try:
            guard = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            if guard.check(*tensors):
                self._guards = [guard, *self._guards[: _MOST - 1]]
        except Exception as error:  # a torch version with other guards
            reraise_from_signal_handler(error)
            return


class TensorsWatch:
    """A watch of tensors; see `padiff.frameworks.base.Tensors.watch`."""

    __slots__ = ("_kinds", "_large", "_memory", "_tensors", "_trains")

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors, self._kinds = tensors, Kinds()
        #: Tensors whose storage size is checked.
        self._large: list[Any] = []
        #: The recorded addresses and storage sizes; `None` if they are unknown.
        self._memory: Any = None
        self._trains: list[bool] = []

    def note(self, unchanged: bool = False) -> bool:
        self._memory = None
        if not unchanged:
            # The guards do not tell which of several remembered lists matched, so forget the others.
            self._kinds = Kinds()
        try:
            self._large = [tensor for tensor in self._tensors if tensor.nbytes >= _LARGE]
            self._kinds.learn(self._tensors)
            self._trains = list(map(_TRAINS, self._tensors))
            self._memory = self._now()
        except Exception as error:  # lazy, or a kind without memory
            reraise_from_signal_handler(error)
            return False
        return True

    def same(self) -> bool:
        try:
            if self._memory is None or not self._kinds.known(self._tensors) or self._now() != self._memory:
                return False
            # Without grad mode, the guards may ignore which tensors are trainable.
            return torch.is_grad_enabled() or list(map(_TRAINS, self._tensors)) == self._trains
        except Exception as error:  # the memory does not exist any more
            reraise_from_signal_handler(error)
            return False

    def _now(self) -> Any:
        lengths = [tensor.untyped_storage().nbytes() for tensor in self._large]
        return list(map(_Tensor.data_ptr, self._tensors)), lengths


#: The dictionaries of a layer's sublayers and own tensors.
_HELD = attrgetter("_modules", "_parameters", "_buffers")
_SHAPE = attrgetter("shape")


def held(layers: Sequence[Any]) -> list[Any]:
    """Return the sublayers and own tensors of layers as comparable lists, without a Python loop step per layer.

    Raises:
        Exception: a lazy parameter has no shape.
    """
    classes = list(map(type, layers))
    if any(each.__name__ == "OptimizedModule" for each in set(classes)):
        layers = [original(layer) for layer in layers]
    holders = list(chain.from_iterable(map(_HELD, layers)))
    values = list(chain.from_iterable(map(dict.values, holders)))
    parameters = [each for each in chain.from_iterable(map(dict.values, holders[1::3])) if each is not None]
    names, counts = list(chain.from_iterable(holders)), list(map(len, holders))
    # A lazy parameter that is initialized changes its class but stays the same object.
    return [classes, names, counts, list(map(id, values)), list(map(type, values)), list(map(_SHAPE, parameters))]
