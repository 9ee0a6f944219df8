"""Layers of the runs' own layer maps that do not hold the same: they are compared by what they give."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from padiff.align.matching.parameter_units import inside
from padiff.align.slices import ParameterPair
from padiff.model import equivalents
from padiff.records import ROOT, Both, RunInfo

#: Paths of the layers at and below a pair's layer whose parameters the run has, and of those whose it has not.
_Held = tuple[frozenset[str], frozenset[str]]


def differing_inside(
    infos: Both[RunInfo],
    paired: Collection[Both[str]],
    parameters: Sequence[ParameterPair],
    left: Both[tuple[str, ...]],
) -> frozenset[tuple[str, str]]:
    """Pairs of mapped layers that do not hold the same parameters, or hold them where only one of the runs looked.

    A layer map leaves out what is below its layers: a parameter that one side has in the layer itself, and the other in
    a layer below, is recorded on one side only.

    Args:
        paired: the layers that answer to each other, by path.
        parameters: the parameters that do.
        left: ``layer/slot`` of those that answer to none, of either side.
    """
    found = []
    alone = left.map(lambda sites: {site.rpartition("/")[0] for site in sites})
    for pair in map(Both, *infos.map(lambda info: info.layer_map)):
        # Two models as wholes answer to each other in any case, and are compared inside.
        if pair not in paired or ROOT in pair:
            continue
        held = Both(*(_held(info, path) for info, path in zip(infos, pair)))
        if any(side & seen for side, (seen, _) in zip(alone, held)) or any(_unlike(p, held) for p in parameters):
            found.append((pair.reference, pair.candidate))
    return frozenset(found)


def _held(info: RunInfo, path: str) -> _Held:
    within = [layer for layer in info.layers if layer.path == path or inside(layer.path, path)]
    # Of an attention, which one framework packs, the projections below it are recorded all the same.
    packed = equivalents.common_kind(within[0].kind) in equivalents.COMPOSITE and within[0].recorded
    seen = frozenset(layer.path for layer in within if layer.recorded or packed)
    return seen, frozenset(layer.path for layer in within) - seen


def _unlike(pair: ParameterPair, held: Both[_Held]) -> bool:
    """Whether parameters of the two layers have other shapes, or only one run has them."""
    seen = [any(part.layer in side for part in parts) for (side, _), parts in zip(held, pair)]
    if not any(seen):
        return False
    if not all(seen):
        return True
    return not all(equivalents.same_rows(pair.reference[0].size, part.size) for part in pair.candidate)
