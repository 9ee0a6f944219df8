"""Sketches of parts of tensors: those of all parts add up to the whole's.

Places and signs are those of the whole tensor. A part's sample has its own elements at these places, and zeros where
others have theirs; so the projections of the parts add up to that of the whole, and so do the moments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from padiff.sketches.places import ELEMENTS, places
from padiff.sketches.sketch import Sketch


class Own(NamedTuple):
    """Which elements that a whole tensor's sketch looks at lie in a part of it.

    Attributes:
        places: of them, among those that are looked at.
        elements: of them, among the part's own, row by row.
        length: how many are looked at in all.
    """

    places: np.ndarray
    elements: np.ndarray
    length: int


@lru_cache(maxsize=1024)
def own_of(whole: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...], transposed: bool = False) -> Own:
    """Which elements a sketch of the whole looks at, that lie in a part.

    Args:
        whole: the whole tensor's shape.
        offset, shape: where the part begins along each axis, and its own shape; where it has one axis and the whole
            has another number of them, it is a range of the whole's elements, row by row.
        transposed: whether the whole is looked at transposed.
    """
    size = math.prod(whole)
    looked_at = places(size)
    order = whole[::-1] if transposed else whole
    at = np.unravel_index(looked_at, order) if size else tuple(np.zeros((len(whole), 0), np.int64))
    at = at[::-1] if transposed else at
    if len(shape) == 1 and len(whole) != 1:
        flat = np.ravel_multi_index(at, whole) if whole and size else looked_at
        inside = (flat >= offset[0]) & (flat < offset[0] + shape[0])
        return Own(np.flatnonzero(inside), flat[inside] - offset[0], min(size, ELEMENTS))
    inside = np.ones(len(looked_at), bool)
    for index, start, length in zip(at, offset, shape):
        inside &= (index >= start) & (index < start + length)
    local = [index[inside] - start for index, start in zip(at, offset)]
    there = bool(shape) and 0 not in shape
    elements = np.ravel_multi_index(local, shape) if there else np.zeros(int(inside.sum()), np.int64)
    return Own(np.flatnonzero(inside), np.asarray(elements), min(size, ELEMENTS))


def whole_sketch(sketches: Sequence[Sketch], owned: Sequence[int]) -> Sketch:
    """The sketch of a whole tensor, given those of parts that make it up.

    Args:
        sketches: of the parts.
        owned: how many of the elements that are looked at lie in each.
    """
    first = sketches[0]
    length = first.looked_at
    there = [sketch for sketch, count in zip(sketches, owned) if count]

    def total(name: str) -> float:
        return float(sum(getattr(sketch, name) for sketch in sketches))

    # Each part counts what the others hold as zeros.
    foreign = sum(length - count for count in owned) / length if length else 0.0
    return Sketch(
        size=first.size,
        minimum=min((sketch.minimum for sketch in there), default=0.0),
        maximum=max((sketch.maximum for sketch in there), default=0.0),
        mean=total("mean"),
        mean_abs=total("mean_abs"),
        mean_square=total("mean_square"),
        zeros=max(0.0, total("zeros") - foreign),
        nonfinite=total("nonfinite"),
        projection=np.sum([sketch.projection for sketch in sketches], axis=0),
        transposed=first.transposed,
    )
