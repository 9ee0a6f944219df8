"""The current step of a recorder, as training loops and hosts (trainers) use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from padiff.recorder.capture import Capture
from padiff.system.guard import Guard, guarded


class CurrentStep:
    """The current step of a recorder. In a step that is not recorded, all calls are cheap and do nothing.

    Attributes:
        guard: guard that stops internal errors of padiff.
    """

    guard: Guard

    def __init__(self) -> None:
        self._capture: Capture | None = None
        #: Capture of the previous step, whose hooks are still attached for the current step.
        self._hooked: Capture | None = None

    @guarded()
    def log_loss(self, loss: Any) -> None:
        """Record the loss of a micro-batch: a number, or a tensor of one element. Does nothing in a step not due."""
        if self._capture is not None:
            self._capture.log_loss(loss)

    @guarded()
    def log_batch(self, inputs: Any, labels: Any = None) -> None:
        """Log the next batch for a replay pack, if the recorder cannot see the batch. Does nothing in steps without a
        pack.

        The recorder sees the arguments of the model, and those of the framework's loss functions outside of the model.

        Args:
            inputs: arguments of the model: a tuple, by position; a mapping, by name; or one tensor.
            labels: further arguments of the loss: a tuple, one tensor, or a mapping as the one label. Default: the
                arguments of the loss functions that are called.
        """
        if self._capture is not None and self._capture.packing is not None:
            self._capture.packing.give(inputs, labels)

    @property
    @guarded()
    def micro_batch(self) -> int | None:
        """Return the number of the current or last call of the whole model in training mode; None before the first."""
        return None if self._capture is None else self._capture.micro_batch

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Enter a context in which nothing is recorded."""
        if self._capture is None:
            yield
            return
        with self._capture.unheard():
            yield

    @property
    @guarded(default=False)
    def recorded_anything(self) -> bool:
        """Return True if anything of the current step is recorded."""
        return self._capture is not None and not self._capture.empty

    @property
    @guarded(default=())
    def running(self) -> list[str]:
        """Return the paths of the layers that are being called, the outermost first; empty in a step not due."""
        return [] if self._capture is None else self._capture.running

    @guarded()
    def give_batch(self, batch: Any) -> None:
        """Set the next batch, as passed by a host (trainer); call this after `attach`."""
        if self._capture is not None and self._capture.packing is not None:
            self._capture.packing.give_whole(batch)

    @guarded()
    def carried(self, micro_batches: int) -> None:
        """Note that a host restarts the current step, with gradients of ``micro_batches`` micro-batches already
        accumulated.
        """
        if self._capture is not None:
            many = f"{micro_batches} micro-batch{'es' if micro_batches > 1 else ''}"
            self._capture.settings["gradients.left_over"] = f"of {many} before the step"

    @property
    @guarded()
    def backward_began_at(self) -> float | None:
        """Return the last value that a backward began at and that no loss function returned; None without one."""
        losses = self._capture.losses if self._capture is not None else None
        return losses.last_begun if losses is not None else None

    @guarded()
    def detach(self) -> None:
        """Remove the hooks; the step goes on."""
        self._detach()

    def _detach(self) -> None:
        for capture in (self._capture, self._hooked):
            if capture is not None:
                capture.detach()
        self._hooked = None

    @guarded()
    def discard(self) -> None:
        """Drop the records of the current step, and remove the hooks."""
        self._detach()
        self._capture = None
