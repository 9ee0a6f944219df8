"""Parameters that no unit of matched layers has: those of other names, and those that another layer owns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from padiff.align.matching.parameter_units import grouped, tie_targets
from padiff.align.slices import ParameterPair, Slice
from padiff.model.equivalents import ONE_SIDED, stands_for_none
from padiff.records import ROOT, Both, Layer, Parameter, RunInfo, unzipped

Owned = tuple[Layer, Parameter]


def left_of(info: RunInfo, parts: Iterable[Sequence[Slice]]) -> list[Owned]:
    """Parameters that answer to none, in order of definition."""
    targets = tie_targets(info.layers)
    covered = {
        targets.get((part.layer, part.slot), (part.layer, part.slot)) for part in chain(*parts) if part.size[:1] != (0,)
    }
    return [
        (layer, p)
        for layer in info.layers
        for p in layer.parameters
        if p.role == "parameter" and not p.tied_to and p.slot not in ONE_SIDED
        if not stands_for_none(layer, p)
        if (layer.path, p.slot) not in covered
    ]


def with_left_over(infos: Both[RunInfo], pairs: Sequence[ParameterPair]) -> list[ParameterPair]:
    """The pairs, and those that are found among the parameters that are left.

    Of one shape as many have to be left on either side; they answer to each other in order of definition. Left alone
    they would be missing on either side, so nothing is lost where that is wrong: it shows in their first values.
    """
    left = Both(*map(left_of, infos, unzipped(pairs)))
    return [*pairs, *_paired(left)] if all(left) else list(pairs)


def _paired(left: Both[list[Owned]]) -> Iterator[ParameterPair]:
    shapes = left.map(lambda side: grouped(side, lambda owned: owned[1].shape))
    for shape, some in shapes.reference.items():
        others = shapes.candidate.get(shape, [])
        if len(some) == len(others) and 0 not in shape:
            for pair in zip(some, others):
                # A container's own parameter may be a layer's there. That two layers have other parameters is a diff.
                if not any(layer.children or layer.path == ROOT for layer, _ in pair):
                    continue
                yield ParameterPair(*((Slice(layer.path, p.slot, p.shape),) for layer, p in pair))
