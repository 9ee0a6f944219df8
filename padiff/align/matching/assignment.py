"""The best assignment as a whole, and how much better it is than the next one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from padiff.align.matching.evidence import Item, Scores, line_up
from padiff.records import Both

# Above so many on a side, the assignment is solved piece by piece, along the best common order: its cost grows with
# the third power.
_PIECE = 512

#: A pair that another assignment would beat but for so little is called ambiguous.
CLOSE = 1.0
# People define layers in any order.
_WEAK = frozenset({"order of definition", "numbers on one side", "output shape"})

#: Below that it is no pair.
TOO_CLOSE = 0.15


@dataclass(frozen=True)
class Choice(Both[int]):
    """A pair of the best assignment.

    Attributes:
        reference, candidate: positions in the two groups.
        margin: by how much the score falls if two pairs swap partners, or this one takes a free partner, at the least;
            infinite without another way.
        rivals: positions of the candidate's that come closest.
        score: the pair's own.
        reasons: what spoke for it.
        decided: what spoke most for it against the closest rival; empty without one.
    """

    margin: float
    rivals: tuple[int, ...]
    score: float
    reasons: tuple[str, ...]
    decided: str = ""

    @property
    def confidence(self) -> float:
        """0.5 for a toss-up to 1; no more than 0.75 where nothing but the order of definition decides."""
        confidence = 0.5 + 0.5 * (1 - math.exp(-min(self.margin, 20.0) / 2.0))
        return min(confidence, 0.75) if self.decided in _WEAK else confidence


def assign(items: Both[list[Item]], score: Callable[[Both[list[Item]]], Scores]) -> list[Choice]:
    """Pair two groups of like things so that the sum of the scores is largest.

    Solved by scipy's ``linear_sum_assignment`` (a shortest augmenting path algorithm, Crouse 2016). Very large groups
    are lined up and cut first.
    """
    sizes = items.map(len)
    if not all(sizes):
        return []
    largest = max(sizes)
    if largest <= 2 * _PIECE:
        return _assign(sizes.map(lambda size: list(range(size))), items, score)
    pieces = math.ceil(largest / _PIECE)
    last = largest if sizes.reference == sizes.candidate else math.ceil(largest / pieces) * pieces
    cuts = [last * k // pieces for k in range(pieces + 1)]
    found: list[Choice] = []
    orders = line_up(items)
    for start, stop in pairwise(cuts):
        chosen = Both(*(order[start:stop] for order in orders))
        if all(chosen):
            found += _assign(chosen, items, score)
    return found


def _best(total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The assignment with the largest sum: as many pairs as the shorter side has, in the order of the rows."""
    if total.shape[0] > total.shape[1]:
        columns, rows = _best(total.T)
        order = np.argsort(rows)
        return rows[order], columns[order]
    # Where no two rows want the same column, there is nothing to solve; among equals the solver takes the first, too.
    columns = total.argmax(axis=1)
    if len(set(columns.tolist())) == len(columns):
        return np.arange(len(columns)), columns
    from scipy.optimize import linear_sum_assignment  # to import it takes longer than many a comparison

    found: tuple[np.ndarray, np.ndarray] = linear_sum_assignment(total, maximize=True)
    return found


def _assign(
    chosen: Both[list[int]], items: Both[list[Item]], score: Callable[[Both[list[Item]]], Scores]
) -> list[Choice]:
    found = score(Both(*([side[k] for k in places] for side, places in zip(items, chosen))))
    total = found.total
    rows, columns = _best(total)
    swapped = total[np.ix_(rows, columns)]
    own = np.diag(swapped)
    loss = own[:, None] + own[None, :]
    loss -= swapped
    loss -= swapped.T
    np.fill_diagonal(loss, np.inf)
    closest, margins = loss.argmin(axis=1), loss.min(axis=1)
    decided = found.decided((rows, columns), (rows[closest], columns[closest]))
    reasons = found.reasons((rows, columns))
    about = zip(rows.tolist(), columns.tolist(), margins.tolist(), own.tolist(), reasons, decided)
    choices = []
    free = [sorted(set(range(n)) - set(taken)) for n, taken in zip(total.shape, (rows.tolist(), columns.tolist()))]
    for k, (i, j, margin, value, words, what) in enumerate(about):
        rivals: list[int] = []
        if margin < CLOSE:
            rivals = [int(columns[r]) for r in np.argsort(loss[k])[:3].tolist() if loss[k, r] < CLOSE]
        if free[1]:
            spare = value - total[i, free[1]]
            margin = min(margin, float(spare.min()))
            rivals += [free[1][r] for r in np.argsort(spare)[:2].tolist() if spare[r] < CLOSE]
        if free[0]:
            margin = min(margin, float((value - total[free[0], j]).min()))
        others = tuple([chosen.candidate[r] for r in rivals])
        choices.append(Choice(chosen.reference[i], chosen.candidate[j], margin, others, value, words, what))
    return choices
