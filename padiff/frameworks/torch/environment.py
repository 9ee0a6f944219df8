"""PyTorch's versions, devices and switches that can change numbers, its random numbers, and datasets."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from padiff.frameworks.base import Items
from padiff.frameworks.settings import launched
from padiff.frameworks.torch import tensors
from padiff.frameworks.torch.calls import aside


def read(kinds: Collection[str]) -> dict[str, Any]:
    backends, cuda = torch.backends, torch.backends.cuda
    readers: dict[str, Callable[[], Any]] = {
        "framework.cuda": lambda: torch.version.cuda,
        "framework.cudnn": backends.cudnn.version,
        "threads.intra_op": torch.get_num_threads,
        "threads.inter_op": torch.get_num_interop_threads,
        "dtype.default": lambda: str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic.algorithms": torch.are_deterministic_algorithms_enabled,
        "deterministic.warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
        "cudnn.enabled": lambda: backends.cudnn.enabled,
        "cudnn.benchmark": lambda: backends.cudnn.benchmark,
        "cudnn.deterministic": lambda: backends.cudnn.deterministic,
        "tf32.matmul": lambda: _tf32(cuda.matmul, "allow_tf32"),
        "tf32.cudnn": lambda: _tf32(getattr(backends.cudnn, "conv", None), "allow_tf32", backends.cudnn),
        "matmul.precision": torch.get_float32_matmul_precision,
        "matmul.reduced_fp16": lambda: _switch(cuda.matmul.allow_fp16_reduced_precision_reduction),
        "matmul.reduced_bf16": lambda: _switch(cuda.matmul.allow_bf16_reduced_precision_reduction),
        "attention.fastpath": lambda: backends.mha.get_fastpath_enabled(),
        "attention.flash": cuda.flash_sdp_enabled,
        "attention.efficient": cuda.mem_efficient_sdp_enabled,
        "onednn.enabled": lambda: bool(backends.mkldnn.enabled),
        "cpu.capability": lambda: backends.cpu.get_cpu_capability(),
    }
    values: dict[str, Any] = {}
    for name, ask in readers.items():
        # Some versions lack some switches, and torch raises if a program mixed old and new switches of one setting.
        with contextlib.suppress(AttributeError, RuntimeError, TypeError):
            values[name] = ask()
    # Querying devices would initialize CUDA in a process that uses no device yet.
    if "gpu" in kinds and torch.cuda.is_initialized():
        count = torch.cuda.device_count()
        values["device.count"] = count
        values["device.names"] = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(count)}))
    return values


def autocast() -> dict[str, Any]:
    if not hasattr(torch, "get_autocast_dtype"):  # before torch 2.4
        if torch.is_autocast_enabled():
            return {"autocast.dtype": str(torch.get_autocast_gpu_dtype()).removeprefix("torch.")}
        if torch.is_autocast_cpu_enabled():
            return {"autocast.dtype": str(torch.get_autocast_cpu_dtype()).removeprefix("torch.")}
        return {"autocast.dtype": "off"}
    for device in ("cuda", "cpu", "xpu", "mps"):
        with contextlib.suppress(RuntimeError):  # a build may lack one
            if torch.is_autocast_enabled(device):
                return {"autocast.dtype": str(torch.get_autocast_dtype(device)).removeprefix("torch.")}
    return {"autocast.dtype": "off"}


def distributed() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    # Before the process group is initialized, the environment variables of torchrun have the rank.
    return launched("RANK", "WORLD_SIZE")


def _tf32(newer: Any, older_name: str, older: Any = None) -> bool:
    """Return True if TF32 is on. Newer versions have a precision instead, and warn if a program uses the switch too."""
    if hasattr(newer, "fp32_precision"):
        return bool(newer.fp32_precision == "tf32")
    return bool(getattr(older if older is not None else newer, older_name))


def _switch(value: Any) -> bool:
    # Newer versions return a pair of switches.
    return bool(value[0] if isinstance(value, tuple) else value)


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


def draw_as_eager() -> None:
    """Make code that is compiled from now on draw the random numbers of eager code."""
    with contextlib.suppress(ImportError, AttributeError):
        config: Any = importlib.import_module("torch._inductor.config")
        config.fallback_random = True


def as_arrays(state: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in state.items()}


def of_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    current = state()
    return {
        name: torch.from_numpy(np.array(array))
        for name, array in arrays.items()
        if name in current and array.dtype == np.uint8 and array.shape == tuple(current[name].shape)
    }


class _Dataset(Items, Dataset):
    pass


def dataset(items: Sequence[Any]) -> Any:
    return _Dataset(items)


def tensor(array: np.ndarray, near: Any = None) -> Any:
    return tensors.make(array, torch.empty(0) if near is None else near)
