"""Hypotheses on optimizers: rule, settings, learning rates, and weights that are kept in 16 bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

from padiff.compare.diagnose.hypotheses import parameter_history
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, place_of
from padiff.compare.diagnose.hypotheses.hypothesis import NEAR, Hypothesis, Prediction
from padiff.compare.diagnose.hypotheses.parameter_history import (
    ParameterHistories,
    ParameterHistory,
    joined,
    scope_text,
    tracks_of,
)
from padiff.compare.diagnose.hypotheses.rules import Fit, History, fit, updates
from padiff.compare.diagnose.hypotheses.searching import (
    Change,
    Sample,
    Search,
    declared_change,
    explained,
    in_single,
    kind_of,
    known_fits,
    sentence_of,
)
from padiff.compare.diagnose.recompute.which_side import DeclaredRule, declared_groups
from padiff.compare.judge.limits import is_half
from padiff.frameworks.catalog import checked_fix
from padiff.records import SIDES, Both, Cause
from padiff.system.terminal import first_few

# Count of steps before and after the first diff, and at the start, whose learning rates are compared.
_AROUND = 12
# Most steps that a schedule may be late or early.
_LATE = 3


def rates_text(scene: DiffContext, tracks: ParameterHistories) -> tuple[str, Both[list[float]]]:
    """Return text on the first step whose learning rates differ and how the schedules do, and these rates."""
    at = tracks.at
    sides = tracks.rates.map(lambda rates: list(rates[at]))
    if _equal(sides):
        rows = zip(*tracks.rates)
        at = next((k for k, row in enumerate(rows) if not _equal(Both(*map(list, row)))), at)
        sides = tracks.rates.map(lambda rates: list(rates[at]))
    step = "" if at == tracks.at else f" in step {tracks.numbers[at]}"
    return f"the learning rates differ{step}: {rates_list(sides)}{_schedule(scene)}", sides


def rates_list(sides: Both[list[float]]) -> str:
    """Return the learning rates of both runs by parameter group, as text."""
    if max(map(len, sides)) == 1:
        return " against ".join(f"{side[0]:.6g}" for side in sides)
    pairs = [*zip(*sides)]
    apart = [k for k, pair in enumerate(pairs) if not np.isclose(pair[0], pair[1], rtol=1e-6, atol=0)]
    if len({*map(len, sides)}) > 1 or len(pairs) <= _GROUPS_SHOWN:
        return " against ".join(", ".join(f"{rate:.6g}" for rate in side) for side in sides) + " (by parameter group)"
    texts = dict.fromkeys(f"{pairs[k][0]:.6g} against {pairs[k][1]:.6g}" for k in apart)
    return first_few([*texts], _GROUPS_SHOWN) + f" (in {len(apart)} of {len(pairs)} parameter groups)"


def _equal(sides: Both[list[float]]) -> bool:
    return len(sides.reference) == len(sides.candidate) and np.allclose(
        sides.reference, sides.candidate, rtol=1e-6, atol=0
    )


def _schedule(scene: DiffContext) -> str:
    """Return text on how the candidate's schedule follows from the reference's; empty if it does not."""
    near = [n for n in scene.numbers if abs(n - scene.number) <= _AROUND or n <= _AROUND]
    rates = {n: scene.rates(n) for n in near}
    now = rates.get(scene.number, Both([], []))
    apart = [k for k, pair in enumerate(zip(*now)) if not np.isclose(pair[0], pair[1], rtol=1e-6, atol=0)] or [0]
    group = apart[0]  # the first one whose rates differ
    first = {n: r.map(lambda side: side[group]) for n, r in rates.items() if all(len(side) > group for side in r)}
    if len(first) < 2:
        return ""
    reference = {n: r.reference for n, r in first.items()}
    candidate = {n: r.candidate for n, r in first.items()}
    factors = [now.candidate[k] / now.reference[k] for k in apart if all(now) and now.reference[k]]
    multiple = _ratio(candidate, reference) if not factors or np.ptp(factors) <= 1e-6 * max(map(abs, factors)) else ""
    if np.ptp([*reference.values()]) <= 1e-9 * max(reference.values()):
        return multiple if np.ptp([*candidate.values()]) <= 1e-9 * max(candidate.values()) else ", by a schedule"
    if np.ptp([*candidate.values()]) <= 1e-9 * max(candidate.values()):
        return "; the candidate's rate stays the same: its schedule never steps (or once an epoch), or is constant"
    for late in (1, -1, *(sign * k for k in range(2, _LATE + 1) for sign in (1, -1))):
        if _follows(candidate, reference, lambda n, late=late: n - late):
            steps = "one step" if abs(late) == 1 else f"{abs(late)} steps"
            return f"; the candidate's schedule is shifted: it is {steps} {'late' if late > 0 else 'early'}"
    again = {n: rate for n, rate in candidate.items() if scene.number <= n < 2 * scene.number}
    if scene.number > _LATE and _follows(again, reference, lambda n: n - scene.number):
        return f"; the candidate's schedule begins again after {scene.number} steps, as if it counted within an epoch"
    for pace in (2, 3, 4, 8):
        if _follows(candidate, reference, lambda n, pace=pace: n // pace):
            return f"; the candidate's schedule goes on every {pace} steps" + (": half as fast" if pace == 2 else "")
        for start in (0, pace - 1):  # after the optimizer's step, and before it
            if _follows(candidate, reference, lambda n, pace=pace, start=start: n * pace + start):
                return f"; the candidate's schedule goes {pace} times as fast: it steps {pace} times a step"
    return multiple


def _follows(candidate: dict[int, float], reference: dict[int, float], of) -> bool:  # type: ignore[no-untyped-def]
    """Return True if the candidate's rate of step ``n`` equals the reference's of step ``of(n)`` at least thrice."""
    rates = [(candidate[n], reference[of(n)]) for n in candidate if of(n) in reference]
    return len(rates) >= 3 and len({b for _, b in rates}) >= 2 and all(np.isclose(a, b, rtol=1e-6) for a, b in rates)


def _ratio(candidate: dict[int, float], reference: dict[int, float]) -> str:
    ratios = [candidate[n] / reference[n] for n in candidate if reference[n]]
    if not ratios or np.ptp(ratios) > 1e-6 * max(map(abs, ratios)) or abs(ratios[0] - 1) < 1e-6:
        return ""
    return f"; the candidate's is {ratios[0]:.6g} times the reference's"


# Most parameter groups whose learning rates are all shown.
_GROUPS_SHOWN = 4
# Least count of steps for proof: a single step is the same for many rules and settings.
_TELLING = 2
# Most groups of parameters with different settings.
_GROUPS = 5
# Weight decay of AdamW in both frameworks, where none is given.
_ADAMW_DECAY = 0.01
# Largest number of parameters whose updates are computed with a fix before it is shown.
_CHECKED = 3
# Most parameters without an explaining rule before the search ends.
_IN_VAIN = 1


@dataclass(frozen=True)
class Parameter:
    """A parameter's track, and the rule that explains the reference's updates.

    Attributes:
        fit: the reference's rule with its settings.
        group: the parameter group whose learning rate the rule uses.
        holds: True if the same rule at the candidate's learning rate also explains the candidate's updates.
    """

    track: ParameterHistory
    fit: Fit
    group: int
    holds: bool = False


def hypotheses(scene: DiffContext) -> Iterator[Hypothesis | Cause]:
    """Yield hypotheses on the candidate's optimizer, the simplest first."""
    last = scene.number if scene.stage == "update" else scene.number - 1
    for later in (3, 0):
        tracks = tracks_of(scene, last, later)
        if tracks is None:
            return
        parameters = _reference(tracks)
        if parameters:
            yield from _changes(scene, tracks, parameters)
        elif tracks.parameters[0].elements and len(tracks.numbers) >= _TELLING:
            # What would explain the first step alone is not the rule.
            yield from _other_rule(scene, tracks.parameters[0], tracks)
        else:
            continue
        return


# -- the reference's rules ------------------------------------------------------------------------------------------


def _reference(tracks: ParameterHistories) -> list[Parameter]:
    """Return the parameters whose updates in the reference some rule explains, each with this rule."""
    parameters: list[Parameter] = []
    vain = 0
    for elements in (True, False):
        remaining = [track for track in tracks.parameters if track.elements is elements]
        fits: list[Fit] = []
        for _ in range(_GROUPS):
            if not remaining or vain > _IN_VAIN:
                break
            # Norms and biases often have other settings than weights.
            first = [track for track in remaining if track.is_norm is remaining[0].is_norm][:1]
            solved = _akin(fits, first, tracks) or next(
                iter(explained(Sample.from_histories(first, "reference", tracks.rates.reference))), None
            )
            if solved is None:
                remaining, vain = remaining[1:], vain + 1
                continue
            fits.append(solved[0])
            unexplained = []
            for track in remaining:
                match = next(
                    known_fits(Sample.from_histories([track], "reference", tracks.rates.reference), fits[-1:]), None
                )
                if match is None and track is first[0]:
                    match = solved
                if match is None:
                    unexplained.append(track)
                else:
                    parameters.append(Parameter(track, *match))
            remaining = unexplained
    return [replace(parameter, holds=_holds(parameter, tracks)) for parameter in parameters]


def _akin(
    fits: Sequence[Fit], tracks_tried: Sequence[ParameterHistory], tracks: ParameterHistories
) -> tuple[Fit, int] | None:
    """Return a fit of tracks that differs from one of the fits only in weight decay or learning rate, or `None`."""
    sample = Sample.from_histories(tracks_tried, "reference", tracks.rates.reference)
    for base, name, group in product(fits, ("weight_decay", "rate"), sample.groups):
        if sample.elements or base.rule.linear:
            solution = fit(base.rule, base.settings, (name,), *sample.at(group), base.tried)
            if solution.explains:
                return solution, group
    return None


def _holds(parameter: Parameter, tracks: ParameterHistories) -> bool:
    history, noise = joined([parameter.track], "candidate")
    rates = _column(tracks.rates.candidate, parameter.group)
    return in_single(parameter.fit.rule, parameter.fit.settings, replace(history, rates=rates), noise).residual <= NEAR


def _column(rates: np.ndarray, group: int) -> np.ndarray:
    """Return the learning rates of a parameter group, or of the last group if the run has fewer."""
    return np.asarray(rates[:, min(group, rates.shape[1] - 1)])


# -- the candidate's changes ----------------------------------------------------------------------------------------


def _changes(
    scene: DiffContext, tracks: ParameterHistories, parameters: Sequence[Parameter]
) -> Iterator[Hypothesis | Cause]:
    rates = _of_rates(scene, tracks, parameters) if _rates_differ(tracks, parameters) else None
    if rates is not None:
        yield rates
    wrong = [each for each in parameters if not each.holds and not _are_as_declared(scene, tracks, each)]
    if not wrong:
        return
    first = max(wrong, key=lambda parameter: parameter.track.noise.candidate.shape[1])
    alike = [
        parameter
        for parameter in wrong
        if parameter.fit.rule is first.fit.rule and parameter.track.elements is first.track.elements
    ]
    yield from _other_rule(scene, first.track, tracks)
    search = Search(tracks, first.fit, [parameter.track for parameter in alike if _same(parameter, first)], first.group)
    declared = declared_change(scene.declared, first.fit)
    if declared is not None:
        yield _also(rates, _hypothesis(scene, tracks, parameters, alike, declared, 1))
    for change in search.single():
        yield _also(rates, _hypothesis(scene, tracks, parameters, alike, change, _count(change)))
    for change in search.several():
        yield _also(rates, _hypothesis(scene, tracks, parameters, alike, change, _count(change)))
    if rates is None:
        yield from _written(scene, first, f"{len(wrong)} of {len(parameters)}", tracks)


def _are_as_declared(scene: DiffContext, tracks: ParameterHistories, parameter: Parameter) -> bool:
    """Return True if both runs declare the same optimizer, and either side's updates are those of its own: a setting
    that the reference's updates are too coarse to show, such as a tiny decay beside large gradients, is no difference.
    """
    groups = declared_groups(scene, parameter.track.place)
    rules = [] if groups is None else list(map(DeclaredRule.from_group, groups, scene.frameworks))
    if not rules or rules[0] is None or rules[1] is None or not rules[0].is_like(rules[1]):
        return False
    for side, rule, rates in zip(SIDES, rules, tracks.rates):
        if rule is None or rule.group >= rates.shape[1]:
            return False
        history, noise = joined([parameter.track], side)
        history = replace(history, rates=rates[:, rule.group])
        if not float(np.sqrt(np.mean(np.square((rule.updates(history, noise) - history.updates) / noise)))) <= NEAR:
            return False
    return True


def _other_rule(scene: DiffContext, track: ParameterHistory, tracks: ParameterHistories) -> Iterator[Cause]:
    """Yield the cause that the reference has an optimizer of its own, where the candidate's is what it declares."""
    declared = declared_groups(scene, track.place)
    if declared is None or declared.reference.rule == declared.candidate.rule:
        return
    rules = declared.zip(scene.frameworks).map(lambda side: DeclaredRule.from_group(*side))
    if rules.reference is not None or rules.candidate is None:
        return
    history, noise = joined([track], "candidate")
    history = replace(history, rates=_column(tracks.rates.candidate, rules.candidate.group))
    off = (rules.candidate.updates(history, noise) - history.updates) / noise
    if float(np.sqrt(np.mean(np.square(off)))) <= NEAR:
        names = declared.map(lambda group: group.rule.rpartition(".")[2])
        text = f"the optimizers are others: {names.reference} against {names.candidate}"
        yield Cause("optimizer_setting", text, True, "the candidate's updates are those of its optimizer")


def _written(scene: DiffContext, first: Parameter, counts: str, tracks: ParameterHistories) -> Iterator[Cause]:
    """Yield the cause that something else than the optimizer writes weights, if both sides declare the same one."""
    declared = declared_groups(scene, first.track.place)
    if declared is None or not declared.candidate.rule:
        return
    names = declared.map(lambda group: group.rule.rpartition(".")[2])
    if names.reference != names.candidate:
        yield Cause("optimizer_setting", f"the optimizers are others: {names.reference} against {names.candidate}")
        return
    prediction = next(_predictions(scene, tracks, [first], Change({})), None)
    if prediction is None:
        return
    size = float(np.linalg.norm(prediction.actual))
    share = float(np.linalg.norm(prediction.actual - prediction.predicted)) / size if size else 1.0
    yield Cause(
        "weights_written",
        f"{first.fit.rule.name} with the reference's settings does not give the candidate's updates from its own "
        f"gradients, in {counts} parameters, and no other settings that were tried do: "
        f"something else may write the weights in this step ({100 * min(share, 1):.0f} % of the update)",
    )


def _same(first: Parameter, second: Parameter) -> bool:
    return first.fit.settings == second.fit.settings and first.group == second.group


# -- as hypotheses -------------------------------------------------------------------------------------------------


def _hypothesis(
    scene: DiffContext,
    tracks: ParameterHistories,
    parameters: Sequence[Parameter],
    wrong: Sequence[Parameter],
    change: Change,
    changes: int,
) -> Hypothesis:
    fitted = wrong[0].fit
    shown = _undeclared(scene, wrong[0], change)
    kind, name = kind_of(shown, fitted)
    rest = _rest(tracks, parameters, wrong, change) or _spoilt(tracks, parameters, wrong, change)
    scope = scope_text([parameter.track for parameter in wrong], rest)
    sites = {_site(scene, tracks, parameter) for parameter in wrong}
    # What the runs declare about a weight decay says where it is set, too, unless it takes another class.
    kept = f"{_declared_rule(scene, wrong[0])}("
    declared = next(
        (
            each
            for each in scene.declared
            if each.name == "weight_decay" and each.parameters.candidate and sites <= {*each.parameters.candidate}
            if {*shown.settings} <= {"weight_decay", "decoupled"} and (kept in each.fix or "Attr(" in each.fix)
        ),
        None,
    )
    return Hypothesis(
        kind,
        name,
        sentence_of(shown, fitted, tracks) + scope,
        lambda: _predictions(scene, tracks, wrong, change),
        what="parameters' updates",
        free=change.free,
        tried=change.tried,
        changes=changes,
        values=_numbers(shown, fitted),
        # No argument makes an optimizer follow another rule for some of its parameters.
        fix=""
        if change.rules and rest
        else declared.fix
        if declared is not None
        else parameter_history.optimizer(
            scene.frameworks.candidate,
            fitted,
            {**shown.settings},
            bool(change.rules),
            _declared_rule(scene, wrong[0]),
            [_site(scene, tracks, parameter) for parameter in wrong] if rest else (),
            lambda rule, values: all(
                _is_right(scene, tracks, parameter, rule, values) for parameter in wrong[:_CHECKED]
            ),
        ),
        # A factor of the updates has many possible causes; and many rules and settings give the same first step.
        telling="rate" not in change.settings and (changes == 1 or len(tracks.numbers) >= _TELLING),
    )


def _undeclared(scene: DiffContext, parameter: Parameter, change: Change) -> Change:
    """Return a change without the settings that both runs declare alike: tiny gradients of the reference do not show
    them.
    """
    groups = declared_groups(scene, parameter.track.place)
    rest = {
        name: value
        for name, value in change.settings.items()
        if groups is None
        or not np.isclose(float(groups.reference.setting(name, np.nan)), value, rtol=1e-2, atol=0)
        or groups.reference.setting(name) != groups.candidate.setting(name)
    }
    return replace(change, settings=rest) if rest else change


def _is_right(
    scene: DiffContext, tracks: ParameterHistories, parameter: Parameter, rule: str, values: Mapping[str, Any]
) -> bool:
    """Return False if the candidate's optimizer, with some settings, does not compute the reference's updates from the
    reference's gradients. What cannot be computed counts as right.

    Args:
        rule: the rule of the optimizer's class.
        values: the settings that are given; the others stay, or are those of another class's defaults.
    """
    groups = declared_groups(scene, parameter.track.place)
    if groups is None or parameter.fit.settings.get("rate", 1.0) != 1.0:
        return True
    own = groups.candidate
    if own.setting("lr_factor", 1.0) != 1.0:
        return True
    form = "decay.decoupled" if rule in ("AdamW", "Lamb", "Lion") else "decay.coupled"
    given = {form if name == "decay.coupled" else name: value for name, value in values.items()}
    # A decay that the call gives stays in a call of the other class; one that is a class's default does not.
    own_decay = own.setting("decay.coupled") + own.setting("decay.decoupled")
    kept: Mapping[str, Any] = own.values
    decays: list[dict[str, float]] = [{}]
    if {rule, own.rule} == {"Adam", "AdamW"}:
        kept = {name: value for name, value in own.values.items() if not name.startswith("decay.")}
        decays = [{form: own_decay}, {form: _ADAMW_DECAY if rule == "AdamW" else 0.0}]
    elif rule != own.rule:
        kept, decays = {}, [{form: _ADAMW_DECAY} if rule == "AdamW" else {}]
    pair = scene.pairs(tracks.numbers[tracks.at], "update").get(parameter.track.place)
    limit = 0.0 if pair is None else scene.limit(pair)
    history, noise = joined([parameter.track], "reference")
    history = replace(history, rates=_column(tracks.rates.reference, parameter.group))
    for decay in decays:
        group = replace(own, rule=rule, values={**kept, **decay, **given})
        declared = DeclaredRule.from_group(group, scene.frameworks.candidate)
        if declared is None:
            return True
        off = declared.updates(history, noise) - history.updates
        sizes = np.linalg.norm(history.updates, axis=-1)
        is_small = bool(np.all(np.linalg.norm(off, axis=-1) <= limit * sizes))
        if is_small or float(np.sqrt(np.mean(np.square(off / noise)))) <= max(NEAR, 2 * parameter.fit.residual):
            return True
    return False


def _declared_rule(scene: DiffContext, parameter: Parameter) -> str:
    """Return the rule that the candidate's optimizer declares for a parameter; empty if it declares none."""
    groups = declared_groups(scene, parameter.track.place)
    return "" if groups is None else groups.candidate.rule


def _numbers(change: Change, fitted: Fit) -> Both[Any] | None:
    """Return the numbers of the settings that a change alters, of both sides; `None` if it alters something else."""
    pairs = [(fitted.settings.get(name), value) for name, value in change.settings.items()]
    is_number = all(isinstance(each, (int, float)) for pair in pairs for each in pair)
    return Both(*zip(*pairs)) if pairs and is_number and not change.rules else None


def _site(scene: DiffContext, tracks: ParameterHistories, parameter: Parameter) -> str:
    """Return the candidate's name of a parameter."""
    pair = scene.pairs(tracks.numbers[tracks.at], "update").get(parameter.track.place)
    record = pair.candidate if pair is not None else None
    layer, slot, _ = parameter.track.place
    return f"{layer}/{slot}" if record is None else f"{record.layer}/{record.slot}"


def _of_rates(scene: DiffContext, tracks: ParameterHistories, parameters: Sequence[Parameter]) -> Hypothesis:
    """Return the hypothesis that only the recorded learning rates differ."""
    text, rates = rates_text(scene, tracks)
    return Hypothesis(
        "learning_rate",
        "learning rate",
        text,
        lambda: _predictions(scene, tracks, parameters, Change({})),
        what="parameters' updates",
        values=rates,
    )


def _count(change: Change) -> int:
    """Return the count of settings that a change alters; another rule counts as two."""
    return 2 if change.rules else len(change.settings)


def _also(rates: Hypothesis | None, hypothesis: Hypothesis) -> Hypothesis:
    """Return the hypothesis combined with the one on learning rates, if these differ."""
    if rates is None:
        return hypothesis
    text = f"{rates.sentence}; and {hypothesis.sentence}"
    kind, changes = f"{rates.kind}+{hypothesis.kind}", 1 + hypothesis.changes
    return replace(hypothesis, kind=kind, sentence=text, changes=changes, values=rates.values)


def _rates_differ(tracks: ParameterHistories, parameters: Iterable[Parameter]) -> bool:
    return any(
        not np.allclose(
            _column(tracks.rates.reference, parameter.group),
            _column(tracks.rates.candidate, parameter.group),
            rtol=1e-6,
            atol=0,
        )
        for parameter in parameters
    )


def _predictions(
    scene: DiffContext, tracks: ParameterHistories, parameters: Iterable[Parameter], change: Change
) -> Iterator[Prediction]:
    """Yield the candidate's updates predicted with a change, and without it at the reference's learning rates."""
    for parameter in parameters:
        history, noise = joined([parameter.track], "candidate")
        actual = _column(tracks.rates.candidate, parameter.group)
        expected = _column(tracks.rates.reference, parameter.group)
        predicted = _best(parameter, change, replace(history, rates=actual), noise)
        without = _best(parameter, Change({}), replace(history, rates=expected), noise)
        if len(history.updates) != len(tracks.numbers):
            continue
        pair = scene.pairs(tracks.numbers[tracks.at], "update").get(parameter.track.place)
        limit = np.inf if pair is None else scene.limit(pair)
        site = f"{parameter.track.place[0]}/update/{parameter.track.place[1]}"
        yield Prediction(site, history.updates, predicted, without, noise, limit)


def _best(parameter: Parameter, change: Change, history: History, noise: np.ndarray) -> np.ndarray:
    fitted = change.rules[0] if change.rules else parameter.fit
    settings = {**fitted.settings, **change.shared, **change.settings}
    lost = settings.pop("lost", 0.0)
    best = in_single(fitted.rule, {**settings, "lost": lost}, history, noise)
    return updates(best.rule, history, best.settings)


def _spoilt(
    tracks: ParameterHistories, parameters: Sequence[Parameter], wrong: Sequence[Parameter], change: Change
) -> list[ParameterHistory] | None:
    """Return the tracks of parameters that agree, and would not with the reference's settings of those in ``wrong``.

    `None` if there are none.
    """
    settings = {name: wrong[0].fit.settings[name] for name in change.settings if name in wrong[0].fit.settings}
    reverse = replace(change, settings=settings, rules=(), shared={})
    return _rest(tracks, parameters, wrong, reverse)


def _rest(
    tracks: ParameterHistories, parameters: Sequence[Parameter], wrong: Sequence[Parameter], change: Change
) -> list[ParameterHistory] | None:
    """Return the tracks of parameters that the change does not fit, as their updates show; `None` if there are none."""
    unaffected = []
    for parameter in parameters:
        if not parameter.holds or any(parameter is altered for altered in wrong):
            continue
        if change.rules and parameter.fit.rule.name != wrong[0].fit.rule.name:
            unaffected.append(parameter.track)  # the reference's rule is another one there
            continue
        history, noise = joined([parameter.track], "candidate")
        history = replace(history, rates=_column(tracks.rates.candidate, parameter.group))
        with np.errstate(all="ignore"):
            error = (_best(parameter, change, history, noise) - history.updates) / noise
        if not np.sqrt(np.mean(np.square(error))) <= 3 * NEAR:
            unaffected.append(parameter.track)
    return unaffected or None


_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
# Width of the band around a tie of rounding in which either neighbour is right: shares of the update, whose moments
# may have 16 bits too, and of the last place.
_OF_UPDATE, _OF_PLACE = 0.02, 0.02


def half_weight_hypotheses(scene: DiffContext) -> Iterator[Hypothesis]:
    """Yield the hypothesis if one side's weights have 16 bits, and the other's more."""
    place = place_of(scene.diff.pair)
    pair = scene.pairs(scene.number, "weight").get(place)
    if pair is None:
        return
    dtypes = Both(*(str(record.dtype) if record is not None else "" for record in pair.sides))
    halves = [name for name, dtype in zip(SIDES, dtypes) if is_half(dtype)]
    groups, tracks = declared_groups(scene, place), tracks_of(scene, later=0)
    if len(halves) != 1 or groups is None or tracks is None:
        return
    side = halves[0]
    full = SIDES.candidate if side == SIDES.reference else SIDES.reference
    # The rule and the rates of the other side: settings that differ are a cause of their own.
    rule = DeclaredRule.from_group(getattr(groups, full), getattr(scene.frameworks, full))
    if rule is None:
        return
    half, other = getattr(dtypes, side), getattr(dtypes, full)
    # Torch's optimizers have no copy of the weights in float32.
    known = getattr(groups, side).rule in ("Adam", "AdamW")
    copies = scene.frameworks.candidate == "paddle" and side == SIDES.candidate and known
    yield Hypothesis(
        "half_weights",
        "weights of 16 bits",
        f"the {side} keeps its weights in {half}, the other side in {other}: updates smaller than half of a weight's "
        "last place are rounded away",
        partial(_predicted, tracks, side, full, rule, _DTYPES[half]),
        "updates",
        fix=checked_fix("paddle", f"paddle.optimizer.{groups.candidate.rule}(..., multi_precision=True)")
        if copies
        else "",
    )


def _predicted(
    tracks: ParameterHistories, side: str, full: str, rule: DeclaredRule, dtype: np.dtype[Any]
) -> Iterator[Prediction]:
    rates = getattr(tracks.rates, full)
    if rule.group >= rates.shape[1]:
        return
    for track in tracks.parameters:
        if not track.elements:
            continue  # rounding shows in elements only
        history, noise = joined([track], side)
        history = replace(history, rates=rates[:, rule.group])
        update, weight = rule.updates(history, noise)[tracks.at], history.weights[tracks.at]
        rounded = (weight + update).astype(dtype)
        upper, lower = (np.nextafter(rounded, dtype.type(sign * np.inf)).astype(np.float64) for sign in (1, -1))
        sums, middle = weight + update, rounded.astype(np.float64)
        room = np.minimum(np.abs(sums - (middle + upper) / 2), np.abs(sums - (middle + lower) / 2))
        step = np.maximum(upper - middle, middle - lower)
        # Near a tie either neighbour is right.
        tied = room <= _OF_UPDATE * np.abs(update) + _OF_PLACE * step
        other = getattr(track.histories, full).updates[tracks.at]
        yield Prediction(
            f"{track.place[0]}/update/{track.place[1]}",
            history.updates[tracks.at],
            middle - weight,
            other,
            np.maximum(np.where(tied, step, step / 64), _OF_UPDATE * np.abs(update)),
        )
