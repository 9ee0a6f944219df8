"""Memory for the samples of a step. Those of one length lie side by side: a few calls of numpy sketch them all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from padiff.sketches.cuts import Cut, Form, Kind, move, places_in_memory, read
from padiff.sketches.places import BLOCK, ELEMENTS
from padiff.sketches.sketch import ROW, padded, rows_of

#: ``empty(shape, dtype)``: an uninitialised C-contiguous array.
Empty = Callable[[tuple[int, ...], Any], np.ndarray]

# Elements and rows that are worked on at a time. Measured: a quarter of that, which a core's own cache holds, takes a
# fifth longer, for there are four times as many calls of numpy's; twice as much takes longer, too.
_AT_ONCE, _ROWS = 1 << 19, 2048
# Bytes that are read at a time: memory of the C library's own, of which larger pieces come from the system each time.
_BYTES = 1 << 16
# Rows that a kind of unknown number begins with.
_FEW = 4
# Of a sample that has no row yet.
_NOWHERE = -1


class Piece:
    """Memory for some samples of one kind, one in each row.

    Attributes:
        number: among all pieces.
        matrix: the memory; a row ends with zeros that make its length a multiple of `BUCKETS`.
        rows: the samples; the longest ones as blocks.
        address, stride: in bytes, where the first row begins, and how far it is to the next.
        used, size: how many rows are taken, of how many.
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
    """How the samples of many tensors are copied together, and numbered.

    Args:
        cuts: where they lie. Others may follow the same layout: of the same forms, at other addresses.

    Attributes:
        small: what is looked at as a whole: for samples of one kind, of one dtype in memory, the places of the tensors.
        large: of what blocks are looked at: for samples of one kind the places of the tensors, and how they lie.
        plain: the places of all of these.
        forms: how they lie.
        others: the places of the others.
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
        self.plain = [place for some in groups for place, _ in some]
        self.forms = [form for some in groups for _, form in some]
        self.small = [(*key, np.array([place for place, _ in some])) for key, some in small.items()]
        self.large = list(large.items())
        order = self.plain + self.others
        self._ranks = [0] * len(order)
        for rank, place in enumerate(order):
            self._ranks[place] = rank
        self._numbers: tuple[int, list[int]] = (-1, [])

    def numbers(self, first: int) -> list[int]:
        """The numbers of the samples, in the order of the tensors, given the first. Not to be changed."""
        if self._numbers[0] != first:  # as a rule it is that of the step before
            self._numbers = first, [first + rank for rank in self._ranks]
        return self._numbers[1]


class Rows:
    """The samples of one step, known by numbers.

    Args:
        empty: where memory comes from.
        counts: how many samples there will be of each kind, as far as that is known.
    """

    def __init__(self, empty: Empty, counts: dict[Kind, int]) -> None:
        self._empty, self._expected = empty, counts
        self.pieces: list[Piece] = []
        self._open: dict[Kind, Piece] = {}
        self._more_memory: list[np.ndarray] = []
        #: By number: the piece and the row there.
        self._piece_of: list[int] = []
        self._row_of: list[int] = []

    def __len__(self) -> int:
        return len(self._piece_of)

    @property
    def counts(self) -> dict[Kind, int]:
        """How many samples there are of each kind."""
        counts: dict[Kind, int] = defaultdict(int)
        for piece in self.pieces:
            counts[piece.kind] += piece.used
        return counts

    def _more(self, kind: Kind) -> Piece:
        """Have memory for at least one more sample."""
        length, dtype = kind
        width, taken = padded(length), self.counts.get(kind, 0)
        wanted = self._expected.get(kind, 0) - taken
        wanted = wanted if wanted > 0 else max(taken, _FEW)
        matrix = self._empty((max(1, min(wanted, _AT_ONCE // max(width, 1), _ROWS)), width), dtype)
        piece = self._open[kind] = Piece(len(self.pieces), kind, matrix)
        self.pieces.append(piece)
        return piece

    def spans(self, kind: Kind, count: int) -> Iterator[tuple[Piece, int, int]]:
        """Take rows for more samples: pieces, each with the first row and how many."""
        while count:
            piece = self._open.get(kind)
            if piece is None or piece.used == piece.size:
                piece = self._more(kind)
            first, some = piece.used, min(count, piece.size - piece.used)
            piece.used += some
            yield piece, first, some
            count -= some

    def _numbered(self, kind: Kind, count: int) -> Iterator[tuple[Piece, int, int]]:
        """`spans`, for samples that get the next numbers."""
        for piece, row, some in self.spans(kind, count):
            self._piece_of += [piece.number] * some
            self._row_of += range(row, row + some)
            yield piece, row, some

    def reserve(self, count: int = 1) -> int:
        """Numbers for samples that have no rows yet; returns the first."""
        first = len(self._piece_of)
        self._piece_of += [_NOWHERE] * count
        self._row_of += [0] * count
        return first

    def place(self, number: int, kind: Kind) -> np.ndarray:
        """A row for a sample that has a number."""
        piece, row, _ = next(self.spans(kind, 1))
        self._piece_of[number], self._row_of[number] = piece.number, row
        return np.asarray(piece.rows[row])

    def lay(self, kinds: Sequence[tuple[Kind, int]]) -> list[int]:
        """Take rows, and the next numbers, for so many samples of each kind; where the rows begin in memory."""
        addresses: list[int] = []
        for kind, count in kinds:
            for piece, row, some in self._numbered(kind, count):
                addresses += range(
                    piece.address + row * piece.stride, piece.address + (row + some) * piece.stride, piece.stride
                )
        return addresses

    def has_row(self, number: int) -> bool:
        """Whether a sample has a row."""
        return self._piece_of[number] != _NOWHERE

    def row(self, number: int) -> np.ndarray:
        """Where a sample is; one axis, or blocks."""
        return np.asarray(self.pieces[self._piece_of[number]].rows[self._row_of[number]])

    # -- copying: this goes on between the kernels of a training ---------------------------------------------

    def put(self, cut: Cut) -> int:
        """Copy a sample; returns its number."""
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
        """Copy samples that follow a layout; returns their numbers, in a list that is not to be changed.

        Args:
            cuts: of those that are not read by their addresses.
            addresses: of those that are.

        Raises:
            ValueError: no memory can be at one of these; nothing was copied.
        """
        first = len(self._piece_of)
        found = [places_in_memory(addresses[places], stored) for _, stored, places in layout.small]
        for (kind, stored, _), places in zip(layout.small, found):
            done, length = 0, kind[0]
            for piece, row, count in self._numbered(kind, len(places)):
                # What is read has memory of its own before it is here: so much that it is not taken from the system.
                some = max(1, _BYTES // (length * stored.itemsize))
                for start in range(0, count, some):
                    end = min(start + some, count)
                    read_to = piece.matrix[row + start : row + end, :length]
                    read_to[...] = read(places[done + start : done + end], stored, length)
                done += count
        for kind, members in layout.large:
            done = 0
            for piece, row, count in self._numbered(kind, len(members)):
                for k, (place, form) in enumerate(members[done : done + count], row):
                    form.copy(int(addresses[place]), piece.rows[k])
                done += count
        for place in layout.others:
            cut = cuts[place]
            assert cut is not None
            self.put(cut)
        return layout.numbers(first)

    # -- when the training has gone on -----------------------------------------------------------------------

    def subtract(self, first: int, after: Sequence[int], before: Sequence[int], instead: bool = False) -> None:
        """Give samples that have numbers, from the first on, the differences of others, which lie in rows.

        Args:
            instead: in the place of those that are subtracted from, which are no samples any more.
        """
        pieces, rows = _indices(self._piece_of), _indices(self._row_of)
        one, other = _indices(after), _indices(before)
        many = len(self.pieces)
        pairs = pieces[one] * many + pieces[other]
        for pair in np.unique(pairs):
            chosen = np.flatnonzero(pairs == pair)
            its, others = self.pieces[pair // many], self.pieces[pair % many]
            minuends, subtrahends = _span(rows[one[chosen]]), others.matrix[_span(rows[other[chosen]])]
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
        """The sketches as they are stored: a row for each number."""
        table = self._taken((len(self), ROW), np.float64)
        of = _indices(self._piece_of)
        # Mostly in order already, which this kind of sorting makes use of.
        most = max((piece.size for piece in self.pieces), default=1)
        order = np.argsort(of * most + _indices(self._row_of), kind="stable")
        table[of == _NOWHERE] = 0.0
        starts = np.searchsorted(of[order], np.arange(len(self.pieces) + 1))
        # Taken once, not for each piece: that would cost more than the arithmetic.
        memory = self._taken((2 * max((piece.matrix.nbytes for piece in self.pieces), default=0),), np.uint8)
        rows = self._taken((max((piece.used for piece in self.pieces), default=0), ROW), np.float64)
        for piece, start in zip(self.pieces, starts):
            samples, numbers = piece.matrix[: piece.used], order[start : start + piece.used]
            if not samples.size:  # of tensors without elements there is nothing to say
                table[numbers] = 0.0
                continue
            work = memory[: 2 * samples.nbytes].view(samples.dtype).reshape(2, *samples.shape)
            place = _span(numbers)
            out = table[place] if isinstance(place, slice) else rows[: piece.used]
            rows_of(samples, piece.kind[0], work, out)
            if not isinstance(place, slice):
                table[place] = out
        return table

    def _taken(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Memory that goes back with that of the samples."""
        array = self._empty(shape, dtype)
        self._more_memory.append(array)
        return array

    def let_go(self) -> list[np.ndarray]:
        """Forget the samples; their memory, and that of the tables."""
        memory = [*(piece.matrix for piece in self.pieces), *self._more_memory]
        self.pieces.clear()
        self._more_memory.clear()
        return memory


def _indices(numbers: Sequence[int]) -> np.ndarray:
    """As an array: not by `numpy.array`, which looks at each first to see what it is."""
    return np.fromiter(numbers, np.intp, len(numbers))


def _span(rows: np.ndarray) -> slice | np.ndarray:
    """Rows as what takes them out of a matrix: without a copy where they follow each other."""
    first, last = int(rows[0]), int(rows[-1])
    together = last - first + 1 == len(rows) and bool((rows[1:] - rows[:-1] == 1).all())
    return slice(first, last + 1) if together else rows
