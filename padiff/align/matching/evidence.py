"""Evidence that two items correspond to each other, weighted and summed into a matrix of scores."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from padiff.align.matching import names
from padiff.align.matching.parameter_units import LayerNode, Signature, Unit, grouped, multiplies
from padiff.align.slices import RuntimeEvidence
from padiff.model import equivalents
from padiff.records import Both

V = TypeVar("V")
K = TypeVar("K", bound=Hashable)

#: Kinds of evidence; each can be switched off to measure its value.
KINDS_OF_EVIDENCE = ("names", "kinds", "order", "execution", "values", "containers")

# Weights of the evidence, chosen by the pairs of the benchmark (benchmarks/alignment.py): a contradiction of roles
# outweighs any order, the order of execution outweighs that of definition, and words alone never outweigh an order.
_SAME_PATH, _ROLE, _CONTRADICTION, _WORDS = 3.0, 3.0, -8.0, 3.0
_KIND, _RELATED_KIND, _OTHER_KIND = 1.5, 0.5, -2.0
_RAN, _NUMBERED, _DEFINED = 5.0, 3.0, 1.0
_OUTPUT = 0.5
_VALUES, _OTHER_VALUES = 5.0, -1.5
_CONTENTS, _CONTEXT = 4.0, 3.0
_TRAINED = 4.0
# Share of two large groups that has to have the same names, or the same values, for these to determine the order.
_MOST = 0.8


#: Signatures with their counts, and the total count.
Bag = tuple[frozenset[tuple[Signature, int]], int]
NOTHING: Bag = (frozenset(), 0)


@dataclass(eq=False)
class Item:
    """An item to pair: a unit, several units that are parts of one, or a container.

    Attributes:
        path: full path, from which the roles are read.
        tail: part of the path that is compared: without the prefix that all items of the side share.
        multiplies: True for a lone parameter that multiplies, False for one that is added; `None` if not known.
        defined: position in the order of definition.
        ran: position in the order of execution, `None` if not known.
        kind: the layer's kind; empty if the kind is no evidence (a container).
        bag: signatures of a container's contents.
        output: shape of the first output, as a multiset of extents.
        values: numbers that represent the values inside; equal values have the same number on both sides.
        context: contents of the innermost enclosing layer that contains more than this item.
        trained: True for an item with parameters that an optimizer changes; `None` if not known.
    """

    path: str
    defined: int
    ran: int | None = None
    kind: str = ""
    bag: Bag | None = None
    output: tuple[int, ...] | None = None
    values: frozenset[int] = frozenset()
    context: Bag = NOTHING
    trained: bool | None = None
    tail: str = ""
    multiplies: bool | None = None

    def __post_init__(self) -> None:
        self.tail = self.tail or self.path


#: Rows and columns of a matrix of scores.
Places = tuple[np.ndarray, np.ndarray]


@dataclass
class Scores:
    """Scores of two groups of items, and the contribution of each kind of evidence."""

    total: np.ndarray
    parts: dict[str, np.ndarray]

    def decided(self, pairs: Places, rivals: Places) -> list[str]:
        """Return the strongest evidence for each pair against a swap of partners with its rival; empty if there is
        none.
        """
        (i, j), (k, n) = pairs, rivals
        if not self.parts:
            return [""] * len(i)
        gains = np.array([m[i, j] + m[k, n] - m[i, n] - m[k, j] for m in self.parts.values()])
        names = list(self.parts)
        best = gains.argmax(axis=0)
        strongest = zip(best.tolist(), np.take_along_axis(gains, best[None], axis=0)[0].tolist())
        return [names[what] if gain > 0 else "" for what, gain in strongest]

    def reasons(self, pairs: Places) -> list[tuple[str, ...]]:
        """Return the evidence for and against each pair, in words."""
        values = [matrix[pairs].tolist() for matrix in self.parts.values()]
        words = [(what, f"but not by {what}") for what in self.parts]
        return [
            tuple([phrases[value < 0] for phrases, value in zip(words, each) if abs(value) >= 0.5])
            for each in zip(*values)
        ] or [()] * len(pairs[0])


def scores(items: Both[list[Item]], without: Collection[str], linked: names.Linked) -> Scores:
    """Return the scores of each of the reference's items with each of the candidate's; their shapes are equal.

    Args:
        without: kinds of evidence to ignore.
        linked: words that mean the same in these two models.
    """
    parts: dict[str, np.ndarray] = {}
    if "names" not in without:
        parts["names"] = _by_names(items, linked)
        factors = _each(items, lambda x: x.multiplies)
        if all({True, False} & set(side) for side in factors):
            parts["what it does"] = _by_class(factors, lambda a, b: 0.0 if None in (a, b) or a is b else _CONTRADICTION)
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
            # Numbers on one side only are compared with the other side's order of definition.
            what = "numbers in the names" if all(in_names) else "numbers on one side"
            places = Both(in_names.reference or defined.reference, in_names.candidate or defined.candidate)
            parts[what] = (_NUMBERED if all(in_names) else 2 * _DEFINED) * near.matrix(places)
        parts["order of definition"] = _DEFINED * near.matrix(defined)
    if "execution" not in without:
        ran = _ran(items)
        if ran is not None:
            parts["order of execution"] = _RAN * near.matrix(ran)
        parts["output shape"] = _by_class(_each(items, lambda x: x.output), _same_output)
    trained = _each(items, lambda x: x.trained)
    counts = trained.map(Counter)
    # A single layer that one run freezes is no sign of another layer.
    is_sign = items.reference[0].bag is not None or counts.reference == counts.candidate
    if is_sign and all({True, False} <= set(side) for side in trained):
        # Of a model and its copy (an average, a target network), an optimizer trains one.
        parts["training"] = _by_class(
            trained, lambda a, b: 0.0 if None in (a, b) else _TRAINED if a is b else -_TRAINED
        )
    if "values" not in without:
        parts["values"] = _by_values(_each(items, lambda x: x.values))
    total = np.zeros((len(items.reference), len(items.candidate)))
    for part in parts.values():
        total += part
    return Scores(total, parts)


def _each(items: Both[list[Item]], of: Callable[[Item], V]) -> Both[list[V]]:
    return items.map(lambda side: [of(item) for item in side])


def _ran(items: Both[list[Item]]) -> Both[list[int]] | None:
    """Return the order of execution; `None` unless it is known for all items."""
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
    """Return the comparable parts of one side's names."""
    # Without numbers, so that a thousand equal blocks have one key. Words that all names of a side share distinguish
    # nothing.
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
    """Return the contexts without the contents that all of them share."""
    distinct = set(bags)
    if len(distinct) < 2:
        return list(bags)
    common = dict(bags[0][0])
    for bag in distinct:
        counts = dict(bag[0])
        common = {signature: min(n, counts[signature]) for signature, n in common.items() if signature in counts}
    reduced = {}
    for bag in distinct:
        difference = {signature: n - common.get(signature, 0) for signature, n in bag[0]}
        reduced[bag] = frozenset((signature, n) for signature, n in difference.items() if n), sum(difference.values())
    return [reduced[bag] for bag in bags]


def _overlap(reference: Bag, candidate: Bag) -> float:
    """Return the share of signatures that two layers have in common, 0 to 1."""
    counts = dict(candidate[0])
    shared = sum(min(count, counts.get(signature, 0)) for signature, count in reference[0])
    return 2 * shared / max(reference[1] + candidate[1], 1)


def _by_values(values: Both[list[frozenset[int]]]) -> np.ndarray:
    """Return scores by the share of values that two items have in common.

    The score is negative if the items have no common values, and 0 if the values of either are unknown.
    """
    # Most items have no values in common: the index avoids a million lookups for a thousand layers.
    having: dict[int, list[int]] = {}
    for j, numbers in enumerate(values.candidate):
        for value in numbers:
            having.setdefault(value, []).append(j)
    present = values.map(lambda side: np.array([bool(numbers) for numbers in side]))
    matrix = np.where(present.reference[:, None] & present.candidate[None], _OTHER_VALUES, 0.0)
    for i, numbers in enumerate(values.reference):
        for j, common in Counter(j for value in numbers for j in having.get(value, ())).items():
            matrix[i, j] = _VALUES * (common / max(len(numbers), len(values.candidate[j])))
    return np.asarray(matrix)


def line_up(items: Both[list[Item]]) -> Both[list[int]]:
    """Return the order of two large groups by the strongest evidence: values, names, execution, definition.

    If both sides have the same names in the same order, and run in the same order, this order stays: values that
    several layers share would move one of them, and shift all items in between.
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
        positions = _found_places(key)
        if sum(where is not None for where in positions) >= _MOST * max(sizes):
            last = float(sizes.reference)
            order = sorted(range(sizes.candidate), key=lambda k: _or(positions[k], last))
            return Both(list(range(sizes.reference)), order)
    in_names = items.map(_order_in_names)
    if places is None and in_names.reference is not None and in_names.candidate is not None:
        places = Both(in_names.reference, in_names.candidate)
    return (places or _each(items, lambda x: x.defined)).map(_sorted)


def _found_places(keys: Both[list[Any]]) -> list[int | None]:
    """Return the index in the reference of each of the candidate's keys, or `None`; equal keys correspond in order."""
    places: dict[Any, deque[int]] = {}
    for place, key in enumerate(keys.reference):
        if key is not None:
            places.setdefault(key, deque()).append(place)
    waiting = (places.get(key) for key in keys.candidate)
    return [queue.popleft() if queue else None for queue in waiting]


def _or(place: int | None, last: float) -> float:
    return last if place is None else place


def _sorted(places: Sequence[int]) -> list[int]:
    order: list[int] = np.argsort(np.asarray(places), kind="stable").tolist()
    return order


def _order_in_names(side: Sequence[Item]) -> list[int] | None:
    """Return positions from the names: those of definition, with names that differ only in numbers ordered by the
    numbers.

    `None` if no two names differ only in numbers.
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
    """Cache of closeness scores for pairs of orders. Different kinds of evidence mostly yield the same orders."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bytes], np.ndarray] = {}

    def matrix(self, places: Both[list[int]]) -> np.ndarray:
        """Return a matrix of closeness: 1 for equal positions, less with distance, counted from the nearer end."""
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
    # If one side has more items, the surplus is more likely at the end.
    return np.asarray(np.maximum(1.0 / (1.0 + ahead), 0.9 / (1.0 + behind)))


def _by_class(keys: Both[list[K]], alike: Callable[[K, K], float]) -> np.ndarray:
    """Return a matrix of `alike` of two keys, computed once per pair of distinct keys. Do not modify the matrix."""
    distinct = keys.map(lambda side: {key: k for k, key in enumerate(dict.fromkeys(side))})
    table = np.array([[alike(a, b) for b in distinct.candidate] for a in distinct.reference], dtype=float)
    if table.size == 1:
        return np.broadcast_to(table, tuple(keys.map(len)))
    where = [np.array([place[key] for key in side]) for side, place in zip(keys, distinct)]
    return np.asarray(table[np.ix_(*where)])


@dataclass
class ModelEvidence:
    """Evidence about one model's units and containers."""

    units: Sequence[Unit]
    seen: RuntimeEvidence
    #: Numbers that represent the units' values, if both sides start from the same values.
    values: Mapping[Unit, int] = field(default_factory=dict)
    #: All containers, by path.
    nodes: Mapping[str, LayerNode] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._twins = grouped(self.units, lambda u: u.parameters["weight"].tied_to if "weight" in u.parameters else "")
        #: Layers whose parameters others use, too: an optimizer changes these under one of their paths.
        self._homes = {p.tied_to.rpartition("/")[0] for u in self.units for p in u.parameters.values()}

    def item(self, unit: Unit) -> Item:
        """Return the item of a unit."""
        is_trained = unit.path in self.seen.trained
        return Item(
            path=unit.name,
            defined=unit.defined,
            ran=self.seen.order.get(unit.path),
            kind=unit.kind,
            multiplies=multiplies(unit),
            output=_extents(self.seen.outputs.get(unit.path)),
            values=frozenset({self.values[unit]}) if unit in self.values else frozenset(),
            context=self._context(unit.path, 1),
            trained=None if unit.tied or unit.path in self._homes or not self.seen.trained else is_trained,
        )

    def container(self, node: LayerNode) -> Item:
        """Return the item of a container."""
        ran = [self.seen.order[u.path] for u in node.below() if u.path in self.seen.order]
        return Item(
            path=node.path,
            defined=node.first,
            ran=min(ran, default=None),
            bag=node.frozen,
            output=_extents(self.seen.outputs.get(node.path)),
            values=frozenset(self.values[unit] for unit in node.below() if unit in self.values),
            context=self._context(node.path, node.frozen[1]),
            trained=any(u.path in self.seen.trained for u in node.below()) if self.seen.trained else None,
        )

    def _context(self, path: str, count: int) -> Bag:
        """Return the contents of the innermost layer at or above a path that contains more than `own` units."""
        node = self.nodes.get(path)
        while node is not None and node.frozen[1] <= count:
            node = node.parent
        return node.frozen if node is not None else NOTHING

    def twin(self, unit: Unit, kind: str) -> Unit:
        """Return the unit, or the unit of this kind that is tied to it: a head and its embedding are one matrix."""
        if unit.kind == kind:
            return unit
        weight = unit.parameters.get("weight")
        tied = self._twins.get(f"{unit.path}/{weight.slot}", ()) if weight is not None else ()
        return next((u for u in tied if u.kind == kind), unit)


def _extents(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if shape is None else tuple(sorted(shape))
