"""What of one step of two runs answers to each other, all ranks: a function of the steps and the alignment alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import zip_longest

from padiff.align import Alignment
from padiff.pair.processes import common_part, ranks_told, rest
from padiff.pair.steps import pair_steps
from padiff.records import Diff, Pair, RunInfo, Step


def rank_steps(
    references: Sequence[Step], candidates: Sequence[Step], infos: tuple[RunInfo, RunInfo]
) -> list[tuple[Step, Step]]:
    """The two sides of one step, by rank; a rank that only one run has stands beside an empty step.

    Runs of different numbers of processes have one: of what does not depend on how the batch was shared out.
    """
    if ranks_told(infos) and references and candidates:
        return [(common_part(references, infos[0]), common_part(candidates, infos[1]))]
    empty = Step((references or candidates)[0].number, ())
    return [(ours or empty, theirs or empty) for ours, theirs in zip_longest(references, candidates)]


def step_pairs(ranks: Iterable[tuple[Step, Step]], alignment: Alignment, stages: Collection[str]) -> list[list[Pair]]:
    """Pairs of one step, by rank."""
    return [[pair for pair in pair_steps(*sides, alignment) if pair.stage in stages] for sides in ranks]


def weights_known(info: RunInfo, steps: Iterable[Step]) -> bool:
    """Whether all weights that train are recorded in a step."""
    recorded = {(record.layer, record.slot) for step in steps for record in step.records if record.stage == "weight"}
    return all(
        (layer.path, parameter.slot) in recorded
        for layer in info.layers
        for parameter in layer.parameters
        if parameter.role == "parameter" and parameter.trainable and not parameter.tied_to
    )


def left_out(
    references: Sequence[Step],
    candidates: Sequence[Step],
    infos: tuple[RunInfo, RunInfo],
    ranks: Sequence[tuple[Step, Step]],
    stages: Collection[str],
) -> list[Diff]:
    """What is not compared of runs of different numbers of processes: shown, and not judged."""
    if not (ranks_told(infos) and references and candidates):
        return []
    ours, theirs = ranks[0]
    found = rest(references, ours, True) + rest(candidates, theirs, False)
    return [diff for diff in found if diff.pair.stage in stages]
