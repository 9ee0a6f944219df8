"""The micro-batches of a recorded step: what the model was called with, and the labels of the losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from padiff.records.recorded import LOOP, Record, Step, is_functional, loss_role
from padiff.records.sources import TensorSource

# What a loss function's tensors are to it that come from the data, not from the model.
_LABELS = frozenset({"labels", "target", "input_lengths", "label_lengths"})

_KEEP = "record with detail='full' (or full_every_n_steps=N), or keep packs with replay_every_n_steps=N"


@dataclass(frozen=True)
class RecordedBatch:
    """A micro-batch, as far as a step's records tell it.

    Attributes:
        inputs: what the model was called with, by the names of its forward's parameters, in the order of the call:
            tensor sources, nested in tuples and dicts. Arguments without a tensor are not recorded.
        labels: what the loss functions were given besides what the model gave, in the order of their calls. A tensor
            that several were given is there as often: whether two are one tensor, records do not tell.
        problem: why that is not all known; empty if it is.
    """

    inputs: Mapping[str, Any]
    labels: tuple[TensorSource, ...]
    problem: str = ""


def recorded_batches(step: Step) -> list[RecordedBatch]:
    """The micro-batches of a step, in order."""
    inputs = [record for record in step.records if record.stage == "input" and record.layer != LOOP]
    layers = list(dict.fromkeys(record.layer for record in inputs))
    if not layers:
        return [RecordedBatch({}, (), f"its inputs were not recorded: {_KEEP}, without a list that leaves them out")]
    calls = sorted({record.call for record in inputs if record.layer == layers[0]})
    starts = [min(r.order for r in inputs if r.layer == layers[0] and r.call == call) for call in calls]
    found = []
    for call, begins, ends in zip(calls, starts, [*starts[1:], float("inf")]):
        own = [record for record in inputs if record.layer == layers[0] and record.call == call]
        labels = [r for r in step.records if begins <= r.order < ends and _is_label(r)]
        found.append(RecordedBatch(_nested(own), tuple(r.source for r in labels), _problem(own, labels, layers)))
    return found


def _is_label(record: Record) -> bool:
    of_loss = record.layer == LOOP and record.stage == "loss" and is_functional(record.slot)
    return of_loss and loss_role(record.slot) in _LABELS


def _problem(inputs: Sequence[Record], labels: Sequence[Record], layers: Sequence[str]) -> str:
    if len(layers) > 1:
        return (
            f"the model was called in parts ({', '.join(layers[:4])}), so what it is called with as a whole is not "
            "known: keep packs with replay_every_n_steps=N"
        )
    sketched = [record.slot for record in (*inputs, *labels) if record.source.sketched]
    return f"of {', '.join(sketched[:4])} it keeps sketches, not values: {_KEEP}" if sketched else ""


def _nested(records: Sequence[Record]) -> dict[str, Any]:
    """Slots (``input.x``, ``input.images.0``) put together again."""
    tree: dict[str, Any] = {}
    for record in records:
        *above, last = record.slot.removeprefix("input.").split(".")
        inside = tree
        for name in above:
            inside = inside.setdefault(name, {})
        inside[last] = record.source
    return {name: _as_written(value) for name, value in tree.items()}


def _as_written(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    items = {name: _as_written(item) for name, item in value.items()}
    return tuple(items.values()) if all(name.isdecimal() for name in items) else items
