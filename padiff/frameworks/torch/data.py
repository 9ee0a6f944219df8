"""Data as PyTorch's loaders take it; see `padiff.frameworks.base.Data`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from padiff.frameworks.torch import tensors


class _Items(Dataset):
    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


def dataset(items: Sequence[Any]) -> Any:
    return _Items(items)


def tensor(array: np.ndarray, near: Any = None) -> Any:
    return tensors.make(array, torch.empty(0) if near is None else near)
