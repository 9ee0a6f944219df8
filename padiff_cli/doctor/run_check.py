"""Check of a run folder that reads every tensor of every step."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

import numpy as np

from padiff.compare.replicas import RankFinding, ReplicaCheck
from padiff.dump import FolderRun
from padiff.dump.format import PACKS, STEPS
from padiff.dump.medium import incomplete_steps, names_in, size_of
from padiff.dump.prepare import lost_steps
from padiff.dump.store import AnyPath, as_local
from padiff.errors import PadiffError, RunFolderError
from padiff.records import Record, Run, Step
from padiff.records.declared import cautions
from padiff.records.traces import Pack

# How many missing ranks, or steps without all their ranks, a message names.
_NAMED = 8


@dataclass(frozen=True)
class Health:
    """Result of a check of a run folder.

    Attributes:
        damaged: sentences about parts that can't be read or differ from what was recorded, each with its place.
        remarks: sentences about things that are no damage, such as leftovers of a process that died, or NaN.
        cautions: sentences about settings of the environment that make the run hard to repeat.
        ranks: findings about ranks whose tensors break a rule of data parallelism (see `RankFinding`).
        steps, tensors, sketches: how many were read without an error.
        bytes: size of the folder.
    """

    damaged: tuple[str, ...]
    remarks: tuple[str, ...]
    cautions: tuple[str, ...]
    ranks: tuple[RankFinding, ...]
    steps: int
    tensors: int
    sketches: int
    bytes: int

    @property
    def well(self) -> bool:
        """Return True if everything can be read and no finding about the ranks is a fault."""
        return not self.damaged and not any(finding.kind.fault for finding in self.ranks)


def check_run(run: Run, path: AnyPath) -> Health:
    """Read everything in a run folder, and return the result of the check."""
    damaged: list[str] = []
    nonfinite: list[str] = []
    readable = tensors = sketches = 0
    numbers = run.numbers()
    replicas = ReplicaCheck(run.info)
    for number in numbers:
        faults: list[str] = []
        try:
            steps = run.steps(number)
        except PadiffError as error:
            damaged.append(f"step {number}: {error}")
            continue
        faults += _missing_ranks(number, steps, run.info.world_size)
        for record in (record for step in steps for record in step.records):
            try:
                finite = _finite(record)
            except (PadiffError, OSError, ValueError) as error:
                faults.append(f"step {number}: {error}")
                continue
            tensors += record.sketch is None
            sketches += record.sketch is not None
            if not finite and len(nonfinite) < 1:
                nonfinite.append(f"NaN or infinity, first in step {number} at {record.site}")
        for step in steps:
            try:
                _read_trace(step)
            except (PadiffError, OSError, ValueError) as error:
                faults.append(f"step {number}: {error}")
        if not faults:
            replicas.check(steps)
        readable += not faults
        damaged += faults
    packs = run.packs if isinstance(run, FolderRun) else None
    for number in packs or ():
        try:
            tensors += sum([_read_pack(pack) for pack in packs.ranks(number)] if packs is not None else [])
        except (PadiffError, OSError, ValueError) as error:
            damaged.append(f"the replay pack of step {number}: {error}")
    lacking = incomplete_steps(path) if run.finished() and run.info.world_size > 1 else {}
    damaged += _lacking(lacking, run.info.world_size)
    remarks = [*_leftovers(path, numbers, run.info.world_size, lacking), *nonfinite]
    if not numbers:
        remarks.append("no step was recorded")
    if not run.finished():
        remarks.append("the run has not ended: it is still growing, or its process died")
    if not run.info.environment:
        remarks.append("nothing is known of the environment: an older padiff recorded this run")
    remarks += [*_lost(path), *run.info.errors]
    size = size_of(path)
    return Health(
        tuple(damaged),
        tuple(remarks),
        tuple(cautions(run.info.environment)),
        tuple(replicas.findings),
        readable,
        tensors,
        sketches,
        size,
    )


def _finite(record: Record) -> bool:
    sketch = record.sketch
    if sketch is not None:
        return not sketch.nonfinite
    values = record.value
    if tuple(values.shape) != tuple(record.shape):
        raise RunFolderError(f"{record.site} has shape {values.shape}, but {record.shape} was recorded")
    # In parts, because a tensor may be larger than the memory. Reading all of it also detects a truncated file.
    flat = values.reshape(-1)
    return all(bool(np.isfinite(part).all()) for part in _parts(flat))


def _read_pack(pack: Pack) -> int:
    """Read all of a pack, and return the number of its tensors."""
    sources = [*pack.weights.values(), *pack.seeds.values(), *(mask.bits for mask in pack.masks)]
    sources += [source for batch in pack.batches for source in batch.sources]
    arrays = [source.read() for source in sources]
    arrays += [array for optimizer in pack.optimizers for array in optimizer.arrays().values()]
    for array in arrays:
        for part in _parts(np.asarray(array).reshape(-1)):
            part.sum()  # reading every element detects a truncated file
    return len(arrays)


def _read_trace(step: Step) -> None:
    """Read the calls of a step's trace, and the tensors that the trace stores in full."""
    list(step.trace.calls)
    for tensor in step.trace.tensors:
        if tensor.source is not None and not tensor.source.sketched:
            tensor.source.read()


def _parts(flat: np.ndarray, size: int = 1 << 22) -> Iterator[np.ndarray]:
    for start in range(0, flat.size, size):
        part = flat[start : start + size]
        yield part if part.dtype.kind in "biufc" else part.astype(np.float32)


def _missing_ranks(number: int, steps: list[Step], world_size: int) -> list[str]:
    present = {step.rank for step in steps if 0 <= step.rank < world_size}
    # Only the first ones, because the world size in a damaged or hostile run file may be any number.
    first = list(islice((rank for rank in range(world_size) if rank not in present), _NAMED + 1))
    if len(first) <= _NAMED:
        return [f"step {number}: rank {rank} of {world_size} is missing" for rank in first]
    named = ", ".join(map(str, first[:_NAMED]))
    return [f"step {number}: {world_size - len(present)} of {world_size} ranks are missing: {named}, ..."]


def _lacking(lacking: Mapping[int, list[int]], world_size: int) -> list[str]:
    """Return sentences about the steps of a finished run that some ranks did not write."""
    return [
        f"step {number} can't be read: of {world_size} ranks only {', '.join(map(str, ranks)) or 'none'} wrote it"
        for number, ranks in islice(lacking.items(), _NAMED)
    ] + ([f"and {len(lacking) - _NAMED} more such steps"] if len(lacking) > _NAMED else [])


def _lost(path: AnyPath) -> list[str]:
    """Return a sentence with the number of steps that the recorder could not write into its store, or no sentence."""
    count, why = lost_steps(path)
    return [f"{count} step{'s' if count > 1 else ''} could not be written into the store: {why}"] if count else []


def _leftovers(path: AnyPath, numbers: list[int], world_size: int, lacking: Container[int]) -> list[str]:
    remarks: list[str] = []
    if as_local(path) is None:  # a store has no temporary folders of unfinished steps
        return remarks
    for folder in sorted([*(path / STEPS).glob(".*"), *(path / PACKS).glob(".*")]):
        digits = folder.name[1:].partition(".")[0]
        if not digits.isdecimal() or int(digits) in lacking:
            continue
        ranks = [name for name in names_in(folder) if name.startswith("rank_")]
        text = f"step {int(digits)} was being written when its process died, or is being written ({folder.name})"
        if world_size > 1 and int(digits) not in numbers:
            text += f"; of {world_size} ranks {', '.join(ranks) or 'none'} wrote"
        remarks.append(text)
    return remarks
