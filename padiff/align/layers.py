"""Alignment of two models from all the evidence."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from padiff.align.alignment import Alignment, LayerPair
from padiff.align.layer_pairs import held, owner_pairs, splits
from padiff.align.map_entries import Entry, entries, regions
from padiff.align.matching.mapped_layers import differing_inside
from padiff.align.matching.matches import Match
from padiff.align.matching.parameter_pairing import StoredParameters
from padiff.align.matching.parameterless import Matched, Tree, pair_containers, pair_leaves
from padiff.align.matching.unmatched import unmatched_parameters
from padiff.align.runtime_evidence import NOTHING_SEEN, RuntimeEvidence
from padiff.align.stacked import unstacked
from padiff.align.unit_matches import UnitMatches
from padiff.model.given_map import GivenMap
from padiff.records import Both, Layer, RunInfo, unzipped


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
