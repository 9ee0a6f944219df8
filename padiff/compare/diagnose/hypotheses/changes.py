"""What has to be other in the reference's rule to make the candidate's updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from padiff.compare.diagnose.hypotheses.fitting import Fit, fit, residual_of, residuals_of
from padiff.compare.diagnose.hypotheses.proof import NEAR
from padiff.compare.diagnose.hypotheses.rules import RULES
from padiff.compare.diagnose.hypotheses.searching import Sample, explained
from padiff.compare.diagnose.hypotheses.tracks import Track, Tracks
from padiff.compare.diagnose.hypotheses.wording import KINDS, NAMES, WORDS, number_text
from padiff.records import Difference

# An epsilon that shows in no update of a usual size is not worth a word.
_SMALL = 1e-7


@dataclass(frozen=True)
class Change:
    """What is other in the candidate.

    Attributes:
        settings: those of the candidate that are not the reference's, by name.
        free: how many were solved for.
        rules: other rules that explain it, each with its settings; the first is meant.
        shared: settings of both sides that the reference's own updates do not show.
    """

    settings: Mapping[str, float]
    free: int = 0
    tried: int = 1
    rules: tuple[Fit, ...] = ()
    shared: Mapping[str, float] = field(default_factory=dict)


class Search:
    """Looks for what has to be other in the reference's rule to make the candidate's updates."""

    def __init__(self, tracks: Tracks, rule: Fit, wrong: Sequence[Track], group: int) -> None:
        self._rule = rule
        self._sample = Sample.of(wrong, "candidate", tracks.rates.candidate)
        self._theirs = Sample.of(wrong, "reference", tracks.rates.reference).at(group)
        own = min(group, tracks.rates.candidate.shape[1] - 1)
        self._at, self._coarse = self._sample.at(own), self._sample.at(own, coarse=True)

    def single(self) -> Iterator[Change]:
        """Each setting by itself."""
        rule, settings = self._rule.rule, self._rule.settings
        for name in rule.forms:
            if name != "single":
                yield Change({name: 1.0 - settings[name]})
                yield from self._with_unseen(name)
        for step in range(1, self._at[0].steps):
            yield Change({"lost": float(step)}, tried=self._at[0].steps)
        for name in (*rule.numbers, "rate"):
            found = self._solved({}, (name,))
            if found is not None:
                yield found

    def _with_unseen(self, form: str) -> Iterator[Change]:
        """A form, with a number that the reference's updates do not show: of a first step alone, its momentum."""
        for name in {"momentum"} & self._rule.rule.numbers.keys():
            if not self._unseen(name, 0.5):
                continue
            found = self._solved({form: 1.0 - self._rule.settings[form]}, (name,))
            if found is not None and name in found.settings and self._unseen(name, found.settings[name]):
                yield replace(found, settings={form: found.settings[form]}, shared={name: found.settings[name]})

    def _unseen(self, name: str, value: float) -> bool:
        settings = {**self._rule.settings, name: value}
        return residual_of(self._rule.rule, settings, *self._theirs) <= NEAR

    def several(self) -> Iterator[Change]:
        """Several settings, or another rule."""
        rule, settings = self._rule.rule, self._rule.settings
        forms: list[dict[str, float]] = [{}, *({name: 1.0 - settings[name]} for name in rule.forms if name != "single")]
        for form in forms:
            for name in rule.numbers if form else ():
                found = self._solved(form, (name,))
                if found is not None and name in found.settings:
                    yield found
        names = [*rule.numbers]
        for k, one in enumerate(names):
            for other in names[k + 1 :]:
                found = self._solved({}, (one, other))
                if found is not None and len(found.settings) == 2:
                    yield found
        others = explained(self._sample, [one for one in RULES if one.run is not rule.run])
        if others:
            fits = tuple(fitted for fitted, _ in others)
            yield Change({}, len(fits[0].solved), fits[0].tried, rules=fits)
        for form in forms:
            found = self._solved(form, tuple(names))
            if found is not None and len(found.settings) > 2:
                yield found

    def _solved(self, forms: Mapping[str, float], free: tuple[str, ...]) -> Change | None:
        """The values that explain most, from usual ones on; `None` where they are the reference's."""
        rule, settings = self._rule.rule, {**self._rule.settings, **forms}
        starts = [dict(settings)]
        for name in free:
            starts += [{**settings, name: value} for value in rule.numbers.get(name, (0.1, 0.5, 2.0, 10.0))]
        left = residuals_of(rule, starts, *self._coarse)
        found: Fit | None = None
        for k in sorted(range(len(starts)), key=left.__getitem__)[:2]:
            start = starts[k]
            solved = fit(rule, start, free, *self._at, len(starts))
            if found is None or solved.residual < found.residual:
                found = solved
            if found.explains:
                break
        assert found is not None
        values = {name: found.settings[name] for name in (*forms, *free)}
        changed = {name: value for name, value in values.items() if value != self._rule.settings[name]}
        shared = {}
        if "decoupled" in changed and not self._rule.settings["weight_decay"]:
            shared["decoupled"] = changed.pop("decoupled")  # of a decay of nothing there is no form
        return Change(changed, len(free), len(starts), shared=shared) if changed else None


def declared_change(declared: Sequence[Difference], fitted: Fit) -> Change | None:
    """What the runs declare differently of their optimizers, as a change of the rule that explains the reference."""
    known = {*fitted.rule.numbers, *fitted.rule.forms}
    changed: dict[str, float] = {}
    for one in declared:
        if one.kind != "optimizer_setting" or not one.changes:
            continue
        values = [value for value in one.values if isinstance(value, (bool, int, float))]
        if one.name not in known or len(values) < 2:
            return None  # what it is declared to be can't be computed: it is looked for
        changed[one.name] = float(values[1])
    return Change(changed) if changed else None


# -- in words -----------------------------------------------------------------------------------------------------


def kind_of(change: Change, fitted: Fit) -> tuple[str, str]:
    if bool(change.rules):
        return "optimizer_rule", "another rule"
    names = list(change.settings)
    kinds = [KINDS.get(name, name).format(rule=fitted.rule.name.lower().replace("adamw", "adam")) for name in names]
    return "+".join(kinds), " and ".join(NAMES.get(name, name) for name in names)


def sentence_of(change: Change, fitted: Fit, tracks: Tracks) -> str:
    if change.rules:
        own = " or ".join(map(described, change.rules))
        return f"the candidate's updates are those of {own}, the reference's those of {described(fitted)}"
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
    """A rule with its settings, in words."""
    rule, settings = fitted.rule, fitted.settings
    shown = [
        f"{NAMES.get(name, name)} {number_text(settings[name])}"
        for name, usual in rule.numbers.items()
        if settings[name] != 0.0 and not (name == "eps" and settings[name] < _SMALL) and name != "momentum_decay"
    ]
    shown += [NAMES[name] for name, usual in rule.forms.items() if settings[name] != usual and name != "single"]
    return f"{rule.name} ({', '.join(shown)})" if shown else rule.name
