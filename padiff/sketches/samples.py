"""Samples of a step's tensors: copied while the training runs, and sketched together afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from padiff.sketches.cuts import Cut, Kind, arithmetic
from padiff.sketches.part_sketches import Own
from padiff.sketches.rows import Empty as Empty
from padiff.sketches.rows import Layout, Rows


class Samples:
    """Numbered samples of one step.

    Args:
        empty: allocates memory.
        done: receives that memory when it is no longer needed. Default: the memory is freed.
        bring: starts to copy tensors from another device, and returns a function that waits for the copies
            (`padiff.frameworks.values.Tensors.fetch`).
        counts: number of samples of each kind in the previous step; `close` replaces it by this step's.
    """

    def __init__(
        self,
        empty: Empty = np.empty,
        done: Callable[[list[np.ndarray]], None] | None = None,
        bring: Callable[[Sequence[Any]], Callable[[], list[np.ndarray]]] | None = None,
        counts: dict[Kind, int] | None = None,
    ) -> None:
        self._done, self._bring = done, bring
        self._counts = {} if counts is None else counts
        self._rows = Rows(empty, self._counts)
        #: Pending differences: the first number, the minuends, the subtrahends.
        self._differences: list[tuple[int, Sequence[int], Sequence[int]]] = []
        self._elsewhere: dict[int, Any] = {}
        self._fetched: Callable[[], list[np.ndarray]] | None = None
        self._table: np.ndarray | None = None
        #: Elements of a sample that lie in the recorded part, by number.
        self._own: dict[int, Own] = {}
        self._closed = False

    # -- while the training runs ---------------------------------------------------------------------------

    def add(self, cut: Cut) -> int:
        """Copy a sample; return its number."""
        return self._rows.add(cut)

    def lay(self, kinds: Sequence[tuple[Kind, int]], others: int) -> list[int]:
        """Reserve the next numbers for samples that follow: a count for each kind, and `others` more.

        Returns:
            The addresses to which the samples of the kinds have to be copied, in the dtype of their kind.
        """
        addresses = self._rows.lay(kinds)
        self._rows.reserve(others)
        return addresses

    def fill(self, number: int, taken: Cut | Any) -> None:
        """Copy a sample that has a number already; a tensor on another device is stored until `fetch`."""
        if not isinstance(taken, Cut):
            self._elsewhere[number] = taken
        elif self._rows.has_row(number):
            taken.copy_to(self._rows.row(number))
        else:
            taken.copy_to(self._rows.place(number, taken.kind))

    def row(self, number: int) -> np.ndarray:
        """Return the row to which a sample is copied."""
        return self._rows.row(number)

    def __len__(self) -> int:
        return len(self._rows)

    def add_all(self, layout: Layout, cuts: Sequence[Cut | None], addresses: np.ndarray) -> list[int]:
        """Copy the samples of a layout; return their numbers (`padiff.sketches.rows.Rows.put_all`)."""
        return self._rows.put_all(layout, cuts, addresses)

    def add_part(self, values: Any, own: Own) -> int:
        """Store a part's elements of the full tensor's sample, on any device; return the sample's number."""
        number = self._rows.reserve()
        self._own[number] = own
        if isinstance(values, np.ndarray):
            self._put_part(number, values)
        else:
            self._elsewhere[number] = values
        return number

    def _put_part(self, number: int, values: np.ndarray) -> None:
        elements = self._own[number]
        row = self._rows.place(number, (elements.length, arithmetic(values.dtype))).reshape(-1)
        row[...] = 0
        row[elements.places] = values

    def add_elsewhere(self, taken: Any) -> int:
        """Store a sample that is on another device, until `fetch`; return its number."""
        number = self._rows.reserve()
        self._elsewhere[number] = taken
        return number

    def difference(self, after: int, before: int) -> int:
        """Return the number of the difference of two samples of the same length, in float32 or float64."""
        return self.differences((after,), (before,))

    def differences(self, after: Sequence[int], before: Sequence[int]) -> int:
        """Return the number of the first of the differences `after - before`; the others follow it."""
        first = self._rows.reserve(len(after))
        self._differences.append((first, after, before))
        return first

    def add_to(self, number: int, other: int) -> None:
        """Add sample `other` to sample `number`."""
        if number in self._elsewhere:
            self._elsewhere[number] = self._elsewhere[number] + self._elsewhere[other]
        else:
            row = self._rows.row(number)
            with np.errstate(all="ignore"):
                row += self._rows.row(other)

    def _sample(self, number: int) -> Any:
        """Return a sample, on its device."""
        return self._elsewhere[number] if number in self._elsewhere else self._rows.row(number)

    def zero(self, number: int) -> bool:
        """Return True if all of a sample is zero."""
        return not bool((self._sample(number) != 0).any())

    def equal(self, number: int, other: int) -> bool:
        """Return True if two samples of the same length are equal; both have to be on a device, or neither."""
        first, second = self._sample(number), self._sample(other)
        return bool(((first == second) | ((first != first) & (second != second))).all())

    def fetch(self) -> None:
        """Start to copy all samples that are on another device."""
        if self._elsewhere:
            assert self._bring is not None
            self._fetched = self._bring(list(self._elsewhere.values()))

    # -- after the step, while the training continues ------------------------------------------------------

    @property
    def table(self) -> np.ndarray:
        """Return the sketches in their stored form: a row for each number."""
        if self._table is None or len(self._table) < len(self._rows):
            self._settle()
            self._table = self._rows.table()
            for number, elements in self._own.items():
                # Extremes of the part's own elements, without the zeros at the positions of other parts.
                self._table[number, :2] = _extremes(self._rows.row(number), elements)
        return self._table

    def close(self) -> None:
        """Compute the sketches if necessary, and release the samples."""
        if self._closed:
            return
        if self._table is None:
            # The parameters after the update are not needed any more, only the changes.
            self._settle(instead=True)
        self.table  # noqa: B018
        self._closed = True
        self._counts.clear()
        self._counts.update(self._rows.counts)
        memory = self._rows.release_memory()
        if self._done is not None:
            self._done(memory)

    def _settle(self, instead: bool = False) -> None:
        """Copy every sample into its row.

        Args:
            instead: let differences overwrite their minuends.
        """
        if self._elsewhere:
            if self._fetched is None:
                self.fetch()
            assert self._fetched is not None
            for number, array in zip(self._elsewhere, self._fetched()):
                if number in self._own:
                    self._put_part(number, array)
                    continue
                kind = array.size, arithmetic(array.dtype)
                row = self._rows.row(number) if self._rows.has_row(number) else self._rows.place(number, kind)
                row.reshape(-1)[...] = array
            self._elsewhere.clear()
            self._fetched = None
        with np.errstate(all="ignore"):  # of infinities
            # The last ones first: the minuend of one difference may be the subtrahend of a later one.
            for first, after, before in reversed(self._differences) if instead else self._differences:
                self._rows.subtract(first, after, before, instead)
                for k, number in enumerate(after) if self._own else ():
                    if number in self._own:
                        self._own[first + k] = self._own.pop(number) if instead else self._own[number]
        self._differences.clear()


def _extremes(row: np.ndarray, sampling: Own) -> tuple[float, float]:
    """Return the minimum and the maximum of a part's finite elements; zeros if there are none."""
    values = row.reshape(-1)[sampling.places]
    values = values[np.isfinite(values)]
    return (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
