"""Solving for the settings with which a rule makes the updates that were recorded."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from padiff.compare.diagnose.hypotheses.proof import NEAR
from padiff.compare.diagnose.hypotheses.rules import History, Rule, side_by_side, updates

# Rounds of the search, and by how much it has to come nearer for another.
_ROUNDS, _BETTER = 14, 0.999
# A setting that changes no update by more than this share of the noise, while it changes by itself, does not show.
_SHOWS = 1e-2
# What is solved for where it is small, or close to one, is solved for on a scale where that is no matter.
_SMALLEST = 1e-16
_LOGARITHMS = frozenset({"eps", "initial"})
_NEAREST = 1e-6
_CLOSE_TO_ONE = frozenset({"beta1", "beta2", "alpha"})


@dataclass(frozen=True)
class Fit:
    """A rule with settings, and how near to what was recorded it comes.

    Attributes:
        rule: the rule.
        settings: its settings; ``rate`` is a factor of the recorded learning rates.
        residual: what it is off by, as a multiple of the rounding noise (root of the mean square).
        solved: names of the settings that were solved for.
        tried: how many values were looked through.
    """

    rule: Rule
    settings: Mapping[str, float]
    residual: float = math.inf
    solved: tuple[str, ...] = ()
    tried: int = 1

    @property
    def explains(self) -> bool:
        """Whether nothing but rounding is left."""
        return self.residual <= NEAR


def residual_of(rule: Rule, settings: Mapping[str, float], history: History, noise: np.ndarray) -> float:
    """What a rule's updates are off by, as a multiple of the noise; infinite where they are no numbers."""
    return _size(_errors(rule, settings, history, noise))


def residuals_of(
    rule: Rule, several: Sequence[Mapping[str, float]], history: History, noise: np.ndarray
) -> list[float]:
    """`residual_of` for each of several settings of equal forms, worked out together: much faster than one by one."""
    with np.errstate(all="ignore"):
        sizes = np.sqrt(np.mean(np.square(_errors(rule, side_by_side(rule, several), history, noise)), axis=1))
    return [size if math.isfinite(size) else math.inf for size in sizes.tolist()]


def fit(
    rule: Rule, start: Mapping[str, float], free: Sequence[str], history: History, noise: np.ndarray, tried: int = 1
) -> Fit:
    """Solve for some settings by least squares, from given ones on (Levenberg and Marquardt's way)."""
    settings = dict(start)
    errors = _errors(rule, settings, history, noise)
    best, damping = _size(errors), 1e-3
    rounds = _ROUNDS if math.isfinite(best) else 0
    for _ in range(rounds):
        nudges = [_nudge(name, settings[name]) for name in free]
        nudged = [{**settings, name: _moved(name, settings[name], by)} for name, by in zip(free, nudges)]
        rows = _errors(rule, side_by_side(rule, nudged), history, noise) - errors
        slopes = np.ascontiguousarray((rows / np.array(nudges)[:, None]).T)
        if not np.isfinite(slopes).all():
            break
        shows = np.sqrt(np.mean(np.square(slopes), axis=0)) > _SHOWS
        free, slopes = [name for name, one in zip(free, shows) if one], slopes[:, shows]
        if not free:
            break
        square, pull = slopes.T @ slopes, slopes.T @ errors
        before = best
        for _ in range(4):
            raised = square + damping * np.diag(np.diag(square) + 1e-300)
            change = np.linalg.lstsq(raised, -pull, rcond=None)[0]
            moved = {**settings, **{name: _moved(name, settings[name], by) for name, by in zip(free, change)}}
            there = _errors(rule, moved, history, noise)
            size = _size(there)
            if size < best:
                settings, errors, best, damping = moved, there, size, damping / 10
                break
            damping *= 10
        if best > before * _BETTER:
            break
    return _rounded(Fit(rule, settings, best, tuple(free), tried), history, noise)


def _errors(rule: Rule, settings: Mapping[str, Any], history: History, noise: np.ndarray) -> np.ndarray:
    """In a row; in a row for each of settings that are side by side."""
    with np.errstate(all="ignore"):
        errors = np.asarray((updates(rule, history, settings) - history.updates) / noise)
        return errors.reshape(*errors.shape[:-2], -1)


def _size(errors: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        size = math.sqrt(float(np.mean(np.square(errors)))) if errors.size else math.inf
    return size if math.isfinite(size) else math.inf


def _nudge(name: str, value: float) -> float:
    if name in _LOGARITHMS or name in _CLOSE_TO_ONE:
        return 1e-4
    return 1e-5 * max(abs(value), 1e-2)


def _moved(name: str, value: float, by: float) -> float:
    if name in _LOGARITHMS:
        return max(value, _SMALLEST) * math.exp(min(max(by, -8.0), 8.0))
    if name in _CLOSE_TO_ONE:
        return 1 - min(max((1 - value) * math.exp(min(max(by, -3.0), 3.0)), _NEAREST), 1.0)
    return value + by


def _rounded(found: Fit, history: History, noise: np.ndarray) -> Fit:
    """The fit with values that a person would have written, as far as they explain as much."""
    settings, best = dict(found.settings), found.residual
    enough = max(NEAR, 1.5 * best)
    for name in found.solved:
        for value in _round_values(name, settings[name]):
            other = {**settings, name: value}
            size = residual_of(found.rule, other, history, noise)
            close = size <= 1.5 * best or size <= 1.0 or abs(value - settings[name]) <= 1e-5 * abs(value)
            if size <= enough and close:
                settings, best = other, size
                break
    return Fit(found.rule, settings, best, found.solved, found.tried)


def _round_values(name: str, value: float) -> Iterator[float]:
    if name not in _LOGARITHMS and name != "rate":
        yield 0.0
    if name in _CLOSE_TO_ONE:
        yield from (rounded for digits in (1, 2, 3, 4, 5) if (rounded := float(f"{value:.{digits}f}")) < 1)
    else:
        yield from (float(f"{value:.{digits}g}") for digits in (1, 2, 3, 4, 5))
