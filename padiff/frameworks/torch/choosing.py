"""PyTorch's functions that choose; see `padiff.frameworks.feeding`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from padiff.frameworks.feeding import ChoicesFed, ChoiceSource
from padiff.frameworks.hooking import Handle

_NAMES = ("topk", "argmax", "argmin", "sort", "argsort", "max", "min")


def functions() -> Iterator[tuple[Any, str, str]]:
    for owner in (torch, torch.Tensor):
        for name in _NAMES:
            yield owner, name, name


def choosing(scores: Any, output: Any, axis: int | None, places: np.ndarray) -> Any:
    if isinstance(output, torch.Tensor):
        return torch.as_tensor(places, dtype=output.dtype, device=output.device)
    values, own = output
    chosen = torch.as_tensor(places, dtype=own.dtype, device=own.device)
    assert axis is not None
    along = chosen if chosen.ndim == scores.ndim else chosen.unsqueeze(axis)
    return type(output)((scores.gather(axis, along).reshape(values.shape), chosen))


def feed(source: ChoiceSource) -> Handle:
    return ChoicesFed(sys.modules[__name__], source)
