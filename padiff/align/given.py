"""A given layer map: its entries by the layers' own paths, and the regions that it makes of the two trees."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from padiff.align.matching.units import inside
from padiff.errors import UsageError
from padiff.model.given_map import GivenMap, LayerRef
from padiff.model.selection import nearest
from padiff.records import Layer, RunInfo

_SIDES = ("reference", "candidate")


@dataclass(frozen=True)
class Entry:
    """An entry of a map: paths of either side; none of a side means that the other answers to nothing."""

    reference: tuple[str, ...]
    candidate: tuple[str, ...]

    @property
    def one_to_one(self) -> bool:
        return len(self.reference) == len(self.candidate) == 1


def entries(reference: RunInfo, candidate: RunInfo, layer_map: GivenMap) -> list[Entry]:
    """The given entries, and besides them the runs' own ``layer_map`` lists, which answer to each other in order.

    Raises:
        UsageError: the map names an unknown layer, or a layer twice, or the runs' own lists are of unequal length.
    """
    lists = (reference.layer_map, candidate.layer_map)
    if len(lists[0]) != len(lists[1]):
        raise UsageError(
            f"the layer maps that the two runs were recorded with answer to each other in order, but the "
            f"reference's has {len(lists[0])} layers and the candidate's {len(lists[1])}"
        )
    given = _named(layer_map, reference, candidate)
    recorded = _named(zip(*lists, strict=True), reference, candidate)
    taken = {path for entry in given for path in entry.reference}, {path for entry in given for path in entry.candidate}
    return given + [e for e in recorded if not taken[0] & set(e.reference) and not taken[1] & set(e.candidate)]


def _named(pairs: Iterable[tuple[LayerRef, LayerRef]], reference: RunInfo, candidate: RunInfo) -> list[Entry]:
    """The pairs as entries, every alias replaced by the layer's own path."""
    sides: list[list[tuple[str, ...]]] = []
    pairs = list(pairs)
    for index, info in enumerate((reference, candidate)):
        names = {path: layer.path for layer in info.layers for path in (layer.path, *layer.aliases)}
        seen: set[str] = set()
        column = []
        for pair in pairs:
            item = pair[index]
            paths = () if item is None else item if isinstance(item, tuple) else (item,)
            for path in paths:
                _check(path, names, seen, _SIDES[index])
                seen.add(names[path])
            column.append(tuple(names[path] for path in paths))
        sides.append(column)
    return [Entry(a, b) for a, b in zip(*sides)]


def _check(path: object, names: dict[str, str], seen: Collection[str], side: str) -> None:
    if not isinstance(path, str):
        raise UsageError(f"layer map: {path!r} is no path: recorded runs know their layers by path")
    if path not in names:
        raise UsageError(f"layer map: the {side} has no layer {path!r}. {nearest(path, names)}")
    if names[path] in seen:
        raise UsageError(
            f"layer map: the {side}'s layer {path!r} is given twice; a layer has one partner (several are given as a "
            "list, in the order of its parts)"
        )


def regions(layers: Sequence[Layer], given: Sequence[str]) -> dict[str, int]:
    """For each layer, the innermost given layer that it is inside of (its position), -1 for the rest."""
    found: dict[str, int] = {}
    above: list[tuple[str, int]] = []
    positions = {path: position for position, path in enumerate(given)}
    for layer in layers:
        while above and not inside(layer.path, above[-1][0]):
            above.pop()
        found[layer.path] = above[-1][1] if above else -1
        if layer.path in positions:
            above.append((layer.path, positions[layer.path]))
    return found
