"""PyTorch's random numbers; see `padiff.frameworks.base.Randomness`."""

from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from padiff.frameworks.torch.modes import aside


def kept() -> AbstractContextManager[Any]:
    return torch.random.fork_rng()


def state() -> dict[str, Any]:
    with aside():
        states = {"torch.cpu": torch.get_rng_state()}
        # Do not initialize a device.
        if torch.cuda.is_initialized():
            states |= {f"torch.cuda.{k}": torch.cuda.get_rng_state(k) for k in range(torch.cuda.device_count())}
    return states


def restore(state: Mapping[str, Any]) -> None:
    with aside():
        for name, tensor in state.items():
            if name == "torch.cpu":
                torch.set_rng_state(tensor)
            elif torch.cuda.is_initialized() and int(name.rpartition(".")[2]) < torch.cuda.device_count():
                torch.cuda.set_rng_state(tensor, int(name.rpartition(".")[2]))


def stamp() -> Hashable:
    states = state().values()
    with aside():
        return tuple(tensor.numpy().tobytes() for tensor in states)


def as_arrays(state: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in state.items()}


def of_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    current = state()
    return {
        name: torch.from_numpy(np.array(array))
        for name, array in arrays.items()
        if name in current and array.dtype == np.uint8 and array.shape == tuple(current[name].shape)
    }
