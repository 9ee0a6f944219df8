"""Causes that show in the tokens at which two runs with other layouts of the same tokens differ."""

from __future__ import annotations

import numpy as np

from padiff.pair.tokens import TokenAlignment
from padiff.records import SIDES, Both, Cause, FirstDiff


def token_cause(first: FirstDiff, alignment: TokenAlignment, differing: np.ndarray | None) -> Cause | None:
    """Return the cause of a first diff that its tokens show; `None` if they show none.

    Args:
        first: the first diff.
        alignment: the tokens of its step.
        differing: tokens at which the first diff's tensor exceeds its limit; `None` if it has no rows of tokens.
    """
    if first.stage == "input" and alignment.holes:
        return _surplus(alignment)
    if first.stage != "forward" or differing is None or not len(differing):
        return None
    return _positions(alignment, differing) or _packed(alignment, differing) or _cached(alignment, differing)


def _surplus(alignment: TokenAlignment) -> Cause:
    """Return the cause that one side gets tokens that the other side does not get."""
    side, sequence, index, token = alignment.holes[0]
    other = SIDES.candidate if side == SIDES.reference else SIDES.reference
    alike = [hole for hole in alignment.holes if hole[:2] == (side, sequence)]
    all_ids = {hole[3] for hole in alignment.holes if hole[0] == side}
    if len(all_ids) == 1 and len(alignment.holes) > 1 and index == 0:
        return Cause(
            "mask",
            f"the {side} computes {len(alike)} tokens before sequence {sequence} that the {other} leaves out "
            f"(id {token}): padding without a mask",
        )
    return Cause("tokens", f"the {other} never gets token {index} of sequence {sequence} (id {token})")


def _positions(alignment: TokenAlignment, differing: np.ndarray) -> Cause | None:
    positions = alignment.positions
    apart = (positions.reference != positions.candidate) & (positions.reference >= 0) & (positions.candidate >= 0)
    token = next((token for token in differing if apart[token]), None)
    # Tokens whose positions agree have to agree, too, up to those that see others.
    if token is None or not apart[differing[0]]:
        return None
    return Cause(
        "positions",
        f"the candidate computes token {alignment.index[token]} of sequence {alignment.sequence[token]} at position "
        f"{positions.candidate[token]}, the reference at position {positions.reference[token]}",
    )


def _packed(alignment: TokenAlignment, differing: np.ndarray) -> Cause | None:
    """Return the cause that tokens see those of another sequence in their row."""
    behind = alignment.places.map(lambda places: _are_behind(places, alignment.sequence))
    for side, flags in Both(*SIDES).zip(behind):
        other = behind.candidate if side == SIDES.reference else behind.reference
        if flags[differing].all() and not flags.all() and not other.any():
            return Cause(
                "mask",
                f"only tokens differ whose sequence is packed behind another one in the {side}: they see the tokens "
                "before them",
            )
    return None


def _are_behind(places: np.ndarray, sequence: np.ndarray) -> np.ndarray:
    """Return for each token if another sequence stands before its own in the row."""
    first: dict[tuple[int, int], tuple[int, int]] = {}
    for (call, row, time), number in zip(places.tolist(), sequence.tolist()):
        first[call, row] = min(first.get((call, row), (time, number)), (time, number))
    return np.array([first[call, row][1] != number for (call, row, _), number in zip(places.tolist(), sequence)], bool)


def _cached(alignment: TokenAlignment, differing: np.ndarray) -> Cause | None:
    """Return the cause that tokens are computed from a cache."""
    for side, places in Both(*SIDES).zip(alignment.places):
        starts = {int(s): int(c) for s, c in zip(alignment.sequence[::-1], places[::-1, 0])}
        cached = np.array([starts[int(s)] != c for s, c in zip(alignment.sequence, places[:, 0])])
        if cached[differing].all() and not cached.all():
            return Cause(
                "cache",
                f"only tokens differ that the {side} computes with a cache: the cache, or what is computed of it",
            )
    return None
