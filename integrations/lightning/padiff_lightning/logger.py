"""A Trainer's TensorBoard logger as the place where diffs go."""

from __future__ import annotations

from typing import Any

from padiff_lightning import packages


def tensorboard_logger(trainer: Any) -> Any | None:
    """The Trainer's TensorBoard logger on the process that writes, or `None`."""
    if not trainer.is_global_zero:
        return None
    kinds = packages.classes(packages.loaded(), "loggers", "TensorBoardLogger")
    return next((logger for logger in trainer.loggers if isinstance(logger, kinds)), None)


class LoggerSink:
    """Scalars, texts and pictures through a TensorBoardLogger; it belongs to the Trainer, so it is not closed."""

    def __init__(self, logger: Any) -> None:
        self._experiment = logger.experiment

    def scalar(self, tag: str, value: float, step: int) -> None:
        self._experiment.add_scalar(tag, value, step)

    def text(self, tag: str, text: str, step: int) -> None:
        self._experiment.add_text(tag, text, step)

    def image(self, tag: str, pixels: Any, step: int) -> None:
        self._experiment.add_image(tag, pixels, step, dataformats="HWC")

    def flush(self) -> None:
        self._experiment.flush()

    def close(self) -> None:
        self.flush()
