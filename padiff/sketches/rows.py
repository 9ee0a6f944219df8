"""Memory for the samples of a step. Those of one length lie side by side: a few calls of numpy sketch them all."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from padiff.sketches.cuts import Cut, Kind, move
from padiff.sketches.places import BLOCK, BUCKETS, ELEMENTS
from padiff.sketches.sketch import FIGURES, padded, rows_of

#: ``empty(shape, dtype)``: an uninitialised C-contiguous array.
Empty = Callable[[tuple[int, ...], Any], np.ndarray]

# Elements and rows that are worked on at a time: what the processor's second cache holds of samples and of sketches.
_AT_ONCE, _ROWS = 1 << 17, 512
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
        direct: the kinds of those that are copied as they lie, with their sizes in bytes, and their places among
            the tensors.
        plain: the places of all of them.
        others: the places of the others.
        ranks: of each tensor, the place among the samples.
    """

    def __init__(self, cuts: Sequence[Cut]) -> None:
        places: dict[Kind, list[int]] = defaultdict(list)
        self.others: list[int] = []
        sizes: dict[Kind, int] = {}
        for place, cut in enumerate(cuts):
            if cut.form is not None and cut.form.direct:
                places[cut.kind].append(place)
                sizes[cut.kind] = cut.form.nbytes
            else:
                self.others.append(place)
        self.direct = [(kind, sizes[kind], places[kind]) for kind in places]
        self.plain = [place for _, _, some in self.direct for place in some]
        order = self.plain + self.others
        self.ranks = [0] * len(order)
        for rank, place in enumerate(order):
            self.ranks[place] = rank


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
            for piece, row, some in self.spans(kind, count):
                self._piece_of += [piece.number] * some
                self._row_of += range(row, row + some)
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

    def put_all(self, layout: Layout, cuts: Sequence[Cut | None], addresses: Sequence[int]) -> list[int]:
        """Copy samples that follow a layout; returns their numbers.

        Args:
            cuts: of those that are not copied as they lie.
            addresses: of those that are.
        """
        first = len(self._piece_of)
        for kind, size, places in layout.direct:
            done = 0
            for piece, row, count in self.spans(kind, len(places)):
                self._piece_of += [piece.number] * count
                self._row_of += range(row, row + count)
                start, stride = piece.address + row * piece.stride, piece.stride
                to = range(start, start + count * stride, stride)
                # One call after the other, without a step of Python's between them.
                deque(map(move, to, [addresses[k] for k in places[done : done + count]], repeat(size)), 0)
                done += count
        for place in layout.others:
            cut = cuts[place]
            assert cut is not None
            self.put(cut)
        return [first + rank for rank in layout.ranks]

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
        table = np.empty((len(self), len(FIGURES) + BUCKETS))
        of = _indices(self._piece_of)
        order = np.lexsort((_indices(self._row_of), of))
        table[of == _NOWHERE] = 0.0
        starts = np.searchsorted(of[order], np.arange(len(self.pieces) + 1))
        # Taken from the system once, not for each piece: that would cost more than the arithmetic.
        memory = np.empty(max((piece.matrix.nbytes for piece in self.pieces), default=0), np.uint8)
        for piece, start in zip(self.pieces, starts):
            samples, numbers = piece.matrix[: piece.used], order[start : start + piece.used]
            if samples.size:
                work = memory[: samples.nbytes].view(samples.dtype).reshape(samples.shape)
                table[numbers] = rows_of(samples, piece.kind[0], work)
            else:  # of tensors without elements there is nothing to say
                table[numbers] = 0.0
        return table


def _indices(numbers: Sequence[int]) -> np.ndarray:
    """As an array: not by `numpy.array`, which looks at each first to see what it is."""
    return np.fromiter(numbers, np.intp, len(numbers))


def _span(rows: np.ndarray) -> slice | np.ndarray:
    """Rows as what takes them out of a matrix: without a copy where they follow each other."""
    first, last = int(rows[0]), int(rows[-1])
    together = last - first + 1 == len(rows) and bool((np.diff(rows) == 1).all())
    return slice(first, last + 1) if together else rows
