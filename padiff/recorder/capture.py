"""Recording of one step: attaches and detaches hooks, builds the `Step`, and warns of what it cannot see."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from padiff.recorder.copying import EVERYTHING, Copier, LevelOf, own_calls
from padiff.recorder.failures import aside
from padiff.recorder.layers import FixedLayers, Layers
from padiff.recorder.losses import Losses
from padiff.recorder.model_hooks import CaptureOptions, TrainingHistory
from padiff.recorder.output import MemoryRun
from padiff.recorder.packing import Packing
from padiff.recorder.parameter_map import ParameterMapCache
from padiff.recorder.parameters import Parameters
from padiff.recorder.record_buffer import RecordBuffer
from padiff.recorder.step_observer import StepObserver
from padiff.recorder.tensor_copy import SkippedTensor
from padiff.recorder.tracer import Prelude
from padiff.records import LOOP, Step, bytes_text
from padiff.system.guard import RAISING, Guard, guarded
from padiff.system.terminal import warn


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
        prelude: Prelude | None = None,
    ) -> None:
        self.number = number
        history = TrainingHistory() if history is None else history
        options = CaptureOptions(
            stepped, stacks, consuming, functions, losses, packing, whole, loss_logged, history, prelude
        )
        records = RecordBuffer(Copier(layers.framework)) if records is None else records
        self._framework, self._records = layers.framework, records
        self._observer = StepObserver(number, layers, optimizers, records, levels, owned, options, guard)
        self._calls, self._tracer = self._observer.calls, self._observer.tracer
        self._logged = 0

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of the training observed in the step (`padiff.records.declared`)."""
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
    def has_layers(self) -> bool:
        """Return False for a dictionary that holds tensors alone (`StepObserver.has_layers`)."""
        return self._observer.has_layers

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
                self.losses.finish(self._calls.micro_batches, loss_scale, self._calls.mixed)
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


class CurrentStep:
    """The current step of a recorder. In a step that is not recorded, all calls are cheap and do nothing.

    Attributes:
        guard: guard that stops internal errors of padiff.
    """

    guard: Guard

    def __init__(self) -> None:
        self._capture: Capture | None = None
        #: Capture of the previous step, whose hooks are still attached for the current step.
        self._hooked: Capture | None = None

    @guarded()
    def log_loss(self, loss: Any) -> None:
        """Record the loss of a micro-batch: a number, or a tensor of one element. Does nothing in a step not due."""
        if self._capture is not None:
            self._capture.log_loss(loss)

    @guarded()
    def log_batch(self, inputs: Any, labels: Any = None) -> None:
        """Log the next batch for a replay pack, if the recorder cannot see the batch. Does nothing in steps without a
        pack.

        The recorder sees the arguments of the model, and those of the framework's loss functions outside of the model.

        Args:
            inputs: arguments of the model: a tuple, by position; a mapping, by name; or one tensor.
            labels: further arguments of the loss: a tuple, one tensor, or a mapping as the one label. Default: the
                arguments of the loss functions that are called.
        """
        if self._capture is not None and self._capture.packing is not None:
            self._capture.packing.give(inputs, labels)

    @property
    @guarded()
    def micro_batch(self) -> int | None:
        """Return the number of the current or last call of the whole model in training mode; None before the first."""
        return None if self._capture is None else self._capture.micro_batch

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Enter a context in which nothing is recorded."""
        if self._capture is None:
            yield
            return
        with self._capture.unheard():
            yield

    @property
    @guarded(default=False)
    def recorded_anything(self) -> bool:
        """Return True if anything of the current step is recorded."""
        return self._capture is not None and not self._capture.empty

    @property
    @guarded(default=())
    def running(self) -> list[str]:
        """Return the paths of the layers that are being called, the outermost first; empty in a step not due."""
        return [] if self._capture is None else self._capture.running

    @guarded()
    def give_batch(self, batch: Any) -> None:
        """Set the next batch, as passed by a host (trainer); call this after `attach`."""
        if self._capture is not None and self._capture.packing is not None:
            self._capture.packing.give_whole(batch)

    @guarded()
    def carried(self, micro_batches: int) -> None:
        """Note that a host restarts the current step, with gradients of ``micro_batches`` micro-batches already
        accumulated.
        """
        if self._capture is not None:
            many = f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
            self._capture.settings["gradients.left_over"] = f"of {many} before the step"

    @property
    @guarded()
    def backward_began_at(self) -> float | None:
        """Return the last value that a backward began at and that no loss function returned; None without one."""
        losses = self._capture.losses if self._capture is not None else None
        return losses.last_begun if losses is not None else None

    @guarded()
    def detach(self) -> None:
        """Remove the hooks; the step goes on."""
        self._detach()

    def _detach(self) -> None:
        for capture in (self._capture, self._hooked):
            if capture is not None:
                capture.detach()
        self._hooked = None

    @guarded()
    def discard(self) -> None:
        """Drop the records of the current step, and remove the hooks."""
        self._detach()
        self._capture = None


# Optimizer steps within one recorded step that suggest a missing try_dump(). The critic of a GAN takes about five.
_MANY_STEPS = 10


class RecorderWarnings:
    """Warnings about a training, collected during a step and issued at its end; most kinds only once per training."""

    def __init__(self) -> None:
        self._waiting: list[str] = []
        self._changed = self._unstepped = self._left_out = self._forked = self._dropped = self._evaluated = False
        self._uncalled = False
        self._unseen_steps = 0

    def called(self, capture: Capture) -> None:
        """Warn of a step in which no layer was called, or the model in evaluation mode only."""
        if capture.evaluations and capture.empty:
            if not self._evaluated:
                self._evaluated = True
                self._waiting.append(
                    f"step {capture.number} is not recorded: the model was called in evaluation mode without "
                    "gradients alone. Evaluation is counted, and not recorded, in a loop that trains. To record it, "
                    "use a recorder without an optimizer"
                )
        elif capture.has_layers and not capture.called and not self._uncalled:
            self._uncalled = True
            self._waiting.append(
                f"no layer of the recorded model was called in step {capture.number}, so nothing of what it computes "
                "is recorded. "
                + (
                    "An optimizer steps its parameters: weights, gradients and updates are recorded. Outputs are if "
                    "you record the model that the loop calls, such as a copy, instead. "
                    if capture.parameters.has_stepped
                    else "Does the loop train this model? "
                )
                + "(What a compiled function calls, or a CUDA graph replays, is not seen.)"
            )

    def changed(self, capture: Capture, changes: str) -> None:
        """Warn that the model's layers have changed in a step; only once."""
        if changes and not self._changed:
            self._changed = True
            self._waiting.append(
                f"the layers of the recorded model changed in step {capture.number} ({changes}). They are "
                "recorded as they are now, and the run's layer tree is that of the model as it is now. What was "
                "recorded of layers that are gone can still be read, but is not compared. (Said once, whatever changes "
                "later.)"
            )

    def stepped(self, capture: Capture) -> None:
        """Warn that parameters change although the recorded optimizer does not step.

        The warning comes after two recorded steps in a row, and only once. Gradient accumulation, and steps that a loss
        scaler skips, change no parameter and cause no warning.
        """
        self._unseen_steps = self._unseen_steps + 1 if capture.parameters.moved_unseen else 0
        if self._unseen_steps >= 2 and not self._unstepped:
            self._unstepped = True
            self._waiting.append(
                f"in step {capture.number} and the due step before it the parameters changed, but step() of "
                "the optimizer that was given was not called, so gradients and updates (grad, update) are not "
                "recorded. It may hand its work to an optimizer of its own, as SAM does (base_optimizer), or another "
                "one has taken its place: give optimizer= the one whose step() is called."
            )

    def say(self, what: str) -> None:
        """Add a warning with this text, unless the text is empty."""
        if what:
            self._waiting.append(f"{what}.")

    def unended(self, times: int) -> None:
        """Warn at once that try_dump() is missing, when the number of optimizer steps reaches `_MANY_STEPS`."""
        if times == _MANY_STEPS:
            warn(
                f"an optimizer stepped {times} times, and try_dump() was not called: so far all of it is one "
                "step. Call rec.try_dump() at the end of each step"
            )

    def folded(self, capture: Capture) -> None:
        """Warn that several optimizer steps are recorded as one step, as try_dump() was never called."""
        times = capture.parameters.steps_taken
        if times > 1:
            self._waiting.append(
                f"try_dump() was never called, so {times} optimizer steps are recorded as one step. Call "
                "rec.try_dump() at the end of each step"
            )

    def dropped(self, run: MemoryRun) -> None:
        """Warn that a run in memory is full and drops steps; only once."""
        if not self._dropped:
            self._dropped = True
            self._waiting.append(
                f"this run is kept in memory, which holds {bytes_text(run.max_bytes)} of it: step "
                f"{run.dropped[0]} was let go, and others will be; the first step and the latest stay. Give a folder, "
                "padiff.record(model, dir_path), or a larger max_bytes"
            )

    def left_out(self, capture: Capture) -> None:
        """Warn of tensors of a step that could not be copied; only once."""
        why: Sequence[str] = capture.left_out
        if why and not self._left_out:
            self._left_out = True
            self._waiting.append(
                f"in step {capture.number}, {'; '.join(why)}. Everything else is recorded; the training is "
                "not affected. This is said once; each step's notes list what is missing."
            )

    def forked(self) -> None:
        """Warn that a step ended in a fork of the recording process; only once."""
        if not self._forked:
            self._forked = True
            self._waiting.append(
                "this process was forked from the recording one; it records nothing. Open a recorder "
                "after the fork, with a folder of its own"
            )

    def give(self) -> None:
        """Issue the collected warnings, after the step is handed on: a warning may be raised as an error."""
        while self._waiting:
            warn(self._waiting.pop(0))
