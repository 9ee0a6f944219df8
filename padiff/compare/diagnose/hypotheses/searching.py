"""Search for the optimizer rule and settings that made the updates of a side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product

import numpy as np

from padiff.compare.diagnose.hypotheses.fitting import Fit, fit, residual_of, residuals_of
from padiff.compare.diagnose.hypotheses.parameter_history import ParameterHistory, joined
from padiff.compare.diagnose.hypotheses.proof import NEAR
from padiff.compare.diagnose.hypotheses.rules import LAMB, RULES, History, Rule

# Count of elements that usual values are tried on, and count that settings are solved with.
_COARSE, _FINE = 300, 1500
# Count of steps that usual values are tried on: these trials only choose where to solve from.
_FIRST = 4
# Count of numbers per array when usual values are tried together: such arrays stay in a core's cache.
_TOGETHER = 10_000
# Count of best usual values to solve from, and the largest error of these as a share of the updates.
_BEST, _HOPELESS = 2, 0.7
# From this count of steps on, no two rules make the same updates.
_TELLING = 3
# Below this residual, the rest may come from float32 arithmetic.
_SINGLE = 2000.0
# Count of values of each setting in the grid: the most usual ones.
_GRID = {"beta1": 5, "beta2": 5, "eps": 3, "weight_decay": 6, "momentum": 4, "alpha": 3, "dampening": 1, "initial": 2}
# The same for a rule in another form: solving reaches the values from farther away.
_OTHER_FORM = {"beta1": 3, "beta2": 3, "eps": 2, "weight_decay": 3, "momentum": 3, "dampening": 1, "initial": 2}


@dataclass(frozen=True)
class Sample:
    """A side's tracks as one history: coarse to try values, fine to solve.

    Attributes:
        rates: the learning rates of each step, by parameter group.
        elements: True for elements, False for projections, which show linear rules only.
        tries: the usual values that were tried, with their residuals, shared by several searches.
    """

    coarse: tuple[History, np.ndarray]
    fine: tuple[History, np.ndarray]
    rates: np.ndarray
    elements: bool
    tries: dict[tuple[object, ...], _Tries] = field(default_factory=dict, compare=False)

    @classmethod
    def from_histories(cls, tracks: Sequence[ParameterHistory], side: str, rates: np.ndarray) -> Sample:
        coarse, fine = (joined(tracks, side, most) for most in (_COARSE, _FINE))
        return cls(coarse, fine, rates, all(track.elements for track in tracks))

    def at(self, group: int, coarse: bool = False) -> tuple[History, np.ndarray]:
        """Return the history with the learning rate of a parameter group, and its noise."""
        history, noise = self.coarse if coarse else self.fine
        return replace(history, rates=self.rates[:, group]), noise

    @property
    def groups(self) -> list[int]:
        """Return the parameter groups whose learning rates differ from those of all groups before."""
        _, first = np.unique(self.rates, axis=1, return_index=True)
        return sorted(int(k) for k in first)


class _Tries:
    """Residuals of a rule's usual values, computed lazily and only once."""

    def __init__(self, values: Iterator[tuple[float, dict[str, float]]]) -> None:
        self._values = values
        self._known: list[tuple[float, dict[str, float]]] = []

    def __iter__(self) -> Iterator[tuple[float, dict[str, float]]]:
        yield from self._known
        for pair in self._values:
            self._known.append(pair)
            yield pair


def known_fits(sample: Sample, known: Sequence[Fit]) -> Iterator[tuple[Fit, int]]:
    """Yield the fits in ``known`` that also explain this sample, each with its parameter group."""
    for candidate, group in product(known, sample.groups):
        if not sample.elements and not candidate.rule.linear:
            continue
        again = in_single(candidate.rule, candidate.settings, *sample.at(group))
        if again.explains:
            yield replace(again, solved=candidate.solved, tried=candidate.tried), group


def explained(sample: Sample, rules: Sequence[Rule] = RULES) -> list[tuple[Fit, int]]:
    """Return the simplest rules that explain a side's updates, each with the parameter group whose rate it uses.

    Tries every rule with usual values, then with solved values, then in its other forms, and last at a multiple of the
    recorded learning rate. Several rules may make the same first steps, so all of these are returned; for longer
    histories only one rule is returned.
    """
    usable = [rule for rule in rules if rule.linear or sample.elements]
    for look in (_as_usual, _solved, _in_other_forms, _at_another_rate):
        fits = []
        for rule in usable:
            for group in sample.groups:
                match = look(rule, sample, group)
                if match is not None:
                    fits.append((match, group))
                    break
            if fits and sample.fine[0].steps >= _TELLING:
                break
        if fits:
            return fits
    return []


def _as_usual(rule: Rule, sample: Sample, group: int) -> Fit | None:
    """Return a rule with usual values that explains the sample, or `None`."""
    for tried, (size, settings) in enumerate(_tried(rule, {}, sample, group), 1):
        if size <= (_SINGLE if "single" in rule.forms else NEAR):
            match = in_single(rule, settings, *sample.at(group))
            if match.explains:
                return replace(match, tried=tried)
    return None


def _solved(rule: Rule, sample: Sample, group: int, forms: Mapping[str, float] | None = None) -> Fit | None:
    """Return a rule with solved values that explains the sample, or `None`."""
    return _from_the_best(rule, sample, group, forms or {}, ())


def _in_other_forms(rule: Rule, sample: Sample, group: int) -> Fit | None:
    """Return a rule with one of its forms switched and solved values, or `None`."""
    for name, value in rule.forms.items():
        match = _solved(rule, sample, group, {name: 1.0 - value}) if name != "single" else None
        if match is not None:
            return match
    return None


def _at_another_rate(rule: Rule, sample: Sample, group: int) -> Fit | None:
    """Return a rule at a solved multiple of the learning rate, or `None`.

    Lamb is left out: it takes the size of a tensor's update from elsewhere, so that with a factor of its own it would
    make the updates of other rules, too.
    """
    if rule is LAMB:
        return None
    return _from_the_best(rule, sample, group, {}, ("rate",))


def _tried(rule: Rule, forms: Mapping[str, float], sample: Sample, group: int) -> _Tries:
    """Return the residuals of a rule's usual values, remembered in the sample."""
    key = rule.name, *sorted(forms.items()), group
    if key not in sample.tries:
        sample.tries[key] = _Tries(_residuals(rule, forms, sample, group))
    return sample.tries[key]


def _residuals(
    rule: Rule, forms: Mapping[str, float], sample: Sample, group: int
) -> Iterator[tuple[float, dict[str, float]]]:
    history, noise = sample.at(group, coarse=True)
    first, noise = history.between(0, _FIRST), noise[:_FIRST]
    grid = ({**rule.defaults, **forms, **numbers} for numbers in _grid(rule, _OTHER_FORM if forms else _GRID))
    usual = (settings for settings in grid if not is_another(settings))
    together, most = 4, max(4, _TOGETHER // max(1, first.updates.shape[1]))
    while several := list(islice(usual, together)):
        yield from zip(residuals_of(rule, several, first, noise), several)
        together = min(2 * together, most)  # the first ones are often enough


def _from_the_best(
    rule: Rule, sample: Sample, group: int, forms: Mapping[str, float], more: tuple[str, ...]
) -> Fit | None:
    """Solve from the best usual values on; return the first fit that explains the sample, or `None`."""
    (history, noise), fine = sample.at(group, coarse=True), sample.at(group)
    nothing = float(np.sqrt(np.mean(np.square((history.updates / noise)[:_FIRST]))))
    starts = sorted(_tried(rule, forms, sample, group), key=lambda start: start[0])
    for size, settings in starts[:_BEST]:
        if size > _HOPELESS * nothing and not more:
            break
        free = (*_solvable(rule, fine[0].steps), *more)
        match = fit(rule, settings, free, *fine, len(starts))
        if match.residual <= _SINGLE and "single" in rule.forms and not match.explains:
            match = fit(rule, {**match.settings, "single": 1.0}, free, *fine, len(starts))
        if match.explains and not is_another(match.settings):
            return match
    return None


def is_another(settings: Mapping[str, float]) -> bool:
    """Return True if settings turn a rule into another: Adam without first moment and bias correction is RMSProp."""
    return settings.get("beta1") == 0.0 and settings.get("corrected") == 0.0


def in_single(rule: Rule, settings: Mapping[str, float], history: History, noise: np.ndarray) -> Fit:
    """Return the fit of a rule with given settings, computed in float64 or in float32, whichever has less error."""
    first = Fit(rule, dict(settings), residual_of(rule, settings, history, noise))
    if "single" in rule.forms and 0.5 < first.residual <= _SINGLE:
        switched = {**settings, "single": 1.0 - settings["single"]}
        again = Fit(rule, switched, residual_of(rule, switched, history, noise))
        return min(first, again, key=lambda one: one.residual)
    return first


def _grid(rule: Rule, most_usual: Mapping[str, int]) -> Iterator[dict[str, float]]:
    """Yield usual values: the defaults, the defaults with one change, all combinations of the most usual values."""
    yield {}
    for name, usual in rule.numbers.items():
        for value in usual[1:]:
            yield {name: value}
    names = list(rule.numbers)
    for values in product(*(rule.numbers[name][: most_usual.get(name, 2)] for name in names)):
        yield dict(zip(names, values))


def _solvable(rule: Rule, steps: int) -> tuple[str, ...]:
    """Return the settings that updates of ``steps`` steps can show: a first step shows no momentum."""
    unseen = {"momentum", "dampening", "beta1", "beta2"} if steps < 2 else set()
    return tuple(name for name in rule.numbers if name not in unseen | {"momentum_decay", "initial"})
