"""Causes of the first diff in the environments of the two runs: TF32 and autocast."""

from __future__ import annotations

from padiff.compare.judge.limits import ROUNDING, coarse
from padiff.records import Both, Cause, Diff, RunInfo

# TF32 keeps 10 bits of the mantissa: a matrix product or convolution is off by 2**-11 or so, a chain by little more.
_TF32_AT_MOST = 2e-2
# The largest relative error that autocast explains, as a multiple of the rounding of one number: a relative error of
# 0.25 in bfloat16. Chosen: two and a half times the limit of the default policy for gradients in bfloat16.
_AUTOCAST_AT_MOST = 64
_PRODUCTS = frozenset({"linear", "conv1d", "conv2d", "conv3d", "multiheadattention", "bilinear"})


def environment_cause(diff: Diff, infos: Both[RunInfo]) -> Cause | None:
    """Return a cause if the environments differ and the diff is as large as that difference makes it; else `None`.

    Args:
        diff: the first diff that did not pass.
        infos: the information on the reference and on the candidate run.
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
    """Return a cause if autocast uses other dtypes in the two runs and the two tensors have these dtypes; else `None`.

    The rounding of autocast is tolerated by the policy, so this cause is for diffs that nothing else explains.
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
    """Return a cause if TF32 is on in one run only and a matrix product on GPUs is off by its rounding; else `None`."""
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
