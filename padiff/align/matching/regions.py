"""Pairing the units of two trees, region by region: containers of the same size first, then what is inside of them.

A region is what is inside of two containers that answer to each other (at first, the whole models). In it, the largest
containers are looked at first. Where both sides have containers with the same number of elements, the best assignment
among them is taken and each pair becomes a region of its own; a container without its like is opened, so that another
nesting is seen through. What then lies open is paired by shape. So the cost grows with the number of layers, not with
its square, and a layer of one block can't be taken for one of another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence

from padiff.align.matching.evidence import scores
from padiff.align.matching.forest import Node, opened
from padiff.align.matching.names import Linked
from padiff.align.matching.pool import Pool, common_prefixes
from padiff.align.matching.sides import Matches, Side
from padiff.align.matching.solve import TOO_CLOSE, assign
from padiff.align.matching.units import Unit

# Containers of one size are only taken for each other where at least so much of what they hold fits.
_ENOUGH = 0.5


class Regions:
    """Pairs the units of two models."""

    def __init__(self, sides: tuple[Side, Side], without: Collection[str] = (), linked: Linked = frozenset()) -> None:
        self._sides, self._linked = sides, linked
        self._without = without
        self.matches = Matches()
        self._pool = Pool(sides, without, linked, self.matches)

    def run(
        self,
        ours: Sequence[Node],
        theirs: Sequence[Node],
        own: tuple[Sequence[Unit], Sequence[Unit]] = ((), ()),
    ) -> tuple[list[Unit], list[Unit]]:
        """Pair all that is in two forests, and units that lie open beside them; what is left over."""
        return self._pool.pair_loosely(*self._region(ours, theirs, own))

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
            return self._pool.pair(*pools)
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
        return self._pool.pair(*pools)

    def _containers(
        self, ours: list[Node], theirs: list[Node], pools: tuple[list[Unit], list[Unit]]
    ) -> tuple[list[Node], list[Node]]:
        """Pair containers of one size, and what is inside of them; the ones that found none."""
        if not ours or not theirs:
            return ours, theirs
        items = [[side.container(node) for node in nodes] for side, nodes in zip(self._sides, (ours, theirs))]
        inner = common_prefixes(items)
        chosen = assign(items[0], items[1], lambda a, b: scores(a, b, inner, self._without, self._linked), inner)
        paired: tuple[set[int], set[int]] = (set(), set())
        for choice in chosen:
            a, b = ours[choice.ours], theirs[choice.theirs]
            if choice.margin < TOO_CLOSE or not _may_hold_the_same(a, b):
                continue
            before = len(self.matches)
            left = self._region(a.children, b.children, (a.units, b.units))
            covered = sum(unit.size for match in self.matches.since(before) for unit in match.ours)
            if covered < _ENOUGH * a.size:
                self.matches.take_back(before)
                continue
            # A layer is no surer than the container that it is in.
            self.matches.cap(before, choice.confidence)
            for k in (0, 1):
                pools[k].extend(left[k])
            paired[0].add(choice.ours)
            paired[1].add(choice.theirs)
        return (
            [node for k, node in enumerate(ours) if k not in paired[0]],
            [node for k, node in enumerate(theirs) if k not in paired[1]],
        )


def _lay_open(node: Node, waiting: dict[int, list[Node]], pool: list[Unit]) -> None:
    node = opened(node)
    if node.children and node.size:
        waiting[node.size].append(node)
    else:
        pool.extend(node.below())


def _may_hold_the_same(ours: Node, theirs: Node) -> bool:
    """Whether two containers of one size may hold the same, fused or not."""
    if ours.bag == theirs.bag:
        return True
    shared = (ours.bag & theirs.bag).total()
    # What is fused differs in number; what is not has to be there.
    return shared > 0 or min(ours.bag.total(), theirs.bag.total()) <= 4
