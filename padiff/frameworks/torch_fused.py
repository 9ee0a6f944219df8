"""What optimizers of torch consume that unscale gradients by themselves.

``GradScaler`` hands an optimizer of ``fused=True`` the scale, and whether anything overflowed, as attributes for the
length of its ``step``: the kernel divides by the one and changes nothing because of the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def _handed(optimizer: Any, name: str) -> Any:
    """What a scaler handed over for this step; `None` outside of one, and where the optimizer would not look at it."""
    return getattr(optimizer, name, None) if getattr(optimizer, "_step_supports_amp_scaling", False) else None


def skips(optimizer: Any) -> bool:
    """Whether the step that begins will change nothing, because gradients overflowed."""
    found = _handed(optimizer, "found_inf")
    return found is not None and bool(found)


def gradients_of(optimizer: Any, parameters: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Parameters with the gradients that the step will use; where it unscales them, with unscaled copies."""
    scale = _handed(optimizer, "grad_scale")
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and scale is not None:
            with torch.no_grad():
                # Of no dimension, or it would decide on shape and dtype of what comes out.
                gradient = gradient / torch.as_tensor(scale, device=gradient.device).reshape(())
        yield parameter, gradient
