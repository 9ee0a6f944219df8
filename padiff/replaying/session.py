"""``replay``: packed steps with another model, measured and recorded, and the user's state restored."""

from __future__ import annotations

import time
from collections.abc import Container, Generator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from padiff.compare import Policy, RunComparison, compare_runs
from padiff.dump import open_run
from padiff.dump.store import AnyPath, run_folder
from padiff.dump.weight_files import write_floors
from padiff.errors import NothingToCompareError, PadiffError, UsageError
from padiff.frameworks import framework_of
from padiff.model.tree import LiveModel
from padiff.recorder.factory import recorder_of
from padiff.recorder.options import Schedule
from padiff.records import STAGES, Report
from padiff.replaying.calibrating import Measuring
from padiff.replaying.checks import (
    Reference,
    StateRestorer,
    StateSnapshot,
    check_free,
    check_model,
    failed_at,
    notes_of,
    opened,
)
from padiff.replaying.feeding import RecordedChoice, choices_of
from padiff.replaying.isolation import Isolation, Isolator
from padiff.replaying.step_runner import RUNS, ReplayStep, StepRunner
from padiff.system.terminal import say

# Stages of a replay without an optimizer: no clipped gradients and no updates.
_WITHOUT_UPDATE = tuple(stage for stage in STAGES if stage not in ("grad", "update"))

# Seconds to wait for other processes to write a step, and between two checks. Chosen: all processes run in step.
_PATIENCE, _LOOK = 120.0, 0.1


class Replay:
    """A replay of packed steps, created by `replay` and used in a ``with`` block.

    Host callbacks use `steps`, `attach` and `detach` instead of iterating.

    Attributes:
        numbers: numbers of the steps in the reference.
        done: numbers of the completed steps.
    """

    def __init__(
        self,
        reference: Reference,
        model: Any,
        dir_path: str | AnyPath,
        optimizers: Sequence[Any],
        layer_map: Any,
        policy: Policy | None,
        existing: str,
        partial: bool = False,
        floors: int = 0,
        float64: bool = False,
    ) -> None:
        self._reference, self._model = reference, LiveModel.from_model(model)
        self._dir_path, self._layer_map, self._policy = run_folder(dir_path, "dir_path"), layer_map, policy
        self._optimizers, self._existing = list(optimizers), existing
        self.numbers = list(reference.numbers)
        self.done: list[int] = []
        self._floors, self._float64 = floors, float64
        self._recorder = recorder_of(
            model,
            self._dir_path,
            replay_of=reference.run.info.identity,
            every_n_steps=Schedule(steps=self.numbers),
            optimizer=self._optimizers or None,
            existing=existing,
        )
        self._carrying = StateRestorer(reference, self._model, self._optimizers, layer_map, partial)
        self._doing = StepRunner(self._model, self._optimizers, self._recorder, self._carrying, self._choices)
        self._measuring: Measuring | None = None
        self._isolation: Isolation | None = None
        self._isolator: Isolator | None = None
        self._report: Report | None = None

    def _choices(self, number: int) -> Sequence[RecordedChoice]:
        return choices_of(self._reference.run.steps(number)[0]) if number in self.numbers else ()

    @property
    def notes(self) -> dict[str, None]:
        """Return messages about masks that could not be replayed or were not used."""
        return self._doing.notes

    # -- the with and the loop -----------------------------------------------------------------------------

    def __enter__(self) -> Replay:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finished=kind is None)
        if self._doing.begun is not None and isinstance(error, Exception) and not isinstance(error, PadiffError):
            say(f"replay: {failed_at(*self._doing.begun, error)}")

    def __iter__(self) -> Iterator[ReplayStep]:
        """Yield each packed step, after setting the model, its optimizer and random states to the reference's.

        A step ends when the next one is requested; a step that the loop leaves early is not recorded. If floors are
        measured, each step is repeated several times (``step.moved``), and repetitions are not recorded.
        """
        steps = self.steps()
        try:
            for step in steps:
                if step is not None:
                    yield step
        finally:
            steps.close()

    def steps(self) -> Generator[ReplayStep | None, None, None]:
        """Yield each packed step like iteration does, and `None` between two steps, while no step is active."""
        if self._doing.kept is None:
            raise UsageError("a replay does its steps inside of `with padiff.replay(...) as replay:`")
        waiting = [number for number in self.numbers if number not in self.done]
        for number in waiting:
            if number != waiting[0]:
                yield None
            step = self.begin(number)
            completed = False
            try:
                yield step
                completed = True
            finally:
                if not completed:
                    self.discard()
            self.end()
            if number in self.done and (self._floors or self._float64):
                yield from self._measured(number)

    def _measured(self, number: int) -> Iterator[ReplayStep | None]:
        """Repeat the step with perturbations, and write its floors into the candidate's folder."""
        self._recorder.flush()
        run = open_run(self._dir_path)
        self._measuring = measuring = Measuring(run.steps(number)[0], run.info.environment)
        yield from measuring.steps(self._doing, self._reference.packs[number], self._floors, self._float64)
        self._measuring, self._report = None, None
        floors = measuring.floors()
        write_floors(self._dir_path, floors)
        for note in floors.notes:
            say(f"replay: floors of step {number}: {note}")

    def give_up(self, why: str) -> None:
        """Skip a repeated step (``step.moved``) that the loop can't run; floors are measured without it.

        Raises:
            UsageError: no repeated step is active.
        """
        if self._measuring is None:
            raise UsageError("replay.give_up(why) is for steps that are done once more to measure floors (step.moved)")
        self._measuring.give_up(why)

    @property
    def report(self) -> Report:
        """Compare each completed step by itself with the reference's, at the tolerance of a first step.

        Raises:
            NothingToCompareError: no step was completed.
        """
        if not self.done:
            raise NothingToCompareError(
                "no packed step was done again, so there is nothing to compare: the loop over the replay has to call "
                "the model in each step, and to go on to the next one or to the end"
            )
        if self._report is None:
            self._recorder.flush()
            self._wait_for_others()
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

    def _wait_for_others(self) -> None:
        """Wait until all processes have written the completed steps.

        Raises:
            UsageError: another process did not write a step in time.
        """
        until = time.monotonic() + _PATIENCE
        while self._recorder.info.world_size > 1:
            missing = sorted(set(self.done) - set(open_run(self._dir_path).numbers()))
            if not missing:
                return
            if time.monotonic() > until:
                raise UsageError(
                    f"step {missing[0]} was not written by all {self._recorder.info.world_size} processes within "
                    f"{_PATIENCE:g} seconds: let each of them do the same steps"
                )
            time.sleep(_LOOK)

    def isolate(self, step: ReplayStep) -> Isolation:
        """Measure the error of each layer by itself during the current step.

        Each layer runs on the inputs of the reference's layer, and its backward on the gradients of the reference's
        outputs, so that no error is inherited. Call this before running the step. The step then takes longer, because
        each layer runs once more for each layer around it.

        Returns:
            The layers' errors, filled during the step; its text is a table.

        Raises:
            UsageError: `step` is not the current step, or it has begun already, or several processes replay.
        """
        if step.moved and self._isolation is not None:
            return self._isolation  # the table of the unperturbed step
        if self._recorder.info.world_size > 1:
            raise UsageError("replay.isolate(step) is for a replay in one process: this is one of several")
        feeder = self._doing.feeder
        if feeder is None or self._recorder.step != step.number or self._recorder.recorded_anything:
            raise UsageError("replay.isolate(step) is called in the loop, before the step is done")
        self._isolation = table = Isolation(step.number)
        reference = self._reference.run.steps(step.number)[0]
        self._isolator = Isolator(
            self._model, reference, self._carrying.partners, feeder, self._recorder.unheard, table
        )
        return table

    # -- for hosts -----------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """Return the factor that scales the candidate's loss (AMP). Default 1; the loop sets another factor."""
        return self._recorder.loss_scale

    @loss_scale.setter
    def loss_scale(self, scale: float) -> None:
        self._recorder.loss_scale = scale

    def check_batches(self, accumulated: Any) -> None:
        """Check that each step has as many micro-batches as the loop accumulates.

        Raises:
            UsageError: a step has another number of micro-batches.
        """
        for number in self.numbers:
            batches = len(self._reference.packs[number].batches)
            if isinstance(accumulated, int) and batches != accumulated:
                raise UsageError(
                    f"step {number} of {self._reference.path} has {batches} micro-batches, this training accumulates "
                    f"{accumulated}: let it accumulate {batches}"
                )

    def open(self) -> None:
        """Save the state of model and optimizers, and create the candidate's run folder.

        Raises:
            UsageError: the first step can't be run with this model; nothing was changed.
        """
        if self._doing.kept is not None:
            raise UsageError("this replay is open already")
        check_model(self._model)
        if self._existing == "error" and self._recorder.info.world_size == 1:
            check_free(self._dir_path)
        self._doing.kept = snapshot = StateSnapshot(self._model)
        try:
            # Errors about the model are raised before anything is written.
            self._carrying.carry(self.numbers[0], snapshot.undo)
            if self._carrying.left:
                say(f"replay: left as it is, having no partner: {', '.join(self._carrying.left[:6])}")
            for note in notes_of(self._reference, self._model, self._optimizers):
                say(f"replay: {note}")
            self._recorder.open()
        except BaseException:
            self._give_back()
            raise

    def begin(self, number: int) -> ReplayStep:
        """Set the model to the reference's state before a packed step, and start recording.

        Raises:
            UsageError: the step can't be run with this model.
        """
        return self._doing.start_step(self._reference.packs[number])

    def attach(self) -> None:
        """Attach the hooks again, if a host detached them between two batches."""
        self._recorder.attach()

    def detach(self) -> None:
        """Detach the hooks; the step continues."""
        self._recorder.detach()

    def end(self) -> None:
        """End the packed step, and write its records."""
        number, isolator = self._recorder.step, self._isolator
        self._stop_isolating()
        self._doing.stop()
        self._doing.begun = None
        written = self._recorder.end_step()
        self._recorder.detach()
        if written:
            self.done.append(number)
            self._report = None
        if written and isolator is not None:
            # The comparison of the step shows which layers end at different places of the computation.
            self._recorder.flush()
            comparison = RunComparison(self._reference.run, open_run(self._dir_path), self._layer_map, alone=True)
            comparison.diffs(number)
            isolator.drop_unpaired(comparison.alignment.cut_elsewhere)

    def discard(self) -> None:
        """Abandon the current step, and discard its records."""
        self._stop_isolating()
        self._doing.discard()

    def close(self, finished: bool = True) -> None:
        """Write the records, and restore the model and the optimizers. A second call does nothing."""
        if self._doing.kept is None:
            return
        try:
            self._stop_isolating()
            self._doing.discard()
            self._recorder.close(finished, raise_errors=finished)
        finally:
            self._give_back()
        for note in self.notes if finished else ():
            say(f"replay: {note}")

    def _give_back(self) -> None:
        snapshot, self._doing.kept = self._doing.kept, None
        if snapshot is not None:
            snapshot.give_back()

    def _stop_isolating(self) -> None:
        isolator, self._isolator = self._isolator, None
        if isolator is not None:
            isolator.remove()


def replay(
    reference: str | Path,
    model: Any,
    dir_path: str | AnyPath,
    *,
    optimizer: Any = None,
    layer_map: Any = None,
    steps: Container[int] | None = None,
    policy: Policy | None = None,
    existing: str = "error",
    partial: bool = False,
    floors: int | bool = False,
    float64: bool = False,
) -> Replay:
    """Repeat the packed steps of a run with another model, and compare each step by itself.

    ``with padiff.replay("runs/torch", net, "runs/paddle", optimizer=optimizer) as replay: for step in replay: ...``

    Before each step, the model's weights and buffers, the optimizer's state and learning rates, the batch and the
    dropout masks are set to the reference's. So no error is inherited from earlier steps, and the report judges each
    step at the tolerance of a first step. The reference's framework need not be installed; its folder is only read. At
    the end, also after an error, model and optimizer are restored, with gradients cleared.

    Args:
        reference: the reference run, recorded with ``replay_every_n_steps``.
        model: the candidate: a torch Module or a paddle Layer, in its training mode.
        dir_path: run folder for the candidate's records.
        optimizer: the candidate's optimizer, or several. Without one, only forward and backward are repeated.
        layer_map: pairs of layers, in the form that `compare_runs` accepts.
        steps: numbers of the packed steps to repeat. Default: all.
        policy: decides which diffs pass. Default: `NoisePolicy`.
        existing: handling of an existing run in ``dir_path``: ``"error"`` (default) or ``"overwrite"``.
        partial: True to copy all weights that fit, and name the others (a head that only one model has); False to
            refuse if some do not fit.
        floors: number of additional repetitions that measure rounding errors (`True`: 8), with weights and inputs
            perturbed by units in the last place. The loop receives each step that many times more, and the report uses
            the measured limits.
        float64: True to repeat each step in float64, which shows which of the two sides is closer to the exact result.

    Raises:
        RunFolderError: a folder can't be read, or written to.
        UsageError: a pack is missing or does not fit this model, or an argument is wrong.
    """
    folder = run_folder(dir_path, "dir_path")
    processes = framework_of(LiveModel.from_model(model).model).environment.distributed()
    packed = opened(reference, folder, steps, processes)
    if existing not in ("error", "overwrite"):
        raise UsageError(f"existing is 'error' or 'overwrite', got {existing!r}")
    runs = runs_of(floors)
    if processes[1] > 1 and (runs or float64):
        raise UsageError(
            f"floors and float64 are measured in one process, and this is one of {processes[1]}: leave them away here"
        )
    listed = [] if optimizer is None else list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    return Replay(packed, model, folder, listed, layer_map, policy, existing, partial, runs, float64)


def runs_of(floors: Any) -> int:
    """Return the number of repetitions that measure floors; 0 for none.

    Raises:
        UsageError: the value is not a number of runs.
    """
    runs = RUNS if floors is True else 0 if floors is False else floors
    if not isinstance(runs, int) or runs < 0:
        raise UsageError(f"floors is True, False or a number of runs of at least 1, got {floors!r}")
    return runs
