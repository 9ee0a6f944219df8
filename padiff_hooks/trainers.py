"""Base class of the callbacks of trainers with Hugging Face's events: transformers, PaddleFormers, PaddleNLP.

Such a trainer passes neither the loss nor the batch to its callbacks, and does not report exceptions. So the callback
finds the trainer that calls it, and puts two wrappers on that object: one around ``train``, which ends the recording
after an exception, and one around ``training_step`` while a training runs.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from padiff.errors import PadiffError
from padiff.frameworks import framework_of
from padiff.frameworks.interception import Override
from padiff.replaying import ReplayBatch
from padiff.system.frames import locals_of
from padiff.system.guard import guarded
from padiff_hooks.options import TrainingOptions
from padiff_hooks.replaying import exchanged
from padiff_hooks.results import TrainingResults
from padiff_hooks.training import TrainingRecorder

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The callback that records each model, so that the next training of the model can end a recording after an exception.
_recording: weakref.WeakKeyDictionary[Any, TrainerEvents] = weakref.WeakKeyDictionary()
#: The wrappers around ``train`` of each trainer, which end the recording; kept as long as the trainer lives.
_guards: weakref.WeakKeyDictionary[Any, list[Override]] = weakref.WeakKeyDictionary()


class TrainerEvents(TrainingResults, ABC):
    """Base class of a callback that passes the events of a trainer to a `TrainingRecorder`.

    Steps are optimizer steps, not batches; evaluation is not recorded. A training that is resumed from a checkpoint
    continues with the checkpoint's step; a second ``train()`` continues the same run.

    Args:
        dir_path: the run folder to write.
        options: the options of `padiff_hooks.options.TrainingOptions`. Without ``logdir``, scalars go to the folder of
            the trainer's TensorBoard callback, if the trainer has one.
    """

    #: True if the trainer divides the loss before backward; False if it divides the gradients afterwards.
    DIVIDES_BEFORE = False

    def __init__(self, dir_path: str | Path, **options: Unpack[TrainingOptions]) -> None:
        super().__init__()
        self._training = TrainingRecorder(dir_path, **options)
        self._trained = False
        self._trainer: Any = None
        self._wrapped: weakref.ref[Any] | None = None
        self._stepping: Override | None = None
        self._sink: _WriterSink | None = None
        self._scale = 1.0
        self._micro_batches = 0

    # -- what differs between trainers -----------------------------------------------------------------------

    @abstractmethod
    def settings_of(self, trainer: Any, args: Any, model: Any, state: Any) -> dict[str, Any]:
        """Return the trainer's settings without those of its optimizer (`padiff.records.declared`)."""

    @abstractmethod
    def loss_scale_of(self, trainer: Any, args: Any) -> float:
        """Return the ratio of gradients of activations to their part in the gradients that the optimizer consumes."""

    @abstractmethod
    def parts_of(self, trainer: Any, args: Any) -> int:
        """Return the number that ``training_step`` divides a micro-batch's loss by before it returns the loss."""

    def exchange(self, trainer: Any, arguments: dict[str, Any], batches: list[Any]) -> None:
        """Adjust the arguments of ``training_step`` to a replayed batch.

        Args:
            trainer: the trainer.
            arguments: arguments of ``training_step`` without model and inputs, changed in place.
            batches: all micro-batches of the step.
        """

    # -- events ----------------------------------------------------------------------------------------------

    @guarded(passing=(PadiffError,))
    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._watch(_calling(self))

    @guarded(passing=(PadiffError,))
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._end()
        trainer = self._trainer = _calling(self)
        self._watch(trainer)
        previous = _recording.get(model)
        if previous is not None and previous is not self and (trainer is None or not _has(trainer, previous)):
            previous._abandon()
        if state.global_step and not self._trained:
            self._training.step = state.global_step
        sink = self._sink = _sink(trainer)
        try:
            self._training.start(
                model,
                [kwargs["optimizer"]],
                resumed=self._trained or state.global_step > 0,
                rank=getattr(args, "process_index", None),
                world_size=getattr(args, "world_size", None),
                logdir=sink.logdir if sink is not None else None,
                sink=sink,
                settings=self.settings_of(trainer, args, model, state),
                logs_loss=trainer is not None,
                end=state.max_steps if state.max_steps and state.max_steps > 0 else None,
            )
        except BaseException:
            self._end()
            raise
        _recording[model] = self
        self._trained, self._micro_batches = True, 0
        if trainer is not None:
            self._stepping = Override(trainer, "training_step", self._recorded(trainer, args), self.guard)

    @guarded(passing=(PadiffError,))
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._micro_batches:
            self._training.carried(self._micro_batches)
        if self._trainer is None:
            self._training.begin_batch()

    @guarded(passing=(PadiffError,))
    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._micro_batches += 1
        self._training.remove_hooks()
        if self._trainer is None:
            self._training.begin_batch()

    @guarded(passing=(PadiffError,))
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self._micro_batches = 0
        self._training.end_batch(None, self._scale)
        if self._training.end_step():
            control.should_training_stop = True
        return control

    @guarded(passing=(PadiffError,))
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.remove_hooks()
        # The last event before the trainer closes its TensorBoard writer, which the writer's thread uses, too.
        self._training.flush_steps()

    @guarded(passing=(PadiffError,))
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._put_back()
        try:
            self._training.finish()
        finally:
            self._end()

    # -- on the trainer --------------------------------------------------------------------------------------

    def _watch(self, trainer: Any) -> None:
        """Wrap the trainer's ``train`` so that an exception in it ends the recording."""
        if trainer is None or (self._wrapped is not None and self._wrapped() is trainer):
            return
        self._wrapped = weakref.ref(trainer)
        callback = weakref.ref(self)

        def guarded(train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            try:
                return train(*args, **kwargs)
            except BaseException:
                events = callback()
                if events is not None:
                    events._abandon()
                raise

        _guards.setdefault(trainer, []).append(Override(trainer, "train", guarded, self.guard))

    def _recorded(self, trainer: Any, args: Any) -> Callable[..., Any]:
        def training_step(step: Callable[..., Any], model: Any, inputs: Any, *more: Any, **kwargs: Any) -> Any:
            # Read the scale before the step: a scaler may change its scale at the end of the step.
            self._scale = self.guard.attempt(self.loss_scale_of, trainer, args) or 1.0
            try:
                replayed = self._training.begin_batch(inputs)
                if replayed is not None:
                    names = [*inspect.signature(step).parameters][2:]
                    kwargs = {**dict(zip(names, more)), **kwargs}
                    inputs, more = self._exchanged(trainer, replayed, inputs, kwargs), ()
                loss = step(model, inputs, *more, **kwargs)
                self.guard.attempt(self._log, trainer, args, loss)
                return loss
            except BaseException:
                # The wrapper around `train` may be missing: the callback may have been added later.
                self._abandon()
                raise

        return training_step

    def _log(self, trainer: Any, args: Any, loss: Any) -> None:
        if self._training.due:
            loss_of_batch = loss * self.parts_of(trainer, args)
            self._training.log_loss(loss_of_batch)
            if self.DIVIDES_BEFORE:
                self._training.declare_division("trainer.loss_divided_by", float(loss_of_batch), self._scale)

    def _exchanged(self, trainer: Any, batch: ReplayBatch, inputs: Any, arguments: dict[str, Any]) -> Any:
        framework = framework_of(trainer.model)
        step = [exchanged(micro_batch, inputs, framework) for micro_batch in self._training.replayed_batches]
        self.exchange(trainer, arguments, step)
        return exchanged(batch, inputs, framework)

    def _abandon(self) -> None:
        """End the recording after an exception in the training."""
        self._put_back()
        self._training.abort()
        self._end()

    def _put_back(self) -> None:
        stepping, self._stepping = self._stepping, None
        if stepping is not None:
            stepping.remove()

    def _end(self) -> None:
        self._put_back()
        self._trainer, self._micro_batches = None, 0
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.close_again()
        for model, callback in list(_recording.items()):
            if callback is self:
                del _recording[model]


def _calling(callback: Any) -> Any:
    """Return the trainer that calls a callback, from the call stack, as no event passes it; `None` if none is there."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = locals_of(frame).get("self")
        if caller is not callback and _has(caller, callback) and hasattr(caller, "training_step"):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _has(trainer: Any, callback: Any) -> bool:
    listed = getattr(getattr(trainer, "callback_handler", None), "callbacks", ())
    return any(item is callback for item in listed)


def _sink(trainer: Any) -> _WriterSink | None:
    """Return a sink for the SummaryWriter of the trainer's TensorBoard callback, or `None` without such a callback."""
    for callback in getattr(getattr(trainer, "callback_handler", None), "callbacks", ()):
        if hasattr(getattr(callback, "tb_writer", None), "add_scalar"):
            return _WriterSink(callback)
    return None


class _WriterSink:
    """Sink for scalars, texts and pictures that uses the SummaryWriter of a trainer's callback.

    Args:
        owner: the trainer's callback, which closes the writer.
    """

    def __init__(self, owner: Any) -> None:
        self._owner, self._writer = owner, owner.tb_writer

    @property
    def logdir(self) -> str | None:
        """Return the folder that the writer writes to."""
        return getattr(self._writer, "log_dir", None) or getattr(self._writer, "logdir", None)

    def scalar(self, tag: str, value: float, step: int) -> None:
        self._writer.add_scalar(tag, value, step)

    def add_text(self, tag: str, text: str, step: int) -> None:
        self._writer.add_text(tag, text, step)

    def image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        self._writer.add_image(tag, pixels, step, dataformats="HWC")

    def write_out(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self.write_out()

    def close_again(self) -> None:
        """Close the writer once more after the training if its owner has closed it and later points opened it again."""
        if self._owner.tb_writer is not self._writer:
            self._writer.close()


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are not `None`."""
    return {name: value for name, value in settings.items() if value is not None}
