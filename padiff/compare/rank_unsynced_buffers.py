"""Detect buffers that begin equal in all processes and then diverge: statistics of each process's samples."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from padiff.compare.rank_figures import error
from padiff.records import Layer, Record, Step


class UnsyncedBuffers(NamedTuple):
    """Buffers that differ between processes.

    Attributes:
        ranks: the rank used as reference, then the ranks whose buffers differ from it.
        sites: sites of the buffers, ``layer/slot``.
        error: the largest relative L2 difference.
    """

    ranks: tuple[int, ...]
    sites: tuple[str, ...]
    error: float


class BufferCheck:
    """Check of a run's buffers, fed with the steps in order.

    Args:
        known: layers and slots of buffers that another check covers.
    """

    def __init__(self, layers: Sequence[Layer], known: Collection[tuple[str, str]]) -> None:
        #: Buffers that were equal so far. Integer buffers count steps or samples and are left out.
        self._equal = {
            (layer.path, p.slot)
            for layer in layers
            for p in layer.parameters
            if p.role == "buffer" and "float" in p.dtype and (layer.path, p.slot) not in known
        }
        self._begun = False

    def check(self, steps: Sequence[Step]) -> UnsyncedBuffers | None:
        """Return the buffers that differ between the processes in one step; at most one report per run."""
        buffers: dict[tuple[str, str], dict[int, Record]] = {}
        for step in steps if self._equal else ():
            for record in step.records:
                key = record.layer, record.slot
                if record.stage == "weight" and key in self._equal:
                    buffers.setdefault(key, {}).setdefault(step.rank, record)
        apart: dict[tuple[str, str], dict[int, float]] = {}
        for key, records in buffers.items():
            (_, first), *others = records.items()
            errors = {rank: error(first, record) for rank, record in others if record.shape == first.shape}
            # Shards, and tables that grow, differ from process to process.
            unsharded = all(r.part is None or r.shape == r.part.shape for r in records.values())
            if not unsharded or len(errors) < len(others):
                self._equal.discard(key)
            elif any(errors.values()):
                apart[key] = {rank: far for rank, far in errors.items() if far}
        begun, self._begun = self._begun, True
        self._equal -= set(apart)
        if not begun or not apart:
            return None
        self._equal.clear()  # reported once; later differences follow from this one
        ranks = sorted({rank for errors_by_rank in apart.values() for rank in errors_by_rank})
        sites = tuple(f"{layer}/{slot}" for layer, slot in apart)
        return UnsyncedBuffers(
            (steps[0].rank, *ranks), sites, max(max(errors_by_rank.values()) for errors_by_rank in apart.values())
        )
