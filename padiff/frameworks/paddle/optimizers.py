"""Optimizers of paddle, including those inside of wrappers; see `padiff.frameworks.hooking.Optimizers`.

paddle's optimizers have no hooks. But ``step()`` and ``minimize()`` both pass the gradients, after `grad_clip` and
before weight decay, to ``append_regularization_ops``, so padiff overrides that method of the optimizer (`Override`).

fleet's wrappers (`HybridParallelOptimizer`, `MixPrecisionOptimizer` and others) have no base class and contain an
optimizer. Some wrappers call its ``step()``, others do the same work themselves. So padiff hooks the whole chain for
gradients, and only the outermost object, which the loop calls, for the step: the wrapper's later work is part of the
update.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import paddle

from padiff.frameworks.hooking import Handle, OnConsumed, OptimizerSettings
from padiff.frameworks.interception import Override
from padiff.frameworks.paddle import optimizer_state
from padiff.records.traces import OptimizerState
from padiff.system.guard import RAISING, Guard, reraise_from_signal_handler

# Attributes in which wrappers store the wrapped optimizer.
_INSIDE = ("_inner_opt", "_optim", "_optimizer")


def _chain(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and the optimizers that it wraps, outermost first."""
    visited: list[Any] = []
    while optimizer is not None and not any(item is optimizer for item in visited):
        visited.append(optimizer)
        yield optimizer
        # Not getattr(), which wrappers forward to the wrapped optimizer.
        attributes = getattr(optimizer, "__dict__", {})
        optimizer = next((attributes[name] for name in _INSIDE if attributes.get(name) is not None), None)


def _innermost(optimizer: Any) -> Any | None:
    """Return the innermost optimizer of the chain if it is paddle's, else `None`."""
    last = list(_chain(optimizer))[-1]
    return last if isinstance(last, paddle.optimizer.Optimizer) and hasattr(last, "_parameter_list") else None


def is_optimizer(value: Any) -> bool:
    return isinstance(value, paddle.optimizer.Optimizer)


def steppers(optimizer: Any) -> list[Any]:
    # A wrapper is hooked as a whole.
    steps = all(callable(getattr(optimizer, name, None)) for name in ("step", "clear_grad"))
    return [optimizer] if steps and _innermost(optimizer) is not None else []


def optimized(optimizer: Any) -> Sequence[Any]:
    inner = _innermost(optimizer)
    listed = (inner._parameter_list if inner is not None else None) or []
    if listed and isinstance(listed[0], dict):
        return [p for group in inner._param_groups for p in group["params"]]  # type: ignore[union-attr]
    return list(listed)


def learning_rates(optimizer: Any) -> list[float]:
    inner: Any = _innermost(optimizer)
    # L-BFGS keeps its own learning rate, and tells its base class that it is 1.
    rate = float(inner.learning_rate if type(inner) is paddle.optimizer.LBFGS else inner.get_lr())
    listed = inner._parameter_list or []
    if listed and isinstance(listed[0], dict):
        # A group's own learning rate is a factor of the optimizer's.
        return [rate * float(group.get("learning_rate", 1.0)) for group in inner._param_groups]
    return [rate]


def settings(optimizer: Any) -> OptimizerSettings:
    return optimizer_state.settings(_innermost(optimizer))


def settings_stamp(optimizer: Any) -> Any:
    return optimizer_state.settings_stamp(_innermost(optimizer))


def has_state(optimizer: Any) -> bool:
    inner: Any = _innermost(optimizer)
    return bool(inner._accumulators_holder) or any(inner._accumulators.values())


def state(optimizer: Any, names: Mapping[int, str]) -> OptimizerState:
    return optimizer_state.state(_innermost(optimizer), names)


def set_state(optimizer: Any, names: Mapping[int, str], new: OptimizerState) -> Callable[[], None]:
    return optimizer_state.set_state(_innermost(optimizer), names, new)


def hook(
    optimizer: Any,
    consumed: OnConsumed,
    stepped: Callable[[], None],
    clipping: Callable[[Any], None] = lambda norm: None,
    guard: Guard = RAISING,
) -> list[Handle]:
    # Weak references: a script may delete the optimizer while the hooks are there.
    alive, inner = weakref.ref(optimizer), weakref.ref(_innermost(optimizer))
    seen = False

    def consume(parameters_and_grads: Any) -> None:
        if not _skips(inner()):
            consumed([p for p, _ in parameters_and_grads], [g for _, g in parameters_and_grads])

    def passed_on(original: Callable[..., Any], parameters_and_grads: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen = True
        guard.run(consume, parameters_and_grads)
        return original(parameters_and_grads, *args, **kwargs)

    def after_step() -> None:
        nonlocal seen
        if not seen and not _skips(inner()):
            # An optimizer with its own `step` (LBFGS): use the gradients of the last call of its closure.
            parameters = optimized(alive())
            consumed(parameters, [p.grad for p in parameters])
        seen = False
        stepped()

    handles: list[Handle] = [
        Override(item, "append_regularization_ops", passed_on, guard)
        for item in _chain(optimizer)
        if isinstance(item, paddle.optimizer.Optimizer)
    ]
    clip = getattr(inner(), "_grad_clip", None)
    if isinstance(clip, paddle.nn.ClipGradByGlobalNorm):
        handles.append(Override(clip, "_dygraph_clip", partial(_measured, guard, inner, clipping), guard))
    handles.append(Override(optimizer, "step", partial(_then, guard, after_step), guard))
    if hasattr(optimizer, "minimize"):
        handles.append(Override(optimizer, "minimize", partial(_then, guard, stepped), guard))
    return handles


def _measured(
    guard: Guard,
    alive: Callable[[], Any],
    clipping: Callable[[Any], None],
    original: Callable[..., Any],
    parameters_and_grads: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Clip by global norm, and pass the norm before clipping to ``clipping``."""
    guard.run(_measure, alive(), clipping, parameters_and_grads)
    return original(parameters_and_grads, *args, **kwargs)


def _measure(optimizer: Any, clipping: Callable[[Any], None], parameters_and_grads: Any) -> None:
    clipped = [g for p, g in parameters_and_grads if g is not None and getattr(p, "need_clip", True)]
    norm = None if _skips(optimizer) else _global_norm(clipped)
    if norm is not None:
        clipping(norm)


def _global_norm(gradients: Sequence[Any]) -> Any | None:
    """Return the norm of all gradients together; `None` if there are none, or if some are sparse or sharded."""
    try:
        with paddle.no_grad():
            wide = [g.astype("float32") if g.element_size() < 4 else g for g in gradients]
            squares = [gradient.square().sum() for gradient in wide]
            return paddle.add_n(squares).sqrt() if squares else None
    except Exception as error:  # sparse or sharded gradients
        reraise_from_signal_handler(error)
        return None


def _then(guard: Guard, afterwards: Callable[[], None], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    guard.run(afterwards)
    return result


def _skips(optimizer: Any) -> bool:
    """Return True if this call of ``step`` changes nothing, because a scaler called it with overflowed gradients."""
    look = getattr(optimizer, "_get_auxiliary_var", None)
    return look is not None and bool(look("found_inf"))


def in_float64(optimizer: Any) -> Callable[[], None]:
    inner: Any = _innermost(optimizer)
    # The optimizer caches its learning rate as a tensor of the dtype of its updates.
    rates, dtype = dict(inner._learning_rate_map), inner._dtype
    inner._learning_rate_map.clear()
    inner._dtype = "float64"

    def undo() -> None:
        inner._learning_rate_map.clear()
        inner._learning_rate_map.update(rates)
        inner._dtype = dtype

    return undo


def step(optimizer: Any) -> None:
    optimizer.step()
    optimizer.clear_grad(set_to_zero=False)
