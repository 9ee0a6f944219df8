"""Distance between the outputs of two calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: Smallest ratio between the sums of positive and of negative differences for which a direction is named.
_ONE_WAY = 1.5

# Largest relative variation of a constant ratio; and the share of the largest element below which one is ignored.
_CONSTANT, _TINY = 1e-4, 1e-3


@dataclass(frozen=True, slots=True)
class Gap:
    """The distance between two outputs.

    Attributes:
        kind: ``same``, ``values``, ``shapes`` (other shapes or another number of outputs), or ``raises``.
        torch, paddle: the two values at the largest difference, or the two shapes, or the error and ``runs``.
        rel_l2: norm of the difference divided by the norm of torch's values; infinity if torch's norm is zero or one
            side is not finite; `None` without values.
        max_abs: largest absolute difference; infinity if one side is not finite; `None` without values.
        ratio: paddle's values divided by torch's if the ratio is the same for all elements; else `None`.
        direction: ``+`` if paddle's values are larger, ``-`` if they are smaller, ``±`` if both occur; empty without
            values.
    """

    kind: str
    torch: str = ""
    paddle: str = ""
    rel_l2: float | None = None
    max_abs: float | None = None
    ratio: float | None = None
    direction: str = ""


Outputs = Sequence[np.ndarray] | Exception


def gap(torch: Outputs, paddle: Outputs, tolerance: float) -> Gap:
    """Compare two outputs.

    Args:
        torch, paddle: the outputs in float64, or the error that was raised.
        tolerance: the relative L2 error up to which outputs are the same.
    """
    if isinstance(torch, Exception) or isinstance(paddle, Exception):
        return Gap("raises", _said(torch), _said(paddle))
    shapes = [[output.shape for output in outputs] for outputs in (torch, paddle)]
    if shapes[0] != shapes[1]:
        shape_texts = [" ".join(map(_shape, side)) or "nothing" for side in shapes]
        return Gap("shapes", shape_texts[0], shape_texts[1])
    if not torch:
        return Gap("same")
    flat = [np.concatenate([output.ravel() for output in outputs]) for outputs in (torch, paddle)]
    return _of_values(flat[0], flat[1], tolerance)


def _of_values(torch: np.ndarray, paddle: np.ndarray, tolerance: float) -> Gap:
    alike = (torch == paddle) | (np.isnan(torch) & np.isnan(paddle))
    with np.errstate(invalid="ignore"):
        away = np.where(alike, 0.0, paddle - torch)
    sizes = np.where(np.isfinite(away), np.abs(away), math.inf)
    worst = int(np.argmax(sizes)) if sizes.size else 0
    size, norm = float(np.sqrt((sizes**2).sum())), float(np.linalg.norm(torch[np.isfinite(torch)]))
    rel_l2 = 0.0 if not size else size / norm if norm else math.inf
    if rel_l2 <= tolerance:
        return Gap("same", rel_l2=rel_l2, max_abs=float(sizes.max(initial=0.0)))
    return Gap(
        "values",
        _number(torch[worst]),
        _number(paddle[worst]),
        rel_l2,
        float(sizes[worst]),
        _ratio(torch, paddle),
        _direction(away),
    )


def _ratio(torch: np.ndarray, paddle: np.ndarray) -> float | None:
    if not np.isfinite(torch).all() or not np.isfinite(paddle).all():
        return None
    significant = np.abs(torch) > _TINY * np.abs(torch).max(initial=0.0)
    if not significant.any() or np.abs(paddle[~significant]).max(initial=0.0) > _TINY * np.abs(paddle).max():
        return None
    ratios = paddle[significant] / torch[significant]
    middle = float(np.median(ratios))
    return middle if np.abs(ratios - middle).max() <= _CONSTANT * abs(middle) and middle else None


def _direction(away: np.ndarray) -> str:
    up, down = (float(np.where(np.isfinite(way), np.maximum(way, 0.0), 0.0).sum()) for way in (away, -away))
    if not up and not down:
        return ""
    return "+" if up > _ONE_WAY * down else "-" if down > _ONE_WAY * up else "±"


def _said(outputs: Outputs) -> str:
    return f"raises {type(outputs).__name__}" if isinstance(outputs, Exception) else "runs"


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _number(value: float) -> str:
    return f"{value:.5g}"
