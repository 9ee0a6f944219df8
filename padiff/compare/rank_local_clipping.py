"""Detect processes that clip their gradient shards by the shards' own norm instead of the norm of all shards.

The gradients that optimizers consumed are the evidence. Shards clipped by their own norm have the limit as their norm:
on several processes at once, though their shards differ; and the norm of all shards together is above the limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from padiff.errors import PadiffError
from padiff.records import LOOP, Record, RunInfo, Step, settings_at
from padiff.records.parts import PARTIAL, SHARD

# Largest relative difference of two norms clipped to one limit: clipping adds 1e-6 to the divisor, and float32 rounds.
_ONE_LIMIT = 1e-5
# Largest relative difference of a norm from a known limit; larger, because a chance agreement is less likely.
_THE_LIMIT = 1e-4
# Least relative excess of the total norm over the limit, beyond rounding.
_ABOVE = 1e-3
# Number of processes whose equal norms in one step suffice: chance makes these equal once in 10 ** 8 steps. With two
# processes, two steps have to agree.
_MANY = 3
# Elements that are read and converted to float64 at a time.
_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class LocalClipping:
    """Evidence of clipping by shard norms.

    Attributes:
        ranks: processes whose norms equal the limit, or the largest norm if the limit is unknown; all processes if
            `recorded`.
        norm: the limit, if known; otherwise the largest norm of a process's shards.
        whole: norm of all shards together.
        recorded: True if clipping returned different norms in the processes.
        since: the first step that shows the fault.
    """

    ranks: tuple[int, ...]
    norm: float
    whole: float
    recorded: bool
    since: int


class NormCheck:
    """Check of a run's gradient clipping, fed with the steps in order."""

    def __init__(self, info: RunInfo) -> None:
        self._settings = info.settings
        #: Number, ranks and norm of the step before, if several processes had equal largest norms in that step.
        self._before: tuple[int, tuple[int, ...], float] | None = None

    def check(self, steps: Sequence[Step]) -> LocalClipping | None:
        """Return the evidence of one step, given all its processes; reads the gradients if they are shards."""
        before, self._before = self._before, None
        shards = {step.rank: _shards(step) for step in steps}
        if not all(shards.values()) or len(shards) < 2:
            return None
        number = steps[0].number
        squares = {
            rank: {place: _square(record) for place, record in rank_values.items()}
            for rank, rank_values in shards.items()
        }
        if any(math.isnan(square) for rank_values in squares.values() for square in rank_values.values()):
            return None  # the sketch is a sample, or values are not finite
        norms = {rank: math.sqrt(sum(rank_values.values())) for rank, rank_values in squares.items()}
        total = math.sqrt(
            sum({place: square for rank_values in squares.values() for place, square in rank_values.items()}.values())
        )
        returned = {step.rank: _given(step) for step in steps}
        different = {norm for norm in returned.values() if norm is not None}
        if None not in returned.values() and max(different) - min(different) > _ABOVE * max(different):
            return LocalClipping(tuple(returned), max(norms.values()), total, True, number)
        limit = self._limit(steps[0])
        if limit is not None:
            at_it = tuple(rank for rank, norm in norms.items() if abs(norm - limit) <= _THE_LIMIT * limit)
            above = total > limit * (1 + _ABOVE)
            return LocalClipping(at_it, limit, total, False, number) if at_it and above else None
        largest = max(norms.values())
        alike = tuple(rank for rank, norm in norms.items() if norm >= largest * (1 - _ONE_LIMIT))
        # Replicas of one shard have equal norms anyway; only different shards are evidence.
        apart = len({tuple(sorted(shards[rank])) for rank in alike})
        if not largest or apart < 2 or total <= largest * (1 + _ABOVE):
            return None
        if apart >= _MANY:
            return LocalClipping(alike, largest, total, False, number)
        if before is not None and abs(before[2] - largest) <= _ONE_LIMIT * largest:
            return LocalClipping(tuple(sorted({*alike, *before[1]})), largest, total, False, before[0])
        self._before = number, alike, largest
        return None

    def _limit(self, step: Step) -> float | None:
        """Return the limit of the global gradient norm; `None` if unknown."""
        settings: Mapping[str, object] = settings_at(self._settings, step.settings)
        limit = settings.get("clip.limit")
        is_global_norm = settings.get("clip.kind") == "global_norm" and settings.get("clip.norm_type", 2.0) == 2.0
        return float(limit) if is_global_norm and isinstance(limit, int | float) and limit > 0 else None


def local_clipping_text(found: LocalClipping, ranks: str) -> str:
    """Return the finding as a sentence.

    Args:
        ranks: the processes, as the beginning of the sentence.
    """
    single = len(found.ranks) == 1
    if found.recorded:
        shown = "the norms that clipping gave differ between ranks, which hold shards of one gradient"
    else:
        shown = (
            f"{'its shards have' if single else 'the shards of each have'} the norm {found.norm:.6g} together, and "
            f"those of all ranks {found.whole:.6g}"
        )
    return (
        f"{ranks} clip{'s' if single else ''} gradients by the norm of {'its' if single else 'their'} own shards since "
        f"step {found.since}: {shown}. Clip by the norm of all shards (torch.nn.utils.clip_grad_norm_ of the model's "
        "parameters, which are DTensors; with FullyShardedDataParallel the model's clip_grad_norm_)."
    )


def _shards(step: Step) -> dict[tuple[object, ...], Record]:
    """Return by place the gradients that the process's optimizers consumed, if some are shards; otherwise an empty
    dict.
    """
    gradients = {
        (r.layer, r.slot, *((r.part.offset, r.shape) if r.part is not None else ())): r
        for r in step.records
        if r.stage == "grad" and r.layer != LOOP
    }
    if any(r.part is not None and r.part.kind == PARTIAL for r in gradients.values()):
        return {}
    sharded = any(r.part is not None and r.part.kind == SHARD and r.shape != r.part.shape for r in gradients.values())
    return gradients if sharded else {}


def _square(record: Record) -> float:
    """Return the squared L2 norm; NaN if unknown."""
    sketch = record.sketch
    if sketch is not None:
        return sketch.mean_square * sketch.size if sketch.looked_at == sketch.size else math.nan
    try:
        value = np.asarray(record.value).reshape(-1)
        total = 0.0
        for start in range(0, value.size, _AT_ONCE):
            part = value[start : start + _AT_ONCE].astype(np.float64)
            total += float(part @ part)
    except (PadiffError, TypeError, ValueError):
        return math.nan
    return total if math.isfinite(total) else math.nan


def _given(step: Step) -> float | None:
    """Return the norm that the step's call of clip_grad_norm returned; `None` unless exactly one such call exists."""
    records = [r for r in step.records if r.layer == LOOP and r.stage == "grad" and r.slot.startswith("clip_grad_norm")]
    if len(records) != 1:
        return None
    try:
        value = float(np.asarray(records[0].value).reshape(()))
    except (PadiffError, TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
