"""Comparison of the labels that a step's loss functions receive, regardless of the labels' shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from padiff.errors import RunFolderError, SketchOnlyError
from padiff.records import Record, is_of_loss, loss_role


def labels_by_call(records: Sequence[Record]) -> dict[int, Record]:
    """Return the integer labels of loss functions, by call number.

    A call number with several labels is left out, because several functions share the number.
    """
    used = [record for record in records if is_of_loss(record) and loss_role(record.slot) == "labels"]
    labels = [record for record in used if record.dtype.startswith(("int", "uint"))]
    times = Counter(record.call for record in labels)
    return {record.call: record for record in labels if times[record.call] == 1}


def same_labels(reference: Record, candidate: Record) -> bool:
    """Return True if two losses have the same labels. All negative numbers are equal: they mark ignored labels."""
    try:
        expected, actual = reference.value.ravel(), candidate.value.ravel()
    except (RunFolderError, SketchOnlyError):
        return False
    if expected.shape != actual.shape or not expected.size:
        return False
    return bool(((expected == actual) | ((expected < 0) & (actual < 0))).all())
