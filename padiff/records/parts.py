"""Part of a distributed tensor that one process holds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Kinds of parts: a block or range of the tensor's elements; a copy of all elements; a term of a sum over processes.
SHARD, REPLICA, PARTIAL = KINDS = ("shard", "replica", "partial")


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a tensor that one process holds.

    Attributes:
        shape: shape of the full tensor.
        offset: start of the part along each axis of the full tensor. If the part has one axis and the full tensor has
            another number of axes, the only offset is the start of a range of its elements, row by row.
        kind: `SHARD`, `REPLICA`, or `PARTIAL`; the `PARTIAL` values of all processes have to be added.
        copy: number of the replica; the parts of one replica together make the full tensor.
        share: number of the process's share of a batch, if the full tensor is gathered for each call as in FSDP; -1:
            not known, or the processes that hold parts of one tensor see the same samples.
    """

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    kind: str
    copy: int = 0
    share: int = -1

    @property
    def size(self) -> int:
        """Return the number of elements of the full tensor."""
        return math.prod(self.shape)

    def is_range(self, shape: tuple[int, ...]) -> bool:
        """Return True if a part of this shape is a range of elements instead of a block."""
        return len(shape) == 1 and len(self.shape) != 1

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return True if a part of this shape lies inside the full tensor."""
        if self.is_range(shape):
            return len(self.offset) == 1 and self.offset[0] + shape[0] <= self.size
        return len(shape) == len(self.offset) == len(self.shape) and all(
            start + length <= limit for start, length, limit in zip(self.offset, shape, self.shape)
        )

    def to_json(self) -> dict[str, Any]:
        """Return the part as a dict for JSON."""
        return {
            "shape": list(self.shape),
            "offset": list(self.offset),
            "kind": self.kind,
            **({"copy": self.copy} if self.copy else {}),
            **({"share": self.share} if self.share >= 0 else {}),
        }

    @classmethod
    def of_json(cls, entry: Mapping[str, Any], shape: tuple[int, ...]) -> Part:
        """Return the part from the dict that `to_json` returned.

        Args:
            entry: the parsed JSON, checked as untrusted input.
            shape: shape of the part.

        Raises:
            ValueError, KeyError, TypeError: the entry is no part, or no part of this shape.
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
    lengths = tuple(int(value) for value in values)
    if len(lengths) > 64 or any(not 0 <= value < 1 << 62 for value in lengths) or math.prod(lengths) >= 1 << 62:
        raise ValueError(f"{str(lengths)[:80]} is no shape")
    return lengths
