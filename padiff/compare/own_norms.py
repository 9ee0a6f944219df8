"""Whether each process clips its shards of the gradients by their own norm, where the norm of all shards is meant.

The gradients that optimizers consumed show it by themselves. What is clipped by its own norm has the limit as its norm
then: on several processes alike, though they hold other shards; and that of all shards together is above the limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from padiff.errors import PadiffError
from padiff.records import LOOP, Record, RunInfo, Step, settings_at
from padiff.records.parts import PARTIAL, SHARD

# Two norms of one limit: clipping adds 1e-6 to the norm that it divides by, and float32 rounds.
_ONE_LIMIT = 1e-5
# The same, where the limit is known: it is not chance then that a norm is the limit.
_THE_LIMIT = 1e-4
# Norms of shards that are added up are above the limit by more than rounding.
_ABOVE = 1e-3
# Processes whose norms are equal in one step by chance, once in 10 ** 8 steps; of two, two steps have to agree.
_MANY = 3
# Elements that are read and made float64 at once.
_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class OwnNorms:
    """What speaks for it in a step.

    Attributes:
        ranks: whose norms are the limit, or, of `recorded`, all.
        norm: of each of them; the largest.
        whole: the norm of all shards together.
        recorded: whether the norms that clipping gave differ.
        since: the first step that shows it.
    """

    ranks: tuple[int, ...]
    norm: float
    whole: float
    recorded: bool
    since: int


class NormCheck:
    """Looks at the steps of a run in their order."""

    def __init__(self, info: RunInfo) -> None:
        self._settings = info.settings
        #: The step before, if several processes' norms were the largest and equal: which step, ranks and norm.
        self._before: tuple[int, tuple[int, ...], float] | None = None

    def look(self, steps: Sequence[Step]) -> OwnNorms | None:
        """What one step shows, of all its processes; reads its gradients, if they are shards."""
        before, self._before = self._before, None
        shards = {step.rank: _shards(step) for step in steps}
        if not all(shards.values()) or len(shards) < 2:
            return None
        number = steps[0].number
        squares = {rank: {place: _square(record) for place, record in own.items()} for rank, own in shards.items()}
        if any(math.isnan(square) for own in squares.values() for square in own.values()):
            return None  # not all of it was looked at, or it is not finite
        norms = {rank: math.sqrt(sum(own.values())) for rank, own in squares.items()}
        whole = math.sqrt(sum({place: square for own in squares.values() for place, square in own.items()}.values()))
        given = {step.rank: _given(step) for step in steps}
        different = {norm for norm in given.values() if norm is not None}
        if None not in given.values() and max(different) - min(different) > _ABOVE * max(different):
            return OwnNorms(tuple(given), max(norms.values()), whole, True, number)
        limit = self._limit(steps[0])
        if limit is not None:
            at_it = tuple(rank for rank, norm in norms.items() if abs(norm - limit) <= _THE_LIMIT * limit)
            above = whole > limit * (1 + _ABOVE)
            return OwnNorms(at_it, limit, whole, False, number) if at_it and above else None
        largest = max(norms.values())
        alike = tuple(rank for rank, norm in norms.items() if norm >= largest * (1 - _ONE_LIMIT))
        # Replicas of one shard have one norm; those that hold others show it.
        apart = len({tuple(sorted(shards[rank])) for rank in alike})
        if not largest or apart < 2 or whole <= largest * (1 + _ABOVE):
            return None
        if apart >= _MANY:
            return OwnNorms(alike, largest, whole, False, number)
        if before is not None and abs(before[2] - largest) <= _ONE_LIMIT * largest:
            return OwnNorms(tuple(sorted({*alike, *before[1]})), largest, whole, False, before[0])
        self._before = number, alike, largest
        return None

    def _limit(self, step: Step) -> float | None:
        """What the norm of all gradients is clipped to; `None` where it is not known."""
        settings: Mapping[str, object] = settings_at(self._settings, step.settings)
        limit = settings.get("clip.limit")
        known = settings.get("clip.kind") == "global_norm" and settings.get("clip.norm_type", 2.0) == 2.0
        return float(limit) if known and isinstance(limit, int | float) and limit > 0 else None


def own_norms_text(found: OwnNorms, ranks: str) -> str:
    """In words.

    Args:
        ranks: who they are.
    """
    one = len(found.ranks) == 1
    if found.recorded:
        shown = "the norms that clipping gave differ between ranks, which hold shards of one gradient"
    else:
        shown = (
            f"{'its shards have' if one else 'the shards of each have'} the norm {found.norm:.6g} together, and those "
            f"of all ranks {found.whole:.6g}"
        )
    return (
        f"{ranks} clip{'s' if one else ''} gradients by the norm of {'its' if one else 'their'} own shards since step "
        f"{found.since}: {shown}. Clip by the norm of all shards (torch.nn.utils.clip_grad_norm_ of the model's "
        "parameters, which are DTensors; with FullyShardedDataParallel the model's clip_grad_norm_)."
    )


def _shards(step: Step) -> dict[tuple[object, ...], Record]:
    """By place, the gradients that the process's optimizers consumed, if some are shards of what others have, too."""
    own = {
        (r.layer, r.slot, *((r.part.offset, r.shape) if r.part is not None else ())): r
        for r in step.records
        if r.stage == "grad" and r.layer != LOOP
    }
    if any(r.part is not None and r.part.kind == PARTIAL for r in own.values()):
        return {}
    sharded = any(r.part is not None and r.part.kind == SHARD and r.shape != r.part.shape for r in own.values())
    return own if sharded else {}


def _square(record: Record) -> float:
    """The squared L2 norm; NaN where it is not known."""
    sketch = record.sketch
    if sketch is not None:
        return sketch.mean_square * sketch.size if sketch.looked_at == sketch.size else math.nan
    try:
        value = np.asarray(record.value).reshape(-1)
        found = 0.0
        for start in range(0, value.size, _AT_ONCE):
            part = value[start : start + _AT_ONCE].astype(np.float64)
            found += float(part @ part)
    except (PadiffError, TypeError, ValueError):
        return math.nan
    return found if math.isfinite(found) else math.nan


def _given(step: Step) -> float | None:
    """What the step's call that clips by a norm gave as the norm; `None` where there is not one such call."""
    found = [r for r in step.records if r.layer == LOOP and r.stage == "grad" and r.slot.startswith("clip_grad_norm")]
    if len(found) != 1:
        return None
    try:
        value = float(np.asarray(found[0].value).reshape(()))
    except (PadiffError, TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None
