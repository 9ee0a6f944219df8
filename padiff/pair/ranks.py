"""Pairing of one step of two runs, all ranks: a function of the steps and the alignment alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest

from padiff.align import Alignment
from padiff.pair.plans import PairPlans
from padiff.pair.processes import OWN_SAMPLES, common_part, only_common, rest
from padiff.pair.steps import pair_steps
from padiff.records import STAGES, Both, Diff, Pair, RunInfo, Step
from padiff.records.stored_records import without_values


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
