"""Samples of a step's tensors: copied while the training runs, and made sketches of together when it has gone on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from padiff.sketches.cuts import Cut, Kind, arithmetic
from padiff.sketches.parts import Own
from padiff.sketches.rows import Empty as Empty
from padiff.sketches.rows import Layout, Rows


class Samples:
    """The samples of one step, known by numbers.

    Args:
        empty: where memory comes from.
        done: given that memory when it is no longer needed. Default: it is let go.
        bring: begins to bring over tensors from another device, and returns what waits for them
            (`padiff.frameworks.values.Tensors.fetch`).
        counts: how many samples there were of each kind in the step before; when this step is done, in this one.
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
        #: The number of the first, and whose they are, one after the other.
        self._differences: list[tuple[int, Sequence[int], Sequence[int]]] = []
        self._elsewhere: dict[int, Any] = {}
        self._fetched: Callable[[], list[np.ndarray]] | None = None
        self._table: np.ndarray | None = None
        #: By number: which elements of a sample are a part's own.
        self._own: dict[int, Own] = {}
        self._closed = False

    # -- while the training runs ---------------------------------------------------------------------------

    def add(self, cut: Cut) -> int:
        """Copy a sample; returns its number."""
        return self._rows.put(cut)

    def lay(self, kinds: Sequence[tuple[Kind, int]], others: int) -> list[int]:
        """Take the next numbers for samples that are to come: so many of each kind, and others.

        Returns:
            Where in memory those of the kinds are to be copied to, as they are in numpy's own arithmetic.
        """
        addresses = self._rows.lay(kinds)
        self._rows.reserve(others)
        return addresses

    def fill(self, number: int, taken: Cut | Any) -> None:
        """Copy a sample that has a number already, or note that it is on another device, until `fetch`."""
        if not isinstance(taken, Cut):
            self._elsewhere[number] = taken
        elif self._rows.has_row(number):
            taken.copy_to(self._rows.row(number))
        else:
            taken.copy_to(self._rows.place(number, taken.kind))

    def row(self, number: int) -> np.ndarray:
        """Where a sample is copied to."""
        return self._rows.row(number)

    def __len__(self) -> int:
        return len(self._rows)

    def add_all(self, layout: Layout, cuts: Sequence[Cut | None], addresses: np.ndarray) -> list[int]:
        """Copy samples that follow a layout; returns their numbers (`padiff.sketches.rows.Rows.put_all`)."""
        return self._rows.put_all(layout, cuts, addresses)

    def add_part(self, values: Any, own: Own) -> int:
        """Note the elements of a part of a tensor that the whole's sketch looks at; on whatever device."""
        number = self._rows.reserve()
        self._own[number] = own
        if isinstance(values, np.ndarray):
            self._put_part(number, values)
        else:
            self._elsewhere[number] = values
        return number

    def _put_part(self, number: int, values: np.ndarray) -> None:
        own = self._own[number]
        row = self._rows.place(number, (own.length, arithmetic(values.dtype))).reshape(-1)
        row[...] = 0
        row[own.places] = values

    def add_elsewhere(self, taken: Any) -> int:
        """Note a sample that is on another device, until `fetch`."""
        number = self._rows.reserve()
        self._elsewhere[number] = taken
        return number

    def difference(self, after: int, before: int) -> int:
        """A sample less another of the same length; in float32 at least, as all samples are."""
        return self.differences((after,), (before,))

    def differences(self, after: Sequence[int], before: Sequence[int]) -> int:
        """Samples less others; returns the number of the first difference, which the others follow."""
        first = self._rows.reserve(len(after))
        self._differences.append((first, after, before))
        return first

    def add_to(self, number: int, other: int) -> None:
        """Add another sample to one."""
        if number in self._elsewhere:
            self._elsewhere[number] = self._elsewhere[number] + self._elsewhere[other]
        else:
            row = self._rows.row(number)
            with np.errstate(all="ignore"):
                row += self._rows.row(other)

    def _sample(self, number: int) -> Any:
        """A sample, wherever it is."""
        return self._elsewhere[number] if number in self._elsewhere else self._rows.row(number)

    def zero(self, number: int) -> bool:
        """Whether all of a sample is zero."""
        return not bool((self._sample(number) != 0).any())

    def equal(self, number: int, other: int) -> bool:
        """Whether two samples of the same length, both still on a device or neither, are the same."""
        one, another = self._sample(number), self._sample(other)
        return bool(((one == another) | ((one != one) & (another != another))).all())

    def fetch(self) -> None:
        """Begin to bring over what is on another device, all of it at once."""
        if self._elsewhere:
            assert self._bring is not None
            self._fetched = self._bring(list(self._elsewhere.values()))

    # -- when it has gone on -------------------------------------------------------------------------------

    @property
    def table(self) -> np.ndarray:
        """The sketches as they are stored: a row for each number."""
        if self._table is None or len(self._table) < len(self._rows):
            self._settle()
            self._table = self._rows.table()
            for number, own in self._own.items():
                # Zeros stand for what others hold: its own extremes are those of its own elements.
                self._table[number, :2] = _extremes(self._rows.row(number), own)
        return self._table

    def close(self) -> None:
        """Make the sketches, if they are not made, and let the samples go."""
        if self._closed:
            return
        if self._table is None:
            # Nobody looks any more at what the optimizer made of parameters, but at what it changed.
            self._settle(instead=True)
        self.table  # noqa: B018
        self._closed = True
        self._counts.clear()
        self._counts.update(self._rows.counts)
        memory = self._rows.let_go()
        if self._done is not None:
            self._done(memory)

    def _settle(self, instead: bool = False) -> None:
        """Have every sample in its row; ``instead``: differences in the place of what others are subtracted from."""
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
            # The last ones first: what one is subtracted from may be what the next one subtracts.
            for first, after, before in reversed(self._differences) if instead else self._differences:
                self._rows.subtract(first, after, before, instead)
                for k, number in enumerate(after) if self._own else ():
                    if number in self._own:
                        self._own[first + k] = self._own.pop(number) if instead else self._own[number]
        self._differences.clear()


def _extremes(row: np.ndarray, own: Own) -> tuple[float, float]:
    """The least and the most of the finite values that are a part's own; zeros where there are none."""
    values = row.reshape(-1)[own.places]
    values = values[np.isfinite(values)]
    return (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
