"""Hooks on PyTorch's calls, gradients, functions and losses; see `padiff.frameworks.hooking.Hooking`."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch import overrides
from torch.nn import functional, utils
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode

from padiff.frameworks.catalog import common_name, heard_name, parameters_of
from padiff.frameworks.hooking import (
    FunctionListener,
    Handle,
    HookEntry,
    OnCall,
    OnGradient,
    Replaced,
    breadth_first,
    remove_all,
)
from padiff.frameworks.interception import InterceptedCall, Interception, Listener
from padiff.frameworks.losses import ROLES, ClipCall, Function, LossCalls, LossObserver, clip_by_norm, clip_by_value
from padiff.frameworks.torch.calls import OWN_CLASSES, building, call_aside, is_compiling
from padiff.frameworks.torch.calls import aside as aside
from padiff.frameworks.torch.calls import on_calls as on_calls
from padiff.frameworks.torch.regions import on_compilations as on_compilations
from padiff.frameworks.torch.regions import on_regions as on_regions
from padiff.frameworks.torch.tensors import transforming as transforming
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


# A key far below those of recorders' hooks on layers.
_FIRST = -1_000_000
# Tensor attributes that return another view of the tensor -> the common name of the operation.
_ATTRIBUTES = {"T": "transpose", "mT": "transpose", "H": "transpose", "mH": "transpose", "data": "detach"}


class _TracingMode(TorchFunctionMode):
    def __init__(self, listener: FunctionListener) -> None:
        super().__init__()
        self._listener, self._only = listener, listener.only
        #: `muted`: pass no calls to the listener. `inside`: a function is running; torch has removed the mode from its
        #: stack during the call and puts it back afterwards, so the mode can't be removed meanwhile.
        self.muted = self.inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.muted or is_compiling():
            return func(*args, **kwargs)
        listener, self.inside = self._listener, True
        try:
            if self._only is not None and _about(func)[0] not in self._only:  # nearly all calls of a step
                return func(*args, **kwargs)
            begun = listener.guard.run(self._begins, func, args, kwargs)
            output = func(*args, **kwargs)
            if begun is not None:
                listener.guard.run(call_aside, listener.function_ended, begun, output)
            return output
        finally:
            self.inside = False

    def _begins(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, parameters = _about(func)
        if name is None or building():
            return None
        return call_aside(self._listener.function_begins, name, parameters, args, kwargs)


class FunctionTracing:
    """An interceptor of functions on the thread that creates it; see `padiff.frameworks.hooking.Hearing`."""

    def __init__(self, listener: FunctionListener) -> None:
        self._mode: _TracingMode | None = None if _has_compiled() else _TracingMode(listener)
        self.guard = listener.guard
        self.companions: list[Handle] = []
        #: `_on`: calls go to the listener. `_over`: a compilation has ended the interception for good. `_left`: the
        #: mode is still on the stack although `_on` is False.
        self._on = self._over = self._left = False
        self._foreign: _ForeignCalls | None = None
        #: The number of modes on the stack below this one.
        self._place: int | None = None
        self._thread = threading.get_ident()
        # Not imported here: every compilation imports this module.
        self._compiling = sys.modules.get("torch._dynamo.callback")
        if self._compiling is not None and self._mode is not None:
            self._compiling.callback_handler.register_start_callback(self._stop)

    @property
    def ends_for_compilers(self) -> bool:
        return self._compiling is not None and not _uses_compiler()

    def listen(self, on: bool) -> None:
        if self._over or self._mode is None or threading.get_ident() != self._thread:
            return
        if on == self._on and not self._left:
            return
        self._on, self._mode.muted = on, not on
        if self._mode.inside:
            self._left = not on  # during a function call, such as a backward: `listen` removes it later
            return
        was_active, self._left = self._left, False
        if not on or was_active:
            self._take_out(self._mode)
        if not on:
            return
        count = len(overrides._get_current_function_mode_stack())
        # At its previous position, because modes entered since (``with torch.device(...)``) exit before this one.
        place = count if self._place is None else min(self._place, count)
        above = [overrides._pop_mode() for _ in range(count - place)]
        overrides._push_mode(self._mode)
        while above:
            overrides._push_mode(above.pop())

    def listen_outside(self, on: bool) -> None:
        if on and _uses_compiler():
            return  # a compiler would see the hooks on modules
        self.listen(on)
        if on and self._on and self._foreign is None:
            self._foreign = _ForeignCalls(self)
        elif not on:
            self._leave_modules()

    def _leave_modules(self) -> None:
        if self._foreign is not None:
            self._foreign.remove()
            self._foreign = None

    def remove(self) -> None:
        self._leave_modules()
        remove_all(self.companions)
        mode = self._mode
        if mode is not None and threading.get_ident() == self._thread:
            mode.muted = True
            self._take_out(mode)  # whatever `_on` says, as an error may have left it wrong
        if mode is not None and self._compiling is not None:
            with suppress(ValueError):  # torch._dynamo.reset() has removed all callbacks already
                self._compiling.callback_handler.remove_start_callback(self._stop)
        self._mode, self._on, self._left = None, False, False

    def _stop(self, *_: Any) -> None:
        """End the interception because a compilation begins: the mode would change the compiled code."""
        self.guard.run(self.stop)

    def stop(self) -> None:
        """End the interception for good."""
        self._leave_modules()
        remove_all(self.companions)
        is_active = self._on or self._left
        if is_active and self._mode is not None and threading.get_ident() == self._thread:
            self._mode.muted = True
            self._take_out(self._mode)
            self._on, self._over = False, True

    def _take_out(self, mode: _TracingMode) -> None:
        stack = overrides._get_current_function_mode_stack()
        if all(active is not mode for active in stack):
            return
        above = []
        while (last := overrides._pop_mode()) is not mode:
            above.append(last)
        self._place = len(stack) - len(above) - 1
        while above:
            overrides._push_mode(above.pop())


class _ForeignCalls:
    """Global hooks that pause the interception while modules with parameters run outside of the model (a teacher).

    Otherwise the mode would disable the fast path of torch's attention in such a module's eval mode. Modules without
    parameters (losses) are intercepted.
    """

    def __init__(self, hearing: FunctionTracing) -> None:
        self._hearing, self._inside, self._thread = hearing, 0, threading.get_ident()
        run = hearing.guard.run
        self._handles: tuple[Handle, ...] = (
            *_on_compile(hearing.guard, hearing.stop),
            HookEntry(
                module_hooks._global_forward_pre_hooks, lambda module, _: run(self._begins, module), first=_FIRST
            ),
            HookEntry(
                module_hooks._global_forward_hooks,
                lambda module, *_: run(self._ended, module),
                [module_hooks._global_forward_hooks_always_called],
                first=_FIRST,
            ),
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _counts(self, module: torch.nn.Module) -> bool:
        applies = threading.get_ident() == self._thread and not is_compiling()
        return applies and next(module.parameters(), None) is not None

    def _begins(self, module: torch.nn.Module) -> None:
        if self._counts(module):
            self._inside += 1
            self._hearing.listen(False)

    def _ended(self, module: torch.nn.Module) -> None:
        if self._inside and self._counts(module):
            self._inside -= 1
            if not self._inside:
                self._hearing.listen(True)


def _on_compile(guard: Guard, end: Callable[[], None]) -> Sequence[Handle]:
    # Not imported here: the import takes seconds.
    frames = sys.modules.get("torch._dynamo.convert_frame")
    context = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizeContext", None)
    begins = [(context, "__init__"), (frames, "fullgraph_capture")]  # the latter of a strict export
    return [
        Interception(owner, attribute, _BeforeCall(end, guard), "compile")
        for owner, attribute in begins
        if owner is not None and hasattr(owner, attribute)  # `None` has an `__init__`
    ]


def _uses_compiler() -> bool:
    """Return True if ``torch.compile`` was called in this process, whether anything is compiled yet or not."""
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", {})
    return any(map(callable, backends.values()))  # None stands for `torch.compiler.disable`


def _has_compiled() -> bool:
    """Return True if torch.compile has compiled anything in this process."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    codes = getattr(frames, "output_codes", None)
    return bool(getattr(codes, "seen", None))


@lru_cache(maxsize=4096)
def _about(func: Callable[..., Any]) -> tuple[str | None, tuple[str, ...]]:
    """Return the common name of a function (`None` if traces leave it out), and the names of its parameters."""
    name = str(getattr(func, "__name__", ""))
    if name == "__get__":
        return _ATTRIBUTES.get(str(getattr(getattr(func, "__self__", None), "__name__", ""))), ("self",)
    common = heard_name(name)
    if common is None:
        return None, ()
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):  # written in C
        return common, parameters_of(common)
    return common, tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def on_losses(observer: LossObserver) -> LossCalls:
    backwards = ((torch.Tensor, "backward"), (torch.autograd, "backward"))
    return LossCalls(_functions(), _clips(), _scalers(), backwards, observer, _is_tensor, _learning, _silent, aside)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _learning(tensor: Any) -> bool:
    return bool(tensor.requires_grad)


def _silent() -> bool:
    return is_compiling() or transforming() or building()


def _functions() -> Iterator[Function]:
    reads = {"cross_entropy": _cross_entropy, "linear_cross_entropy": _cross_entropy}
    for name in ROLES:
        if hasattr(functional, name):
            yield Function(functional, name, name, read=reads.get(name, _reduction))


def _reduction(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the reduction that the deprecated arguments ``size_average`` and ``reduce`` select; empty without them."""
    average, reduce = arguments.get("size_average"), arguments.get("reduce")
    if average is None and reduce is None:
        return {}
    if reduce is False:
        return {"reduction": "none"}
    return {"reduction": "sum" if average is False else "mean"}


def _cross_entropy(arguments: dict[str, Any]) -> dict[str, Any]:
    target, logits = arguments.get("target"), arguments.get("input")
    soft = isinstance(target, torch.Tensor) and target.is_floating_point()
    settings = {"soft_label": soft, "use_softmax": True, **_reduction(arguments)}
    if isinstance(logits, torch.Tensor):
        # Classes are the second axis, which is the last one of a matrix.
        settings["axis"] = -1 if logits.dim() <= 2 else 1
    return settings


def _clips() -> Iterator[tuple[Any, str, Callable[[dict[str, Any], Any], ClipCall | None]]]:
    reads = {"clip_grad_norm_": clip_by_norm, "clip_grads_with_norm_": _with_norm, "clip_grad_value_": clip_by_value}
    for name, read in reads.items():
        if hasattr(utils, name):
            yield utils, name, read


def _scalers() -> Iterator[tuple[Any, str, Callable[[Any], float]]]:
    for module, name in (
        ("torch.amp" if hasattr(torch.amp, "GradScaler") else "torch.cuda.amp", "GradScaler"),  # before torch 2.3
        ("torch.distributed.fsdp.sharded_grad_scaler", "ShardedGradScaler"),
    ):
        scaler = getattr(sys.modules.get(module), name, None)
        if scaler is not None and "scale" in vars(scaler):
            yield scaler, "scale", lambda self: float(self.get_scale())


def _with_norm(arguments: dict[str, Any], output: Any) -> ClipCall:
    # The order of the norm is unknown here: only the caller knows it.
    return ClipCall("global_norm", float(arguments["max_norm"]), None, arguments["total_norm"])


RAISES_AS_IT_IS = True
READ = False  # hooks do nothing while torch compiles


def on_outputs(layer: Any, replaced: Replaced) -> Handle:
    return HookEntry(layer._forward_hooks, lambda _, args, output: replaced(args, output), listed=False)


class _BeforeCall(Listener):
    """Listener that calls a function before each call of a method."""

    def __init__(self, before: Callable[[], None], guard: Guard) -> None:
        self._before, self.guard = before, guard

    def instead(self, call: InterceptedCall, name: str) -> None:
        """Note that a call begins; the call itself is left alone."""
        self._before()


def before_capture(capture: Callable[[], None], guard: Guard = RAISING) -> Handle | None:
    name = "capture_begin"
    if name not in vars(torch.cuda.CUDAGraph):
        return None
    return Interception(torch.cuda.CUDAGraph, name, _BeforeCall(capture, guard), name)


def on_functions(called: OnCall, third_party: Sequence[str], guard: Guard = RAISING) -> Handle:
    return FunctionHooks(called, guard)


def hear_functions(listener: FunctionListener) -> FunctionTracing:
    return FunctionTracing(listener)


def on_gradient(tensor: Any, gradient: OnGradient) -> Handle | None:
    if not tensor.requires_grad:
        return None
    hooks = _Hooks(gradient)
    if hooks.register(tensor):
        return _OfGraph(hooks, _KEY)
    existing = tensor._backward_hooks
    if isinstance(existing, _Hooks):  # another recorder's
        return _OfGraph(existing, existing.add(gradient))
    if existing is not None:
        return HookEntry(existing, gradient)
    handle: Handle = tensor.register_hook(gradient)
    return handle


# Below 0, because torch counts its keys from 0.
_KEY = -1


class _Hooks(dict[int, OnGradient]):
    """A tensor's dictionary of gradient hooks, in place of torch's own dictionary.

    torch refers to the dictionary weakly. Iteration yields only the keys of the user's hooks, so that torch does not
    warn of unsaved hooks when a tensor is saved.
    """

    __slots__ = ("__weakref__",)

    def __init__(self, gradient: OnGradient) -> None:
        super().__init__()
        self[_KEY] = gradient

    def __iter__(self) -> Iterator[int]:
        return iter([key for key in dict.keys(self) if key >= 0])

    def __bool__(self) -> bool:
        return any(True for _ in self)

    def add(self, gradient: OnGradient) -> int:
        """Add a hook, and return its key."""
        key = min([0, *dict.keys(self)]) - 1
        self[key] = gradient
        return key

    def discard(self, key: int) -> None:
        """Remove a hook."""
        self.pop(key, None)

    def register(self, tensor: Any) -> bool:
        """Register this hook on a tensor as `register_hook` does, in half the time; return True on success.

        A tensor that requires no gradient gets no hook, and counts as a success.

        The handles of `register_hook` are slow, because each one increments a counter in their class, which
        invalidates Python's attribute caches.
        """
        node = tensor.grad_fn
        if tensor._backward_hooks is not None or type(tensor) not in OWN_CLASSES or len(self) != 1:
            return not tensor.requires_grad
        if node is not None:
            tensor._backward_hooks = self
            node._register_hook_dict(tensor)
        elif tensor.requires_grad:
            tensor._backward_hooks = self
        return True


class _OfGraph:
    """A handle of a hook on a gradient; for a computed tensor, the hook lives as long as the graph."""

    __slots__ = ("_hooks", "_key")

    def __init__(self, hooks: _Hooks, key: int) -> None:
        self._hooks, self._key = hooks, key

    def remove(self) -> None:
        self._hooks.discard(self._key)


def behind(tensor: Any, most: int) -> Iterator[tuple[Any, int]]:
    return breadth_first(tensor.grad_fn, lambda node: [before for before, _ in node.next_functions], most)


def learning() -> bool:
    return bool(torch.is_grad_enabled())


_backward_now = torch._C._current_graph_task_id


def recomputing() -> bool:
    # The id of the running backward, -1 outside of backward. torch.utils.checkpoint uses the same function.
    return bool(_backward_now() != -1)
