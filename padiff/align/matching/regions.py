"""Pairing of the units of two trees, region by region: containers of the same size first, then their contents.

A region is the contents of two paired containers (at first, the whole models). Within a region, the largest containers
are paired first. If both sides have containers with the same number of elements, the best assignment among them is used
and each pair becomes a region of its own; a container without a partner is opened, so that different nestings can be
matched. The units that remain are paired by shape. So the cost grows with the number of layers, not with its square,
and a layer of one block cannot be paired with one of another block.
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

# Share of its elements that must be matched for a pair of containers to stay.
_ENOUGH = 0.5


class RegionPairing:
    """Matcher for the units of two models."""

    def __init__(self, sides: Both[ModelEvidence], without: Collection[str] = (), linked: Linked = frozenset()) -> None:
        self._sides = sides
        self._without = without
        self.matches = Matches()
        self._units = UnitPairing(sides, without, linked, self.matches)

    def pair(self, nodes: Both[list[LayerNode]], own: Both[list[Unit]]) -> Both[list[Unit]]:
        """Pair all units in two forests and the units next to them; return the units without a partner."""
        return self._units.pair_loosely(self._region(nodes, own))

    def _region(self, nodes: Both[list[LayerNode]], units: Both[list[Unit]]) -> Both[list[Unit]]:
        """Pair units in two forests and the units next to them; return the units without a partner."""
        open_units: Both[list[Unit]] = units.map(list)
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
        """Pair containers of one size, and their contents; return the containers without a partner."""
        if not all(nodes):
            return nodes
        items = Both(*([side.container(node) for node in group] for side, group in zip(self._sides, nodes)))
        paired: Both[set[LayerNode]] = Both(set(), set())
        for choice in self._units.assigned(items):
            a, b = nodes.reference[choice.reference], nodes.candidate[choice.candidate]
            if choice.margin < TOO_CLOSE or not _may_hold_the_same(a, b):
                continue
            before = len(self.matches)
            unmatched = self._region(Both([*a.children], [*b.children]), Both([*a.units], [*b.units]))
            covered = sum(unit.size for match in self.matches.since(before) for unit in match.reference)
            if covered < _ENOUGH * a.size:
                self.matches.take_back(before)
                continue
            # A layer's confidence is at most that of its container.
            self.matches.cap(before, choice.confidence)
            for lying_open, units in zip(open_units, unmatched):
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
    """Return True if two containers of one size may have the same contents, fused or not."""
    if reference.bag == candidate.bag:
        return True
    shared = (reference.bag & candidate.bag).total()
    # Fused units differ in number; the others have to be on both sides.
    return shared > 0 or min(reference.bag.total(), candidate.bag.total()) <= 4
