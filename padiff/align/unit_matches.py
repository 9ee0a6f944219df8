"""Which units of two models answer to each other, region by region of a given map."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from padiff.align.map_entries import Entry
from padiff.align.matching.fingerprints import value_numbers
from padiff.align.matching.layer_tree import LayerNode, layer_trees
from padiff.align.matching.matches import Match
from padiff.align.matching.model_evidence import ModelEvidence
from padiff.align.matching.names import Linked, vocabulary
from padiff.align.matching.parameter_units import Unit, grouped, units_of, with_layouts
from padiff.align.matching.parameterless import Tree
from padiff.align.matching.regions import RegionPairing
from padiff.errors import UsageError
from padiff.records import Both

# From that confidence on, a pair may teach words.
_SURE = 0.8


class UnitMatches:
    """Pairs the units of two models.

    Attributes:
        units: all of them.

    Args:
        given: the entries of the map.
        whole: as `padiff.align.align` takes them.
        without: likewise.
    """

    def __init__(
        self,
        trees: Both[Tree],
        given: Sequence[Entry],
        whole: Collection[tuple[str, str]],
        without: Collection[str],
    ) -> None:
        rules = Both({a: f"{a}/{b}" for a, b in whole}, {b: f"{a}/{b}" for a, b in whole})
        self.units = with_layouts(Both(*(units_of(tree.layers, rule) for tree, rule in zip(trees, rules))))
        values = value_numbers(self.units, trees.map(lambda tree: None if "values" in without else tree.seen.values))
        #: The layer trees of whole models.
        self._roots = Both(*(layer_trees(tree.layers, side) for tree, side in zip(trees, self.units)))
        self._sides = Both(*map(_side, trees, self.units, values, self._roots))
        self._trees, self._given, self._without = trees, given, without

    def found(self) -> list[Match]:
        """The units that answer to each other.

        Raises:
            UsageError: what the parts of a given layer own does not make up what it owns.
        """
        matches = self._found(frozenset())
        if "names" not in self._without and any(match.confidence < _SURE for match in matches):
            # What is sure teaches how the two authors call things, which helps with the rest.
            sure = (Both(a.name, b.name) for m in matches if m.confidence >= _SURE for a, b in product(*m))
            linked = vocabulary(sure)
            matches = self._found(linked) if linked else matches
        return matches

    def _found(self, linked: Linked) -> list[Match]:
        found: list[Match] = []
        for entry in self._given:
            if not entry.one_to_one:
                found += _given_parts(entry, self.units, self._sides)
        for nodes, own in self._regions():
            below = any(unit for side in nodes for node in side for unit in node.below())
            if len(own.reference) == len(own.candidate) == 1 and not below:
                a, b = own.reference[0], own.candidate[0]
                found.append(Match((a,), (b,), 1.0, "given", unlike=a.signature != b.signature))
            elif below or all(own):
                region = RegionPairing(self._sides, self._without, linked)
                region.run(nodes, own)
                found += region.matches
        return found

    def _regions(self) -> Iterator[tuple[Both[list[LayerNode]], Both[list[Unit]]]]:
        """The regions of the map: the layer trees of each, and what its own two layers own."""
        if not self._given:
            yield self._roots, Both([], [])
            return
        mapped = [entry.map(lambda paths: paths[0]) for entry in self._given if entry.one_to_one]
        layers = self._trees.map(lambda tree: grouped(tree.layers, lambda layer: tree.region[layer.path]))
        units = Both(*(_by_region(side, tree) for side, tree in zip(self.units, self._trees)))
        owned = self.units.map(lambda side: grouped(side, lambda unit: unit.path))
        for number in sorted({-1, *layers.reference, *layers.candidate, *range(len(mapped))}):
            nodes = Both(*(layer_trees(a.get(number, []), b.get(number, [])) for a, b in zip(layers, units)))
            # What a given layer owns itself may, on the other side, stand in layers below its partner.
            own: Both[list[Unit]] = Both([], [])
            if number >= 0:
                own = Both(*(side.get(path, []) for side, path in zip(owned, mapped[number])))
            yield nodes, own


def _side(tree: Tree, units: list[Unit], values: Mapping[Unit, int], roots: list[LayerNode]) -> ModelEvidence:
    nodes: dict[str, LayerNode] = {}
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        nodes[node.path] = node
        waiting += node.children
    return ModelEvidence(units, tree.seen, values, nodes)


def _by_region(units: Iterable[Unit], tree: Tree) -> dict[int, list[Unit]]:
    free = [unit for unit in units if unit.path not in tree.skipped]
    return grouped(free, lambda unit: tree.region[unit.path])


def _given_parts(entry: Entry, units: Both[list[Unit]], sides: Both[ModelEvidence]) -> list[Match]:
    """The matches of a layer that a map gives to several, its parts in the order in which they are given.

    Raises:
        UsageError: what the parts own does not make up what the one owns.
    """
    owned = Both(*([u for path in paths for u in side if u.path == path] for side, paths in zip(units, entry)))
    if not all(owned):
        return []
    signatures = owned.map(lambda side: [unit.signature for unit in side])
    if signatures.reference == signatures.candidate:  # the layers of a stacked recurrent layer, say
        return [Match((a,), (b,), 1.0, "given") for a, b in zip(*owned)]
    rows = owned.map(lambda side: sum(u.matrix[0] if u.matrix else 0 for u in side))
    if 1 in map(len, owned) and rows.reference == rows.candidate:
        return [Match(tuple(owned.reference), tuple(owned.candidate), 1.0, "given", ("rows add up",))]
    region = RegionPairing(sides)
    if any(region.run(Both([], []), owned)):
        parts = " against ".join(f"{' + '.join(paths)} with {n} rows" for paths, n in zip(entry, rows))
        raise UsageError(f"layer map: the parts do not make up the whole: {parts}")
    return [replace(match, confidence=1.0, reason="given", rivals=()) for match in region.matches]
