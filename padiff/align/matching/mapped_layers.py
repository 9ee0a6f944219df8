"""Layers of the runs' own layer maps with different contents, which are compared by their outputs only."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from padiff.align.matching.parameter_units import inside
from padiff.align.slices import ParameterPair
from padiff.model import equivalents
from padiff.records import ROOT, Both, RunInfo

#: Paths of the layers at and below a mapped layer: those whose parameters were recorded, and all others.
_Held = tuple[frozenset[str], frozenset[str]]


def differing_inside(
    infos: Both[RunInfo],
    paired: Collection[Both[str]],
    parameters: Sequence[ParameterPair],
    left: Both[tuple[str, ...]],
) -> frozenset[tuple[str, str]]:
    """Return pairs of mapped layers that have different parameters, or parameters that only one of the runs recorded.

    A layer map excludes the layers below its own: a parameter that one side has in the layer itself, and the other side
    in a layer below, is recorded on one side only.

    Args:
        paired: paths of the paired layers.
        parameters: the paired parameters.
        left: ``layer/slot`` of each side's parameters without a partner.
    """
    differing = []
    alone = left.map(lambda sites: {site.rpartition("/")[0] for site in sites})
    for pair in map(Both, *infos.map(lambda info: info.layer_map)):
        # Two whole models correspond in any case, and are compared inside.
        if pair not in paired or ROOT in pair:
            continue
        recorded = Both(*(_held(info, path) for info, path in zip(infos, pair)))
        if any(side & paths for side, (paths, _) in zip(alone, recorded)) or any(
            _unlike(p, recorded) for p in parameters
        ):
            differing.append((pair.reference, pair.candidate))
    return frozenset(differing)


def _held(info: RunInfo, path: str) -> _Held:
    within = [layer for layer in info.layers if layer.path == path or inside(layer.path, path)]
    # The projections below an attention are recorded too, as one framework packs them into the attention itself.
    packed = equivalents.common_kind(within[0].kind) in equivalents.COMPOSITE and within[0].recorded
    recorded = frozenset(layer.path for layer in within if layer.recorded or packed)
    return recorded, frozenset(layer.path for layer in within) - recorded


def _unlike(pair: ParameterPair, parameters: Both[_Held]) -> bool:
    """Return True if parameters of the two layers have different shapes, or only one run recorded them."""
    present = [any(part.layer in side for part in parts) for (side, _), parts in zip(parameters, pair)]
    if not any(present):
        return False
    if not all(present):
        return True
    return not all(equivalents.same_rows(pair.reference[0].result_shape, part.result_shape) for part in pair.candidate)
