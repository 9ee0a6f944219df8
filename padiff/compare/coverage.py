"""Coverage of two runs by a comparison, both layer trees with their alignment, and the diffs that were found."""

from __future__ import annotations

import contextlib
import fnmatch
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from padiff.align import Alignment, LayerPair, Slice
from padiff.align.matching.parameter_units import tie_targets
from padiff.compare.declared.layers import layer_notes
from padiff.compare.declared.optimizers import groups_of
from padiff.errors import RunFolderError, UsageError
from padiff.model.equivalents import ONE_SIDED, STATISTICS, slot, stands_for_none
from padiff.pair.plans import describe_processes
from padiff.records import (
    AMPLIFIED,
    LOOP,
    PARAMETER_STAGES,
    SIDES,
    STAGES,
    Both,
    CompactDiffs,
    Coverage,
    Diff,
    Difference,
    Figure,
    Kind,
    Layer,
    Models,
    Pair,
    Partners,
    Rule,
    Run,
    RunInfo,
    Step,
    is_functional,
    unzipped,
)
from padiff.records.both import ChainedSequence
from padiff.records.pair_table import PairSchema, layouts_of
from padiff.records.step_diffs import FIGURE_NUMBERS, MOMENTS, RULE_NUMBERS, TENSORS, StepDiffs
from padiff.system.frames import Frame
from padiff.system.terminal import nearest

# Relative difference of the ratios of gradients that one factor of clipping divides. torch adds 1e-6 to the norm.
_CLIPPED_ALIKE = 1e-3
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
            far &= forward_rows["rule"] != RULE_NUMBERS[Rule.WRITTEN_OTHERWISE]
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


#: Call stacks of layers, by path.
Stacks = Mapping[str, tuple[Frame, ...]]


def stacks_of(step: Step) -> Stacks:
    """Return the stack of each layer's first call, as far as the step's trace holds stacks."""
    stacks: dict[str, tuple[Frame, ...]] = {}
    if step.trace.functions:
        with contextlib.suppress(RunFolderError):  # a damaged trace: the judgement does not need the trace
            for call in step.trace.calls:
                if call.stack and not call.function:
                    stacks.setdefault(call.layer, call.stack)
    return stacks


def models_of(infos: Both[RunInfo], alignment: Alignment, stacks: Both[Stacks]) -> Models:
    """Return both layer trees, and a pair for each two aligned layers.

    Args:
        stacks: call stacks of the layers.
    """
    partners = [
        Partners(pair.reference.path, pair.candidate.path, pair.reason, pair.confidence) for pair in alignment.pairs
    ]
    partners += [
        Partners(reference.path, candidate.path, split.reason, split.confidence)
        for split in alignment.splits
        for reference in split.reference
        for candidate in split.candidate
    ]
    return Models(
        layers=infos.map(lambda info: info.layers),
        frameworks=infos.map(lambda info: f"{info.framework} {info.framework_version}".strip()),
        partners=tuple(partners),
        stacks=stacks,
        lines=infos.map(lambda info: info.lines),
        files=infos.map(lambda info: info.files),
        optimized=infos.map(lambda info: groups_of(info.settings)),
        command=str(infos.candidate.recording.get("command", "")),
    )


# Number of diffs stored as objects before compaction begins: some 2 kB each, including their sketches.
_UNFOLDED = 20_000


class Findings:
    """Diffs of the steps that were compared so far, in step order.

    Args:
        alignment: the paired layers.
        runs: reference and candidate, if their steps can be read again.

    Attributes:
        tally: counts of the compared and of the uncompared pairs.
    """

    def __init__(self, alignment: Alignment, runs: Both[Run] | None = None) -> None:
        self.tally = Tally(alignment)
        self._runs = runs
        self._kept: list[tuple[Both[int], Sequence[StepDiffs]]] = []
        self._count = 0
        self._folded: CompactDiffs | None = None

    def add(self, ranks: Sequence[StepDiffs], numbers: Both[int]) -> None:
        """Add the judged diffs of each rank of a step."""
        for diffs in ranks:
            self.tally.add(diffs)
            self._count += len(diffs)
        self._kept.append((numbers, ranks))
        if self._runs is None or (self._folded is None and self._count <= _UNFOLDED):
            return
        if self._folded is None:
            self._folded = CompactDiffs(self._runs)
        for numbers_before, ranks_before in self._kept:
            for rank, diffs in enumerate(ranks_before):
                self._folded.add(diffs, numbers_before, rank)
        self._kept.clear()

    @property
    def diffs(self) -> Sequence[Diff]:
        """All diffs, in causal order."""
        if self._folded is not None:
            return self._folded
        return ChainedSequence(diffs for _, ranks in self._kept for diffs in ranks)


_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?")


@dataclass(frozen=True)
class ReportFilter:
    """Filter of the reported diffs.

    Attributes:
        stages: the stages to report.
        layers: paths of the reference's layers and of the candidate's layers to report; `None` for all layers.
    """

    stages: frozenset[str]
    layers: Both[set[str]] | None = None

    @classmethod
    def from_arguments(
        cls, stages: Collection[str], patterns: Collection[str] | None, infos: Both[RunInfo]
    ) -> ReportFilter:
        """Build the filter from a caller's stages and path patterns.

        Raises:
            UsageError: a stage is unknown, or a pattern matches no layer of either run.
        """
        unknown = sorted({*stages} - {*STAGES})
        if unknown:
            raise UsageError(f"unknown stage {unknown[0]!r}. {nearest(unknown[0], STAGES)}")
        return cls(frozenset(stages), None if patterns is None else _matching(patterns, infos))

    @property
    def everything(self) -> bool:
        """Return True if the filter excludes nothing."""
        return self.layers is None and self.stages.issuperset(STAGES)

    def has(self, pair: Pair) -> bool:
        """Return True if the pair's stage and one of its layers pass the filter."""
        if pair.stage not in self.stages:
            return False
        sides = zip(self.layers or (), pair.sides)
        return self.layers is None or any(record is not None and record.layer in paths for paths, record in sides)

    def concerns(self, difference: Difference) -> bool:
        """Return True if a declared difference passes the filter; a difference that names no layer passes for all
        layers.
        """
        if difference.stage not in self.stages:
            return False
        sides = zip(self.layers or (), difference.layers)
        return self.layers is None or not any(difference.layers) or any({*names} & paths for paths, names in sides)


def _matching(patterns: Collection[str], infos: Both[RunInfo]) -> Both[set[str]]:
    matches: Both[set[str]] = Both(set(), set())
    paths = infos.map(lambda info: {path for layer in info.layers for path in (layer.path, *layer.aliases)})
    for pattern in patterns:
        matching = [{path for path in side if fnmatch.fnmatchcase(path, pattern)} for side in paths]
        if not any(matching):
            raise UsageError(
                f"no layer of either run matches {pattern!r}. {nearest(pattern, sorted(set().union(*paths)))}"
            )
        for side, more in zip(matches, matching):
            side |= more
    return matches


class Steps:
    """Step numbers parsed from a text such as ``0,8,100-200``; ``in`` tests a number."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._ranges: list[tuple[int, int]] = []
        for part in text.split(","):
            match = _RANGE.fullmatch(part.strip())
            if match is None or int(match[2] or match[1]) < int(match[1]):
                raise UsageError(f"--steps takes numbers and ranges, such as 0,8,100-200; got {text!r}")
            self._ranges.append((int(match[1]), int(match[2] or match[1])))

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and any(first <= number <= last for first, last in self._ranges)

    def __repr__(self) -> str:
        return self._text


def first_failed(diffs: Sequence[Diff]) -> Diff | None:
    """Return the first diff that did not pass, in causal order over all processes of a step; `None` if all passed."""
    if isinstance(diffs, StepDiffs) and diffs.passed:
        return None
    first = next((diff for diff in diffs if not diff.passed), None)
    if first is None:
        return None
    ranks = ranks_of([diff for diff in diffs if diff.pair.step == first.pair.step])
    firsts = [
        (*next((k, d) for k, d in enumerate(rank_diffs) if not d.passed), rank_diffs)
        for rank_diffs in ranks
        if not _passed(rank_diffs)
    ]
    # Processes wait for each other in the backward: a diff before the backward in any process comes first.
    first, step = min(firsts, key=lambda one: (_stage_number(one[1]), one[0]))[1:] if len(firsts) > 1 else firsts[0][1:]
    return _before_clipping(first, step)


def _before_clipping(first: Diff, step: Sequence[Diff]) -> Diff:
    """Return the first gradient that differs by more than the factor by which clipping divides all gradients.

    One gradient that differs changes the norm that both sides clip by, and with it all others alike.
    """
    if first.pair.stage != "grad" or first.figures is None:
        return first
    norms = [
        d.figures for d in step if d.pair.stage == "grad" and d.pair.anchor.layer == LOOP and d.figures is not None
    ]
    factors = [norm.reference_l2 / norm.candidate_l2 for norm in norms if norm.candidate_l2]

    def is_clipped(diff: Diff) -> bool:
        figures = diff.figures
        if figures is None or not figures.reference_l2 or diff.pair.anchor.layer == LOOP:
            return figures is not None
        ratio = figures.candidate_l2 / figures.reference_l2
        pure = math.isclose(figures.l2, abs(figures.candidate_l2 - figures.reference_l2), rel_tol=_CLIPPED_ALIKE)
        return pure and any(math.isclose(ratio - 1, factor - 1, rel_tol=_CLIPPED_ALIKE) for factor in factors)

    failed = [diff for diff in step if diff.pair.stage == "grad" and not diff.passed]
    return next((diff for diff in failed if not is_clipped(diff)), first) if is_clipped(first) else first


def _stage_number(diff: Diff) -> int:
    return STAGES.index("forward" if diff.pair.derived else diff.pair.stage)


def ranks_of(step: Sequence[Diff]) -> list[list[Diff]]:
    """Split a step's diffs by process; the diffs of one process follow each other."""
    ranks: list[list[Diff]] = [[]]
    sites: set[tuple[str, Both[str]]] = set()
    for diff in step:
        # One record of a side may be in two pairs of a process, as gradients that come back in other parts are.
        site = diff.pair.anchor.site, diff.pair.sides.map(lambda record: record.site if record else "")
        if site in sites:
            ranks.append([])
            sites.clear()
        sites.add(site)
        ranks[-1].append(diff)
    return ranks


def _passed(diffs: Sequence[Diff]) -> bool:
    return all(diff.passed for diff in diffs)
