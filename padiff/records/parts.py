"""Which part of a tensor that is spread over processes a record holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: A block, or a range, of the whole's elements; all of them, as others hold them, too; a term of the sum that it is.
SHARD, REPLICA, PARTIAL = KINDS = ("shard", "replica", "partial")


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a tensor that one process holds.

    Attributes:
        shape: of the whole tensor.
        offset: where the part begins, along each axis of the whole. One number, where the part has one axis and the
            whole has another number of them: then it is a range of the whole's elements, row by row.
        kind: `SHARD`, `REPLICA`, or `PARTIAL`: what the processes hold has to be added up.
        copy: which of the replicas; parts of one replica together make the whole.
        share: which share of a batch the process has, where the whole is gathered for each call as FSDP does; -1: this
            is not known, or processes that hold parts of one whole see the same samples.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    kind: str
    copy: int = 0
    share: int = -1

    @property
    def size(self) -> int:
        """How many elements the whole has."""
        return math.prod(self.shape)

    def is_range(self, shape: tuple[int, ...]) -> bool:
        """Whether a part of this shape is a range of elements, and no block."""
        return len(shape) == 1 and len(self.shape) != 1

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a part of this shape lies inside of the whole."""
        if self.is_range(shape):
            return len(self.offset) == 1 and self.offset[0] + shape[0] <= self.size
        return len(shape) == len(self.offset) == len(self.shape) and all(
            start + length <= whole for start, length, whole in zip(self.offset, shape, self.shape)
        )

    def to_json(self) -> dict[str, Any]:
        """As files have it."""
        return {
            "shape": list(self.shape),
            "offset": list(self.offset),
            "kind": self.kind,
            **({"copy": self.copy} if self.copy else {}),
            **({"share": self.share} if self.share >= 0 else {}),
        }

    @classmethod
    def of_json(cls, entry: Mapping[str, Any], shape: tuple[int, ...]) -> Part:
        """Undo `to_json`.

        Args:
            entry: what the file has; nothing of it is trusted.
            shape: of the part.

        Raises:
            ValueError, KeyError, TypeError: it is no part, or not one of this shape.
        """
        part = cls(
            _lengths(entry["shape"]),
            _lengths(entry["offset"]),
            str(entry["kind"]),
            int(entry.get("copy", 0)),
            int(entry.get("share", -1)),
        )
        if part.kind not in KINDS:
            raise ValueError(f"unknown kind of part {part.kind!r}")
        if not part.fits(shape):
            raise ValueError(f"a part {shape} at {part.offset} does not lie in a tensor {part.shape}")
        return part


def _lengths(values: Any) -> tuple[int, ...]:
    found = tuple(int(value) for value in values)
    if len(found) > 64 or any(not 0 <= value < 1 << 62 for value in found) or math.prod(found) >= 1 << 62:
        raise ValueError(f"{str(found)[:80]} is no shape")
    return found
