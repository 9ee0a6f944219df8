"""padiff for paddle.Model: ``model.fit(..., callbacks=[PaDiffCallback("runs/paddle", every_n_steps=10)])``."""

from padiff_hapi.callback import PaDiffCallback

__all__ = ["PaDiffCallback"]
