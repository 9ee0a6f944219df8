"""Hypotheses on optimizers: which rule and values explain the updates of each side, and where the candidate's part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from padiff.compare.diagnose.hypotheses import mending
from padiff.compare.diagnose.hypotheses.fitting import Fit, fit, residual_of
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.compare.diagnose.hypotheses.proof import NEAR
from padiff.compare.diagnose.hypotheses.rates import rates_text
from padiff.compare.diagnose.hypotheses.rules import RULES, History, updates
from padiff.compare.diagnose.hypotheses.scene import Scene
from padiff.compare.diagnose.hypotheses.searching import Sample, explained, in_single, known_fits
from padiff.compare.diagnose.hypotheses.tracks import Track, Tracks, joined, tracks_of
from padiff.compare.diagnose.hypotheses.wording import KINDS, NAMES, WORDS, number_text, scope_text

# Steps that a rule shows in, not only what it makes of a first gradient.
_TELLING = 2
# An epsilon that shows in no update of a usual size is not worth a word.
_SMALL = 1e-7
# Groups of parameters with settings of their own, at most.
_GROUPS = 5


@dataclass(frozen=True)
class Parameter:
    """A parameter's track, and what explains the reference's updates of it.

    Attributes:
        fit: the reference's rule, with its settings.
        group: the parameter group whose learning rate it goes with.
        holds: whether the same rule, at the candidate's own learning rate, explains the candidate's updates, too.
    """

    track: Track
    fit: Fit
    group: int
    holds: bool = False


@dataclass(frozen=True)
class Change:
    """What is other in the candidate.

    Attributes:
        settings: those of the candidate that are not the reference's, by name.
        free: how many were solved for.
        own_rates: whether it goes with the candidate's own learning rates where these are not the reference's.
        rules: other rules that explain it, each with its settings; the first is meant.
        shared: settings of both sides that the reference's own updates do not show.
    """

    settings: Mapping[str, float]
    free: int = 0
    tried: int = 1
    own_rates: bool = True
    rules: tuple[Fit, ...] = ()
    shared: Mapping[str, float] = field(default_factory=dict)


def hypotheses(scene: Scene) -> Iterator[Hypothesis]:
    """What may be wrong with the candidate's optimizer, the simplest first."""
    last = scene.number if scene.stage == "update" else scene.number - 1
    for later in (3, 0):
        tracks = tracks_of(scene, last, later)
        if tracks is None:
            return
        parameters = _reference(tracks)
        if parameters:
            yield from _changes(scene, tracks, parameters)
            return


# -- what the reference does ---------------------------------------------------------------------------------------


def _reference(tracks: Tracks) -> list[Parameter]:
    """Each parameter, with the rule that explains the reference's updates of it; those that none explains are left."""
    if not tracks.fresh:
        return []
    found: list[Parameter] = []
    for elements in (True, False):
        left = [track for track in tracks.parameters if track.elements is elements]
        known: list[Fit] = []
        for _ in range(_GROUPS):
            if not left:
                break
            # Norms and biases often have settings of their own.
            some = [track for track in left if track.is_norm is left[0].is_norm][:1]
            solved = _akin(known, some, tracks) or next(
                iter(explained(Sample.of(some, "reference", tracks.rates.reference))), None
            )
            if solved is None:
                left = left[1:]
                continue
            known.append(solved[0])
            rest = []
            for track in left:
                own = next(known_fits(Sample.of([track], "reference", tracks.rates.reference), known[-1:]), None)
                if own is None and track is some[0]:
                    own = solved
                if own is None:
                    rest.append(track)
                else:
                    found.append(Parameter(track, *own))
            left = rest
    return [replace(one, holds=_holds(one, tracks)) for one in found]


def _akin(known: Sequence[Fit], some: Sequence[Track], tracks: Tracks) -> tuple[Fit, int] | None:
    """A group that has only its weight decay, or its learning rate, for itself."""
    sample = Sample.of(some, "reference", tracks.rates.reference)
    for one, name, group in product(known, ("weight_decay", "rate"), sample.groups):
        if sample.elements or one.rule.linear:
            found = fit(one.rule, one.settings, (name,), *sample.at(group), one.tried)
            if found.explains:
                return found, group
    return None


def _holds(one: Parameter, tracks: Tracks) -> bool:
    history, noise = joined([one.track], "candidate")
    rates = _column(tracks.rates.candidate, one.group)
    return in_single(one.fit.rule, one.fit.settings, replace(history, rates=rates), noise).residual <= NEAR


def _column(rates: np.ndarray, group: int) -> np.ndarray:
    """A group's learning rates; the other run's groups may be fewer."""
    return np.asarray(rates[:, min(group, rates.shape[1] - 1)])


# -- what the candidate does otherwise -----------------------------------------------------------------------------


def _changes(scene: Scene, tracks: Tracks, parameters: Sequence[Parameter]) -> Iterator[Hypothesis]:
    rates = _of_rates(scene, tracks, parameters) if _rates_differ(tracks, parameters) else None
    if rates is not None:
        yield rates
    wrong = [one for one in parameters if not one.holds]
    if not wrong:
        return
    first = max(wrong, key=lambda one: one.track.noise.candidate.shape[1])
    alike = [one for one in wrong if one.fit.rule is first.fit.rule and one.track.elements is first.track.elements]
    search = _Candidate(tracks, first.fit, [one for one in alike if _same(one, first)])
    for change in search.single():
        yield _also(rates, _hypothesis(scene, tracks, parameters, alike, change, _count(change)))
    for change in search.several():
        yield _also(rates, _hypothesis(scene, tracks, parameters, alike, change, _count(change)))


def _same(one: Parameter, other: Parameter) -> bool:
    return one.fit.settings == other.fit.settings and one.group == other.group


class _Candidate:
    """Looks for what has to be other in the reference's rule to make the candidate's updates."""

    def __init__(self, tracks: Tracks, rule: Fit, wrong: Sequence[Parameter]) -> None:
        self._rule = rule
        some = [one.track for one in wrong]
        self._sample = Sample.of(some, "candidate", tracks.rates.candidate)
        self._theirs = Sample.of(some, "reference", tracks.rates.reference).at(wrong[0].group)
        group = min(wrong[0].group, tracks.rates.candidate.shape[1] - 1)
        self._at, self._coarse = self._sample.at(group), self._sample.at(group, coarse=True)

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
        for turned in forms:
            for name in rule.numbers if turned else ():
                found = self._solved(turned, (name,))
                if found is not None and name in found.settings:
                    yield found
        names = [*rule.numbers]
        for k, one in enumerate(names):
            for other in names[k + 1 :]:
                found = self._solved({}, (one, other))
                if found is not None and len(found.settings) == 2:
                    yield found
        others = explained(self._sample, [one for one in RULES if one is not rule])
        if others:
            fits = tuple(fitted for fitted, _ in others)
            yield Change({}, len(fits[0].solved), fits[0].tried, rules=fits)
        for turned in forms:
            found = self._solved(turned, tuple(names))
            if found is not None and len(found.settings) > 2:
                yield found

    def _solved(self, forms: Mapping[str, float], free: tuple[str, ...]) -> Change | None:
        """The values that explain most, from usual ones on; `None` where they are the reference's."""
        rule, settings = self._rule.rule, {**self._rule.settings, **forms}
        starts = [dict(settings)]
        for name in free:
            starts += [{**settings, name: value} for value in rule.numbers.get(name, (0.1, 0.5, 2.0, 10.0))]
        starts.sort(key=lambda start: residual_of(rule, start, *self._coarse))
        found: Fit | None = None
        for start in starts[:2]:
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


# -- as hypotheses -------------------------------------------------------------------------------------------------


def _hypothesis(
    scene: Scene,
    tracks: Tracks,
    parameters: Sequence[Parameter],
    wrong: Sequence[Parameter],
    change: Change,
    changes: int,
) -> Hypothesis:
    fitted = wrong[0].fit
    kind, name = _kind(change, fitted)
    scope = scope_text([one.track for one in wrong], _rest(tracks, parameters, wrong, change))
    return Hypothesis(
        kind,
        name,
        _sentence(change, fitted, tracks) + scope,
        lambda: _predictions(scene, tracks, wrong, change),
        what="parameters' updates",
        free=change.free,
        tried=change.tried,
        changes=changes,
        fix=mending.optimizer(scene.frameworks.candidate, fitted, {**change.settings}, bool(change.rules)),
        # So much faster or slower may be many things, and of a first step many rules make the same.
        telling="rate" not in change.settings and not (change.rules and len(tracks.numbers) < _TELLING),
    )


def _of_rates(scene: Scene, tracks: Tracks, parameters: Sequence[Parameter]) -> Hypothesis:
    """That the candidate's learning rates, which are recorded, are all that is other."""
    text = rates_text(scene, tracks)
    return Hypothesis(
        "learning_rate",
        "learning rate",
        text,
        lambda: _predictions(scene, tracks, parameters, Change({})),
        what="parameters' updates",
        fix=mending.rate(scene.frameworks.candidate),
    )


def _count(change: Change) -> int:
    """Of how many settings a change says that they are wrong; another rule counts as two."""
    return 2 if change.rules else len(change.settings)


def _also(rates: Hypothesis | None, one: Hypothesis) -> Hypothesis:
    """What is wrong besides the learning rates, where these differ."""
    if rates is None:
        return one
    text = f"{rates.sentence}; and {one.sentence}"
    return replace(one, kind=f"{rates.kind}+{one.kind}", sentence=text, changes=1 + one.changes)


def _rates_differ(tracks: Tracks, parameters: Iterable[Parameter]) -> bool:
    return any(
        not np.allclose(*(_column(side, one.group) for side in tracks.rates), rtol=1e-6, atol=0) for one in parameters
    )


def _predictions(scene: Scene, tracks: Tracks, parameters: Iterable[Parameter], change: Change) -> Iterator[Prediction]:
    """The candidate's updates with a change, against those without it and at the reference's learning rates."""
    for one in parameters:
        history, noise = joined([one.track], "candidate")
        own = _column(tracks.rates.candidate, one.group)
        theirs = _column(tracks.rates.reference, one.group)
        predicted = _best(one, change, replace(history, rates=own), noise)
        without = _best(one, Change({}), replace(history, rates=theirs), noise)
        if len(history.updates) != len(tracks.numbers):
            continue
        pair = scene.pairs(tracks.numbers[tracks.at], "update").get(one.track.place)
        limit = np.inf if pair is None else scene.limit(pair)
        site = f"{one.track.place[0]}/update/{one.track.place[1]}"
        yield Prediction(site, history.updates, predicted, without, noise, limit)


def _best(one: Parameter, change: Change, history: History, noise: np.ndarray) -> np.ndarray:
    fitted = change.rules[0] if change.rules else one.fit
    settings = {**fitted.settings, **change.shared, **change.settings}
    lost = settings.pop("lost", 0.0)
    found = in_single(fitted.rule, {**settings, "lost": lost}, history, noise)
    return updates(found.rule, history, found.settings)


def _rest(
    tracks: Tracks, parameters: Sequence[Parameter], wrong: Sequence[Parameter], change: Change
) -> list[Track] | None:
    """Parameters that the change does not hold for, though it would show; `None` where it would show in none."""
    found = []
    for one in parameters:
        if not one.holds or any(one is other for other in wrong):
            continue
        history, noise = joined([one.track], "candidate")
        history = replace(history, rates=_column(tracks.rates.candidate, one.group))
        with np.errstate(all="ignore"):
            error = (_best(one, change, history, noise) - history.updates) / noise
        if not np.sqrt(np.mean(np.square(error))) <= 3 * NEAR:
            found.append(one.track)
    return found or None


def _kind(change: Change, fitted: Fit) -> tuple[str, str]:
    if bool(change.rules):
        return "optimizer_rule", "another rule"
    names = list(change.settings)
    kinds = [KINDS.get(name, name).format(rule=fitted.rule.name.lower()) for name in names]
    return "+".join(kinds), " and ".join(NAMES.get(name, name) for name in names)


def _sentence(change: Change, fitted: Fit, tracks: Tracks) -> str:
    if change.rules:
        own = " or ".join(map(described, change.rules))
        return f"the candidate's updates are those of {own}, the reference's those of {described(fitted)}"
    parts = []
    for name, value in change.settings.items():
        if name == "lost":
            parts.append(WORDS["lost"][0].format(step=tracks.numbers[int(value)]))
        elif name in fitted.rule.forms:
            parts.append(WORDS[name][int(value)])
        else:
            parts.append(
                f"{NAMES[name]} is {number_text(value)} in the candidate for the reference's {number_text(fitted.settings[name])}"
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
    shown += [
        NAMES[name] for name, default in rule.forms.items() if settings[name] and name not in ("single", "corrected")
    ]
    return f"{rule.name} ({', '.join(shown)})" if shown else rule.name


Hypotheses = Callable[[Scene], Iterator[Hypothesis]]
