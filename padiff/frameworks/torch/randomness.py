"""PyTorch's random numbers; see `padiff.frameworks.base.Randomness`."""

from contextlib import AbstractContextManager
from typing import Any

import torch


def kept() -> AbstractContextManager[Any]:
    return torch.random.fork_rng()
