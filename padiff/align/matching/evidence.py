"""The evidence for two things answering to each other, weighed together into a matrix of scores."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from padiff.align.matching import names
from padiff.align.matching.parameter_units import Signature
from padiff.model import equivalents
from padiff.records import Both

V = TypeVar("V")
K = TypeVar("K", bound=Hashable)

#: Kinds of evidence; each can be switched off, to see what it is worth.
KINDS_OF_EVIDENCE = ("names", "kinds", "order", "execution", "values", "containers")

# What each is worth. The figures were chosen by the pairs of the benchmark (benchmarks/alignment.py): a role that
# contradicts outweighs any order, running outweighs definition, and words alone never outweigh an order.
_SAME_PATH, _ROLE, _CONTRADICTION, _WORDS = 3.0, 3.0, -8.0, 3.0
_KIND, _RELATED_KIND, _OTHER_KIND = 1.5, 0.5, -2.0
_RAN, _NUMBERED, _DEFINED = 5.0, 3.0, 1.0
_OUTPUT = 0.5
_VALUES, _OTHER_VALUES = 5.0, -1.5
_CONTENTS, _CONTEXT = 4.0, 3.0
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
        tail: what of it is compared: without what it has in common with all of its side.
        defined: position in the order of definition.
        ran: position in the order of execution, `None` if not known.
        kind: the layer's kind; empty if that says nothing (a container).
        bag: signatures of what is inside, for a container.
        output: shape of its first output, as a multiset of extents.
        values: numbers that stand for the values inside, the same on both sides where the values are the same.
        context: what the innermost layer holds that holds more than this.
    """

    path: str
    defined: int
    ran: int | None = None
    kind: str = ""
    bag: Bag | None = None
    output: tuple[int, ...] | None = None
    values: frozenset[int] = frozenset()
    context: Bag = NOTHING
    tail: str = ""

    def __post_init__(self) -> None:
        self.tail = self.tail or self.path


#: Rows and columns of a matrix of scores.
Places = tuple[np.ndarray, np.ndarray]


@dataclass
class Scores:
    """The scores of two groups of items, and what each kind of evidence gave to them."""

    total: np.ndarray
    parts: dict[str, np.ndarray]

    def decided(self, pairs: Places, rivals: Places) -> list[str]:
        """Which evidence speaks most for each pair and a rival against swapping partners; empty if nothing does."""
        (i, j), (k, n) = pairs, rivals
        if not self.parts:
            return [""] * len(i)
        gains = np.array([m[i, j] + m[k, n] - m[i, n] - m[k, j] for m in self.parts.values()])
        names = list(self.parts)
        best = gains.argmax(axis=0)
        some = zip(best.tolist(), np.take_along_axis(gains, best[None], axis=0)[0].tolist())
        return [names[what] if gain > 0 else "" for what, gain in some]

    def reasons(self, pairs: Places) -> list[tuple[str, ...]]:
        """In words, what speaks for each pair and against it."""
        values = [matrix[pairs].tolist() for matrix in self.parts.values()]
        words = [(what, f"but not by {what}") for what in self.parts]
        return [
            tuple([own[value < 0] for own, value in zip(words, each) if abs(value) >= 0.5]) for each in zip(*values)
        ] or [()] * len(pairs[0])


def scores(items: Both[list[Item]], without: Collection[str], linked: names.Linked) -> Scores:
    """How well each of the reference's items and each of the candidate's go together, shapes being equal already.

    Args:
        without: kinds of evidence to leave out.
        linked: words that mean the same in these two models.
    """
    parts: dict[str, np.ndarray] = {}
    if "names" not in without:
        parts["names"] = _by_names(items, linked)
    if "kinds" not in without:
        parts["kind"] = _by_class(_each(items, lambda x: x.kind), _same_kind)
        if items.reference[0].bag is not None:
            bags = _each(items, lambda x: x.bag or NOTHING)
            parts["contents"] = _by_class(bags, lambda a, b: _CONTENTS * _overlap(a, b))
    if "containers" not in without:
        context = _each(items, lambda x: x.context).map(_distinguishing)
        parts["surroundings"] = _by_class(context, lambda a, b: _CONTEXT * _overlap(a, b))
    defined = _each(items, lambda x: x.defined)
    near = _Near()
    if "order" not in without:
        in_names = Both(None, None) if "names" in without else items.map(_order_in_names)
        if any(in_names):
            # Numbers on one side alone are set against the other's order of definition.
            what = "numbers in the names" if all(in_names) else "numbers on one side"
            places = Both(in_names.reference or defined.reference, in_names.candidate or defined.candidate)
            parts[what] = (_NUMBERED if all(in_names) else 2 * _DEFINED) * near.of(places)
        parts["order of definition"] = _DEFINED * near.of(defined)
    if "execution" not in without:
        ran = _ran(items)
        if ran is not None:
            parts["order of execution"] = _RAN * near.of(ran)
        parts["output shape"] = _by_class(_each(items, lambda x: x.output), _same_output)
    if "values" not in without:
        parts["values"] = _by_values(_each(items, lambda x: x.values))
    total = np.zeros((len(items.reference), len(items.candidate)))
    for part in parts.values():
        total += part
    return Scores(total, parts)


def _each(items: Both[list[Item]], of: Callable[[Item], V]) -> Both[list[V]]:
    return items.map(lambda side: [of(item) for item in side])


def _ran(items: Both[list[Item]]) -> Both[list[int]] | None:
    """The order of execution; `None` where it is not known of all."""
    ran = items.map(lambda side: [item.ran for item in side if item.ran is not None])
    return ran if ran.map(len) == items.map(len) else None


def _by_names(items: Both[list[Item]], linked: names.Linked) -> np.ndarray:
    keys = _each(items, lambda x: names.read(x.path, x.tail)).map(_names)
    matrix = _by_class(keys, lambda a, b: _same_names(a, b, linked)).copy()
    place = {item.tail: j for j, item in enumerate(items.candidate)}
    for i, item in enumerate(items.reference):
        if item.tail in place:
            matrix[i, place[item.tail]] += _SAME_PATH
    return matrix


def _names(side: Sequence[names.Name]) -> list[names.NameKey]:
    """What is compared of the names of one side."""
    # Numbers are no matter here, so that a thousand blocks are read as one.
    # Words that all of a side have in common tell nothing apart.
    common = frozenset.intersection(*(name.words for name in side)) if len(side) > 1 else frozenset()
    return [(name.roles, name.words - common or name.words) for name in side]


def _same_names(reference: names.NameKey, candidate: names.NameKey, linked: names.Linked) -> float:
    agree, contradict, common = names.agreement(reference, candidate, linked)
    if contradict:
        return _CONTRADICTION
    return _ROLE * min(agree, 2) + _WORDS * common


def _same_kind(reference: str, candidate: str) -> float:
    if not reference or not candidate:
        return 0.0
    if reference == candidate:
        return _KIND
    group = equivalents.group_of_kinds(reference), equivalents.group_of_kinds(candidate)
    if group[0] and group[1]:
        return _RELATED_KIND if group[0] == group[1] else _OTHER_KIND
    return 0.0


def _same_output(reference: tuple[int, ...] | None, candidate: tuple[int, ...] | None) -> float:
    if reference is None or candidate is None:
        return 0.0
    return _OUTPUT if reference == candidate else -_OUTPUT


def _distinguishing(bags: Sequence[Bag]) -> list[Bag]:
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


def _overlap(reference: Bag, candidate: Bag) -> float:
    """The share of signatures that two layers have in common, 0 to 1."""
    counts = dict(candidate[0])
    shared = sum(min(count, counts.get(signature, 0)) for signature, count in reference[0])
    return 2 * shared / max(reference[1] + candidate[1], 1)


def _by_values(values: Both[list[frozenset[int]]]) -> np.ndarray:
    """By the share of values that two have in common; 0 where either has none."""
    # Most have none in common, and of a thousand layers no million pairs is to be looked at for that.
    having: dict[int, list[int]] = {}
    for j, own in enumerate(values.candidate):
        for value in own:
            having.setdefault(value, []).append(j)
    there = values.map(lambda side: np.array([bool(own) for own in side]))
    matrix = np.where(there.reference[:, None] & there.candidate[None], _OTHER_VALUES, 0.0)
    for i, own in enumerate(values.reference):
        for j, common in Counter(j for value in own for j in having.get(value, ())).items():
            matrix[i, j] = _VALUES * (common / max(len(own), len(values.candidate[j])))
    return np.asarray(matrix)


def line_up(items: Both[list[Item]]) -> Both[list[int]]:
    """Two large groups, each in the order that the strongest evidence gives: values, names, execution, definition.

    Where both sides have the same names in the same order, and run in the same order, nothing else is asked: values
    that several layers share would put one of them elsewhere, and shift all that lies between.
    """
    sizes, tails = items.map(len), _each(items, lambda x: x.tail)
    places = _ran(items)
    if tails.reference == tails.candidate and (places is None or places.reference == places.candidate):
        return sizes.map(lambda size: list(range(size)))
    keys: list[Both[list[Any]]] = [
        _each(items, lambda x: next(iter(x.values)) if len(x.values) == 1 else None),
        tails,
    ]
    for key in keys:
        found = _found_places(key)
        if sum(where is not None for where in found) >= _MOST * max(sizes):
            last = float(sizes.reference)
            order = sorted(range(sizes.candidate), key=lambda k: _or(found[k], last))
            return Both(list(range(sizes.reference)), order)
    in_names = items.map(_order_in_names)
    if places is None and in_names.reference is not None and in_names.candidate is not None:
        places = Both(in_names.reference, in_names.candidate)
    return (places or _each(items, lambda x: x.defined)).map(_sorted)


def _found_places(keys: Both[list[Any]]) -> list[int | None]:
    """Where each of the candidate's keys stands in the reference: of equal ones the first at the first, and so on."""
    places: dict[Any, deque[int]] = {}
    for place, key in enumerate(keys.reference):
        if key is not None:
            places.setdefault(key, deque()).append(place)
    waiting = (places.get(key) for key in keys.candidate)
    return [left.popleft() if left else None for left in waiting]


def _or(place: int | None, last: float) -> float:
    return last if place is None else place


def _sorted(places: Sequence[int]) -> list[int]:
    order: list[int] = np.argsort(np.asarray(places), kind="stable").tolist()
    return order


def _order_in_names(side: Sequence[Item]) -> list[int] | None:
    """The places that the names tell: those of definition, with names that differ by numbers alone in their order.

    `None` where no two names do.
    """
    read = [names.read(x.path, x.tail) for x in side]
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
    places = dict(place)
    for group in alike.values():
        for k, where in zip(sorted(group, key=lambda k: keys[k]), sorted(place[k] for k in group)):
            places[k] = where
    return [places[k] for k in range(len(side))]


class _Near:
    """How near things are in two orders: 1 for those at the same place, less the farther apart; counted from the nearer
    end. Orders are mostly the same, whatever they are orders of.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes], np.ndarray] = {}

    def of(self, places: Both[list[int]]) -> np.ndarray:
        """As a matrix."""
        ranks = places.map(lambda side: np.argsort(np.argsort(np.asarray(side), kind="stable"), kind="stable"))
        key = ranks.reference.tobytes(), ranks.candidate.tobytes()
        if key not in self._known:
            self._known[key] = _near(ranks)
        return self._known[key]


def _near(ranks: Both[np.ndarray]) -> np.ndarray:
    ahead = np.abs(ranks.reference[:, None] - ranks.candidate[None])
    if ranks.reference.size == ranks.candidate.size:
        return np.asarray(1.0 / (1.0 + ahead))
    from_end = ranks.map(lambda side: side.size - side)
    behind = np.abs(from_end.reference[:, None] - from_end.candidate[None])
    # Where one has more, what is left over is rather at the end.
    return np.asarray(np.maximum(1.0 / (1.0 + ahead), 0.9 / (1.0 + behind)))


def _by_class(keys: Both[list[K]], alike: Callable[[K, K], float]) -> np.ndarray:
    """A matrix of a function of two keys, worked out once for each pair of distinct keys. Not to be changed."""
    distinct = keys.map(lambda side: {key: k for k, key in enumerate(dict.fromkeys(side))})
    table = np.array([[alike(a, b) for b in distinct.candidate] for a in distinct.reference], dtype=float)
    if table.size == 1:
        return np.broadcast_to(table, tuple(keys.map(len)))
    where = [np.array([place[key] for key in side]) for side, place in zip(keys, distinct)]
    return np.asarray(table[np.ix_(*where)])
