"""Edits of numbers: the value that a constant of the code, or an implicit constant, would need to have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from padiff.compare.diagnose.computing.edit import Edit, FormulaView, Target
from padiff.compare.diagnose.computing.formula import Change
from padiff.compare.diagnose.computing.operations import OPERATIONS
from padiff.records import LOOP

# The most rounds of the search, and the largest ratio of the new to the old error for another round.
_ROUNDS, _BETTER = 12, 0.999
# The search ends if more than this share of the first error remains after this many rounds.
_HOPELESS, _FIRST = 0.6, 4
_SMALL = 1e-2
# Share of the rounding error below which two errors are equal.
_BELOW = 0.1


@dataclass(frozen=True)
class Number:
    """A constant of a formula whose value is solved for.

    Attributes:
        kind, name, text: as in `Edit`.
        value: the current value.
        make: returns the changes to nodes for another value.
        at: the node that the number is about.
        starts: further starting points of the search.
        logarithm: True to search on a logarithmic scale.
        rank: the priority among edits that explain the same, lowest first.
    """

    kind: str
    name: str
    text: str
    value: float
    make: Any
    at: int
    starts: tuple[float, ...] = ()
    logarithm: bool = False
    rank: int = 1


_EPSILONS = (1e-6, 1e-5, 1e-3, 1e-2, 1e-8, 1e-12, 0.1)


def numbers(sheet: FormulaView) -> Iterator[Number]:
    """Yield the constants of a formula, explicit and implicit ones."""
    for k, node in enumerate(sheet.nodes):
        if node.name and sheet.is_number(k):
            yield from _constant(sheet, k)
        elif node.operation in ("normalised", "grouped", "by_statistics"):
            eps = float(node.how["eps"])
            what = f"epsilon of {sheet.where(k)}"
            yield Number("norm_eps", "epsilon", what, eps, _given(sheet, k, "eps"), k, _EPSILONS, True, 0)
        elif node.operation == "act" and node.how.get("number") is not None:
            number = ACTIVATION_NUMBERS.get(node.how["function"], "number")
            what = f"the {number} of {node.how['function']} ({sheet.where(k)})"
            yield Number(
                "activation", "another activation", what, float(node.how["number"]), _given(sheet, k, "number"), k
            )
        elif node.operation == "softmax":
            what = f"what the softmax of {sheet.where(k)} is taken of is scaled by a number, which"
            yield Number("temperature", "a temperature", what, 1.0, _scaled(node.given[0]), k, rank=2)
        elif node.operation == "lstm":
            what = f"what is added to the forget gate of {sheet.where(k)} (a bias)"
            yield Number("forget_bias", "a bias of the forget gate", what, 0.0, _given(sheet, k, "forget"), k, (1.0,))
            what = f"each number of the initial state of {sheet.where(k)}"
            yield Number("initial_state", "another initial state", what, 0.0, _given(sheet, k, "start"), k, (1.0,))
        elif node.operation == "gru":
            what = f"each number of the initial state of {sheet.where(k)}"
            yield Number("initial_state", "another initial state", what, 0.0, _given(sheet, k, "start"), k, (1.0,))
        elif node.operation in ("add", "sub"):
            for operand in node.given:
                if not sheet.is_number(operand) and sheet.is_float(operand):
                    what = f"{sheet.named(operand)} is multiplied, before {sheet.where(k)} adds it, by a number, which"
                    name = "a scale"
                    yield Number("scale", name, what, 1.0, _operand(sheet, k, operand), k, rank=2)
        elif not node.operation and not node.name and sheet.is_float(k) and sheet.may_be_edited(k):
            what = f"{sheet.named(k)} is multiplied by a number, which"
            yield Number("scale", "a scale", what, 1.0, _scaled(k), k, rank=3)
    turning = [k for k, node in enumerate(sheet.nodes) if node.operation in _TURNING and sheet.is_float(k)]
    if len(turning) > 1:
        what = f"what all sines and cosines are taken of ({sheet.where(turning[0])}) is multiplied by a number, which"
        make = _scaled_inside(sheet, turning)
        starts = (*_OF_PI.values(), 0.5, 2.0, -1.0)
        yield Number("frequency", "a scale of frequencies", what, 1.0, make, turning[0], starts)
    end = sheet.formula.end
    if sheet.end_is_open:
        what = "what comes out is multiplied by a number, which"
        yield Number("scale", "a scale", what, 1.0, _scaled(end), end, rank=3)


_TURNING = frozenset({"sin", "cos"})
# Multiples of pi, and of its inverse, that programs forget.
_OF_PI = {
    f"{sign}{text}": (-value if sign else value)
    for sign in ("", "-")
    for text, value in (
        ("pi", math.pi),
        ("2 pi", 2 * math.pi),
        ("pi / 2", math.pi / 2),
        ("1 / pi", 1 / math.pi),
        ("1 / (2 pi)", 0.5 / math.pi),
        ("2 / pi", 2 / math.pi),
    )
}
_OF_SCORES = ("softmax", "masked", "causal", "where")
#: The name of the number of an activation.
ACTIVATION_NUMBERS = {"leaky ReLU": "slope", "ELU": "alpha", "softplus": "beta"}


def _constant(sheet: FormulaView, k: int) -> Iterator[Number]:
    value = float(sheet.formula.values[k])
    users = sheet.users(k)
    if not users:
        return
    user, where = sheet.nodes[users[0]], sheet.where(users[0])
    make = _put(k)
    if user.operation == "add" and 0 <= value <= _SMALL:
        yield Number(
            "norm_eps", "epsilon", f"epsilon, the number that {where} adds,", value, make, users[0], _EPSILONS, True, 0
        )
    elif user.operation == "pow" and user.given[0] == k:
        turning = sheet.feeds(k, frozenset({"sin", "cos"}))
        kind, what = ("rotary_base", "the base of the rotary embeddings") if turning else ("base", "the base")
        yield Number(kind, what, f"{what} ({where})", value, make, users[0], (1e3, 1e4, 1e5, 5e5, 1e6), True, 0)
    elif user.operation in ("mul", "div", "pow", "add", "sub"):
        scores = any(
            sheet.nodes[u].operation in ("softmax", "masked", "causal", "where") for u in sheet.below(users[0], 3)
        )
        kind, what = "scale", "the number"
        if scores and user.operation in ("mul", "div"):
            # A loop has no attention: what it scales are the scores of a loss.
            of_loss = sheet.layer(users[0]) == LOOP
            kind, what = (
                ("temperature", "the temperature") if of_loss else ("attention_scale", "the scale of attention")
            )
        size = 1 / value if user.operation == "div" and value else value
        root = _root_text(size) if kind == "attention_scale" else ""
        yield Number(kind, "a scale", f"{what} in {where}{root}", value, make, users[0], (1.0, 0.5 * value), rank=0)


def _root_text(value: float) -> str:
    square = 1 / (value * value) if value else 0.0
    return f", which is 1 / sqrt({square:.6g})," if square and abs(square - round(square)) < 1e-4 * square else ""


def _put(k: int) -> Any:
    return lambda value: {k: lambda get, own: np.float64(value)}


def _given(sheet: FormulaView, k: int, name: str) -> Any:
    node = sheet.nodes[k]

    def make(value: float) -> dict[int, Change]:
        how = {**node.how, name: value}
        return {k: lambda get, own: np.asarray(OPERATIONS[node.operation](*(get(g) for g in node.given), **how))}

    return make


def _scaled(k: int) -> Any:
    return lambda value: {k: lambda get, own: own(k) * value}


def _scaled_inside(sheet: FormulaView, nodes: list[int]) -> Any:
    """Return the changes that scale what some elementwise functions are taken of."""

    def made(k: int, value: float) -> Change:
        operation, operand = sheet.nodes[k].operation, sheet.nodes[k].given[0]
        return lambda get, own: np.asarray(OPERATIONS[operation](get(operand) * value))

    return lambda value: {k: made(k, value) for k in nodes}


def _operand(sheet: FormulaView, k: int, operand: int) -> Any:
    node = sheet.nodes[k]

    def make(value: float) -> dict[int, Change]:
        def change(get: Any, own: Any) -> np.ndarray:
            return np.asarray(
                OPERATIONS[node.operation](*(get(g) * (value if g == operand else 1.0) for g in node.given))
            )

        return {k: change}

    return make


def solved(sheet: FormulaView, number: Number, target: Target, noise: float) -> Edit | None:
    """Return an edit with the value of a number that fits the target best; `None` if no value fits well.

    Args:
        sheet: the formula.
        number: the number to solve for.
        target: the tensor to reproduce.
        noise: the rounding error of the target.
    """
    output = sheet.formula.values[sheet.formula.end]
    without = target.off(output)
    best: tuple[float, float] | None = None
    for start in (number.value, *number.starts):
        fit = _from(sheet, number, target, start, without)
        if fit is not None and (best is None or fit[1] < best[1]):
            best = fit
        if best is not None and best[1] <= 3 * noise:
            break
    if best is None or best[1] > 30 * max(noise, 1e-12) or best[1] > 0.25 * without:
        return None
    value = _as_written(sheet, number, target, *best, noise)
    if math.isclose(value, number.value, rel_tol=1e-4, abs_tol=1e-12):
        return None
    written = f"{number.value:.6g}"
    term, adds, _ = number.text.partition(" is multiplied, before ")
    if adds and value == 0.0:
        text = f"{term} is not added ({sheet.where(number.at)})"
        return Edit("term_missing", "a term", text, number.make(value), number.rank, 1, number.at)
    more = {0.0: " (it is left out)", 2.0: " (it counts twice)", -1.0: " (its sign is flipped)"}
    effect = more.get(value, "") if number.value == 1.0 and number.kind == "scale" else ""
    text = f"{number.text} is {value:.6g} for the reference's {written}{effect}"
    # If two numbers explain the same, the number with fewer digits is preferred.
    of_pi = next((text for text, known in _OF_PI.items() if math.isclose(value, known, rel_tol=1e-4)), None)
    if of_pi is not None:
        text = f"{number.text} is {of_pi} for the reference's {written}"
    odd = float(f"{value:.2g}") != value and of_pi is None
    return Edit(number.kind, number.name, text, number.make(value), number.rank + odd, 1, number.at, not odd)


def _from(
    sheet: FormulaView, number: Number, target: Target, start: float, without: float
) -> tuple[float, float] | None:
    """Return the value that Gauss-Newton steps find from a start, and the remaining error; `None` if none can be
    computed.
    """
    logarithm = number.logarithm and start > 0
    where = math.log(start) if logarithm else start

    def made(at: float) -> np.ndarray | None:
        with np.errstate(all="ignore"):
            output = sheet.formula.changed(number.make(math.exp(min(at, 30.0)) if logarithm else at))
        return target.look(output) if output is not None and output.shape == target.shape else None

    now = made(where)
    if now is None:
        return None
    error = _size(now - target.values)
    for round_ in range(_ROUNDS):
        nudge = 1e-4 * max(abs(where), 1.0 if not logarithm else 1e-2)
        moved = made(where + nudge)
        if moved is None:
            break
        slope = (moved - now) / nudge
        square = float(np.vdot(slope, slope))
        if not square or not math.isfinite(square):
            break
        step = float(np.vdot(slope, target.values - now)) / square
        step = max(min(step, 4.0), -4.0) if logarithm else step
        for _ in range(3):
            after = made(where + step)
            if after is not None and _size(after - target.values) < error * _BETTER:
                break
            step /= 4
        else:
            break
        assert after is not None
        where, now, error = where + step, after, _size(after - target.values)
        if round_ >= _FIRST and error > _HOPELESS * without:
            break
    return (math.exp(where) if logarithm else where), error


def _as_written(sheet: FormulaView, number: Number, target: Target, value: float, error: float, noise: float) -> float:
    """Return the value rounded to the fewest digits that fit about as well, or well below the rounding error."""
    for digits in (1, 2, 3, 4):
        rounded = float(f"{value:.{digits}g}") if abs(value) > 1e-6 or number.logarithm else 0.0
        if abs(rounded - value) <= 2e-2 * abs(value) + 1e-6:
            output = sheet.formula.changed(number.make(rounded))
            if output is not None and target.off(output) <= max(1.5 * error, _BELOW * noise, 1e-12):
                return rounded
    return value


def _size(values: np.ndarray) -> float:
    return math.sqrt(float(np.mean(np.square(values)))) if values.size else 0.0
