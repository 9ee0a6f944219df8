"""Sketches of parts of distributed tensors: the sketches of all parts add up to that of the full tensor.

Sample positions and signs are those of the full tensor. A part's sample has its own elements at these positions, and
zeros at the positions of other parts; so the projections of the parts add up to the full tensor's projection, and so do
the moments.
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
    """Elements of a full tensor's sample that lie in one part.

    Attributes:
        places: positions of these elements in the sample.
        elements: positions of these elements in the part, row by row.
        length: length of the sample.
    """

    places: np.ndarray
    elements: np.ndarray
    length: int


@lru_cache(maxsize=1024)
def own_of(whole: tuple[int, ...], offset: tuple[int, ...], shape: tuple[int, ...], transposed: bool = False) -> Own:
    """Return the elements of a full tensor's sample that lie in a part.

    Args:
        whole: shape of the full tensor.
        offset, shape: start of the part along each axis, and shape of the part. If the part has one axis and the full
            tensor has another number of axes, the part is a range of the full tensor's elements, row by row.
        transposed: True if the transposed full tensor is sampled.
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
    nonempty = bool(shape) and 0 not in shape
    elements = np.ravel_multi_index(local, shape) if nonempty else np.zeros(int(inside.sum()), np.int64)
    return Own(np.flatnonzero(inside), np.asarray(elements), min(size, ELEMENTS))


def whole_sketch(sketches: Sequence[Sketch], owned: Sequence[int]) -> Sketch:
    """Return the sketch of a full tensor from the sketches of its parts.

    Args:
        sketches: sketches of the parts.
        owned: number of the sample's elements in each part.
    """
    first = sketches[0]
    length = first.looked_at
    filled = [sketch for sketch, count in zip(sketches, owned) if count]

    def total(name: str) -> float:
        return float(sum(getattr(sketch, name) for sketch in sketches))

    # Each part counts the elements of the other parts as zeros.
    foreign = sum(length - count for count in owned) / length if length else 0.0
    return Sketch(
        size=first.size,
        minimum=min((sketch.minimum for sketch in filled), default=0.0),
        maximum=max((sketch.maximum for sketch in filled), default=0.0),
        mean=total("mean"),
        mean_abs=total("mean_abs"),
        mean_square=total("mean_square"),
        zeros=max(0.0, total("zeros") - foreign),
        nonfinite=total("nonfinite"),
        projection=np.sum([sketch.projection for sketch in sketches], axis=0),
        transposed=first.transposed,
    )
