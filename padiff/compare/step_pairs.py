"""What of one step of two runs answers to each other, all ranks: a function of the steps and the alignment alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest

from padiff.align import Alignment, pair_steps
from padiff.compare.ranks import common_part, ranks_told, rest
from padiff.records import Diff, Pair, RunInfo, Step


def step_pairs(
    references: Sequence[Step],
    candidates: Sequence[Step],
    infos: tuple[RunInfo, RunInfo],
    alignment: Alignment,
    stages: Collection[str],
) -> list[list[Pair]]:
    """Pairs of one step, by rank; what a rank recorded that only one run has stands alone.

    Runs of different numbers of processes have one list: of what does not depend on how the batch was shared out.
    """
    if ranks_told(infos) and references and candidates:
        references, candidates = [common_part(references, infos[0])], [common_part(candidates, infos[1])]
    found = []
    for ours, theirs in zip_longest(references, candidates):
        empty = Step((ours or theirs).number, ())
        pairs = pair_steps(ours or empty, theirs or empty, alignment)
        found.append([pair for pair in pairs if pair.stage in stages])
    return found


def left_out(
    references: Sequence[Step],
    candidates: Sequence[Step],
    infos: tuple[RunInfo, RunInfo],
    stages: Collection[str],
) -> list[Diff]:
    """What is not compared of runs of different numbers of processes: shown, and not judged."""
    if not (ranks_told(infos) and references and candidates):
        return []
    found = [
        diff
        for steps, info, reference in ((references, infos[0], True), (candidates, infos[1], False))
        for diff in rest(steps, common_part(steps, info), reference)
    ]
    return [diff for diff in found if diff.pair.stage in stages]
