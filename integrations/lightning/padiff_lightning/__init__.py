"""padiff for Lightning: ``Trainer(callbacks=[PaDiffCallback("runs/torch", every_n_steps=10)])``."""

from typing import TYPE_CHECKING, Any

from padiff_lightning import callback, packages

if TYPE_CHECKING:
    from padiff_lightning.callback import PaDiffCallback

__all__ = ["PaDiffCallback"]


def __getattr__(name: str) -> Any:
    # Looked up each time: a command line that finds the class by its name checks that it is a Callback before it makes
    # an object.
    if name == "PaDiffCallback":
        callback.become_callback(packages.loaded())
        return callback.PaDiffCallback
    raise AttributeError(f"module 'padiff_lightning' has no attribute {name!r}")
