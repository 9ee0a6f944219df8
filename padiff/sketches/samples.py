"""Samples of a step's tensors: copied while the training runs, and made sketches of together when it has gone on.

Those of one length lie side by side in memory, so that a few calls of numpy sketch all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np

from padiff.sketches.parts import Own
from padiff.sketches.sketch import BLOCK, BUCKETS, ELEMENTS, FIGURES, Cut, Kind, arithmetic, padded, rows_of

#: ``empty(shape, dtype)``: an uninitialised C-contiguous array.
Empty = Callable[[tuple[int, ...], Any], np.ndarray]

# Elements that are worked on at a time: what the processor's second cache holds.
_AT_ONCE = 1 << 17
# Rows that a group of unknown size begins with.
_FEW = 4


class _Group:
    """Samples of one kind, one in each row of a few pieces of memory.

    Args:
        expected: how many there will be, as far as that is known.
    """

    __slots__ = ("_empty", "_expected", "kind", "numbers", "pieces", "waiting", "width")

    def __init__(self, kind: Kind, empty: Empty, expected: int = 0) -> None:
        self.kind, self.width = kind, padded(kind[0])
        self._empty, self._expected = empty, expected
        #: Rows for the samples to come, the next one last; of the longest ones as blocks.
        self.waiting: list[np.ndarray] = []
        self.pieces: list[np.ndarray] = []
        #: Of the samples, in the order of the rows.
        self.numbers: list[int] = []

    def more(self) -> list[np.ndarray]:
        """Have memory for at least one more sample."""
        length, dtype = self.kind
        wanted = max(self._expected - len(self.numbers), len(self.numbers), _FEW)
        piece = self._empty((max(1, min(wanted, _AT_ONCE // max(self.width, 1))), self.width), dtype)
        piece[:, length:] = 0
        self.pieces.append(piece)
        if length == ELEMENTS:
            self.waiting = list(piece.reshape(len(piece), -1, BLOCK)[::-1])
        else:
            self.waiting = list(piece[::-1, :length])
        return self.waiting

    def row(self, number: int) -> np.ndarray:
        """Memory for one more sample."""
        waiting = self.waiting or self.more()
        self.numbers.append(number)
        return waiting.pop()

    def sketch(self, out: np.ndarray, memory: np.ndarray) -> None:
        """Write what is stored of each sample into its row of the table."""
        if not self.width:
            return  # of tensors without elements there is nothing to say: their rows stay zero
        start = 0
        for piece in self.pieces:
            numbers = self.numbers[start : start + len(piece)]
            work = memory[: len(numbers) * self.width * piece.itemsize].view(piece.dtype).reshape(-1, self.width)
            out[numbers] = rows_of(piece[: len(numbers)], self.kind[0], work)
            start += len(numbers)


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
        self._empty, self._done, self._bring = empty, done, bring
        self._counts = {} if counts is None else counts
        self._groups: dict[Kind, _Group] = {}
        #: By number: the sample; `None` where it is still on a device, or a difference that is still to be taken.
        self._rows: list[np.ndarray | None] = []
        #: The number of the first, and whose they are, one after the other.
        self._differences: list[tuple[int, Sequence[int], Sequence[int]]] = []
        self._elsewhere: dict[int, Any] = {}
        self._fetched: Callable[[], list[np.ndarray]] | None = None
        self._table: np.ndarray | None = None
        #: By number: which elements of a sample are a part's own.
        self._own: dict[int, Own] = {}

    # -- while the training runs ---------------------------------------------------------------------------

    def add(self, cut: Cut) -> int:
        """Copy a sample; returns its number."""
        return self.add_all((cut,))

    def add_all(self, cuts: Iterable[Cut]) -> int:
        """Copy samples; returns the number of the first, which the others follow."""
        rows, groups = self._rows, self._groups
        first = number = len(rows)
        # One after the other in one loop: between the kernels of a training, what costs is not the copying but to
        # come to it, with nothing of it in the processor's cache.
        for view, chosen, kind, _, _ in cuts:
            group = groups.get(kind)
            if group is None:
                group = groups[kind] = _Group(kind, self._empty, self._counts.get(kind, 0))
            row = (group.waiting or group.more()).pop()
            group.numbers.append(number)
            rows.append(row)
            number += 1
            if chosen is None:
                if view.ndim == row.ndim:
                    row[...] = view
                else:
                    row.reshape(view.shape)[...] = view
            elif isinstance(chosen, tuple):
                row.reshape(-1)[...] = view[chosen]
            elif view.dtype == row.dtype:
                view.take(chosen, 0, row, "clip")  # with "raise" numpy would copy twice
            else:
                row[...] = view.take(chosen, 0)
        return first

    def add_part(self, values: Any, own: Own) -> int:
        """Note the elements of a part of a tensor that the whole's sketch looks at; on whatever device."""
        number = len(self._rows)
        self._own[number] = own
        self._rows.append(None)
        if isinstance(values, np.ndarray):
            self._put_part(number, values)
        else:
            self._elsewhere[number] = values
        return number

    def _put_part(self, number: int, values: np.ndarray) -> None:
        own = self._own[number]
        row = self._rows[number] = self._new((own.length, arithmetic(values.dtype)), number)
        row = row.reshape(-1)
        row[...] = 0
        row[own.places] = values

    def add_elsewhere(self, taken: Any) -> int:
        """Note a sample that is on another device, until `fetch`."""
        number = len(self._rows)
        self._elsewhere[number] = taken
        self._rows.append(None)
        return number

    def difference(self, after: int, before: int) -> int:
        """A sample less another of the same length; in float32 at least, as all samples are."""
        return self.differences((after,), (before,))

    def differences(self, after: Sequence[int], before: Sequence[int]) -> int:
        """Samples less others; returns the number of the first difference, which the others follow."""
        first = len(self._rows)
        self._differences.append((first, after, before))
        self._rows += [None] * len(after)
        return first

    def add_to(self, number: int, other: int) -> None:
        """Add another sample to one."""
        if number in self._elsewhere:
            self._elsewhere[number] = self._elsewhere[number] + self._elsewhere[other]
        else:
            with np.errstate(all="ignore"):
                self._rows[number] += self._rows[other]  # type: ignore[operator]

    def zero(self, number: int) -> bool:
        """Whether all of a sample is zero."""
        values: Any = self._elsewhere.get(number, self._rows[number])
        return not bool((values != 0).any())

    def equal(self, number: int, other: int) -> bool:
        """Whether two samples of the same length, both still on a device or neither, are the same."""
        samples: list[Any] = [self._elsewhere.get(k, self._rows[k]) for k in (number, other)]
        one, another = samples
        return bool(((one == another) | ((one != one) & (another != another))).all())

    def fetch(self) -> None:
        """Begin to bring over what is on another device, all of it at once."""
        if self._elsewhere:
            assert self._bring is not None
            self._fetched = self._bring(list(self._elsewhere.values()))

    def _new(self, kind: Kind, number: int) -> np.ndarray:
        group = self._groups.get(kind)
        if group is None:
            group = self._groups[kind] = _Group(kind, self._empty, self._counts.get(kind, 0))
        return group.row(number)

    # -- when it has gone on -------------------------------------------------------------------------------

    @property
    def table(self) -> np.ndarray:
        """The sketches as they are stored: a row for each number."""
        if self._table is None or len(self._table) < len(self._rows):
            self._settle()
            self._table = np.zeros((len(self._rows), len(FIGURES) + BUCKETS))
            # Taken from the system once, not for each group: that would cost more than the arithmetic.
            groups = self._groups.values()
            memory = np.empty(max((p.nbytes for group in groups for p in group.pieces), default=0), np.uint8)
            for group in groups:
                group.sketch(self._table, memory)
            for number, own in self._own.items():
                # Zeros stand for what others hold: its own extremes are those of its own elements.
                self._table[number, :2] = _extremes(self._rows[number], own)
        return self._table

    def close(self) -> None:
        """Make the sketches, if they are not made, and let the samples go."""
        if not self._groups and not self._elsewhere:
            return
        self.table  # noqa: B018
        groups, self._groups = self._groups, {}
        self._rows = [None] * len(self._rows)
        self._counts.clear()
        self._counts.update({kind: len(group.numbers) for kind, group in groups.items()})
        if self._done is not None:
            self._done([piece for group in groups.values() for piece in group.pieces])

    def _taken_apart(self) -> Iterator[tuple[int, int, int]]:
        """The number of each difference, and of what less what it is."""
        for first, after, before in self._differences:
            yield from zip(count(first), after, before)

    def _settle(self) -> None:
        """Have every sample in its row."""
        if self._elsewhere:
            if self._fetched is None:
                self.fetch()
            assert self._fetched is not None
            for number, array in zip(self._elsewhere, self._fetched()):
                if number in self._own:
                    self._put_part(number, array)
                    continue
                row = self._rows[number] = self._new((array.size, arithmetic(array.dtype)), number)
                row.reshape(-1)[...] = array
            self._elsewhere.clear()
            self._fetched = None
        with np.errstate(all="ignore"):  # of infinities
            for number, after, before in self._taken_apart():
                one, other = self._rows[after], self._rows[before]
                assert one is not None and other is not None
                row = self._rows[number] = self._new((one.size, one.dtype.type), number)
                np.subtract(one, other, out=row)
                if after in self._own:
                    self._own[number] = self._own[after]
        self._differences.clear()


def _extremes(row: np.ndarray | None, own: Own) -> tuple[float, float]:
    """The least and the most of the finite values that are a part's own; zeros where there are none."""
    values = np.zeros(0) if row is None else row.reshape(-1)[own.places]
    values = values[np.isfinite(values)]
    return (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
