"""Runs of different numbers of processes: what does not depend on how the batch was shared out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from padiff.pair.united import replicas
from padiff.records import PARAMETER_STAGES, Both, InMemory, Kind, Problem, Record, RunInfo, Step, is_loss

#: Why the rest is not compared.
OWN_SAMPLES = Problem(Kind.OWN_SAMPLES, "each process saw samples of its own")


def processes_differ(infos: Both[RunInfo]) -> bool:
    """Whether two runs have different numbers of processes."""
    return infos.reference.world_size != infos.candidate.world_size


def only_common(steps: Both[Sequence[Step]], infos: Both[RunInfo]) -> bool:
    """Whether of two runs' steps only that is compared which does not depend on how the batch was shared out."""
    spread = steps.map(lambda side: side[0].spread if side else ())
    return all(steps) and (processes_differ(infos) or spread.reference != spread.candidate)


def describe_processes(infos: Both[RunInfo], common: bool = False) -> str:
    """What is compared of two runs with different numbers of processes, in words; empty for equal numbers.

    Args:
        common: whether only what their processes have in common was compared, whatever their numbers.
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
    """One step of all ranks: parameters, gradients and updates, of which each rank has a replica, and the mean of all
    losses.

    Buffers (running statistics) are those of a rank's own samples, and left out.
    """
    buffers = {(layer.path, p.slot) for layer in info.layers for p in layer.parameters if p.role == "buffer"}
    losses: dict[tuple[str, int], list[float]] = defaultdict(list)
    for step in steps:
        for record in step.records:
            if is_loss(record):
                losses[record.slot, record.call].append(float(record.value))
    shared = replicas(steps)
    kept: list[Record] = []
    for record in steps[0].records:
        if is_loss(record):
            mean = np.asarray(np.mean(losses[record.slot, record.call]))
            kept.append(replace(record, source=InMemory(mean)))
        elif record.stage in PARAMETER_STAGES and (record.layer, record.slot) not in buffers:
            source = shared.get(record.site)
            kept.append(record if source is None else replace(record, source=source))
    return replace(steps[0], records=tuple(kept))


def rest(steps: Sequence[Step], common: Step) -> list[Record]:
    """What one side recorded besides the common part."""
    known = {record.site for record in common.records}
    return [
        record
        for step in steps
        for record in step.records
        if step is not steps[0] or record.site not in known
        if not (is_loss(record) and record.site in known)
    ]
