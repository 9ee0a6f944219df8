"""Comparison of runs with different numbers of processes, limited to quantities that do not depend on the split of
the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from padiff.pair.merge_ranks import replicas
from padiff.records import PARAMETER_STAGES, Both, InMemory, Kind, Problem, Record, RunInfo, Step, is_loss

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
