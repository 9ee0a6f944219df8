"""How far apart two tensors are: the arithmetic, stated once, in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from padiff import equivalents
from padiff.align import views
from padiff.records import PARAMETER_STAGES, Diff, Figures, Pair

# Elements that are held in float64 at a time.
_CHUNK = 1 << 20
# From how many elements on a few may be left out, and how few of them.
_MANY, _FEW = 1000, 20_000
# One sample in so many may be left out.
_SAMPLES = 8


def measure(pair: Pair, elementwise: tuple[float, float] | None = None) -> Diff:
    """Measure a pair; a pure function of the two records.

    Args:
        pair: the two records; with a missing side the other's norm is still measured.
        elementwise: ``(atol, rtol)``: count elements with ``|c - r| > atol + rtol * |r|`` (numpy.isclose's formula).

    Returns:
        The diff, not judged yet: ``passed`` is false only where ``problem`` says why.
    """
    if pair.reference is None or pair.candidate is None:
        side = "reference" if pair.reference is None else "candidate"
        return Diff(pair, figures=_lone(pair), passed=True, problem=f"missing on the {side}")
    reference, candidate = _loaded(pair)
    if reference.shape != candidate.shape:
        shapes = f"shapes differ: {reference.shape} against {candidate.shape}"
        return Diff(pair, passed=False, problem=shapes)
    figures = figures_of(reference, candidate, elementwise, pair.scales)
    if pair.stage in ("backward", "update") and figures.size >= _MANY and figures.l2 > 1e-4 * figures.reference_l2:
        figures = replace(figures, bulk_l2=_bulk_l2(reference, candidate, pair.scales, pair.stage == "backward"))
    problem = ""
    if figures.nonfinite:
        problem = f"{figures.nonfinite} of {figures.size} values are NaN or infinite on one side only"
    return Diff(pair, figures=figures, passed=not problem, problem=problem)


def _bulk_l2(reference: np.ndarray, candidate: np.ndarray, scales: tuple[float, float], by_sample: bool) -> float:
    """``||c - r||`` without its largest elements (four, and one in `_FEW` of them), or without its worst samples.

    Where rounding moves a value across the kink of a ReLU, or to the other of two nearly equal maxima of a pool, single
    elements of the gradient are wholly different though both sides are right; and where an element of a gradient is
    rounding noise, an adaptive optimizer makes a full-size update of its sign.
    """
    with np.errstate(all="ignore"):
        error = np.abs(_wide(candidate, scales[1]) - _wide(reference, scales[0]))
        # As in the other figures, positions that are not finite are left out.
        squares = np.where(np.isfinite(error), np.square(error), 0.0)
    left_out = 4 + squares.size // _FEW
    rest = [np.partition(squares.ravel(), squares.size - left_out)[:-left_out].sum()]
    if by_sample and squares.shape[0] >= _SAMPLES:
        # A normalisation's backward spreads one such element over its whole sample.
        samples = np.sort(squares.reshape(squares.shape[0], -1).sum(axis=1))
        rest.append(samples[: -(squares.shape[0] // _SAMPLES)].sum())
    return float(np.sqrt(min(rest)))


def _loaded(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    assert pair.reference is not None and pair.candidate is not None
    reference, candidate = pair.reference.value, pair.candidate.value
    candidate = views.apply(pair.transform, candidate, reference.shape)
    if pair.transform == views.BROADCAST:
        reference, candidate = np.broadcast_arrays(reference, candidate)
    if reference.size == candidate.size == 1:
        # A scalar loss is () in one framework and (1,) in the other.
        candidate = candidate.reshape(reference.shape)
    if pair.stage in PARAMETER_STAGES and equivalents.same_values(reference.shape, candidate.shape):
        candidate = candidate.reshape(reference.shape)
    return reference, candidate


def loaded(pair: Pair) -> tuple[np.ndarray, np.ndarray]:
    """Both sides of a pair in one layout, in float64, divided by their scales."""
    reference, candidate = _loaded(pair)
    return _wide(reference, pair.scales[0]), _wide(candidate, pair.scales[1])


def _lone(pair: Pair) -> Figures:
    array = pair.anchor.value
    zeros = np.broadcast_to(np.zeros((), array.dtype), array.shape)
    own = figures_of(array, zeros, None, pair.scales)
    norm, value = own.reference_l2, own.values[0]
    if pair.reference is not None:
        return Figures(size=own.size, reference_l2=norm, values=(value, 0.0))
    return Figures(size=own.size, candidate_l2=norm, values=(0.0, value))


def figures_of(
    reference: np.ndarray,
    candidate: np.ndarray,
    elementwise: tuple[float, float] | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> Figures:
    """Figures of two arrays of one shape.

    Positions where both hold the same kind of NaN or infinity count as equal; where only one does, they are counted
    in ``nonfinite`` and left out of the other figures. Integers that float64 can't tell
    apart still differ.
    """
    if reference.size == 0:
        return Figures(size=0)
    shape = reference.shape
    left = np.ascontiguousarray(reference).reshape(-1)
    right = np.ascontiguousarray(candidate).reshape(-1)
    total = _Sums()
    with np.errstate(all="ignore"):
        for start in range(0, left.size, _CHUNK):
            total.add(start, left[start : start + _CHUNK], right[start : start + _CHUNK], elementwise, scales)
    index = tuple(int(i) for i in np.unravel_index(total.worst, shape)) if shape else ()
    return Figures(
        max_abs=total.max_abs,
        max_rel=total.max_rel,
        mean_abs=total.sum_abs / total.finite if total.finite else 0.0,
        mean_reference=total.sum_reference / total.finite if total.finite else 0.0,
        l2=float(np.sqrt(total.squares)),
        reference_l2=float(np.sqrt(total.reference_squares)),
        candidate_l2=float(np.sqrt(total.candidate_squares)),
        size=int(left.size),
        index=index,
        values=(_scalar(left[total.worst], scales[0]), _scalar(right[total.worst], scales[1])),
        beyond=total.beyond,
        nonfinite=total.nonfinite,
    )


class _Sums:
    """Running sums over chunks."""

    def __init__(self) -> None:
        self.max_abs = self.max_rel = 0.0
        self.sum_abs = self.sum_reference = 0.0
        self.squares = self.reference_squares = self.candidate_squares = 0.0
        self.finite = self.beyond = self.nonfinite = self.worst = 0

    def add(
        self,
        start: int,
        left: np.ndarray,
        right: np.ndarray,
        elementwise: tuple[float, float] | None,
        scales: tuple[float, float],
    ) -> None:
        exact = left.dtype.kind in "iub" and right.dtype.kind in "iub"
        unequal = (left != right) if exact else None
        r, c = _wide(left, scales[0]), _wide(right, scales[1])
        finite = np.isfinite(r) & np.isfinite(c)
        if not finite.all():
            same = (np.isnan(r) & np.isnan(c)) | (r == c)
            self.nonfinite += int(np.count_nonzero(~finite & ~same))
            r, c = np.where(finite, r, 0), np.where(finite, c, 0)
        error = np.abs(c - r)
        if unequal is not None:
            error = np.where(unequal & (error == 0), 1.0, error)  # int64 neighbours beyond 2**53
        size = np.abs(r)
        self.finite += int(np.count_nonzero(finite))
        self.sum_abs += float(error.sum())
        self.sum_reference += float(size.sum())
        self.squares += float(np.dot(error, error))
        self.reference_squares += float(np.dot(size, size))
        self.candidate_squares += float(np.square(np.abs(c)).sum())
        largest = int(error.argmax())
        if error[largest] > self.max_abs:
            self.max_abs, self.worst = float(error[largest]), start + largest
        some = size > 0
        if some.any():
            self.max_rel = max(self.max_rel, float((error[some] / size[some]).max()))
        if elementwise is not None:
            atol, rtol = elementwise
            self.beyond += int(np.count_nonzero(error > atol + rtol * size))


def _wide(array: np.ndarray, scale: float) -> np.ndarray:
    wide = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
    return wide if scale == 1.0 else wide / scale


def _scalar(value: np.generic, scale: float) -> float:
    return float(abs(value)) if np.iscomplexobj(value) else float(value) / scale  # type: ignore[arg-type]
