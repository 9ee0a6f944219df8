"""Views: tensors that hold the same in another layout, brought into one before they are compared.

A view is written as steps: ``transpose``, ``axes 0,3,1,2`` (numpy's transpose) and ``reshape``, joined by ``then``.
Only layouts that the frameworks and well-known models really use are tried, and a view is only taken where shapes leave
no choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

Shape = tuple[int, ...]

#: One side has once, or not at all, what the other has for every sample: position embeddings.
BROADCAST = "broadcast"

# Channels first and last, sequence and batch first, heads before and after the sequence.
_AXES: dict[int, tuple[tuple[tuple[int, ...], str], ...]] = {
    3: (((0, 2, 1), "channels last against first"), ((1, 0, 2), "sequence first against batch first")),
    4: (
        ((0, 3, 1, 2), "channels last against first"),
        ((0, 2, 3, 1), "channels first against last"),
        ((0, 2, 1, 3), "heads before the sequence against after it"),
    ),
    5: (((0, 4, 1, 2, 3), "channels last against first"), ((0, 2, 3, 4, 1), "channels first against last")),
}


def view_between(reference: Shape, candidate: Shape) -> str:
    """The one view that brings a candidate's tensor into the reference's shape; empty if none is needed or sure."""
    if reference == candidate:
        return ""
    turned = _turns(reference, candidate)
    if turned:
        return turned[0] if len(turned) == 1 else ""
    if math.prod(reference) != math.prod(candidate):
        return BROADCAST if _same_for_all(reference, candidate) else ""
    if _bare(reference) == _bare(candidate):
        return "reshape"
    if len(reference) == len(candidate):
        return ""
    ways = set(_flattened(reference, candidate))
    return ways.pop() if len(ways) == 1 else ""


def square_view(shape: Shape, usual: Iterable[str]) -> str:
    """The view of a tensor whose two swapped axes are equally long: the one that the run's other tensors need."""
    found = [view for view in set(usual) if view.startswith("axes ") and _after(shape, _axes_of(view)) == shape]
    return found[0] if len(found) == 1 else ""


def apply(view: str, candidate: np.ndarray, reference: Shape) -> np.ndarray:
    """A candidate's tensor as the view shows it."""
    for part in view.split(" then ") if view else ():
        if part == "transpose":
            candidate = candidate.T
        elif part.startswith("axes "):
            candidate = candidate.transpose(_axes_of(part))
        elif part == "reshape" and candidate.size == math.prod(reference):
            candidate = candidate.reshape(reference)
    return candidate


def undo(view: str, reference: np.ndarray, candidate: Shape) -> np.ndarray:
    """A reference's tensor as it would lie in the candidate's layout: what `apply` would make it from."""
    shapes = [candidate]
    parts = view.split(" then ") if view else []
    for part in parts:
        shapes.append(apply(part, np.broadcast_to(np.zeros(()), shapes[-1]), reference.shape).shape)
    for part, before in zip(reversed(parts), reversed(shapes[:-1])):
        if part == "transpose":
            reference = reference.T
        elif part.startswith("axes "):
            reference = reference.transpose(np.argsort(_axes_of(part)))
        elif part == "reshape":
            reference = reference.reshape(before)
    return reference


def told(view: str) -> str:
    """A view in words."""
    words = []
    for part in view.split(" then ") if view else ():
        axes = _axes_of(part) if part.startswith("axes ") else ()
        words.append(next((text for known, text in _AXES.get(len(axes), ()) if known == axes), part))
    return ", ".join(words)


def _same_for_all(reference: Shape, candidate: Shape) -> bool:
    few, many = sorted((reference, candidate), key=lambda shape: (len(shape), math.prod(shape)))
    if len(few) == len(many):
        return len(few) > 1 and few[0] == 1 and few[1:] == many[1:]
    return len(few) > 0 and few == many[1:]


def _turns(reference: Shape, candidate: Shape) -> list[str]:
    if len(reference) != len(candidate):
        return []
    known = [axes for axes, _ in _AXES.get(len(candidate), ())]
    return [f"axes {','.join(map(str, axes))}" for axes in known if _after(candidate, axes) == reference]


def _flattened(reference: Shape, candidate: Shape) -> Iterable[str]:
    """Views between a picture and its places in one row: (N, C, H, W) against (N, H * W, C), or (N, C * H * W)."""
    if len(candidate) == 4 and len(reference) == 3:
        n, c, h, w = candidate
        if reference == (n, h * w, c):
            yield "axes 0,2,3,1 then reshape"
        if reference == (n, c, h * w):
            yield "reshape"
    elif len(candidate) == 3 and len(reference) == 4:
        n, c, h, w = reference
        if candidate == (n, h * w, c):
            yield "axes 0,2,1 then reshape"
        if candidate == (n, c, h * w):
            yield "reshape"
    if candidate[-1] == reference[-1]:
        yield "reshape"  # (batch, height, width, features) against (batch, places, features), or all in one row
    if candidate[0] == reference[0] and 2 in (len(candidate), len(reference)):
        yield "reshape"  # (batch, ...) against (batch, all the rest)


def _after(shape: Shape, axes: tuple[int, ...]) -> Shape:
    return tuple(shape[axis] for axis in axes) if len(axes) == len(shape) else ()


def _axes_of(view: str) -> tuple[int, ...]:
    return tuple(int(axis) for axis in view.split()[1].split(","))


def _bare(shape: Shape) -> Shape:
    return tuple(extent for extent in shape if extent != 1)
