"""The best assignment between two groups, and its margin over the next best one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from padiff.align.matching.evidence import Item, Scores, line_up
from padiff.records import Both

# Size of a piece. Groups of more than twice this size are split along their best common order, as the cost of an
# assignment grows with the third power of its size.
_PIECE = 512

#: Margin below which a pair is called ambiguous.
CLOSE = 1.0
# Evidence that cannot give a high confidence alone, as people define layers in any order.
_WEAK = frozenset({"order of definition", "numbers on one side", "output shape"})

#: Margin below which a pair is rejected.
TOO_CLOSE = 0.15


@dataclass(frozen=True)
class Choice(Both[int]):
    """A pair of the best assignment.

    Attributes:
        reference, candidate: positions in the two groups.
        margin: smallest loss of score if this pair swaps partners with another pair or takes a free partner; infinite
            if neither is possible.
        rivals: positions of the candidate's items that come closest.
        score: score of the pair.
        reasons: the evidence for and against the pair, in words.
        decided: the strongest evidence for the pair against its closest rival; empty without a rival.
    """

    margin: float
    rivals: tuple[int, ...]
    score: float
    reasons: tuple[str, ...]
    decided: str = ""

    @property
    def confidence(self) -> float:
        """Return the confidence, 0.5 (a toss-up) to 1; at most 0.75 if weak evidence such as the order of definition
        decided.
        """
        confidence = 0.5 + 0.5 * (1 - math.exp(-min(self.margin, 20.0) / 2.0))
        return min(confidence, 0.75) if self.decided in _WEAK else confidence


def assign(items: Both[list[Item]], score: Callable[[Both[list[Item]]], Scores]) -> list[Choice]:
    """Return the pairs of two groups of similar items with the largest sum of scores.

    scipy's ``linear_sum_assignment`` (a shortest augmenting path algorithm, Crouse 2016) solves the assignment. Very
    large groups are first ordered and split into pieces.
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
    choices: list[Choice] = []
    orders = line_up(items)
    for start, stop in pairwise(cuts):
        chosen = Both(*(order[start:stop] for order in orders))
        if all(chosen):
            choices += _assign(chosen, items, score)
    return choices


def _best(total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and columns of the assignment with the largest sum: as many pairs as the shorter side has, by row."""
    if total.shape[0] > total.shape[1]:
        columns, rows = _best(total.T)
        order = np.argsort(rows)
        return rows[order], columns[order]
    # If all rows have their largest score in different columns, these are the solution. With ties the solver takes the
    # first column, too.
    columns = total.argmax(axis=1)
    if len(set(columns.tolist())) == len(columns):
        return np.arange(len(columns)), columns
    from scipy.optimize import linear_sum_assignment  # the import takes longer than many a comparison

    solution: tuple[np.ndarray, np.ndarray] = linear_sum_assignment(total, maximize=True)
    return solution


def _assign(
    chosen: Both[list[int]], items: Both[list[Item]], score: Callable[[Both[list[Item]]], Scores]
) -> list[Choice]:
    scores = score(Both(*([side[k] for k in places] for side, places in zip(items, chosen))))
    total = scores.total
    rows, columns = _best(total)
    swapped = total[np.ix_(rows, columns)]
    gains = np.diag(swapped)
    loss = gains[:, None] + gains[None, :]
    loss -= swapped
    loss -= swapped.T
    np.fill_diagonal(loss, np.inf)
    closest, margins = loss.argmin(axis=1), loss.min(axis=1)
    decided = scores.decided((rows, columns), (rows[closest], columns[closest]))
    reasons = scores.reasons((rows, columns))
    about = zip(rows.tolist(), columns.tolist(), margins.tolist(), gains.tolist(), reasons, decided)
    choices = []
    free = [sorted(set(range(n)) - set(used)) for n, used in zip(total.shape, (rows.tolist(), columns.tolist()))]
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
