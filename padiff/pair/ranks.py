"""What of one step of two runs answers to each other, all ranks: a function of the steps and the alignment alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest

from padiff.align import Alignment
from padiff.pair.plans import PairPlans
from padiff.pair.processes import OWN_SAMPLES, common_part, only_common, rest
from padiff.pair.steps import pair_steps
from padiff.records import STAGES, Both, Diff, Pair, RunInfo, Step
from padiff.records.structured import called


def rank_steps(steps: Both[Sequence[Step]], infos: Both[RunInfo]) -> list[Both[Step]]:
    """The two sides of one step, by rank; a rank that only one run has stands beside an empty step.

    Runs of different numbers of processes have one: of what does not depend on how the batch was shared out. So have
    runs whose parameters are spread in different ways.

    Args:
        steps: of each run, as `padiff.pair.united.united` gives them.
    """
    if only_common(steps, infos):
        return [steps.zip(infos).map(lambda side: common_part(*side))]
    empty = Step((steps.reference or steps.candidate)[0].number, ())
    return [Both(*(step or empty for step in rank)) for rank in zip_longest(*steps)]


def step_pairs(
    ranks: Iterable[Both[Step]], alignment: Alignment, stages: Collection[str], plans: PairPlans | None = None
) -> list[Sequence[Pair]]:
    """Pairs of one step, by rank.

    Args:
        plans: what steps of these runs were seen to be paired like.
    """
    pairs_of = plans.pairs if plans is not None else pair_steps
    pairs: list[Sequence[Pair]] = [pairs_of(sides.reference, sides.candidate, alignment) for sides in ranks]
    if frozenset(STAGES).issubset(stages):
        return pairs
    return [[pair for pair in rank if pair.stage in stages] for rank in pairs]


def in_one(ranks: Sequence[Sequence[Pair]]) -> Sequence[Pair]:
    """The pairs of all ranks, one rank after the other."""
    return ranks[0] if len(ranks) == 1 else [pair for rank in ranks for pair in rank]


def pairs_in_one(
    steps: Both[Sequence[Step]],
    infos: Both[RunInfo],
    alignment: Alignment,
    stages: Collection[str],
    plans: PairPlans | None = None,
) -> Sequence[Pair]:
    """The pairs of two steps, as all ranks saw them, one rank after the other."""
    return in_one(step_pairs(rank_steps(steps, infos), alignment, stages, plans))


def weights_known(info: RunInfo, steps: Iterable[Step]) -> bool:
    """Whether all weights that train are recorded in a step."""
    recorded = {
        (record.layer, record.slot) for step in steps for record in called(step.records) if record.stage == "weight"
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
    """What is not compared of runs of different numbers of processes: shown, and not judged."""
    if not only_common(steps, infos):
        return []
    number, alone = ranks[0].reference.number, steps.zip(ranks[0]).map(lambda side: rest(*side))
    found = [Pair(number, record, None, optional=True) for record in alone.reference]
    found += [Pair(number, None, record, optional=True) for record in alone.candidate]
    return [Diff(pair, problem=OWN_SAMPLES) for pair in found if pair.stage in stages]
