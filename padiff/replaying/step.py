"""A packed step as the candidate's loop sees it: its batches, as tensors of the candidate's framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from padiff.errors import UsageError
from padiff.records import TensorSource
from padiff.records.pack import Batch, Pack, Unkept, with_leaves


@dataclass(frozen=True)
class ReplayBatch:
    """A micro-batch of the reference. Tensors are made whenever they are asked for.

    Args:
        batch: as it was recorded.
        make: makes a tensor of the candidate's framework, on the model's device.
        where: what to call it.
        asked: called when it is asked for its tensors: it is the one that is trained on then.
        make_label: makes labels, where they are made otherwise.
    """

    batch: Batch
    make: Callable[[TensorSource], Any]
    where: str
    asked: Callable[[], None] = lambda: None
    make_label: Callable[[TensorSource], Any] | None = None

    @property
    def inputs(self) -> tuple[Any, ...]:
        """What the model is called with by position.

        Raises:
            UsageError: it is not known, or holds what a pack can't hold.
        """
        return tuple(self._made(self._known().args))

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """What the model is called with by name.

        Raises:
            UsageError: likewise.
        """
        found: dict[str, Any] = self._made(dict(self._known().kwargs))
        return found

    @property
    def labels(self) -> tuple[Any, ...]:
        """What went into the loss functions besides what the model gave, in order.

        Raises:
            UsageError: no loss function was seen.
        """
        if self.batch.labels is None:
            raise UsageError(
                f"{self.where}: no loss function of the framework was called there outside of the model, so the labels "
                "are not known: record the reference with rec.log_batch(inputs, labels) in its loop"
            )
        return tuple(self._made(self.batch.labels, self.make_label))

    @property
    def whole(self) -> Any:
        """The batch as the reference's host handed it over; `None` where there was none."""
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
    """A packed step to be done again.

    Attributes:
        pack: what was recorded.
        batches: its micro-batches, in order.
        moved: whether it is done once more to measure its floors, with weights and inputs moved, or in float64.
        exact: whether it is done in float64.
    """

    pack: Pack
    batches: tuple[ReplayBatch, ...]
    moved: bool = False
    exact: bool = False

    @property
    def number(self) -> int:
        """The step's number in the reference."""
        return self.pack.step

    @property
    def loss_scale(self) -> float:
        """The factor that the reference scaled the loss by."""
        return self.pack.loss_scale

    @property
    def inputs(self) -> tuple[Any, ...]:
        """Of a step with one micro-batch, what the model is called with by position."""
        return self._only.inputs

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """Likewise, what it is called with by name."""
        return self._only.kwargs

    @property
    def labels(self) -> tuple[Any, ...]:
        """Likewise, what the loss takes besides."""
        return self._only.labels

    @property
    def _only(self) -> ReplayBatch:
        if len(self.batches) != 1:
            raise UsageError(
                f"step {self.number} of the reference has {len(self.batches)} micro-batches: go through step.batches, "
                "each with .inputs and .labels, and step the optimizer once afterwards"
            )
        return self.batches[0]
