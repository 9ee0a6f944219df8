"""Giving the candidate's dropout the masks that the reference's drew."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import permutations
from math import prod

import numpy as np

from padiff.frameworks.dropouts import DropoutCall
from padiff.records import is_below
from padiff.records.pack import Mask

# More axes are not looked at in other orders.
_MOST_AXES = 5


class MaskFeeder:
    """Finds the mask for each call of dropout in the candidate.

    A call made in a layer gets the next mask of its micro-batch that was drawn in the layer that answers to it; where
    there is none, the next one that was drawn inside of the nearest layer around it that has a partner, and that no
    other layer waits for; else the next one there whoever waits for it: dropout may be a layer here, and a function, or
    one layer for several, there.

    Args:
        masks: what the reference drew in the step, in order.
        partners: the reference's layer for each of the candidate's, by path.
        running: gives the paths of the candidate's layers whose calls are under way, the outermost first.
        recomputing: whether a forward that is called now is called again inside of a backward.
        batch: which micro-batch is under way; `None`: not known.
        draws: whether dropout draws all the same.

    Attributes:
        unanswered: calls that got no mask, as ``layer (function)``.
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
        self.draws = draws
        self._batch = batch
        self._waiting = list(masks)
        self._partners, self._running, self._recomputing = partners, running, recomputing
        self._back = {reference: candidate for candidate, reference in partners.items()}
        #: By layer, what its calls were given, and how many of these calls were made again.
        self._fed: dict[str, list[np.ndarray | None]] = defaultdict(list)
        self._again: Counter[str] = Counter()
        self.unanswered: dict[str, None] = {}
        #: What the calls were given, in their order.
        self.log: list[np.ndarray | None] = []
        self._rerun: list[np.ndarray | None] | None = None

    @contextmanager
    def again(self, start: int) -> Iterator[None]:
        """Calls made inside are given what those since a place in the log were given."""
        self._rerun = self.log[start:]
        try:
            yield
        finally:
            self._rerun = None

    @property
    def left(self) -> list[Mask]:
        """Masks that nothing in the candidate asked for."""
        return list(self._waiting)

    def wants(self) -> bool:
        """Whether a call that is made now is the model's."""
        return bool(self._running()) or self._rerun is not None

    def mask(self, call: DropoutCall) -> np.ndarray | None:
        """What it is to keep; `None`: there is nothing for it."""
        if self._rerun is not None:
            return self._rerun.pop(0) if self._rerun else None
        running = self._running()
        inside = running[-1]
        fed = self._fed[inside]
        if self._recomputing():
            number = self._again[inside]
            self._again[inside] += 1
            return fed[number % len(fed)] if fed else None
        found = self._next(call, running)
        if found is None:
            self.unanswered[f"{inside} ({call.function}, rate {call.rate:g})"] = None
        fed.append(found)
        self.log.append(found)
        return found

    def _next(self, call: DropoutCall, running: Sequence[str]) -> np.ndarray | None:
        batch = self._batch()
        waiting = [mask for mask in self._waiting if batch is None or mask.batch == batch]
        partners = [self._partners[path] for path in reversed(running) if path in self._partners]
        for reference in partners:
            # What another layer here answers to waits for that one.
            some = (mask for mask in waiting if self._back.get(mask.layer, running[-1]) in running)
            kept = self._first(call, (mask for mask in some if _within(mask.layer, reference)))
            if kept is not None:
                return kept
        # A layer there may be called where a function, or another layer, is called here: in the same order.
        inside = ([mask for mask in waiting if _within(mask.layer, reference)] for reference in partners)
        return self._first(call, next((masks[:1] for masks in inside if masks), ()))

    def _first(self, call: DropoutCall, masks: Iterable[Mask]) -> np.ndarray | None:
        for mask in masks:
            kept = fitted(mask, call.shape)
            if kept is not None:
                self._waiting = [other for other in self._waiting if other is not mask]
                return kept
        return None


def _within(layer: str, above: str) -> bool:
    return layer == above or is_below(layer, above)


def fitted(mask: Mask, shape: tuple[int, ...]) -> np.ndarray | None:
    """A mask for a tensor of this shape, whose axes may be merged, or in another order; `None`: it does not fit."""
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


def _tails(one: tuple[int, ...], other: tuple[int, ...]) -> range:
    """How many last axes to look at, where the others are merged on one side."""
    return range(1, min(len(one), len(other)) + 1) if len(one) != len(other) else range(0)


def _orders(axes: int) -> Iterator[tuple[int, ...]]:
    """Orders of axes, usual ones first: batch and sequence exchanged, channels last, channels first."""
    if not 2 <= axes <= _MOST_AXES:
        return
    rest = tuple(range(2, axes))
    yield (1, 0, *rest)
    yield (0, *rest, 1)
    yield (0, axes - 1, *range(1, axes - 1))
    yield from permutations(range(axes))
