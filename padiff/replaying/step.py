"""A packed step for the candidate's loop, with its batches as tensors of the candidate's framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from padiff.errors import UsageError
from padiff.records import TensorSource
from padiff.records.pack import Batch, Pack, Unkept, with_leaves


@dataclass(frozen=True)
class ReplayBatch:
    """A micro-batch of the reference. Each access creates new tensors.

    Args:
        batch: the recorded micro-batch.
        make: creates a tensor of the candidate's framework on the model's device.
        where: name of the micro-batch for messages.
        asked: called on each access of tensors, because the loop then trains on this micro-batch.
        make_label: creates tensors of labels; `None` to use `make`.
    """

    batch: Batch
    make: Callable[[TensorSource], Any]
    where: str
    asked: Callable[[], None] = lambda: None
    make_label: Callable[[TensorSource], Any] | None = None

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Return the positional arguments of the model's call.

        Raises:
            UsageError: the arguments were not recorded, or contain an object that a pack can't store.
        """
        return tuple(self._made(self._known().args))

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """Return the keyword arguments of the model's call.

        Raises:
            UsageError: the arguments were not recorded, or contain an object that a pack can't store.
        """
        arguments: dict[str, Any] = self._made(dict(self._known().kwargs))
        return arguments

    @property
    def labels(self) -> tuple[Any, ...]:
        """Return the arguments of the loss functions other than the model's outputs, in order.

        Raises:
            UsageError: no loss function was recorded, or the labels contain an object that a pack can't store.
        """
        if self.batch.labels is None:
            raise UsageError(
                f"{self.where}: no loss function of the framework was called there outside of the model, so the labels "
                "are not known: record the reference with rec.log_batch(inputs, labels) in its loop"
            )
        return tuple(self._made(self.batch.labels, self.make_label))

    @property
    def whole(self) -> Any:
        """Return the batch as the reference's host passed it to the loop; `None` if no host did."""
        return self._made(self.batch.whole)

    def _known(self) -> Batch:
        if not self.batch.seen:
            raise UsageError(
                f"{self.where}: what the model was called with is not known: record the reference with "
                "rec.log_batch(inputs, labels) in its loop"
            )
        return self.batch

    def _made(self, value: Any, make: Callable[[TensorSource], Any] | None = None) -> Any:
        self.asked()
        unkept = next(_unkept(value), None)
        if unkept is not None:
            raise UsageError(
                f"{self.where} holds a {unkept.kind}, which a pack can't hold (tensors, numbers, texts, tuples, lists "
                "and dicts it can): say with rec.log_batch(inputs, labels) what the model is called with"
            )
        return with_leaves(value, make or self.make)


def _unkept(value: Any) -> Any:
    if isinstance(value, Unkept):
        yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _unkept(inner)


@dataclass(frozen=True)
class ReplayStep:
    """A packed step to repeat.

    Attributes:
        pack: the recorded pack.
        batches: the micro-batches, in order.
        moved: True for a repetition that measures floors, with weights and inputs perturbed, or in float64.
        exact: True if the step runs in float64.
    """

    pack: Pack
    batches: tuple[ReplayBatch, ...]
    moved: bool = False
    exact: bool = False

    @property
    def number(self) -> int:
        """Return the step's number in the reference."""
        return self.pack.step

    @property
    def loss_scale(self) -> float:
        """Return the factor that scaled the reference's loss."""
        return self.pack.loss_scale

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Return the positional arguments of the model's call, for a step with a single micro-batch."""
        return self._only.inputs

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """Return the keyword arguments of the model's call, for a step with a single micro-batch."""
        return self._only.kwargs

    @property
    def labels(self) -> tuple[Any, ...]:
        """Return the labels, for a step with a single micro-batch."""
        return self._only.labels

    @property
    def _only(self) -> ReplayBatch:
        if len(self.batches) != 1:
            raise UsageError(
                f"step {self.number} of the reference has {len(self.batches)} micro-batches: go through step.batches, "
                "each with .inputs and .labels, and step the optimizer once afterwards"
            )
        return self.batches[0]
