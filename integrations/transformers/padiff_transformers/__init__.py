"""padiff for transformers' Trainer: ``Trainer(..., callbacks=[PaDiffCallback("runs/torch", every_n_steps=10)])``."""

from padiff_transformers.callback import PaDiffCallback

__all__ = ["PaDiffCallback"]
