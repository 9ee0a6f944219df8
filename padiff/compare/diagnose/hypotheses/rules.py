"""The update rules of the optimizers of torch and paddle in numpy, and a least-squares solver for their settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from padiff.compare.diagnose.hypotheses.hypothesis import NEAR


@dataclass(frozen=True)
class History:
    """Gradients, weights and updates of an optimizer from its first step on, for some elements of some tensors.

    Attributes:
        gradients, weights: arrays of shape (steps, elements), the tensors one after the other; float64.
        updates: the changes of the weights in each step, in the same shape.
        rates: the learning rate of each step.
        tensors: the slice of elements of each tensor.
        whole: True if the history has all elements of each tensor.
    """

    gradients: np.ndarray
    weights: np.ndarray
    updates: np.ndarray
    rates: np.ndarray
    tensors: tuple[slice, ...] = ()
    whole: bool = True

    @property
    def steps(self) -> int:
        return len(self.gradients)

    def between(self, first: int, last: int) -> History:
        """Return the history of the steps from ``first`` to before ``last``."""
        cut = slice(first, last)
        return replace(
            self,
            gradients=self.gradients[cut],
            weights=self.weights[cut],
            updates=self.updates[cut],
            rates=self.rates[cut],
        )


#: Numbers and forms by name; a form is 0.0 or 1.0.
Settings = Mapping[str, float]
# The same, or arrays with the numbers of several settings (see `side_by_side`).
_Settings = Mapping[str, Any]
Run = Callable[[History, _Settings], np.ndarray]


@dataclass(frozen=True)
class Rule:
    """An update rule of an optimizer.

    Attributes:
        name: name of the rule for people.
        run: function of a history and settings that returns the updates.
        numbers: numeric settings with their usual values, the default first.
        forms: settings that are switched on (1.0) or off (0.0), with their default.
        linear: True if updates are linear in gradients and weights, so that projections show the rule too.
    """

    name: str
    run: Run
    numbers: Mapping[str, tuple[float, ...]]
    forms: Mapping[str, float] = field(default_factory=dict)
    linear: bool = False

    @property
    def defaults(self) -> dict[str, float]:
        return {"rate": 1.0, **{name: usual[0] for name, usual in self.numbers.items()}, **self.forms}


# Largest relative error of a norm estimated from n elements, times the root of n: about three deviations.
_ROUGHLY = 3.0
_DECAYS = (0.0, 1e-5, 1e-4, 5e-4, 1e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5)
_BETA1 = (0.9, 0.95, 0.8, 0.5, 0.0, 0.99, 0.85)
_BETA2 = (0.999, 0.99, 0.95, 0.98, 0.9, 0.9999, 0.995, 0.98)
_EPS = (1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 1e-7, 1e-10, 1e-12)
_MOMENTA = (0.0, 0.9, 0.8, 0.95, 0.99, 0.5, 0.85, 0.98)


def _sgd(h: History, s: _Settings) -> np.ndarray:
    buffer = np.zeros_like(h.gradients[0])
    rows = []
    for t in range(h.steps):
        rate = s["rate"] * h.rates[t]
        gradient = h.gradients[t] + (0.0 if s["decoupled"] else s["weight_decay"]) * h.weights[t]
        if s["rate_inside"]:
            buffer = s["momentum"] * buffer + rate * gradient
            step = s["momentum"] * buffer + rate * gradient if s["nesterov"] else buffer
        else:
            damping = 0.0 if t == 0 else np.where(s["momentum"], s["dampening"], 0.0)
            buffer = s["momentum"] * buffer + (1 - damping) * gradient
            step = rate * (gradient + s["momentum"] * buffer if s["nesterov"] else buffer)
        rows.append(-step - (rate * s["weight_decay"] * h.weights[t] if s["decoupled"] else 0.0))
    return np.stack(rows, axis=-2)


class _Betas:
    """The two betas and their powers for bias correction, in float32 if the rule is set to single precision."""

    def __init__(self, s: _Settings) -> None:
        self._number = np.float32 if s["single"] else np.float64
        self._betas = self._number(s["beta1"]), self._number(s["beta2"])
        self._powers = [self._number(1), self._number(1)]
        self.one, self.two = map(np.float64, self._betas)
        self.rest = tuple(np.float64(self._number(1) - beta) for beta in self._betas)

    def step(self) -> tuple[Any, Any]:
        """Return the divisors of bias correction for the next step."""
        self._powers = [self._number(power * beta) for power, beta in zip(self._powers, self._betas)]
        first, second = (np.float64(self._number(1) - power) for power in self._powers)
        return first, second


def _adam(h: History, s: _Settings) -> np.ndarray:
    m = v = largest = np.zeros_like(h.gradients[0])
    betas, rows = _Betas(s), []
    for t in range(h.steps):
        rate = s["rate"] * h.rates[t]
        gradient = h.gradients[t]
        if not s["decoupled"] and np.any(s["weight_decay"]):
            gradient = gradient + s["weight_decay"] * h.weights[t]
        m = betas.one * m + betas.rest[0] * gradient
        v = betas.two * v + betas.rest[1] * np.square(gradient)
        first_divisor, second_divisor = betas.step()
        if not s["corrected"]:
            first_divisor = second_divisor = 1.0
        first_divisor = first_divisor if s["first_corrected"] else 1.0
        second_divisor = second_divisor if s["second_corrected"] else 1.0
        largest = np.maximum(largest, v)
        square = (largest if s["amsgrad"] else v) / second_divisor
        if s["inside"]:
            root = np.sqrt(square + s["eps"])
        else:
            root = np.sqrt(square) + s["eps"] / (np.sqrt(second_divisor) if s["uncorrected_eps"] else 1.0)
        corrected = m / first_divisor
        m = corrected if s["stored"] else m
        step = _ratio(corrected, root)
        rows.append(-rate * (step + (s["weight_decay"] * h.weights[t] if s["decoupled"] else 0.0)))
    return np.stack(rows, axis=-2)


def _radam(h: History, s: _Settings) -> np.ndarray:
    m = v = np.zeros_like(h.gradients[0])
    betas, rows = _Betas(s), []
    longest = 2 / (1 - betas.two) - 1
    for t in range(h.steps):
        rate = s["rate"] * h.rates[t]
        gradient = h.gradients[t] + (0.0 if s["decoupled"] else s["weight_decay"]) * h.weights[t]
        m = betas.one * m + betas.rest[0] * gradient
        v = betas.two * v + betas.rest[1] * np.square(gradient)
        first_divisor, second_divisor = betas.step()
        corrected = m / first_divisor
        m = corrected if s["stored"] else m
        length = longest - 2 * (t + 1) * (1 - second_divisor) / second_divisor
        shrunk = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        adapted = np.sqrt(second_divisor) * np.sqrt(np.abs(shrunk)) * _ratio(corrected, np.sqrt(v) + s["eps"])
        step = np.where(length > 5, adapted, corrected)
        rows.append(-rate * (step + (s["weight_decay"] * h.weights[t] if s["decoupled"] else 0.0)))
    return np.stack(rows, axis=-2)


def _nadam(h: History, s: _Settings) -> np.ndarray:
    m = v = np.zeros_like(h.gradients[0])
    betas, rows, product = _Betas(s), [], 1.0
    for t in range(h.steps):
        rate = s["rate"] * h.rates[t]
        gradient = h.gradients[t] + (0.0 if s["decoupled"] else s["weight_decay"]) * h.weights[t]
        now, then = (s["beta1"] * (1 - 0.5 * 0.96 ** ((t + k) * s["momentum_decay"])) for k in (1, 2))
        product *= now
        m = betas.one * m + betas.rest[0] * gradient
        v = betas.two * v + betas.rest[1] * np.square(gradient)
        _, two = betas.step()
        ahead = (1 - now) / (1 - product) * gradient + then / (1 - product * then) * m
        step = _ratio(ahead, np.sqrt(v / two) + s["eps"])
        rows.append(-rate * (step + (s["weight_decay"] * h.weights[t] if s["decoupled"] else 0.0)))
    return np.stack(rows, axis=-2)


def _adamax(h: History, s: _Settings) -> np.ndarray:
    m = norm = np.zeros_like(h.gradients[0])
    betas, rows = _Betas(s), []
    for t in range(h.steps):
        gradient = h.gradients[t] + s["weight_decay"] * h.weights[t]
        m = betas.one * m + betas.rest[0] * gradient
        if s["inside"]:
            norm = np.maximum(np.abs(gradient), betas.two * norm + s["eps"])
        else:
            norm = np.maximum(betas.two * norm, np.abs(gradient) + s["eps"])
        divisor, _ = betas.step()
        rows.append(-s["rate"] * h.rates[t] / divisor * _ratio(m, norm))
    return np.stack(rows, axis=-2)


def _rmsprop(h: History, s: _Settings) -> np.ndarray:
    v = mean = buffer = np.zeros_like(h.gradients[0])
    rows = []
    for t in range(h.steps):
        rate = s["rate"] * h.rates[t]
        gradient = h.gradients[t] + s["weight_decay"] * h.weights[t]
        v = s["alpha"] * v + (1 - s["alpha"]) * np.square(gradient)
        square = v
        if s["centered"]:
            mean = s["alpha"] * mean + (1 - s["alpha"]) * gradient
            square = np.maximum(v - np.square(mean), 0.0)
        root = np.sqrt(square + s["eps"]) if s["inside"] else np.sqrt(square) + s["eps"]
        step = _ratio(gradient, root)
        if s["rate_inside"]:
            buffer = s["momentum"] * buffer + rate * step
            rows.append(-buffer)
        else:
            buffer = s["momentum"] * buffer + step
            rows.append(-rate * buffer)
    return np.stack(rows, axis=-2)


def _adagrad(h: History, s: _Settings) -> np.ndarray:
    total = s["initial"] + np.zeros_like(h.gradients[0])
    rows = []
    for t in range(h.steps):
        gradient = h.gradients[t] + s["weight_decay"] * h.weights[t]
        total = total + np.square(gradient)
        root = np.sqrt(total + s["eps"]) if s["inside"] else np.sqrt(total) + s["eps"]
        rows.append(-s["rate"] * h.rates[t] * _ratio(gradient, root))
    return np.stack(rows, axis=-2)


def _adadelta(h: History, s: _Settings) -> np.ndarray:
    squares = steps = np.zeros_like(h.gradients[0])
    rows = []
    for t in range(h.steps):
        gradient = h.gradients[t] + s["weight_decay"] * h.weights[t]
        squares = s["alpha"] * squares + (1 - s["alpha"]) * np.square(gradient)
        step = np.sqrt(steps + s["eps"]) / np.sqrt(squares + s["eps"]) * gradient
        steps = s["alpha"] * steps + (1 - s["alpha"]) * np.square(step)
        rows.append(-s["rate"] * h.rates[t] * step)
    return np.stack(rows, axis=-2)


def _lion(h: History, s: _Settings) -> np.ndarray:
    m = np.zeros_like(h.gradients[0])
    rows = []
    for t in range(h.steps):
        step = np.sign(s["beta1"] * m + (1 - s["beta1"]) * h.gradients[t])
        m = s["beta2"] * m + (1 - s["beta2"]) * h.gradients[t]
        rows.append(-s["rate"] * h.rates[t] * (step + s["weight_decay"] * h.weights[t]))
    return np.stack(rows, axis=-2)


def _lamb(h: History, s: _Settings) -> np.ndarray:
    m = v = np.zeros_like(h.gradients[0])
    betas, rows = _Betas(s), []
    for t in range(h.steps):
        m = betas.one * m + betas.rest[0] * h.gradients[t]
        v = betas.two * v + betas.rest[1] * np.square(h.gradients[t])
        first_divisor, second_divisor = betas.step() if s["corrected"] else (1.0, 1.0)
        step = _ratio(m / first_divisor, np.sqrt(v / second_divisor) + s["eps"]) + s["weight_decay"] * h.weights[t]
        rate = s["rate"] * h.rates[t]
        rows.append(-rate * step * _trust(h, t, step, rate))
    return np.stack(rows, axis=-2)


def _trust(h: History, t: int, step: np.ndarray, rate: Any) -> np.ndarray:
    """Return Lamb's trust ratio of each element: the norm of the tensor's weight divided by the norm of its step."""
    trust = np.ones_like(step)
    for tensor in h.tensors:
        values = step[..., tensor]
        norm = np.linalg.norm(h.weights[t][tensor])
        norms = np.sqrt(np.sum(np.square(values), axis=-1, keepdims=True))
        ratio = np.where((norm > 0) & (norms > 0), norm / norms, 1.0)
        if not h.whole:
            # Some elements give a rough norm: the exact ratio comes from the recorded updates.
            solved = -np.sum(h.updates[t][tensor] * values, axis=-1, keepdims=True) / (rate * np.square(norms))
            close = np.abs(solved - ratio) <= _ROUGHLY / math.sqrt(values.shape[-1]) * ratio
            ratio = np.where(close, solved, ratio)
        trust[..., tensor] = ratio
    return trust


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    return np.asarray(np.where(above == 0, 0.0, above / below))


_MOMENTS = {"beta1": _BETA1, "beta2": _BETA2, "eps": _EPS, "weight_decay": _DECAYS}

SGD = Rule(
    "SGD",
    _sgd,
    {"momentum": _MOMENTA, "dampening": (0.0, 0.1, 0.5, 0.9), "weight_decay": _DECAYS},
    {"nesterov": 0.0, "decoupled": 0.0, "rate_inside": 0.0},
    linear=True,
)
ADAM = Rule(
    "Adam",
    _adam,
    _MOMENTS,
    {
        "decoupled": 0.0,
        "corrected": 1.0,
        "amsgrad": 0.0,
        "inside": 0.0,
        "uncorrected_eps": 0.0,
        "single": 0.0,
        "second_corrected": 1.0,
        "first_corrected": 1.0,
        "stored": 0.0,
    },
)
ADAMW = replace(ADAM, name="AdamW", forms={**ADAM.forms, "decoupled": 1.0})
NADAM = Rule("NAdam", _nadam, {**_MOMENTS, "momentum_decay": (4e-3,)}, {"decoupled": 0.0, "single": 0.0})
RADAM = Rule("RAdam", _radam, _MOMENTS, {"decoupled": 0.0, "single": 0.0, "stored": 0.0})
ADAMAX = Rule("Adamax", _adamax, _MOMENTS, {"inside": 0.0, "single": 0.0})
RMSPROP = Rule(
    "RMSProp",
    _rmsprop,
    {"alpha": (0.99, 0.95, 0.9, 0.999, 0.98), "eps": _EPS, "momentum": _MOMENTA, "weight_decay": _DECAYS},
    {"inside": 0.0, "centered": 0.0, "rate_inside": 0.0},
)
ADAGRAD = Rule(
    "Adagrad",
    _adagrad,
    {"eps": (1e-10, *_EPS), "initial": (0.0, 0.1, 1e-3, 1.0), "weight_decay": _DECAYS},
    {"inside": 0.0},
)
ADADELTA = Rule("Adadelta", _adadelta, {"alpha": (0.9, 0.95, 0.99), "eps": (1e-6, *_EPS), "weight_decay": _DECAYS})
LION = Rule("Lion", _lion, {"beta1": (0.9, 0.95), "beta2": (0.99, 0.999, 0.98, 0.9), "weight_decay": _DECAYS})
LAMB = Rule("Lamb", _lamb, {**_MOMENTS, "eps": (1e-6, *_EPS)}, {"corrected": 1.0, "single": 0.0})

#: All rules, the simple ones first: if two explain the updates equally, the first is reported.
RULES = (SGD, ADAM, ADAMW, RMSPROP, ADAGRAD, RADAM, ADAMAX, NADAM, LION, LAMB, ADADELTA)


def updates(rule: Rule, history: History, settings: _Settings) -> np.ndarray:
    """Return the updates of a rule; the setting ``lost`` is the step before which the optimizer lost its state."""
    lost = int(settings.get("lost", 0))
    with np.errstate(all="ignore"):
        if not 0 < lost < history.steps:
            return rule.run(history, settings)
        parts = history.between(0, lost), history.between(lost, history.steps)
        return np.concatenate([rule.run(part, settings) for part in parts], axis=-2)


def side_by_side(rule: Rule, several: Sequence[Settings]) -> _Settings:
    """Return settings with equal forms as one, for which `updates` returns shape (settings, steps, elements)."""
    numbers = [name for name in ("rate", *rule.numbers) if name != "momentum_decay"]
    return {**several[0], **{name: np.array([[settings[name]] for settings in several]) for name in numbers}}


# Most rounds of the search, and the factor that the error has to fall by for another round.
_ROUNDS, _BETTER = 14, 0.999
# A setting that changes the updates by less than this share of the noise, for a change of one, is not solved for.
_SHOWS = 1e-2
# Small settings, and settings close to one, are solved for on a logarithmic scale.
_SMALLEST = 1e-16
_LOGARITHMS = frozenset({"eps", "initial"})
_NEAREST = 1e-6
_CLOSE_TO_ONE = frozenset({"beta1", "beta2", "alpha"})


@dataclass(frozen=True)
class Fit:
    """A rule with settings, and its error against the recorded updates.

    Attributes:
        rule: the rule.
        settings: the rule's settings; ``rate`` is a factor of the recorded learning rates.
        residual: error of the updates, as a multiple of the rounding noise (root of the mean square).
        solved: names of the settings that were solved for.
        tried: count of values that were tried.
    """

    rule: Rule
    settings: Mapping[str, float]
    residual: float = math.inf
    solved: tuple[str, ...] = ()
    tried: int = 1

    @property
    def explains(self) -> bool:
        """Return True if only rounding is left."""
        return self.residual <= NEAR


def residual_of(rule: Rule, settings: Mapping[str, float], history: History, noise: np.ndarray) -> float:
    """Return the error of a rule's updates as a multiple of the noise; infinite if an update is not finite."""
    return _size(_errors(rule, settings, history, noise))


def residuals_of(
    rule: Rule, several: Sequence[Mapping[str, float]], history: History, noise: np.ndarray
) -> list[float]:
    """Return `residual_of` for several settings of equal forms, computed together: much faster than one by one."""
    with np.errstate(all="ignore"):
        sizes = np.sqrt(np.mean(np.square(_errors(rule, side_by_side(rule, several), history, noise)), axis=1))
    return [size if math.isfinite(size) else math.inf for size in sizes.tolist()]


def fit(
    rule: Rule, start: Mapping[str, float], free: Sequence[str], history: History, noise: np.ndarray, tried: int = 1
) -> Fit:
    """Solve for the settings named in ``free`` by least squares (Levenberg-Marquardt), from ``start`` on."""
    settings = dict(start)
    errors = _errors(rule, settings, history, noise)
    best, damping = _size(errors), 1e-3
    rounds = _ROUNDS if math.isfinite(best) else 0
    for _ in range(rounds):
        nudges = [_nudge(name, settings[name]) for name in free]
        nudged = [{**settings, name: _moved(name, settings[name], by)} for name, by in zip(free, nudges)]
        rows = _errors(rule, side_by_side(rule, nudged), history, noise) - errors
        slopes = np.ascontiguousarray((rows / np.array(nudges)[:, None]).T)
        if not np.isfinite(slopes).all():
            break
        shows = np.sqrt(np.mean(np.square(slopes), axis=0)) > _SHOWS
        free, slopes = [name for name, visible in zip(free, shows) if visible], slopes[:, shows]
        if not free:
            break
        square, pull = slopes.T @ slopes, slopes.T @ errors
        before = best
        for _ in range(4):
            raised = square + damping * np.diag(np.diag(square) + 1e-300)
            change = np.linalg.lstsq(raised, -pull, rcond=None)[0]
            moved = {**settings, **{name: _moved(name, settings[name], by) for name, by in zip(free, change)}}
            moved_errors = _errors(rule, moved, history, noise)
            size = _size(moved_errors)
            if size < best:
                settings, errors, best, damping = moved, moved_errors, size, damping / 10
                break
            damping *= 10
        if best > before * _BETTER:
            break
    return _rounded(Fit(rule, settings, best, tuple(free), tried), history, noise)


def _errors(rule: Rule, settings: Mapping[str, Any], history: History, noise: np.ndarray) -> np.ndarray:
    """Return the errors of all updates in a row; for settings from `side_by_side`, a row for each of the settings."""
    with np.errstate(all="ignore"):
        errors = np.asarray((updates(rule, history, settings) - history.updates) / noise)
        return errors.reshape(*errors.shape[:-2], -1)


def _size(errors: np.ndarray) -> float:
    with np.errstate(all="ignore"):
        size = math.sqrt(float(np.mean(np.square(errors)))) if errors.size else math.inf
    return size if math.isfinite(size) else math.inf


def _nudge(name: str, value: float) -> float:
    if name in _LOGARITHMS or name in _CLOSE_TO_ONE:
        return 1e-4
    return 1e-5 * max(abs(value), 1e-2)


def _moved(name: str, value: float, by: float) -> float:
    if name in _LOGARITHMS:
        return max(value, _SMALLEST) * math.exp(min(max(by, -8.0), 8.0))
    if name in _CLOSE_TO_ONE:
        return 1 - min(max((1 - value) * math.exp(min(max(by, -3.0), 3.0)), _NEAREST), 1.0)
    return value + by


def _rounded(solution: Fit, history: History, noise: np.ndarray) -> Fit:
    """Return the fit with solved values replaced by round ones that a person would write, if those fit as well."""
    settings, best = dict(solution.settings), solution.residual
    enough = max(NEAR, 1.5 * best)
    for name in solution.solved:
        for value in _round_values(name, settings[name]):
            rounded = {**settings, name: value}
            size = residual_of(solution.rule, rounded, history, noise)
            close = size <= 1.5 * best or size <= 1.0 or abs(value - settings[name]) <= 1e-5 * abs(value)
            if size <= enough and close:
                settings, best = rounded, size
                break
    return Fit(solution.rule, settings, best, solution.solved, solution.tried)


def _round_values(name: str, value: float) -> Iterator[float]:
    if name not in _LOGARITHMS and name != "rate":
        yield 0.0
    if name in _CLOSE_TO_ONE:
        yield from (rounded for digits in (1, 2, 3, 4, 5) if (rounded := float(f"{value:.{digits}f}")) < 1)
    else:
        yield from (float(f"{value:.{digits}g}") for digits in (1, 2, 3, 4, 5))
