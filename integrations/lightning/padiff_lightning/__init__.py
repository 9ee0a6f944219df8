"""padiff for Lightning: ``Trainer(callbacks=[PaDiffCallback("runs/torch", every_n_steps=10)])``."""

from padiff_lightning.callback import PaDiffCallback

__all__ = ["PaDiffCallback"]
