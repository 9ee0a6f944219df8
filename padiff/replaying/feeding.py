"""Replay of the reference's dropout masks in the candidate."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import permutations
from math import prod
from typing import Generic, TypeVar

import numpy as np

from padiff.frameworks.dropout_masks import DropoutCall
from padiff.records import is_below
from padiff.records.pack import Mask

# Largest number of axes for which permutations are tried.
_MOST_AXES = 5


_Fed = TypeVar("_Fed")


class CallFeeder(Generic[_Fed]):
    """Gives recorded things to the calls that a model makes; a call that is recomputed gets its own thing again.

    Args:
        partners: the reference's layer path by the candidate's layer path.
        running: returns the paths of the candidate's running layer calls, outermost first.
        recomputing: returns True inside a forward that is repeated during backward (activation checkpointing).
    """

    def __init__(
        self, partners: Mapping[str, str], running: Callable[[], Sequence[str]], recomputing: Callable[[], bool]
    ) -> None:
        self._partners, self._running, self._recomputing = partners, running, recomputing
        #: By layer, what its calls were given, and the number of recomputed calls.
        self._fed: dict[str, list[_Fed | None]] = defaultdict(list)
        self._again: Counter[str] = Counter()

    def is_active(self) -> bool:
        """Return True if a call made now belongs to the model."""
        return bool(self._running())

    def _feed(self, search: Callable[[], _Fed | None]) -> _Fed | None:
        inside = self._running()[-1]
        fed = self._fed[inside]
        if self._recomputing():
            number = self._again[inside]
            self._again[inside] += 1
            return fed[number % len(fed)] if fed else None
        fed.append(search())
        return fed[-1]

    def _partners_around(self) -> list[str]:
        return [self._partners[path] for path in reversed(self._running()) if path in self._partners]


class MaskFeeder(CallFeeder[np.ndarray]):
    """Source of the recorded masks for the candidate's dropout calls.

    A call takes the next unused mask of its micro-batch from the partner of the innermost enclosing layer that has a
    partner, then from the partners of the layers around. Masks of reference layers whose own partner is elsewhere in
    the candidate are skipped at first, and used only if no other mask is left. So dropout can be a layer in one model
    and a function in the other, or one layer can stand for several.

    Args:
        masks: the reference's masks of the step, in order.
        partners: the reference's layer path by the candidate's layer path.
        running: returns the paths of the candidate's running layer calls, outermost first.
        recomputing: returns True inside a forward that is repeated during backward (activation checkpointing).
        batch: returns the index of the current micro-batch; `None` if unknown.
        draws: True if dropout also draws random numbers of its own, to advance the generators.

    Attributes:
        unanswered: calls without a mask, as ``layer (function)``.
    """

    def __init__(
        self,
        masks: Sequence[Mask],
        partners: Mapping[str, str],
        running: Callable[[], Sequence[str]],
        recomputing: Callable[[], bool],
        batch: Callable[[], int | None] = lambda: None,
        draws: bool = False,
    ) -> None:
        super().__init__(partners, running, recomputing)
        self.draws = draws
        self._batch = batch
        self._waiting = list(masks)
        self._back = {reference: candidate for candidate, reference in partners.items()}
        self.unanswered: dict[str, None] = {}
        #: The masks of all calls, in order.
        self.log: list[np.ndarray | None] = []
        self._rerun: list[np.ndarray | None] | None = None

    @contextmanager
    def again(self, start: int) -> Iterator[None]:
        """Repeat the masks from an index of the log on for calls made inside the block."""
        self._rerun = self.log[start:]
        try:
            yield
        finally:
            self._rerun = None

    @property
    def left(self) -> list[Mask]:
        """Return the masks that no call of the candidate used."""
        return list(self._waiting)

    def is_active(self) -> bool:
        """Return True if a dropout call made now belongs to the model."""
        return super().is_active() or self._rerun is not None

    def mask(self, call: DropoutCall) -> np.ndarray | None:
        """Return the mask for a call, True for kept elements; `None` if no recorded mask fits."""
        if self._rerun is not None:
            return self._rerun.pop(0) if self._rerun else None
        return self._feed(lambda: self._unused(call))

    def _unused(self, call: DropoutCall) -> np.ndarray | None:
        running = self._running()
        mask = self._next(call, running)
        if mask is None:
            self.unanswered[f"{running[-1]} ({call.function}, rate {call.rate:g})"] = None
        self.log.append(mask)
        return mask

    def _next(self, call: DropoutCall, running: Sequence[str]) -> np.ndarray | None:
        batch = self._batch()
        waiting = [mask for mask in self._waiting if batch is None or mask.batch == batch]
        partners = self._partners_around()
        for reference in partners:
            # Skip masks whose layer has another partner in the candidate: that layer will ask for them.
            candidates = (mask for mask in waiting if self._back.get(mask.layer, running[-1]) in running)
            mask_array = self._first(call, (mask for mask in candidates if _within(mask.layer, reference)))
            if mask_array is not None:
                return mask_array
        # One model's dropout layer can be a function or another layer in the other model: match by order.
        inside = ([mask for mask in waiting if _within(mask.layer, reference)] for reference in partners)
        return self._first(call, next((masks[:1] for masks in inside if masks), ()))

    def _first(self, call: DropoutCall, masks: Iterable[Mask]) -> np.ndarray | None:
        for mask in masks:
            array = fitted(mask, call.shape)
            if array is not None:
                self._waiting = [unused for unused in self._waiting if unused is not mask]
                return array
        return None


def _within(layer: str, above: str) -> bool:
    return layer == above or is_below(layer, above)


def fitted(mask: Mask, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return a mask in the given shape; `None` if it does not fit.

    Axes may be merged or permuted.
    """
    if mask.shape == shape:
        return mask.kept()
    if prod(mask.shape) != prod(shape):
        return None
    if any(mask.shape[len(mask.shape) - k :] == shape[len(shape) - k :] for k in _tails(mask.shape, shape)):
        return mask.kept().reshape(shape)
    for order in _orders(len(mask.shape)):
        if tuple(mask.shape[axis] for axis in order) == shape:
            return np.ascontiguousarray(mask.kept().transpose(order))
    return None


def _tails(first: tuple[int, ...], second: tuple[int, ...]) -> range:
    """Return the numbers of trailing axes to compare, if one shape merges leading axes of the other."""
    return range(1, min(len(first), len(second)) + 1) if len(first) != len(second) else range(0)


def _orders(axes: int) -> Iterator[tuple[int, ...]]:
    """Yield permutations of axes, usual ones first: batch and sequence exchanged, channels last, channels first."""
    if not 2 <= axes <= _MOST_AXES:
        return
    trailing = tuple(range(2, axes))
    yield (1, 0, *trailing)
    yield (0, *trailing, 1)
    yield (0, axes - 1, *range(1, axes - 1))
    yield from permutations(range(axes))
