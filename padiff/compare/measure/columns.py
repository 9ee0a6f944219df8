"""What was measured of many pairs as a few arrays, which go from one process to another faster than objects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from padiff.records import Both, Diff, Figures, Pair, Problem

_FLOATS = (
    "max_abs",
    "max_rel",
    "mean_abs",
    "mean_reference",
    "l2",
    "reference_l2",
    "candidate_l2",
    "spread",
)
_COUNTS = ("size", "mismatched", "nonfinite", "overflowed")
_BASES = ("tensors", "sketches", "moments")
#: What stands for the basis of figures that are not there.
_NONE = len(_BASES)


@dataclass(frozen=True)
class Columns:
    """What was measured of some pairs of a step, not judged yet: a row for each.

    Attributes:
        places: of the pairs, among those of the step.
        floats: `_FLOATS`, both worst values, and the L2 norm without a few elements.
        counts: `_COUNTS`.
        basis: by its number in `_BASES`; `_NONE`: no figures.
        bulk: whether there is a norm without a few elements: it may be NaN.
        indexes, lengths: indexes of the worst elements, one after the other, and how long each is.
        passed: as `Diff` has it.
        problems: those that there are, by row.
    """

    places: np.ndarray
    floats: np.ndarray
    counts: np.ndarray
    basis: np.ndarray
    bulk: np.ndarray
    indexes: np.ndarray
    lengths: np.ndarray
    passed: np.ndarray
    problems: dict[int, Problem]

    @classmethod
    def of(cls, places: Sequence[int], diffs: Sequence[Diff]) -> Columns:
        """Those of some diffs, given the places of their pairs."""
        nothing = Figures()
        some = [diff.figures or nothing for diff in diffs]
        floats = [
            (
                *(getattr(f, name) for name in _FLOATS),
                *f.values,
                0.0 if f.bulk_l2 is None else f.bulk_l2,
            )
            for f in some
        ]
        counts = [(f.size, f.mismatched, f.nonfinite, f.overflowed) for f in some]
        return cls(
            np.array(places, np.int64),
            np.array(floats, np.float64).reshape(-1, len(_FLOATS) + 3),
            np.array(counts, np.int64).reshape(-1, len(_COUNTS)),
            np.array([_NONE if d.figures is None else _BASES.index(d.figures.basis) for d in diffs], np.uint8),
            np.array([f.bulk_l2 is not None for f in some], np.bool_),
            np.array([i for f in some for i in f.index], np.int64),
            np.array([len(f.index) for f in some], np.int32),
            np.array([diff.passed for diff in diffs], np.bool_),
            {row: diff.problem for row, diff in enumerate(diffs) if diff.problem is not None},
        )

    def __len__(self) -> int:
        return len(self.places)

    def put(self, found: list[Diff | None], pairs: Sequence[Pair]) -> None:
        """Make the diffs, and put each to its place beside its pair's."""
        ends = np.cumsum(self.lengths).tolist()
        indexes, begin = self.indexes.tolist(), 0
        rows = zip(
            self.places.tolist(),
            self.floats.tolist(),
            self.counts.tolist(),
            self.basis.tolist(),
            self.bulk.tolist(),
            ends,
            self.passed.tolist(),
        )
        for row, (place, floats, counts, basis, has_bulk, end, passed) in enumerate(rows):
            figures = None
            if basis != _NONE:
                max_abs, max_rel, mean_abs, mean_reference, l2, reference_l2, candidate_l2, spread, r, c, bulk = floats
                size, mismatched, nonfinite, overflowed = counts
                figures = Figures(
                    max_abs,
                    max_rel,
                    mean_abs,
                    mean_reference,
                    l2,
                    reference_l2,
                    candidate_l2,
                    size,
                    tuple(indexes[begin:end]),
                    Both(r, c),
                    mismatched,
                    nonfinite,
                    overflowed,
                    bulk if has_bulk else None,
                    _BASES[basis],
                    spread,
                )
            begin = end
            found[place] = Diff(pairs[place], figures, passed, None, self.problems.get(row))
