"""What of PyTorch's state can change numbers; reading it makes no CUDA context and warns of nothing. See
`padiff.frameworks.base.Environment`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any

import torch

from padiff.frameworks.launchers import launched


def read(kinds: Collection[str]) -> dict[str, Any]:
    backends, cuda = torch.backends, torch.backends.cuda
    asked: dict[str, Callable[[], Any]] = {
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
        "attention.fastpath": backends.mha.get_fastpath_enabled,
        "attention.flash": cuda.flash_sdp_enabled,
        "attention.efficient": cuda.mem_efficient_sdp_enabled,
        "onednn.enabled": lambda: bool(backends.mkldnn.enabled),
        "cpu.capability": lambda: backends.cpu.get_cpu_capability(),
    }
    found: dict[str, Any] = {}
    for name, ask in asked.items():
        # Other versions lack some; and torch raises where its old and its new switches of one thing were mixed.
        with contextlib.suppress(AttributeError, RuntimeError, TypeError):
            found[name] = ask()
    # Asking for a device of a process that uses none yet would start CUDA.
    if "gpu" in kinds and torch.cuda.is_initialized():
        count = torch.cuda.device_count()
        found["device.count"] = count
        found["device.names"] = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(count)}))
    return found


def autocast() -> dict[str, Any]:
    for device in ("cuda", "cpu", "xpu", "mps"):
        with contextlib.suppress(RuntimeError, TypeError):  # older ones take no device; a build may lack one
            if torch.is_autocast_enabled(device):
                return {"autocast.dtype": str(torch.get_autocast_dtype(device)).removeprefix("torch.")}
    return {"autocast.dtype": "off"}


def distributed() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    # Before the process group is made, torchrun has said it already.
    return launched("RANK", "WORLD_SIZE")


def _tf32(newer: Any, older_name: str, older: Any = None) -> bool:
    """Newer versions have a precision in the place of the switch, and warn of the mixing of both."""
    if hasattr(newer, "fp32_precision"):
        return bool(newer.fp32_precision == "tf32")
    return bool(getattr(older if older is not None else newer, older_name))


def _switch(value: Any) -> bool:
    # Newer versions have a pair of switches here.
    return bool(value[0] if isinstance(value, tuple) else value)
