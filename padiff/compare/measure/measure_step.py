"""Measurement of all pairs of a step: sketches together, tensors one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from padiff.compare.measure.pairs import bulk_of_squares, measure_pair
from padiff.records import (
    TRANSPOSED,
    Both,
    Diff,
    Layout,
    Pair,
    Sketched,
    unzipped,
)
from padiff.records.pair_table import PairTable, fact_of_pairs, pair_schema_of, records_of, sketch_rows
from padiff.records.step_diffs import SKETCHES, StepDiffs, empty_rows, odd_indexes, row_of
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
        remaining = np.flatnonzero(~measure_together(pairs, rows)).tolist()
    alone: dict[int, Diff] = {}
    for number, place in enumerate(remaining, count - len(remaining)):
        if done is not None and number:
            done(number)
        alone[place] = measure_pair(pairs[place], elementwise)
    for place, diff in alone.items():
        rows[place] = row_of(diff)
    problems = {place: diff.problem for place, diff in alone.items() if diff.problem is not None}
    return StepDiffs(pairs, sites, rows, problems, odd_indexes(alone))
