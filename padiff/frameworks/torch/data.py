"""Tensors and datasets for PyTorch's data loaders; see `padiff.frameworks.base.Data`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from padiff.frameworks.dataset_base import Items
from padiff.frameworks.torch import tensors


class _Dataset(Items, Dataset):
    pass


def dataset(items: Sequence[Any]) -> Any:
    return _Dataset(items)


def tensor(array: np.ndarray, near: Any = None) -> Any:
    return tensors.make(array, torch.empty(0) if near is None else near)
