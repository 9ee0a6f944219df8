"""The process that holds the differing part of a parameter whose parts lie on several processes."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from padiff.errors import PadiffError
from padiff.pair.merge_ranks import Piece, Pieces
from padiff.records import Pair, TensorSource

# A process is named if its part has at least this share of the squared error. Chosen: if one part is wrong, the others
# only have rounding errors; if all parts are wrong, the error is spread by their sizes.
_SHARE = 0.99


def put_together(pair: Pair) -> bool:
    """Return True if a side of a pair was assembled from the parts of several processes."""
    records = [record for record in pair.sides if record is not None]
    return any(isinstance(record.source, Pieces) for record in records)


def rank_of(pair: Pair) -> int | None:
    """Return the process that holds the differing part of a tensor; `None` if no single process does, or it is unknown.

    Args:
        pair: the pair of the diff.
    """
    if pair.reference is None or pair.candidate is None or not put_together(pair):
        return None
    sources = pair.candidate.source, pair.reference.source
    if any(source.sketched for source in sources):
        return _sketched_apart(*sources)
    try:
        reference, candidate = (record.value.astype(np.float64) for record in (pair.reference, pair.candidate))
        for source, counterpart in (
            (sources[0], pair.layout.undo(reference, candidate.shape)),
            (sources[1], pair.layout.apply(candidate, reference.shape)),
        ):
            # A tensor that one process of the reference holds as a whole says nothing: the candidate may be wrong.
            if isinstance(source, Pieces) and (source is sources[0] or len({p.rank for p in source.pieces}) > 1):
                rank = _apart(source, counterpart)
                if rank is not None:
                    return rank
    except (PadiffError, ValueError, TypeError):
        return None  # the memory order differs from the parameter's, or the values can't be read
    return None


def _apart(source: Pieces, partner: np.ndarray) -> int | None:
    """Return the process whose part is the only one that differs from the other side's tensor; `None` if there is
    none.
    """
    if any(piece.part.kind == "partial" for piece in source.pieces):
        return None
    errors: dict[int, float] = defaultdict(float)
    for piece in source.pieces:
        errors[piece.rank] += _error(piece, partner)
    return _largest(errors)


def _largest(errors: dict[int, float]) -> int | None:
    """Return the process with nearly all of the squared error; `None` if there is none."""
    rank, most = max(errors.items(), key=lambda one: one[1])
    total = sum(errors.values())
    return rank if total > 0 and (most >= _SHARE * total or most == np.inf) else None


def _sketched_apart(source: TensorSource, other: TensorSource) -> int | None:
    """Return the same as `_apart` for sketches, if both sides are split into the same parts; else `None`."""
    if not isinstance(source, Pieces) or not isinstance(other, Pieces):
        return None
    partners = {piece.place: piece.record.source.sketch for piece in other.pieces}
    errors: dict[int, float] = defaultdict(float)
    for piece in source.pieces:
        sketch, partner = piece.record.source.sketch, partners.get(piece.place)
        if sketch is None or partner is None or sketch.transposed != partner.transposed:
            return None
        errors[piece.rank] += float(np.sum(np.square(sketch.projection - partner.projection)))
    return _largest(errors)


def _error(piece: Piece, partner: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        difference = piece.record.value.astype(np.float64) - piece.within(partner)
        square = float(np.sum(difference * difference))
    return square if np.isfinite(square) else np.inf
