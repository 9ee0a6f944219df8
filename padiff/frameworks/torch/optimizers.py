"""Optimizers of PyTorch, including those inside of wrappers; see `padiff.frameworks.hooking.Optimizers`.

accelerate's ``AcceleratedOptimizer`` derives from torch's class without initializing it, Lightning's
``LightningOptimizer`` imitates the class of the wrapped optimizer, DeepSpeed's wrappers derive from no class of torch.
These wrappers have no hooks of their own, and call an inner optimizer that has hooks.

During ``step`` of an optimizer with ``fused=True``, ``GradScaler`` sets two attributes on it: the scale, by which the
kernel divides the gradients, and a flag of an overflow, on which the kernel changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from padiff.frameworks.hooking import Handle, HookEntry, OnConsumed
from padiff.frameworks.torch import optimizer_state
from padiff.frameworks.torch.calls import call_aside, capturing
from padiff.frameworks.torch.optimizer_state import settings as settings
from padiff.frameworks.torch.optimizer_state import settings_stamp as settings_stamp
from padiff.records.traces import OptimizerState
from padiff.system.guard import RAISING, Guard


def is_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer)


def steppers(optimizer: Any) -> list[Any]:
    optimizers = {id(inner): inner for inner in _inside(optimizer, ())}
    return list(optimizers.values())


def _inside(optimizer: Any, above: tuple[int, ...]) -> Iterator[Any]:
    if isinstance(optimizer, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" in vars(optimizer):
        yield optimizer
        return
    # Only an optimizer has both methods; a scheduler, for example, also holds an optimizer.
    steps = all(callable(getattr(optimizer, name, None)) for name in ("step", "zero_grad"))
    if not steps or id(optimizer) in above or not hasattr(optimizer, "__dict__"):
        return
    inside = [inner for value in _held(optimizer) for inner in _inside(value, (*above, id(optimizer)))]
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        yield from inside
        return
    parameters = {id(parameter) for group in groups for parameter in group["params"]}
    # Skip an optimizer of other parameters, which is not part of this wrapper.
    yield from (
        inner for inner in inside if {id(p) for group in inner.param_groups for p in group["params"]} <= parameters
    )


def _held(optimizer: Any) -> Iterator[Any]:
    for value in vars(optimizer).values():
        if isinstance(value, (list, tuple)):
            yield from value
        elif isinstance(value, Mapping):
            yield from value.values()
        else:
            yield value


def hook(
    optimizer: Any,
    consumed: OnConsumed,
    stepped: Callable[[], None],
    clipping: Callable[[Any], None] = lambda norm: None,  # torch's optimizers do not clip
    guard: Guard = RAISING,
) -> list[Handle]:
    def consume() -> None:
        if not capturing() and not _skips(optimizer):
            parameters = optimized(optimizer)
            consumed(parameters, _gradients_of(optimizer, parameters))

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # args[0] is the optimizer. A closure (Lightning passes one) computes the gradients of this step, so they are
        # read when the closure returns.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            guard.run(call_aside, consume)
            return None

        def closure_then_consume() -> Any:
            loss = closure()
            guard.run(call_aside, consume)
            return loss

        if len(args) > 1:
            return (args[0], closure_then_consume, *args[2:]), kwargs
        return args, {**kwargs, "closure": closure_then_consume}

    return [
        HookEntry(optimizer._optimizer_step_pre_hooks, before),
        HookEntry(optimizer._optimizer_step_post_hooks, lambda *_: capturing() or guard.run(call_aside, stepped)),
    ]


def _handed(optimizer: Any, name: str) -> Any:
    """Return a value that a scaler set for this step; `None` outside of a step, or if the optimizer ignores scalers."""
    return getattr(optimizer, name, None) if getattr(optimizer, "_step_supports_amp_scaling", False) else None


def _skips(optimizer: Any) -> bool:
    """Return True if the step that begins will change nothing, because gradients overflowed."""
    overflow = _handed(optimizer, "found_inf")
    return overflow is not None and bool(overflow)


def _gradients_of(optimizer: Any, parameters: Sequence[Any]) -> list[Any]:
    """Return the gradients that the step will use; unscaled copies if the step unscales the gradients."""
    gradients = [parameter.grad for parameter in parameters]
    scale = _handed(optimizer, "grad_scale")
    if scale is None:
        return gradients
    with torch.no_grad():
        # A scale without dimensions, because otherwise it would determine the shape and dtype of the result.
        return [g if g is None else g / torch.as_tensor(scale, device=g.device).reshape(()) for g in gradients]


def optimized(optimizer: Any) -> Sequence[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def learning_rates(optimizer: Any) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]


def has_state(optimizer: Any) -> bool:
    return optimizer_state.has_state(steppers(optimizer))


def state(optimizer: Any, names: Mapping[int, str]) -> OptimizerState:
    return optimizer_state.state(steppers(optimizer), names)


def set_state(optimizer: Any, names: Mapping[int, str], new: OptimizerState) -> Callable[[], None]:
    return optimizer_state.set_state(steppers(optimizer), names, new)


def in_float64(optimizer: Any) -> Callable[[], None]:
    return lambda: None  # the state has the dtype of the parameters


def step(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()
