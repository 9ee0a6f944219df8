"""padiff for PaddleFormers' Trainer: ``Trainer(..., callbacks=[PaDiffCallback("runs/paddle", every_n_steps=10)])``."""

from padiff_paddleformers.callback import PaDiffCallback

__all__ = ["PaDiffCallback"]
