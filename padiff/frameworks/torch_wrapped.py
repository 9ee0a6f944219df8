"""Optimizers of torch inside of others.

accelerate's ``AcceleratedOptimizer`` derives from torch's class without being initialised as one, Lightning's
``LightningOptimizer`` imitates the class of what it holds, DeepSpeed's derive from nothing. They have no hooks of their
own, and hand their work to an optimizer that has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch


def steppers(optimizer: Any) -> list[Any]:
    """See `padiff.frameworks.base.Framework.steppers`."""
    found = {id(one): one for one in _inside(optimizer, ())}
    return list(found.values())


def _inside(optimizer: Any, above: tuple[int, ...]) -> Iterator[Any]:
    if isinstance(optimizer, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" in vars(optimizer):
        yield optimizer
        return
    # What has both is an optimizer; a scheduler, say, holds one as well.
    steps = all(callable(getattr(optimizer, name, None)) for name in ("step", "zero_grad"))
    if not steps or id(optimizer) in above or not hasattr(optimizer, "__dict__"):
        return
    inside = [one for held in _held(optimizer) for one in _inside(held, (*above, id(optimizer)))]
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        yield from inside
        return
    own = {id(parameter) for group in groups for parameter in group["params"]}
    # One for other parameters is somebody else's.
    yield from (one for one in inside if {id(p) for group in one.param_groups for p in group["params"]} <= own)


def _held(optimizer: Any) -> Iterator[Any]:
    for value in vars(optimizer).values():
        if isinstance(value, (list, tuple)):
            yield from value
        elif isinstance(value, Mapping):
            yield from value.values()
        else:
            yield value
