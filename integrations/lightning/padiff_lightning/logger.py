"""Output of diffs through a Trainer's TensorBoard logger."""

from __future__ import annotations

from typing import Any

from padiff_lightning import packages


def tensorboard_logger(trainer: Any) -> Any | None:
    """Return the Trainer's TensorBoard logger in the process that writes, or else `None`."""
    if not trainer.is_global_zero:
        return None
    kinds = packages.classes(packages.loaded(), "loggers", "TensorBoardLogger")
    return next((logger for logger in trainer.loggers if isinstance(logger, kinds)), None)


class LoggerSink:
    """Sink for scalars, texts and pictures that uses the Trainer's TensorBoardLogger, and never closes the logger."""

    def __init__(self, logger: Any) -> None:
        self._experiment = logger.experiment

    def scalar(self, tag: str, value: float, step: int) -> None:
        self._experiment.add_scalar(tag, value, step)

    def add_text(self, tag: str, text: str, step: int) -> None:
        self._experiment.add_text(tag, text, step)

    def image(self, tag: str, pixels: Any, step: int) -> None:
        self._experiment.add_image(tag, pixels, step, dataformats="HWC")

    def write_out(self) -> None:
        self._experiment.flush()

    def close(self) -> None:
        self.write_out()
