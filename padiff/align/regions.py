"""Pairing the units of two trees, region by region: containers of the same size first, then what is inside of them.

A region is what is inside of two containers that answer to each other (at first, the whole models). In it, the largest
containers are looked at first. Where both sides have containers with the same number of elements, the best assignment
among them is taken and each pair becomes a region of its own; a container without its like is opened, so that another
nesting is seen through. What then lies open is paired by shape. So the cost grows with the number of layers, not with
its square, and a layer of one block can't be taken for one of another.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from padiff import equivalents
from padiff.align import names
from padiff.align.evidence import Item, Scores, fingerprint, fingerprints_equal, scores
from padiff.align.forest import Node, common_prefix, opened
from padiff.align.found import Seen
from padiff.align.fused import Bundle, bundles, cells_beside
from padiff.align.solve import CLOSE, TOO_CLOSE, Choice, assign
from padiff.align.units import Signature, Unit, bare

# Containers of one size are only taken for each other where at least so much of what they hold fits.
_ENOUGH = 0.5


@dataclass(frozen=True)
class Match:
    """Units that answer to each other: one to one, or one to the several that are its parts, in their order."""

    ours: tuple[Unit, ...]
    theirs: tuple[Unit, ...]
    confidence: float
    reason: str
    evidence: tuple[str, ...] = ()
    rivals: tuple[Unit, ...] = ()
    #: The shapes differ; paired by kind, so that the difference is shown at its place.
    unlike: bool = False
    #: Input's and state's matrix of a recurrent cell, against gates that have the two beside each other.
    beside: bool = False


@dataclass
class Side:
    """What is known of one model's units."""

    units: Sequence[Unit]
    seen: Seen
    _place: dict[Unit, int] = field(default_factory=dict)
    _prints: dict[Unit, tuple[float, ...] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._place = {unit: k for k, unit in enumerate(self.units)}

    def item(self, unit: Unit) -> Item:
        """A unit, ready to be paired."""
        place = self._place[unit]
        around = [self.units[k].signature if 0 <= k < len(self.units) else None for k in (place - 1, place + 1)]
        return Item(
            path=unit.name,
            defined=unit.defined,
            ran=self.seen.order.get(unit.path),
            kind=unit.kind,
            neighbours=(around[0], around[1]),
            output=_extents(self.seen.outputs.get(unit.path)),
            fingerprint=self.print_of(unit),
        )

    def container(self, node: Node) -> Item:
        """A container, ready to be paired."""
        ran = [self.seen.order[u.path] for u in node.below() if u.path in self.seen.order]
        return Item(
            path=node.path,
            defined=node.first,
            ran=min(ran, default=None),
            bag=node.bag,
            output=_extents(self.seen.outputs.get(node.path)),
        )

    def print_of(self, unit: Unit) -> tuple[float, ...] | None:
        """The fingerprint of a unit's weight."""
        if self.seen.values is None:
            return None
        if unit not in self._prints:
            weight = unit.parameters.get("weight")
            self._prints[unit] = fingerprint(self.seen.values(unit.path, weight.slot)) if weight else None
        return self._prints[unit]


class Regions:
    """Pairs the units of two models."""

    def __init__(self, ours: Side, theirs: Side, without: Collection[str] = ()) -> None:
        self._sides = (ours, theirs)
        self._without = without
        self._equal_start = "values" not in without and _equal_start(ours, theirs)
        self.matches: list[Match] = []

    def run(
        self,
        ours: Sequence[Node],
        theirs: Sequence[Node],
        own: tuple[Sequence[Unit], Sequence[Unit]] = ((), ()),
    ) -> tuple[list[Unit], list[Unit]]:
        """Pair all that is in two forests, and units that lie open beside them; what is left over."""
        return self._loosely(*self._region(ours, theirs, own))

    def _region(
        self,
        ours: Sequence[Node],
        theirs: Sequence[Node],
        own: tuple[Sequence[Unit], Sequence[Unit]] = ((), ()),
    ) -> tuple[list[Unit], list[Unit]]:
        """Pair what is in two forests, and units that lie open beside them."""
        pools = list(own[0]), list(own[1])
        if "containers" in self._without:
            for pool, nodes in zip(pools, (ours, theirs)):
                pool.extend(unit for node in nodes for unit in node.below())
            return self._pool(*pools)
        waiting: tuple[dict[int, list[Node]], dict[int, list[Node]]] = (defaultdict(list), defaultdict(list))
        for k, nodes in enumerate((ours, theirs)):
            for node in nodes:
                _lay_open(node, waiting[k], pools[k])
        while waiting[0] or waiting[1]:
            size = max([*waiting[0], *waiting[1]])
            here = waiting[0].pop(size, []), waiting[1].pop(size, [])
            rest = self._containers(here[0], here[1], pools)
            for k in (0, 1):
                for node in rest[k]:
                    pools[k].extend(node.units)
                    for child in node.children:
                        _lay_open(child, waiting[k], pools[k])
        return self._pool(*pools)

    def _containers(
        self, ours: list[Node], theirs: list[Node], pools: tuple[list[Unit], list[Unit]]
    ) -> tuple[list[Node], list[Node]]:
        """Pair containers of one size, and what is inside of them; the ones that found none."""
        if not ours or not theirs:
            return ours, theirs
        items = [[side.container(node) for node in nodes] for side, nodes in zip(self._sides, (ours, theirs))]
        inner = self._prefixes(items)
        chosen = assign(items[0], items[1], lambda a, b: scores(a, b, inner, self._without))
        paired: tuple[set[int], set[int]] = (set(), set())
        for choice in chosen:
            a, b = ours[choice.ours], theirs[choice.theirs]
            if choice.margin < TOO_CLOSE or not _may_hold_the_same(a, b):
                continue
            before = len(self.matches)
            left = self._region(a.children, b.children, (a.units, b.units))
            covered = sum(unit.size for match in self.matches[before:] for unit in match.ours)
            if covered < _ENOUGH * a.size:
                del self.matches[before:]
                continue
            for k in (0, 1):
                pools[k].extend(left[k])
            paired[0].add(choice.ours)
            paired[1].add(choice.theirs)
        return (
            [node for k, node in enumerate(ours) if k not in paired[0]],
            [node for k, node in enumerate(theirs) if k not in paired[1]],
        )

    # -- what lies open ----------------------------------------------------------------------------------------

    def _pool(self, ours: list[Unit], theirs: list[Unit]) -> tuple[list[Unit], list[Unit]]:
        """Pair units of the same shapes, fused ones with their parts first; what is left over.

        What has to be carried over comes first; then what is tied, or a buffer, with what has no partner yet.
        """
        tied = _tied_alike(ours, theirs)
        required = [[u for u in side if not u.optional or (u.signature in tied and u.tied)] for side in (ours, theirs)]
        rest = self._fused(required[0], required[1], False)
        rest = self._fused(rest[1], rest[0], True)[::-1]
        self._same_shapes(rest[0], rest[1])
        left = self._unmatched(ours, theirs)
        self._same_shapes(left[0], left[1])
        return self._unmatched(ours, theirs)

    def _same_shapes(self, ours: Sequence[Unit], theirs: Sequence[Unit]) -> None:
        groups = [_by_signature(side) for side in (ours, theirs)]
        for signature in [s for s in groups[0] if s in groups[1]]:
            self._alike(groups[0][signature], groups[1][signature])

    def _fused(self, wholes: list[Unit], parts: list[Unit], turned: bool) -> tuple[list[Unit], list[Unit]]:
        """Pair units that have no like on the other side with the several whose rows they hold; the rest of both."""
        counts = Counter(u.signature for u in wholes), Counter(u.signature for u in parts)
        surplus = [u for u in wholes if counts[0][u.signature] > counts[1][u.signature] and not u.opaque]
        spare = [u for u in parts if counts[1][u.signature] > counts[0][u.signature] and not u.opaque]
        side, other = (self._sides[1], self._sides[0]) if turned else self._sides
        done: set[Unit] = set()
        for members in _by_signature(surplus).values():
            found = [b for b in bundles(members[0], spare, other.seen.order) if not done & set(b.parts)]
            if not found:
                continue
            items = [side.item(u) for u in members], [self._bundle_item(other, b) for b in found]
            for choice in assign(items[0], items[1], self._scoring(items)):
                whole, bundle = members[choice.ours], found[choice.theirs]
                if done & set(bundle.parts) or choice.margin < TOO_CLOSE:
                    continue
                done |= {whole, *bundle.parts}
                confidence = min(choice.confidence, 0.95 if bundle.named else 0.7)
                evidence = ("rows add up", *(("names of the parts",) if bundle.named else ()), *choice.reasons)
                sides = ((whole,), bundle.parts)
                ours, theirs = reversed(sides) if turned else sides
                self.matches.append(Match(ours, theirs, confidence, "parts", evidence))
        return [u for u in wholes if u not in done], [u for u in parts if u not in done]

    def _bundle_item(self, side: Side, bundle: Bundle) -> Item:
        item = side.item(bundle.parts[0])
        parent = bundle.parts[0].name.rpartition(".")[0]
        return Item(path=parent or item.path, defined=item.defined, ran=item.ran, kind=item.kind)

    def _alike(self, ours: Sequence[Unit], theirs: Sequence[Unit]) -> None:
        for mine, other in self._by_roles(ours, theirs):
            items = [self._sides[0].item(u) for u in mine], [self._sides[1].item(u) for u in other]
            for choice in assign(items[0], items[1], self._scoring(items)):
                self._take(choice, mine, other)

    def _by_roles(self, ours: Sequence[Unit], theirs: Sequence[Unit]) -> Iterator[tuple[list[Unit], list[Unit]]]:
        """The units cut into groups of one role, where either side has as many of it; what is left is one group.

        So a shortcut that is defined first on one side and last on the other does not shift the places of the rest.
        """
        if "names" in self._without or max(len(ours), len(theirs)) < 2:
            yield list(ours), list(theirs)
            return
        read = [[names.read(unit.name, "").roles for unit in side] for side in (ours, theirs)]
        # Only of families that both sides tell.
        families = [{family for roles in side for family, _ in roles} for side in read]
        telling = families[0] & families[1]
        roles: list[dict[frozenset[tuple[str, str]], list[Unit]]] = [{}, {}]
        for k, side in enumerate((ours, theirs)):
            for unit, said in zip(side, read[k]):
                key = frozenset((family, value) for family, value in said if family in telling)
                roles[k].setdefault(key, []).append(unit)
        rest: tuple[list[Unit], list[Unit]] = ([], [])
        for key in {**roles[0], **roles[1]}:
            mine, other = roles[0].get(key, []), roles[1].get(key, [])
            if key and len(mine) == len(other):
                yield mine, other
            else:
                rest[0].extend(mine)
                rest[1].extend(other)
        if all(rest):
            yield rest

    def _take(self, choice: Choice, ours: Sequence[Unit], theirs: Sequence[Unit]) -> None:
        if choice.margin < TOO_CLOSE or choice.score <= -4.0:
            return
        alone = len(ours) == len(theirs) == 1
        reason = "only one fits" if alone else _main_reason(choice.reasons)
        confidence = choice.confidence if not alone else (0.99 if choice.score > 0 else 0.8)
        evidence = ("shapes", *choice.reasons)
        rivals = tuple(theirs[k] for k in choice.rivals) if choice.margin < CLOSE else ()
        self.matches.append(Match((ours[choice.ours],), (theirs[choice.theirs],), confidence, reason, evidence, rivals))

    def _scoring(self, items: Sequence[Sequence[Item]]) -> Callable[[Sequence[Item], Sequence[Item]], Scores]:
        inner = self._prefixes(items)
        return lambda a, b: scores(a, b, inner, self._without, self._equal_start)

    def _prefixes(self, items: Sequence[Sequence[Item]]) -> tuple[str, str]:
        found = [common_prefix([item.path for item in side]) if len(side) > 1 else "" for side in items]
        return found[0], found[1]

    def _unmatched(self, ours: Sequence[Unit], theirs: Sequence[Unit]) -> tuple[list[Unit], list[Unit]]:
        done = {(k, unit) for m in self.matches for k, side in enumerate((m.ours, m.theirs)) for unit in side}
        return [u for u in ours if (0, u) not in done], [u for u in theirs if (1, u) not in done]

    # -- what does not fit -------------------------------------------------------------------------------------

    def _loosely(self, ours: list[Unit], theirs: list[Unit]) -> tuple[list[Unit], list[Unit]]:
        """Pair what is left by kind, though the shapes differ: that is where the models differ, to be shown there."""
        ours, theirs = self._beside(ours, theirs)
        ours, theirs = self._by_weight(ours, theirs, lambda unit: bare(unit.matrix))
        ours, theirs = self._by_weight(ours, theirs, _flat)
        ours, theirs = self._by_weight(ours, theirs, _places)
        groups = [_by_kind([u for u in side if not u.optional]) for side in (ours, theirs)]
        for kind in [k for k in groups[0] if k in groups[1] and k]:
            mine, other = groups[0][kind], groups[1][kind]
            items = [self._sides[0].item(u) for u in mine], [self._sides[1].item(u) for u in other]
            for choice in assign(items[0], items[1], self._scoring(items)):
                if choice.margin >= TOO_CLOSE and choice.score > 0:
                    pair = (mine[choice.ours],), (other[choice.theirs],)
                    self.matches.append(Match(*pair, 0.5, "kind", ("kind, though the shapes differ",), unlike=True))
        return self._unmatched(ours, theirs)

    def _beside(self, ours: list[Unit], theirs: list[Unit]) -> tuple[list[Unit], list[Unit]]:
        """Pair recurrent cells with cells that have one matrix for the input and the state beside each other."""
        for cell, gates, turned in [
            *((*found, False) for found in cells_beside(ours, theirs)),
            *((*found, True) for found in cells_beside(theirs, ours)),
        ]:
            sides = (gates, cell) if turned else (cell, gates)
            evidence = ("rows and columns add up",)
            self.matches.append(Match(*sides, 0.8, "parts", evidence, beside=True))
        return self._unmatched(ours, theirs)

    def _by_weight(
        self, ours: list[Unit], theirs: list[Unit], seen: Callable[[Unit], tuple[int, ...]]
    ) -> tuple[list[Unit], list[Unit]]:
        """Pair what has the same weight, in a way of seeing it, where only one side has a bias or its axes differ."""
        groups: list[dict[tuple[int, ...], list[Unit]]] = [{}, {}]
        for k, side in enumerate((ours, theirs)):
            for unit in side:
                if unit.matrix and not unit.optional:
                    groups[k].setdefault(seen(unit), []).append(unit)
        for shape in [shape for shape in groups[0] if shape in groups[1] and shape]:
            mine, other = groups[0][shape], groups[1][shape]
            items = [self._sides[0].item(u) for u in mine], [self._sides[1].item(u) for u in other]
            for choice in assign(items[0], items[1], self._scoring(items)):
                if choice.margin >= TOO_CLOSE and choice.score > -4.0:
                    confidence = min(0.7, choice.confidence)
                    pair = (mine[choice.ours],), (other[choice.theirs],)
                    self.matches.append(Match(*pair, confidence, "kind", ("shape of the weight", *choice.reasons)))
        return self._unmatched(ours, theirs)


def _lay_open(node: Node, waiting: dict[int, list[Node]], pool: list[Unit]) -> None:
    node = opened(node)
    if node.children and node.size:
        waiting[node.size].append(node)
    else:
        pool.extend(node.below())


def _flat(unit: Unit) -> tuple[int, ...]:
    """A convolution over patches is a linear layer of their pixels."""
    if len(unit.matrix) < 2 or not {"conv", "linear"} & {equivalents.group_of_kinds(unit.kind)}:
        return ()
    return (unit.matrix[0], math.prod(unit.matrix[1:]))


def _places(unit: Unit) -> tuple[int, ...]:
    """A picture (1, channels, height, width) is a row of places (1, height * width, channels)."""
    if len(unit.matrix) == 4 and unit.matrix[0] == 1:
        _, channels, height, width = unit.matrix
        return (1, height * width, channels) if channels != height * width else ()
    return unit.matrix if len(unit.matrix) == 3 else ()


def _may_hold_the_same(ours: Node, theirs: Node) -> bool:
    """Whether two containers of one size may hold the same, fused or not."""
    if ours.bag == theirs.bag:
        return True
    shared = (ours.bag & theirs.bag).total()
    # What is fused differs in number; what is not has to be there.
    return shared > 0 or min(ours.bag.total(), theirs.bag.total()) <= 4


def _tied_alike(ours: Sequence[Unit], theirs: Sequence[Unit]) -> set[Signature]:
    """Signatures of which both sides tie as many: which of them comes first is then no matter."""
    counts = [Counter(u.signature for u in side if u.tied or not u.optional) for side in (ours, theirs)]
    tied = [{u.signature for u in side if u.tied} for side in (ours, theirs)]
    return {signature for signature in tied[0] & tied[1] if counts[0][signature] == counts[1][signature]}


def _by_signature(units: Sequence[Unit]) -> dict[Signature, list[Unit]]:
    groups: dict[Signature, list[Unit]] = {}
    for unit in units:
        groups.setdefault(unit.signature, []).append(unit)
    return groups


def _by_kind(units: Sequence[Unit]) -> dict[str, list[Unit]]:
    groups: dict[str, list[Unit]] = {}
    for unit in units:
        groups.setdefault(unit.kind, []).append(unit)
    return groups


def _main_reason(reasons: Sequence[str]) -> str:
    told = {"names": "names", "values": "values", "order of execution": "execution"}
    return next((told[reason] for reason in ("values", "names", "order of execution") if reason in reasons), "order")


def _extents(shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    return None if shape is None else tuple(sorted(shape))


def _equal_start(ours: Side, theirs: Side) -> bool:
    """Whether most weights of either side are found on the other: both runs start from the same ones."""
    prints = [[p for p in (side.print_of(u) for u in side.units) if p is not None] for side in (ours, theirs)]
    if not prints[0] or not prints[1]:
        return False
    order = np.array(sorted(prints[1]))
    found = 0
    for one in prints[0]:
        # Sorted by the sum: only near neighbours can be equal.
        slack = 1e-3 * one[1] ** 0.5 + 1e-12
        low, high = np.searchsorted(order[:, 0], [one[0] - slack, one[0] + slack])
        found += bool(fingerprints_equal(np.array([one]), order[low:high]).any())
    return found >= 0.5 * min(len(prints[0]), len(prints[1]))
