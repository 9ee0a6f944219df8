"""Where the environments of two runs differ, and whether that explains the first diff."""

from __future__ import annotations

from padiff.compare.judge.limits import ROUNDING, coarse
from padiff.records import Both, Cause, Diff, RunInfo

# TF32 keeps 10 bits of the mantissa: a matrix product or convolution is off by 2**-11 or so, a chain by little more.
_TF32_AT_MOST = 2e-2
# What autocast rounds makes outputs and gradients differ by so many times its rounding of one number, at most: 0.25 of
# them in bfloat16. Chosen: two and a half times what the default policy lets gradients in bfloat16 be off by.
_AUTOCAST_AT_MOST = 64
_PRODUCTS = frozenset({"linear", "conv1d", "conv2d", "conv3d", "multiheadattention", "bilinear"})


def environment_cause(diff: Diff, infos: Both[RunInfo]) -> Cause | None:
    """How the environments explain a diff, where that is what its figures look like; else `None`.

    Args:
        infos: of the reference and the candidate.
    """
    if not _computed(diff):
        return None
    assert diff.pair.reference is not None
    path = diff.pair.reference.layer
    kind = next((layer.kind for layer in infos.reference.layers if layer.path == path), "")
    return _tf32(diff, kind, infos)


def _computed(diff: Diff) -> bool:
    return diff.figures is not None and diff.compared and diff.pair.stage in ("forward", "loss", "backward")


def autocast_cause(diff: Diff, infos: Both[RunInfo]) -> Cause | None:
    """Autocast differs, and so does what the tensors are made of. What it rounds is allowed, so this is for what
    nothing else explains.
    """
    if not _computed(diff):
        return None
    cast = infos.map(lambda info: str(info.environment.get("autocast.dtype", "")))
    if not all(cast) or cast.reference == cast.candidate:
        return None
    assert diff.pair.reference is not None and diff.pair.candidate is not None
    reference, candidate = diff.pair.reference.dtype, diff.pair.candidate.dtype
    coarser = max(ROUNDING.get(coarse(dtype), 0.0) for dtype in (reference, candidate))
    assert diff.figures is not None
    if diff.figures.rel_l2 > _AUTOCAST_AT_MOST * coarser:
        return None
    if reference == candidate or {*cast}.isdisjoint((reference, candidate)):
        return None
    return Cause(
        "autocast",
        f"autocast: {cast.reference} in the reference run, {cast.candidate} in the candidate (this is {reference} "
        f"against {candidate})",
    )


def _tf32(diff: Diff, kind: str, infos: Both[RunInfo]) -> Cause | None:
    """TF32 differs on a GPU, and a product of matrices is off by what TF32 leaves out."""
    name = "tf32.cudnn" if kind.startswith("conv") else "tf32.matmul"
    environments = infos.map(lambda info: info.environment)
    used = environments.map(lambda found: bool(found.get(name)) and "gpu" in str(found.get("device.kind")))
    assert diff.figures is not None
    if used.reference == used.candidate or kind not in _PRODUCTS or diff.pair.stage != "forward":
        return None
    if not 0 < diff.figures.rel_l2 <= _TF32_AT_MOST:
        return None
    side = "reference" if used.reference else "candidate"
    text = f"TF32 is on in the {side} run only ({name}), and the products differ by as much as it leaves out"
    return Cause("tf32", text)
