"""Which layer of one model answers to which of another: all the evidence put together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from padiff.align.alignment import Alignment, LayerPair, ParameterPair, Seen, SplitPair
from padiff.align.given import Entry, entries, regions
from padiff.align.matching.around import Matched, Tree, pair_containers, pair_plain
from padiff.align.matching.forest import Node, forest
from padiff.align.matching.names import Linked, vocabulary
from padiff.align.matching.parameters import Parameters, with_packed_biases, with_summed_biases
from padiff.align.matching.regions import Regions
from padiff.align.matching.sides import Match, Side
from padiff.align.matching.units import Unit, containers_of, homes_of, settled, units_of
from padiff.align.matching.values import same_values
from padiff.align.matching.wholes import differing
from padiff.errors import UsageError
from padiff.model.equivalents import ONE_SIDED, stands_for_none
from padiff.model.given_map import GivenMap
from padiff.records import Layer, RunInfo

_NOTHING = Seen()
# From that confidence on, a pair may teach words.
_SURE = 0.8
_T = TypeVar("_T", Layer, Unit)
#: Where in a layer's own order another answers to it: its unit, the part of it, and the match that says so.
_Place = tuple[int, int, Match]


def align(
    reference: RunInfo,
    candidate: RunInfo,
    layer_map: GivenMap | Mapping[Any, Any] | Iterable[Any] | str | None = None,
    seen: tuple[Seen, Seen] = (_NOTHING, _NOTHING),
    whole: Collection[tuple[str, str]] = (),
    choices: Mapping[str, str] | None = None,
    without: Collection[str] = (),
) -> Alignment:
    """Pair the layers and parameters of two models.

    A given map wins; the rest is found around it, from the names, kinds, shapes, nesting, order of definition and,
    where the models were run, their order of execution, output shapes and starting weights. What is ambiguous is told
    with its alternatives, what can't be told is left unpaired.

    Args:
        layer_map: what `GivenMap.of` takes; besides it, the runs' own ``layer_map`` lists answer to each other,
            in order.
        seen: what running the two models showed.
        whole: class names (reference's, candidate's) of layers that answer to each other as a whole, whatever they
            hold: those that a rule of the user's is about.
        choices: answers to the `Doubt`s of an earlier alignment, by what they are about.
        without: kinds of evidence to leave out (`padiff.align.matching.evidence.KINDS_OF_EVIDENCE`), to see what they
            are worth.

    Raises:
        UsageError: the map names an unknown layer, or a layer twice, or the runs' own lists are of unequal length.
    """
    return _Aligning(reference, candidate, GivenMap.of(layer_map), seen, whole, choices or {}, without).result()


class _Aligning:
    def __init__(
        self,
        reference: RunInfo,
        candidate: RunInfo,
        layer_map: GivenMap,
        seen: tuple[Seen, Seen],
        whole: Collection[tuple[str, str]],
        choices: Mapping[str, str],
        without: Collection[str],
    ) -> None:
        self._infos = (reference, candidate)
        self._given = entries(reference, candidate, layer_map)
        self._both = [entry for entry in self._given if entry.one_to_one]
        rules = [
            {mine: f"{mine}/{other}" for mine, other in whole},
            {other: f"{mine}/{other}" for mine, other in whole},
        ]
        units = [units_of(info.layers, rule) for info, rule in zip(self._infos, rules)]
        self._units = settled(units[0], units[1])
        read = (None, None) if "values" in without else (seen[0].values, seen[1].values)
        values = same_values(self._units[0], self._units[1], read)
        nodes = [_nodes(forest(info.layers, units)) for info, units in zip(self._infos, self._units)]
        self._sides = (
            Side(self._units[0], seen[0], values[0], nodes[0]),
            Side(self._units[1], seen[1], values[1], nodes[1]),
        )
        self._skipped = (
            {path for entry in self._given for path in entry.reference},
            {path for entry in self._given for path in entry.candidate},
        )
        self._trees = tuple(
            Tree(info.layers, skipped, show, regions(info.layers, [_path(entry, k) for entry in self._both]))
            for k, (info, skipped, show) in enumerate(zip(self._infos, self._skipped, seen))
        )
        self._without = without
        self._parameters = Parameters(self._infos, choices)

    def result(self) -> Alignment:
        matches = self._matches(frozenset())
        if "names" not in self._without and any(match.confidence < _SURE for match in matches):
            # What is sure teaches how the two authors call things, which helps with the rest.
            sure = ((a.name, b.name) for m in matches if m.confidence >= _SURE for a in m.ours for b in m.theirs)
            linked = vocabulary(sure)
            matches = self._matches(linked) if linked else matches
        by_path = [{layer.path: layer for layer in info.layers} for info in self._infos]
        matched: Matched = {e.reference[0]: (by_path[1][e.candidate[0]], "given") for e in self._both}
        best = _owner_pairs(matches, self._units)
        for (mine, other), match in best.items():
            if mine not in matched and mine not in self._skipped[0] and other not in self._skipped[1]:
                matched[mine] = (by_path[1][other], match.reason)
        pair_plain(self._trees[0], self._trees[1], matched)
        pair_containers(self._trees[0], self._trees[1], _held(matches), matched)
        pairs = tuple(
            self._pair(layer, *matched[layer.path], best) for layer in self._infos[0].layers if layer.path in matched
        )
        splits = tuple(_splits(matches, by_path, matched))
        parameters = [pair for match in matches for pair in self._parameters.of(match)]
        parameters = with_packed_biases(matches, with_summed_biases(matches, parameters))
        done = self._done(pairs, splits)
        left = self._left(parameters)
        return Alignment(
            pairs=pairs,
            reference_only=tuple(layer for layer in self._infos[0].layers if layer.path not in done[0]),
            candidate_only=tuple(layer for layer in self._infos[1].layers if layer.path not in done[1]),
            splits=splits,
            parameters=tuple(parameters),
            reference_parameters=left[0],
            candidate_parameters=left[1],
            doubts=tuple(self._parameters.doubts.values()),
            differ_inside=differing(
                self._infos, {(pair.reference.path, pair.candidate.path) for pair in pairs}, parameters, left
            ),
        )

    def _matches(self, linked: Linked) -> list[Match]:
        """The units that answer to each other, region by region of the given map."""
        found: list[Match] = []
        for entry in self._given:
            if not entry.one_to_one:
                found += _given_parts(entry, self._units, self._sides)
        layers = [_grouped(tree.layers, tree) for tree in self._trees]
        units = [_grouped(side, tree) for side, tree in zip(self._units, self._trees)]
        owned = [_grouped_by_path(side) for side in self._units]
        for number in sorted({-1, *layers[0], *layers[1], *range(len(self._both))}):
            forests = [
                forest(
                    layers[k].get(number, []), [u for u in units[k].get(number, []) if u.path not in self._skipped[k]]
                )
                for k in (0, 1)
            ]
            # What a given layer owns itself may, on the other side, stand in layers below its partner.
            own = [owned[k].get(_path(self._both[number], k), []) if number >= 0 else [] for k in (0, 1)]
            below = any(unit for side in forests for node in side for unit in node.below())
            if len(own[0]) == len(own[1]) == 1 and not below:
                a, b = own[0][0], own[1][0]
                found.append(Match((a,), (b,), 1.0, "given", unlike=a.signature != b.signature))
            elif below or all(own):
                region = Regions(self._sides, self._without, linked)
                region.run(forests[0], forests[1], (own[0], own[1]))
                found += region.matches
        return found

    def _pair(self, layer: Layer, partner: Layer, reason: str, best: Mapping[tuple[str, str], Match]) -> LayerPair:
        match = best.get((layer.path, partner.path))
        if reason == "given":
            return LayerPair(layer, partner, reason)
        if match is None:
            confidence = {"contents": 0.9, "execution": 0.85}.get(reason, 0.75)
            return LayerPair(layer, partner, reason, confidence)
        if reason != "kind" and layer.path == partner.path:
            reason = "path"
        alternatives = tuple(dict.fromkeys(unit.path for unit in match.rivals if unit.path != partner.path))
        return LayerPair(layer, partner, reason, match.confidence, match.evidence, alternatives)

    def _done(self, pairs: Sequence[LayerPair], splits: Sequence[SplitPair]) -> tuple[set[str], set[str]]:
        done = {pair.reference.path for pair in pairs}, {pair.candidate.path for pair in pairs}
        for split in splits:
            done[0].update(layer.path for layer in split.reference)
            done[1].update(layer.path for layer in split.candidate)
        return done

    def _left(self, parameters: Sequence[ParameterPair]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Parameters that answer to none, or not with all of their rows."""
        left = []
        for k, info in enumerate(self._infos):
            covered: dict[tuple[str, str], int] = defaultdict(int)
            homes = homes_of(info.layers)
            for pair in parameters:
                for part in pair.candidate if k else pair.reference:
                    rows = part.size[0] if part.size else 1
                    covered[homes.get((part.layer, part.slot), (part.layer, part.slot))] += rows
            left.append(
                tuple(
                    f"{layer.path}/{p.slot}"
                    for layer in info.layers
                    for p in layer.parameters
                    if p.role == "parameter" and not p.tied_to and p.slot not in ONE_SIDED
                    if not stands_for_none(layer, p)
                    if not covered[layer.path, p.slot]
                )
            )
        return left[0], left[1]


def _path(entry: Entry, side: int) -> str:
    return (entry.candidate if side else entry.reference)[0]


def _nodes(roots: Iterable[Node]) -> dict[str, Node]:
    found: dict[str, Node] = {}
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        found[node.path] = node
        waiting += node.children
    return found


def _grouped(items: Sequence[_T], tree: Tree) -> dict[int, list[_T]]:
    """Layers or units by the region that they are in."""
    groups: dict[int, list[_T]] = {}
    for item in items:
        groups.setdefault(tree.region[item.path], []).append(item)
    return groups


def _grouped_by_path(units: Sequence[Unit]) -> dict[str, list[Unit]]:
    groups: dict[str, list[Unit]] = {}
    for unit in units:
        groups.setdefault(unit.path, []).append(unit)
    return groups


def _given_parts(entry: Entry, units: tuple[Sequence[Unit], Sequence[Unit]], sides: tuple[Side, Side]) -> list[Match]:
    """The matches of a layer that a map gives to several, its parts in the order in which they are given.

    Raises:
        UsageError: what the parts own does not make up what the one owns.
    """
    owned = [
        [u for path in paths for u in side if u.path == path]
        for side, paths in zip(units, (entry.reference, entry.candidate))
    ]
    if not all(owned):
        return []
    same = [unit.signature for unit in owned[0]] == [unit.signature for unit in owned[1]]
    if same:  # the layers of a stacked recurrent layer, say
        return [Match((a,), (b,), 1.0, "given") for a, b in zip(*owned)]
    rows = [sum(u.matrix[0] if u.matrix else 0 for u in side) for side in owned]
    if 1 in map(len, owned) and rows[0] == rows[1]:
        return [Match(tuple(owned[0]), tuple(owned[1]), 1.0, "given", ("rows add up",))]
    region = Regions(sides)
    left = region.run([], [], (owned[0], owned[1]))
    if any(left):
        told = [f"{' + '.join(paths)} with {n} rows" for paths, n in zip((entry.reference, entry.candidate), rows)]
        raise UsageError(f"layer map: the parts do not make up the whole: {told[0]} against {told[1]}")
    return [replace(match, confidence=1.0, reason="given", rivals=()) for match in region.matches]


def _owner_pairs(
    matches: Sequence[Match], units: tuple[Sequence[Unit], Sequence[Unit]]
) -> dict[tuple[str, str], Match]:
    """Layers that hold nothing but what they own themselves, and whose units all answer to each other's."""
    pure = [_pure({unit.path for unit in side if not unit.optional or unit.tied or _buffers(unit)}) for side in units]
    partners: tuple[dict[str, set[str]], dict[str, set[str]]] = (defaultdict(set), defaultdict(set))
    best: dict[tuple[str, str], Match] = {}
    for match in matches:
        for a in match.ours:
            for b in match.theirs:
                partners[0][a.path].add(b.path)
                partners[1][b.path].add(a.path)
                known = best.get((a.path, b.path))
                if known is None or match.confidence < known.confidence:
                    best[a.path, b.path] = match
    return {
        (a, b): match
        for (a, b), match in best.items()
        if partners[0][a] == {b} and partners[1][b] == {a} and a in pure[0] and b in pure[1]
    }


def _buffers(unit: Unit) -> bool:
    """A layer of nothing but buffers that work like parameters: a frozen normalisation."""
    return len(unit.parameters) > 1


def _pure(paths: Collection[str]) -> set[str]:
    """Of the paths of owning layers, those with no other below them."""
    return set(paths) - {above for path in paths for above in containers_of(path)}


def _held(matches: Sequence[Match]) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
    """What each layer owns, as numbers that both sides share; a part of a whole has one of its own."""
    held: tuple[dict[str, set[int]], dict[str, set[int]]] = (defaultdict(set), defaultdict(set))
    number = 0
    for match in matches:
        if all(p.role == "buffer" for unit in match.ours for p in unit.parameters.values()) and not _buffers(
            match.ours[0]
        ):
            continue  # tables and masks lie anywhere
        parts = max(len(match.ours), len(match.theirs))
        for k, side in enumerate((match.ours, match.theirs)):
            for place, unit in enumerate(side):
                held[k][unit.path].update(range(number, number + parts) if len(side) == 1 else [number + place])
        number += parts
    return held


def _splits(matches: Sequence[Match], by_path: Sequence[Mapping[str, Layer]], matched: Matched) -> Iterable[SplitPair]:
    """Layers that answer to several, each with them in the order of its parts."""
    sides: tuple[dict[str, dict[str, _Place]], dict[str, dict[str, _Place]]] = (defaultdict(dict), defaultdict(dict))
    for match in matches:
        for i, a in enumerate(match.ours):
            for j, b in enumerate(match.theirs):
                for k, (one, other, place) in enumerate(((a, b, j), (b, a, i))):
                    known = sides[k][one.path].get(other.path)
                    here = (one.defined, place, match)
                    if known is None or here[:2] < known[:2]:
                        sides[k][one.path][other.path] = here
    partner_of = {path: layer.path for path, (layer, _) in matched.items()}
    for k, side in enumerate(sides):
        for path, others in side.items():
            several = sorted(others, key=lambda other, others=others: others[other][:2])  # type: ignore[misc]
            if len(several) < 2 or any(len(sides[1 - k][other]) > 1 for other in several):
                continue
            if any((partner_of.get(path if k == 0 else o) == (o if k == 0 else path)) for o in several):
                continue
            match = others[several[0]][2]
            single, parts = (by_path[k][path],), tuple(by_path[1 - k][other] for other in several)
            ours, theirs = (parts, single) if k else (single, parts)
            yield SplitPair(ours, theirs, match.reason, match.confidence, match.evidence)
