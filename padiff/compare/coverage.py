"""How much of two runs a comparison covers: what has no partner, what was never called, what is only assumed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from padiff.align import Alignment, LayerPair, views
from padiff.align.units import homes_of
from padiff.compare.explain import setting_notes
from padiff.compare.ranks import OWN_SAMPLES, ranks_told
from padiff.equivalents import ONE_SIDED, STATISTICS, slot, stands_for_none
from padiff.records import PARAMETER_STAGES, Coverage, Diff, Layer, RunInfo, is_functional


def coverage(
    diffs: Sequence[Diff],
    steps: Sequence[int],
    only: tuple[Sequence[int], Sequence[int]],
    alignment: Alignment,
    infos: tuple[RunInfo, RunInfo],
    called: tuple[Collection[str], Collection[str]],
) -> Coverage:
    """The coverage of some steps.

    Args:
        diffs: all of their diffs.
        steps: their numbers.
        only: steps that only one run has.
        infos: what holds for all steps of each run.
        called: paths of the layers that each run was seen to call.
    """
    # Functional calls that only one side makes are ways of writing, not gaps.
    told = [d for d in diffs if d.compared or not _optional(d.pair.anchor.slot)]
    lone = [d.pair for d in told if not d.pair.complete and d.problem != OWN_SAMPLES]
    unmatched = (
        {layer.path for layer in alignment.reference_only},
        {layer.path for layer in alignment.candidate_only},
    )
    sites = (
        {p.anchor.site for p in lone if p.candidate is None and p.anchor.layer not in unmatched[0]},
        {p.anchor.site for p in lone if p.reference is None and p.anchor.layer not in unmatched[1]},
    )
    return Coverage(
        compared=sum(d.compared for d in told),
        reference_records=sum(d.pair.reference is not None for d in told),
        candidate_records=sum(d.pair.candidate is not None for d in told),
        reference_layers=_paths(alignment.reference_only, containers=False),
        candidate_layers=_paths(alignment.candidate_only, containers=False),
        reference_containers=_paths(alignment.reference_only, containers=True),
        candidate_containers=_paths(alignment.candidate_only, containers=True),
        reference_parameters=_uncovered(alignment, 0),
        candidate_parameters=_uncovered(alignment, 1),
        reference_sites=tuple(sorted(sites[0])),
        candidate_sites=tuple(sorted(sites[1])),
        uncalled=_uncalled(infos, called),
        steps=tuple(steps),
        reference_steps=tuple(only[0]),
        candidate_steps=tuple(only[1]),
        notes=setting_notes(alignment),
        ambiguous=tuple(_ambiguous(pair) for pair in alignment.ambiguous),
        assumed=tuple(f"{doubt.about}: {doubt.options[0]}" for doubt in alignment.doubts if not doubt.answer),
        views=_views(diffs),
        cut_elsewhere=tuple(f"{ours} / {theirs}" for ours, theirs in sorted(alignment.cut_elsewhere)),
        sketched=sum(d.figures.basis != "tensors" for d in told if d.compared and d.figures),
        bounded=sum(d.figures.basis == "moments" for d in told if d.compared and d.figures),
        ranks=ranks_told(infos),
        unmeasured=tuple(sorted({d.pair.anchor.site for d in told if d.pair.complete and not d.compared})),
    )


def _uncalled(infos: tuple[RunInfo, RunInfo], called: tuple[Collection[str], Collection[str]]) -> tuple[str, ...]:
    if not any(called):
        return ()
    sides = zip(("reference", "candidate"), infos, called)
    return tuple(
        f"{side}: {layer.path}"
        for side, info, paths in sides
        if paths
        for layer in info.layers
        if layer.recorded and layer.path not in paths and layer.kind not in ("layerlist", "modulelist")
    )


def _optional(slot: str) -> bool:
    return slot in ONE_SIDED or is_functional(slot)


def _paths(layers: Iterable[Layer], containers: bool) -> tuple[str, ...]:
    return tuple(layer.path for layer in layers if layer.recorded and _only_holds(layer) == containers)


def _only_holds(layer: Layer) -> bool:
    """Whether a layer has nothing of its own: sublayers only, or parameters of another layer (an RNN's cells)."""
    if layer.parameters:
        return all(p.tied_to for p in layer.parameters)
    return layer.children > 0


def _uncovered(alignment: Alignment, side: int) -> tuple[str, ...]:
    """Parameters that answer to none, and the buffers of layers that do."""
    homes = homes_of(alignment.layers(side))
    covered = {
        homes.get((part.layer, part.slot), (part.layer, part.slot))
        for pair in alignment.parameters
        for part in (pair.candidate if side else pair.reference)
    }
    alone = {layer.path for layer in (alignment.candidate_only if side else alignment.reference_only)}
    return tuple(
        f"{layer.path}/{p.slot}"
        for layer in alignment.layers(side)
        if layer.recorded
        for p in layer.parameters
        if p.slot not in ONE_SIDED and not p.tied_to and not stands_for_none(layer, p)
        if (layer.path, p.slot) not in covered
        # Tables and masks that a model works out for itself are no gap; running statistics are.
        if p.role == "parameter" or (layer.path in alone and slot(p.slot) in STATISTICS)
    )


def _ambiguous(pair: LayerPair) -> str:
    return f"{pair.reference.path} / {pair.candidate.path} (or {', '.join(pair.alternatives)})"


def _views(diffs: Iterable[Diff]) -> tuple[str, ...]:
    """Layers whose tensors were brought into another layout to be compared, once each."""
    found: dict[str, str] = {}
    for diff in diffs:
        pair = diff.pair
        if pair.transform and pair.complete and pair.stage not in PARAMETER_STAGES:
            found.setdefault(pair.anchor.layer, f"{pair.anchor.layer} ({views.told(pair.transform)})")
    return tuple(found.values())
