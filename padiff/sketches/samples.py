"""Samples of a step's tensors: copied in few calls while the training runs, and sketched together afterwards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from padiff.sketches.sketch import (
    BLOCK,
    ELEMENTS,
    ROW,
    Cut,
    Form,
    Kind,
    Own,
    arithmetic,
    move,
    padded,
    places_in_memory,
    read,
    rows_of,
)

#: ``empty(shape, dtype)``: an uninitialised C-contiguous array.
Empty = Callable[[tuple[int, ...], Any], np.ndarray]

# Maximum number of elements and rows of one piece. Measured: a quarter of that, which fits a core's own cache, takes a
# fifth longer, because it needs four times as many numpy calls; twice as much takes longer, too.
_AT_ONCE, _ROWS = 1 << 19, 2048
# Maximum number of bytes per read: the C library reuses its own memory for such sizes, and asks the system for larger.
_BYTES = 1 << 16
# Number of rows in the first piece of a kind whose number of samples is unknown.
_FEW = 4
# Piece number of a sample that has no row yet.
_NOWHERE = -1


class Piece:
    """Memory for several samples of one kind, one in each row.

    Attributes:
        number: position among all pieces.
        matrix: the memory; each row ends with zeros that make its length a multiple of `BUCKETS`.
        rows: the samples; those of maximum length as blocks.
        address, stride: start of the first row, and distance between rows, in bytes.
        used, size: number of used rows, and of all rows.
    """

    __slots__ = ("address", "kind", "matrix", "number", "rows", "size", "stride", "used")

    def __init__(self, number: int, kind: Kind, matrix: np.ndarray) -> None:
        length, _ = kind
        matrix[:, length:] = 0
        self.number, self.kind, self.matrix = number, kind, matrix
        self.rows = matrix.reshape(len(matrix), -1, BLOCK) if length == ELEMENTS else matrix[:, :length]
        self.address, self.stride = matrix.__array_interface__["data"][0], matrix.strides[0]
        self.used, self.size = 0, len(matrix)


class Layout:
    """Plan to copy and number the samples of many tensors together.

    Args:
        cuts: positions of the samples. Other tensors may use the same layout: those of the same forms, at other
            addresses.

    Attributes:
        small: groups of tensors whose sample is the whole tensor: the kind, the dtype in memory, and the tensors'
            positions.
        large: groups of tensors with sampled blocks: the kind, and the position and form of each tensor.
        plain: positions of all tensors in `small` and `large`.
        forms: forms of the tensors in `plain`.
        others: positions of all other tensors.
    """

    def __init__(self, cuts: Sequence[Cut]) -> None:
        small: dict[tuple[Kind, np.dtype[Any]], list[tuple[int, Form]]] = defaultdict(list)
        large: dict[Kind, list[tuple[int, Form]]] = defaultdict(list)
        self.others: list[int] = []
        for place, cut in enumerate(cuts):
            form = cut.form
            if form is None or not form.nbytes:
                self.others.append(place)
            elif form.chosen is None:
                small[form.kind, form.stored].append((place, form))
            else:
                large[form.kind].append((place, form))
        groups = [*small.values(), *large.values()]
        self.plain = [place for group in groups for place, _ in group]
        self.forms = [form for group in groups for _, form in group]
        self.small = [(*key, np.array([place for place, _ in group])) for key, group in small.items()]
        self.large = list(large.items())
        order = self.plain + self.others
        self._ranks = [0] * len(order)
        for rank, place in enumerate(order):
            self._ranks[place] = rank
        self._numbers: tuple[int, list[int]] = (-1, [])

    def numbers(self, first: int) -> list[int]:
        """Return the numbers of the samples, in the order of the tensors, given the first number. The list is
        read-only.
        """
        if self._numbers[0] != first:  # usually equal to the first number of the previous step
            self._numbers = first, [first + rank for rank in self._ranks]
        return self._numbers[1]


class Rows:
    """Numbered samples of one step.

    Args:
        empty: allocates memory.
        counts: expected number of samples of each kind; may be incomplete.
    """

    def __init__(self, empty: Empty, counts: dict[Kind, int]) -> None:
        self._empty, self._expected = empty, counts
        self.pieces: list[Piece] = []
        self._open: dict[Kind, Piece] = {}
        #: Piece and row of each sample, by number.
        self._piece_of: list[int] = []
        self._row_of: list[int] = []

    def __len__(self) -> int:
        return len(self._piece_of)

    @property
    def counts(self) -> dict[Kind, int]:
        """Return the number of samples of each kind."""
        counts: dict[Kind, int] = defaultdict(int)
        for piece in self.pieces:
            counts[piece.kind] += piece.used
        return counts

    def _more(self, kind: Kind) -> Piece:
        """Allocate and return a piece with room for at least one more sample."""
        length, dtype = kind
        width, used = padded(length), self.counts.get(kind, 0)
        missing = self._expected.get(kind, 0) - used
        missing = missing if missing > 0 else max(used, _FEW)
        matrix = self._empty((max(1, min(missing, _AT_ONCE // max(width, 1), _ROWS)), width), dtype)
        piece = self._open[kind] = Piece(len(self.pieces), kind, matrix)
        self.pieces.append(piece)
        return piece

    def spans(self, kind: Kind, count: int) -> Iterator[tuple[Piece, int, int]]:
        """Reserve rows for `count` samples; yield pieces, each with the first reserved row and the number of rows."""
        while count:
            piece = self._open.get(kind)
            if piece is None or piece.used == piece.size:
                piece = self._more(kind)
            first, length = piece.used, min(count, piece.size - piece.used)
            piece.used += length
            yield piece, first, length
            count -= length

    def _numbered(self, kind: Kind, count: int) -> Iterator[tuple[Piece, int, int]]:
        """Reserve rows like `spans`, and assign the next numbers to the samples."""
        for piece, row, length in self.spans(kind, count):
            self._piece_of += [piece.number] * length
            self._row_of += range(row, row + length)
            yield piece, row, length

    def reserve(self, count: int = 1) -> int:
        """Assign numbers to samples that have no rows yet; return the first number."""
        first = len(self._piece_of)
        self._piece_of += [_NOWHERE] * count
        self._row_of += [0] * count
        return first

    def place(self, number: int, kind: Kind) -> np.ndarray:
        """Return a new row for a sample that has a number."""
        piece, row, _ = next(self.spans(kind, 1))
        self._piece_of[number], self._row_of[number] = piece.number, row
        return np.asarray(piece.rows[row])

    def lay(self, kinds: Sequence[tuple[Kind, int]]) -> list[int]:
        """Reserve rows and the next numbers for samples of several kinds; return the addresses of the rows."""
        addresses: list[int] = []
        for kind, count in kinds:
            for piece, row, length in self._numbered(kind, count):
                addresses += range(
                    piece.address + row * piece.stride, piece.address + (row + length) * piece.stride, piece.stride
                )
        return addresses

    def has_row(self, number: int) -> bool:
        """Return True if a sample has a row."""
        return self._piece_of[number] != _NOWHERE

    def row(self, number: int) -> np.ndarray:
        """Return the row of a sample; it has one axis, or two (blocks)."""
        return np.asarray(self.pieces[self._piece_of[number]].rows[self._row_of[number]])

    # -- copying: this runs between the kernels of a training ------------------------------------------------

    def add(self, cut: Cut) -> int:
        """Copy a sample; return its number."""
        kind, _, _, form, address, _, _ = cut
        piece = self._open.get(kind)
        if piece is None or piece.used == piece.size:
            piece = self._more(kind)
        row = piece.used
        piece.used = row + 1
        number = len(self._piece_of)
        self._piece_of.append(piece.number)
        self._row_of.append(row)
        if form is not None and form.direct:
            move(piece.address + row * piece.stride, address, form.nbytes)
        else:
            cut.copy_to(piece.rows[row])
        return number

    def put_all(self, layout: Layout, cuts: Sequence[Cut | None], addresses: np.ndarray) -> list[int]:
        """Copy the samples of a layout; return their numbers. Do not modify the list.

        Args:
            cuts: positions of the samples in `layout.others`; other entries are not used.
            addresses: addresses of the tensors in `layout.plain`; other entries are not used.

        Raises:
            ValueError: no memory can be at one of the addresses; nothing was copied.
        """
        first = len(self._piece_of)
        positions = [places_in_memory(addresses[places], stored) for _, stored, places in layout.small]
        for (kind, stored, _), places in zip(layout.small, positions):
            done, length = 0, kind[0]
            for piece, row, count in self._numbered(kind, len(places)):
                # `read` returns a temporary copy, limited to a size for which the C library has memory.
                batch = max(1, _BYTES // (length * stored.itemsize))
                for start in range(0, count, batch):
                    end = min(start + batch, count)
                    read_to = piece.matrix[row + start : row + end, :length]
                    read_to[...] = read(places[done + start : done + end], stored, length)
                done += count
        for kind, members in layout.large:
            done = 0
            for piece, row, count in self._numbered(kind, len(members)):
                for k, (place, form) in enumerate(members[done : done + count], row):
                    form.copy_sample(int(addresses[place]), piece.rows[k])
                done += count
        for place in layout.others:
            cut = cuts[place]
            assert cut is not None
            self.add(cut)
        return layout.numbers(first)

    # -- after the step, while the training continues --------------------------------------------------------

    def subtract(self, first: int, after: Sequence[int], before: Sequence[int], instead: bool = False) -> None:
        """Store the differences `after - before` of samples that have rows, under the numbers from `first` on.

        Args:
            instead: overwrite the samples in `after`, which then lose their rows.
        """
        pieces, rows = _indices(self._piece_of), _indices(self._row_of)
        minuend, subtrahend = _indices(after), _indices(before)
        many = len(self.pieces)
        pairs = pieces[minuend] * many + pieces[subtrahend]
        for pair in np.unique(pairs):
            chosen = np.flatnonzero(pairs == pair)
            its, others = self.pieces[pair // many], self.pieces[pair % many]
            minuends, subtrahends = _span(rows[minuend[chosen]]), others.matrix[_span(rows[subtrahend[chosen]])]
            if instead:
                its.matrix[minuends] -= subtrahends
                continue
            done = 0
            for piece, row, count in self.spans(its.kind, len(chosen)):
                part = slice(done, done + count)
                np.subtract(its.matrix[minuends][part], subtrahends[part], out=piece.matrix[row : row + count])
                for k, number in enumerate((first + chosen[part]).tolist()):
                    self._piece_of[number], self._row_of[number] = piece.number, row + k
                done += count
        for number, place in enumerate(after, first) if instead else ():
            self._piece_of[number], self._row_of[number] = self._piece_of[place], self._row_of[place]
            self._piece_of[place] = _NOWHERE

    def table(self) -> np.ndarray:
        """Return the sketches in their stored form: a row for each number."""
        table = self._empty((len(self), ROW), np.float64)
        of = _indices(self._piece_of)
        # Stable, as that kind of sorting is fast for numbers that are mostly in order.
        most = max((piece.size for piece in self.pieces), default=1)
        order = np.argsort(of * most + _indices(self._row_of), kind="stable")
        table[of == _NOWHERE] = 0.0
        starts = np.searchsorted(of[order], np.arange(len(self.pieces) + 1))
        # Allocated once, not for each piece: that would cost more than the arithmetic.
        memory = self._empty((2 * max((piece.matrix.nbytes for piece in self.pieces), default=0),), np.uint8)
        rows = self._empty((max((piece.used for piece in self.pieces), default=0), ROW), np.float64)
        for piece, start in zip(self.pieces, starts):
            samples, numbers = piece.matrix[: piece.used], order[start : start + piece.used]
            if not samples.size:  # tensors without elements
                table[numbers] = 0.0
                continue
            work = memory[: 2 * samples.nbytes].view(samples.dtype).reshape(2, *samples.shape)
            place = _span(numbers)
            out = table[place] if isinstance(place, slice) else rows[: piece.used]
            rows_of(samples, piece.kind[0], work, out)
            if not isinstance(place, slice):
                table[place] = out
        return table


def _indices(numbers: Sequence[int]) -> np.ndarray:
    """Return numbers as an array. (`numpy.array` would inspect each number first.)"""
    return np.fromiter(numbers, np.intp, len(numbers))


def _span(rows: np.ndarray) -> slice | np.ndarray:
    """Return rows as an index: a slice, which copies nothing, if they are consecutive."""
    first, last = int(rows[0]), int(rows[-1])
    together = last - first + 1 == len(rows) and bool((rows[1:] - rows[:-1] == 1).all())
    return slice(first, last + 1) if together else rows


class Samples:
    """Numbered samples of one step.

    Args:
        empty: allocates memory.
        bring: starts to copy tensors from another device, and returns a function that waits for the copies
            (`padiff.frameworks.base.Tensors.fetch`).
        counts: number of samples of each kind in the previous step; `close` replaces it by this step's.
    """

    def __init__(
        self,
        empty: Empty = np.empty,
        bring: Callable[[Sequence[Any]], Callable[[], list[np.ndarray]]] | None = None,
        counts: dict[Kind, int] | None = None,
    ) -> None:
        self._bring = bring
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
        """Copy the samples of a layout; return their numbers (`padiff.sketches.samples.Rows.put_all`)."""
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
        self._rows.pieces.clear()

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
