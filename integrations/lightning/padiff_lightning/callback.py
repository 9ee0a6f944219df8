"""Lightning callback that passes the Trainer's events to a `TrainingRecorder`."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from padiff.errors import PadiffError
from padiff.frameworks import framework_of
from padiff.frameworks.interception import Override
from padiff.system.guard import guarded
from padiff_hooks.options import TrainingOptions
from padiff_hooks.replaying import exchanged
from padiff_hooks.results import TrainingResults
from padiff_hooks.training import TrainingRecorder
from padiff_lightning import packages
from padiff_lightning.logger import LoggerSink, tensorboard_logger

if TYPE_CHECKING:
    from typing_extensions import Unpack

    _Base: Any
else:

    class _Base:
        """Placeholder base of `PaDiffCallback`; Python can't add bases to a class whose only base is `object`."""


class PaDiffCallback(TrainingResults, _Base):
    """Callback that records a Lightning training, and compares it live with a reference run if the option is set.

    Steps are optimizer steps, not batches; the sanity check and validation are not recorded. After a resume from a
    checkpoint the step numbers continue. The options are those of `padiff_hooks.options.TrainingOptions`. Without
    ``logdir``, scalars go through the Trainer's TensorBoardLogger if there is one.

    The class is a `Callback` of ``pytorch_lightning`` and of ``lightning.pytorch``, as far as these are loaded.

    Example:
        ``pl.Trainer(callbacks=[PaDiffCallback("runs/torch", every_n_steps=10)])``
    """

    def __init__(self, dir_path: str | Path, **options: Unpack[TrainingOptions]) -> None:
        become_callback(packages.in_use())
        super().__init__()
        self._training = TrainingRecorder(dir_path, **options)
        self._resumed = False
        self._restored = False
        self._global_step = 0
        self._loss_scale = 1.0
        self._exchanged: Override | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        become_callback(packages.in_use())  # a process that unpickles a callback may not have made one before
        self.__dict__.update(state)

    @guarded(passing=(PadiffError,))
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._global_step = trainer.global_step
        if self._global_step and not self._restored and not self._resumed:
            # The checkpoint was written without this callback, so only its number of optimizer steps is known.
            self._training.step = self._global_step
        logger = tensorboard_logger(trainer)
        self._training.start(
            pl_module,
            trainer.optimizers,
            resumed=self._resumed or self._restored or self._global_step > 0,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            logdir=logger.log_dir if logger is not None else None,
            sink=LoggerSink(logger) if logger is not None else None,
            settings=_settings(trainer),
            end=_end(trainer),
        )
        self._resumed = True

    @guarded(passing=(PadiffError,))
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        # Read the scale before the batch: the scaler may change its scale at the end of the step.
        self._loss_scale = _loss_scale(trainer)
        replayed = self._training.begin_batch(batch)
        if replayed is not None:
            try:
                self._exchange(pl_module, exchanged(replayed, batch, framework_of(pl_module)))
            except BaseException:
                self._training.abort()
                raise

    def _exchange(self, pl_module: Any, batch: Any) -> None:
        """Replace the batch of the next training step, which no hook of Lightning can do."""

        def training_step(step: Callable[..., Any], _: Any, *args: Any, **kwargs: Any) -> Any:
            return step(batch, *args, **kwargs)

        self._exchanged = Override(pl_module, "training_step", training_step)

    def _put_back(self) -> None:
        exchanged, self._exchanged = self._exchanged, None
        if exchanged is not None:
            exchanged.remove()

    @guarded(passing=(PadiffError,))
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._put_back()
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self._training.end_batch(loss if self._training.due else None, self._loss_scale)
        # `global_step` advances with every optimizer step, not while gradients accumulate, also in manual optimization.
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            if self._training.end_step():
                trainer.should_stop = True

    @guarded(passing=(PadiffError,))
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        # A module that cuts its epoch short in on_train_batch_start gets no on_train_batch_end.
        self._put_back()
        self._training.remove_hooks()

    @guarded(passing=(PadiffError,))
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._training.finish()

    @guarded(passing=(PadiffError,))
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._put_back()
        self._training.abort()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._training.step}

    @guarded(passing=(PadiffError,))
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._training.step = int(state_dict["step"])
        self._restored = True


def _loss_scale(trainer: Any) -> float:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None else 1.0


def _settings(trainer: Any) -> dict[str, Any]:
    """Return the settings of the Trainer."""
    settings = {"accumulation": trainer.accumulate_grad_batches, "precision": str(trainer.precision)}
    if trainer.gradient_clip_val:
        by_value = str(trainer.gradient_clip_algorithm or "norm").rpartition(".")[2].lower() == "value"
        settings |= {
            "clip.kind": "value" if by_value else "global_norm",
            "clip.limit": float(trainer.gradient_clip_val),
        }
        settings |= {} if by_value else {"clip.norm_type": 2.0}
    for config in trainer.lr_scheduler_configs:
        stepped = getattr(config.scheduler, "optimizer", None)
        for number, optimizer in enumerate(trainer.optimizers):
            if optimizer is stepped:
                settings[f"optimizer.{number}.schedule"] = type(config.scheduler).__name__
    return settings


def _end(trainer: Any) -> int | None:
    """Return the step that the training ends before; `None` where the Trainer does not know."""
    with suppress(Exception):  # the Trainer raises, for example, if the accumulation changes between epochs
        steps = trainer.estimated_stepping_batches
        return int(steps) if 0 < steps < math.inf else None
    return None


def become_callback(modules: list[Any]) -> None:
    """Add the `Callback` of each package to the bases of `PaDiffCallback`, also for existing callbacks.

    A Trainer accepts callbacks of its own package only, and importing both packages takes seconds. So the class gets a
    base when the base's package is in use. One class for both packages keeps checkpoints and pickles valid; the
    `Callback` classes have no conflicting behaviour, as their methods do nothing.
    """
    new = tuple(
        kind for kind in packages.classes(modules, "callbacks", "Callback") if kind not in PaDiffCallback.__mro__
    )
    if new:
        PaDiffCallback.__bases__ += new


become_callback(packages.loaded() or (packages.in_use() if len(packages.installed()) < 2 else []))
