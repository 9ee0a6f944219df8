"""Lightning's hooks, handed on to a `TrainingRecorder`."""

from __future__ import annotations

from typing import Any

from padiff_hooks.training import TrainingRecorder
from padiff_lightning.logger import LoggerSink, tensorboard_logger

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise ImportError("padiff_lightning needs Lightning: pip install 'lightning>=2.2'") from error


class PaDiffCallback(Callback):
    """Records a Lightning training, and compares it live with a reference run if one is given.

    Counts optimizer steps, not batches; the sanity check and validation are not recorded. After a resume from a
    checkpoint the step numbers go on. Arguments: those of `padiff_hooks.training.TrainingRecorder`; without
    ``logdir``, scalars go through the Trainer's TensorBoardLogger when there is one.

    Example:
        ``pl.Trainer(callbacks=[PaDiffCallback("runs/torch", every_n_steps=10)])``
    """

    def __init__(self, dir_path: Any, **options: Any) -> None:
        super().__init__()
        self._training = TrainingRecorder(dir_path, **options)
        self._resumed = False
        self._restored = False
        self._global_step = 0
        self._loss_scale = 1.0

    @property
    def first_report(self) -> Any:
        """The first report with a diff, or `None`."""
        return self._training.first_report

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._global_step = trainer.global_step
        if self._global_step and not self._restored and not self._resumed:
            # A checkpoint that was written without this callback: its optimizer steps are what is known.
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
        )
        self._resumed = True

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        # Before the batch: the scaler may change its scale at the end of the step.
        self._loss_scale = _loss_scale(trainer)
        self._training.begin_batch()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self._training.end_batch(loss if self._training.due else None, self._loss_scale)
        # Advances with every optimizer step, not while gradients accumulate, also in manual optimization.
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            if self._training.end_step():
                trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        # A module that cuts its epoch short in on_train_batch_start gets no on_train_batch_end.
        self._training.detach()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._training.finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._training.abort()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._training.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._training.step = int(state_dict["step"])
        self._restored = True


def _loss_scale(trainer: Any) -> float:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None else 1.0
