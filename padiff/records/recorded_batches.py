"""Micro-batches of a recorded step: inputs of the model and labels of the losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from padiff.records.recorded import LOOP, Record, Step, is_functional, loss_role
from padiff.records.sources import TensorSource

# Roles of a loss function's inputs that come from the data, not from the model.
_LABELS = frozenset({"labels", "target", "input_lengths", "label_lengths"})

_KEEP = "record with detail='full' (or full_every_n_steps=N), or keep packs with replay_every_n_steps=N"


@dataclass(frozen=True)
class RecordedBatch:
    """A micro-batch, reconstructed from a step's records.

    Attributes:
        inputs: arguments of the model's call, by the names of its forward's parameters, in the order of the call:
            tensor sources, nested in tuples and dicts. Arguments without a tensor are not recorded.
        labels: inputs of the loss functions that do not come from the model, in the order of the calls. A tensor that
            several functions received is listed once for each: records do not show if two are one tensor.
        problem: the reason why the batch is not fully known; empty if it is.
    """

    inputs: Mapping[str, Any]
    labels: tuple[TensorSource, ...]
    problem: str = ""


def recorded_batches(step: Step) -> list[RecordedBatch]:
    """Return the micro-batches of a step, in order."""
    inputs = [record for record in step.records if record.stage == "input" and record.layer != LOOP]
    layers = list(dict.fromkeys(record.layer for record in inputs))
    if not layers:
        return [RecordedBatch({}, (), f"its inputs were not recorded: {_KEEP}, without a list that leaves them out")]
    calls = sorted({record.call for record in inputs if record.layer == layers[0]})
    starts = [min(r.order for r in inputs if r.layer == layers[0] and r.call == call) for call in calls]
    batches = []
    for call, begins, ends in zip(calls, starts, [*starts[1:], float("inf")]):
        slots = [record for record in inputs if record.layer == layers[0] and record.call == call]
        labels = [r for r in step.records if begins <= r.order < ends and is_label(r)]
        batches.append(RecordedBatch(_nested(slots), tuple(r.source for r in labels), _problem(slots, labels, layers)))
    return batches


def is_label(record: Record) -> bool:
    """Return True if a record is an input of a loss function that comes from the data."""
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
    """Return the nested values that slots (``input.x``, ``input.images.0``) stand for."""
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
