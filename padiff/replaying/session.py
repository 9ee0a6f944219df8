"""``replay``: the packed steps of a run again with another model, each from where the recorded run was."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from padiff.compare import Policy, RunComparison, compare_runs
from padiff.dump import open_run
from padiff.dump.local import local_folder
from padiff.errors import NothingToCompareError, UsageError
from padiff.frameworks.base import Handle
from padiff.model.live_model import LiveModel
from padiff.recorder.factory import recorder_of
from padiff.recorder.schedule import Schedule
from padiff.records import STAGES, Report, TensorSource
from padiff.replaying.carrying import Carrying
from padiff.replaying.checks import Reference, check_model, notes_of, opened
from padiff.replaying.feeding import MaskFeeder
from padiff.replaying.isolation import Isolator
from padiff.replaying.kept import Kept, draw_like
from padiff.replaying.own_errors import Isolation
from padiff.replaying.step import ReplayBatch, ReplayStep
from padiff.system.switches import say

# Without an optimizer nothing is clipped, and nothing is updated.
_WITHOUT_UPDATE = tuple(stage for stage in STAGES if stage not in ("grad", "update"))


class Replay:
    """Does packed steps again; made by `replay`, used in a ``with``.

    A loop with a host of its own (a callback) uses `begin`, `end` and `discard` instead of iterating.

    Attributes:
        numbers: the steps, as the reference counts them.
        done: those that were done so far.
        notes: what could not be fed or was not used, in words.
    """

    def __init__(
        self,
        reference: Reference,
        model: Any,
        dir_path: str | Path,
        optimizers: Sequence[Any],
        layer_map: Any,
        policy: Policy | None,
        existing: str,
        partial: bool = False,
    ) -> None:
        self._reference, self._model = reference, LiveModel.of(model)
        self._dir_path, self._layer_map, self._policy = Path(dir_path), layer_map, policy
        self._optimizers = list(optimizers)
        self.numbers = list(reference.numbers)
        self.done: list[int] = []
        self.notes: dict[str, None] = {}
        self._recorder = recorder_of(
            model,
            self._dir_path,
            replay_of=reference.run.info.identity,
            every_n_steps=Schedule(steps=self.numbers),
            optimizer=self._optimizers or None,
            existing=existing,
        )
        self._carrying = Carrying(reference, self._model, self._optimizers, layer_map, partial)
        self._kept: Kept | None = None
        self._feeding: Handle | None = None
        self._feeder: MaskFeeder | None = None
        self._isolator: Isolator | None = None
        self._report: Report | None = None
        self._batch: int | None = None

    # -- the with and the loop -----------------------------------------------------------------------------

    def __enter__(self) -> Replay:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finished=kind is None)

    def __iter__(self) -> Iterator[ReplayStep]:
        """Each packed step, with the model, its optimizer and random numbers as the reference's were before it.

        A step ends where the next one is asked for; one that the loop is left in is not recorded.
        """
        if self._kept is None:
            raise UsageError("a replay does its steps inside of `with padiff.replay(...) as replay:`")
        for number in self.numbers:
            if number in self.done:
                continue
            step = self.begin(number)
            whole = False
            try:
                yield step
                whole = True
            finally:
                if not whole:
                    self.discard()
            self.end()

    @property
    def report(self) -> Report:
        """The steps that were done, each compared by itself with the reference's, at the tolerance of a first step.

        Raises:
            NothingToCompareError: none was done.
        """
        if not self.done:
            raise NothingToCompareError("no packed step was done again, so there is nothing to compare")
        if self._report is None:
            self._recorder.flush()
            self._report = compare_runs(
                self._reference.path,
                self._dir_path,
                layer_map=self._layer_map,
                policy=self._policy,
                stages=STAGES if self._optimizers else _WITHOUT_UPDATE,
                steps=set(self.done),
                alone=True,
            )
        return self._report

    def isolate(self, step: ReplayStep) -> Isolation:
        """Look at each layer by itself while the step under way is done: run on what the reference's layer was given,
        and its backward on the gradients that the reference's outputs had, it inherits nothing.

        To be called before the step is done; that takes longer then, as each layer runs again for each layer around it.

        Returns:
            The layers, filled while the step is done; a table as text.

        Raises:
            UsageError: it is not the step under way.
        """
        if self._feeder is None or self._recorder.step != step.number or self._recorder.recorded_anything:
            raise UsageError("replay.isolate(step) is called in the loop, before the step is done")
        found = Isolation(step.number)
        reference = self._reference.run.steps(step.number)[0]
        self._isolator = Isolator(
            self._model, reference, self._carrying.partners, self._feeder, self._recorder.unheard, found
        )
        return found

    # -- for hosts -----------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """The factor that the candidate scales its loss by; to be set where it does (AMP). Default 1."""
        return self._recorder.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._recorder.loss_scale = scale

    def check_batches(self, accumulated: Any) -> None:
        """Make sure that a loop which steps after so many micro-batches can do all steps.

        Raises:
            UsageError: a step has another number of them.
        """
        for number in self.numbers:
            there = len(self._reference.packs[number].batches)
            if isinstance(accumulated, int) and there != accumulated:
                raise UsageError(
                    f"step {number} of {self._reference.path} has {there} micro-batches, this training accumulates "
                    f"{accumulated}: let it accumulate {there}"
                )

    def open(self) -> None:
        """Keep what the model and the optimizers are, and make the candidate's run folder.

        Raises:
            UsageError: the first step can't be done with this model; nothing was changed.
        """
        if self._kept is not None:
            raise UsageError("this replay is open already")
        check_model(self._model)
        self._kept = Kept(self._model)
        try:
            # All that may refuse the model does so before anything is written.
            self._carrying.carry(self.numbers[0], self._kept.undo)
            if self._carrying.left:
                say(f"replay: left as it is, having no partner: {', '.join(self._carrying.left[:6])}")
            for note in notes_of(self._reference, self._model, self._optimizers):
                say(f"replay: {note}")
            self._recorder.open()
        except BaseException:
            self._give_back()
            raise

    def begin(self, number: int) -> ReplayStep:
        """Put the model where the reference was before a packed step, and record from now on.

        Raises:
            UsageError: the step can't be done with this model.
        """
        assert self._kept is not None
        self._check_same()
        pack = self._reference.packs[number]
        self._carrying.carry(number, self._kept.undo)
        framework = self._model.framework
        framework.layers.clear_gradients(self._model.model)
        draw_like(self._model, pack.seeds)
        self._recorder.step = number
        self._batch = None
        self._recorder.attach()
        self._feeder = MaskFeeder(
            pack.masks,
            self._carrying.partners,
            lambda: self._recorder.running,
            framework.hooks.recomputing,
            self._micro_batch,
            # What is drawn besides comes from the same state of the generators, after the same draws.
            draws=bool(pack.unseen) and pack.framework == framework.name,
        )
        if not any(framework.layers.compiled(node.layer) for node in self._model.nodes):
            self._feeding = framework.randomness.feed_masks(self._feeder)
        near = next((tensor for _, tensor in self._model.tensors()), None)

        def make(source: TensorSource) -> Any:
            return framework.tensors.make(source.read(), near)

        several = len(pack.batches) > 1
        return ReplayStep(
            pack,
            tuple(
                ReplayBatch(batch, make, f"{f'micro-batch {k} of ' if several else ''}step {number}", self._asked(k))
                for k, batch in enumerate(pack.batches)
            ),
        )

    def _asked(self, number: int) -> Callable[[], None]:
        def asked() -> None:
            self._batch = number

        return asked

    def _micro_batch(self) -> int | None:
        """Which micro-batch is under way: counted where the model is called as a whole, else the one asked for last."""
        counted = self._recorder.micro_batch
        return counted if counted is not None else self._batch

    def _check_same(self) -> None:
        """Refuse a model that has become another one: what was carried to it is of the one that it was."""
        now = {node.path: node.layer for node in LiveModel(self._model.model).nodes}
        before = {node.path: node.layer for node in self._model.nodes}
        other = [path for path in {**before, **now} if before.get(path) is not now.get(path)]
        if other:
            raise UsageError(
                f"the model has other layers than when the replay began ({', '.join(other[:4])}): a replay does the "
                "steps of one model. Leave it as it is in the loop"
            )

    def attach(self) -> None:
        """Hooks on, where a host took them off between two batches."""
        self._recorder.attach()

    def detach(self) -> None:
        """Hooks off; the step goes on."""
        self._recorder.detach()

    def end(self) -> None:
        """The packed step is done."""
        number, isolator = self._recorder.step, self._isolator
        self._stop_feeding()
        written = self._recorder.end_step()
        self._recorder.detach()
        if written:
            self.done.append(number)
            self._report = None
        if written and isolator is not None:
            # What ends elsewhere shows when the step is compared.
            self._recorder.flush()
            comparison = RunComparison(self._reference.run, open_run(self._dir_path), self._layer_map, alone=True)
            comparison.diffs(number)
            isolator.finish(comparison.alignment.cut_elsewhere)

    def discard(self) -> None:
        """Forget what was recorded of the step under way."""
        self._stop_feeding()
        self._recorder.discard()

    def close(self, finished: bool = True) -> None:
        """Write what was recorded, and give the model and the optimizers back as they were. May be called twice."""
        if self._kept is None:
            return
        try:
            self._stop_feeding()
            self._recorder.close(finished, raise_errors=finished)
        finally:
            self._give_back()
        for note in self.notes if finished else ():
            say(f"replay: {note}")

    def _give_back(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.give_back()

    def _stop_feeding(self) -> None:
        handle, self._feeding = self._feeding, None
        isolator, self._isolator = self._isolator, None
        for one in (handle, isolator):
            if one is not None:
                one.remove()
        feeder, self._feeder = self._feeder, None
        if feeder is None or not self._recorder.recorded_anything:
            return
        for call in feeder.unanswered:
            self.notes[f"{call} has no mask of the reference's: it dropped by itself"] = None
        for mask in feeder.left:
            self.notes[f"the reference drops in {mask.layer} ({mask.function}); nothing here took that mask"] = None


def replay(
    reference: str | Path,
    model: Any,
    dir_path: str | Path,
    *,
    optimizer: Any = None,
    layer_map: Any = None,
    steps: Container[int] | None = None,
    policy: Policy | None = None,
    existing: str = "error",
    partial: bool = False,
) -> Replay:
    """Do the packed steps of a run again with another model, and compare each by itself.

    ``with padiff.replay("runs/torch", net, "runs/paddle", optimizer=optimizer) as replay: for step in replay: ...``
    Before each step, the model's weights and buffers, the optimizer's state and learning rates, the batch and what
    dropout drops are the reference's. So nothing is inherited from the steps before, and the report judges each at the
    tolerance of a first step. The reference's framework need not be installed; its folder is only read. Afterwards,
    also after an error, the model and the optimizer are what they were, with gradients cleared.

    Args:
        reference: the run to trust, recorded with ``replay_every_n_steps``.
        model: the candidate: a torch Module or a paddle Layer, in the mode that it trains in.
        dir_path: the run folder that the candidate is recorded into.
        optimizer: the candidate's optimizer, or several. Without one, forward and backward alone are done.
        layer_map: layers that answer to each other, as `compare_runs` takes them.
        steps: which of the packed steps. Default: all.
        policy: when a diff passes. Default: `NoisePolicy`.
        existing: what to do with a run that ``dir_path`` holds: ``"error"`` (default) or ``"overwrite"``.
        partial: carry all that fits, and leave and name the rest (a head that only one side has), instead of refusing
            where not everything fits.

    Raises:
        RunFolderError: a folder can't be read, or written to.
        UsageError: the run has no such pack, or one that this model can't be given; an argument is wrong.
    """
    place = local_folder(dir_path, "dir_path")
    found = opened(reference, place, steps)
    if existing not in ("error", "overwrite"):
        raise UsageError(f"existing is 'error' or 'overwrite', got {existing!r}")
    listed = [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    return Replay(found, model, place, listed, layer_map, policy, existing, partial)
