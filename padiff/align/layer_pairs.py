"""Which layers answer to each other, given the units that do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import product

from padiff.align.alignment import SplitPair
from padiff.align.matching.matches import Match
from padiff.align.matching.parameter_units import Unit, containers_of
from padiff.records import Both, Layer

#: Where in a layer's own order another answers to it: its unit, the part of it, and the match that says so.
_Place = tuple[int, int, Match]


def owner_pairs(matches: Sequence[Match], units: Both[list[Unit]]) -> dict[Both[str], Match]:
    """Layers that hold nothing but what they own themselves, and whose units all answer to each other's."""
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
        if all(len(known[path]) == 1 for path, known in zip(pair, partners))
    }


def _buffers(unit: Unit) -> bool:
    """A layer of nothing but buffers that work like parameters: a frozen normalisation."""
    return len(unit.parameters) > 1


def _pure(paths: Collection[str]) -> set[str]:
    """Of the paths of owning layers, those with no other below them."""
    return set(paths) - {above for path in paths for above in containers_of(path)}


def held(matches: Sequence[Match]) -> Both[dict[str, set[int]]]:
    """What each layer owns, as numbers that both sides share; a part of a whole has one of its own."""
    found: Both[dict[str, set[int]]] = Both(defaultdict(set), defaultdict(set))
    number = 0
    for match in matches:
        buffers = all(p.role == "buffer" for unit in match.reference for p in unit.parameters.values())
        if buffers and not _buffers(match.reference[0]):
            continue  # tables and masks lie anywhere
        parts = max(match.map(len))
        for numbers, units in zip(found, match):
            for place, unit in enumerate(units):
                numbers[unit.path].update(range(number, number + parts) if len(units) == 1 else [number + place])
        number += parts
    return found


def splits(
    matches: Sequence[Match], layers: Both[dict[str, Layer]], paired: Collection[Both[str]]
) -> Iterator[SplitPair]:
    """Layers that answer to several, each with them in the order of its parts.

    Args:
        layers: all of them, by path.
        paired: paths of those that answer to each other one to one.
    """
    places: Both[dict[str, dict[str, _Place]]] = Both(defaultdict(dict), defaultdict(dict))
    for match in matches:
        for (i, a), (j, b) in product(*match.map(enumerate)):
            for side, one, other, place in ((places.reference, a, b, j), (places.candidate, b, a, i)):
                here = one.defined, place, match
                if other.path not in side[one.path] or here[:2] < side[one.path][other.path][:2]:
                    side[one.path][other.path] = here
    for swapped in (False, True):
        wholes, parts = places.swapped(swapped)
        whole_layers, part_layers = layers.swapped(swapped)
        for path, known in wholes.items():
            several = sorted(known, key=lambda part, known=known: known[part][:2])  # type: ignore[misc]
            pairs = {Both(path, part).swapped(swapped) for part in several}
            if len(several) < 2 or any(len(parts[part]) > 1 for part in several) or not pairs.isdisjoint(paired):
                continue
            match = known[several[0]][2]
            split = Both((whole_layers[path],), tuple(part_layers[part] for part in several)).swapped(swapped)
            yield SplitPair(split.reference, split.candidate, match.reason, match.confidence, match.evidence)
