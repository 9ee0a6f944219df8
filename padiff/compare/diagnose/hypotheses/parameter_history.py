"""Weights, gradients and updates of both runs over steps, and names and code lines of optimizer settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from padiff.compare.declared.layers import optimizer_fix
from padiff.compare.diagnose.hypotheses.diff_context import (
    ELEMENTS,
    DiffContext,
    PairPlace,
    alike,
    is_elements,
    place_of,
    rounding_of,
)
from padiff.compare.diagnose.hypotheses.hypothesis import NEAR
from padiff.compare.diagnose.hypotheses.rules import Fit, History, Rule
from padiff.records import SIDES, Both
from padiff.system.terminal import first_few

#: Stages that are read of a parameter.
STAGES = ("weight", "grad", "update")
#: Most steps after the first diff that are read as well, if recorded.
LATER = 3
#: Most steps in all: for a longer training the state of the optimizer stays unknown.
MOST_STEPS = 64
# Most tensors that are read in all, and least count of parameters, for any count of steps.
_READS, _FEWEST = 6000, 12
#: Most numbers that are read in all, for both sides together; fewer elements of each tensor keep to it.
_MOST = 12_000_000
#: Rounding error of the arithmetic of an update, in rounding units: of the update itself, and of the usual size of the
#: tensor's updates, for elements whose moments cancel.
_OPERATIONS, _CANCELLED = 4.0, 4.0


@dataclass(frozen=True)
class ParameterHistory:
    """Values of a parameter in consecutive steps, on both sides.

    Attributes:
        place: the parameter.
        shape: its shape.
        elements: True for elements, False for projections, which show linear rules only.
        whole: True if the track has all elements.
        histories: gradients, weights and updates of each side; without learning rates.
        noise: rounding error of each element of an update, for each side.
    """

    place: PairPlace
    shape: tuple[int, ...]
    elements: bool
    whole: bool
    histories: Both[History]
    noise: Both[np.ndarray]

    @property
    def is_norm(self) -> bool:
        """Return True for a norm or bias, which weight decay usually excludes."""
        return len(self.shape) < 2


@dataclass(frozen=True)
class ParameterHistories:
    """The tracks of all parameters, with their steps and learning rates.

    Attributes:
        numbers: the steps, from the first recorded one on; an optimizer with state from earlier steps follows no rule.
        at: index of the first diff's step in ``numbers``.
        parameters: the tracks, the largest first.
        rates: the learning rates of each step, by parameter group.
    """

    numbers: tuple[int, ...]
    at: int
    parameters: tuple[ParameterHistory, ...]
    rates: Both[np.ndarray]


def tracks_of(scene: DiffContext, first: int | None = None, later: int = LATER) -> ParameterHistories | None:
    """Return the tracks of a scene's parameters, up to a few steps after the first diff; `None` if there are none.

    Args:
        first: the last step that must be recorded; the scene's step by default.
        later: count of further steps to read.
    """
    last = scene.number if first is None else first
    numbers = _row(scene, last, later)
    if last not in numbers:
        return None
    usable = [number for number in numbers if _is_one_step(scene, number)]
    if usable != numbers:
        # An optimizer that steps twice within a step, or not at all, breaks the row.
        numbers = [n for n in usable if n > max((m for m in numbers if m not in usable and m <= last), default=-1)]
        numbers = [n for k, n in enumerate(numbers) if n == numbers[0] + k]
    if last not in numbers or numbers[0] != scene.numbers[0]:
        return None  # the state of the optimizer is unknown
    places = _chosen(scene, last, max(_READS // (6 * len(numbers)), _FEWEST))
    if not places:
        return None
    share = max(_MOST // (6 * len(numbers) * len(places)), 32)
    tracks = [track for place in places if (track := _track(scene, place, numbers, min(ELEMENTS, share))) is not None]
    tracks.sort(key=lambda track: -track.noise.reference.shape[1])
    rates = _rates(scene, numbers, tracks) if tracks else None
    if rates is None:
        return None
    return ParameterHistories(tuple(numbers), numbers.index(last), tuple(tracks), rates)


def _chosen(scene: DiffContext, number: int, most: int) -> list[PairPlace]:
    """Return at most about ``most`` parameters to read: first diffs, then the others at regular distances."""
    places = list(scene.pairs(number, "update"))
    if len(places) <= most:
        return places
    wrong = {place_of(d.pair) for d in scene.diffs("update", "weight") if not d.passed}
    first = [place for place in places if place in wrong]
    passed = [place for place in places if place not in wrong]
    chosen = first[:: max(1, -(-len(first) // most))]
    remaining = max(most - len(chosen), most // 4)
    return [*chosen, *passed[:: max(1, -(-len(passed) // remaining))]]


def joined(tracks: Sequence[ParameterHistory], side: str, most: int | None = None) -> tuple[History, np.ndarray]:
    """Return the tracks of several parameters as one history, and its noise.

    Args:
        side: ``reference`` or ``candidate``.
        most: about the largest count of elements in all; all elements by default.
    """
    each = None if most is None else max(most // len(tracks), 24)
    parts, noise, edges = [], [], [0]
    for track in tracks:
        history, errors = getattr(track.histories, side), getattr(track.noise, side)
        step = 1 if each is None else max(1, -(-errors.shape[1] // each))
        parts.append([array[:, ::step] for array in (history.gradients, history.weights, history.updates)])
        noise.append(errors[:, ::step])
        edges.append(edges[-1] + noise[-1].shape[1])
    gradients, weights, updates = (np.concatenate(arrays, axis=1) for arrays in zip(*parts))
    complete = all(track.whole for track in tracks) and each is None
    tensors = tuple(slice(a, b) for a, b in pairwise(edges))
    ones = np.ones(len(gradients))
    return History(gradients, weights, updates, ones, tensors, complete), np.concatenate(noise, axis=1)


def _row(scene: DiffContext, last: int, later: int) -> list[int]:
    """Return the recorded steps around ``last`` without a gap."""
    recorded = {*scene.numbers}
    first = last
    while first - 1 in recorded and last - first < MOST_STEPS - 1:
        first -= 1
    end = last
    while end + 1 in recorded and end - last < later:
        end += 1
    return list(range(first, end + 1)) if last in recorded else []


def _is_one_step(scene: DiffContext, number: int) -> bool:
    """Return True if the optimizers of both sides stepped exactly once in this step."""
    sides = scene.sides(number)
    if sides is None:
        return False
    calls = sides.map(lambda step: {r.call for r in step.records if r.stage == "update" and r.layer != "(loop)"})
    return calls.reference == calls.candidate == {0}


def _track(scene: DiffContext, place: PairPlace, numbers: Sequence[int], most: int) -> ParameterHistory | None:
    rows: Both[dict[str, list[np.ndarray]]] = Both({}, {})
    elements, rounding, size = True, 0.0, 0
    sites = [(stage, scene.pairs(number, stage).get(place)) for number in numbers for stage in STAGES]
    for (stage, pair), values in zip(sites, alike([pair for _, pair in sites], most)):
        if pair is None or values is None or np.iscomplexobj(values.reference):
            return None
        elements = elements and is_elements(pair)
        if stage == "weight":
            rounding, size = max(rounding, rounding_of(pair)), int(np.prod(pair.anchor.shape))
        for side, array in zip(rows, values):
            side.setdefault(stage, []).append(array)
    if len({array.shape for side in rows for arrays in side.values() for array in arrays}) != 1:
        return None
    histories = rows.map(lambda side: _history(side, len(numbers)))
    if not all(np.isfinite(array).all() for h in histories for array in (h.gradients, h.weights, h.updates)):
        return None
    noise = histories.map(lambda history: _noise(history, rounding, elements))
    shape = scene.pairs(numbers[0], "weight")[place].anchor.shape
    complete = elements and histories.reference.weights.shape[1] == size
    return ParameterHistory(place, shape, elements, complete, histories, noise)


def _history(rows: dict[str, list[np.ndarray]], steps: int) -> History:
    return History(np.stack(rows["grad"]), np.stack(rows["weight"]), np.stack(rows["update"]), np.ones(steps))


def _noise(history: History, rounding: float, elements: bool) -> np.ndarray:
    """Return the rounding error of updates: from the weights they are the differences of, and from the arithmetic."""
    weights, updates = np.abs(history.weights), np.abs(history.updates)
    if not elements:
        # The noise of a sum with random signs is as large as the noise of all terms together.
        weights, updates = (np.broadcast_to(_root(v), v.shape) for v in (weights, updates))
    noise = rounding * (weights + _OPERATIONS * updates + _CANCELLED * _root(updates))
    return np.asarray(np.maximum(noise, np.finfo(np.float64).tiny * 1e20))


def _root(values: np.ndarray) -> np.ndarray:
    return np.asarray(np.sqrt(np.mean(np.square(values), axis=1, keepdims=True)))


def _rates(scene: DiffContext, numbers: Sequence[int], tracks: Sequence[ParameterHistory]) -> Both[np.ndarray] | None:
    """Return the learning rates of each step by parameter group.

    Where none are recorded (a loop that changes its weights by hand), they are those of gradient descent if it explains
    the updates, else ones.
    """
    rates = [scene.rates(number) for number in numbers]
    sides = []
    for side in SIDES:
        rows = [getattr(rate, side) for rate in rates]
        if len({len(row) for row in rows}) != 1:
            return None
        sides.append(np.array(rows) if rows[0] else _rates_of_descent(tracks, side))
    return Both(*sides)


def _rates_of_descent(tracks: Sequence[ParameterHistory], side: str) -> np.ndarray:
    history, noise = joined(tracks, side)
    with np.errstate(all="ignore"):
        rates = -(history.gradients * history.updates).sum(1, keepdims=True) / np.square(history.gradients).sum(
            1, keepdims=True
        )
        off = (history.updates + rates * history.gradients) / noise
        explains = float(np.sqrt(np.mean(np.square(off)))) <= NEAR
    return rates if explains else np.ones_like(rates)


#: Machine-readable names of causes, by setting.
KINDS = {
    "rate": "update_scale",
    "momentum": "momentum",
    "dampening": "dampening",
    "beta1": "{rule}_beta1",
    "beta2": "{rule}_beta2",
    "eps": "{rule}_eps",
    "alpha": "{rule}_alpha",
    "initial": "{rule}_initial",
    "weight_decay": "weight_decay",
    "momentum_decay": "momentum_decay",
    "nesterov": "nesterov",
    "decoupled": "weight_decay_form",
    "corrected": "bias_correction",
    "first_corrected": "bias_correction",
    "second_corrected": "bias_correction",
    "stored": "bias_correction",
    "amsgrad": "amsgrad",
    "inside": "{rule}_eps_inside",
    "uncorrected_eps": "{rule}_eps_form",
    "centered": "centered",
    "rate_inside": "rate_in_momentum",
    "lost": "optimizer_state_lost",
}
#: Names of settings for people.
NAMES = {
    "rate": "the size of updates",
    "momentum": "momentum",
    "dampening": "dampening",
    "beta1": "beta1",
    "beta2": "beta2",
    "eps": "epsilon",
    "alpha": "alpha (rho)",
    "initial": "the initial accumulator",
    "weight_decay": "weight decay",
    "momentum_decay": "momentum decay",
    "nesterov": "Nesterov",
    "decoupled": "decoupled weight decay",
    "corrected": "bias correction",
    "first_corrected": "bias correction of the first moment",
    "second_corrected": "bias correction of the second moment",
    "stored": "bias correction in place",
    "amsgrad": "AMSGrad",
    "inside": "epsilon inside the root",
    "uncorrected_eps": "epsilon before bias correction",
    "centered": "centered",
    "rate_inside": "learning rate inside the momentum",
    "lost": "lost state",
}
#: Sentences for a form that differs: switched off in the candidate, and switched on.
WORDS = {
    "nesterov": ("the candidate has no Nesterov momentum, the reference has", "the candidate has Nesterov momentum"),
    "decoupled": (
        "weight decay is part of the gradient in the candidate (coupled), apart from it in the reference (decoupled)",
        "weight decay is apart from the gradient in the candidate (decoupled), part of it in the reference (coupled)",
    ),
    "corrected": (
        "the candidate's moments are not bias-corrected, the reference's are",
        "the candidate's moments are bias-corrected, the reference's are not",
    ),
    "first_corrected": (
        "the candidate's first moment is not bias-corrected, the reference's is",
        "the candidate's first moment is bias-corrected, the reference's is not",
    ),
    "second_corrected": (
        "the candidate's second moment is not bias-corrected, the reference's is",
        "the candidate's second moment is bias-corrected, the reference's is not",
    ),
    "stored": (
        "the reference corrects the bias of the first moment in place, so that it adds up, the candidate does not",
        "the candidate corrects the bias of the first moment in place, so that it adds up, the reference does not",
    ),
    "amsgrad": ("the reference uses AMSGrad, the candidate does not", "the candidate uses AMSGrad"),
    "inside": (
        "epsilon is added outside of the square root in the candidate, inside of it in the reference",
        "epsilon is added inside of the square root in the candidate, outside of it in the reference",
    ),
    "uncorrected_eps": (
        "epsilon is added after bias correction in the candidate, before it in the reference",
        "epsilon is added before bias correction in the candidate, after it in the reference",
    ),
    "centered": ("the reference's RMSProp is centered, the candidate's is not", "the candidate's RMSProp is centered"),
    "rate_inside": (
        "the learning rate is applied to the momentum in the candidate, and inside of it in the reference",
        "the learning rate is applied inside of the momentum in the candidate, and to it in the reference",
    ),
    "lost": ("the candidate's optimizer lost its state before step {step}: it starts anew there",),
}


def number_text(value: float) -> str:
    return f"{value:.6g}"


def scope_text(wrong: Sequence[ParameterHistory], rest: Sequence[ParameterHistory] | None) -> str:
    """Return text that limits a cause to the parameters in ``wrong``; empty if no other parameter is in ``rest``."""
    if not rest:
        return ""
    if all(track.is_norm for track in wrong) and not any(track.is_norm for track in rest):
        return ", of norms and biases only"
    if not any(track.is_norm for track in wrong) and all(track.is_norm for track in rest):
        return ", of all but norms and biases"
    names = [f"{layer}/{slot}" for layer, slot, _ in (track.place for track in wrong)]
    return f", of {first_few(names, 3)} only"


# Settings of the rules, by the names that `optimizer_fix` has for them.
_NAMES = {"initial": "initial_accumulator_value", "weight_decay": "decay.coupled"}
_FORMS = frozenset({"nesterov", "amsgrad", "centered"})
# Differences that no argument mends, and forms that belong to a framework's code and are no arguments.
_UNKNOWN = frozenset({"lost", "rate", "corrected", "first_corrected", "second_corrected", "stored", "uncorrected_eps"})
_OWN = _UNKNOWN - {"lost", "rate"} | {"single", "inside", "rate_inside"}


def optimizer(
    framework: str,
    reference: Fit,
    changed: Mapping[str, float],
    another: bool,
    declared: str = "",
    parameters: Sequence[str] = (),
    is_right: Callable[[str, Mapping[str, Any]], bool] = lambda rule, values: True,
) -> str:
    """Return the call that creates the candidate's optimizer with the reference's settings; empty if unknown.

    Args:
        reference: the fit of the reference's updates.
        changed: the settings that differ in the candidate.
        another: True if the candidate uses another rule.
        declared: the rule that the candidate's optimizer declares; empty if unknown.
        parameters: the candidate's names of the parameters to set the values for; empty for all parameters.
        is_right: returns False if a rule with some settings does not compute the reference's updates.
    """
    settings = reference.settings
    if _UNKNOWN & {*changed}:
        return ""
    rule = reference.rule.name
    if rule in ("Adam", "AdamW"):
        # The two apply a weight decay in different forms, and are the same without.
        decides = another or declared not in ("Adam", "AdamW")
        decides = decides or "decoupled" in changed or bool("weight_decay" in changed and settings["weight_decay"])
        rule = ("AdamW" if settings["decoupled"] and settings["weight_decay"] else "Adam") if decides else declared
    names = [name for name in (reference.rule.numbers if another else changed) if name not in _OWN]
    # Epsilon means something else where the framework adds it elsewhere.
    names = [name for name in names if name != "eps" or "inside" not in changed]
    if another:
        names = [name for name in names if settings[name]]
    elif not names or names == ["decoupled"]:
        names = []
        if "decoupled" not in changed:
            return ""
    elif "decoupled" in changed and settings["weight_decay"] and "weight_decay" not in names:
        names.append("weight_decay")
    values = {
        _name(name, reference.rule): bool(value) if name in _FORMS else float(number_text(value))
        for name, value in settings.items()
    }
    listed = [_name(name, reference.rule) for name in names if name != "decoupled"]
    # AdamW has a weight decay by default.
    others = {"decay.decoupled": changed["weight_decay"]} if parameters and _is_new(rule, declared, changed) else {}
    if not is_right(rule, {name: values[name] for name in listed}):
        return ""
    return optimizer_fix(framework, rule, listed, values, parameters, others=others)


def _name(name: str, rule: Rule) -> str:
    return "rho" if name == "alpha" and rule.name == "Adadelta" else _NAMES.get(name, name)


def clipping(framework: str, limit: float) -> str:
    """Return the line that clips by the norm of all gradients."""
    lines = {
        "torch": f"torch.nn.utils.clip_grad_norm_(model.parameters(), {number_text(limit)})",
        "paddle": f"grad_clip=paddle.nn.ClipGradByGlobalNorm({number_text(limit)})",
    }
    return lines.get(framework, "")


def training(framework: str) -> str:
    """Return the line that makes a parameter trainable."""
    return {"torch": "parameter.requires_grad_(True)", "paddle": "parameter.stop_gradient = False"}.get(framework, "")


def holding(framework: str) -> str:
    """Return the call that creates an optimizer with all parameters."""
    lines = {
        "torch": "torch.optim.<Optimizer>(model.parameters(), ...)",
        "paddle": "paddle.optimizer.<Optimizer>(..., parameters=model.parameters())",
    }
    return lines.get(framework, "")


def zeroing(framework: str) -> str:
    """Return the line that zeroes gradients after a step."""
    return {"torch": "optimizer.zero_grad()", "paddle": "optimizer.clear_grad()"}.get(framework, "")


def _is_new(rule: str, declared: str, changed: Mapping[str, float]) -> bool:
    """Return True if a weight decay needs AdamW, which the candidate does not declare."""
    return rule == "AdamW" and declared != "AdamW" and "weight_decay" in changed
