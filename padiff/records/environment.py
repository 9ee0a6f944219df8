"""What the environments of two runs say: how they differ, and what makes runs hard to repeat.

An environment is a flat mapping from common names (``threads.intra_op``, ``tf32.matmul``, ``autocast.dtype``) to plain
values, so that runs of two frameworks can be compared. What gathers it is `padiff.recorder.environment`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from padiff.errors import UsageError
from padiff.records.recorded import RunInfo

# What can change numbers, the most telling first; everything else comes behind.
_NUMERIC = (
    "autocast.dtype", "autocast.level", "tf32.", "matmul.", "dtype.default", "device.kind", "deterministic.", "cudnn.",
    "threads.", "denormals.", "attention.", "onednn.", "cpu.capability", "cpu.instructions", "device.names",
    "framework.", "env.CUBLAS", "env.NVIDIA", "env.TORCH",
)  # fmt: skip
# What means something on a GPU only, and what within one framework only: paddle sets OMP_NUM_THREADS itself, and oneDNN
# is another set of kernels in each. `threads.intra_op` says what came of the variables.
_GPU_ONLY = ("tf32.", "cudnn.", "matmul.reduced", "env.CUBLAS", "env.NVIDIA", "env.TORCH", "env.CUDA", "env.NCCL")
_ONE_FRAMEWORK = (
    "framework.", "cpu.capability", "onednn.", "env.FLAGS_", "env.OMP_", "env.MKL_", "env.KMP_", "env.ATEN",
)  # fmt: skip


def differences(reference: RunInfo, candidate: RunInfo) -> tuple[str, ...]:
    """What differs between the environments of two runs, what can change numbers first; in words.

    Names that one framework does not have are passed over, and so are switches of GPUs where neither run used one.
    """
    of_reference, of_candidate = reference.environment, candidate.environment
    if not of_reference or not of_candidate:
        silent = [side for side, known in (("reference", of_reference), ("candidate", of_candidate)) if not known]
        return (f"not known of the {silent[0]} run: it was recorded without",) if len(silent) == 1 else ()
    on_gpu = any("gpu" in str(env.get("device.kind")) for env in (of_reference, of_candidate))
    names = [
        name
        for name in {*of_reference, *of_candidate}
        if not (name.startswith(_GPU_ONLY) and not on_gpu)
        if not (name.startswith(_ONE_FRAMEWORK) and reference.framework != candidate.framework)
        # A variable that is not set is known not to be set.
        if name.startswith("env.") or (name in of_reference and name in of_candidate)
        if of_reference.get(name) != of_candidate.get(name)
    ]
    return tuple(
        f"{name} {environment_text(of_reference.get(name))} against {environment_text(of_candidate.get(name))}"
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
