"""The environment fingerprint: facts outside of a training's code that can change its numbers.

`padiff.records.environment_differences` explains each entry. Reading the fingerprint changes nothing. Users share
runs, so the fingerprint contains no names of people or machines, and no paths.
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

#: The file in which Linux describes the processor.
CPU_FILE = "/proc/cpuinfo"

# Instruction sets by which math libraries select their kernels.
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
# Values without private content: numbers, words, lists of these; no paths.
_PLAIN = re.compile(r"[\w.,:;=+ -]{0,80}")


def fingerprint(framework: Framework, nodes: Iterable[Node]) -> dict[str, Any]:
    """Return the current environment of a training.

    Args:
        nodes: the model's layers, whose tensors' devices are the devices of the training.
    """
    device, parameters = framework.tensors.device, framework.layers.parameters
    devices = {device(tensor) for node in nodes for _, tensor, _ in parameters(node.layer)}
    kinds = sorted({name.replace("cuda", "gpu") for name in devices})
    facts = {
        **_machine(),
        "device.kind": ", ".join(kinds) or "none",
        "framework.version": framework.version,
        **framework.environment.read(kinds),
        **framework.environment.autocast(),
        **_variables(),
    }
    return {name: value for name, value in facts.items() if value is not None}


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
        # Through `sys.modules`: an import of `padiff` would depend on packages above this one.
        "padiff": str(sys.modules["padiff"].__version__),
        "numpy": np.__version__,
        # No call returns this setting. It shows in arithmetic: denormal numbers become zero.
        "denormals.flushed": flushed,
    }


@cache
def _processor(path: str) -> tuple[str, str]:
    """Return model and instruction sets of the first processor. Cached: a running machine keeps its processors."""
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
    """Return the environment variables that matter; values that may be private become ``(set)``."""
    private = {platform.node(), *(os.environ.get(name, "") for name in ("USER", "LOGNAME", "USERNAME", "HOSTNAME"))}
    private = {name for name in private if len(name) > 2}
    variables = {}
    for name, value in os.environ.items():
        if _VARIABLES.fullmatch(name):
            plain = _PLAIN.fullmatch(value) and not any(secret in value for secret in private)
            variables[f"env.{name}"] = value if plain else "(set)"
    return variables
