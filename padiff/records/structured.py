"""The records of a step that was read, and what they are called: the same object for all steps that are alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from padiff.records.recorded import Record


class Structured(tuple[Record, ...]):
    """Records of a step, in their order.

    Args:
        records: they.
        structure: what they are but for their values: names, dtypes, shapes, how each is kept, and which of them are
            one tensor. Steps whose structure is the same object, or equal tuples of such objects, have the same records
            in the same places.
    """

    structure: object

    def __new__(cls, records: Iterable[Record], structure: object) -> Structured:
        made = super().__new__(cls, records)
        made.structure = structure
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (tuple(self),)  # in another process nothing else is of this structure
