"""Layer map with its entries by the layers' own paths, and the regions into which the map divides the two trees."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain

from padiff.align.matching.parameter_units import inside
from padiff.errors import UsageError
from padiff.model.given_map import GivenMap
from padiff.records import SIDES, Both, Layer, RunInfo, unzipped
from padiff.system.spelling import nearest


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
