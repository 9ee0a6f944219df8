"""How far apart two answers are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: The larger of two sums of differences of either sign has to be so many times the smaller for a direction to be named.
_ONE_WAY = 1.5

# A constant ratio may vary so much, relatively; and elements smaller than that share of the largest say nothing of it.
_CONSTANT, _TINY = 1e-4, 1e-3


@dataclass(frozen=True, slots=True)
class Gap:
    """How far two answers are apart.

    Attributes:
        kind: ``same``, ``values``, ``shapes`` (they differ, or there are more outputs on one side), or ``raises``.
        torch, paddle: the two values where they are furthest apart, the two shapes, or the error and ``runs``.
        rel_l2: the norm of the difference over torch's; infinity where torch's is zero or one side is not finite.
            `None` without values.
        max_abs: the largest difference; likewise.
        ratio: paddle's over torch's where it is the same at all elements; else `None`.
        direction: ``+`` where paddle's are larger, ``-`` where they are smaller, ``±`` where both occur; empty without
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
    """Hold two answers against each other.

    Args:
        torch, paddle: their outputs in float64, or the error that came instead.
        tolerance: the relative L2 up to which they are the same.
    """
    if isinstance(torch, Exception) or isinstance(paddle, Exception):
        return Gap("raises", _said(torch), _said(paddle))
    shapes = [[output.shape for output in outputs] for outputs in (torch, paddle)]
    if shapes[0] != shapes[1]:
        said = [" ".join(map(_shape, side)) or "nothing" for side in shapes]
        return Gap("shapes", said[0], said[1])
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
    known = np.abs(torch) > _TINY * np.abs(torch).max(initial=0.0)
    if not known.any() or np.abs(paddle[~known]).max(initial=0.0) > _TINY * np.abs(paddle).max():
        return None
    ratios = paddle[known] / torch[known]
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
