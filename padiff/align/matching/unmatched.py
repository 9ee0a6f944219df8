"""Parameters outside the units of matched layers: those with other names, and those that another layer owns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from padiff.align.matching.parameter_units import grouped, holds_several, tie_targets
from padiff.align.slices import ParameterPair, Slice
from padiff.model.equivalents import ONE_SIDED, stands_for_none
from padiff.records import ROOT, Both, Layer, Parameter, RunInfo, unzipped

Owned = tuple[Layer, Parameter]


def unmatched_parameters(info: RunInfo, parts: Iterable[Sequence[Slice]]) -> list[Owned]:
    """Return the parameters without a partner, in order of definition."""
    targets = tie_targets(info.layers)
    covered = {
        targets.get((part.layer, part.slot), (part.layer, part.slot))
        for part in chain(*parts)
        if part.result_shape[:1] != (0,)
    }
    return [
        (layer, p)
        for layer in info.layers
        for p in layer.parameters
        if p.role == "parameter" and not p.tied_to and p.slot not in ONE_SIDED
        if not stands_for_none(layer, p)
        if (layer.path, p.slot) not in covered
    ]


def match_unmatched(infos: Both[RunInfo], pairs: Sequence[ParameterPair]) -> list[ParameterPair]:
    """Return the pairs, plus pairs of the parameters that have no partner yet.

    Both sides must have the same number of such parameters of one shape; these are paired in order of definition.
    Unpaired they would be reported as missing on both sides, so a wrong pair costs nothing: its first values differ
    visibly.
    """
    unmatched = Both(*map(unmatched_parameters, infos, unzipped(pairs)))
    paired = [*pairs, *_paired(unmatched)] if all(unmatched) else list(pairs)
    if not any(unmatched):
        return paired
    # A parameter that nothing trains is a buffer on the other side: a bias of a router's scores.
    frozen = Both(*map(unmatched_parameters, infos, unzipped(paired))).map(
        lambda side: [(layer, p) for layer, p in side if not p.trainable]
    )
    buffers = Both(*map(_unmatched_buffers, infos, unzipped(paired)))
    return [
        *paired,
        *_paired(Both(frozen.reference, buffers.candidate)),
        *_paired(Both(buffers.reference, frozen.candidate)),
    ]


def _unmatched_buffers(info: RunInfo, parts: Iterable[Sequence[Slice]]) -> list[Owned]:
    covered = {(part.layer, part.slot) for part in chain(*parts)}
    return [
        (layer, p)
        for layer in info.layers
        for p in layer.parameters
        if p.role == "buffer" and not p.tied_to and (layer.path, p.slot) not in covered
    ]


def _paired(unmatched: Both[list[Owned]]) -> Iterator[ParameterPair]:
    shapes = unmatched.map(lambda side: grouped(side, lambda owned: owned[1].shape))
    for shape, references in shapes.reference.items():
        others = shapes.candidate.get(shape, [])
        if len(references) == len(others) and 0 not in shape:
            for pair in zip(references, others):
                # A container's own parameter may belong to a layer on the other side, and so may one of a layer with
                # several matrices. Between two plain layers,
                # different parameters are a diff.
                if not any(layer.children or layer.path == ROOT or holds_several(layer) for layer, _ in pair):
                    continue
                yield ParameterPair(*((Slice(layer.path, p.slot, p.shape),) for layer, p in pair))
