"""Hypotheses on optimizers: which rule and values explain the updates of each side, and where the candidate's part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from padiff.compare.diagnose.hypotheses import mending
from padiff.compare.diagnose.hypotheses.changes import Change, Search, declared_change, kind_of, sentence_of
from padiff.compare.diagnose.hypotheses.fitting import Fit, fit
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.compare.diagnose.hypotheses.proof import NEAR
from padiff.compare.diagnose.hypotheses.rates import rates_text
from padiff.compare.diagnose.hypotheses.rules import History, updates
from padiff.compare.diagnose.hypotheses.scene import Scene
from padiff.compare.diagnose.hypotheses.searching import Sample, explained, in_single, known_fits
from padiff.compare.diagnose.hypotheses.tracks import Track, Tracks, joined, tracks_of
from padiff.compare.diagnose.hypotheses.wording import scope_text

# Steps that a rule shows in, not only what it makes of a first gradient.
_TELLING = 2
# Groups of parameters with settings of their own, at most.
_GROUPS = 5
# Parameters that no rule explains, until it is given up.
_IN_VAIN = 1


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
    found: list[Parameter] = []
    vain = 0
    for elements in (True, False):
        left = [track for track in tracks.parameters if track.elements is elements]
        known: list[Fit] = []
        for _ in range(_GROUPS):
            if not left or vain > _IN_VAIN:
                break
            # Norms and biases often have settings of their own.
            some = [track for track in left if track.is_norm is left[0].is_norm][:1]
            solved = _akin(known, some, tracks) or next(
                iter(explained(Sample.of(some, "reference", tracks.rates.reference))), None
            )
            if solved is None:
                left, vain = left[1:], vain + 1
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
    search = Search(tracks, first.fit, [one.track for one in alike if _same(one, first)], first.group)
    declared = declared_change(scene.declared, first.fit)
    if declared is not None:
        yield _also(rates, _hypothesis(scene, tracks, parameters, alike, declared, 1))
    for change in search.single():
        yield _also(rates, _hypothesis(scene, tracks, parameters, alike, change, _count(change)))
    for change in search.several():
        yield _also(rates, _hypothesis(scene, tracks, parameters, alike, change, _count(change)))


def _same(one: Parameter, other: Parameter) -> bool:
    return one.fit.settings == other.fit.settings and one.group == other.group


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
    kind, name = kind_of(change, fitted)
    scope = scope_text([one.track for one in wrong], _rest(tracks, parameters, wrong, change))
    return Hypothesis(
        kind,
        name,
        sentence_of(change, fitted, tracks) + scope,
        lambda: _predictions(scene, tracks, wrong, change),
        what="parameters' updates",
        free=change.free,
        tried=change.tried,
        changes=changes,
        fix=mending.optimizer(scene.frameworks.candidate, fitted, {**change.settings}, bool(change.rules)),
        # So much faster or slower may be many things; and of a first step many rules and settings make the same.
        telling="rate" not in change.settings and (changes == 1 or len(tracks.numbers) >= _TELLING),
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
        not np.allclose(
            _column(tracks.rates.reference, one.group), _column(tracks.rates.candidate, one.group), rtol=1e-6, atol=0
        )
        for one in parameters
    )


def _predictions(scene: Scene, tracks: Tracks, parameters: Iterable[Parameter], change: Change) -> Iterator[Prediction]:
    """The candidate's updates with a change, against those without it and at the reference's learning rates."""
    for one in parameters:
        history, noise = joined([one.track], "candidate")
        own = _column(tracks.rates.candidate, one.group)
        expected = _column(tracks.rates.reference, one.group)
        predicted = _best(one, change, replace(history, rates=own), noise)
        without = _best(one, Change({}), replace(history, rates=expected), noise)
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
