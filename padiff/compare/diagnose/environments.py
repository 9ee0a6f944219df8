"""Where the environments of two runs differ, and whether that explains the first diff."""

from __future__ import annotations

from padiff.records import Both, Diff, RunInfo

# TF32 keeps 10 bits of the mantissa: a matrix product or convolution is off by 2**-11 or so, a chain by little more.
_TF32_AT_MOST = 2e-2
_PRODUCTS = frozenset({"linear", "conv1d", "conv2d", "conv3d", "multiheadattention", "bilinear"})


def environment_cause(diff: Diff, infos: Both[RunInfo]) -> str:
    """How the environments explain a diff, where that is what its figures look like; else empty.

    Args:
        infos: of the reference and the candidate.
    """
    if diff.figures is None or not diff.compared or diff.pair.stage not in ("forward", "loss", "backward"):
        return ""
    assert diff.pair.reference is not None
    path = diff.pair.reference.layer
    kind = next((layer.kind for layer in infos.reference.layers if layer.path == path), "")
    return _autocast(diff, infos) or _tf32(diff, kind, infos)


def _autocast(diff: Diff, infos: Both[RunInfo]) -> str:
    """Autocast differs, and so does what the tensors are made of."""
    ours, theirs = (str(info.environment.get("autocast.dtype", "")) for info in infos)
    if not ours or not theirs or ours == theirs:
        return ""
    assert diff.pair.reference is not None and diff.pair.candidate is not None
    dtypes = diff.pair.reference.dtype, diff.pair.candidate.dtype
    if dtypes[0] == dtypes[1] or not {ours, theirs} & set(dtypes):
        return ""
    return f"autocast: {ours} in the reference run, {theirs} in the candidate (this is {dtypes[0]} against {dtypes[1]})"


def _tf32(diff: Diff, kind: str, infos: Both[RunInfo]) -> str:
    """TF32 differs on a GPU, and a product of matrices is off by what TF32 leaves out."""
    name = "tf32.cudnn" if kind.startswith("conv") else "tf32.matmul"
    used = [bool(info.environment.get(name)) and "gpu" in str(info.environment.get("device.kind")) for info in infos]
    assert diff.figures is not None
    if used[0] == used[1] or kind not in _PRODUCTS or diff.pair.stage != "forward":
        return ""
    if not 0 < diff.figures.rel_l2 <= _TF32_AT_MOST:
        return ""
    side = "reference" if used[0] else "candidate"
    return f"TF32 is on in the {side} run only ({name}), and the products differ by as much as it leaves out"
