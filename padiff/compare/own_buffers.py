"""Buffers that begin equal in all processes, and that each then works out for itself: statistics of its samples."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from padiff.compare.rank_figures import error
from padiff.records import Layer, Record, Step


class OwnBuffers(NamedTuple):
    """Buffers that differ.

    Attributes:
        ranks: whose they are held against, and those that have others.
        sites: where, ``layer/slot``.
        error: the largest relative L2 difference.
    """

    ranks: tuple[int, ...]
    sites: tuple[str, ...]
    error: float


class BufferCheck:
    """Looks at the steps of a run in their order.

    Args:
        known: what is looked at elsewhere.
    """

    def __init__(self, layers: Sequence[Layer], known: Collection[tuple[str, str]]) -> None:
        #: Those that were equal so far. What counts steps or samples is no tensor of numbers with a fraction.
        self._equal = {
            (layer.path, p.slot)
            for layer in layers
            for p in layer.parameters
            if p.role == "buffer" and "float" in p.dtype and (layer.path, p.slot) not in known
        }
        self._begun = False

    def look(self, steps: Sequence[Step]) -> OwnBuffers | None:
        """What one step shows, of all its processes; once."""
        held: dict[tuple[str, str], dict[int, Record]] = {}
        for step in steps if self._equal else ():
            for record in step.records:
                key = record.layer, record.slot
                if record.stage == "weight" and key in self._equal:
                    held.setdefault(key, {}).setdefault(step.rank, record)
        apart: dict[tuple[str, str], dict[int, float]] = {}
        for key, records in held.items():
            (_, first), *others = records.items()
            found = {rank: error(first, record) for rank, record in others if record.shape == first.shape}
            # Of shards, or tables that grow, each process has its own.
            whole = all(r.part is None or r.shape == r.part.shape for r in records.values())
            if not whole or len(found) < len(others):
                self._equal.discard(key)
            elif any(found.values()):
                apart[key] = {rank: far for rank, far in found.items() if far}
        begun, self._begun = self._begun, True
        self._equal -= set(apart)
        if not begun or not apart:
            return None
        self._equal.clear()  # said once; the others follow
        ranks = sorted({rank for own in apart.values() for rank in own})
        sites = tuple(f"{layer}/{slot}" for layer, slot in apart)
        return OwnBuffers((steps[0].rank, *ranks), sites, max(max(own.values()) for own in apart.values()))
