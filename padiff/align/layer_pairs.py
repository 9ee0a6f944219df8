"""Pairs of layers, computed from the matches of their units."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import product

from padiff.align.alignment import SplitPair
from padiff.align.matching.matches import Match
from padiff.align.matching.parameter_units import Unit, containers_of
from padiff.records import Both, Layer

#: Position of a partner in a layer's own order: the layer's unit, the part of the unit, and the match of both.
_Place = tuple[int, int, Match]


def owner_pairs(matches: Sequence[Match], units: Both[list[Unit]]) -> dict[Both[str], Match]:
    """Return pairs of layers that own parameters, have no owning layers below them, and match in all of their units.

    Returns:
        The match with the lowest confidence, by the paths of the pair.
    """
    pure = units.map(lambda side: _pure({u.path for u in side if not u.optional or u.tied or _buffers(u)}))
    partners: Both[dict[str, set[str]]] = Both(defaultdict(set), defaultdict(set))
    best: dict[Both[str], Match] = {}
    for match in matches:
        for a, b in product(*match):
            pair = Both(a.path, b.path)
            partners.reference[a.path].add(b.path)
            partners.candidate[b.path].add(a.path)
            if pair not in best or match.confidence < best[pair].confidence:
                best[pair] = match
    return {
        pair: match
        for pair, match in best.items()
        if all(path in paths for path, paths in zip(pair, pure))
        if all(len(partner_paths[path]) == 1 for path, partner_paths in zip(pair, partners))
    }


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
