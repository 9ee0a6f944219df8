"""Pairs of layers without trainable parameters, and units that hold the same values in any order."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from padiff.align.matching.parameter_units import Unit, inside
from padiff.align.slices import RuntimeEvidence, Values
from padiff.model import equivalents
from padiff.records import Both, Layer
from padiff.sketches.sketch import Sketch

# Most wrappers around the same contents whose pairs are chosen by kind.
_DEEPEST = 6
#: Partner and reason, by the path of the reference's layer.
Matched = dict[str, tuple[Layer, str]]


@dataclass(frozen=True)
class Tree:
    """One model's layers, the layers excluded from pairing, and observations from running the model."""

    layers: Sequence[Layer]
    skipped: Collection[str]
    seen: RuntimeEvidence
    #: The region of a given map that contains a layer, by path.
    region: Mapping[str, int]


def pair_leaves(trees: Both[Tree], matched: Matched) -> None:
    """Pair leaves without parameters, or with tables only, that follow the same layer, in order, by kind.

    The order is that of execution if both models were run, else that of definition.
    """
    partner_of = {path: layer.path for path, (layer, _) in matched.items()}
    called = trees.map(lambda tree: tree.seen.order)
    ran = all(called)
    if ran:
        # torch's attention, for example, uses its output projection without calling it: no layer follows that one.
        partner_of = {a: b for a, b in partner_of.items() if a in called.reference and b in called.candidate}
    followers = _followers(trees.reference, set(partner_of), ran)
    others = _followers(trees.candidate, set(partner_of.values()), ran)
    for (region, before), leaves in followers.items():
        for a, b in _in_order(leaves, others.get((region, partner_of.get(before, before)), [])):
            matched[a.path] = (b, "execution" if ran else "order")
    unpaired = [
        {layer.path: layer for leaves in side.values() for layer in leaves if layer.path not in paired}
        for side, paired in ((followers, matched), (others, {layer.path for layer, _ in matched.values()}))
    ]
    for path, layer in unpaired[0].items():
        partner = unpaired[1].get(path)
        if partner is not None and _is_one_place(layer, partner, trees):
            matched[path] = (partner, "path")


def _is_one_place(reference: Layer, candidate: Layer, trees: Both[Tree]) -> bool:
    """Return True if two leaves at one path, of similar kind, have outputs of the same shape.

    Such leaves may follow different layers: one model may call an independent layer before them.
    """
    regions = trees.map(lambda tree: tree.region.get(reference.path, -1))
    shapes = trees.map(lambda tree: tree.seen.outputs.get(reference.path))
    return (
        regions.reference == regions.candidate
        and shapes.reference == shapes.candidate
        and equivalents.like_kinds(equivalents.kind(reference), equivalents.kind(candidate))
    )


def _followers(tree: Tree, anchors: Collection[str], ran: bool) -> dict[tuple[int, str], list[Layer]]:
    """Return unpaired leaves without parameters, by the paired layer before them (empty: before all paired layers).

    Leaves with buffers only are included. Their buffers are no evidence for a pair, as tables and masks may be in any
    layer; so rotary embeddings, for example, are paired by their position.
    """
    containers = {layer.path for layer in tree.layers if layer.children}
    line = [layer for layer in tree.layers if layer.path not in containers]
    if ran:
        line = sorted(line, key=lambda layer: tree.seen.order.get(layer.path, math.inf))
    followers: dict[tuple[int, str], list[Layer]] = {}
    before = ""
    for layer in line:
        if ran and layer.path not in tree.seen.order:
            before = "(not called)"
        if layer.path in anchors:
            before = layer.path if before != "(not called)" else before
        elif all(p.role == "buffer" for p in layer.parameters) and layer.path not in tree.skipped:
            followers.setdefault((tree.region.get(layer.path, -1), before), []).append(layer)
    return followers


def _in_order(reference: Sequence[Layer], candidate: Sequence[Layer]) -> list[tuple[Layer, Layer]]:
    """Return the pairs of Needleman and Wunsch's global alignment of a few leaves, with no cost for a gap."""
    rows, columns = len(reference), len(candidate)
    if rows * columns > 1_000_000:  # thousands of activations in a row
        return [(a, b) for a, b in zip(reference, candidate) if _alike(a, b)]
    alike = [[_alike(a, b) for b in candidate] for a in reference]
    best = [[0] * (columns + 1) for _ in range(rows + 1)]
    for i in range(rows - 1, -1, -1):
        for j in range(columns - 1, -1, -1):
            take = alike[i][j] + best[i + 1][j + 1] if alike[i][j] else 0
            best[i][j] = max(take, best[i + 1][j], best[i][j + 1])
    pairs, i, j = [], 0, 0
    while i < rows and j < columns:
        if alike[i][j] and best[i][j] == alike[i][j] + best[i + 1][j + 1]:
            pairs.append((reference[i], candidate[j]))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


def _alike(reference: Layer, candidate: Layer) -> int:
    kinds = equivalents.kind(reference), equivalents.kind(candidate)
    same_name = reference.path.rpartition(".")[2] == candidate.path.rpartition(".")[2]
    if kinds[0] == kinds[1]:
        return 5 if same_name else 4
    # Two different activations at one place are paired, so that the wrong one is shown there.
    return 2 if same_name or equivalents.same_family(*kinds) else 0


def pair_containers(trees: Both[Tree], held: Both[dict[str, set[int]]], matched: Matched) -> None:
    """Pair layers with the same contents. Wrappers around the same contents are paired from the outside in; where one
    side has more of them, those of one kind are paired first.

    Args:
        held: direct contents of the layers, as numbers that both sides share.
    """
    shared: Both[dict[str, int]] = Both({}, {})
    for number, (path, (layer, _)) in enumerate(matched.items()):
        shared.reference[path] = shared.candidate[layer.path] = -1 - number
    contents = Both(*(_by_contents(*side) for side in zip(trees, held, shared)))
    for numbers, chain in contents.reference.items():
        for a, b in _wrapper_pairs(chain, contents.candidate.get(numbers, [])):
            if _may_be_one(a, b):
                matched[a.path] = (b, "contents")


def _wrapper_pairs(chain: list[Layer], others: list[Layer]) -> list[tuple[Layer, Layer]]:
    """Return pairs of wrappers around the same contents, in order, with as many pairs of one kind as possible."""
    if len(chain) == len(others) or not others or len(max(chain, others, key=len)) > _DEEPEST:
        return list(zip(chain, others))
    count = min(len(chain), len(others))
    ways = [
        list(zip(some, rest)) for some in combinations(chain, count) for rest in combinations(others, count)
    ]  # the outermost layers come first
    return max(ways, key=lambda way: sum(equivalents.kind(a) == equivalents.kind(b) for a, b in way))


def _may_be_one(reference: Layer, candidate: Layer) -> bool:
    """Return True if two layers with the same contents may have the same outputs.

    A layer that is one matrix and a container of its parts have different outputs, unless one of them is a composite
    layer.
    """
    return bool(reference.children) == bool(candidate.children) or any(
        equivalents.is_composite(equivalents.kind(layer)) for layer in (reference, candidate)
    )


def _prefer(chain: list[Layer], evidence: RuntimeEvidence) -> list[Layer]:
    """Return the layers that were called, or all if none was: a wrapper that is never called has no outputs to
    compare.
    """
    return [layer for layer in chain if layer.path in evidence.order] or chain


def _by_contents(
    tree: Tree, contents_by_path: Mapping[str, Collection[int]], paired: Mapping[str, int]
) -> dict[frozenset[int], list[Layer]]:
    """Return unpaired layers by their contents, outer layers first."""
    contents: dict[str, set[int]] = {}
    above: list[Layer] = []
    for layer in tree.layers:
        while above and not inside(layer.path, above[-1].path):
            above.pop()
        direct = set(contents_by_path.get(layer.path, ()))
        if layer.path in paired:
            direct.add(paired[layer.path])
        contents.setdefault(layer.path, set()).update(direct)
        for container in above:
            contents[container.path] |= direct
        above.append(layer)
    grouped: dict[frozenset[int], list[Layer]] = {}
    for layer in tree.layers:
        if layer.path not in paired and layer.path not in tree.skipped and contents[layer.path]:
            grouped.setdefault(frozenset(contents[layer.path]), []).append(layer)
    return {numbers: _prefer(chain, tree.seen) for numbers, chain in grouped.items()}


#: Sum, sum of squares, minimum and maximum.
_Print = tuple[float, float, float, float]

# Number of elements per pass, which fit a core's own cache, and number of elements per product, for which numpy starts
# no threads.
_CHUNK = 1 << 16
_PIECE = 1 << 13

# Number of float32 elements that are summed in float32: few enough that the rounding error of a sum is far below the
# tolerance of fingerprints. A sum of squares is accurate between the two bounds.
_NARROW = 2048
_ONES = np.ones((_NARROW, 1), np.float32)
_ONES.setflags(write=False)
_SMALL, _LARGE = 1e-24, 1e30

# Share of fingerprints that must occur on both sides for the models to count as started from the same weights.
_MOST = 0.5


def value_numbers(units: Both[list[Unit]], values: Both[Values | None]) -> Both[dict[Unit, int]]:
    """Return a number for each unit whose weight is not constant; equal values have the same number on both sides.

    Both maps are empty if less than half of the weights occur on the other side: the models then start from different
    weights, and values are no evidence.
    """
    nothing: Both[dict[Unit, int]] = Both({}, {})
    prints = Both(*(_prints(side, read) if read is not None else {} for side, read in zip(units, values)))
    if not all(prints):
        return nothing
    sorted_prints = sorted((fingerprint, unit.defined, unit) for unit, fingerprint in prints.reference.items())
    table = np.array([fingerprint for fingerprint, _, _ in sorted_prints])
    numbers: Both[dict[Unit, int]] = Both({}, {})
    again = [False, *_equal(table[1:], table[:-1]).tolist()]
    for k, (_, _, unit) in enumerate(sorted_prints):
        numbers.reference[unit] = numbers.reference[sorted_prints[k - 1][2]] if again[k] else k
    others = np.array(list(prints.candidate.values()))
    # The table is sorted by the sum, so that only near neighbours can be equal.
    slack = 1e-3 * np.sqrt(others[:, 1]) + 1e-12
    near = [np.searchsorted(table[:, 0], others[:, 0] + off).tolist() for off in (-slack, slack)]
    matched = 0
    for number, (unit, row, low, high) in enumerate(zip(prints.candidate, others, *near)):
        equal = np.flatnonzero(_equal(table[low:high], row))
        matched += bool(equal.size)
        number = numbers.reference[sorted_prints[low + equal[0]][2]] if equal.size else len(sorted_prints) + number
        numbers.candidate[unit] = number
    return numbers if matched >= _MOST * min(prints.map(len)) else nothing


def _prints(units: Sequence[Unit], values: Values) -> dict[Unit, _Print]:
    prints = {}
    for unit in units:
        weight = unit.parameters.get("weight")
        fingerprint = _fingerprint(values(unit.path, weight.slot)) if weight is not None else None
        if fingerprint is not None:
            prints[unit] = fingerprint
    return prints


def _fingerprint(values: np.ndarray | Sketch | None) -> _Print | None:
    """Return figures that do not depend on the order of the values; `None` for constants and values that are not
    finite.
    """
    if isinstance(values, Sketch):
        if values.size < 2 or values.minimum == values.maximum:
            return None
        return values.mean * values.size, values.mean_square * values.size, values.minimum, values.maximum
    if values is None or values.size < 2 or values.dtype.kind not in "fV":
        return None
    total = squares = 0.0
    least, largest = np.inf, -np.inf
    flat, room = values.reshape(-1), np.empty(min(values.size, _CHUNK))
    # In one pass, so that a large weight is read from memory once.
    for start in range(0, flat.size, _CHUNK):
        piece = flat[start : start + _CHUNK]
        sums = _narrow_sums(piece) if piece.dtype == np.float32 and piece.size == _CHUNK else None
        if sums is None:
            wide = room[: piece.size]
            wide[...] = piece
            sums = (
                float(np.add.reduce(wide)),
                sum(float(np.dot(wide[k : k + _PIECE], wide[k : k + _PIECE])) for k in range(0, len(wide), _PIECE)),
            )
            piece = wide
        total, squares = total + sums[0], squares + sums[1]
        if not np.isfinite(squares):
            return None
        least, largest = min(least, float(np.minimum.reduce(piece))), max(largest, float(np.maximum.reduce(piece)))
    return None if least == largest else (total, squares, least, largest)


def _narrow_sums(values: np.ndarray) -> tuple[float, float] | None:
    """Return sum and sum of squares of float32 in a third of the time; `None` if float32 does not hold the squares."""
    rows = values.reshape(-1, 1, _NARROW)
    # Products of rows, for which numpy starts no threads.
    with np.errstate(all="ignore"):
        squares = float(np.add.reduce(np.matmul(rows, values.reshape(-1, _NARROW, 1)), axis=None, dtype=np.float64))
        if not _SMALL < squares < _LARGE:
            return None
        return float(np.add.reduce(np.matmul(rows, _ONES), axis=None, dtype=np.float64)), squares


def _equal(prints: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return a mask of the fingerprints that equal `others` (one fingerprint, or one for each) up to rounding."""
    # A sum of values that nearly cancel is accurate only relative to their norm.
    scale = np.abs(others)
    scale[..., 0] = np.sqrt(others[..., 1])
    return np.asarray((np.abs(prints - others) <= 1e-4 * scale + 1e-12).all(axis=-1))
