"""Which process holds what parts, where processes hold parts of a parameter."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from padiff.errors import PadiffError
from padiff.pair.united import Piece, Pieces
from padiff.records import Pair, TensorSource

# A process is named where its part has this share of the squared error. Chosen: a fault in one part leaves the others
# to rounding, and one that all of them have is shared by their sizes.
_SHARE = 0.99


def put_together(pair: Pair) -> bool:
    """Whether a side of a pair was put together of what several processes hold."""
    records = [record for record in pair.sides if record is not None]
    return any(isinstance(record.source, Pieces) for record in records)


def rank_of(pair: Pair) -> int | None:
    """The process whose part of a tensor parts; `None` where it is in no one's, or that is not known.

    Args:
        pair: a diff's.
    """
    if pair.reference is None or pair.candidate is None or not put_together(pair):
        return None
    sources = pair.candidate.source, pair.reference.source
    if any(source.sketched for source in sources):
        return _sketched_apart(*sources)
    try:
        reference, candidate = (record.value.astype(np.float64) for record in (pair.reference, pair.candidate))
        for source, other in (
            (sources[0], pair.layout.undo(reference, candidate.shape)),
            (sources[1], pair.layout.apply(candidate, reference.shape)),
        ):
            # What one process of the reference has all of is no part: the candidate may as well be what departs.
            if isinstance(source, Pieces) and (source is sources[0] or len({p.rank for p in source.pieces}) > 1):
                found = _apart(source, other)
                if found is not None:
                    return found
    except (PadiffError, ValueError, TypeError):
        return None  # another memory order than a parameter has, or what can't be read
    return None


def _apart(source: Pieces, other: np.ndarray) -> int | None:
    """The process whose piece is the only one that is apart from the other side's tensor."""
    if any(piece.part.kind == "partial" for piece in source.pieces):
        return None
    errors: dict[int, float] = defaultdict(float)
    for piece in source.pieces:
        errors[piece.rank] += _error(piece, other)
    return _largest(errors)


def _largest(errors: dict[int, float]) -> int | None:
    """The process that has nearly all of the squared error."""
    rank, most = max(errors.items(), key=lambda one: one[1])
    total = sum(errors.values())
    return rank if total > 0 and (most >= _SHARE * total or most == np.inf) else None


def _sketched_apart(source: TensorSource, other: TensorSource) -> int | None:
    """`_apart`, of sketches: they tell it where both sides have the same parts."""
    if not isinstance(source, Pieces) or not isinstance(other, Pieces):
        return None
    partners = {piece.place: piece.record.source.sketch for piece in other.pieces}
    errors: dict[int, float] = defaultdict(float)
    for piece in source.pieces:
        one, partner = piece.record.source.sketch, partners.get(piece.place)
        if one is None or partner is None or one.transposed != partner.transposed:
            return None
        errors[piece.rank] += float(np.sum(np.square(one.projection - partner.projection)))
    return _largest(errors)


def _error(piece: Piece, other: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        difference = piece.record.value.astype(np.float64) - piece.within(other)
        square = float(np.sum(difference * difference))
    return square if np.isfinite(square) else np.inf
