"""Hooks on paddle's calls, gradients, functions and losses; see `padiff.frameworks.hooking.Hooking`."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import BuiltinFunctionType, FrameType, FunctionType, MethodDescriptorType, ModuleType, WrapperDescriptorType
from typing import Any

import paddle
from paddle.nn import functional

from padiff.errors import UsageError
from padiff.frameworks.catalog import common_name, heard_name, parameters_of
from padiff.frameworks.hooking import (
    AfterCall,
    BeforeCall,
    FunctionListener,
    Handle,
    Hook,
    HookEntry,
    OnCall,
    OnGradient,
    Replaced,
    breadth_first,
    remove_all,
)
from padiff.frameworks.interception import DirectCalls, InterceptedCall, Interception, OutermostCalls
from padiff.frameworks.losses import ROLES, ClipCall, Function, LossCalls, LossObserver, clip_by_norm, clip_by_value
from padiff.system.guard import RAISING, Guard

# Modules of paddle's functions: a call from one of these modules is made by paddle.
_INTERNAL = (
    "paddle.nn.functional.", "paddle.tensor.", "paddle.linalg", "paddle.utils.decorator_utils", "paddle.base.",
    "paddle.incubate.nn.functional.",
)  # fmt: skip


class FunctionHooks(OutermostCalls):
    """A listener of the functions, active from its creation until `remove`.

    Args:
        called: called with the common name and the output of each outermost call on this thread.
        third_party: dotted names of further functions (``my_ops.fused``), or of modules, which stand for all their
            public functions.
    """

    def __init__(self, called: OnCall, third_party: Sequence[str] = (), guard: Guard = RAISING) -> None:
        # In a tuple, because to_static traces these calls too, and treats a method in an attribute as one of this
        # object's.
        self._called = (called,)
        super().__init__(_distinct((*_framework_calls(), *_third_party_calls(third_party))), guard)

    def enter(self, call: InterceptedCall) -> bool:
        if not self._listens() or is_internal(call.caller) or not paddle.in_dynamic_mode():
            return False
        self._inside = True
        return True

    def exit(self, call: InterceptedCall, name: str, output: Any, failed: bool) -> None:
        self._inside = False
        if not failed:
            self._called[0](name, output)


def is_internal(caller: FrameType | None) -> bool:
    return caller is not None and str(caller.f_globals.get("__name__", "")).startswith(_INTERNAL)


def _distinct(calls: Iterable[tuple[Any, str, str]]) -> Iterator[tuple[Any, str, str]]:
    """Yield each function once, as one function may have several names; its code is another one once it was yielded."""
    seen: set[int] = set()
    for owner, name, common in calls:
        function = getattr(owner, name)
        if id(function) not in seen:
            yield owner, name, common
            seen |= {id(function), id(getattr(owner, name))}


def _framework_calls() -> Iterator[tuple[Any, str, str]]:
    for owner in (paddle, paddle.nn.functional, paddle.linalg, paddle.Tensor):
        for name in dir(owner):
            common = common_name(name)
            if (
                common is not None
                and callable(getattr(owner, name, None))
                and not isinstance(getattr(owner, name), type)
            ):
                yield owner, name, common


def _third_party_calls(names: Sequence[str]) -> Iterator[tuple[Any, str, str]]:
    for dotted in names:
        module, function = _resolved(dotted)
        if function is not None:
            yield module, function, function
        else:
            for name, value in vars(module).items():
                if not name.startswith("_") and callable(value) and not isinstance(value, type):
                    yield module, name, name


def _resolved(dotted: str) -> tuple[ModuleType, str | None]:
    try:
        return importlib.import_module(dotted), None
    except ImportError:
        pass
    path, _, function = dotted.rpartition(".")
    try:
        module = importlib.import_module(path)
        if callable(getattr(module, function)):
            return module, function
    except (ImportError, ValueError, AttributeError):
        pass
    raise UsageError(
        f"PADDLE_THIRDPARTY_API: {dotted!r} is neither a module nor a function of one; give dotted names, "
        "separated by commas"
    )


_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)


class FunctionTracing:
    """An interceptor of functions on the thread that creates it; see `padiff.frameworks.hooking.Hearing`."""

    def __init__(self, listener: FunctionListener) -> None:
        self.listener, self.guard = listener, listener.guard
        #: `on`: calls go to the listener. `inside`: a function is running; calls that it makes are not intercepted.
        self.on = self.inside = False
        self.ends_for_compilers = True
        self.companions: list[Handle] = []
        self.thread = threading.get_ident()
        self._listening: list[Handle] = []
        try:
            for owner, attribute, common in _functions():
                if listener.only is None or common in listener.only:
                    self._listening.append(Interception(owner, attribute, _Function(self, common), common))
        except BaseException:
            self.remove()
            raise

    def listen(self, on: bool) -> None:
        if threading.get_ident() == self.thread:
            self.on = on

    def listen_outside(self, on: bool) -> None:
        self.listen(on)

    def remove(self) -> None:
        self.on = False
        remove_all(self.companions)
        remove_all(self._listening)


class _Function:
    """The listener of one function."""

    __slots__ = ("_begun", "_hearing", "_name", "guard")

    def __init__(self, hearing: FunctionTracing, name: str) -> None:
        self._hearing, self._name, self.guard = hearing, name, hearing.guard
        self._begun: Any = None

    def enter(self, call: InterceptedCall) -> bool:
        hearing = self._hearing
        if not hearing.on or hearing.inside or threading.get_ident() != hearing.thread or is_internal(call.caller):
            return False
        if not paddle.in_dynamic_mode():
            return False
        hearing.inside = True
        names = call.names or parameters_of(self._name)
        self._begun = hearing.listener.function_begins(self._name, names, call.args, call.kwargs)
        return True

    def exit(self, call: InterceptedCall, name: str, output: Any, failed: bool) -> None:
        begun, self._begun = self._begun, None
        try:
            if begun is not None and not failed:
                self._hearing.listener.function_ended(begun, output)
        finally:
            self._hearing.inside = False


@functools.cache
def _heard(owner: Any) -> tuple[tuple[str, str], ...]:
    """Return the names of an owner's functions with their common names. Cached, because an owner has thousands."""
    return tuple((name, common) for name in dir(owner) if (common := heard_name(name)) is not None)


def _functions() -> Iterator[tuple[Any, str, str]]:
    functions: set[int] = set()
    for owner in (paddle, paddle.nn.functional, paddle.linalg, paddle.Tensor):
        for name, common in _heard(owner):
            function = getattr(owner, name, None)
            # Skip ``paddle.tensor``, which is callable but also a module.
            if isinstance(function, _FUNCTIONS) and id(function) not in functions:
                functions.add(id(function))
                yield owner, name, common
    for name in ("T", "mT"):
        attribute = getattr(paddle.Tensor, name, None)
        if isinstance(attribute, property):
            yield attribute, "fget", "transpose"


def on_losses(observer: LossObserver) -> LossCalls:
    backwards = ((paddle.Tensor, "backward"), (paddle.autograd, "backward"))
    return LossCalls(_loss_functions(), _clips(), _scalers(), backwards, observer, _is_tensor, _learning, _silent)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, paddle.Tensor)


def _learning(tensor: Any) -> bool:
    return not tensor.stop_gradient


def _silent() -> bool:
    return not paddle.in_dynamic_mode()


# paddle's name of a loss function -> the common name, if they differ.
_NAMES = {
    "multi_label_margin_loss": "multilabel_margin_loss",
    "multi_label_soft_margin_loss": "multilabel_soft_margin_loss",
}


def _loss_functions() -> Iterator[Function]:
    reads: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
        "cross_entropy": _cross_entropy,
        "smooth_l1_loss": _smooth_l1,
        "ctc_loss": lambda arguments: {
            "roles": ("logits", *ROLES["ctc_loss"][1:])
        },  # paddle applies the softmax itself
    }
    for name in (*ROLES, *_NAMES):
        if hasattr(functional, name):
            yield Function(functional, name, _NAMES.get(name, name), read=reads.get(name))
    with_softmax = {"reduction": "none", "label_smoothing": 0.0}
    yield Function(functional, "softmax_with_cross_entropy", "cross_entropy", with_softmax, _cross_entropy)
    yield Function(functional, "square_error_cost", "mse_loss", {"reduction": "none"})
    yield Function(paddle.nn.MSELoss, "forward", "mse_loss", read=lambda a: {"reduction": a["self"].reduction})


def _cross_entropy(arguments: dict[str, Any]) -> dict[str, Any]:
    logits = arguments.get("input", arguments.get("logits"))
    labels = arguments.get("label", arguments.get("target"))
    softmax = bool(arguments.get("use_softmax", True))
    settings: dict[str, Any] = {"use_softmax": softmax}
    if not softmax:
        settings["roles"] = ("probabilities", "labels")
    if logits is not None and labels is not None:
        # With smoothing, labels of the logits' shape are soft labels, whatever `soft_label` is.
        smoothed = bool(arguments.get("label_smoothing")) and logits.shape == labels.shape
        settings["soft_label"] = bool(arguments.get("soft_label")) or smoothed
        axis = int(arguments["axis"])
        settings["axis"] = -1 if axis in (-1, logits.ndim - 1) else axis % logits.ndim
    return settings


def _smooth_l1(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the function's common name and threshold: paddle's smooth L1 loss is the Huber loss by default."""
    delta = float(arguments["delta"])
    if arguments.get("is_huber", True):
        return {"function": "huber_loss", "delta": delta}
    arguments.pop("delta")
    return {"function": "smooth_l1_loss", "beta": delta}


def _clips() -> Iterator[tuple[Any, str, Callable[[dict[str, Any], Any], ClipCall | None]]]:
    reads = {"clip_grad_norm_": clip_by_norm, "clip_grad_value_": clip_by_value}
    for name, read in reads.items():
        if hasattr(paddle.nn.utils, name):
            yield paddle.nn.utils, name, read


def _scalers() -> Iterator[tuple[Any, str, Callable[[Any], float]]]:
    # GradScaler.scale calls this method of its base class.
    yield paddle.amp.AmpScaler, "scale", _scale


def _scale(scaler: Any) -> float:
    return float(scaler._scale.item()) if scaler.is_enable() else 1.0


RAISES_AS_IT_IS = False  # paddle raises an OSError for any exception
READ = True  # by to_static
# Layers of paddle 3.0 and 3.1 call the listed hooks only, and none after an exception in forward.
_LISTED = not hasattr(paddle.nn.Layer(), "_forward_post_hooks_always_called")


def before_capture(capture: Callable[[], None], guard: Guard = RAISING) -> Handle | None:
    return None


class _Before(Hook):
    __slots__ = ()

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # While to_static builds its graph, tensors have no values, and reading them crashes paddle.
        if not paddle.in_dynamic_mode() or self._guard.tripped:
            return
        self.called = True
        try:
            if id(layer) == self._layer:
                self._call(self._key, layer, args, kwargs)
        except Exception as error:
            self._guard.catch(error)


class _After(Hook):
    __slots__ = ("_unbuilt",)

    def __init__(self, key: Any, call: AfterCall, layer: Any, guard: Guard) -> None:
        super().__init__(key, call, layer, guard)
        # paddle never marks a layer without hooks and without anything to build as built.
        self._unbuilt = type(layer)._build_once is paddle.nn.Layer._build_once and not layer._built

    def __call__(self, layer: Any, _: Any, output: Any) -> None:
        if self._unbuilt and len(layer._forward_pre_hooks) == len(layer._forward_post_hooks) == 1:
            vars(layer)["_built"] = False
        if not paddle.in_dynamic_mode() or self._guard.tripped:
            return
        # This hook is also called after an exception in forward, without an output.
        failed = output is None and sys.exc_info()[0] is not None
        try:
            if id(layer) == self._layer:
                self._call(self._key, layer, output, failed)
        except Exception as error:
            self._guard.catch(error)


def on_compilations() -> None:
    return None  # to_static gives no graph that can be run again


def on_regions(layers: Iterable[tuple[str, Any]], inside: Callable[[], str], guard: Guard) -> None:
    return None


def on_calls(layer: Any, key: Any, before: BeforeCall, after: AfterCall, guard: Guard = RAISING) -> list[Handle]:
    befores = [layer._forward_pre_hooks_with_kwargs_flag]
    always = getattr(layer, "_forward_post_hooks_always_called", None)
    afters = [] if always is None else [always]
    first, last = _Before(key, before, layer, guard), _After(key, after, layer, guard)
    direct = DirectCalls.of_layer(layer, first, partial(_ended, last))  # first: if it fails, no hook is left on
    return [
        *direct,
        HookEntry(layer._forward_pre_hooks, first, befores, listed=False),
        HookEntry(layer._forward_post_hooks, last, afters, listed=_LISTED),
    ]


def _ended(after: _After, layer: Any, output: Any) -> None:
    after(layer, (), output)


def aside() -> AbstractContextManager[Any]:
    # In static mode a function that gets a tensor with values crashes.
    return nullcontext() if paddle.in_dynamic_mode() else paddle.base.dygraph.guard()


def on_outputs(layer: Any, replaced: Replaced) -> Handle:
    return HookEntry(layer._forward_post_hooks, lambda _, args, output: replaced(args, output), listed=_LISTED)


def on_functions(called: OnCall, third_party: Sequence[str], guard: Guard = RAISING) -> Handle:
    return FunctionHooks(called, third_party, guard)


def hear_functions(listener: FunctionListener) -> FunctionTracing:
    return FunctionTracing(listener)


def on_gradient(tensor: Any, gradient: OnGradient) -> Handle | None:
    handle: Handle | None = None if tensor.stop_gradient else tensor.register_hook(gradient)
    return handle


def behind(tensor: Any, most: int) -> Iterator[tuple[Any, int]]:
    return breadth_first(tensor.grad_fn, lambda node: node.next_functions, most)


def transforming() -> bool:
    return False


def learning() -> bool:
    return bool(paddle.is_grad_enabled())


def recomputing() -> bool:
    # paddle has no flag of a running backward; its recompute calls forward from a PyLayer's backward.
    if "paddle.distributed.fleet.recompute.recompute" not in sys.modules:
        return False
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name in ("backward", "unpack") and code.co_filename.endswith("recompute.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
