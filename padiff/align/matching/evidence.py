"""The evidence for two things answering to each other, weighed together into a matrix of scores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from padiff.align.matching import names
from padiff.align.matching.units import Signature
from padiff.model import equivalents

#: Kinds of evidence; each can be switched off, to see what it is worth.
KINDS_OF_EVIDENCE = ("names", "kinds", "order", "execution", "values", "containers")

# What each is worth. The figures were chosen by the pairs of the benchmark (benchmarks/alignment.py): a role that
# contradicts outweighs any order, running outweighs definition, and words alone never outweigh an order.
_SAME_PATH, _ROLE, _CONTRADICTION, _WORDS = 3.0, 3.0, -8.0, 3.0
_KIND, _RELATED_KIND, _OTHER_KIND = 1.5, 0.5, -2.0
_RAN, _NUMBERED, _DEFINED = 5.0, 3.0, 1.0
_OUTPUT = 0.5
_VALUES, _OTHER_VALUES = 5.0, -1.5
_CONTENTS, _AROUND = 4.0, 3.0
# So much of two large groups has to have the same name, or the same values, for that to line them up.
_MOST = 0.8


#: Signatures with their counts, and the number of all.
Bag = tuple[frozenset[tuple[Signature, int]], int]
NOTHING: Bag = (frozenset(), 0)


@dataclass(eq=False)
class Item:
    """Something that is to be paired: a unit, several units that are parts of one, or a container.

    Attributes:
        path: its full path, as names are read from it.
        defined: position in the order of definition.
        ran: position in the order of execution, `None` if not known.
        kind: the layer's kind; empty if that says nothing (a container).
        bag: signatures of what is inside, for a container.
        output: shape of its first output, as a multiset of extents.
        values: numbers that stand for the values inside, the same on both sides where the values are the same.
        around: what the innermost layer holds that holds more than this.
    """

    path: str
    defined: int
    ran: int | None = None
    kind: str = ""
    bag: Bag | None = None
    output: tuple[int, ...] | None = None
    values: frozenset[int] = frozenset()
    around: Bag = NOTHING


@dataclass
class Scores:
    """The scores of two groups of items, and what each kind of evidence gave to them."""

    total: np.ndarray
    parts: dict[str, np.ndarray]

    def decided(self, pair: tuple[int, int], rival: tuple[int, int]) -> str:
        """Which evidence speaks most for two pairs against swapping their partners; empty if nothing does."""
        (i, j), (k, n) = pair, rival
        gains = {what: float(m[i, j] + m[k, n] - m[i, n] - m[k, j]) for what, m in self.parts.items()}
        best = max(gains, key=lambda what: gains[what], default="")
        return best if best and gains[best] > 0 else ""

    def reasons(self, i: int, j: int) -> tuple[str, ...]:
        """In words, what speaks for a pair and against it."""
        words = []
        for what, matrix in self.parts.items():
            value = float(matrix[i, j])
            if abs(value) >= 0.5:
                words.append(what if value > 0 else f"but not by {what}")
        return tuple(words)


def scores(
    ours: Sequence[Item],
    theirs: Sequence[Item],
    inner: tuple[str, str] = ("", ""),
    without: Collection[str] = (),
    linked: names.Linked = frozenset(),
) -> Scores:
    """How well each of ours and each of theirs go together, shapes being equal already.

    Args:
        inner: prefix (with its dot) of each side that the paths have in common; the words after it count.
        without: kinds of evidence to leave out.
        linked: words that mean the same in these two models.
    """
    parts: dict[str, np.ndarray] = {}
    if "names" not in without:
        parts["names"] = _by_names(ours, theirs, inner, linked)
    if "kinds" not in without:
        parts["kind"] = _by_class([item.kind for item in ours], [item.kind for item in theirs], _same_kind)
        if ours[0].bag is not None:
            bags = [[x.bag or NOTHING for x in side] for side in (ours, theirs)]
            parts["contents"] = _CONTENTS * _by_class(bags[0], bags[1], _overlap)
    if "containers" not in without:
        around = [_telling([x.around for x in side]) for side in (ours, theirs)]
        parts["surroundings"] = _AROUND * _by_class(around[0], around[1], _overlap)
    if "order" not in without:
        told = [None, None] if "names" in without else [_told_order(x, p) for x, p in zip((ours, theirs), inner)]
        if any(told):
            sides = [t or [x.defined for x in side] for t, side in zip(told, (ours, theirs))]
            # Numbers on one side alone are set against the other's order of definition.
            what = "numbers in the names" if all(told) else "numbers on one side"
            parts[what] = (_NUMBERED if all(told) else 2 * _DEFINED) * _near(sides[0], sides[1])
        parts["order of definition"] = _DEFINED * _near([x.defined for x in ours], [x.defined for x in theirs])
    ran = [[x.ran for x in side] for side in (ours, theirs)]
    if "execution" not in without:
        if all(r is not None for side in ran for r in side):
            parts["order of execution"] = _RAN * _near(*ran)  # type: ignore[arg-type]
        parts["output shape"] = _by_class([x.output for x in ours], [x.output for x in theirs], _same_output)
    if "values" not in without:
        parts["values"] = _by_values(ours, theirs)
    total = sum(parts.values(), np.zeros((len(ours), len(theirs))))
    return Scores(total, parts)


def _by_names(ours: Sequence[Item], theirs: Sequence[Item], inner: tuple[str, str], linked: names.Linked) -> np.ndarray:
    read = [[names.read(x.path, x.path[len(p) :]) for x in side] for side, p in zip((ours, theirs), inner)]
    # Numbers are no matter here, so that a thousand blocks are read as one.
    # Words that all of a side have in common tell nothing apart.
    common = [frozenset.intersection(*(name.words for name in side)) if len(side) > 1 else frozenset() for side in read]
    keys = [[(name.roles, name.words - c or name.words) for name in side] for side, c in zip(read, common)]
    matrix = _by_class(keys[0], keys[1], lambda a, b: _same_names(a, b, linked))
    tails = [[x.path[len(p) :] for x in side] for side, p in zip((ours, theirs), inner)]
    place = {tail: j for j, tail in enumerate(tails[1])}
    for i, tail in enumerate(tails[0]):
        if tail in place:
            matrix[i, place[tail]] += _SAME_PATH
    return matrix


def _same_names(ours: names.Said, theirs: names.Said, linked: names.Linked) -> float:
    agree, contradict, common = names.agreement(ours, theirs, linked)
    if contradict:
        return _CONTRADICTION
    return _ROLE * min(agree, 2) + _WORDS * common


def _same_kind(ours: str, theirs: str) -> float:
    if not ours or not theirs:
        return 0.0
    if ours == theirs:
        return _KIND
    group = equivalents.group_of_kinds(ours), equivalents.group_of_kinds(theirs)
    if group[0] and group[1]:
        return _RELATED_KIND if group[0] == group[1] else _OTHER_KIND
    return 0.0


def _same_output(ours: tuple[int, ...] | None, theirs: tuple[int, ...] | None) -> float:
    if ours is None or theirs is None:
        return 0.0
    return _OUTPUT if ours == theirs else -_OUTPUT


def _telling(bags: Sequence[Bag]) -> list[Bag]:
    """What is around some, without what is around all of them."""
    distinct = set(bags)
    if len(distinct) < 2:
        return list(bags)
    common = dict(bags[0][0])
    for bag in distinct:
        counts = dict(bag[0])
        common = {signature: min(n, counts[signature]) for signature, n in common.items() if signature in counts}
    left = {}
    for bag in distinct:
        rest = {signature: n - common.get(signature, 0) for signature, n in bag[0]}
        left[bag] = frozenset((signature, n) for signature, n in rest.items() if n), sum(rest.values())
    return [left[bag] for bag in bags]


def _overlap(ours: Bag, theirs: Bag) -> float:
    """The share of signatures that two layers have in common, 0 to 1."""
    mine, other = dict(ours[0]), dict(theirs[0])
    shared = sum(min(count, other.get(signature, 0)) for signature, count in mine.items())
    return 2 * shared / max(ours[1] + theirs[1], 1)


def _by_values(ours: Sequence[Item], theirs: Sequence[Item]) -> np.ndarray:
    def shared(a: frozenset[int], b: frozenset[int]) -> float:
        if not a or not b:
            return 0.0
        share = len(a & b) / max(len(a), len(b))
        return _VALUES * share if share else _OTHER_VALUES

    return _by_class([x.values for x in ours], [x.values for x in theirs], shared)


def line_up(ours: Sequence[Item], theirs: Sequence[Item], inner: tuple[str, str]) -> tuple[list[int], list[int]]:
    """Two large groups, each in the order that the strongest evidence gives: values, names, execution, definition."""
    keys: list[list[list[Hashable]]] = [
        [[next(iter(x.values)) if len(x.values) == 1 else None for x in side] for side in (ours, theirs)],
        [[x.path[len(p) :] for x in side] for side, p in zip((ours, theirs), inner)],
    ]
    for mine, other in keys:
        place = {key: k for k, key in enumerate(mine) if key is not None}
        found = [place.get(key) for key in other]
        if sum(where is not None for where in found) >= _MOST * max(len(ours), len(theirs)):
            last = float(len(mine))
            return list(range(len(ours))), sorted(range(len(theirs)), key=lambda k: _or(found[k], last))
    ran = [[x.ran for x in side] for side in (ours, theirs)]
    told = [_told_order(side, prefix) for side, prefix in zip((ours, theirs), inner)]
    places: list[list[int]] = [[x.defined for x in side] for side in (ours, theirs)]
    if all(place is not None for side in ran for place in side):
        places = ran  # type: ignore[assignment]
    elif told[0] is not None and told[1] is not None:
        places = [told[0], told[1]]
    return _sorted(places[0]), _sorted(places[1])


def _or(place: int | None, last: float) -> float:
    return last if place is None else place


def _sorted(places: Sequence[int]) -> list[int]:
    order: list[int] = np.argsort(np.asarray(places), kind="stable").tolist()
    return order


def _told_order(side: Sequence[Item], prefix: str) -> list[int] | None:
    """The places that the names tell: those of definition, with names that differ by numbers alone in their order.

    `None` where no two names do.
    """
    read = [names.read(x.path, x.path[len(prefix) :]) for x in side]
    if len(read) < 2:
        return None
    if all(name.norm for name in read):
        keys = [(*name.numbers, name.norm) for name in read]
        alike = {"": list(range(len(side)))}
    else:
        keys = [name.numbers for name in read]
        alike = {}
        for k, name in enumerate(read):
            alike.setdefault(name.skeleton, []).append(k)
    if len(set(zip(keys, (name.skeleton for name in read)))) < len(keys) or max(map(len, alike.values())) < 2:
        return None
    place = {k: rank for rank, k in enumerate(sorted(range(len(side)), key=lambda k: side[k].defined))}
    told = dict(place)
    for group in alike.values():
        for k, where in zip(sorted(group, key=lambda k: keys[k]), sorted(place[k] for k in group)):
            told[k] = where
    return [told[k] for k in range(len(side))]


def _near(ours: Sequence[int], theirs: Sequence[int]) -> np.ndarray:
    """1 for things at the same place in two orders, less the farther apart; counted from the nearer end."""
    ranks = [np.argsort(np.argsort(np.asarray(side), kind="stable"), kind="stable") for side in (ours, theirs)]
    ahead = np.abs(ranks[0][:, None] - ranks[1][None])
    if len(ours) == len(theirs):
        return np.asarray(1.0 / (1.0 + ahead))
    behind = np.abs((len(ours) - ranks[0])[:, None] - (len(theirs) - ranks[1])[None])
    # Where one has more, what is left over is rather at the end.
    return np.asarray(np.maximum(1.0 / (1.0 + ahead), 0.9 / (1.0 + behind)))


K = TypeVar("K", bound=Hashable)


def _by_class(ours: Sequence[K], theirs: Sequence[K], alike: Callable[[K, K], float]) -> np.ndarray:
    """A matrix of a function of two keys, worked out once for each pair of distinct keys."""
    distinct = [list(dict.fromkeys(side)) for side in (ours, theirs)]
    table = np.array([[alike(a, b) for b in distinct[1]] for a in distinct[0]], dtype=float)
    where = [{key: k for k, key in enumerate(keys)} for keys in distinct]
    rows = np.array([where[0][key] for key in ours])
    columns = np.array([where[1][key] for key in theirs])
    return np.asarray(table[np.ix_(rows, columns)])
