"""Measurement of all pairs of a step: sketches together, small tensors together, the others one by one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from padiff.compare.measure.pairs import bulk_of_squares, measure_pair
from padiff.compare.measure.sums import LARGE, SMALL
from padiff.dump.pack import PackedTensor, table_of
from padiff.dump.tensor_file import TensorFile
from padiff.errors import PadiffError
from padiff.records import (
    TRANSPOSED,
    UNSCALED,
    Both,
    Diff,
    InMemory,
    Layout,
    Pair,
    Record,
    Sketched,
    TensorSource,
    unzipped,
)
from padiff.records.pair_table import PairTable, fact_of_pairs, pair_schema_of, records_of, sketch_rows
from padiff.records.step_diffs import NO_INDEX, SKETCHES, TENSORS, StepDiffs, empty_rows, odd_indexes, row_of
from padiff.sketches.sketch import BUCKETS, ELEMENTS, FIGURES, SPREAD

# Columns of a step's table that hold a sketch's figures, before its projection.
_MINIMUM, _MAXIMUM, _MEAN_ABS, _MEAN_SQUARE, _NONFINITE = map(
    FIGURES.index, ("minimum", "maximum", "mean_abs", "mean_square", "nonfinite")
)
_EXTREMES = [_MINIMUM, _MAXIMUM]
_ABOUT = len(FIGURES)
# Pairs that are measured at a time: intermediate results stay in the cache, and memory is reused. Measured: 80,000
# pairs take 0.09 s, but 0.2 s all at once; 512 to 4,096 at a time take equally long.
_PAIRS_AT_A_TIME = 2048


class _Group(NamedTuple):
    """Pairs of sketches that are measured in the same way.

    Attributes:
        length: number of elements of each tensor, if the projection contains each element; 0 for larger tensors.
        places: indices among the step's pairs.
        sizes: number of elements of each tensor.
        elsewhere: mask of the pairs whose two samples lie at different places.
    """

    length: int
    places: np.ndarray
    sizes: np.ndarray
    elsewhere: np.ndarray

    def pieces(self) -> Iterator[_Group]:
        """Yield the group in pieces of `_PAIRS_AT_A_TIME` pairs."""
        for start in range(0, len(self.places), _PAIRS_AT_A_TIME):
            yield _Group(self.length, *(column[start : start + _PAIRS_AT_A_TIME] for column in self[1:]))


def measure_together(pairs: Sequence[Pair], rows: np.ndarray) -> np.ndarray:
    """Measure the pairs of sketches of a step.

    Pairs are left out, to be measured one by one, if one side is a full tensor, the layout is unusual, or values are
    not finite.

    Args:
        rows: output array of `padiff.records.step_diffs.ROW`, one row for each pair.

    Returns:
        A mask of the measured pairs.
    """
    done = np.zeros(rows.shape, np.bool_)
    for group in (piece for full_group in fact_of_pairs(pairs, _groups) for piece in full_group.pieces()):
        sketches, scales = _sketches(pairs, group), _scales(pairs, group)
        with np.errstate(all="ignore"):
            columns = (_exact if group.length else _estimates)(group, sketches, scales)
        ordinary = columns.pop("ordinary")
        places = group.places[ordinary]
        done[places] = True
        for name, column in columns.items():
            rows[name][places] = column[ordinary]
        rows["size"][places], rows["basis"][places] = group.sizes[ordinary], SKETCHES
    return done


def _groups(pairs: Sequence[Pair]) -> list[_Group]:
    """Return the groups of a step's sketch pairs that can be measured together."""
    if isinstance(pairs, PairTable) and pairs.tabled:
        places, sizes, elsewhere = _in_tables(pairs)
    else:
        measurable = [(place, size, layout) for place, pair in enumerate(pairs) for size, layout in _measurable(pair)]
        places, sizes, elsewhere = map(np.array, zip(*measurable)) if measurable else (np.zeros(0, np.intp),) * 3
    elsewhere = elsewhere & (sizes > ELEMENTS)
    lengths = np.where(sizes <= BUCKETS, sizes, 0)
    groups = ((length, lengths == length) for length in np.unique(lengths).tolist())
    return [_Group(length, places[in_group], sizes[in_group], elsewhere[in_group]) for length, in_group in groups]


def _in_tables(pairs: PairTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return indices, sizes and a mask of transposed layouts of the `_measurable` pairs with sketches in tables."""
    a, b = (side.sketches for side in pairs.records)
    assert a is not None and b is not None
    rows = pairs.fact(sketch_rows)
    where = np.flatnonzero((rows.reference >= 0) & (rows.candidate >= 0))
    rows_a, rows_b = pairs.fact(records_of).map(lambda side: side[where])
    same_size = (a.sizes[rows_a] == b.sizes[rows_b]) & (a.sizes[rows_a] > 0)
    where, rows_a, rows_b = where[same_size], rows_a[same_size], rows_b[same_size]
    sizes, alike = a.sizes[rows_a], (a.transposed[rows_a] == b.transposed[rows_b]).tolist()
    layouts = pairs.columns.layouts
    shapes = [(a.shapes[k], b.shapes[n]) for k, n in zip(rows_a.tolist(), rows_b.tolist())]
    is_measurable = np.array(
        [_is_measurable(layouts[k], *how) for k, *how in zip(where.tolist(), alike, shapes)], np.bool_
    )
    where = where[is_measurable]
    return where, sizes[is_measurable], np.array([bool(layouts[place]) for place in where.tolist()], np.bool_)


def _sketches(pairs: Sequence[Pair], group: _Group) -> Both[np.ndarray]:
    """Return the sketches of a group."""
    if not isinstance(pairs, PairTable) or not pairs.tabled:
        return _gathered(pairs, group)
    return pairs.fact(sketch_rows).zip(pairs.records).map(lambda side: side[1].rows_of(side[0][group.places]))


def _gathered(pairs: Sequence[Pair], group: _Group) -> Both[np.ndarray]:
    """Return the sketches of a group, gathered one by one."""
    group_pairs = [pairs[place] for place in group.places.tolist()]
    return Both(
        np.concatenate([pair.reference.source.row for pair in group_pairs]).reshape(len(group_pairs), -1),  # type: ignore[union-attr]
        np.concatenate([pair.candidate.source.row for pair in group_pairs]).reshape(len(group_pairs), -1),  # type: ignore[union-attr]
    )


def _scales(pairs: Sequence[Pair], group: _Group) -> Both[np.ndarray] | None:
    """Return the divisors of each side's values, as columns; `None` if all are 1."""
    if isinstance(pairs, PairTable) and pairs.unscaled:
        return None
    scales = [pairs[place].scales for place in group.places.tolist()]
    return unzipped(scales).map(lambda side: np.array(side)[:, None])


def _measurable(pair: Pair) -> list[tuple[int, bool]]:
    """Return the size of a pair of sketches, and True if its layout is transposed; empty if the pair must be measured
    alone.
    """
    expected, actual = pair.reference, pair.candidate
    if expected is None or actual is None:
        return []
    a, b = expected.source, actual.source
    if not isinstance(a, Sketched) or not isinstance(b, Sketched) or a.size != b.size or not a.size:
        return []
    alike = _is_measurable(pair.layout, a.transposed == b.transposed, (expected.shape, actual.shape))
    return [(a.size, bool(pair.layout))] if alike else []


def _is_measurable(layout: Layout, turned_alike: bool, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    expected, actual = shapes
    if not layout:
        return turned_alike and expected == actual
    return layout == TRANSPOSED and not turned_alike and expected == actual[::-1]


def _finite(sketches: Both[np.ndarray]) -> np.ndarray:
    """Return a mask of the pairs whose sketches and tensors are all finite."""
    alike = [np.isfinite(side).all(axis=1) & (side[:, _NONFINITE] == 0) for side in sketches]
    return np.asarray(alike[0] & alike[1])


def _exact(group: _Group, sketches: Both[np.ndarray], scales: Both[np.ndarray] | None) -> dict[str, np.ndarray]:
    """Return the figures of small tensors, whose projection contains each element up to its sign."""
    reference, candidate = _scaled(sketches.map(lambda side: side[:, _ABOUT : _ABOUT + group.length]), scales)
    error, size = np.abs(candidate - reference), np.abs(reference)
    squares = [np.einsum("ij,ij->i", values, values) for values in (error, reference, candidate)]
    # Elements whose reference is 0 have no relative error.
    ratios = np.fmax.reduce(np.where(size != 0, error / size, np.nan), axis=1)
    worst = error.argmax(axis=1)
    each = np.arange(len(worst))
    return {
        "ordinary": _finite(sketches) & np.isfinite(squares[1] + squares[2]),
        "max_abs": error[each, worst],
        "max_rel": np.where(np.isnan(ratios), 0.0, ratios),
        "mean_abs": np.add.reduce(error, axis=1) / group.length,
        "mean_reference": np.add.reduce(size, axis=1) / group.length,
        "l2": np.sqrt(squares[0]),
        "reference_l2": np.sqrt(squares[1]),
        "candidate_l2": np.sqrt(squares[2]),
        "spread": np.zeros(len(worst)),
        "index": worst,
        "reference_value": reference[each, worst],
        "candidate_value": candidate[each, worst],
    }


def _estimates(group: _Group, sketches: Both[np.ndarray], scales: Both[np.ndarray] | None) -> dict[str, np.ndarray]:
    """Return estimated figures of larger tensors, from their projections."""
    size = group.sizes
    shares = np.sqrt(size / np.minimum(size, ELEMENTS))[:, None]
    projected = _scaled(sketches.map(lambda side: side[:, _ABOUT:]), scales)
    errors = (projected.candidate - projected.reference) * shares
    # Products of a row and a column: one product of matrices may add up in another order.
    l2 = np.sqrt(np.matmul(errors[:, None, :], errors[:, :, None])[:, 0, 0])
    about = _scaled(sketches.map(lambda side: side[:, :_ABOUT]), scales)
    norm, candidate_norm = (np.sqrt(side[:, _MEAN_SQUARE] * size) for side in sketches)
    if scales is not None:
        norm, candidate_norm = norm / scales.reference[:, 0], candidate_norm / scales.candidate[:, 0]
    root_mean_square = l2 / np.sqrt(size)
    extremes = np.abs(about.candidate[:, _EXTREMES] - about.reference[:, _EXTREMES]).max(axis=1)
    # Samples at different places have different extremes.
    largest = np.where(group.elsewhere, root_mean_square, np.maximum(root_mean_square, extremes))
    nothing = np.zeros(len(size))
    return {
        "ordinary": _finite(sketches),
        "max_abs": largest,
        "max_rel": np.where(norm != 0, l2 / norm, 0.0),
        "mean_abs": root_mean_square,
        "mean_reference": about.reference[:, _MEAN_ABS],
        "l2": l2,
        "reference_l2": norm,
        "candidate_l2": candidate_norm,
        "bulk_l2": bulk_of_squares(np.square(errors)),
        "spread": np.full(len(size), SPREAD),
        "reference_value": nothing,
        "candidate_value": nothing,
    }


def _scaled(sides: Both[np.ndarray], scales: Both[np.ndarray] | None) -> Both[np.ndarray]:
    return sides if scales is None else sides.zip(scales).map(lambda side: side[0] / side[1])


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
        rows: output array of `padiff.records.step_diffs.ROW`, one row for each pair.

    Returns:
        The indices of the pairs that were left out.
    """
    done: set[int] = set()
    groups: dict[int, list[tuple[int, Pair]]] = defaultdict(list)
    for place in places:
        pair = pairs[place]
        if _is_ordinary(pair):
            assert pair.reference is not None
            groups[math.prod(pair.reference.shape)].append((place, pair))
    for size, group in groups.items():
        count = _BLOCK // size
        for begin in range(0, len(group), count):
            readable, tables = _read(group[begin : begin + count], size)
            if readable:
                axes = np.array([bool(pair.anchor.shape) for _, pair in readable])
                done.update(_measure(np.array([place for place, _ in readable]), axes, tables, size, rows))
    return [place for place in places if place not in done] if done else list(places)


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


def measured(
    pairs: Sequence[Pair],
    elementwise: tuple[float, float] | None = None,
    done: Callable[[int], None] | None = None,
) -> StepDiffs:
    """Return the diffs of a step's pairs, not judged yet.

    Args:
        elementwise: tolerance in the form that `padiff.compare.measure.pairs.measure_pair` accepts.
        done: called now and then with the number of measured pairs.

    Raises:
        padiff.errors.RunFolderError: a tensor can't be read.
    """
    sites, count = pair_schema_of(pairs), len(pairs)
    rows = empty_rows(count)
    remaining: list[int] = list(range(count))
    if elementwise is None:
        places = np.flatnonzero(~measure_together(pairs, rows)).tolist()
        remaining = measure_in_rows(pairs, places, rows)
    alone: dict[int, Diff] = {}
    for number, place in enumerate(remaining, count - len(remaining)):
        if done is not None and number:
            done(number)
        alone[place] = measure_pair(pairs[place], elementwise)
    for place, diff in alone.items():
        rows[place] = row_of(diff)
    problems = {place: diff.problem for place, diff in alone.items() if diff.problem is not None}
    return StepDiffs(pairs, sites, rows, problems, odd_indexes(alone))
