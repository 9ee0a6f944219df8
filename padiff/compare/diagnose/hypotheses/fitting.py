"""Least-squares solver for the settings of an optimizer rule that reproduce the recorded updates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from padiff.compare.diagnose.hypotheses.proof import NEAR
from padiff.compare.diagnose.hypotheses.rules import History, Rule, side_by_side, updates

# Most rounds of the search, and the factor that the error has to fall by for another round.
_ROUNDS, _BETTER = 14, 0.999
# A setting that changes the updates by less than this share of the noise, for a change of one, is not solved for.
_SHOWS = 1e-2
# Small settings, and settings close to one, are solved for on a logarithmic scale.
_SMALLEST = 1e-16
_LOGARITHMS = frozenset({"eps", "initial"})
_NEAREST = 1e-6
_CLOSE_TO_ONE = frozenset({"beta1", "beta2", "alpha"})


@dataclass(frozen=True)
class Fit:
    """A rule with settings, and its error against the recorded updates.

    Attributes:
        rule: the rule.
        settings: the rule's settings; ``rate`` is a factor of the recorded learning rates.
        residual: error of the updates, as a multiple of the rounding noise (root of the mean square).
        solved: names of the settings that were solved for.
        tried: count of values that were tried.
    """

    rule: Rule
    settings: Mapping[str, float]
    residual: float = math.inf
    solved: tuple[str, ...] = ()
    tried: int = 1

    @property
    def explains(self) -> bool:
        """Return True if only rounding is left."""
        return self.residual <= NEAR


def residual_of(rule: Rule, settings: Mapping[str, float], history: History, noise: np.ndarray) -> float:
    """Return the error of a rule's updates as a multiple of the noise; infinite if an update is not finite."""
    return _size(_errors(rule, settings, history, noise))


def residuals_of(
    rule: Rule, several: Sequence[Mapping[str, float]], history: History, noise: np.ndarray
) -> list[float]:
    """Return `residual_of` for several settings of equal forms, computed together: much faster than one by one."""
    with np.errstate(all="ignore"):
        sizes = np.sqrt(np.mean(np.square(_errors(rule, side_by_side(rule, several), history, noise)), axis=1))
    return [size if math.isfinite(size) else math.inf for size in sizes.tolist()]


def fit(
    rule: Rule, start: Mapping[str, float], free: Sequence[str], history: History, noise: np.ndarray, tried: int = 1
) -> Fit:
    """Solve for the settings named in ``free`` by least squares (Levenberg-Marquardt), from ``start`` on."""
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
        free, slopes = [name for name, visible in zip(free, shows) if visible], slopes[:, shows]
        if not free:
            break
        square, pull = slopes.T @ slopes, slopes.T @ errors
        before = best
        for _ in range(4):
            raised = square + damping * np.diag(np.diag(square) + 1e-300)
            change = np.linalg.lstsq(raised, -pull, rcond=None)[0]
            moved = {**settings, **{name: _moved(name, settings[name], by) for name, by in zip(free, change)}}
            moved_errors = _errors(rule, moved, history, noise)
            size = _size(moved_errors)
            if size < best:
                settings, errors, best, damping = moved, moved_errors, size, damping / 10
                break
            damping *= 10
        if best > before * _BETTER:
            break
    return _rounded(Fit(rule, settings, best, tuple(free), tried), history, noise)


def _errors(rule: Rule, settings: Mapping[str, Any], history: History, noise: np.ndarray) -> np.ndarray:
    """Return the errors of all updates in a row; for settings from `side_by_side`, a row for each of the settings."""
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


def _rounded(solution: Fit, history: History, noise: np.ndarray) -> Fit:
    """Return the fit with solved values replaced by round ones that a person would write, if those fit as well."""
    settings, best = dict(solution.settings), solution.residual
    enough = max(NEAR, 1.5 * best)
    for name in solution.solved:
        for value in _round_values(name, settings[name]):
            rounded = {**settings, name: value}
            size = residual_of(solution.rule, rounded, history, noise)
            close = size <= 1.5 * best or size <= 1.0 or abs(value - settings[name]) <= 1e-5 * abs(value)
            if size <= enough and close:
                settings, best = rounded, size
                break
    return Fit(solution.rule, settings, best, solution.solved, solution.tried)


def _round_values(name: str, value: float) -> Iterator[float]:
    if name not in _LOGARITHMS and name != "rate":
        yield 0.0
    if name in _CLOSE_TO_ONE:
        yield from (rounded for digits in (1, 2, 3, 4, 5) if (rounded := float(f"{value:.{digits}f}")) < 1)
    else:
        yield from (float(f"{value:.{digits}g}") for digits in (1, 2, 3, 4, 5))
