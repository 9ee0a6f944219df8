"""Inputs of a recorded model that the training computes: outputs of models, of this recorder or another one."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

# Number of recent outputs of models that are checked for sharing their values with an input.
_LAST = 32
#: Recent outputs of the models of all recorders of this process.
_OUTPUTS: deque[weakref.ref[Any]] = deque(maxlen=_LAST)


def add_output(tensor: Any) -> None:
    """Add an output of a model."""
    _OUTPUTS.append(weakref.ref(tensor))


def is_computed(tensor: Any, same_values: Any) -> bool:
    """Return True if an input is a result that gradients flow through, or another view of an output of a model.

    Args:
        same_values: returns True if two tensors are views of the same values.
    """
    if not tensor.is_leaf:
        return True
    outputs = (output() for output in _OUTPUTS)
    return any(output is not None and (output is tensor or same_values(tensor, output)) for output in outputs)
