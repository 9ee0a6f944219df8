"""Comparison of two runs' environments, and warnings about settings that make runs hard to repeat.

An environment is a flat mapping from common names (``threads.intra_op``, ``tf32.matmul``, ``autocast.dtype``) to plain
values, so that runs of two frameworks can be compared. `padiff.recorder.environment_fingerprint` collects it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padiff.errors import UsageError
from padiff.records.recorded import RunInfo

# Prefixes of names that can change numbers, the most informative first; all other names sort after these.
_NUMERIC = (
    "autocast.dtype", "autocast.level", "tf32.", "matmul.", "dtype.default", "device.kind", "deterministic.", "cudnn.",
    "threads.", "denormals.", "attention.", "onednn.", "cpu.capability", "cpu.instructions", "device.names",
    "framework.", "env.CUBLAS", "env.NVIDIA", "env.TORCH",
)  # fmt: skip
# Names that matter on a GPU only, and names that are comparable within one framework only: paddle sets OMP_NUM_THREADS
# itself, and oneDNN is another set of kernels in each framework. `threads.intra_op` holds the resulting thread count.
_GPU_ONLY = ("tf32.", "cudnn.", "matmul.reduced", "env.CUBLAS", "env.NVIDIA", "env.TORCH", "env.CUDA", "env.NCCL")
_ONE_FRAMEWORK = (
    "framework.", "cpu.capability", "onednn.", "env.FLAGS_", "env.OMP_", "env.MKL_", "env.KMP_", "env.ATEN",
)  # fmt: skip


def differences(reference: RunInfo, candidate: RunInfo) -> tuple[str, ...]:
    """Return the differences between two runs' environments in words, those that can change numbers first.

    Names that only one framework has are skipped, and so are settings of GPUs if neither run used a GPU.
    """
    of_reference, of_candidate = reference.environment, candidate.environment
    if not of_reference or not of_candidate:
        silent = [side for side, content in (("reference", of_reference), ("candidate", of_candidate)) if not content]
        return (f"not known of the {silent[0]} run: it was recorded without",) if len(silent) == 1 else ()
    on_gpu = any("gpu" in str(env.get("device.kind")) for env in (of_reference, of_candidate))
    names = [
        name
        for name in {*of_reference, *of_candidate}
        if not (name.startswith(_GPU_ONLY) and not on_gpu)
        if not (name.startswith(_ONE_FRAMEWORK) and reference.framework != candidate.framework)
        # The absence of a variable is information: the variable was not set.
        if name.startswith("env.") or (name in of_reference and name in of_candidate)
        if of_reference.get(name) != of_candidate.get(name)
    ]
    return tuple(
        f"{name} {environment_text(of_reference.get(name))} against {environment_text(of_candidate.get(name))}"
        for name in sorted(names, key=_rank)
    )


def cautions(environment: Mapping[str, Any]) -> list[str]:
    """Return sentences about settings that make runs hard to repeat or to compare to the last digit."""
    notes = []
    on_gpu = "gpu" in str(environment.get("device.kind"))
    tf32 = [name for name in ("tf32.matmul", "tf32.cudnn") if on_gpu and environment.get(name)]
    if tf32:
        notes.append(f"TF32 is on ({', '.join(tf32)}): products have 10 bits of mantissa, relative errors of 1e-3")
    if environment.get("autocast.dtype", "off") != "off":
        notes.append(f"autocast computes in {environment['autocast.dtype']}")
    if on_gpu and not environment.get("deterministic.algorithms") and not environment.get("cudnn.deterministic"):
        notes.append("no deterministic algorithms are asked for: on a GPU two equal trainings may differ")
    if on_gpu and environment.get("cudnn.benchmark"):
        notes.append("cuDNN chooses its algorithms by their speed (benchmark): two equal trainings may differ")
    threads = environment.get("threads.intra_op")
    if isinstance(threads, int) and threads > 1:
        notes.append(f"{threads} threads share an operation: sums have another order than with another number of them")
    if environment.get("denormals.flushed"):
        notes.append("denormal numbers are flushed to zero")
    return notes


def _rank(name: str) -> tuple[int, str]:
    return next((i for i, prefix in enumerate(_NUMERIC) if name.startswith(prefix)), len(_NUMERIC)), name


def environment_text(value: Any) -> str:
    """Return a value of an environment in words."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value) if value != "" else "empty"


def environment_from_json(content: Any) -> dict[str, Any]:
    """Return the environment from the parsed JSON of a run folder.

    Raises:
        UsageError: the content is no mapping of names to plain values.
    """
    if not isinstance(content, Mapping) or not all(
        isinstance(value, (str, int, float, bool)) for value in content.values()
    ):
        raise UsageError("an environment is a mapping of names to numbers, words and switches")
    return {str(name): value for name, value in content.items()}
