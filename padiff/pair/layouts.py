"""Layouts that bring one tensor into another's shape.

Only layouts that the frameworks and well-known models really use are tried, and a layout is chosen only if the shapes
leave no choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from padiff.records import BROADCAST, RESHAPED, SAME, Layout
from padiff.records.layout import Shape

# Channels first and last, sequence and batch first, heads before and after the sequence.
_AXES: dict[int, tuple[Shape, ...]] = {
    3: ((0, 2, 1), (1, 0, 2)),
    4: ((0, 3, 1, 2), (0, 2, 3, 1), (0, 2, 1, 3)),
    5: ((0, 4, 1, 2, 3), (0, 2, 3, 4, 1)),
}


def layout_between(reference: Shape, candidate: Shape) -> Layout:
    """Return the only layout that brings a candidate's tensor into the reference's shape; `SAME` if none is
    needed or certain.
    """
    if reference == candidate:
        return SAME
    if len(reference) == len(candidate):
        swapped = [axes for axes in _AXES.get(len(candidate), ()) if _after(candidate, axes) == reference]
        if swapped:
            return Layout((swapped[0],)) if len(swapped) == 1 else SAME
    if math.prod(reference) != math.prod(candidate):
        return BROADCAST if _same_for_all(reference, candidate) else SAME
    if _bare(reference) == _bare(candidate):
        return RESHAPED
    if len(reference) == len(candidate):
        return SAME
    ways = set(_flattened(reference, candidate))
    return ways.pop() if len(ways) == 1 else SAME


def square_layout(shape: Shape, usual: Iterable[Layout]) -> Layout:
    """Return the layout of a tensor whose swapped axes are equally long: the layout of the run's other tensors."""
    candidates = [
        layout
        for layout in set(usual)
        for axes in layout.steps
        if len(layout.steps) == 1 and isinstance(axes, tuple) and _after(shape, axes) == shape
    ]
    return candidates[0] if len(candidates) == 1 else SAME


def _same_for_all(reference: Shape, candidate: Shape) -> bool:
    few, many = sorted((reference, candidate), key=lambda shape: (len(shape), math.prod(shape)))
    if len(few) == len(many):
        return len(few) > 1 and few[0] == 1 and few[1:] == many[1:]
    return len(few) > 0 and few == many[1:]


def _flattened(reference: Shape, candidate: Shape) -> Iterable[Layout]:
    """Yield layouts between a picture and its flattened form: (N, C, H, W) against (N, H * W, C), or (N, C * H * W)."""
    if len(candidate) == 4 and len(reference) == 3:
        n, c, h, w = candidate
        if reference == (n, h * w, c):
            yield Layout(((0, 2, 3, 1), "reshape"))
        if reference == (n, c, h * w):
            yield RESHAPED
    elif len(candidate) == 3 and len(reference) == 4:
        n, c, h, w = reference
        if candidate == (n, h * w, c):
            yield Layout(((0, 2, 1), "reshape"))
        if candidate == (n, c, h * w):
            yield RESHAPED
    if candidate[-1] == reference[-1]:
        yield RESHAPED  # (batch, height, width, features) against (batch, places, features), or all in one row
    if candidate[0] == reference[0] and 2 in (len(candidate), len(reference)):
        yield RESHAPED  # (batch, ...) against (batch, all the rest)


def _after(shape: Shape, axes: Shape) -> Shape:
    return tuple(shape[axis] for axis in axes) if len(axes) == len(shape) else ()


def _bare(shape: Shape) -> Shape:
    return tuple(extent for extent in shape if extent != 1)
