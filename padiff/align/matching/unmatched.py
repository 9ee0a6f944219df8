"""Parameters outside the units of matched layers: those with other names, and those that another layer owns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from padiff.align.matching.parameter_units import grouped, holds_several, tie_targets
from padiff.align.runtime_evidence import RuntimeEvidence
from padiff.align.slices import ParameterPair, Slice
from padiff.model.equivalents import ONE_SIDED, stands_for_none
from padiff.records import ROOT, Both, Layer, Parameter, RunInfo, unzipped
from padiff.sketches.sketch import Sketch

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
    if all(unmatched):
        paired += _numbers_of_vectors(Both(*map(unmatched_parameters, infos, unzipped(paired))))
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


def _numbers_of_vectors(unmatched: Both[list[Owned]]) -> Iterator[ParameterPair]:
    """Yield pairs of the numbers of one side's only vector without a partner with as many single numbers of the other
    side, in order of definition.
    """
    for swapped in (False, True):
        ones, others = unmatched.swapped(swapped)
        if len(ones) != 1 or len(ones[0][1].shape) != 1 or any(math.prod(p.shape) != 1 for _, p in others):
            continue
        (layer, vector), count = ones[0], ones[0][1].shape[0]
        if count == len(others) > 1:
            for k, (other, number) in enumerate(others):
                part = Slice(layer.path, vector.slot, vector.shape, start=k, stop=k + 1, label=number.slot)
                whole = Slice(other.path, number.slot, number.shape)
                yield ParameterPair(*Both((part,), (whole,)).swapped(swapped))


def match_buffers(
    infos: Both[RunInfo], pairs: Sequence[ParameterPair], seen: Both[RuntimeEvidence]
) -> list[ParameterPair]:
    """Return the pairs, plus pairs of buffers of paired layers that have other names and start from equal values.

    An unpaired buffer is no diff, so only equal values are evidence. One number alone, such as a count, is none.
    """
    homes = {(ROOT, ROOT)} | {(a.layer, b.layer) for pair in pairs for a, b in zip(*pair)}
    buffers = Both(*map(_unmatched_buffers, infos, unzipped(pairs)))
    by_layer = buffers.map(lambda side: grouped(side, lambda owned: owned[0].path))
    paired = list(pairs)
    for path, references in by_layer.reference.items():
        partners = {b for a, b in homes if a == path}
        others = [owned for b in sorted(partners) for owned in by_layer.candidate.get(b, [])]
        for layer, parameter in references:
            equal = [owned for owned in others if _starts_equal(Both((layer, parameter), owned), seen)]
            if len(equal) == 1 and sum(_starts_equal(Both(own, equal[0]), seen) for own in references) == 1:
                other, theirs = equal[0]
                others.remove(equal[0])
                both = Both(Slice(path, parameter.slot, parameter.shape), Slice(other.path, theirs.slot, theirs.shape))
                paired.append(ParameterPair(*both.map(lambda part: (part,))))
    return paired


def _starts_equal(owned: Both[Owned], seen: Both[RuntimeEvidence]) -> bool:
    """Return True if two buffers have one shape, of more than one number, and equal values at the start."""
    shapes = owned.map(lambda side: side[1].shape)
    if shapes.reference != shapes.candidate or math.prod(shapes.reference) < 2:
        return False
    values = owned.zip(seen).map(
        lambda side: None if side[1].values is None else side[1].values(side[0][0].path, side[0][1].slot)
    )
    a, b = values
    if isinstance(a, Sketch) and isinstance(b, Sketch):
        return bool(not np.any(a.errors(b)) and a.l2 == b.l2)
    return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.array_equal(a, b)


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
