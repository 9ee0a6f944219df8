"""Pairing of equally structured steps, computed once for all of them, over all processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from padiff.align import Alignment
from padiff.align.call_order import calls_differ
from padiff.pair.merge_ranks import replicas
from padiff.pair.steps import identified_by_values, pair_steps
from padiff.records import (
    PARAMETER_STAGES,
    STAGES,
    UNSCALED,
    Both,
    Diff,
    InMemory,
    Kind,
    Pair,
    Problem,
    Record,
    RunInfo,
    Step,
    is_loss,
)
from padiff.records.pair_table import PairColumns, PairSchema, PairTable
from padiff.records.step_schema import StoredRecords, without_values

# Most cached pairings. The steps of most runs have one structure, or alternate between a few; with sharded parameters
# each process has its own.
_MOST = 256


class _Plan(NamedTuple):
    """Pairing of two step structures.

    Attributes:
        structures: structure of either side.
        alignment: the alignment that paired the steps.
        pairs: pairs in causal order; `None` if the pairing depends on values, or needs computed records.
    """

    structures: Both[object]
    alignment: Alignment
    pairs: PairColumns | None

    def is_of(self, structures: Both[object], alignment: Alignment) -> bool:
        # A structure equals only itself; merged steps have a tuple of structures.
        return self.structures == structures and self.alignment is alignment


class PairPlans:
    """Pairing as by `padiff.pair.steps.pair_steps`, with a cache for equally structured steps."""

    def __init__(self) -> None:
        self._known: list[_Plan] = []

    def pairs(self, reference: Step, candidate: Step, alignment: Alignment) -> Sequence[Pair]:
        """Return the pairs of two steps, in causal order."""
        a, b = reference.records, candidate.records
        if not isinstance(a, StoredRecords) or not isinstance(b, StoredRecords):
            return pair_steps(reference, candidate, alignment)
        structures = Both(a.structure, b.structure)
        plan = next((plan for plan in self._known if plan.is_of(structures, alignment)), None)
        computed: Sequence[Pair] | None = None
        if plan is None:
            computed = pair_steps(reference, candidate, alignment)
            plan = _Plan(structures, alignment, _planned(computed, Both(a, b)))
            self._known = [*self._known[1 - _MOST :], plan]
        if plan.pairs is None:
            return pair_steps(reference, candidate, alignment) if computed is None else computed
        scales = Both(reference.loss_scale, candidate.loss_scale)
        return PairTable(reference.number, Both(a, b), scales, plan.pairs, computed or ())


def _planned(pairs: Sequence[Pair], records: Both[Sequence[Record]]) -> PairColumns | None:
    if any(identified_by_values(side) for side in records) or calls_differ(records):
        return None
    places = records.map(lambda side: {id(record): place for place, record in enumerate(side)})
    places_by_side: Both[list[int | None]] = Both([], [])
    for pair in pairs:
        reference_place, candidate_place = (
            place_by_id.get(id(record)) for place_by_id, record in zip(places, pair.sides)
        )
        if (reference_place is None) != (pair.reference is None) or (candidate_place is None) != (
            pair.candidate is None
        ):
            return None  # a computed record, such as a part of a parameter
        places_by_side.reference.append(reference_place)
        places_by_side.candidate.append(candidate_place)
    return PairColumns(
        places_by_side.reference,
        places_by_side.candidate,
        [pair.layout for pair in pairs],
        [pair.scales is not UNSCALED for pair in pairs],
        [pair.optional for pair in pairs],
        [pair.derived for pair in pairs],
        PairSchema.from_pairs(pairs),
    )


#: Reason why the other quantities are not compared.
OWN_SAMPLES = Problem(Kind.OWN_SAMPLES, "each process saw samples of its own")


def processes_differ(infos: Both[RunInfo]) -> bool:
    """Return True if two runs have different numbers of processes."""
    return infos.reference.world_size != infos.candidate.world_size


def only_common(steps: Both[Sequence[Step]], infos: Both[RunInfo]) -> bool:
    """Return True if only quantities that do not depend on the split of the batch are compared."""
    spread = steps.map(lambda side: side[0].spread if side else ())
    return all(steps) and (processes_differ(infos) or spread.reference != spread.candidate)


def describe_processes(infos: Both[RunInfo], common: bool = False) -> str:
    """Return the compared quantities of two runs with different numbers of processes, in words; empty for equal
    numbers.

    Args:
        common: True if only common quantities of the processes were compared, whatever the numbers of processes.
    """
    if not (processes_differ(infos) or common):
        return ""
    reference, candidate = infos.map(lambda info: info.world_size)
    return (
        f"{reference} process{'es' * (reference > 1)} against {candidate}"
        + ("" if processes_differ(infos) else ", which hold other parts of the parameters")
        + ": compared are parameters, the gradients that the optimizers consumed, updates, learning rates, and the mean"
        " of the losses; each process saw samples of its own"
    )


def common_part(steps: Sequence[Step], info: RunInfo) -> Step:
    """Return one step for all ranks: parameters, gradients and updates that all ranks share, and the mean of all
    losses.

    Buffers (running statistics) depend on each rank's samples, and are left out.
    """
    buffers = {(layer.path, p.slot) for layer in info.layers for p in layer.parameters if p.role == "buffer"}
    losses: dict[tuple[str, int], list[float]] = defaultdict(list)
    for step in steps:
        for record in step.records:
            if is_loss(record):
                losses[record.slot, record.call].append(float(record.value))
    shared = replicas(steps)
    records: list[Record] = []
    for record in steps[0].records:
        if is_loss(record):
            mean = np.asarray(np.mean(losses[record.slot, record.call]))
            records.append(replace(record, source=InMemory(mean)))
        elif record.stage in PARAMETER_STAGES and (record.layer, record.slot) not in buffers:
            source = shared.get(record.site)
            records.append(record if source is None else replace(record, source=source))
    return replace(steps[0], records=tuple(records))


def rest(steps: Sequence[Step], common: Step) -> list[Record]:
    """Return the records of one side outside of the common part."""
    common_sites = {record.site for record in common.records}
    return [
        record
        for step in steps
        for record in step.records
        if step is not steps[0] or record.site not in common_sites
        if not (is_loss(record) and record.site in common_sites)
    ]


def rank_steps(steps: Both[Sequence[Step]], infos: Both[RunInfo]) -> list[Both[Step]]:
    """Return the two sides of one step, by rank; a rank that only one run has is paired with an empty step.

    Runs with different numbers of processes, or with differently sharded parameters, have a single entry, with the
    quantities that do not depend on the split of the batch.

    Args:
        steps: steps of each run, from `padiff.pair.merge_ranks.merge_ranks`.
    """
    if only_common(steps, infos):
        return [steps.zip(infos).map(lambda side: common_part(*side))]
    empty = Step((steps.reference or steps.candidate)[0].number, ())
    return [Both(*(step or empty for step in rank)) for rank in zip_longest(*steps)]


def step_pairs(
    ranks: Iterable[Both[Step]], alignment: Alignment, stages: Collection[str], plans: PairPlans | None = None
) -> list[Sequence[Pair]]:
    """Return the pairs of one step, by rank.

    Args:
        plans: cache of pairings of these runs' steps.
    """
    pairs_of = plans.pairs if plans is not None else pair_steps
    pairs: list[Sequence[Pair]] = [pairs_of(sides.reference, sides.candidate, alignment) for sides in ranks]
    if frozenset(STAGES).issubset(stages):
        return pairs
    return [[pair for pair in rank if pair.stage in stages] for rank in pairs]


def in_one(ranks: Sequence[Sequence[Pair]]) -> Sequence[Pair]:
    """Return the pairs of all ranks, one rank after the other."""
    return ranks[0] if len(ranks) == 1 else [pair for rank in ranks for pair in rank]


def pairs_in_one(
    steps: Both[Sequence[Step]],
    infos: Both[RunInfo],
    alignment: Alignment,
    stages: Collection[str],
    plans: PairPlans | None = None,
) -> Sequence[Pair]:
    """Return the pairs of two steps, given by all ranks, one rank after the other."""
    return in_one(step_pairs(rank_steps(steps, infos), alignment, stages, plans))


def weights_known(info: RunInfo, steps: Iterable[Step]) -> bool:
    """Return True if a step records all trainable weights."""
    recorded = {
        (record.layer, record.slot)
        for step in steps
        for record in without_values(step.records)
        if record.stage == "weight"
    }
    return all(
        (layer.path, parameter.slot) in recorded
        for layer in info.layers
        for parameter in layer.parameters
        if parameter.role == "parameter" and parameter.trainable and not parameter.tied_to
    )


def left_out(
    steps: Both[Sequence[Step]], infos: Both[RunInfo], ranks: Sequence[Both[Step]], stages: Collection[str]
) -> list[Diff]:
    """Return the uncompared records of runs with different numbers of processes, as optional pairs, which are not
    judged.
    """
    if not only_common(steps, infos):
        return []
    number, alone = ranks[0].reference.number, steps.zip(ranks[0]).map(lambda side: rest(*side))
    pairs = [Pair(number, record, None, optional=True) for record in alone.reference]
    pairs += [Pair(number, None, record, optional=True) for record in alone.candidate]
    return [Diff(pair, problem=OWN_SAMPLES) for pair in pairs if pair.stage in stages]
