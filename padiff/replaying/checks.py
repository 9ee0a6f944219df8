"""Checks before a replay: the run has packs, the model fits, and notes on random numbers that can't be replayed."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from padiff.dump import open_run
from padiff.dump.format import RUN_FILE
from padiff.dump.local import run_folder
from padiff.dump.read import FolderRun
from padiff.dump.remote_path import AnyPath, lies_in
from padiff.dump.replay_packs import Packs
from padiff.errors import RunFolderError, UsageError
from padiff.model.live_model import LiveModel
from padiff.records import Run, RunInfo, Step
from padiff.records.pack import Pack, leaves
from padiff.replaying.pinning import unpinned
from padiff.system.naming import first_few

_NAMED = 6


@dataclass(frozen=True)
class Reference:
    """A run whose packed steps are to be replayed.

    Attributes:
        path: the run folder as the user wrote it.
        run: the opened run.
        packs: packs by step number.
        numbers: numbers of the steps to replay.
    """

    path: str
    run: Run
    packs: Mapping[int, Pack]
    numbers: tuple[int, ...]


class OneRank:
    """One process's view of a run of several processes.

    Args:
        run: the whole run.
        rank: rank of the process.
    """

    def __init__(self, run: FolderRun, rank: int) -> None:
        self._run, self._rank = run, rank
        self.name, self.path = run.name, run.path

    @property
    def info(self) -> RunInfo:
        return self._run.info

    @property
    def packs(self) -> Mapping[int, Pack]:
        return _RankPacks(self._run.packs, self._rank)

    def numbers(self) -> list[int]:
        return self._run.numbers()

    def steps(self, number: int) -> list[Step]:
        return [self._run.steps(number)[self._rank]]

    def finished(self) -> bool:
        return self._run.finished()


class _RankPacks(Mapping[int, Pack]):
    def __init__(self, packs: Packs, rank: int) -> None:
        self._packs, self._rank = packs, rank

    def __getitem__(self, step: int) -> Pack:
        return self._packs.ranks(step)[self._rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._packs)

    def __len__(self) -> int:
        return len(self._packs)


def opened(
    reference: str | Path,
    dir_path: AnyPath | None,
    steps: Container[int] | None = None,
    place: tuple[int, int] = (0, 1),
) -> Reference:
    """Open a run with packs.

    Args:
        reference: the run folder.
        dir_path: folder that the candidate will be recorded into; `None` if it is not recorded.
        steps: numbers of the packed steps to replay. Default: all complete ones.
        place: rank of this process and number of processes. In a run of as many processes, this one replays its own
            rank's steps.

    Raises:
        UsageError: the run has no packs, or not the requested ones, or another number of processes recorded it.
    """
    path = run_folder(reference, "reference")
    run: Any = open_run(path)
    if dir_path is not None and lies_in(dir_path, path):
        inside = "" if lies_in(path, dir_path) else "inside of "
        raise UsageError(
            f"the candidate would be recorded into {dir_path}, which is {inside}the "
            "reference's folder: that is never written to. Give another folder"
        )
    packs, recorded = run.packs, set(run.numbers())
    packed = [number for number in packs if number in recorded]
    if not packed:
        what = "its packed steps were not recorded whole" if len(packs) else "it has no replay packs"
        raise UsageError(
            f"{reference} can't be replayed: {what}. Record it with padiff.record(..., replay_every_n_steps=500), "
            "or PaDiffCallback(..., replay_every_n_steps=500)"
        )
    rank, processes = place
    if run.info.world_size not in (1, processes):
        here = "this is one process" if processes == 1 else f"here are {processes}"
        raise UsageError(
            f"{reference} was recorded by {run.info.world_size} processes, each with its own batch, and {here}: a "
            "replay does each one's steps in a process of its own (padiff.replay in a loop that as many processes run, "
            "as torchrun or paddle.distributed.launch start them). Replay it so, or record the reference in one process"
        )
    if run.info.world_size > 1:
        view = OneRank(run, rank)
        return Reference(str(reference), view, view.packs, _chosen(packed, steps, reference))
    return Reference(str(reference), run, packs, _chosen(packed, steps, reference))


def _chosen(packed: Sequence[int], steps: Container[int] | None, reference: str | Path) -> tuple[int, ...]:
    if steps is None:
        return tuple(packed)
    if not isinstance(steps, Container) or isinstance(steps, (str, bytes)):
        raise UsageError(f"steps is a list of the steps' numbers, or a range of them, got {steps!r}")
    chosen = tuple(number for number in packed if number in steps)
    # A container without iteration, such as a Schedule, cannot list its steps.
    lacking = sorted(set(steps) - set(packed)) if isinstance(steps, Collection) else []
    if lacking or not chosen:
        what = f"no pack of step {lacking[0]}" if lacking else "no pack of the steps asked for"
        shown = ", ".join(map(str, packed[:_NAMED])) + (", ..." if len(packed) > _NAMED else "")
        raise UsageError(f"{reference} has {what}: packed are {shown}")
    return chosen


def check_model(model: LiveModel) -> None:
    """Refuse a model whose parameters are sharded over processes.

    Raises:
        UsageError: the model is sharded.
    """
    if any(model.framework.layers.sharded(node.layer) for node in model.nodes):
        raise UsageError("the model's parameters are spread over processes (FSDP): replay it in one process, unwrapped")


def notes_of(reference: Reference, model: LiveModel, optimizers: Sequence[Any]) -> Iterator[str]:
    """Yield notes on random numbers that can't be replayed, and on parts of the step that are not repeated."""
    unseen: dict[str, None] = {}
    notes: dict[str, None] = {}
    for number in reference.numbers:
        pack = reference.packs[number]
        unseen.update(dict.fromkeys(f"{drawn.layer} ({drawn.what})" for drawn in pack.unseen))
        notes.update(dict.fromkeys(pack.notes))
    alike = reference.run.info.framework == model.framework.name
    if unseen:
        instead = (
            "they are drawn from the same state of the generators, which gives the same where versions are the same"
            if alike
            else "their values differ here, and what follows from them: switch them off on both sides to compare these"
        )
        yield f"random numbers that the reference drew in {first_few(list(unseen), _NAMED)} can't be fed: {instead}"
    drawing = [node.path for node in model.nodes if node.layer.training and model.framework.masks.unfed(node.layer)]
    if drawing:
        named = first_few(drawing, _NAMED)
        yield f"random numbers that this model draws in {named} can't be fed: its dropout is its own"
    if any(model.framework.layers.compiled(node.layer) for node in model.nodes):
        yield "dropout in what is compiled can't be fed: the masks are this model's own"
    left = unpinned(reference.run.steps(reference.numbers[0])[0])
    if left:
        yield f"choices that can't be given to this model, which makes its own: {first_few(left, _NAMED)}"
    if not optimizers and reference.packs[reference.numbers[0]].optimizers:
        yield "no optimizer was given: forward and backward are done again, and no update"
    yield from (f"of the reference, {note}" for note in notes)


def check_free(folder: AnyPath) -> None:
    """Check that a folder holds no run yet.

    Raises:
        RunFolderError: the folder holds a run.
    """
    if (folder / RUN_FILE).exists():
        raise RunFolderError(
            f"{folder} holds a run already, and nothing of it is overwritten unasked. Give another folder, or "
            "existing='overwrite' to replace it"
        )


def failed_at(pack: Pack, exact: bool, error: Exception) -> str:
    """Return a message about an error in the user's loop: the step, and shapes of the batch."""
    described = []
    for batch in pack.batches[:1]:
        for name, part in (("inputs", (batch.args, batch.kwargs)), ("labels", batch.labels)):
            shapes = [f"{list(array.shape)} {array.dtype}" for array in (source.read() for source in leaves(part))]
            described += [f"{name} {', '.join(shapes)}"] if shapes else []
    how = " when it was done in float64" if exact else ""
    text = f"the loop was left by {type(error).__name__} at step {pack.step}{how}; model and optimizer are as they were"
    if exact:
        return f"{text}. Leave float64 away, or have the loop call replay.give_up(why) where it can't do a step.exact"
    return f"{text}. The step's batch: {'; '.join(described)}" if described else text
