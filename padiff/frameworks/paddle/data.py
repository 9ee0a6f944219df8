"""Data as paddle's loaders take it; see `padiff.frameworks.base.Data`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from padiff.frameworks.paddle import tensors


class _Items(paddle.io.Dataset):
    def __init__(self, items: Sequence[Any]) -> None:
        super().__init__()
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Any:
        return self._items[index]


def dataset(items: Sequence[Any]) -> Any:
    return _Items(items)


def tensor(array: np.ndarray, near: Any = None) -> Any:
    return tensors.make(array, paddle.empty([0]) if near is None else near)
