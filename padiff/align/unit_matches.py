"""Matches between the units of two models, region by region of a given map."""

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

# Minimum confidence of a match whose names are used as vocabulary.
_SURE = 0.8


class UnitMatches:
    """Matcher for the units of two models.

    Attributes:
        units: all units of each side.

    Args:
        trees: both layer trees.
        given: the entries of the map.
        whole: the argument of `padiff.align.align`.
        without: the argument of `padiff.align.align`.
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
        """Return the matches of units.

        Raises:
            UsageError: the parameters of a mapped layer's parts do not add up to the layer's own.
        """
        matches = self._found(frozenset())
        if "names" not in self._without and any(match.confidence < _SURE for match in matches):
            # Certain matches show how the names of the two models translate, which helps with the other units.
            sure = (Both(a.name, b.name) for m in matches if m.confidence >= _SURE for a, b in product(*m))
            linked = vocabulary(sure)
            matches = self._found(linked) if linked else matches
        return matches

    def _found(self, linked: Linked) -> list[Match]:
        matches: list[Match] = []
        for entry in self._given:
            if not entry.one_to_one:
                matches += _given_parts(entry, self.units, self._sides)
        for nodes, owned in self._regions():
            below = any(unit for side in nodes for node in side for unit in node.below())
            if len(owned.reference) == len(owned.candidate) == 1 and not below:
                a, b = owned.reference[0], owned.candidate[0]
                matches.append(Match((a,), (b,), 1.0, "given", unlike=a.signature != b.signature))
            elif below or all(owned):
                region = RegionPairing(self._sides, self._without, linked)
                region.pair(nodes, owned)
                matches += region.matches
        return matches

    def _regions(self) -> Iterator[tuple[Both[list[LayerNode]], Both[list[Unit]]]]:
        """Yield the regions of the map: the layer trees of each, and the units that its own two layers own directly."""
        if not self._given:
            yield self._roots, Both([], [])
            return
        mapped = [entry.map(lambda paths: paths[0]) for entry in self._given if entry.one_to_one]
        layers = self._trees.map(lambda tree: grouped(tree.layers, lambda layer: tree.region[layer.path]))
        units = Both(*(_by_region(side, tree) for side, tree in zip(self.units, self._trees)))
        owned = self.units.map(lambda side: grouped(side, lambda unit: unit.path))
        for number in sorted({-1, *layers.reference, *layers.candidate, *range(len(mapped))}):
            nodes = Both(*(layer_trees(a.get(number, []), b.get(number, [])) for a, b in zip(layers, units)))
            # Parameters that a mapped layer owns directly may belong to layers below its partner on the other side.
            direct: Both[list[Unit]] = Both([], [])
            if number >= 0:
                direct = Both(*(side.get(path, []) for side, path in zip(owned, mapped[number])))
            yield nodes, direct


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
    """Return the matches of a layer that a map pairs with several layers, its parts in the map's order.

    Raises:
        UsageError: the parameters of the parts do not add up to those of the layer.
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
    if any(region.pair(Both([], []), owned)):
        parts = " against ".join(f"{' + '.join(paths)} with {n} rows" for paths, n in zip(entry, rows))
        raise UsageError(f"layer map: the parts do not make up the whole: {parts}")
    return [replace(match, confidence=1.0, reason="given", rivals=()) for match in region.matches]
