"""Kinds of faults between the processes of one training, and their sentences."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from padiff.system.naming import first_few

_NAMED = 3


class RankFault(enum.Enum):
    """Kind of finding between two processes of one training.

    Attributes:
        fault: True if the training is wrong; otherwise the finding is informative.
    """

    OTHER_START = "other weights from the first recorded step on"
    NOT_REDUCED = "a gradient that was not reduced"
    OWN_FACTOR = "gradients multiplied by a factor of the process's own"
    OWN_UPDATE = "an update of its own from an equal gradient"
    WRITTEN = "a weight that something other than the optimizer changed"
    OWN_NORM = "gradients clipped by the norm of the process's own shards"
    OWN_RATE = "a learning rate of its own"
    SAME_BATCH = "the same batch"
    SAME_MASKS = "the same elements dropped"
    OWN_STATISTICS = "a batch norm that counts its own process's samples"
    OWN_BUFFERS = "a buffer that each process works out for itself"

    @property
    def fault(self) -> bool:
        return self in _FAULTS


_FAULTS = frozenset(
    {
        RankFault.NOT_REDUCED,
        RankFault.OWN_FACTOR,
        RankFault.OWN_UPDATE,
        RankFault.WRITTEN,
        RankFault.OWN_NORM,
        RankFault.OWN_RATE,
    }
)


@dataclass(frozen=True)
class RankFinding:
    """Unexpected difference or equality between processes.

    Attributes:
        kind: kind of the finding.
        step: the first step that shows the finding.
        ranks: the reference process, then the processes that differ from it.
        sites: sites of the tensors, ``layer/slot``, in the order of the records; empty for batches.
        error: the largest relative L2 difference; 0 for an equality.
        sentence: the finding in words.
    """

    kind: RankFault
    step: int
    ranks: tuple[int, ...]
    sites: tuple[str, ...]
    error: float
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def sentence(
    kind: RankFault,
    number: int,
    ranks: Sequence[int],
    sites: Sequence[str],
    of: int,
    factor: float | None = None,
    also: str = "",
) -> str:
    """Return a finding in words.

    Args:
        number: number of the step.
        ranks: the reference process, then the processes that differ from it.
        sites: sites of the tensors.
        of: number of compared sites.
        factor: ratio of the gradients to the reference process's gradients.
        also: further evidence, inserted into the sentence.
    """
    first, others = ranks[0], ranks_text(ranks[1:])
    named = first_few(sites, _NAMED)
    many = "all of them" if len(sites) == of and of > 1 else f"{len(sites)} of {of}"
    if kind is RankFault.OTHER_START:
        begins = "begins" if len(ranks) == 2 else "begin"
        return (
            f"{others} {begins} with other weights than rank {first} in the first recorded step ({many}: {named}). "
            "Either the model is spread over processes, or each drew its own and they were not broadcast."
        )
    if kind is RankFault.NOT_REDUCED:
        return (
            f"{others}'s gradient of {named} differs from rank {first}'s since step {number} ({many}): it was not "
            f"reduced, or changed by one rank alone{also}."
        )
    if kind is RankFault.OWN_FACTOR:
        return (
            f"{others}'s gradients are {factor:.6g} times rank {first}'s since step {number} ({many}): each rank "
            "multiplies by a factor of its own, as clipping by its own norm does."
        )
    if kind is RankFault.OWN_UPDATE:
        return (
            f"{others}'s update of {named} differs from rank {first}'s since step {number} ({many}), and the "
            f"gradients are equal: each rank's optimizer has values or a state of its own{also}."
        )
    if kind is RankFault.WRITTEN:
        return (
            f"{others}'s weight {named} differs from rank {first}'s since step {number} ({many}), and no recorded "
            f"gradient or update {also or 'does'}: something other than the optimizer wrote it, or a step that was not "
            "recorded."
        )
    if kind is RankFault.OWN_RATE:
        return (
            f"{others}'s learning rate differs from rank {first}'s since step {number}{also}, though they train the "
            "same parameters: each rank's optimizer or schedule is set by itself."
        )
    if kind is RankFault.OWN_BUFFERS:
        return (
            f"{others}'s buffer {named} differs from rank {first}'s since step {number}, and was equal before: each "
            "rank works it out from its own samples, and one rank's alone goes into a checkpoint."
        )
    if kind is RankFault.SAME_MASKS:
        return (
            f"{ranks_text(ranks)} drop the same elements in {named} in step {number}: their random numbers are of one "
            "seed, and each rank's dropout should draw its own."
        )
    if kind is RankFault.OWN_STATISTICS:
        return (
            f"{ranks_text(ranks)} normalise by their own samples' statistics in {named} since step {number}: with "
            "SyncBatchNorm they would be those of all ranks' samples."
        )
    return f"{ranks_text(ranks)} were given the same batch in step {number}: each should read a part of its own."


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the names of processes, as the beginning of a sentence."""
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    return f"Ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
