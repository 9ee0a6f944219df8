"""Alignment of two models from all the evidence, region by region of a given map."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Any

from padiff.align.alignment import Alignment, LayerPair, SplitPair
from padiff.align.matching.evidence import ModelEvidence
from padiff.align.matching.names import Linked, vocabulary
from padiff.align.matching.parameter_pairing import StoredParameters, unmatched_parameters
from padiff.align.matching.parameter_units import (
    LayerNode,
    Match,
    Unit,
    containers_of,
    differing_inside,
    grouped,
    inside,
    layer_trees,
    units_of,
    with_layouts,
)
from padiff.align.matching.parameterless import Matched, Tree, pair_containers, pair_leaves, value_numbers
from padiff.align.matching.unit_pairing import RegionPairing
from padiff.align.slices import NOTHING_SEEN, RuntimeEvidence, unstacked
from padiff.errors import UsageError
from padiff.model.given_map import GivenMap
from padiff.records import ROOT, SIDES, Both, Layer, RunInfo, unzipped
from padiff.system.terminal import nearest

#: Position of a partner in a layer's own order: the layer's unit, the part of the unit, and the match of both.
_Place = tuple[int, int, Match]


def owner_pairs(matches: Sequence[Match], units: Both[list[Unit]]) -> dict[Both[str], Match]:
    """Return pairs of layers that own parameters, have no owning layers below them, and match in all of their units.

    Returns:
        The match with the lowest confidence, by the paths of the pair.
    """
    parametrized = units.map(lambda side: any(_PARAMETRIZED in unit.path for unit in side))
    on_one_side = parametrized.reference is not parametrized.candidate

    def owner(unit: Unit) -> str:
        # Torch keeps what a weight is computed from in layers below its owner, older versions and paddle in the owner.
        return unit.path.partition(_PARAMETRIZED)[0] if on_one_side else unit.path

    pure = units.map(lambda side: _pure({owner(u) for u in side if not u.optional or u.tied or _buffers(u)}))
    partners: Both[dict[str, set[str]]] = Both(defaultdict(set), defaultdict(set))
    best: dict[Both[str], Match] = {}
    for match in matches:
        for a, b in product(*match):
            pair = Both(owner(a), owner(b))
            partners.reference[pair.reference].add(pair.candidate)
            partners.candidate[pair.candidate].add(pair.reference)
            if pair not in best or match.confidence < best[pair].confidence:
                best[pair] = match
    return {
        pair: match
        for pair, match in best.items()
        if all(path in paths for path, paths in zip(pair, pure))
        if all(len(partner_paths[path]) == 1 for path, partner_paths in zip(pair, partners))
    }


_PARAMETRIZED = ".parametrizations."


def _buffers(unit: Unit) -> bool:
    """Return True for the unit of a layer that has only buffers, which work like parameters: a frozen normalisation."""
    return len(unit.parameters) > 1


def _pure(paths: Collection[str]) -> set[str]:
    """Return the paths of owning layers that have no other owning layer below them."""
    return set(paths) - {above for path in paths for above in containers_of(path)}


def held(matches: Sequence[Match]) -> Both[dict[str, set[int]]]:
    """Return the contents of each layer as numbers that both sides share, by path.

    A unit that corresponds to several units of the other side has a number for each of these.
    """
    numbered: Both[dict[str, set[int]]] = Both(defaultdict(set), defaultdict(set))
    number = 0
    for match in matches:
        buffers = all(p.role == "buffer" for unit in match.reference for p in unit.parameters.values())
        if buffers and not _buffers(match.reference[0]):
            continue  # tables and masks may be in any layer
        parts = max(match.map(len))
        for numbers, units in zip(numbered, match):
            for place, unit in enumerate(units):
                numbers[unit.path].update(range(number, number + parts) if len(units) == 1 else [number + place])
        number += parts
    return numbered


def splits(
    matches: Sequence[Match], layers: Both[dict[str, Layer]], paired: Collection[Both[str]]
) -> Iterator[SplitPair]:
    """Yield layers that correspond to several layers, each with these in the order of its parts.

    Args:
        layers: all layers, by path.
        paired: paths of pairs of one layer with one layer.
    """
    places: Both[dict[str, dict[str, _Place]]] = Both(defaultdict(dict), defaultdict(dict))
    for match in matches:
        for (i, a), (j, b) in product(*match.map(enumerate)):
            for side, unit, partner, place in ((places.reference, a, b, j), (places.candidate, b, a, i)):
                here = unit.defined, place, match
                if partner.path not in side[unit.path] or here[:2] < side[unit.path][partner.path][:2]:
                    side[unit.path][partner.path] = here
    for swapped in (False, True):
        wholes, parts = places.swapped(swapped)
        whole_layers, part_layers = layers.swapped(swapped)
        for path, partners in wholes.items():
            several = sorted(partners, key=lambda part, partners=partners: partners[part][:2])  # type: ignore[misc]
            pairs = {Both(path, part).swapped(swapped) for part in several}
            if len(several) < 2 or any(len(parts[part]) > 1 for part in several) or not pairs.isdisjoint(paired):
                continue
            match = partners[several[0]][2]
            split = Both((whole_layers[path],), tuple(part_layers[part] for part in several)).swapped(swapped)
            yield SplitPair(split.reference, split.candidate, match.reason, match.confidence, match.evidence)


@dataclass(frozen=True)
class Entry(Both[tuple[str, ...]]):
    """An entry of a map: paths of both sides; if a side is empty, the other side's layers have no partner."""

    @property
    def one_to_one(self) -> bool:
        return len(self.reference) == len(self.candidate) == 1


def entries(infos: Both[RunInfo], layer_map: GivenMap) -> list[Entry]:
    """Return the entries of the given map and of the runs' own ``layer_map`` lists, which are paired in order.

    Raises:
        UsageError: the map names an unknown layer, or a layer twice, or the runs' own lists have different lengths.
    """
    lists = infos.map(lambda info: info.layer_map)
    if len(lists.reference) != len(lists.candidate):
        raise UsageError(
            f"the layer maps that the two runs were recorded with answer to each other in order, but the "
            f"reference's has {len(lists.reference)} layers and the candidate's {len(lists.candidate)}"
        )
    mapped = _named(infos, layer_map)
    recorded = _named(infos, GivenMap(zip(*lists)))
    used = unzipped(mapped).map(lambda side: set(chain(*side)))
    return mapped + [entry for entry in recorded if not any(map(set.intersection, used, entry))]


def _named(infos: Both[RunInfo], layer_map: GivenMap) -> list[Entry]:
    """Return the pairs of a map as entries, with every alias replaced by the layer's own path."""
    pairs = layer_map.named()
    columns = []
    for number, (side, info) in enumerate(zip(SIDES, infos)):
        names = {path: layer.path for layer in info.layers for path in (layer.path, *layer.aliases)}
        used: set[str] = set()
        column = [pair[number] for pair in pairs]
        for path in chain(*column):
            _check(path, names, used, side)
            used.add(names[path])
        columns.append([tuple(names[path] for path in paths) for paths in column])
    return [Entry(*paths) for paths in zip(*columns)]


def _check(path: object, names: dict[str, str], used: Collection[str], side: str) -> None:
    if not isinstance(path, str):
        raise UsageError(f"layer map: {path!r} is no path: recorded runs know their layers by path")
    if path not in names:
        raise UsageError(f"layer map: the {side} has no layer {path!r}. {nearest(path, names)}")
    if names[path] in used:
        raise UsageError(
            f"layer map: the {side}'s layer {path!r} is given twice; a layer has one partner (several are given as a "
            "list, in the order of its parts)"
        )


def regions(layers: Sequence[Layer], given: Sequence[str]) -> dict[str, int]:
    """Return, for each layer, the position in `given` of the innermost given layer around it; -1 if there is none."""
    region_of: dict[str, int] = {}
    above: list[tuple[str, int]] = []
    positions = {path: position for position, path in enumerate(given)}
    for layer in layers:
        while above and not inside(layer.path, above[-1][0]):
            above.pop()
        region_of[layer.path] = above[-1][1] if above else -1
        if layer.path in positions:
            above.append((layer.path, positions[layer.path]))
    return region_of


# Kinds of the layer that holds the models of a run with several.
_GROUPS = frozenset({"moduledict", "layerdict"})
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


def align(
    reference: RunInfo,
    candidate: RunInfo,
    layer_map: GivenMap | Mapping[Any, Any] | Iterable[Any] | str | None = None,
    seen: Both[RuntimeEvidence] = NOTHING_SEEN,
    whole: Collection[tuple[str, str]] = (),
    without: Collection[str] = (),
) -> Alignment:
    """Pair the layers and parameters of two models.

    A given map has precedence. All other pairs are computed from the names, kinds, shapes, nesting, order of definition
    and, if the models were run, their order of execution, output shapes and starting weights. Ambiguous pairs list
    their alternatives; layers without sufficient evidence stay unpaired.

    Args:
        layer_map: a value that `GivenMap.from_value` accepts; in addition, the runs' own ``layer_map`` lists are
            paired in order.
        seen: observations from running the two models.
        whole: class names (reference's, candidate's) of layers that correspond as a whole, with any contents: those for
            which the user has a rule.
        without: kinds of evidence to ignore (`padiff.align.matching.evidence.KINDS_OF_EVIDENCE`), to measure their
            value.

    Raises:
        UsageError: the map names an unknown layer, or a layer twice, or the runs' own lists have different lengths.
    """
    real = Both(reference, candidate)
    infos, stacks = unstacked(real)
    seen = Both(*(side.seen(observed) for side, observed in zip(stacks, seen)))
    mapped = entries(infos, GivenMap.from_value(layer_map))
    mapped += _idle(infos, seen, {path for entry in mapped for path in chain(*entry)})
    trees = _trees(infos, mapped, seen)
    units = UnitMatches(trees, mapped, whole, without)
    matches = units.found()
    named = real.map(lambda info: {layer.path: layer for layer in info.layers})
    made = _layer_pairs(trees, mapped, matches, owner_pairs(matches, units.units))
    paths = {pair.map(lambda layer: layer.path) for pair in made}
    by_path = trees.map(lambda tree: {layer.path: layer for layer in tree.layers})
    split = tuple(s for s in splits(matches, by_path, paths) if all(map(_has_all, named, s)))
    pairs = tuple(_real(p, named) for p in made if all(map(_has_all, named, p.map(lambda x: (x,)))))
    storage = StoredParameters(infos, matches, stacks=stacks, seen=seen)
    parameters, ambiguities = storage.pairs, storage.ambiguities
    paired = zip(unzipped(pairs), unzipped(split).map(chain.from_iterable))
    placed = [{layer.path for layer in chain(*layers)} for layers in paired]
    only = Both(
        *(tuple(layer for layer in info.layers if layer.path not in paths) for info, paths in zip(real, placed))
    )
    owned = Both(*map(unmatched_parameters, real, unzipped(parameters)))
    unmatched = owned.map(lambda side: tuple(f"{layer.path}/{p.slot}" for layer, p in side))
    return Alignment(
        pairs=pairs,
        reference_only=only.reference,
        candidate_only=only.candidate,
        splits=split,
        parameters=parameters,
        reference_parameters=unmatched.reference,
        candidate_parameters=unmatched.candidate,
        ambiguities=ambiguities,
        differ_inside=differing_inside(real, paths, parameters, unmatched),
        storage=storage if ambiguities else None,
    )


def _idle(infos: Both[RunInfo], seen: Both[RuntimeEvidence], mapped: Collection[str]) -> Iterator[Entry]:
    """Yield the models of one run that are only held, such as one that weights were copied from, as without a partner.

    A model counts that neither runs nor trains, if the run's other models hold all parameters of the other run.
    """
    held_models = Both(*map(_idle_models, infos, seen))
    for swapped in (False, True):
        (idle, others), (info, others_info) = held_models.swapped(swapped), infos.swapped(swapped)
        paths = tuple(layer.path for layer in info.layers if layer.path.partition(".")[0] in idle)
        if not idle or others or not {*paths}.isdisjoint(mapped):
            continue
        if not _shapes(others_info, ()) - _shapes(info, paths):
            yield Entry(*Both(paths, ()).swapped(swapped))


def _shapes(info: RunInfo, without: Collection[str]) -> Counter[tuple[int, ...]]:
    """Count the parameters of each shape, in any order of axes, without those of some layers."""
    layers = (layer for layer in info.layers if layer.path not in without)
    return Counter(tuple(sorted(parameter.shape)) for layer in layers for parameter in layer.parameters)


def _idle_models(info: RunInfo, seen: RuntimeEvidence) -> set[str]:
    """Return the names of the models of a run of several models that neither run nor train; empty if unknown."""
    models = {layer.path.partition(".")[0] for layer in info.layers if layer.path and layer.path != ROOT}
    if not seen.trained or not info.layers or info.layers[0].kind not in _GROUPS:
        return set()
    return models - {path.partition(".")[0] for path in (*seen.order, *seen.trained)}


def _has_all(layers: Mapping[str, Layer], some: Iterable[Layer]) -> bool:
    return all(layer.path in layers for layer in some)


def _real(pair: LayerPair, layers: Both[dict[str, Layer]]) -> LayerPair:
    """Return a pair of layers, without children for the elements of their stacks."""
    reference, candidate = (named[layer.path] for named, layer in zip(layers, pair))
    return replace(pair, reference=reference, candidate=candidate)


def is_mapped(
    reference: RunInfo, candidate: RunInfo, layer_map: GivenMap | Mapping[Any, Any] | Iterable[Any] | str | None
) -> bool:
    """Return True if a map, given or recorded, has an entry; otherwise `align` raises no error about the map.

    Raises:
        UsageError: the map itself is invalid, as for `align`.
    """
    return bool(entries(Both(reference, candidate), GivenMap.from_value(layer_map)))


def _trees(infos: Both[RunInfo], map_entries: Sequence[Entry], observed: Both[RuntimeEvidence]) -> Both[Tree]:
    skipped = unzipped(map_entries).map(lambda side: set(chain(*side)))
    mapped = unzipped(entry for entry in map_entries if entry.one_to_one).map(lambda side: [path for (path,) in side])
    areas = Both(*(regions(info.layers, paths) for info, paths in zip(infos, mapped)))
    return Both(*map(Tree, infos.map(lambda info: info.layers), skipped, observed, areas))


def _layer_pairs(
    trees: Both[Tree], map_entries: Sequence[Entry], matches: Sequence[Match], owners: Mapping[Both[str], Match]
) -> tuple[LayerPair, ...]:
    """Return the pairs of one layer with one layer, in the reference's order of definition."""
    partners = {layer.path: layer for layer in trees.candidate.layers}
    matched: Matched = {e.reference[0]: (partners[e.candidate[0]], "given") for e in map_entries if e.one_to_one}
    for pair, match in owners.items():
        if pair.reference not in matched and not any(path in tree.skipped for path, tree in zip(pair, trees)):
            matched[pair.reference] = (partners[pair.candidate], match.reason)
    pair_leaves(trees, matched)
    pair_containers(trees, held(matches), matched)
    return tuple(
        _pair(layer, *matched[layer.path], owners) for layer in trees.reference.layers if layer.path in matched
    )


def _pair(layer: Layer, partner: Layer, reason: str, owners: Mapping[Both[str], Match]) -> LayerPair:
    match = owners.get(Both(layer.path, partner.path))
    if reason == "given":
        return LayerPair(layer, partner, reason)
    if match is None:
        confidence = {"contents": 0.9, "execution": 0.85}.get(reason, 0.75)
        return LayerPair(layer, partner, reason, confidence)
    if reason != "kind" and layer.path == partner.path:
        reason = "path"
    alternatives = tuple(dict.fromkeys(unit.path for unit in match.rivals if unit.path != partner.path))
    return LayerPair(layer, partner, reason, match.confidence, match.evidence, alternatives)
