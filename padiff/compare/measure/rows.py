"""Measuring all small tensors of a step at once: the figures of `padiff.compare.measure.arrays`, in few calls.

Most time of measuring a pair of small tensors goes into calling numpy for a few hundred numbers. Here those of one
size are the rows of two tables. Each row is worked out as a tensor by itself is, to the bit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from padiff.compare.measure.sums import LARGE, SMALL
from padiff.dump.pack import PackedTensor, table_of
from padiff.dump.tensor_file import TensorFile
from padiff.errors import PadiffError
from padiff.records import UNSCALED, Both, InMemory, Pair, Record, TensorSource
from padiff.records.rows import NO_INDEX, TENSORS

#: Elements of the largest tensors that are rows: those of a thousand may need a look at their bulk, and numpy's calls
#: weigh little from there on.
LARGEST_ROW = 999
# Elements that are looked at at a time: they stay in a core's own cache.
_BLOCK = 1 << 15
# One tensor is one file or a part of one; others are put together of several, and may be replicas.
_WHOLE = (PackedTensor, TensorFile, InMemory)


def measure_in_rows(pairs: Sequence[Pair], places: Sequence[int], rows: np.ndarray) -> list[int]:
    """Measure pairs of small float32 tensors.

    Left out is what is not ordinary (another layout or dtype, loss scales, values that are not finite, or whose squares
    leave float32's range), and to be measured one by one; a tensor that can't be read is reported there.

    Args:
        pairs: of a step.
        places: those that are asked for.
        rows: of `padiff.records.rows.ROW`, one for each pair, which are filled.

    Returns:
        The places of those that are left.
    """
    groups: dict[int, list[tuple[int, Pair]]] = defaultdict(list)
    for place in places:
        pair = pairs[place]
        if _is_ordinary(pair):
            assert pair.reference is not None
            groups[math.prod(pair.reference.shape)].append((place, pair))
    done: set[int] = set()
    with np.errstate(all="ignore"):
        for size, group in groups.items():
            if len(group) == 1:
                continue  # a table of one row is no faster
            count = _BLOCK // size
            for begin in range(0, len(group), count):
                some, tables = _read(group[begin : begin + count], size)
                if some:
                    done.update(_measure(some, tables, size, rows))
    return [place for place in places if place not in done] if done else list(places)


def _read(group: Sequence[tuple[int, Pair]], size: int) -> tuple[Sequence[tuple[int, Pair]], Both[np.ndarray]]:
    """Those of a group that can be read, and the tensors of either side, each a row."""
    sources = Both([_source(pair.reference) for _, pair in group], [_source(pair.candidate) for _, pair in group])
    tables = sources.map(_table)
    if tables.reference is not None and tables.candidate is not None:
        return group, Both(tables.reference, tables.candidate)
    some, read = [], Both(list[np.ndarray](), list[np.ndarray]())
    for entry, *pair in zip(group, *sources):
        try:
            one, other = (source.read() for source in pair)
        except (PadiffError, OSError):
            continue
        if one.dtype == other.dtype == np.float32 and one.size == other.size == size and one.shape == other.shape:
            some.append(entry)
            read.reference.append(one.reshape(-1))
            read.candidate.append(other.reshape(-1))
    return some, read.map(lambda side: np.concatenate(side).reshape(-1, size) if side else np.empty((0, size)))


def _source(record: Record | None) -> TensorSource:
    assert record is not None
    return record.source


def _table(sources: Sequence[TensorSource]) -> np.ndarray | None:
    packed = [source for source in sources if isinstance(source, PackedTensor)]
    return table_of(packed) if len(packed) == len(sources) else None


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
        and 0 < math.prod(one.shape) <= LARGEST_ROW
    )


def _measure(group: Sequence[tuple[int, Pair]], tables: Both[np.ndarray], size: int, rows: np.ndarray) -> list[int]:
    """Fill the rows of a group, and say which."""
    reference, candidate = tables
    equal = (reference.view(np.uint32) == candidate.view(np.uint32)).all(axis=1)
    if equal.all():
        table, ordinary = _equal(reference)
    else:
        table, ordinary = _unlike(reference, candidate, size)
        if equal.any():
            others, fine = _equal(reference)
            table = [np.where(equal, a, b) for a, b in zip(others, table)]
            ordinary = np.where(equal, fine, ordinary)
    *columns, worst = table
    max_abs, max_rel, sum_abs, sum_reference, l2, reference_l2, candidate_l2 = columns
    at = (np.arange(len(group)), worst)
    with_axes = np.array([bool(pair.anchor.shape) for _, pair in group])
    found = {
        "max_abs": max_abs,
        "max_rel": max_rel,
        "mean_abs": sum_abs / size,
        "mean_reference": sum_reference / size,
        "l2": np.sqrt(l2),
        "reference_l2": np.sqrt(reference_l2),
        "candidate_l2": np.sqrt(candidate_l2),
        "reference_value": reference[at],
        "candidate_value": candidate[at],
        "index": np.where(with_axes, worst, NO_INDEX),
    }
    places = np.array([place for place, _ in group])[ordinary]
    for name, column in found.items():
        rows[name][places] = column[ordinary]
    rows["size"][places], rows["basis"][places], rows["spread"][places] = size, TENSORS, 0.0
    chosen: list[int] = places.tolist()
    return chosen


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
