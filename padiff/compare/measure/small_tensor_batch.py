"""Measurement of all small tensors of a step at once: the figures of `padiff.compare.measure.arrays`, in few calls.

Most time of measuring a pair of small tensors goes into calls of numpy for a few hundred numbers. Here tensors of the
same size are the rows of two tables. The figures of a row equal those of the tensor measured alone, to the bit.
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
from padiff.records.diff_rows import NO_INDEX, TENSORS
from padiff.records.pair_table import PairTable, records_of

#: Elements of the largest tensors in tables. From a thousand elements on, `bulk_l2` may be needed, and the calls of
#: numpy take little of the time.
LARGEST_ROW = 999
# Elements of a table, which stay in a core's own cache.
_BLOCK = 1 << 15
_FLOAT32 = np.dtype(np.float32)
# Sources that hold one tensor. Other sources join several parts, and may have replicas.
_WHOLE = (PackedTensor, TensorFile, InMemory)


def measure_in_rows(pairs: Sequence[Pair], places: Sequence[int], rows: np.ndarray) -> list[int]:
    """Measure pairs of small float32 tensors.

    Pairs are left out, to be measured one by one, if they have another layout or dtype, loss scales, values that are
    not finite, or values whose squares leave float32's range. A tensor that can't be read is left out, too; measuring
    it alone raises its error.

    Args:
        pairs: pairs of a step.
        places: indices of the pairs to measure.
        rows: output array of `padiff.records.diff_rows.ROW`, one row for each pair.

    Returns:
        The indices of the pairs that were left out.
    """
    done = set(_in_tables(pairs, np.array(places, np.intp), rows)) if isinstance(pairs, PairTable) else set[int]()
    groups: dict[int, list[tuple[int, Pair]]] = defaultdict(list)
    for place in places:
        if place in done:
            continue
        pair = pairs[place]
        if _is_ordinary(pair):
            assert pair.reference is not None
            groups[math.prod(pair.reference.shape)].append((place, pair))
    for size, group in groups.items():
        if len(group) == 1:
            continue  # a table of one row is no faster
        count = _BLOCK // size
        for begin in range(0, len(group), count):
            readable, tables = _read(group[begin : begin + count], size)
            if readable:
                axes = np.array([bool(pair.anchor.shape) for _, pair in readable])
                done.update(_measure(np.array([place for place, _ in readable]), axes, tables, size, rows))
    return [place for place in places if place not in done] if done else list(places)


def _in_tables(pairs: PairTable, places: np.ndarray, rows: np.ndarray) -> list[int]:
    """Measure pairs whose tensors lie side by side in their steps' files, without an object for each, and return their
    indices.
    """
    done: list[int] = []
    a, b = (side.tensors for side in pairs.records)
    if a is None or b is None:
        return done
    sizes, (rows_a, rows_b) = pairs.fact(_sizes)[places], pairs.fact(records_of)
    fitting = np.flatnonzero(sizes)
    of_fitting = places[fitting]
    sizes[fitting[~(a.there[rows_a[of_fitting]] & b.there[rows_b[of_fitting]])]] = 0
    if not pairs.unscaled:
        sizes[np.array(pairs.columns.scaled, np.bool_)[places]] = 0
    for size in np.unique(sizes[sizes > 0]).tolist():
        group, count = places[sizes == size], _BLOCK // size
        for begin in range(0, len(group), count):
            chunk = group[begin : begin + count]
            tables = a.table(rows_a[chunk], _FLOAT32, size), b.table(rows_b[chunk], _FLOAT32, size)
            if tables[0] is not None and tables[1] is not None:
                axes = np.array([bool(pairs.sites.shapes[place]) for place in chunk.tolist()])
                done += _measure(chunk, axes, Both(tables[0], tables[1]), size, rows)
    return done


def _sizes(pairs: PairTable) -> np.ndarray:
    """Return the element counts of the pairs that `_in_tables` may measure; 0 for all other pairs."""
    sizes = np.zeros(len(pairs), np.intp)
    a, b = (side.sketches for side in pairs.records)
    rows_a, rows_b = pairs.fact(records_of)
    if a is None or b is None:
        return sizes
    dtypes, layouts = pairs.sites.dtypes, pairs.columns.layouts
    for place in np.flatnonzero((rows_a >= 0) & (rows_b >= 0)).tolist():
        shape = a.shapes[rows_a[place]]
        plain = shape == b.shapes[rows_b[place]] and not layouts[place]
        if plain and dtypes.reference[place] == dtypes.candidate[place] == "float32":
            size = math.prod(shape)
            sizes[place] = size if size <= LARGEST_ROW else 0
    return sizes


def _read(group: Sequence[tuple[int, Pair]], size: int) -> tuple[Sequence[tuple[int, Pair]], Both[np.ndarray]]:
    """Return the readable pairs of a group, and the tensors of either side as rows."""
    sources = Both([_source(pair.reference) for _, pair in group], [_source(pair.candidate) for _, pair in group])
    tables = sources.map(_table)
    if tables.reference is not None and tables.candidate is not None:
        return group, Both(tables.reference, tables.candidate)
    readable, read = [], Both(list[np.ndarray](), list[np.ndarray]())
    for entry, *pair in zip(group, *sources):
        try:
            expected, actual = (source.read() for source in pair)
        except (PadiffError, OSError):
            continue
        if (
            expected.dtype == actual.dtype == np.float32
            and expected.size == actual.size == size
            and expected.shape == actual.shape
        ):
            readable.append(entry)
            read.reference.append(expected.reshape(-1))
            read.candidate.append(actual.reshape(-1))
    return readable, read.map(lambda side: np.concatenate(side).reshape(-1, size) if side else np.empty((0, size)))


def _source(record: Record | None) -> TensorSource:
    assert record is not None
    return record.source


def _table(sources: Sequence[TensorSource]) -> np.ndarray | None:
    packed = [source for source in sources if isinstance(source, PackedTensor)]
    return table_of(packed) if len(packed) == len(sources) else None


def _is_ordinary(pair: Pair) -> bool:
    expected, actual = pair.reference, pair.candidate
    return (
        expected is not None
        and actual is not None
        and type(expected.source) in _WHOLE
        and type(actual.source) in _WHOLE
        and expected.dtype == actual.dtype == "float32"
        and expected.shape == actual.shape
        and not pair.layout
        and (pair.scales is UNSCALED or pair.scales == UNSCALED)
        and 0 < math.prod(expected.shape) <= LARGEST_ROW
    )


@np.errstate(all="ignore")
def _measure(places: np.ndarray, axes: np.ndarray, tables: Both[np.ndarray], size: int, rows: np.ndarray) -> list[int]:
    """Fill the rows of a group, and return the indices of the measured pairs.

    Args:
        places: indices of the group.
        axes: mask of the tensors with at least one axis.
    """
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
    at = (np.arange(len(places)), worst)
    figure_columns = {
        "max_abs": max_abs,
        "max_rel": max_rel,
        "mean_abs": sum_abs / size,
        "mean_reference": sum_reference / size,
        "l2": np.sqrt(l2),
        "reference_l2": np.sqrt(reference_l2),
        "candidate_l2": np.sqrt(candidate_l2),
        "reference_value": reference[at],
        "candidate_value": candidate[at],
        "index": np.where(axes, worst, NO_INDEX),
    }
    places = places[ordinary]
    for name, column in figure_columns.items():
        rows[name][places] = column[ordinary]
    rows["size"][places], rows["basis"][places], rows["spread"][places] = size, TENSORS, 0.0
    chosen: list[int] = places.tolist()
    return chosen


def _unlike(reference: np.ndarray, candidate: np.ndarray, size: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the figures of rows, as `Sums` computes those of small float32 tensors, and a mask of the valid rows."""
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
        infinite_error = error[infinite] * (sizes[infinite] != 0)
        ratios[infinite] = np.fmax.reduce(infinite_error / sizes[infinite], axis=1)
    max_rel = np.where(np.isnan(ratios), 0.0, ratios.astype(np.float64))
    return [max_abs, max_rel, sum_abs, sum_reference, *squares, worst], ordinary


def _equal(reference: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the figures of rows that are equal on both sides, in float64 as in `Sums`, and a mask of finite rows."""
    wide = reference.astype(np.float64)
    squares = np.einsum("ij,ij->i", wide, wide)
    sum_reference = np.add.reduce(np.absolute(wide, out=wide), axis=1)
    nothing, first = np.zeros(len(wide)), np.zeros(len(wide), np.intp)
    return [nothing, nothing, nothing, sum_reference, nothing, squares, squares, first], np.isfinite(squares)


def _products(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the sum of the products of each row, in float32."""
    columns = others[:, None] if others.ndim == 1 else others[:, :, None]
    return np.asarray(np.matmul(rows[:, None, :], columns)[:, 0, 0].astype(np.float64))
