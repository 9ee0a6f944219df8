"""The labels that loss functions of a step are called with, micro-batch by micro-batch, whatever their shape is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from padiff.errors import RunFolderError, SketchOnlyError
from padiff.records import Record, is_of_loss, loss_role


def labels_by_call(records: Sequence[Record]) -> dict[int, Record]:
    """Whole labels by the number of the call; where several functions are called, which is whose is not known."""
    used = [record for record in records if is_of_loss(record) and loss_role(record.slot) == "labels"]
    found = [record for record in used if record.dtype.startswith(("int", "uint"))]
    times = Counter(record.call for record in found)
    return {record.call: record for record in found if times[record.call] == 1}


def same_labels(reference: Record, candidate: Record) -> bool:
    """Whether two losses are of the same labels. Numbers below zero are no classes, and mean alike: ignored."""
    try:
        one, other = reference.value.ravel(), candidate.value.ravel()
    except (RunFolderError, SketchOnlyError):
        return False
    if one.shape != other.shape or not one.size:
        return False
    return bool(((one == other) | ((one < 0) & (other < 0))).all())
