"""What the callbacks of trainers with Hugging Face's events share: transformers, PaddleFormers, PaddleNLP.

Such a trainer passes its callbacks neither the loss nor the batch, and tells them of no exception. So the callback
looks up which trainer calls it, and puts two wrappers on that very object: one around ``train``, which ends the
recording when an exception leaves it, and one around ``training_step`` for as long as a training lasts.
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
from padiff.frameworks.overrides import Override
from padiff.replaying import ReplayBatch
from padiff.system.guard import guarded
from padiff_hooks.options import TrainingOptions
from padiff_hooks.replaying import exchanged
from padiff_hooks.results import TrainingResults
from padiff_hooks.training import TrainingRecorder

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The callback that records a model, so that the next training of the model can end what an exception left.
_recording: weakref.WeakKeyDictionary[Any, TrainerEvents] = weakref.WeakKeyDictionary()
#: What has recording end with a trainer's ``train``, for as long as the trainer lives.
_guards: weakref.WeakKeyDictionary[Any, list[Override]] = weakref.WeakKeyDictionary()


class TrainerEvents(TrainingResults, ABC):
    """The events of a trainer, handed on to a `TrainingRecorder`; a host's callback derives from it.

    Counts optimizer steps, not batches; evaluation is not recorded. A training that is resumed from a checkpoint goes
    on with the checkpoint's step; a second ``train()`` goes on in the same run.

    Args:
        dir_path: the run folder to write.
        options: those of `padiff_hooks.options.TrainingOptions`; without ``logdir``, scalars go where the trainer's
            own TensorBoard callback writes, if it has one.
    """

    #: Whether the trainer divides the loss before backward, and not the gradients afterwards.
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
        """What the trainer is set to, beside its optimizer (`padiff.records.settings`)."""

    @abstractmethod
    def loss_scale_of(self, trainer: Any, args: Any) -> float:
        """By how much the gradients of activations are larger than what the optimizer consumes adds up to."""

    @abstractmethod
    def parts_of(self, trainer: Any, args: Any) -> int:
        """What the loss that ``training_step`` returns was divided by, to be the micro-batch's share of the step."""

    def exchange(self, trainer: Any, arguments: dict[str, Any], batches: list[Any]) -> None:
        """Adjust what ``training_step`` is called with beside a replayed batch.

        Args:
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
        left = _recording.get(model)
        if left is not None and left is not self and (trainer is None or not _has(trainer, left)):
            left._abandon()
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
        self._training.detach()
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
        self._training.detach()
        # The last event before the trainer closes its TensorBoard writer, which the writer's thread uses, too.
        self._training.flush()

    @guarded(passing=(PadiffError,))
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._put_back()
        try:
            self._training.finish()
        finally:
            self._end()

    # -- on the trainer --------------------------------------------------------------------------------------

    def _watch(self, trainer: Any) -> None:
        """Have recording end when an exception leaves the trainer's ``train``."""
        if trainer is None or (self._wrapped is not None and self._wrapped() is trainer):
            return
        self._wrapped = weakref.ref(trainer)
        callback = weakref.ref(self)

        def guarded(train: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            try:
                return train(*args, **kwargs)
            except BaseException:
                own = callback()
                if own is not None:
                    own._abandon()
                raise

        _guards.setdefault(trainer, []).append(Override(trainer, "train", guarded, self.guard))

    def _recorded(self, trainer: Any, args: Any) -> Callable[..., Any]:
        def training_step(step: Callable[..., Any], model: Any, inputs: Any, *more: Any, **kwargs: Any) -> Any:
            # Before the step: a scaler may change its scale at its end.
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
                # Not every trainer's `train` could be guarded: the callback may have been added later.
                self._abandon()
                raise

        return training_step

    def _log(self, trainer: Any, args: Any, loss: Any) -> None:
        if self._training.due:
            whole = loss * self.parts_of(trainer, args)
            self._training.log_loss(whole)
            if self.DIVIDES_BEFORE:
                self._training.declare_division("trainer.loss_divided_by", float(whole), self._scale)

    def _exchanged(self, trainer: Any, batch: ReplayBatch, inputs: Any, arguments: dict[str, Any]) -> Any:
        framework = framework_of(trainer.model)
        step = [exchanged(one, inputs, framework) for one in self._training.replayed_batches]
        self.exchange(trainer, arguments, step)
        return exchanged(batch, inputs, framework)

    def _abandon(self) -> None:
        """A training was left by an exception."""
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
            sink.leave()
        for model, callback in list(_recording.items()):
            if callback is self:
                del _recording[model]


def _calling(callback: Any) -> Any:
    """The trainer that calls a callback; `None` where none is seen. No event passes it."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if caller is not callback and _has(caller, callback) and hasattr(caller, "training_step"):
            return caller
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _has(trainer: Any, callback: Any) -> bool:
    listed = getattr(getattr(trainer, "callback_handler", None), "callbacks", ())
    return any(one is callback for one in listed)


def _sink(trainer: Any) -> _WriterSink | None:
    """Where the trainer's own TensorBoard callback writes."""
    for callback in getattr(getattr(trainer, "callback_handler", None), "callbacks", ()):
        if hasattr(getattr(callback, "tb_writer", None), "add_scalar"):
            return _WriterSink(callback)
    return None


class _WriterSink:
    """Scalars, texts and pictures through the SummaryWriter of a trainer's callback, which closes it.

    Args:
        owner: the trainer's callback.
    """

    def __init__(self, owner: Any) -> None:
        self._owner, self._writer = owner, owner.tb_writer

    @property
    def logdir(self) -> str | None:
        """The folder that the writer writes to."""
        return getattr(self._writer, "log_dir", None) or getattr(self._writer, "logdir", None)

    def scalar(self, tag: str, value: float, step: int) -> None:
        self._writer.add_scalar(tag, value, step)

    def text(self, tag: str, text: str, step: int) -> None:
        self._writer.add_text(tag, text, step)

    def image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        self._writer.add_image(tag, pixels, step, dataformats="HWC")

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self.flush()

    def leave(self) -> None:
        """Training ended: a writer that its owner closed, and that later points opened again, is closed once more."""
        if self._owner.tb_writer is not self._writer:
            self._writer.close()


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are known."""
    return {name: value for name, value in settings.items() if value is not None}
