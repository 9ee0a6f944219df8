"""What is recorded of the step under way: what loops and hosts ask of it, and tell it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from padiff.recorder.capture import Capture
from padiff.system.guard import Guard, guarded


class UnderWay:
    """The step under way of a recorder. All of this costs nothing, and says nothing, in a step that is not due.

    Attributes:
        guard: stops errors of padiff's own.
    """

    guard: Guard

    def __init__(self) -> None:
        self._capture: Capture | None = None
        #: The capture of the step before, whose hooks are still on for the step under way.
        self._hooked: Capture | None = None

    @guarded()
    def log_loss(self, loss: Any) -> None:
        """Record the loss of a micro-batch: a number, or a tensor of one element. Costs nothing if not due."""
        if self._capture is not None:
            self._capture.log_loss(loss)

    @guarded()
    def log_batch(self, inputs: Any, labels: Any = None) -> None:
        """Log the batch that begins, for a replay pack, if the recorder can't see it. Costs nothing in steps
        without one.

        The recorder sees what the model is called with, and what the framework's loss functions outside of it are
        called with.

        Args:
            inputs: what the model is called with: a tuple, by position; a mapping, by name; or one tensor.
            labels: what else the loss takes: a tuple, one tensor, or a mapping as the one label. Default: what loss
                functions are called with.
        """
        if self._capture is not None and self._capture.packing is not None:
            self._capture.packing.give(inputs, labels)

    @property
    @guarded()
    def micro_batch(self) -> int | None:
        """Which call of the whole model, in training mode, is under way or was the last; `None` before the first."""
        return None if self._capture is None else self._capture.micro_batch

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """What is called inside is not recorded."""
        if self._capture is None:
            yield
            return
        with self._capture.unheard():
            yield

    @property
    @guarded(default=False)
    def recorded_anything(self) -> bool:
        """Whether there is anything of the step under way."""
        return self._capture is not None and not self._capture.empty

    @property
    @guarded(default=())
    def running(self) -> list[str]:
        """Paths of the layers whose calls are under way in a step that is recorded, the outermost first."""
        return [] if self._capture is None else self._capture.running

    @guarded()
    def give_batch(self, batch: Any) -> None:
        """A host hands over the batch that begins; after `attach`."""
        if self._capture is not None and self._capture.packing is not None:
            self._capture.packing.give_whole(batch)

    @guarded()
    def carried(self, micro_batches: int) -> None:
        """A host begins the step under way anew, with the gradients of so many micro-batches that it did for it."""
        if self._capture is not None:
            many = f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
            self._capture.settings["gradients.left_over"] = f"of {many} before the step"

    @property
    @guarded()
    def backward_began_at(self) -> float | None:
        """The value at which the last backward began, in a due step; `None` where it was that of a loss function."""
        losses = self._capture.losses if self._capture is not None else None
        return losses.last_begun if losses is not None else None

    @guarded()
    def detach(self) -> None:
        """Take the hooks off; the step goes on."""
        self._detach()

    def _detach(self) -> None:
        for capture in (self._capture, self._hooked):
            if capture is not None:
                capture.detach()
        self._hooked = None

    @guarded()
    def discard(self) -> None:
        """Forget what was recorded of the step under way."""
        self._detach()
        self._capture = None
