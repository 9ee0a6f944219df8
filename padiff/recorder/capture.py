"""Recording of one step: attaches and detaches the hooks, and builds the `Step`."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from padiff.recorder.aside import aside
from padiff.recorder.capture_options import CaptureOptions
from padiff.recorder.copying import EVERYTHING, Copier, LevelOf, own_calls
from padiff.recorder.evaluation import TrainingHistory
from padiff.recorder.layers import FixedLayers, Layers
from padiff.recorder.losses import Losses
from padiff.recorder.packing import Packing
from padiff.recorder.parameter_map import ParameterMapCache
from padiff.recorder.parameters import Parameters
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.skip_log import SkippedTensor
from padiff.recorder.step_observer import StepObserver
from padiff.records import LOOP, Step
from padiff.system.guard import RAISING, Guard


class Capture:
    """Recorder of one step of one model.

    A capture keeps copies of tensors and weak references to them, never the tensors: a capture can't keep a graph
    alive, and there is no reference cycle between a capture and its model.

    Args:
        number: the step's number.
        layers: the model's layers, updated when the model changes.
        optimizers: optimizers whose gradients and updates are recorded. Without any, the gradients left by backward
            are recorded.
        records: buffer that receives the records. Default: a new buffer.
        levels: level of detail by layer path and stage. Default: full tensors.
        owned: parameters and buffers of the layers, as earlier captures of the model found them.
        stepped: callback after an optimizer's step; its argument is the number of the optimizer's steps so far
            within this step.
        stacks: True to keep each call's Python stack, as `stacks`.
        consuming: callback before an optimizer's step; its argument is the optimizer.
        functions: True to trace the functions and operators called by layers' code.
        losses: True to record the inputs and outputs of loss functions.
        packing: True to keep all that a replay of the step needs.
        whole: True to trace tensors in full.
        loss_logged: True if losses are logged; a scalar output ``loss`` of the model is then not an activation.
        guard: handler of errors in hooks. Default: errors are raised.
        history: evidence from earlier captures that the model is trained.
    """

    def __init__(
        self,
        number: int,
        layers: Layers | FixedLayers,
        optimizers: Sequence[Any] = (),
        records: RecordBuffer | None = None,
        levels: LevelOf = EVERYTHING,
        owned: ParameterMapCache | None = None,
        stepped: Callable[[int], None] | None = None,
        stacks: bool = False,
        consuming: Callable[[Any], None] | None = None,
        functions: bool = False,
        losses: bool = False,
        packing: bool = False,
        whole: bool = False,
        loss_logged: bool = False,
        guard: Guard = RAISING,
        history: TrainingHistory | None = None,
    ) -> None:
        self.number = number
        history = TrainingHistory() if history is None else history
        options = CaptureOptions(stepped, stacks, consuming, functions, losses, packing, whole, loss_logged, history)
        records = RecordBuffer(Copier(layers.framework)) if records is None else records
        self._framework, self._records = layers.framework, records
        self._observer = StepObserver(number, layers, optimizers, records, levels, owned, options, guard)
        self._calls, self._tracer = self._observer.calls, self._observer.tracer
        self._logged = 0

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of the training observed in the step (`padiff.records.settings`)."""
        return self._observer.settings

    @property
    def stacks(self) -> dict[tuple[str, int], traceback.StackSummary]:
        """Return the Python stack of each layer's call (`StepObserver.stacks`)."""
        return self._observer.stacks

    @property
    def parameters(self) -> Parameters:
        """Return the recorder of parameters and buffers."""
        return self._observer.parameters

    @property
    def autocast(self) -> dict[str, Any]:
        """Return the autocast state in which the model was called; empty before the first call."""
        return self._observer.autocast

    @property
    def packing(self) -> Packing | None:
        """Return the recorder of replay data, or None if the step is not packed."""
        return self._observer.packing

    @property
    def losses(self) -> Losses | None:
        """Return the recorder of loss functions, or None if losses are not recorded."""
        return self._observer.losses

    # -- hooks on and off ---------------------------------------------------------------------------------

    def attach(self) -> None:
        """Attach the hooks, if they are not attached yet. The hooks are attached in due steps only."""
        self._observer.attach()

    def take_over(self, before: Capture) -> None:
        """Take over the attached hooks of the previous step's capture, which is faster than attaching new hooks."""
        self._observer.take_over(before._observer)

    def detach(self) -> None:
        """Detach all hooks; may be called twice."""
        self._observer.detach()

    def raise_interrupt(self) -> None:
        """Raise the `KeyboardInterrupt` that was deferred in backward, if any."""
        self._observer.interrupts.raise_kept()

    # -- the end of the step ------------------------------------------------------------------------------

    @aside
    def log_loss(self, value: Any) -> None:
        """Record the loss of a micro-batch: a number, or a tensor of one element."""
        if self._framework.tensors.is_tensor(value):
            if self._tracer.functions:
                self._tracer.noted("log_loss", value)
            try:
                array = self._records.copier.copy(value)
            except Exception as error:
                self._records.left_out.add(LOOP, SkippedTensor.because(error).reason, training=True)
                return
        else:
            array = np.asarray(value, dtype=np.float64)
        self._records.scalar("loss", "loss", float(array.astype(np.float64).mean()), self._logged, str(array.dtype))
        self._logged += 1

    @property
    def running(self) -> list[str]:
        """Return the paths of the layers whose calls are running, the outermost first."""
        return [call.node.path for call in self._calls.running]

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Suspend recording inside of a ``with`` block."""
        hooks = self._observer.hooks
        observer, hooks.observer = hooks.observer, None
        try:
            with own_calls():
                yield
        finally:
            hooks.observer = observer

    @property
    def micro_batch(self) -> int | None:
        """Return the index of the current or last training call of the whole model, or None before the first."""
        calls = self._calls.trained(self._observer.watched.nodes[0].path)
        return calls - 1 if calls else None

    @property
    def empty(self) -> bool:
        """Return True if no layer was called and nothing was recorded."""
        return not len(self._records) and not self._calls.any

    @property
    def called(self) -> frozenset[str]:
        """Return the paths of the layers that were called."""
        self._observer.planning.write()
        return self._calls.paths

    def finish(self, rank: int = 0, loss_scale: float = 1.0, updates: bool = True, detach: bool = True) -> Step:
        """Detach the hooks and return the step; the capture is empty afterwards.

        Args:
            updates: False if no optimizer has stepped yet.
            detach: False to leave the layers' hooks attached for the next step's capture (`take_over`).
        """
        with self.unheard():
            regions = () if self._observer.regions is None else self._observer.regions.rerun()
        self._observer.planning.settle()
        self.parameters.finish(updates)
        if self.losses is not None:
            if not self._logged:
                self.losses.finish(self._calls.micro_batches, loss_scale, bool(self._calls.evaluations))
            self.settings.update(self.losses.settings)
            self.losses.close()
        if detach:
            self.detach()
        self._observer.end()
        self._records.copier.fetch()
        step = self._whole(rank, loss_scale) or self.peek(rank, loss_scale)
        self._observer.clear()
        return replace(step, regions=regions) if regions else step

    def _whole(self, rank: int, loss_scale: float) -> Step | None:
        """Return the step with all its records, or None if some records have to be filtered out.

        Records are filtered out if the step has calls in both modes, or recomputed calls.
        """
        if self._calls.mixed or self._calls.recomputed:
            return None
        records, trace = self._tracer.finished()
        calls = self._calls
        return Step(
            self.number,
            records,
            rank,
            loss_scale,
            calls.micro_batches,
            self._notes,
            trace=trace,
            evaluations=calls.evaluated,
        )

    @aside
    def parameters_now(self) -> Step:
        """Return a step with the current weights, buffers and gradients."""
        self.parameters.snapshot()
        self.parameters.finish(updates=False)
        return self.peek()

    @aside
    def weights(self) -> Step:
        """Return a step with the current weights and buffers only."""
        self.parameters.snapshot()
        return self.peek()

    @property
    def left_out(self) -> tuple[str, ...]:
        """Return a sentence for each kind of tensor or call that could not be recorded.

        Skipped tensors of evaluation calls between training calls are not mentioned.
        """
        return self._records.left_out.notes(training_only=self._calls.in_both_modes)

    @property
    def evaluations(self) -> int:
        """Return the number of calls in evaluation mode that are not recorded."""
        return self._calls.evaluations

    @property
    def _notes(self) -> tuple[str, ...]:
        count = self._calls.evaluations
        evaluated = f"{count} call(s) in evaluation mode within the step are not recorded"
        return (*((evaluated,) if count else ()), *self.left_out)

    def peek(self, rank: int = 0, loss_scale: float = 1.0) -> Step:
        """Return a step with the records so far; recording continues."""
        self._observer.planning.abandon()
        # If the step also has calls in training mode, its calls in evaluation mode are not recorded.
        training_only = self._calls.in_both_modes
        return Step(
            number=self.number,
            records=self._records.records(training_only, self._calls.recomputed),
            rank=rank,
            loss_scale=loss_scale,
            micro_batches=self._calls.micro_batches,
            notes=self._notes,
            evaluations=self._calls.evaluated,
            trace=self._tracer.trace(training_only),
        )
