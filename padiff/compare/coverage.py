"""Coverage of two runs by a comparison: unpaired layers, uncalled layers, and assumptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

import numpy as np

from padiff.align import Alignment, LayerPair, Slice
from padiff.align.matching.parameter_units import tie_targets
from padiff.compare.declared.layers import layer_notes
from padiff.model.equivalents import ONE_SIDED, STATISTICS, slot, stands_for_none
from padiff.pair.processes import describe_processes
from padiff.records import (
    AMPLIFIED,
    LOOP,
    PARAMETER_STAGES,
    SIDES,
    Both,
    Coverage,
    Diff,
    Figure,
    Kind,
    Layer,
    Pair,
    RunInfo,
    is_functional,
    unzipped,
)
from padiff.records.diff_rows import FIGURE_NUMBERS, MOMENTS, TENSORS
from padiff.records.pair_schema import PairSchema
from padiff.records.pair_table import layouts_of
from padiff.records.step_diffs import StepDiffs

_REL_L2, _AROUND_ZERO = FIGURE_NUMBERS[Figure.REL_L2], FIGURE_NUMBERS[Figure.AROUND_ZERO]


class Tally:
    """Counts of compared and uncompared records, updated step by step."""

    def __init__(self, alignment: Alignment) -> None:
        self._alone = Both(alignment.reference_only, alignment.candidate_only).map(
            lambda layers: {layer.path for layer in layers}
        )
        self._counts: Counter[str] = Counter()
        self._sites: Both[set[str]] = Both(set(), set())
        #: Layers with at least one compared tensor, by side.
        self._compared: Both[set[str]] = Both(set(), set())
        self._differ = False
        self._unmeasured: set[str] = set()
        self._zeros: dict[str, None] = {}
        self._views: dict[str, str] = {}
        self._amplified: int | None = None
        self._own_samples = False
        self._seen: tuple[PairSchema | None, bytes] = (None, b"")

    def add(self, diffs: Sequence[Diff]) -> None:
        """Count the diffs of a step."""
        diffs = StepDiffs.from_diffs(diffs)
        sites, rows, compared = diffs.sites, diffs.rows, diffs.compared
        self._see(diffs, compared)
        for place in np.flatnonzero(~compared).tolist():
            self._add_uncompared(diffs[place])
        failed = [
            place
            for place in np.flatnonzero(~rows["passed"]).tolist()
            if compared[place] or not _optional(sites.slots[place])
        ]
        # Diffs after the first one may follow from it.
        if self._amplified is None and not self._differ:
            places = sites.places["forward"]
            forward_rows = rows[places]
            far = compared[places] & (forward_rows["figure"] == _REL_L2) & (forward_rows["value"] > AMPLIFIED)
            if failed:
                far &= places < failed[0]
            self._amplified = diffs.number if far.any() else None
        self._differ = self._differ or bool(failed)
        for place in np.flatnonzero(compared & (rows["figure"] == _AROUND_ZERO)).tolist():
            self._zeros.setdefault(diffs.pairs[place].anchor.site)
        sketched = compared & diffs.measured & (rows["basis"] != TENSORS)
        if any(problem.kind is Kind.OWN_SAMPLES for problem in diffs.problems.values()):
            self._own_samples = True
        count = int(compared.sum())
        sums = {"reference": count, "candidate": count, "compared": count}
        bounded = int((sketched & (rows["basis"] == MOMENTS)).sum())
        self._counts.update(sums, sketched=int(sketched.sum()), bounded=bounded)

    def _see(self, diffs: StepDiffs, compared: np.ndarray) -> None:
        """Remember the layers that were compared; most steps have the same layers."""
        sites, compared_bytes = self._seen
        if sites is diffs.sites and compared_bytes == compared.tobytes():
            return
        self._seen = diffs.sites, compared.tobytes()
        layouts = layouts_of(diffs.pairs)
        for place in np.flatnonzero(compared).tolist():
            self._compared.reference.add(diffs.sites.layers[place])
            self._compared.candidate.add(diffs.sites.candidates[place][0])
            if layouts[place]:
                self._add_view(diffs.pairs[place])

    def _add_uncompared(self, diff: Diff) -> None:
        """Count a diff with a missing side, or with a pair that could not be measured."""
        pair, anchor, counts = diff.pair, diff.pair.anchor, self._counts
        self._add_view(pair)
        own_samples = diff.problem is not None and diff.problem.kind is Kind.OWN_SAMPLES
        # Functional calls that only one side makes are ways of writing, not gaps.
        if _optional(anchor.slot):
            return
        counts["reference"] += pair.reference is not None
        counts["candidate"] += pair.candidate is not None
        counts["compared"] += diff.counts
        if pair.complete:
            self._unmeasured.add(anchor.site)
        elif diff.counts:
            counts["missing"] += 1
        elif not own_samples:
            for record, alone, sites in zip(pair.sides, self._alone, self._sites):
                if record is not None and record.layer not in alone:
                    sites.add(record.site)

    def _add_view(self, pair: Pair) -> None:
        """Remember a layer whose tensor is compared in another layout."""
        layer = pair.anchor.layer
        if pair.layout and pair.complete and pair.stage not in PARAMETER_STAGES and layer != LOOP:
            self._views.setdefault(layer, f"{layer} ({pair.layout.describe()})")

    @property
    def compared(self) -> int:
        """Return the number of compared pairs."""
        return self._counts["compared"]

    def coverage(
        self,
        steps: Sequence[int],
        only: Both[Sequence[int]],
        alignment: Alignment,
        infos: Both[RunInfo],
        called: Both[Collection[str]],
    ) -> Coverage:
        """Return the coverage of all added steps.

        Args:
            steps: numbers of the steps.
            only: steps that only one run has.
            infos: description of each run.
            called: paths of the layers that each run has called so far.
        """
        counts = self._counts
        unpaired: Both[Sequence[Layer]] = Both(alignment.reference_only, alignment.candidate_only)
        slices = unzipped(alignment.parameters)
        uncovered = Both(*map(_uncovered, alignment.layers, slices, unpaired))
        containers = unpaired.map(lambda layers: _paths(layers, containers=True))
        alone = unpaired.map(lambda layers: _paths(layers, containers=False)).zip(self._compared)
        as_parts = alone.map(lambda side: tuple(path for path in side[0] if path in side[1]))
        missing = alone.map(lambda side: tuple(path for path in side[0] if path not in side[1]))
        sites = self._sites.map(lambda names: tuple(sorted(names)))
        return Coverage(
            compared=counts["compared"],
            missing=counts["missing"],
            reference_records=counts["reference"],
            candidate_records=counts["candidate"],
            reference_layers=missing.reference,
            candidate_layers=missing.candidate,
            reference_containers=containers.reference,
            candidate_containers=containers.candidate,
            reference_parts=as_parts.reference,
            candidate_parts=as_parts.candidate,
            reference_parameters=uncovered.reference,
            candidate_parameters=uncovered.candidate,
            reference_sites=sites.reference,
            candidate_sites=sites.candidate,
            uncalled=_uncalled(infos, called),
            steps=tuple(steps),
            reference_steps=tuple(only.reference),
            candidate_steps=tuple(only.candidate),
            notes=layer_notes(alignment),
            ambiguous=tuple(_ambiguous(pair) for pair in alignment.ambiguous),
            assumed=tuple(f"{x.about}: {x.options[0]}" for x in alignment.ambiguities if not x.answer),
            views=tuple(self._views.values()),
            cut_elsewhere=tuple(" / ".join(paths) for paths in sorted(alignment.cut_elsewhere)),
            sketched=counts["sketched"],
            bounded=counts["bounded"],
            ranks=describe_processes(infos, self._own_samples),
            unmeasured=tuple(sorted(self._unmeasured)),
            amplified=self._amplified,
            zeros=tuple(self._zeros),
        )


def _uncalled(infos: Both[RunInfo], called: Both[Collection[str]]) -> tuple[str, ...]:
    return tuple(
        f"{side}: {layer.path}"
        for side, info, paths in zip(SIDES, infos, called)
        if paths
        for layer in info.layers
        if layer.recorded and layer.path not in paths and layer.kind not in ("layerlist", "modulelist")
    )


def _optional(slot: str) -> bool:
    return slot in ONE_SIDED or is_functional(slot)


def _paths(layers: Iterable[Layer], containers: bool) -> tuple[str, ...]:
    return tuple(layer.path for layer in layers if layer.recorded and _only_holds(layer) == containers)


def _only_holds(layer: Layer) -> bool:
    """Return True if a layer owns nothing: it has sublayers only, or parameters of another layer (an RNN's cells)."""
    if layer.parameters:
        return all(p.tied_to for p in layer.parameters)
    return layer.children > 0


def _uncovered(
    layers: Sequence[Layer], slices: Iterable[Sequence[Slice]], unpaired: Iterable[Layer]
) -> tuple[str, ...]:
    """Return parameters without a partner, and statistics of layers without a partner."""
    homes = tie_targets(layers)
    sites = {(slice_.layer, slice_.slot) for slice_ in chain(*slices)}
    covered = {homes.get(site, site) for site in sites}
    alone = {layer.path for layer in unpaired}
    return tuple(
        f"{layer.path}/{p.slot}"
        for layer in layers
        if layer.recorded
        for p in layer.parameters
        if p.slot not in ONE_SIDED and not p.tied_to and not stands_for_none(layer, p)
        if (layer.path, p.slot) not in covered
        # Running statistics count; tables and masks that a model computes do not.
        if p.role == "parameter" or (layer.path in alone and slot(p.slot) in STATISTICS)
    )


def _ambiguous(pair: LayerPair) -> str:
    return f"{pair.reference.path} / {pair.candidate.path} (or {', '.join(pair.alternatives)})"
