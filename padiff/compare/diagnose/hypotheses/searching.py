"""Search for the optimizer rule that made the updates of a side, and for the change that gives the other's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product

import numpy as np

from padiff.compare.diagnose.hypotheses.hypothesis import NEAR
from padiff.compare.diagnose.hypotheses.parameter_history import (
    KINDS,
    NAMES,
    WORDS,
    ParameterHistories,
    ParameterHistory,
    joined,
    number_text,
)
from padiff.compare.diagnose.hypotheses.rules import LAMB, RULES, Fit, History, Rule, fit, residual_of, residuals_of
from padiff.records import Difference

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


# Largest epsilon that texts leave out, as updates of usual size do not show it.
_SMALL = 1e-7


@dataclass(frozen=True)
class Change:
    """A difference of the candidate's optimizer from the reference's.

    Attributes:
        settings: the candidate's settings that differ from the reference's, by name.
        free: count of settings that were solved for.
        tried: count of values that were tried.
        rules: other rules that explain the updates, each with its settings; predictions use the first.
        shared: settings of both sides that the reference's own updates do not show.
    """

    settings: Mapping[str, float]
    free: int = 0
    tried: int = 1
    rules: tuple[Fit, ...] = ()
    shared: Mapping[str, float] = field(default_factory=dict)


class Search:
    """Search for changes of the reference's rule that give the candidate's updates."""

    def __init__(self, tracks: ParameterHistories, rule: Fit, wrong: Sequence[ParameterHistory], group: int) -> None:
        self._rule = rule
        self._sample = Sample.from_histories(wrong, "candidate", tracks.rates.candidate)
        self._theirs = Sample.from_histories(wrong, "reference", tracks.rates.reference).at(group)
        candidate_group = min(group, tracks.rates.candidate.shape[1] - 1)
        self._at, self._coarse = self._sample.at(candidate_group), self._sample.at(candidate_group, coarse=True)

    def single(self) -> Iterator[Change]:
        """Yield changes of a single setting."""
        rule, settings = self._rule.rule, self._rule.settings
        for name in rule.forms:
            if name != "single":
                yield Change({name: 1.0 - settings[name]})
                yield from self._with_unseen(name)
        for step in range(1, self._at[0].steps):
            yield Change({"lost": float(step)}, tried=self._at[0].steps)
        for name in (*rule.numbers, "rate"):
            change = self._solved({}, (name,))
            if change is not None:
                yield change

    def _with_unseen(self, form: str) -> Iterator[Change]:
        """Yield a changed form together with a momentum that the reference's updates (of a single step) do not show."""
        for name in {"momentum"} & self._rule.rule.numbers.keys():
            if not self._unseen(name, 0.5):
                continue
            change = self._solved({form: 1.0 - self._rule.settings[form]}, (name,))
            if change is not None and name in change.settings and self._unseen(name, change.settings[name]):
                yield replace(change, settings={form: change.settings[form]}, shared={name: change.settings[name]})

    def _unseen(self, name: str, value: float) -> bool:
        settings = {**self._rule.settings, name: value}
        return residual_of(self._rule.rule, settings, *self._theirs) <= NEAR

    def several(self) -> Iterator[Change]:
        """Yield changes of several settings, and other rules."""
        rule, settings = self._rule.rule, self._rule.settings
        forms: list[dict[str, float]] = [{}, *({name: 1.0 - settings[name]} for name in rule.forms if name != "single")]
        for form in forms:
            for name in rule.numbers if form else ():
                change = self._solved(form, (name,))
                if change is not None and name in change.settings:
                    yield change
        names = [*rule.numbers]
        for k, first in enumerate(names):
            for second in names[k + 1 :]:
                change = self._solved({}, (first, second))
                if change is not None and len(change.settings) == 2:
                    yield change
        alternatives = explained(self._sample, [other_rule for other_rule in RULES if other_rule.run is not rule.run])
        if alternatives:
            fits = tuple(fitted for fitted, _ in alternatives)
            yield Change({}, len(fits[0].solved), fits[0].tried, rules=fits)
        for form in forms:
            change = self._solved(form, tuple(names))
            if change is not None and len(change.settings) > 2:
                yield change

    def _solved(self, forms: Mapping[str, float], free: tuple[str, ...]) -> Change | None:
        """Return the values of ``free`` that fit best, solved from usual ones; `None` if they equal the reference's."""
        rule, settings = self._rule.rule, {**self._rule.settings, **forms}
        starts = [dict(settings)]
        for name in free:
            starts += [{**settings, name: value} for value in rule.numbers.get(name, (0.1, 0.5, 2.0, 10.0))]
        residuals = residuals_of(rule, starts, *self._coarse)
        best: Fit | None = None
        for k in sorted(range(len(starts)), key=residuals.__getitem__)[:2]:
            start = starts[k]
            solved = fit(rule, start, free, *self._at, len(starts))
            if best is None or solved.residual < best.residual:
                best = solved
            if best.explains:
                break
        assert best is not None
        values = {name: best.settings[name] for name in (*forms, *free)}
        changed = {name: value for name, value in values.items() if value != self._rule.settings[name]}
        shared = {}
        if "decoupled" in changed and not self._rule.settings["weight_decay"]:
            shared["decoupled"] = changed.pop("decoupled")  # the form of a zero weight decay makes no difference
        return Change(changed, len(free), len(starts), shared=shared) if changed else None


def declared_change(declared: Sequence[Difference], fitted: Fit) -> Change | None:
    """Return the declared differences of the optimizers as a change of the fitted rule; `None` if not computable."""
    names = {*fitted.rule.numbers, *fitted.rule.forms}
    changed: dict[str, float] = {}
    for difference in declared:
        if difference.kind != "optimizer_setting" or not difference.changes:
            continue
        values = [value for value in difference.values if isinstance(value, (bool, int, float))]
        if difference.name not in names or len(values) < 2:
            return None  # the rule can't compute this setting: the search decides
        changed[difference.name] = float(values[1])
    return Change(changed) if changed else None


# -- in words -----------------------------------------------------------------------------------------------------


def kind_of(change: Change, fitted: Fit) -> tuple[str, str]:
    if bool(change.rules):
        return "optimizer_rule", "another rule"
    names = list(change.settings)
    kinds = [KINDS.get(name, name).format(rule=fitted.rule.name.lower().replace("adamw", "adam")) for name in names]
    return "+".join(kinds), " and ".join(NAMES.get(name, name) for name in names)


def sentence_of(change: Change, fitted: Fit, tracks: ParameterHistories) -> str:
    if change.rules:
        rules = " or ".join(map(described, change.rules))
        return f"the candidate's updates are those of {rules}, the reference's those of {described(fitted)}"
    parts = []
    for name, value in change.settings.items():
        if name == "lost":
            parts.append(WORDS["lost"][0].format(step=tracks.numbers[int(value)]))
        elif name == "rate":
            parts.append(f"the candidate's updates are {number_text(value)} times what the reference's rule makes")
        elif name in fitted.rule.forms:
            parts.append(WORDS[name][int(value)])
        else:
            parts.append(
                f"{NAMES[name]} is {number_text(value)} in the candidate for the reference's "
                f"{number_text(fitted.settings[name])}"
            )
    shared = [f"{NAMES[name]} {number_text(change.shared[name])}" for name in change.shared if name == "momentum"]
    return f"{' and '.join(parts)} ({', '.join([fitted.rule.name, *shared])})"


def described(fitted: Fit) -> str:
    """Return a rule with its settings as text."""
    rule, settings = fitted.rule, fitted.settings
    shown = [
        f"{NAMES.get(name, name)} {number_text(settings[name])}"
        for name, usual in rule.numbers.items()
        if settings[name] != 0.0 and not (name == "eps" and settings[name] < _SMALL) and name != "momentum_decay"
    ]
    shown += [NAMES[name] for name, usual in rule.forms.items() if settings[name] != usual and name != "single"]
    return f"{rule.name} ({', '.join(shown)})" if shown else rule.name
