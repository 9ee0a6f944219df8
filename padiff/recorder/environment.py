"""The environment fingerprint: what around a training, besides its code, can change its numbers.

What it means is said in `padiff.records.environment`. Reading it changes nothing. A run is sent to others: no names of
people or machines, and no paths are in it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from padiff.frameworks.base import Framework
from padiff.model.selection import Node

#: Where Linux describes the processor.
CPU_FILE = "/proc/cpuinfo"

# Instruction sets after which math libraries choose their code.
_INSTRUCTIONS = frozenset((
    "sse4_2", "avx", "avx2", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2",
    "svebf16", "sme",
))  # fmt: skip

_VARIABLES = re.compile(
    r"CUBLAS_WORKSPACE_CONFIG|CUBLASLT_WORKSPACE_SIZE|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
    r"|PYTHONHASHSEED|CUDA_LAUNCH_BLOCKING|NCCL_ALGO|NCCL_PROTO|ATEN_CPU_CAPABILITY"
    r"|(FLAGS|OMP|MKL|KMP|OPENBLAS|GOTO|ONEDNN|DNNL|BLIS|VECLIB)_\w+"
)
# Values that say nothing but themselves: numbers, words, lists of them. Not paths, or what else may be in there.
_PLAIN = re.compile(r"[\w.,:;=+ -]{0,80}")


def fingerprint(framework: Framework, nodes: Iterable[Node]) -> dict[str, Any]:
    """The environment of a training as it stands now.

    Args:
        nodes: the model's layers; the devices that their tensors are on are those of the training.
    """
    device, parameters = framework.tensors.device, framework.layers.parameters
    devices = {device(tensor) for node in nodes for _, tensor, _ in parameters(node.layer)}
    kinds = sorted({name.replace("cuda", "gpu") for name in devices})
    found = {
        **_machine(),
        "device.kind": ", ".join(kinds) or "none",
        "framework.version": framework.version,
        **framework.environment.read(kinds),
        **framework.environment.autocast(),
        **_variables(),
    }
    return {name: value for name, value in found.items() if value is not None}


def _machine() -> dict[str, Any]:
    model, instructions = _processor(CPU_FILE)
    try:
        cores: int | None = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on Linux
        cores = os.cpu_count()
    with np.errstate(all="ignore"):
        flushed = bool(np.float32(1e-40) * np.float32(1) == 0)
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu.model": model,
        "cpu.instructions": instructions,
        "cpu.cores": cores,
        # By name: what the package offers reaches into every room, and this one is below most of them.
        "padiff": str(sys.modules["padiff"].__version__),
        "numpy": np.__version__,
        # Nothing can be asked for it, but it shows: the smallest numbers there are vanish when they are computed with.
        "denormals.flushed": flushed,
    }


@cache
def _processor(path: str) -> tuple[str, str]:
    """Model and instruction sets of the first processor; none is put into a machine that runs."""
    model, flags = platform.machine(), ""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                model = value.strip()
            elif name.strip() in ("flags", "Features"):
                flags = " ".join(sorted(_INSTRUCTIONS.intersection(value.split())))
            elif not line.strip():
                break  # further processors: machines have hundreds
    return model, flags


def _variables() -> dict[str, str]:
    """The environment variables that matter; of values that may name people, machines or files, that they are set."""
    private = {platform.node(), *(os.environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "HOSTNAME"))}
    private = {name for name in private if len(name) > 2}
    found = {}
    for name, value in os.environ.items():
        if _VARIABLES.fullmatch(name):
            plain = _PLAIN.fullmatch(value) and not any(one in value for one in private)
            found[f"env.{name}"] = value if plain else "(set)"
    return found
