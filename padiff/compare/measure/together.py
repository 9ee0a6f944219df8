"""Measuring all pairs of sketches of a step at once: the figures of `padiff.compare.measure.sketches`, in few calls.

Most time of measuring one pair of sketches goes into calling numpy for 61 numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from padiff.compare.measure.sketches import bulk_of_squares
from padiff.records import TRANSPOSED, Both, Layout, Pair, Sketched, unzipped
from padiff.records.planned import PlannedPairs, fact_of_pairs, records_of, sketch_rows
from padiff.records.rows import SKETCHES
from padiff.sketches.sketch import BUCKETS, ELEMENTS, FIGURES, SPREAD

# What is kept of a sketch beside its projection, by its place in its row of a step's table.
_MINIMUM, _MAXIMUM, _MEAN_ABS, _MEAN_SQUARE, _NONFINITE = map(
    FIGURES.index, ("minimum", "maximum", "mean_abs", "mean_square", "nonfinite")
)
_EXTREMES = [_MINIMUM, _MAXIMUM]
_ABOUT = len(FIGURES)
#: Pairs that are measured at a time, of a step or of several: what is worked out of them stays in the cache, and memory
#: is used again. Measured: 80,000 pairs take 0.09 s, and 0.2 s at once; 512 to 4,096 at a time take as long.
PAIRS_AT_A_TIME = 2048


class _Group(NamedTuple):
    """Pairs of sketches that are measured alike.

    Attributes:
        length: how many elements their tensors have, where each is a number of the projection; 0: more, in each others.
        places: theirs, among the step's pairs.
        sizes: how many elements each has.
        elsewhere: whether the two samples of one lie at other places.
    """

    length: int
    places: np.ndarray
    sizes: np.ndarray
    elsewhere: np.ndarray

    def times(self, count: int) -> _Group:
        """The same of so many steps, one after the other."""
        return self if count == 1 else _Group(self.length, *(np.tile(column, count) for column in self[1:]))

    def pieces(self) -> Iterator[_Group]:
        """The same in groups of `PAIRS_AT_A_TIME`."""
        for start in range(0, len(self.places), PAIRS_AT_A_TIME):
            yield _Group(self.length, *(column[start : start + PAIRS_AT_A_TIME] for column in self[1:]))


def measure_together(steps: Sequence[Sequence[Pair]], rows: np.ndarray) -> np.ndarray:
    """Measure the pairs of sketches of a step, or of several whose pairs are `PlannedPairs` of the same columns.

    Left out is what is not ordinary (one side in full, another layout, values that are not finite), and to be measured
    one by one.

    Args:
        rows: of `padiff.records.rows.ROW`, for each step one for each pair, which are filled.

    Returns:
        Which were measured, likewise.
    """
    done = np.zeros(rows.shape, np.bool_)
    for group in (piece for whole in fact_of_pairs(steps[0], _groups) for piece in whole.pieces()):
        sketches, scales = _sketches(steps, group), _scales(steps, group)
        shape = len(steps), len(group.places)
        with np.errstate(all="ignore"):
            columns = (_exact if group.length else _estimates)(group.times(len(steps)), sketches, scales)
        ordinary = columns.pop("ordinary").reshape(shape)
        columns["size"] = np.broadcast_to(group.sizes, shape)
        columns["basis"] = np.full(shape, SKETCHES, np.uint8)
        if ordinary.all():
            done[:, group.places] = True
            for name, column in columns.items():
                rows[name][:, group.places] = column.reshape(shape)
        else:
            which, those = ordinary.nonzero()
            places = which, group.places[those]
            done[places] = True
            for name, column in columns.items():
                rows[name][places] = column.reshape(shape)[ordinary]
    return done


def count_together(pairs: Sequence[Pair]) -> int:
    """How many of a step's pairs may be measured together."""
    return sum(len(group.places) for group in fact_of_pairs(pairs, _groups))


def _groups(pairs: Sequence[Pair]) -> list[_Group]:
    """The pairs of sketches of a step that can be measured together."""
    if isinstance(pairs, PlannedPairs) and pairs.tabled:
        places, sizes, elsewhere = _in_tables(pairs)
    else:
        found = [(place, size, layout) for place, pair in enumerate(pairs) for size, layout in _measurable(pair)]
        places, sizes, elsewhere = map(np.array, zip(*found)) if found else (np.zeros(0, np.intp),) * 3
    elsewhere = elsewhere & (sizes > ELEMENTS)
    lengths = np.where(sizes <= BUCKETS, sizes, 0)
    groups = ((length, lengths == length) for length in np.unique(lengths).tolist())
    return [_Group(length, places[own], sizes[own], elsewhere[own]) for length, own in groups]


def _in_tables(pairs: PlannedPairs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where pairs are `_measurable` whose sketches lie in tables, their sizes, and which are in another layout."""
    a, b = (side.sketches for side in pairs.records)
    assert a is not None and b is not None
    rows = pairs.fact(sketch_rows)
    where = np.flatnonzero((rows.reference >= 0) & (rows.candidate >= 0))
    one, other = pairs.fact(records_of).map(lambda side: side[where])
    kept = (a.sizes[one] == b.sizes[other]) & (a.sizes[one] > 0)
    where, one, other = where[kept], one[kept], other[kept]
    sizes, alike = a.sizes[one], (a.transposed[one] == b.transposed[other]).tolist()
    layouts = pairs.columns.layouts
    shapes = [(a.shapes[k], b.shapes[n]) for k, n in zip(one.tolist(), other.tolist())]
    own = np.array([_is_measurable(layouts[k], *how) for k, *how in zip(where.tolist(), alike, shapes)], np.bool_)
    where = where[own]
    return where, sizes[own], np.array([bool(layouts[place]) for place in where.tolist()], np.bool_)


def _sketches(steps: Sequence[Sequence[Pair]], group: _Group) -> Both[np.ndarray]:
    """The sketches of a group, one step after the other."""
    first = steps[0]
    if not isinstance(first, PlannedPairs) or not first.tabled:
        return _gathered(first, group)
    where, tables = first.fact(sketch_rows), [pairs.records for pairs in steps if isinstance(pairs, PlannedPairs)]
    return where.zip(unzipped(tables)).map(
        lambda side: np.concatenate([records.rows_of(side[0][group.places]) for records in side[1]])
    )


def _gathered(pairs: Sequence[Pair], group: _Group) -> Both[np.ndarray]:
    """The sketches of a group, one by one."""
    some = [pairs[place] for place in group.places.tolist()]
    return Both(
        np.concatenate([pair.reference.source.row for pair in some]).reshape(len(some), -1),  # type: ignore[union-attr]
        np.concatenate([pair.candidate.source.row for pair in some]).reshape(len(some), -1),  # type: ignore[union-attr]
    )


def _scales(steps: Sequence[Sequence[Pair]], group: _Group) -> Both[np.ndarray] | None:
    """What each side's values are divided by, as columns; `None`: by nothing."""
    if all(isinstance(pairs, PlannedPairs) and pairs.unscaled for pairs in steps):
        return None
    scales = [pairs[place].scales for pairs in steps for place in group.places.tolist()]
    return unzipped(scales).map(lambda side: np.array(side)[:, None])


def _measurable(pair: Pair) -> list[tuple[int, bool]]:
    """The size of a pair of sketches, and whether it is in another layout; nothing of what is measured by itself."""
    one, other = pair.reference, pair.candidate
    if one is None or other is None:
        return []
    a, b = one.source, other.source
    if not isinstance(a, Sketched) or not isinstance(b, Sketched) or a.size != b.size or not a.size:
        return []
    alike = _is_measurable(pair.layout, a.transposed == b.transposed, (one.shape, other.shape))
    return [(a.size, bool(pair.layout))] if alike else []


def _is_measurable(layout: Layout, turned_alike: bool, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    one, other = shapes
    if not layout:
        return turned_alike and one == other
    return layout == TRANSPOSED and not turned_alike and one == other[::-1]


def _finite(sketches: Both[np.ndarray]) -> np.ndarray:
    """Of which pairs all numbers are finite, and all of the tensors were."""
    alike = [np.isfinite(side).all(axis=1) & (side[:, _NONFINITE] == 0) for side in sketches]
    return np.asarray(alike[0] & alike[1])


def _exact(group: _Group, sketches: Both[np.ndarray], scales: Both[np.ndarray] | None) -> dict[str, np.ndarray]:
    """Of tensors of so many elements, each of which is a number of the projection, give or take its sign."""
    reference, candidate = _scaled(sketches.map(lambda side: side[:, _ABOUT : _ABOUT + group.length]), scales)
    error, size = np.abs(candidate - reference), np.abs(reference)
    squares = [np.einsum("ij,ij->i", values, values) for values in (error, reference, candidate)]
    # Where the reference is 0 there is no relative error.
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
    """Of larger tensors, from their projections."""
    size = group.sizes
    shares = np.sqrt(size / np.minimum(size, ELEMENTS))[:, None]
    projected = _scaled(sketches.map(lambda side: side[:, _ABOUT:]), scales)
    errors = (projected.candidate - projected.reference) * shares
    # As products of a row and a column: one product of matrices may add up in another order.
    l2 = np.sqrt(np.matmul(errors[:, None, :], errors[:, :, None])[:, 0, 0])
    about = _scaled(sketches.map(lambda side: side[:, :_ABOUT]), scales)
    norm, other = (np.sqrt(side[:, _MEAN_SQUARE] * size) for side in sketches)
    if scales is not None:
        norm, other = norm / scales.reference[:, 0], other / scales.candidate[:, 0]
    root_mean_square = l2 / np.sqrt(size)
    extremes = np.abs(about.candidate[:, _EXTREMES] - about.reference[:, _EXTREMES]).max(axis=1)
    # A sample elsewhere has other extremes.
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
        "candidate_l2": other,
        "bulk_l2": bulk_of_squares(np.square(errors)),
        "spread": np.full(len(size), SPREAD),
        "reference_value": nothing,
        "candidate_value": nothing,
    }


def _scaled(sides: Both[np.ndarray], scales: Both[np.ndarray] | None) -> Both[np.ndarray]:
    return sides if scales is None else sides.zip(scales).map(lambda side: side[0] / side[1])
