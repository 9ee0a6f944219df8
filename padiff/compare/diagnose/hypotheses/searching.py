"""Which rule, with which settings, made the updates that a side recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product

import numpy as np

from padiff.compare.diagnose.hypotheses.fitting import Fit, fit, residual_of, residuals_of
from padiff.compare.diagnose.hypotheses.proof import NEAR
from padiff.compare.diagnose.hypotheses.rules import RULES, History, Rule
from padiff.compare.diagnose.hypotheses.tracks import Track, joined

# Elements that usual values are tried on, and that are solved with.
_COARSE, _FINE = 300, 1500
# Steps that usual values are tried on: they only say where to solve from.
_FIRST = 4
# How many numbers usual values are worked out for together: arrays of so many stay in a core's cache.
_TOGETHER = 10_000
# How many of the best usual values are solved on from, and what share of the updates they leave at most.
_BEST, _HOPELESS = 2, 0.7
# Steps that no two rules make alike.
_TELLING = 3
# Below this residual, what is left may be the arithmetic of float32.
_SINGLE = 2000.0
# Values of a grid for each setting: the most usual ones.
_GRID = {"beta1": 5, "beta2": 5, "eps": 3, "weight_decay": 6, "momentum": 4, "alpha": 3, "dampening": 1, "initial": 2}
# Of a rule in another form: solving gets there from farther.
_OTHER_FORM = {"beta1": 3, "beta2": 3, "eps": 2, "weight_decay": 3, "momentum": 3, "dampening": 1, "initial": 2}


@dataclass(frozen=True)
class Sample:
    """A side's tracks as one history: coarse to try, fine to solve.

    Attributes:
        rates: the learning rates of each step, by parameter group.
        elements: whether it holds elements; projections show linear rules only.
        tries: the usual values that were tried, and what they leave: several searches begin with them.
    """

    coarse: tuple[History, np.ndarray]
    fine: tuple[History, np.ndarray]
    rates: np.ndarray
    elements: bool
    tries: dict[tuple[object, ...], _Tries] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, tracks: Sequence[Track], side: str, rates: np.ndarray) -> Sample:
        coarse, fine = (joined(tracks, side, most) for most in (_COARSE, _FINE))
        return cls(coarse, fine, rates, all(track.elements for track in tracks))

    def at(self, group: int, coarse: bool = False) -> tuple[History, np.ndarray]:
        """With the learning rate of a parameter group."""
        history, noise = self.coarse if coarse else self.fine
        return replace(history, rates=self.rates[:, group]), noise

    @property
    def groups(self) -> list[int]:
        """Parameter groups of other learning rates than those before them."""
        _, first = np.unique(self.rates, axis=1, return_index=True)
        return sorted(int(k) for k in first)


class _Tries:
    """What usual values of a rule leave, worked out as far as it is asked for, and once."""

    def __init__(self, values: Iterator[tuple[float, dict[str, float]]]) -> None:
        self._values = values
        self._known: list[tuple[float, dict[str, float]]] = []

    def __iter__(self) -> Iterator[tuple[float, dict[str, float]]]:
        yield from self._known
        for one in self._values:
            self._known.append(one)
            yield one


def known_fits(sample: Sample, known: Sequence[Fit]) -> Iterator[tuple[Fit, int]]:
    """Which of the rules that are known already explain a sample, and with the rate of which group."""
    for one, group in product(known, sample.groups):
        if not sample.elements and not one.rule.linear:
            continue
        again = in_single(one.rule, one.settings, *sample.at(group))
        if again.explains:
            yield replace(again, solved=one.solved, tried=one.tried), group


def explained(sample: Sample, rules: Sequence[Rule] = RULES) -> list[tuple[Fit, int]]:
    """The plainest rules that explain a side's updates, and which parameter group's learning rate each goes with.

    First every rule with usual values, then with values that are solved for, then in its other forms, and at last at a
    multiple of the recorded learning rate. Of first steps several rules may make the same; of more of them one is
    reported.
    """
    usable = [rule for rule in rules if rule.linear or sample.elements]
    for look in (_as_usual, _solved, _in_other_forms, _at_another_rate):
        found = []
        for rule in usable:
            for group in sample.groups:
                one = look(rule, sample, group)
                if one is not None:
                    found.append((one, group))
                    break
            if found and sample.fine[0].steps >= _TELLING:
                break
        if found:
            return found
    return []


def _as_usual(rule: Rule, sample: Sample, group: int) -> Fit | None:
    """A rule with usual values."""
    for tried, (size, settings) in enumerate(_tried(rule, {}, sample, group), 1):
        if size <= (_SINGLE if "single" in rule.forms else NEAR):
            found = in_single(rule, settings, *sample.at(group))
            if found.explains:
                return replace(found, tried=tried)
    return None


def _solved(rule: Rule, sample: Sample, group: int, forms: Mapping[str, float] | None = None) -> Fit | None:
    """A rule with values that are solved for."""
    return _from_the_best(rule, sample, group, forms or {}, ())


def _in_other_forms(rule: Rule, sample: Sample, group: int) -> Fit | None:
    """A rule with one of its forms switched."""
    for name, value in rule.forms.items():
        found = _solved(rule, sample, group, {name: 1.0 - value}) if name != "single" else None
        if found is not None:
            return found
    return None


def _at_another_rate(rule: Rule, sample: Sample, group: int) -> Fit | None:
    """A rule at a multiple of the learning rate."""
    return _from_the_best(rule, sample, group, {}, ("rate",))


def _tried(rule: Rule, forms: Mapping[str, float], sample: Sample, group: int) -> _Tries:
    """Usual values, and what they leave."""
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
    """Solve from the best of the usual values on."""
    (history, noise), fine = sample.at(group, coarse=True), sample.at(group)
    nothing = float(np.sqrt(np.mean(np.square((history.updates / noise)[:_FIRST]))))
    starts = sorted(_tried(rule, forms, sample, group), key=lambda start: start[0])
    for size, settings in starts[:_BEST]:
        if size > _HOPELESS * nothing and not more:
            break
        free = (*_solvable(rule, fine[0].steps), *more)
        found = fit(rule, settings, free, *fine, len(starts))
        if found.residual <= _SINGLE and "single" in rule.forms and not found.explains:
            found = fit(rule, {**found.settings, "single": 1.0}, free, *fine, len(starts))
        if found.explains and not is_another(found.settings):
            return found
    return None


def is_another(settings: Mapping[str, float]) -> bool:
    """Whether settings make one rule another: Adam without its first moment and bias correction is RMSProp."""
    return settings.get("beta1") == 0.0 and settings.get("corrected") == 0.0


def in_single(rule: Rule, settings: Mapping[str, float], history: History, noise: np.ndarray) -> Fit:
    """A rule with given settings, computed in float64 or in float32, whichever is nearer."""
    found = Fit(rule, dict(settings), residual_of(rule, settings, history, noise))
    if "single" in rule.forms and 0.5 < found.residual <= _SINGLE:
        other = {**settings, "single": 1.0 - settings["single"]}
        again = Fit(rule, other, residual_of(rule, other, history, noise))
        return min(found, again, key=lambda one: one.residual)
    return found


def _grid(rule: Rule, most_usual: Mapping[str, int]) -> Iterator[dict[str, float]]:
    """Usual values: first the defaults with one setting another, then all combinations of the most usual ones."""
    yield {}
    for name, usual in rule.numbers.items():
        for value in usual[1:]:
            yield {name: value}
    names = list(rule.numbers)
    for values in product(*(rule.numbers[name][: most_usual.get(name, 2)] for name in names)):
        yield dict(zip(names, values))


def _solvable(rule: Rule, steps: int) -> tuple[str, ...]:
    """What the updates of so many steps can tell: in a first one no memory shows."""
    unseen = {"momentum", "dampening", "beta1", "beta2"} if steps < 2 else set()
    return tuple(name for name in rule.numbers if name not in unseen | {"momentum_decay", "initial"})
