"""Measuring all small tensors of a step at once: the figures of `padiff.compare.measure.arrays`, in few calls.

Most time of measuring a pair of small tensors goes into calling numpy for a few hundred numbers. Here those of one
size are the rows of two tables. Each row is worked out as a tensor by itself is, to the bit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from padiff.compare.measure.sums import LARGE, SMALL
from padiff.dump.pack import PackedTensor
from padiff.dump.tensor_file import TensorFile
from padiff.errors import PadiffError
from padiff.records import UNSCALED, Both, Diff, Figures, InMemory, Pair

# Elements of the largest tensors that are rows: those of a thousand may need a look at their bulk, and numpy's calls
# weigh little from there on.
_MOST = 999
# Elements that are looked at at a time: they stay in a core's own cache.
_BLOCK = 1 << 15
# One tensor is one file or a part of one; others are put together of several, and may be replicas.
_WHOLE = (PackedTensor, TensorFile, InMemory)

_Row: TypeAlias = tuple[int, Pair, np.ndarray, np.ndarray]


def measured_in_rows(pairs: Sequence[Pair]) -> dict[int, Diff]:
    """The diffs of pairs of small float32 tensors, not judged yet, by their places.

    Left out is what is not ordinary (another layout or dtype, loss scales, values that are not finite, or whose squares
    leave float32's range), and to be measured one by one; a tensor that can't be read is reported there.
    """
    groups: dict[int, list[_Row]] = defaultdict(list)
    for place, pair in enumerate(pairs):
        if _is_ordinary(pair):
            assert pair.reference is not None and pair.candidate is not None
            try:
                reference, candidate = pair.reference.source.read(), pair.candidate.source.read()
            except (PadiffError, OSError):
                continue
            if reference.dtype == candidate.dtype == np.float32 and reference.shape == candidate.shape:
                groups[reference.size].append((place, pair, reference, candidate))
    found: dict[int, Diff] = {}
    with np.errstate(all="ignore"):
        for size, group in groups.items():
            if len(group) == 1:
                continue  # a table of one row is no faster
            rows = _BLOCK // size
            for begin in range(0, len(group), rows):
                _measure(group[begin : begin + rows], size, found)
    return found


def _is_ordinary(pair: Pair) -> bool:
    one, other = pair.reference, pair.candidate
    return (
        one is not None
        and other is not None
        and type(one.source) in _WHOLE
        and type(other.source) in _WHOLE
        and one.dtype == other.dtype == "float32"
        and one.shape == other.shape
        and not pair.layout
        and (pair.scales is UNSCALED or pair.scales == UNSCALED)
        and 0 < math.prod(one.shape) <= _MOST
    )


def _measure(group: Sequence[_Row], size: int, found: dict[int, Diff]) -> None:
    reference = np.concatenate([r.reshape(-1) for _, _, r, _ in group]).reshape(-1, size)
    candidate = np.concatenate([c.reshape(-1) for *_, c in group]).reshape(-1, size)
    equal = (reference.view(np.uint32) == candidate.view(np.uint32)).all(axis=1)
    if equal.all():
        table, ordinary = _equal(reference)
    else:
        table, ordinary = _unlike(reference, candidate, size)
        if equal.any():
            others, fine = _equal(reference)
            table = [np.where(equal, a, b) for a, b in zip(others, table)]
            ordinary = np.where(equal, fine, ordinary)
    at = (np.arange(len(group)), table[-1])
    values = zip(reference[at].tolist(), candidate[at].tolist())
    rows = zip(group, ordinary.tolist(), values, *(column.tolist() for column in table))
    for (place, pair, array, _), fine, own, max_abs, max_rel, sum_abs, sum_reference, l2, r_l2, c_l2, worst in rows:
        if not fine:
            continue
        if array.ndim == 1:
            index: tuple[int, ...] = (worst,)
        elif worst:
            index = tuple(int(i) for i in np.unravel_index(worst, array.shape))
        else:
            index = (0,) * array.ndim
        figures = Figures(
            max_abs=max_abs,
            max_rel=max_rel,
            mean_abs=sum_abs / size,
            mean_reference=sum_reference / size,
            l2=math.sqrt(l2),
            reference_l2=math.sqrt(r_l2),
            candidate_l2=math.sqrt(c_l2),
            size=size,
            index=index,
            values=Both(*own),
        )
        found[place] = Diff(pair, figures)


def _unlike(reference: np.ndarray, candidate: np.ndarray, size: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Figures of rows as `Sums` works them out of a small tensor of float32, and of which rows they hold."""
    error = candidate - reference
    squares = [_products(values, values) for values in (error, reference, candidate)]
    np.absolute(error, out=error)
    sizes = np.absolute(reference)
    ones = np.ones(size, np.float32)
    sum_abs, sum_reference = _products(error, ones), _products(sizes, ones)
    ordinary = np.logical_and.reduce([(s == 0) | ((s > SMALL) & (s < LARGE)) for s in squares])
    ordinary &= ((squares[0] == 0) == (sum_abs == 0)) & ((squares[1] == 0) == (sum_reference == 0))
    worst = error.argmax(axis=1)
    at = (np.arange(len(error)), worst)
    max_abs = np.abs(candidate[at].astype(np.float64) - reference[at].astype(np.float64))
    ratios = np.fmax.reduce(error / sizes, axis=1)
    infinite = ~np.isfinite(ratios)
    if infinite.any():
        some = error[infinite] * (sizes[infinite] != 0)
        ratios[infinite] = np.fmax.reduce(some / sizes[infinite], axis=1)
    max_rel = np.where(np.isnan(ratios), 0.0, ratios.astype(np.float64))
    return [max_abs, max_rel, sum_abs, sum_reference, *squares, worst], ordinary


def _equal(reference: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """The same of rows that both sides share, which `Sums` looks at in float64."""
    wide = reference.astype(np.float64)
    squares = np.einsum("ij,ij->i", wide, wide)
    sum_reference = np.add.reduce(np.absolute(wide, out=wide), axis=1)
    nothing, first = np.zeros(len(wide)), np.zeros(len(wide), np.intp)
    return [nothing, nothing, nothing, sum_reference, nothing, squares, squares, first], np.isfinite(squares)


def _products(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Sum of the products of each row, in float32."""
    other = others[:, None] if others.ndim == 1 else others[:, :, None]
    return np.asarray(np.matmul(rows[:, None, :], other)[:, 0, 0].astype(np.float64))
