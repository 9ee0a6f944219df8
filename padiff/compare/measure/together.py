"""Measuring all pairs of sketches of a step at once: the figures of `padiff.compare.measure.sketches`, in few calls.

Most time of measuring one pair of sketches goes into calling numpy for 61 numbers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from padiff.compare.measure.sketches import bulk_of_squares
from padiff.records import TRANSPOSED, Both, Diff, Figures, Pair, Sketched
from padiff.sketches.sketch import BUCKETS, ELEMENTS, FIGURES, SPREAD

# What is kept of a sketch beside its projection, by its place in a row.
_MINIMUM, _MAXIMUM, _MEAN_ABS, _MEAN_SQUARE, _NONFINITE = map(
    FIGURES.index, ("minimum", "maximum", "mean_abs", "mean_square", "nonfinite")
)
_ABOUT = len(FIGURES)


def measured_together(pairs: Sequence[Pair]) -> dict[int, Diff]:
    """The diffs of pairs of sketches, not judged yet, by their places.

    Left out is what is not ordinary (one side in full, another layout, values that are not finite), and to be measured
    one by one.
    """
    groups: dict[int, list[tuple[int, Pair, Sketched, Sketched]]] = defaultdict(list)
    for place, pair in enumerate(pairs):
        sources = _sources(pair)
        if sources is not None:
            size = sources[0].size
            groups[size if size <= BUCKETS else 0].append((place, pair, *sources))
    found: dict[int, Diff] = {}
    for length, group in groups.items():
        some = [pair for _, pair, _, _ in group]
        rows = Both(
            np.concatenate([source.row for _, _, source, _ in group]).reshape(len(group), -1),
            np.concatenate([source.row for _, _, _, source in group]).reshape(len(group), -1),
        )
        scales = Both(
            np.array([p.scales.reference for p in some])[:, None], np.array([p.scales.candidate for p in some])[:, None]
        )
        with np.errstate(all="ignore"):
            if length:
                figures = _exact(rows, scales, length)
            else:
                figures = _estimates(some, [source.size for _, _, source, _ in group], rows, scales)
        for (place, pair, _, _), own in zip(group, figures):
            if own is not None:
                found[place] = Diff(pair, own)
    return found


def _sources(pair: Pair) -> tuple[Sketched, Sketched] | None:
    """Both sides of a pair of sketches; `None` where it is to be measured by itself."""
    one, other = pair.reference, pair.candidate
    if one is None or other is None:
        return None
    a, b = one.source, other.source
    if not isinstance(a, Sketched) or not isinstance(b, Sketched) or a.size != b.size or not a.size:
        return None
    if not pair.layout:
        alike = a.transposed == b.transposed and one.shape == other.shape
    else:
        alike = pair.layout == TRANSPOSED and a.transposed != b.transposed and one.shape == other.shape[::-1]
    return (a, b) if alike else None


def _finite(rows: Both[np.ndarray]) -> np.ndarray:
    """Of which pairs all numbers are finite, and all of the tensors were."""
    alike = [np.isfinite(side).all(axis=1) & (side[:, _NONFINITE] == 0) for side in rows]
    return np.asarray(alike[0] & alike[1])


def _exact(rows: Both[np.ndarray], scales: Both[np.ndarray], length: int) -> list[Figures | None]:
    """Of tensors of so many elements, each of which is a number of the projection, give or take its sign."""
    sides = rows.zip(scales).map(lambda side: side[0][:, _ABOUT : _ABOUT + length] / side[1])
    reference, candidate = sides
    error, size = np.abs(candidate - reference), np.abs(reference)
    squares = [np.einsum("ij,ij->i", values, values) for values in (error, reference, candidate)]
    # Where the reference is 0 there is no relative error.
    ratios = np.fmax.reduce(np.where(size != 0, error / size, np.nan), axis=1)
    worst = error.argmax(axis=1)
    ordinary = _finite(rows) & np.isfinite(squares[1] + squares[2])
    found: list[Figures | None] = []
    numbers = zip(
        ordinary.tolist(),
        worst.tolist(),
        error.max(axis=1).tolist(),
        np.where(np.isnan(ratios), 0.0, ratios).tolist(),
        np.add.reduce(error, axis=1).tolist(),
        np.add.reduce(size, axis=1).tolist(),
        *(square.tolist() for square in squares),
        reference.tolist(),
        candidate.tolist(),
    )
    for good, at, max_abs, max_rel, errors, sizes, l2, reference_l2, candidate_l2, r, c in numbers:
        if not good:
            found.append(None)
            continue
        found.append(
            Figures(
                max_abs=max_abs,
                max_rel=max_rel,
                mean_abs=errors / length,
                mean_reference=sizes / length,
                l2=math.sqrt(l2),
                reference_l2=math.sqrt(reference_l2),
                candidate_l2=math.sqrt(candidate_l2),
                size=length,
                index=(at,),
                values=Both(r[at], c[at]),
                basis="sketches",
            )
        )
    return found


def _estimates(
    pairs: Sequence[Pair], sizes: Sequence[int], rows: Both[np.ndarray], scales: Both[np.ndarray]
) -> list[Figures | None]:
    """Of larger tensors, from their projections."""
    size = np.array(sizes)
    shares = np.sqrt(size / np.minimum(size, ELEMENTS))[:, None]
    projected = rows.zip(scales).map(lambda side: side[0][:, _ABOUT:] / side[1])
    errors = (projected.candidate - projected.reference) * shares
    # As products of a row and a column: one product of matrices may add up in another order.
    l2 = np.sqrt(np.matmul(errors[:, None, :], errors[:, :, None])[:, 0, 0])
    reference, candidate = rows.zip(scales).map(lambda side: _about(*side, size))
    root_mean_square = l2 / np.sqrt(size)
    extremes = [np.abs(c - r) for c, r in zip(candidate[:2], reference[:2])]
    # A sample elsewhere has other extremes.
    elsewhere = np.array([bool(pair.layout) for pair in pairs]) & (size > ELEMENTS)
    largest = np.where(elsewhere, root_mean_square, np.maximum(root_mean_square, np.maximum(*extremes)))
    norm = reference[3]
    max_rel = np.where(norm != 0, l2 / norm, 0.0)
    bulk = bulk_of_squares(np.square(errors))
    columns = (_finite(rows), largest, max_rel, root_mean_square, reference[2], l2, norm, candidate[3], size, bulk)
    return [
        Figures(most, relative, mean, mean_reference, own, r, c, n, bulk_l2=b, basis="sketches", spread=SPREAD)
        if ordinary
        else None
        for ordinary, most, relative, mean, mean_reference, own, r, c, n, b in zip(*(x.tolist() for x in columns))
    ]


def _about(rows: np.ndarray, scales: np.ndarray, size: np.ndarray) -> tuple[np.ndarray, ...]:
    """Of one side: extremes, mean size and norm."""
    by = scales[:, 0]
    norm = np.sqrt(rows[:, _MEAN_SQUARE] * size) / by
    return rows[:, _MINIMUM] / by, rows[:, _MAXIMUM] / by, rows[:, _MEAN_ABS] / by, norm
