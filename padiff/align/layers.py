"""Pairing the layers of two trees: by a given map, by path, by order of definition."""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from padiff import equivalents
from padiff.errors import UsageError
from padiff.layer_map import LayerMap
from padiff.records import ROOT, Layer, RunInfo, inner_path
from padiff.selection import nearest

# Above this many cells the table of the best common order is not worked out; the longest common runs are used.
_MOST_CELLS = 4_000_000


@dataclass(frozen=True, slots=True)
class LayerPair:
    """Two layers that answer to each other, and why: ``given``, ``path``, ``order`` or ``contents``."""

    reference: Layer
    candidate: Layer
    reason: str


@dataclass(frozen=True)
class Alignment:
    """The layer pairs of two runs, in the reference's order of definition, and what has no partner."""

    pairs: tuple[LayerPair, ...]
    reference_only: tuple[Layer, ...] = ()
    candidate_only: tuple[Layer, ...] = ()


def align(
    reference: RunInfo,
    candidate: RunInfo,
    layer_map: LayerMap | Mapping[Any, Any] | Iterable[Any] | str | None = None,
    called: tuple[Collection[str], Collection[str]] = ((), ()),
    whole: Collection[tuple[str, str]] = (),
) -> Alignment:
    """Pair the layers of two runs.

    A given map wins; the rest is found around it. Layers that own parameters, and leaves of the tree, are paired in
    order of definition where kind and shapes allow it, so that layers may be named and nested differently; the layers
    above them follow from what they contain. Where the paths of the two trees are the same, they decide.

    Args:
        layer_map: what `LayerMap.of` takes; besides it, the runs' own ``layer_map`` lists answer to each other,
            in order.
        called: paths of the layers that were called in each run. A wrapper that was never called (a
            LightningModule) is then not paired in place of the model inside it.
        whole: class names (reference's, candidate's) of layers that answer to each other as a whole, whatever they
            hold: those that a rule of the user's is about.

    Raises:
        UsageError: the map names an unknown layer, or a layer twice, or the runs' own lists are of unequal length.
    """
    given = _given(reference, candidate, LayerMap.of(layer_map))
    matched: dict[str, tuple[Layer, str]] = {}
    by_path = {layer.path: layer for layer in candidate.layers}
    taken = {theirs for _, theirs in given if theirs is not None}
    excluded = {ours for ours, _ in given if ours is not None}
    for ours, theirs in given:
        if ours is not None and theirs is not None:
            matched[ours] = (by_path[theirs], "given")
    both = [(ours, theirs) for ours, theirs in given if ours is not None and theirs is not None]
    left = _by_given(reference.layers, [ours for ours, _ in both], excluded)
    right = _by_given(candidate.layers, [theirs for _, theirs in both], taken)
    # What is inside of a given pair is paired with what is inside of its partner, the rest with the rest.
    for group in sorted(left.keys() & right.keys()):
        around = (both[group][0], both[group][1]) if group >= 0 else None
        if around is not None and _is_composite(around, reference, candidate):
            ends = (_by_path(reference.layers, around[0]), _by_path(candidate.layers, around[1]))
            contents = _pair_inside(*ends, left[group], right[group])
        else:
            contents = _pair_contents(left[group], right[group], whole)
        for ours_layer, theirs_layer, reason in contents:
            matched[ours_layer.path] = (theirs_layer, reason)
    _pair_containers(reference.layers, candidate.layers, excluded, taken, matched, called)
    pairs = tuple(LayerPair(layer, *matched[layer.path]) for layer in reference.layers if layer.path in matched)
    partners = {pair.candidate.path for pair in pairs}
    return Alignment(
        pairs=pairs,
        reference_only=tuple(layer for layer in reference.layers if layer.path not in matched),
        candidate_only=tuple(layer for layer in candidate.layers if layer.path not in partners),
    )


def _is_composite(pair: tuple[str, str], reference: RunInfo, candidate: RunInfo) -> bool:
    ends = _by_path(reference.layers, pair[0]), _by_path(candidate.layers, pair[1])
    return all(equivalents.kind(layer) in equivalents.COMPOSITE for layer in ends)


def _by_path(layers: Sequence[Layer], path: str) -> Layer:
    return next(layer for layer in layers if layer.path == path)


def _given(reference: RunInfo, candidate: RunInfo, layer_map: LayerMap) -> list[tuple[str | None, str | None]]:
    lists = (reference.layer_map, candidate.layer_map)
    if len(lists[0]) != len(lists[1]):
        raise UsageError(
            f"the layer maps that the two runs were recorded with answer to each other in order, but the "
            f"reference's has {len(lists[0])} layers and the candidate's {len(lists[1])}"
        )
    given = _named(layer_map, reference, candidate)
    recorded = _named(zip(*lists, strict=True), reference, candidate)
    ours, theirs = ({pair[index] for pair in given} for index in (0, 1))
    return given + [pair for pair in recorded if pair[0] not in ours and pair[1] not in theirs]


def _named(
    pairs: Iterable[tuple[str | None, str | None]], reference: RunInfo, candidate: RunInfo
) -> list[tuple[str | None, str | None]]:
    """The pairs with every alias replaced by the layer's own path."""
    found = list(pairs)
    sides: list[tuple[str, tuple[Layer, ...], int]] = [
        ("reference", reference.layers, 0),
        ("candidate", candidate.layers, 1),
    ]
    for side, layers, index in sides:
        names = {path: layer.path for layer in layers for path in (layer.path, *layer.aliases)}
        seen: set[str] = set()
        for position, pair in enumerate(found):
            path = pair[index]
            if path is None:
                continue
            if not isinstance(path, str):
                raise UsageError(f"layer map: {path!r} is no path: recorded runs know their layers by path")
            if path not in names:
                raise UsageError(f"layer map: the {side} has no layer {path!r}. {nearest(path, names)}")
            if names[path] in seen:
                raise UsageError(f"layer map: the {side}'s layer {path!r} is given twice; a layer has one partner")
            seen.add(names[path])
            fixed = list(pair)
            fixed[index] = names[path]
            found[position] = (fixed[0], fixed[1])
    return found


def _by_given(layers: Sequence[Layer], given: Sequence[str], skipped: set[str]) -> dict[int, list[Layer]]:
    """Layers by the innermost given layer that they are inside of (its position), -1 for the rest."""
    groups: dict[int, list[Layer]] = {}
    above: list[tuple[Layer, int]] = []
    positions = {path: position for position, path in enumerate(given)}
    for layer in layers:
        while above and not _contains(above[-1][0], layer):
            above.pop()
        if layer.path not in skipped:
            groups.setdefault(above[-1][1] if above else -1, []).append(layer)
        if layer.path in positions:
            above.append((layer, positions[layer.path]))
    return groups


# -- layers that own parameters, and leaves ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Unit:
    """A layer that is paired by what it is: it owns parameters, is a leaf, or is composite."""

    layer: Layer
    kind: str
    signature: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def name(self) -> str:
        return self.layer.path.rsplit(".", 1)[-1]


def _units(layers: Sequence[Layer], ruled: Mapping[str, str]) -> list[_Unit]:
    units: list[_Unit] = []
    composite: Layer | None = None  # the one that we are inside of
    for layer in layers:
        if composite is not None and _contains(composite, layer):
            continue
        composite = None
        kind = equivalents.kind(layer)
        if layer.type in ruled:
            composite = layer
            # Any two of these go together, whatever they own.
            units.append(_Unit(layer, ruled[layer.type], ((ruled[layer.type], ()),)))
        elif kind in equivalents.COMPOSITE:
            composite = layer
            inside = (x for x in layers if x is layer or _contains(layer, x))
            elements = sum(math.prod(p.shape) for x in inside for p in x.parameters)
            units.append(_Unit(layer, kind, (("elements", (elements,)),)))
        elif layer.parameters or not layer.children:
            units.append(_Unit(layer, kind, equivalents.signature(layer)))
    return units


def _alike(ours: _Unit, theirs: _Unit) -> int:
    """How well two layers go together; 0 means not at all."""
    same_kind = ours.kind == theirs.kind
    if not ours.signature and not theirs.signature:
        if same_kind:
            return 4
        # Two activations at one place, of which one is wrong, are to be shown there.
        return 2 if ours.name == theirs.name or equivalents.same_family(ours.kind, theirs.kind) else 0
    shapes_agree = sorted(shape for _, shape in ours.signature) == sorted(shape for _, shape in theirs.signature)
    if shapes_agree and (same_kind or ours.signature == theirs.signature):
        return 20
    # The same kind with other shapes is the place where the models differ: paired, so that it is shown there.
    return 6 if same_kind and ours.signature and theirs.signature else 0


def _pair_contents(
    left: Sequence[Layer], right: Sequence[Layer], whole: Collection[tuple[str, str]] = ()
) -> list[tuple[Layer, Layer, str]]:
    ours = _units(left, {mine: f"{mine}/{other}" for mine, other in whole})
    theirs = _units(right, {other: f"{mine}/{other}" for mine, other in whole})
    found: list[tuple[_Unit, _Unit, str]] = []
    by_path = {unit.layer.path: unit for unit in theirs}
    if {u.layer.path for u in ours if u.signature} == {u.layer.path for u in theirs if u.signature}:
        found = [(unit, by_path[unit.layer.path], "path") for unit in ours if unit.layer.path in by_path]
        found = found if all(_alike(a, b) for a, b, _ in found) else []
    if found:
        done = {a.layer.path for a, _, _ in found}
        rest = _in_order([x for x in ours if x.layer.path not in done], [x for x in theirs if x.layer.path not in done])
        found += [(a, b, "order") for a, b in rest if not a.signature]
    else:
        found = [(a, b, "order") for a, b in _in_order(ours, theirs)]
        found += [(a, b, "order") for a, b in _out_of_order(ours, theirs, found)]
    pairs = [(a.layer, b.layer, reason) for a, b, reason in found]
    for a, b, _ in found:
        if a.kind in equivalents.COMPOSITE:
            pairs += _pair_inside(a.layer, b.layer, left, right)
    return pairs


def _out_of_order(
    ours: Sequence[_Unit], theirs: Sequence[_Unit], found: Sequence[tuple[_Unit, _Unit, str]]
) -> list[tuple[_Unit, _Unit]]:
    """What is left because it is defined elsewhere: paired among itself, where either side has as many of its make."""
    done = {id(a) for a, _, _ in found} | {id(b) for _, b, _ in found}
    left = [[unit for unit in side if id(unit) not in done and unit.signature] for side in (ours, theirs)]
    counts = [Counter((unit.kind, unit.signature) for unit in side) for side in left]
    kept = [[u for u in side if counts[0][u.kind, u.signature] == counts[1][u.kind, u.signature]] for side in left]
    return [(a, b) for a, b in _in_order(kept[0], kept[1]) if _sure(a, b)]


def _pair_inside(
    ours: Layer, theirs: Layer, left: Sequence[Layer], right: Sequence[Layer]
) -> list[tuple[Layer, Layer, str]]:
    """Layers of the same name and make inside two composite layers; the order inside means nothing."""
    inside = {inner_path(layer.path, theirs.path): layer for layer in right if _contains(theirs, layer)}
    pairs = []
    for layer in left:
        partner = inside.get(inner_path(layer.path, ours.path)) if _contains(ours, layer) else None
        if partner is not None and equivalents.signature(layer) == equivalents.signature(partner):
            pairs.append((layer, partner, "path"))
    return pairs


def _in_order(ours: Sequence[_Unit], theirs: Sequence[_Unit]) -> list[tuple[_Unit, _Unit]]:
    """The best pairing that keeps both orders of definition: equal ends first, a table for what is between."""
    pairs: list[tuple[_Unit, _Unit]] = []
    start = 0
    while start < min(len(ours), len(theirs)) and _sure(ours[start], theirs[start]):
        pairs.append((ours[start], theirs[start]))
        start += 1
    end = 0
    while end < min(len(ours), len(theirs)) - start and _sure(ours[-1 - end], theirs[-1 - end]):
        end += 1
    tail = [(ours[len(ours) - k], theirs[len(theirs) - k]) for k in range(end, 0, -1)]
    middle = ours[start : len(ours) - end], theirs[start : len(theirs) - end]
    if len(middle[0]) * len(middle[1]) > _MOST_CELLS:
        return pairs + _common_runs(*middle) + tail
    return pairs + _table(*middle) + tail


def _sure(ours: _Unit, theirs: _Unit) -> bool:
    return _alike(ours, theirs) in (4, 20)


def _table(ours: Sequence[_Unit], theirs: Sequence[_Unit]) -> list[tuple[_Unit, _Unit]]:
    """Needleman and Wunsch's global alignment, with no cost for a gap."""
    rows, columns = len(ours), len(theirs)
    best = [[0] * (columns + 1) for _ in range(rows + 1)]
    alike = [[_score(a, b) for b in theirs] for a in ours]
    for i in range(rows - 1, -1, -1):
        for j in range(columns - 1, -1, -1):
            take = alike[i][j] + best[i + 1][j + 1] if alike[i][j] else 0
            best[i][j] = max(take, best[i + 1][j], best[i][j + 1])
    pairs, i, j = [], 0, 0
    while i < rows and j < columns:
        if alike[i][j] and best[i][j] == alike[i][j] + best[i + 1][j + 1]:
            pairs.append((ours[i], theirs[j]))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


def _score(ours: _Unit, theirs: _Unit) -> int:
    alike = _alike(ours, theirs)
    return alike + (1 if alike and ours.name == theirs.name else 0)


def _common_runs(ours: Sequence[_Unit], theirs: Sequence[_Unit]) -> list[tuple[_Unit, _Unit]]:
    keys = [[(unit.kind, unit.signature) for unit in side] for side in (ours, theirs)]
    blocks = difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=False).get_matching_blocks()
    return [(ours[a + k], theirs[b + k]) for a, b, size in blocks for k in range(size)]


# -- the layers above them --------------------------------------------------------------------------------------


def _pair_containers(
    ours: Sequence[Layer],
    theirs: Sequence[Layer],
    excluded: set[str],
    taken: set[str],
    matched: dict[str, tuple[Layer, str]],
    called: tuple[Collection[str], Collection[str]],
) -> None:
    """Pair layers that contain the same pairs. Wrappers around the same contents are paired from the outside in."""
    partner_of = {path: layer.path for path, (layer, _) in matched.items()}
    mine = _by_contents(ours, partner_of, excluded)
    other = _by_contents(theirs, {path: path for path in partner_of.values()}, taken)
    for contents, chain in mine.items():
        counterpart = other.get(contents, [])
        for a, b in zip(_prefer(chain, called[0]), _prefer(counterpart, called[1]), strict=False):
            matched[a.path] = (b, "contents")


def _prefer(chain: list[Layer], called: Collection[str]) -> list[Layer]:
    return [layer for layer in chain if layer.path in called] or chain


def _by_contents(
    layers: Sequence[Layer],
    images: Mapping[str, str],
    skipped: set[str],
) -> dict[frozenset[str], list[Layer]]:
    """Unpaired layers by what is paired inside of them (as the candidate's paths), outer layers first."""
    inside: dict[str, set[str]] = {}
    above: list[Layer] = []
    for layer in layers:
        while above and not _contains(above[-1], layer):
            above.pop()
        if layer.path in images:
            for container in above:
                inside.setdefault(container.path, set()).add(images[layer.path])
        above.append(layer)
    grouped: dict[frozenset[str], list[Layer]] = {}
    for layer in layers:
        if layer.path not in images and layer.path not in skipped and inside.get(layer.path):
            grouped.setdefault(frozenset(inside[layer.path]), []).append(layer)
    return grouped


def _contains(above: Layer, layer: Layer) -> bool:
    return layer.path != ROOT and (above.path == ROOT or layer.path.startswith(f"{above.path}."))
