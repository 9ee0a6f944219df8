"""Tensors and datasets for paddle's data loaders; see `padiff.frameworks.base.Data`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import paddle

from padiff.frameworks.dataset_base import Items
from padiff.frameworks.paddle import tensors


class _Dataset(Items, paddle.io.Dataset):
    pass


def dataset(items: Sequence[Any]) -> Any:
    return _Dataset(items)


def tensor(array: np.ndarray, near: Any = None) -> Any:
    return tensors.make(array, paddle.empty([0]) if near is None else near)
