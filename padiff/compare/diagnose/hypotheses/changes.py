"""Search for the change of the reference's optimizer rule that gives the candidate's updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from padiff.compare.diagnose.hypotheses.fitting import Fit, fit, residual_of, residuals_of
from padiff.compare.diagnose.hypotheses.parameter_history import ParameterHistories, ParameterHistory
from padiff.compare.diagnose.hypotheses.proof import NEAR
from padiff.compare.diagnose.hypotheses.rules import RULES
from padiff.compare.diagnose.hypotheses.searching import Sample, explained
from padiff.compare.diagnose.hypotheses.wording import KINDS, NAMES, WORDS, number_text
from padiff.records import Difference

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
