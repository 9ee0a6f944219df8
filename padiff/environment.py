"""The environment fingerprint: what around a training, besides its code, can change its numbers.

A flat mapping from common names (``threads.intra_op``, ``tf32.matmul``, ``autocast.dtype``) to plain values, so that
runs of two frameworks can be compared. Reading it changes nothing. A run is sent to others: no names of people or
machines, and no paths are in it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from padiff.errors import UsageError
from padiff.frameworks.base import Framework
from padiff.model.selection import Node
from padiff.records import RunInfo

#: Where Linux describes the processor.
CPU_FILE = "/proc/cpuinfo"

# Instruction sets after which math libraries choose their code.
_INSTRUCTIONS = frozenset(
    (
        "sse4_2",
        "avx",
        "avx2",
        "fma",
        "avx_vnni",
        "avx512f",
        "avx512bw",
        "avx512vl",
        "avx512_vnni",
        "avx512_bf16",
        "avx512_fp16",
        "amx_tile",
        "amx_bf16",
        "amx_int8",
        "asimd",
        "asimdhp",
        "asimddp",
        "bf16",
        "i8mm",
        "sve",
        "sve2",
        "svebf16",
        "sme",
    )
)

_VARIABLES = re.compile(
    r"CUBLAS_WORKSPACE_CONFIG|CUBLASLT_WORKSPACE_SIZE|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
    r"|PYTHONHASHSEED|CUDA_LAUNCH_BLOCKING|NCCL_ALGO|NCCL_PROTO|ATEN_CPU_CAPABILITY"
    r"|(FLAGS|OMP|MKL|KMP|OPENBLAS|GOTO|ONEDNN|DNNL|BLIS|VECLIB)_\w+"
)
# Values that say nothing but themselves: numbers, words, lists of them. Not paths, or what else may be in there.
_PLAIN = re.compile(r"[\w.,:;=+ -]{0,80}")

# What can change numbers, the most telling first; everything else comes behind.
_NUMERIC = (
    "autocast.dtype",
    "autocast.level",
    "tf32.",
    "matmul.",
    "dtype.default",
    "device.kind",
    "deterministic.",
    "cudnn.",
    "threads.",
    "denormals.",
    "attention.",
    "onednn.",
    "cpu.capability",
    "cpu.instructions",
    "device.names",
    "framework.",
    "env.CUBLAS",
    "env.NVIDIA",
    "env.TORCH",
)
# What means something on a GPU only, and what within one framework only: paddle sets OMP_NUM_THREADS itself, and oneDNN
# is another set of kernels in each. `threads.intra_op` says what came of the variables.
_GPU_ONLY = ("tf32.", "cudnn.", "matmul.reduced", "env.CUBLAS", "env.NVIDIA", "env.TORCH", "env.CUDA", "env.NCCL")
_ONE_FRAMEWORK = (
    "framework.",
    "cpu.capability",
    "onednn.",
    "env.FLAGS_",
    "env.OMP_",
    "env.MKL_",
    "env.KMP_",
    "env.ATEN",
)


def fingerprint(framework: Framework, nodes: Iterable[Node]) -> dict[str, Any]:
    """The environment of a training as it stands now.

    Args:
        nodes: the model's layers; the devices that their tensors are on are those of the training.
    """
    kinds = sorted(
        {
            framework.device(tensor).replace("cuda", "gpu")
            for node in nodes
            for _, tensor, _ in framework.parameters(node.layer)
        }
    )
    found = {
        **_machine(),
        "device.kind": ", ".join(kinds) or "none",
        "framework.version": framework.version,
        **framework.environment(kinds),
        **framework.autocast(),
        **_variables(),
    }
    return {name: value for name, value in found.items() if value is not None}


def differences(reference: RunInfo, candidate: RunInfo) -> tuple[str, ...]:
    """What differs between the environments of two runs, what can change numbers first; in words.

    Names that one framework does not have are passed over, and so are switches of GPUs where neither run used one.
    """
    ours, theirs = reference.environment, candidate.environment
    if not ours or not theirs:
        silent = [side for side, known in (("reference", ours), ("candidate", theirs)) if not known]
        return (f"not known of the {silent[0]} run: it was recorded without",) if len(silent) == 1 else ()
    on_gpu = any("gpu" in str(env.get("device.kind")) for env in (ours, theirs))
    names = [
        name
        for name in {*ours, *theirs}
        if not (name.startswith(_GPU_ONLY) and not on_gpu)
        if not (name.startswith(_ONE_FRAMEWORK) and reference.framework != candidate.framework)
        # A variable that is not set is known not to be set.
        if name.startswith("env.") or (name in ours and name in theirs)
        if ours.get(name) != theirs.get(name)
    ]
    return tuple(
        f"{name} {environment_text(ours.get(name))} against {environment_text(theirs.get(name))}"
        for name in sorted(names, key=_rank)
    )


def cautions(environment: Mapping[str, Any]) -> list[str]:
    """What of an environment makes runs hard to repeat or to compare to the last digit."""
    found = []
    on_gpu = "gpu" in str(environment.get("device.kind"))
    tf32 = [name for name in ("tf32.matmul", "tf32.cudnn") if on_gpu and environment.get(name)]
    if tf32:
        found.append(f"TF32 is on ({', '.join(tf32)}): products have 10 bits of mantissa, relative errors of 1e-3")
    if environment.get("autocast.dtype", "off") != "off":
        found.append(f"autocast computes in {environment['autocast.dtype']}")
    if on_gpu and not environment.get("deterministic.algorithms") and not environment.get("cudnn.deterministic"):
        found.append("no deterministic algorithms are asked for: on a GPU two equal trainings may differ")
    if on_gpu and environment.get("cudnn.benchmark"):
        found.append("cuDNN chooses its algorithms by their speed (benchmark): two equal trainings may differ")
    threads = environment.get("threads.intra_op")
    if isinstance(threads, int) and threads > 1:
        found.append(f"{threads} threads share an operation: sums have another order than with another number of them")
    if environment.get("denormals.flushed"):
        found.append("denormal numbers are flushed to zero")
    return found


def _rank(name: str) -> tuple[int, str]:
    return next((i for i, known in enumerate(_NUMERIC) if name.startswith(known)), len(_NUMERIC)), name


def environment_text(value: Any) -> str:
    """A value of a fingerprint in words."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value) if value != "" else "empty"


def _machine() -> dict[str, Any]:
    model, instructions = _processor()
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


def _processor() -> tuple[str, str]:
    """Model and instruction sets of the first processor."""
    model, flags = platform.machine(), ""
    with contextlib.suppress(OSError), open(CPU_FILE, encoding="utf-8", errors="replace") as file:
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


def environment_from_json(content: Any) -> dict[str, Any]:
    """The fingerprint of a run folder, as far as it is one.

    Raises:
        UsageError: it is no mapping of names to plain values.
    """
    if not isinstance(content, Mapping) or not all(
        isinstance(value, (str, int, float, bool)) for value in content.values()
    ):
        raise UsageError("an environment is a mapping of names to numbers, words and switches")
    return {str(name): value for name, value in content.items()}
