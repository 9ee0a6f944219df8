"""Pairing the units of two trees, region by region: containers of the same size first, then what is inside of them.

A region is what is inside of two containers that answer to each other (at first, the whole models). In it, the largest
containers are looked at first. Where both sides have containers with the same number of elements, the best assignment
among them is taken and each pair becomes a region of its own; a container without its like is opened, so that another
nesting is seen through. What then lies open is paired by shape. So the cost grows with the number of layers, not with
its square, and a layer of one block can't be taken for one of another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from itertools import chain

from padiff.align.matching.assignment import TOO_CLOSE
from padiff.align.matching.layer_tree import LayerNode, opened
from padiff.align.matching.matches import Matches
from padiff.align.matching.model_evidence import ModelEvidence
from padiff.align.matching.names import Linked
from padiff.align.matching.parameter_units import Unit
from padiff.align.matching.unit_pairing import UnitPairing
from padiff.records import Both

# Containers of one size are only taken for each other where at least so much of what they hold fits.
_ENOUGH = 0.5


class RegionPairing:
    """Pairs the units of two models."""

    def __init__(self, sides: Both[ModelEvidence], without: Collection[str] = (), linked: Linked = frozenset()) -> None:
        self._sides = sides
        self._without = without
        self.matches = Matches()
        self._units = UnitPairing(sides, without, linked, self.matches)

    def run(self, nodes: Both[list[LayerNode]], own: Both[list[Unit]]) -> Both[list[Unit]]:
        """Pair all that is in two forests, and units that lie open beside them; what is left over."""
        return self._units.pair_loosely(self._region(nodes, own))

    def _region(self, nodes: Both[list[LayerNode]], own: Both[list[Unit]]) -> Both[list[Unit]]:
        """Pair what is in two forests, and units that lie open beside them."""
        open_units: Both[list[Unit]] = own.map(list)
        if "containers" in self._without:
            for lying_open, side in zip(open_units, nodes):
                lying_open.extend(unit for node in side for unit in node.below())
            return self._units.pair(open_units)
        waiting: Both[dict[int, list[LayerNode]]] = Both(defaultdict(list), defaultdict(list))
        for side, heap, lying_open in zip(nodes, waiting, open_units):
            for node in side:
                _lay_open(node, heap, lying_open)
        while any(waiting):
            size = max(chain(*waiting))
            here = Both(*(heap.pop(size, []) for heap in waiting))
            for side, heap, lying_open in zip(self._containers(here, open_units), waiting, open_units):
                for node in side:
                    lying_open.extend(node.units)
                    for child in node.children:
                        _lay_open(child, heap, lying_open)
        return self._units.pair(open_units)

    def _containers(self, nodes: Both[list[LayerNode]], open_units: Both[list[Unit]]) -> Both[list[LayerNode]]:
        """Pair containers of one size, and what is inside of them; the ones that found none."""
        if not all(nodes):
            return nodes
        items = Both(*([side.container(node) for node in group] for side, group in zip(self._sides, nodes)))
        paired: Both[set[LayerNode]] = Both(set(), set())
        for choice in self._units.assigned(items):
            a, b = nodes.reference[choice.reference], nodes.candidate[choice.candidate]
            if choice.margin < TOO_CLOSE or not _may_hold_the_same(a, b):
                continue
            before = len(self.matches)
            left = self._region(Both([*a.children], [*b.children]), Both([*a.units], [*b.units]))
            covered = sum(unit.size for match in self.matches.since(before) for unit in match.reference)
            if covered < _ENOUGH * a.size:
                self.matches.take_back(before)
                continue
            # A layer is no surer than the container that it is in.
            self.matches.cap(before, choice.confidence)
            for lying_open, units in zip(open_units, left):
                lying_open.extend(units)
            paired.reference.add(a)
            paired.candidate.add(b)
        return Both(*([node for node in side if node not in done] for side, done in zip(nodes, paired)))


def _lay_open(node: LayerNode, waiting: dict[int, list[LayerNode]], lying_open: list[Unit]) -> None:
    node = opened(node)
    if node.children and node.size:
        waiting[node.size].append(node)
    else:
        lying_open.extend(node.below())


def _may_hold_the_same(reference: LayerNode, candidate: LayerNode) -> bool:
    """Whether two containers of one size may hold the same, fused or not."""
    if reference.bag == candidate.bag:
        return True
    shared = (reference.bag & candidate.bag).total()
    # What is fused differs in number; what is not has to be there.
    return shared > 0 or min(reference.bag.total(), candidate.bag.total()) <= 4
