"""The assignment against brute force over all permutations."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from padiff.align.matching import unit_pairing
from padiff.align.matching.evidence import Item, Scores, scores
from padiff.align.matching.unit_pairing import CLOSE, Choice, assign
from padiff.records import Both


def items(count):
    return [Item(path=f"l{k}", defined=k) for k in range(count)]


def assigned(matrix):
    """Assign by a given matrix of scores; rows and columns are found by the items' places."""
    matrix = np.asarray(matrix, float)

    def score(sides):
        rows, columns = ([x.defined for x in side] for side in sides)
        return Scores(matrix[np.ix_(rows, columns)], {})

    return assign(Both(*map(items, matrix.shape)), score)


def ways(matrix):
    """All complete assignments, with their sums."""
    rows, columns = matrix.shape
    if rows > columns:
        return [([(i, j) for j, i in pairs], total) for pairs, total in ways(matrix.T)]
    return [
        (list(enumerate(chosen)), float(sum(matrix[i, j] for i, j in enumerate(chosen))))
        for chosen in itertools.permutations(range(columns), rows)
    ]


def matrices():
    rng = np.random.default_rng(0)
    sizes = [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (2, 4), (4, 2), (3, 5), (5, 3), (1, 4), (4, 1)]
    return [rng.normal(size=size).round(2) * 3 for size in sizes for _ in range(6)]


each = pytest.mark.parametrize("matrix", matrices(), ids=lambda m: "x".join(map(str, m.shape)))


@each
def test_the_sum_is_the_largest_of_all(matrix):
    chosen = assigned(matrix)
    assert len(chosen) == min(matrix.shape)
    assert len({c.reference for c in chosen}) == len({c.candidate for c in chosen}) == len(chosen)
    best = max(total for _, total in ways(matrix))
    assert sum(c.score for c in chosen) == pytest.approx(best)
    assert all(c.score == pytest.approx(matrix[c.reference, c.candidate]) for c in chosen)


@each
def test_forbidding_a_pair_costs_no_more_than_its_margin(matrix):
    """The margin looks at swaps of two; a longer chain of moves may come cheaper, never dearer."""
    for choice in assigned(matrix):
        best = max(total for _, total in ways(matrix))
        others = [total for pairs, total in ways(matrix) if (choice.reference, choice.candidate) not in pairs]
        cost = best - max(others, default=-math.inf)
        assert cost <= choice.margin + 1e-9
        if min(matrix.shape) <= 2 and max(matrix.shape) <= 2:
            assert cost == pytest.approx(choice.margin)


@each
def test_rivals_are_those_whose_swap_costs_little(matrix):
    chosen = assigned(matrix)
    partner = {c.reference: c.candidate for c in chosen}
    free = set(range(matrix.shape[1])) - set(partner.values())
    for choice in chosen:
        i, j = choice.reference, choice.candidate
        swaps = {
            other: matrix[i, j] + matrix[k, other] - matrix[i, other] - matrix[k, j]
            for k, other in partner.items()
            if k != i
        }
        moves = {other: matrix[i, j] - matrix[i, other] for other in free}
        close = {other for other, cost in {**swaps, **moves}.items() if cost < CLOSE}
        assert set(choice.rivals) <= close
        assert bool(choice.rivals) == bool(close)


def test_one_against_one_has_no_other_way():
    (choice,) = assigned([[1.0]])
    assert choice.margin == math.inf
    assert choice.rivals == ()


def test_nothing_is_paired_with_nothing():
    assert assign(Both([], items(2)), None) == assign(Both(items(2), []), None) == []


def test_equal_scores_have_no_margin_and_little_confidence():
    chosen = assigned(np.zeros((2, 2)))
    assert [c.margin for c in chosen] == [0.0, 0.0]
    assert [c.confidence for c in chosen] == [0.5, 0.5]


def test_confidence_grows_with_the_margin_and_stays_below_one():
    found = [Choice(0, 0, margin, (), 0.0, ()).confidence for margin in (0.0, 0.5, 1.0, 2.0, 5.0, math.inf)]
    assert found == sorted(found)
    assert len(set(found)) == len(found)
    assert found[0] == 0.5 and found[-1] < 1


@pytest.mark.parametrize("sizes", [(30, 30), (30, 26), (26, 30)])
def test_large_groups_are_solved_in_pieces_that_give_the_same(sizes, monkeypatch):
    """Where order decides, cutting along it loses nothing."""
    apart = np.abs(np.arange(sizes[0])[:, None] - np.arange(sizes[1])[None])
    matrix = -apart.astype(float)
    monkeypatch.setattr(unit_pairing, "_PIECE", 7)
    found = {(c.reference, c.candidate) for c in assigned(matrix)}
    assert found == {(k, k) for k in range(min(sizes))}


@pytest.mark.parametrize("shape", [(1, 1), (2, 4), (4, 2), (4, 4), (3, 5)], ids=str)
@pytest.mark.parametrize("clear", [True, False], ids=["a best partner each", "partners wanted by several"])
def test_what_needs_no_solving_is_paired_as_by_all_permutations(shape, clear):
    rng = np.random.default_rng(4)
    for _ in range(50):
        matrix = rng.integers(0, 30, shape).astype(float)
        if clear:
            matrix[np.arange(min(shape)), rng.permutation(min(shape))] += 50.0
        rows, columns = unit_pairing._best(matrix)
        assert rows.tolist() == sorted(set(rows.tolist())) and len(set(columns.tolist())) == len(rows) == min(shape)
        assert matrix[rows, columns].sum() == max(total for _, total in ways(matrix))


@pytest.mark.parametrize("matrix", [[[3, 3, 0], [0, 3, 3]], [[3, 3], [3, 3]], [[1, 2, 2], [2, 2, 1], [2, 1, 2]]])
def test_of_equally_good_partners_the_solver_chooses(matrix):
    matrix = np.asarray(matrix, float)
    expected = [part.tolist() for part in linear_sum_assignment(matrix, maximize=True)]
    assert [part.tolist() for part in unit_pairing._best(matrix)] == expected


@pytest.mark.parametrize("moved", [0, 1], ids=["the same names", "names that differ"])
def test_layers_of_equal_values_stay_at_their_places_among_very_many(moved, monkeypatch):
    """Cut into pieces, one of two that share their values would fall into the other's piece, and shift the rest."""
    values = list(range(40))
    values[33] = values[5]
    sides = Both(
        [Item(path=f"l{k}", defined=k, ran=k, values=frozenset({values[k]})) for k in range(40)],
        [Item(path=f"l{k + moved}", defined=k, ran=k, values=frozenset({values[k]})) for k in range(40)],
    )
    monkeypatch.setattr(unit_pairing, "_PIECE", 7)
    found = [(c.reference, c.candidate) for c in assign(sides, lambda some: scores(some, (), frozenset()))]
    assert found == [(k, k) for k in range(40)]
