"""The side that agrees with float64 at the first difference of two runs, by layers and by declared update rules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from padiff.compare.declared.optimizers import Group, Optimizers
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext, alike, place_of
from padiff.compare.diagnose.hypotheses.diff_context import PairPlace as Site
from padiff.compare.diagnose.hypotheses.parameter_history import ParameterHistories, ParameterHistory, joined, tracks_of
from padiff.compare.diagnose.hypotheses.rules import RULES, History, Rule, residual_of, updates
from padiff.compare.diagnose.loss_calls import calls_of, loss_calls
from padiff.compare.diagnose.place import Evidence, Place
from padiff.compare.diagnose.recompute.of_layers import as_float64, is_known, off_by, recorded
from padiff.compare.judge.limits import allowed
from padiff.errors import PadiffError
from padiff.frameworks.catalog import epsilon_of
from padiff.model import equivalents
from padiff.records import (
    LOOP,
    SIDES,
    Both,
    Diff,
    Recomputed,
    is_functional,
    is_loss,
    is_of_loss,
    loss_role,
    settings_at,
)

_NAMES = {"rho": "alpha", "initial_accumulator_value": "initial"}
# Settings that no rule here supports, with the value at which they have no effect.
_NOTHING = {"maximize": False, "rescale_grad": 1.0, "lr_decay": 0.0, "decay.l1": 0.0, "decay.own": 0.0}
# Forms that no setting declares: each framework's code has one of the two.
_EITHER = ("single", "rate_inside", "uncorrected_eps")
# Largest relative difference of settings of two rules that are the same: one may be stored in float32.
_SETTINGS = 1e-6


@dataclass(frozen=True)
class DeclaredRule:
    """A rule with the settings that a run declares for a parameter group.

    Attributes:
        rule: the rule.
        settings: the rule's settings; ``rate`` is a factor of the recorded learning rates.
        group: index of the recorded learning rate that the rule uses.
    """

    rule: Rule
    settings: Mapping[str, float]
    group: int

    @classmethod
    def from_group(cls, group: Group, framework: str) -> DeclaredRule | None:
        """Return the rule of a parameter group, or `None` if no rule here supports its settings."""
        values = group.values
        rule = next((candidate for candidate in RULES if candidate.name == group.rule), None)
        if rule is None or any(values.get(name, usual) != usual for name, usual in _NOTHING.items()):
            return None
        settings = dict(rule.defaults)
        for name, value in values.items():
            common = _NAMES.get(name, name)
            if common in settings and isinstance(value, (bool, int, float)):
                settings[common] = float(value)
        coupled, decoupled = (group.setting(f"decay.{form}") for form in ("coupled", "decoupled"))
        if coupled and decoupled:
            return None
        if "weight_decay" in settings:
            settings["weight_decay"] = coupled + decoupled
        elif coupled or decoupled:
            return None
        if "decoupled" in settings:
            settings["decoupled"] = float(bool(decoupled))
        elif bool(decoupled) != (rule.name in ("Lamb", "Lion")) and coupled + decoupled:
            return None
        place = epsilon_of(framework, rule.name)
        if "inside" in settings:
            settings["inside"] = float(place is not None and place.inside)
        settings["rate"] = group.setting("lr_factor", 1.0)
        number = values.get("rate", 0)
        return cls(rule, settings, number if isinstance(number, int) else 0)

    def is_like(self, other: DeclaredRule) -> bool:
        """Return True if another rule is the same with the same settings, up to the precision of their numbers."""
        settings = ((self.settings[name], other.settings.get(name, math.nan)) for name in self.settings)
        return self.rule is other.rule and all(math.isclose(*pair, rel_tol=_SETTINGS) for pair in settings)

    def updates(self, history: History, noise: np.ndarray) -> np.ndarray:
        """Return the updates of the rule, in the undeclared forms that fit the recorded updates best."""
        ways = [name for name in _EITHER if name in self.settings]
        best: Sequence[float] = ()
        residual = np.inf
        for way in product((0.0, 1.0), repeat=len(ways)):
            off = residual_of(self.rule, {**self.settings, **dict(zip(ways, way))}, history, noise)
            if off < residual or not best:
                best, residual = way, off
        with np.errstate(all="ignore"):
            return updates(self.rule, history, {**self.settings, **dict(zip(ways, best))})


# The difference of the sides, divided by these: largest error of the correct side, and least error of the wrong side.
# Chosen: errors in between show nothing.
_NEARER, _FAR = 10.0, 3.0
# Largest relative difference of a logged loss from the loss function's result, as logs may round. Chosen.
_LOGGED = 1e-5
# Largest relative error of an update from the rounding of its weight, which is much larger. Chosen.
_UPDATE = 1e-3


def which_side(scene: DiffContext, place: Place, evidence: Evidence) -> Recomputed | None:
    """Return the errors of both sides against float64 and the side that is wrong; `None` if nothing can be recomputed.

    Args:
        scene: the first diff and the records around it.
        place: the lines of code that computed the first diff.
    """
    try:
        with np.errstate(all="ignore"):
            if scene.stage == "forward":
                return _layer(place, evidence)
            if scene.stage == "loss":
                return _loss(scene)
            if scene.stage == "weight":
                return _weight(scene)
            return _update(scene) if scene.stage == "update" else None
    except (PadiffError, OSError, KeyError, ValueError, IndexError):
        return None  # records were deleted or do not fit; an error here never changes the verdict


def _judged(
    what: str, rules: Both[str], errors: Both[float], apart: float, limit: float, differ: bool = True
) -> Recomputed | None:
    """Return the result from the error of each side, the difference of the sides, and the limit of rounding.

    `None` if the errors do not decide which side is wrong.
    """
    if not apart > 0:
        return None
    near = errors.map(lambda error: error <= min(limit, apart / _NEARER))
    far = errors.map(lambda error: error >= apart / _FAR if math.isfinite(apart) else not math.isfinite(error))
    if all(near):
        return Recomputed(what, rules, errors) if differ else None
    if near.reference and far.candidate:
        return Recomputed(what, rules, errors, SIDES.candidate)
    if near.candidate and far.reference:
        return Recomputed(what, rules, errors, SIDES.reference)
    return None


def _apart(diff: Diff) -> float:
    """Return the relative L2 difference of the sides; NaN if only sketches were compared, infinite if not finite."""
    figures = diff.figures
    if figures is None or figures.basis != "tensors":
        return math.nan
    return math.inf if figures.nonfinite else figures.rel_l2


# -- outputs and losses ------------------------------------------------------------------------------------------------


def _layer(place: Place, evidence: Evidence) -> Recomputed | None:
    pair = place.diff.pair
    if place.inside is not True or place.graphs is None or evidence.steps is None or pair.layout:
        return None
    if pair.reference is None or pair.candidate is None or is_functional(pair.anchor.slot):
        return None
    sides = recorded(evidence.steps, evidence.runs.map(lambda run: run.info), place.graphs)
    records = Both(pair.reference, pair.candidate)
    parts = sides.zip(records).map(lambda side: side[0].part(side[1]))
    layers = sides.zip(records).map(lambda side: side[0].layers[side[1].layer])
    kinds = layers.map(lambda layer: layer.type)
    if parts.reference is None or parts.candidate is None:
        # A custom class is compared with the computed layer of the other side, whose input agrees.
        computed_part = parts.reference or parts.candidate
        custom = layers.candidate if parts.candidate is None else layers.reference
        if computed_part is None or is_known(equivalents.kind(custom)):
            return None
        kinds = parts.zip(kinds).map(lambda side: side[1] if side[0] is not None else "")
        parts = Both(computed_part, computed_part)
    assert parts.reference is not None and parts.candidate is not None
    off = Both(off_by(parts.reference, records.reference), off_by(parts.candidate, records.candidate))
    if off.reference is None or off.candidate is None:
        return None
    limit = max(allowed(side.dtype(record), "forward") for side, record in sides.zip(records))
    set_as = layers.zip(sides).map(
        lambda side: (equivalents.kind(side[0]), dict(side[0].settings), side[1].training(side[0]))
    )
    differ = set_as.reference != set_as.candidate
    return _judged("layer", kinds, Both(off.reference, off.candidate), _apart(place.diff), limit, differ)


def _loss(scene: DiffContext) -> Recomputed | None:
    calls = calls_of(scene)
    if calls is None:
        return _loss_of_own_code(scene)
    record = calls.reference.loss.records.get("0")
    input_diffs = [
        d
        for d in scene.step
        if d.pair.stage == "loss" and is_of_loss(d.pair.anchor) and loss_role(d.pair.anchor.slot) != "0"
    ]
    if not input_diffs or not all(d.passed and d.compared for d in input_diffs) or record is None:
        return None
    outputs, results = calls.map(lambda call: call.output), calls.map(lambda call: call.computed())
    if any(values is None for values in (*outputs, *results)):
        return None
    errors = outputs.zip(results).map(lambda side: _off(*side))
    apart = _off(outputs.candidate, outputs.reference)
    names = calls.map(lambda call: call.loss.function)
    differ = names.reference != names.candidate or calls.reference.settings != calls.candidate.settings
    differ = differ or calls.reference.framework != calls.candidate.framework
    return _judged("loss", names, errors, apart, allowed("float32", "loss"), differ)


def _loss_of_own_code(scene: DiffContext) -> Recomputed | None:
    """Return the result for a logged loss if only one side calls a loss function: both sides against this function."""
    sides = scene.sides(scene.number)
    if sides is None or not is_loss(scene.diff.pair.anchor):
        return None
    calls = sides.zip(scene.runs).map(lambda side: loss_calls(side[0], side[1].info))
    function_calls = calls.reference or calls.candidate
    logged = scene.diff.pair.sides.map(lambda record: None if record is None else as_float64(record.value))
    if (calls.reference and calls.candidate) or len(function_calls) != 1 or logged.reference is None:
        return None
    expected, output = function_calls[0].computed(), function_calls[0].output
    logged_value = logged.reference if calls.reference else logged.candidate
    # The logged value has to be the result of the function, not a mean or multiple.
    if expected is None or expected.size != 1 or _off(logged_value, output) > _LOGGED:
        return None
    names = calls.map(lambda side_calls: side_calls[0].loss.function if side_calls else "")
    errors = logged.map(lambda values: _off(values, expected))
    return _judged("loss", names, errors, _off(logged.candidate, logged.reference), allowed("float32", "loss"), False)


def _off(values: np.ndarray | None, expected: np.ndarray | None) -> float:
    if values is None or expected is None or values.size != expected.size:
        return math.inf
    norm = float(np.linalg.norm(expected))
    error = float(np.linalg.norm(values.ravel() - expected.ravel())) / norm if norm else math.inf
    return error if math.isfinite(error) else math.inf


# -- weights and updates -----------------------------------------------------------------------------------------------


def _weight(scene: DiffContext) -> Recomputed | None:
    """Return the result for a weight of a later step: the sum of the weight and update of the step before.

    `None` if these are not recorded, or decide nothing.
    """
    diff, at = scene.diff, place_of(scene.diff.pair)
    before, added = (scene.pairs(scene.number - 1, stage).get(at) for stage in ("weight", "update"))
    if before is None or added is None:
        return None
    now, was, by = alike((diff.pair, before, added))
    if now is None or was is None or by is None or not now.reference.shape == was.reference.shape == by.reference.shape:
        return None
    errors = now.zip(was.zip(by)).map(lambda side: _off(side[0], side[1][0] + side[1][1]))
    apart = _off(now.candidate, now.reference)
    return _judged("weight", Both("", ""), errors, apart, allowed("float32", "weight"), differ=False)


def _update(scene: DiffContext) -> Recomputed | None:
    """Return the result for an update: each side against the rule that its optimizer declares.

    `None` if a rule or the history of the parameter is unknown, or the errors decide nothing.
    """
    diff = scene.diff
    if diff.pair.anchor.layer == LOOP:
        # A diff of the learning rates themselves: their effect shows in a parameter.
        wrong = [d for d in scene.diffs("update") if not d.passed and d.pair.complete]
        if not wrong:
            return None
        diff = wrong[0]
        scene = replace(scene, diff=diff)
    tracks = tracks_of(scene, later=0)
    track = None if tracks is None else next((t for t in tracks.parameters if t.place == place_of(diff.pair)), None)
    groups = declared_groups(scene, place_of(diff.pair))
    if tracks is None or track is None or groups is None:
        return None
    rules = groups.zip(scene.frameworks).map(lambda side: DeclaredRule.from_group(*side))
    off = []
    for side, rule in zip(SIDES, rules):
        if rule is None:
            return None
        error = _by_rule(track, tracks, side, rule)
        if error is None:
            return None
        off.append(error)
    apart = _off(*(getattr(track.histories, side).updates[tracks.at] for side in ("candidate", "reference")))
    names = groups.map(lambda group: group.rule)
    return _judged("update", names, Both(*off), apart, _UPDATE)


def _by_rule(track: ParameterHistory, tracks: ParameterHistories, side: str, rule: DeclaredRule) -> float | None:
    """Return the relative error of a side's update against a rule; `None` if projections can't show the rule."""
    history, noise = joined([track], side)
    rates = getattr(tracks.rates, side)
    if rule.group >= rates.shape[1] or not (track.elements or rule.rule.linear):
        return None
    history = replace(history, rates=rates[:, rule.group])
    return _off(history.updates[tracks.at], rule.updates(history, noise)[tracks.at])


def declared_groups(scene: DiffContext, place: Site) -> Both[Group] | None:
    """Return the declared parameter group of a parameter on each side; `None` if a side declares none."""
    pair = scene.pairs(scene.number, "update").get(place)
    sides = scene.sides(scene.number)
    if pair is None or sides is None:
        return None
    groups = []
    for record, step, run in zip(pair.sides, sides, scene.runs):
        assert record is not None
        optimizers = Optimizers.from_settings(settings_at(run.info.settings, step.settings))
        group = optimizers.by_site.get(f"{record.layer}/{record.slot.partition('[')[0]}")
        if group is None or optimizers.count != 1:
            return None
        groups.append(group)
    return Both(*groups)
