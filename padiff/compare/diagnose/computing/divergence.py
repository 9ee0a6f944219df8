"""The calls at which two formulas of one tensor diverge, and the numbers of the code that would make them agree."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from typing import Any

import numpy as np

from padiff.compare.diagnose.computing.edit import UNNAMED, Edit, FormulaView, Target, is_mask
from padiff.compare.diagnose.computing.formula import CONSTANT, MADE, Change, Formula, Get, UnknownError
from padiff.compare.diagnose.computing.operations import OPERATIONS
from padiff.compare.diagnose.kernels import ACTIVATION_NUMBERS
from padiff.compare.diagnose.traced import (
    Graph,
    arguments_text,
    axes_of,
    called,
    given_otherwise,
    is_looking,
    same_name,
)
from padiff.frameworks.catalog import is_loss
from padiff.records import LOOP, Both, Cause, TracedCall
from padiff.system.terminal import first_few

# The most rounds of the search, and the largest ratio of the new to the old error for another round.
_ROUNDS, _BETTER = 12, 0.999
# The search ends if more than this share of the first error remains after this many rounds.
_HOPELESS, _FIRST = 0.6, 4
_SMALL = 1e-2
# Most numbers of the candidate's code that are tried in the place of each one of the reference's.
_MOST_READ = 12
# Factor below which nothing is left of a term, if rounding hides the difference. Chosen.
_NOTHING = 1e-3
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


# Characters of a number that is shown as a root, too.
_LONG = 6
# Added to the rank of edits where slopes alone tell what agrees.
_BY_SLOPES = 20
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
            yield Number("temperature", "a temperature", what, 1.0, scaled(node.given[0]), k, rank=2)
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
                inside = 0 <= node.about == sheet.nodes[operand].about  # the arithmetic of one function
                if not sheet.is_number(operand) and sheet.is_float(operand) and not inside:
                    what = f"{sheet.named(operand)} is multiplied, before {sheet.where(k)} adds it, by a number, which"
                    name = "a scale"
                    yield Number("scale", name, what, 1.0, _operand(sheet, k, operand), k, rank=2)
        elif not node.operation and not node.name and sheet.is_float(k) and sheet.may_be_edited(k):
            named = sheet.named(k)
            if named == UNNAMED and sheet.nodes[sheet.formula.end].operation == "slopes":
                continue  # weights or targets of a loss: its scale is that of the whole loss
            yield Number("scale", "a scale", f"{named} is multiplied by a number, which", 1.0, scaled(k), k, rank=3)
    turning = [k for k, node in enumerate(sheet.nodes) if node.operation in _TURNING and sheet.is_float(k)]
    if len(turning) > 1:
        what = f"what all sines and cosines are taken of ({sheet.where(turning[0])}) is multiplied by a number, which"
        make = _scaled_inside(sheet, turning)
        starts = (*_OF_PI.values(), 0.5, 2.0, -1.0)
        yield Number("frequency", "a scale of frequencies", what, 1.0, make, turning[0], starts)
    end = sheet.formula.end
    if sheet.end_is_open:
        what = "what comes out is multiplied by a number, which"
        yield Number("scale", "a scale", what, 1.0, scaled(end), end, rank=3)


def read_numbers(sheet: FormulaView, other: Graph | FormulaView, surplus: bool = False) -> Iterator[Edit]:
    """Yield edits that put a number that only the other side's code has in the place of one that only this side's
    code has.

    Args:
        sheet: the formula to edit.
        other: the formula of the other side, or its calls where their formula is not known.
        surplus: True if the formula is the candidate's.
    """
    if isinstance(other, Graph):
        arguments = [value for call in other.trace.calls for value in call.arguments.values()]
        theirs = [float(value) for value in arguments if type(value) in (int, float)]
    else:
        theirs = _written_numbers(other)
    # As good as no number: what is left out, and what has another sign.
    written = [*_written_numbers(sheet), 0.0, 1.0, -1.0]
    others = [value for value in dict.fromkeys(theirs) if not any(map(partial(math.isclose, value), written))]
    for k, node in enumerate(sheet.nodes):
        if not node.name or not sheet.is_number(k):
            continue
        if any(math.isclose(float(sheet.formula.values[k]), value, rel_tol=1e-6) for value in theirs):
            continue
        if surplus and abs(float(sheet.formula.values[k])) in (0.0, 1.0):
            continue  # as good as no number
        for number in _constant(sheet, k):
            for value in others[:_MOST_READ]:
                sides = Both(number.value, value).swapped(surplus)
                texts = sides.map(partial(_number_text, is_root=number.kind == "attention_scale"))
                text = f"{number.text} is {texts.candidate} for the reference's {texts.reference}"
                text = f"in the candidate, {text}" if surplus else text
                yield Edit(
                    number.kind, number.name, text, number.make(value), number.rank + 1, 0, number.at,
                    values=Both(number.value, value),
                )  # fmt: skip


def _written_numbers(sheet: FormulaView) -> list[float]:
    return [float(sheet.formula.values[k]) for k, node in enumerate(sheet.nodes) if node.name and sheet.is_number(k)]


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
# Operations that a number is added for, so that they are not taken at zero.
_UNDEFINED_AT_ZERO = ("div", "sqrt", "rsqrt", "log", "pow")


def _constant(sheet: FormulaView, k: int) -> Iterator[Number]:
    value = float(sheet.formula.values[k])
    users = sheet.users(k)
    if not users:
        return
    user, where = sheet.nodes[users[0]], sheet.where(users[0])
    make = _put(k)
    divides = any(sheet.nodes[n].operation in _UNDEFINED_AT_ZERO for n in sheet.below(users[0], 2))
    if user.operation == "add" and 0 < value <= _SMALL and divides:
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
        yield Number(kind, "a scale", f"{what} in {where}", value, make, users[0], (1.0, 0.5 * value), rank=0)


def _number_text(value: float, is_root: bool) -> str:
    """Return a number as text; with `is_root`, one of many digits also as the root of a whole number, or over it."""
    square, text = max(value * value, 1 / (value * value)) if value else 0.0, f"{value:.6g}"
    if not is_root or len(text) < _LONG or abs(square - round(square)) > 1e-4 * square:
        return text
    return f"{text} ({'1 / ' * (abs(value) < 1)}sqrt({round(square)}))"


def _put(k: int) -> Any:
    return lambda value: {k: lambda get, own: np.float64(value)}


def _given(sheet: FormulaView, k: int, name: str) -> Any:
    node = sheet.nodes[k]

    def make(value: float) -> dict[int, Change]:
        how = {**node.how, name: value}
        return {k: lambda get, own: np.asarray(OPERATIONS[node.operation](*(get(g) for g in node.given), **how))}

    return make


def scaled(k: int) -> Any:
    """Return a function from a factor to the change that multiplies a node by it."""
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
    beyond = None if number.logarithm else sheet.formula.changed(number.make(2 * value - number.value))
    if beyond is not None and target.off(beyond) <= 3 * noise:
        return None  # any number beyond gives the same, as where a clip lets nothing through
    is_root = number.kind == "attention_scale"
    written = _number_text(number.value, is_root)
    term, adds, _ = number.text.partition(" is multiplied, before ")
    if adds and value == 0.0:
        text = f"{term} is not added ({sheet.where(number.at)})"
        return Edit("term_missing", "a term", text, number.make(value), number.rank, 1, number.at)
    if (
        value == 1.0
        and number.kind == "scale"
        and number.at >= 0
        and sheet.nodes[number.at].operation in ("mul", "div")
    ):
        text = f"{sheet.where(number.at)} is left out: nothing is scaled by {written} there"
        values = Both(number.value, 1.0)
        return Edit("scale_missing", "a scale", text, number.make(value), number.rank, 1, number.at, values=values)
    more = {0.0: " (it is left out)", 2.0: " (it counts twice)", -1.0: " (its sign is flipped)"}
    effect = more.get(value, "") if number.value == 1.0 and number.kind == "scale" else ""
    text = f"{number.text} is {_number_text(value, is_root)} for the reference's {written}{effect}"
    # If two numbers explain the same, the number with fewer digits is preferred.
    of_pi = next((text for text, known in _OF_PI.items() if math.isclose(value, known, rel_tol=1e-4)), None)
    if of_pi is not None:
        text = f"{number.text} is {of_pi} for the reference's {written}"
    odd = float(f"{value:.2g}") != value and of_pi is None
    # A sign is flipped by what adds or subtracts, rather than by a number.
    is_sign = math.isclose(value, -number.value, rel_tol=1e-6) and not effect
    return Edit(
        number.kind, number.name, text, number.make(value), number.rank + odd + 3 * is_sign, 1, number.at, not odd,
        values=Both(number.value, value),
    )  # fmt: skip


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
    if number.kind == "scale" and number.value == 1.0 and abs(value) < _NOTHING:
        output = sheet.formula.changed(number.make(0.0))
        if output is not None and target.off(output) <= max(noise, 1e-12):
            return 0.0
    for digits in (1, 2, 3, 4):
        rounded = float(f"{value:.{digits}g}") if abs(value) > 1e-6 or number.logarithm else 0.0
        if abs(rounded - value) <= 2e-2 * abs(value) + 1e-6:
            output = sheet.formula.changed(number.make(rounded))
            if output is not None and target.off(output) <= max(1.5 * error, _BELOW * noise, 1e-12):
                return rounded
    return value


def _size(values: np.ndarray) -> float:
    return math.sqrt(float(np.mean(np.square(values)))) if values.size else 0.0


# Largest relative error of values that agree. Chosen: above rounding, below a fault that can be seen.
# Most calls that a text lists, and most parts of a text on code that is a cause.
_FEW, _PARTS = 4, 2
_AGREE = 1e-4
# The fewest elements of a tensor whose exchange is no chance.
_FEWEST = 2
#: The name of an edit that gives single calls the candidate's numbers and arguments.
READ = "other arguments"
# Kinds of differences in a call with a name of its own; and the name of Huber's loss, by whether beta divides it.
_THRESHOLD = "threshold"
_COMPARISONS = ("gt", "lt", "ge", "le", "eq", "ne")
_NAMED = {"act": "activation", "huber": "loss_function", **dict.fromkeys(_COMPARISONS, _THRESHOLD)}
_HUBER = {True: "smooth_l1_loss", False: "huber_loss"}
# The most nodes after a divergence that may be part of it, on each side, and the most places.
_AFTER, _PLACES = 5, 3
# The most calls of one side that one call of the other may stand for, such as one for each class.
_MOST_SOURCES = 24


def divergences(sheet: FormulaView, candidate: FormulaView) -> Iterator[Edit]:
    """Yield edits that put calls of the candidate into the reference's formula, the fewest calls first.

    Args:
        sheet: the reference's formula.
        candidate: the candidate's formula of the same tensor.
    """
    by_calls = _by_calls(sheet, candidate, False)
    if by_calls is None:
        by_calls = _by_calls(sheet, candidate, True)
        by_calls = by_calls if by_calls is not None and by_calls.kind in _NAMED.values() else None
    if by_calls is not None:
        yield by_calls
        return
    same, agreeing = _same_nodes(sheet, candidate, sheet.formula.values)
    yield from _other_operands(sheet, candidate, same, agreeing)
    yield from _by_nodes(sheet, candidate, same, agreeing, _after)
    # If slopes alone differ, many times one number (the log-ratio of two models that are still equal) are no evidence.
    if _end(sheet) not in agreeing:
        return
    even, others_even = (
        {k for k, outputs in enumerate(_leaves_behind(view)) if outputs and _is_even(view.formula.values[k])}
        for view in (sheet, candidate)
    )
    if even or others_even:
        same = {k: other for k, other in same.items() if k not in others_even and other not in even}
        for edit in _by_nodes(sheet, candidate, same, agreeing - even, _through):
            yield replace(edit, rank=edit.rank + _BY_SLOPES)


def _by_nodes(
    sheet: FormulaView,
    candidate: FormulaView,
    same: dict[int, int],
    agreeing: set[int],
    after: Callable[[FormulaView, Sequence[int]], list[int]],
) -> Iterator[Edit]:
    """Yield the edits of `divergences` between nodes that agree and nodes where both formulas can be joined again.

    Args:
        same, agreeing: the nodes that agree, see `_same_nodes`.
        after: returns nodes at which what is computed from some nodes can be joined.
    """
    data = _prepared(sheet, agreeing), _prepared(candidate, {*same})
    if not _are_other_forms(sheet, candidate, data):
        data = set(), set()  # other data, and no other code
    own = _sources(sheet, agreeing | data[0])
    others = _sources(candidate, {*same} | data[1])
    if not own or not others:  # the masks are all that differs
        data = set(), set()
        own, others = _sources(sheet, agreeing), _sources(candidate, {*same})
    if not own or not others or max(len(own), len(others)) > _MOST_SOURCES:
        return
    if _drop(sheet, own) or _drop(candidate, others):
        return
    calls = ({view.nodes[k].about for k in nodes} for view, nodes in ((sheet, own), (candidate, others)))
    functions = {sheet.function(k) for k in own} | {candidate.function(k) for k in others}
    if data[0] | data[1] and len(functions) == 1 and all(len(each) == 1 for each in calls):
        return  # one call of one function on both sides: the frameworks compute it otherwise
    together = [(own, others)]
    each = len(own) == len(others) <= _PLACES
    apart = [([k], [other]) for k, other in zip(own, others)] if each else together
    for groups in (apart, together) if len(own) > 1 else (apart,):
        ends = [(after(sheet, first), after(candidate, other_first)) for first, other_first in groups]
        for steps in sorted(product(range(_AFTER), repeat=2), key=sum):
            if any(step >= len(nodes) for pair in ends for step, nodes in zip(steps, pair)):
                continue
            cuts = [(nodes[steps[0]], other_nodes[steps[1]]) for nodes, other_nodes in ends]
            if any(sheet.formula.values[k].size != candidate.formula.values[other].size for k, other in cuts):
                continue
            between = [
                (_between(sheet, first, k), _between(candidate, other_first, other))
                for (first, other_first), (k, other) in zip(groups, cuts)
            ]
            rows = _other_count(sheet, candidate, data)
            texts = [rows] if rows else [_text(sheet, candidate, *calls_between) for calls_between in between]
            changes = {k: _graft(sheet, candidate.formula, k, other, same, data[1]) for k, other in cuts}
            for k, other, differences in _later(sheet, candidate, same, dict(cuts)):
                operands = zip(candidate.nodes[other].given, sheet.nodes[k].given)
                changes[k] = _graft(sheet, candidate.formula, k, other, {**same, **dict(operands)}, data[1])
                texts.append(f"{' and '.join(differences)} ({sheet.where(k)})")
            text = "; ".join(dict.fromkeys(texts))
            activation = len(texts) == 1 and sheet.nodes[cuts[0][0]].operation == "act" and not sum(steps)
            kind = "activation" if activation else "code"
            names = (
                _activations(sheet, candidate, *cuts[0]) if activation else _other_number(sheet, candidate, *cuts[0])
            )
            text_besides, surplus = _besides(sheet, candidate, *between[0])
            if surplus and texts == [text_besides]:
                kind, names = "activation_added", Both("", surplus)
            if names is None and len(texts) == 1:
                names = _functions(sheet, candidate, *between[0])
            at, other = map(min, groups[0])
            # Of many differences in what two authors wrote, most are no fault.
            few = text.count("; ") < _PARTS and not any(_takes_prepared(candidate, b[1], data[1]) for b in between)
            yield Edit(kind, "other code", text, changes, 4 + sum(steps), 0, at, few, other=other, values=names)


def _takes_prepared(view: FormulaView, nodes: Sequence[int], data: Collection[int]) -> bool:
    """Return True if nodes take rows at places that code has prepared which no call shows (in numpy): these may differ,
    and not the calls that take them.
    """
    given = {operand for k in nodes for operand in view.nodes[k].given}
    return any(k in data and view.formula.values[k].dtype.kind in "iu" and view.formula.values[k].ndim for k in given)


def _by_calls(sheet: FormulaView, candidate: FormulaView, strict: bool) -> Edit | None:
    """Return the edit that gives calls the candidate's numbers and arguments; `None` if other calls differ, too.

    A loop makes one call many times, and one author may compute a tensor twice: all calls of a round have one of a few
    differences. With them, the values after them agree up to the next calls that differ.

    Args:
        strict: True to compare nodes of one operation only: a number of another one may be the same by chance.
    """
    changes: dict[int, Change] = {}
    texts: dict[str, tuple[int, int]] = {}
    values: Sequence[np.ndarray] = sheet.formula.values
    for _ in range(_PLACES + 1):
        same, agreeing = _same_nodes(sheet, candidate, values, strict)
        if _equal(values[_end(sheet)], candidate.formula.values[_end(candidate)]):
            break
        # The ends differ, also where a node in between has the value of one by chance.
        own = _sources(sheet, agreeing - {_end(sheet)})
        others = _sources(candidate, {*same} - {_end(candidate)})
        if _drop(sheet, own) or _drop(candidate, others):
            return None
        partners = _partners(sheet, candidate, own, others, values)
        for k, other in partners.items():
            changes[k] = _graft(sheet, candidate.formula, k, other, same)
            texts.setdefault(" and ".join(_of_one_call(sheet, candidate, k, other)), (k, other))
        if not partners or len(texts) > _PLACES:
            return None
        get = sheet.formula.getter(changes)
        try:
            values = [get(k) if node.operation != "slopes" else values[k] for k, node in enumerate(sheet.nodes)]
        except (UnknownError, ValueError, IndexError):
            return None
    else:
        return None
    if not texts:
        return None
    text = "; ".join(f"{text} ({sheet.where(k)})" for text, (k, _) in texts.items())
    k, other = next(iter(texts.values()))
    kind = _NAMED.get(sheet.nodes[k].operation, "code") if len(texts) == 1 else "code"
    names: Both[Any] | None = _activations(sheet, candidate, k, other) if kind == "activation" else None
    if kind in ("code", _THRESHOLD) and len(texts) == 1:
        names = _other_number(sheet, candidate, k, other)
        kind = kind if names is not None else "code"
    if kind == "loss_function":
        names = Both(*(_HUBER[bool(view.nodes[n].how["divided"])] for view, n in ((sheet, k), (candidate, other))))
    rank = 0 if kind in ("loss_function", _THRESHOLD) else 4
    return Edit(kind, READ, text, changes, rank, at=k, other=other, values=names)


def _partners(
    sheet: FormulaView, candidate: FormulaView, own: Sequence[int], others: Sequence[int], values: Sequence[np.ndarray]
) -> dict[int, int]:
    """Return the partner of each node: the candidate's call on the same operands, with other numbers or arguments.

    A node without a partner is left out: what it is computed for may agree without it.
    """

    def equal(operand: int, theirs: int) -> bool:
        numbers = _is_constant(sheet, operand) and _is_constant(candidate, theirs)
        return numbers or _equal(values[operand], candidate.formula.values[theirs])

    partners: dict[int, int] = {}
    for k in own:
        fitting = [
            other
            for other in others
            if _of_one_call(sheet, candidate, k, other)
            and all(map(equal, sheet.nodes[k].given, candidate.nodes[other].given))
        ]
        results = [candidate.formula.values[other] for other in fitting]
        if results and all(_equal(results[0], result) for result in results):
            partners[k] = fitting[0]
    return partners


def _same_nodes(
    sheet: FormulaView, candidate: FormulaView, values: Sequence[np.ndarray], strict: bool = False
) -> tuple[dict[int, int], set[int]]:
    """Return the candidate's nodes whose values agree with a node of the reference's, with that node; and all nodes of
    the reference's with such values. Extents of 1 and the split of axes may differ.

    Args:
        values: the values of the reference's nodes.
        strict: True for nodes of the same operation only.
    """
    by_size: dict[tuple[int, bool], list[tuple[int, float]]] = {}
    for k, value in enumerate(values):
        key = value.size, bool(sheet.nodes[k].operation)
        by_size.setdefault(key, []).append((k, _largest(value)))
    same: dict[int, int] = {}
    agreeing: set[int] = set()
    behind = _leaves_behind(sheet), _leaves_behind(candidate)
    for k, value in enumerate(candidate.formula.values):
        operation, shape, largest = candidate.nodes[k].operation, value.shape, _largest(value)
        alike = [
            other
            for other, size in by_size.get((value.size, bool(operation)), ())
            # Most values differ in the largest one already.
            if abs(size - largest) <= _AGREE * size and _agree(values[other], value, size)
            if not strict or sheet.nodes[other].operation == operation
        ]
        # Of several nodes with these values, one of the same outputs (a model and its frozen copy may be equal),
        # of the same operation and shape, each once.
        used = {*same.values()}
        ranks = {
            other: (
                behind[0][other] != behind[1][k],
                sheet.nodes[other].operation != operation,
                values[other].shape != shape,
                other in used,
                other,
            )
            for other in alike
        }
        alike.sort(key=ranks.__getitem__)
        agreeing.update(alike)
        if alike:
            same[k] = alike[0]
    return same, agreeing


def agreeing_nodes(sheet: FormulaView, candidate: FormulaView) -> set[int]:
    """Return the nodes of a formula whose values the other side's formula has, too."""
    return _same_nodes(sheet, candidate, sheet.formula.values)[1]


def _leaves_behind(sheet: FormulaView) -> list[frozenset[int]]:
    """Return for each node the outputs of the model that it is computed from, by their place among the leaves."""
    leaves = {leaf.node: place for place, leaf in enumerate(getattr(sheet.formula, "leaves", ()))}
    behind: list[frozenset[int]] = []
    for k, node in enumerate(sheet.nodes):
        leaf = frozenset({leaves[k]} if k in leaves else ())
        behind.append(leaf.union(*(behind[g] for g in node.given)))
    return behind


def _largest(value: np.ndarray) -> float:
    """Return the largest absolute value; NaN for other than numbers."""
    return float(np.max(np.abs(value), initial=0.0)) if value.dtype.kind in "fiub" else math.nan


def _agree(value: np.ndarray, other: np.ndarray, size: float) -> bool:
    with np.errstate(all="ignore"):
        return bool(np.all(np.abs(np.ravel(value).astype(np.float64) - np.ravel(other)) <= _AGREE * size))


def _is_even(value: np.ndarray) -> bool:
    return value.size > 1 and _agree(value, value.flat[0], _largest(value))


def _equal(value: np.ndarray, other: np.ndarray) -> bool:
    return value.size == other.size and _agree(value, other, _largest(value))


def _sources(sheet: FormulaView, agreeing: set[int]) -> list[int]:
    """Return the nodes that do not agree, of operands that do.

    Nodes above a node that agrees are no sources: two authors compute it in different ways.
    """

    def agrees(k: int) -> bool:
        return k in agreeing or sheet.nodes[k].name == MADE or _is_constant(sheet, k)

    different = _different(sheet, agreeing)
    return [k for k in different if sheet.nodes[k].operation and all(map(agrees, sheet.nodes[k].given))]


def _drop(sheet: FormulaView, nodes: Sequence[int]) -> bool:
    """Return True if some of the nodes are dropouts: masks that are drawn differ without any difference in the code."""
    return any(sheet.nodes[k].operation == "dropped" for k in nodes)


def _different(sheet: FormulaView, agreeing: set[int]) -> list[int]:
    """Return the nodes from the end up to the nodes that agree, without these.

    An end whose slopes alone differ is a sum in which they cancel: then its terms are looked at.
    """
    waiting, different, cancels = [_end(sheet)], set[int](), _end(sheet) in agreeing
    while waiting:
        k = waiting.pop()
        if k not in agreeing and k not in different and not _is_constant(sheet, k):
            different.add(k)
            waiting += sheet.nodes[k].given
        elif k in agreeing and cancels and sheet.shape(k) == () and sheet.nodes[k].operation in _SUMS:
            waiting += sheet.nodes[k].given
    return sorted(different)


_SUMS = frozenset({"add", "sub", "neg", "reduced"})


def _end(sheet: FormulaView) -> int:
    """Return the node of the tensor that a formula is of, for one that ends in slopes, too."""
    end = sheet.formula.end
    return sheet.nodes[end].given[0] if sheet.nodes[end].operation == "slopes" else end


def _other_operands(
    sheet: FormulaView, candidate: FormulaView, same: dict[int, int], agreeing: set[int]
) -> Iterator[Edit]:
    """Yield edits of a call that takes another tensor in the candidate: one of two outputs, for example."""
    others = _different(candidate, {*same})
    for k in _different(sheet, agreeing):
        node = sheet.nodes[k]
        lone = [g for g in node.given if not sheet.nodes[g].operation and not sheet.nodes[g].name and g not in agreeing]
        if not node.operation or len(lone) != 1 or sheet.formula.values[lone[0]].size < _FEWEST:
            continue
        expected, graph = sheet.formula.values[lone[0]], candidate.graph
        recorded = map(graph.values, graph.by_size.get(expected.size, ()))
        has_it = any(values is not None and _equal(expected, values) for values in recorded)
        place = node.given.index(lone[0])
        for other in others:
            theirs = candidate.nodes[other]
            if theirs.operation != node.operation or len(theirs.given) != len(node.given) or theirs.how != node.how:
                continue
            values = [
                (sheet.formula.values[g], candidate.formula.values[h])
                for n, (g, h) in enumerate(zip(node.given, theirs.given))
                if n != place
            ]
            if not values or not all(_equal(*pair) for pair in values):
                continue
            taken = theirs.given[place]
            while candidate.nodes[taken].operation == "detach":
                taken = candidate.nodes[taken].given[0]
            if candidate.nodes[taken].operation and not has_it:
                continue  # the candidate takes no other tensor: its code has made another one of this
            text = (
                f"{sheet.where(k)} takes {candidate.named(taken)} of the candidate, "
                f"for {sheet.named(lone[0])} of the reference"
            )
            change = {k: _graft(sheet, candidate.formula, k, other, same)}
            yield Edit("call_input", "another operand", text, change, 3, at=k, other=other)


def _after(sheet: FormulaView, nodes: Sequence[int]) -> list[int]:
    """Return the first nodes that are computed from all of some nodes; one node alone is its own first."""
    common = set.intersection(*(sheet.formula.below([k]) for k in nodes))
    return [*islice((n for n in sorted(common) if sheet.nodes[n].operation != "slopes"), _AFTER)]


def _through(sheet: FormulaView, nodes: Sequence[int]) -> list[int]:
    """Return the first nodes that all goes through that is computed from some nodes: in between it is in parts."""
    below, end = {*sheet.formula.above(_end(sheet))} & sheet.formula.below(nodes), 0
    common, through = set.intersection(below, *(sheet.formula.below([k]) for k in nodes)), []
    for k in sorted(below):
        if k in common and end <= k:
            through.append(k)
        end = max([end, *(user for user in sheet.users(k) if user in below)])
    return through[:_AFTER]


def _between(sheet: FormulaView, first: Sequence[int], last: int) -> list[int]:
    """Return the nodes from some nodes to a later one."""
    above = sheet.formula.above(last)
    return [k for k in sorted(sheet.formula.below(first)) if k in above]


def _later(
    sheet: FormulaView, candidate: FormulaView, same: dict[int, int], partners: dict[int, int]
) -> Iterator[tuple[int, int, list[str]]]:
    """Yield calls of both sides that are made of the same, have other numbers or arguments, and come later."""
    alike = {k: other for other, k in same.items()} | partners
    later = candidate.formula.below(partners.values())
    in_loss = sheet.nodes[sheet.formula.end].operation == "slopes"
    for k in sorted(sheet.formula.below(partners)):
        node = sheet.nodes[k]
        # In a loss, a call with the same arguments comes first: a mean and a deviation may be of one tensor.
        for other in sorted(later, key=lambda n, how=node.how: (in_loss and candidate.nodes[n].how != how, n)):  # type: ignore[misc]
            theirs = candidate.nodes[other]
            if k in partners or theirs.operation != node.operation or len(theirs.given) != len(node.given):
                continue
            if all(
                alike.get(g) == h or (sheet.is_number(g) and candidate.is_number(h))
                for g, h in zip(node.given, theirs.given)
            ):
                alike[k] = other
                differences = _of_one_call(sheet, candidate, k, other)
                if differences:
                    yield k, other, differences
                break


def _prepared(sheet: FormulaView, agreeing: set[int]) -> set[int]:
    """Return the nodes, of more than one number, that are computed from data alone and do not agree: masks, indices,
    labels in another form.
    """
    data: set[int] = set()
    for k, node in enumerate(sheet.nodes):
        call = sheet.producer(k)
        given = node.name in (CONSTANT, MADE) or call is None or not (call.inputs or call.parameters)
        if k not in agreeing and (
            data.issuperset(node.given) if node.operation else given and node.name in (CONSTANT, MADE, "")
        ):
            data.add(k)
    used = {g for k, node in enumerate(sheet.nodes) if k not in data for g in node.given}
    return {k for k in data & used - agreeing if sheet.formula.values[k].size > 1}


def _are_other_forms(sheet: FormulaView, candidate: FormulaView, data: tuple[set[int], set[int]]) -> bool:
    """Return True if two sides' data may be the same in forms of each author's own: indices, and a mask.

    Tensors of one kind and size may be the same with other values, and so may those that one function gives. Data that
    only one side has are a mask, and what it is made of: no noise, and no labels.
    """
    for k, n in product(*data):
        value, other = sheet.formula.values[k], candidate.formula.values[n]
        if value.size == other.size and value.dtype.kind == other.dtype.kind:
            return False
        if sheet.function(k) == candidate.function(n) != "":
            return False
    nodes = [(view, k) for view, side in zip((sheet, candidate), data) for k in side]
    masks = [is_mask(view.formula.values[k]) and bool(view.formula.values[k].any()) for view, k in nodes]
    noise = any(view.is_float(k) and not mask for (view, k), mask in zip(nodes, masks))
    return all(data) or (any(masks) and not noise)


def _other_count(sheet: FormulaView, candidate: FormulaView, data: tuple[set[int], set[int]]) -> str:
    """Return the numbers of places that both sides' indices have as text; empty unless they differ.

    Indices of samples are together as long as one index of all.
    """
    sizes = [
        [
            view.formula.values[k].size
            for k in nodes
            if len(view.shape(k)) == 1 and view.formula.values[k].dtype.kind == "i"
        ]
        for view, nodes in ((sheet, data[0]), (candidate, data[1]))
    ]
    if {*sizes[0]} == {*sizes[1]} or sum(sizes[0]) == sum(sizes[1]) or any(len({*side}) != 1 for side in sizes):
        return ""
    return f"the candidate takes an index of {sizes[1][0]} places, the reference one of {sizes[0][0]}"


def _graft(
    sheet: FormulaView, formula: Formula, k: int, other: int, same: dict[int, int], data: Collection[int] = ()
) -> Change:
    """Return a change that computes a node as another formula's node, from the values of the nodes that agree.

    It raises `UnknownError` where the node is also computed from other inputs: then the code is not all that differs.
    """

    def change(get: Get, own: Any) -> np.ndarray:
        known: dict[int, np.ndarray] = {}

        def value(n: int, top: bool = False) -> np.ndarray:
            if n in known:
                return known[n]
            node = formula.nodes[n]
            if node.name in (CONSTANT, MADE) or node.operation == "detach" or n in data:
                known[n] = formula.values[n]
            elif n in same and not top:
                known[n] = get(same[n]).reshape(formula.values[n].shape)
            elif not node.operation:
                raise UnknownError(node.name)
            else:
                known[n] = np.asarray(OPERATIONS[node.operation](*map(value, node.given), **node.how))
            return known[n]

        return value(other, True).reshape(sheet.shape(k))

    return change


# -- words -------------------------------------------------------------------------------------------------------------


def _text(sheet: FormulaView, candidate: FormulaView, own: Sequence[int], others: Sequence[int]) -> str:
    """Return the difference of some calls as text."""
    sides = (sheet, own), (candidate, others)
    operations = [[view.nodes[k].operation for k in nodes] for view, nodes in sides]
    if operations[0] == operations[1]:
        # Of calls that follow each other, one is given something else.
        given = [(k, _of_one_call(sheet, candidate, k, other)) for k, other in zip(own, others)]
        given = [(k, differences) for k, differences in given if differences]
        if len(given) == 1:
            return f"{' and '.join(given[0][1])} ({sheet.where(given[0][0])})"
    calls = [dict.fromkeys(view.where(k) for k in nodes if view.nodes[k].operation) for view, nodes in sides]
    if max(map(len, calls)) > _FEW:
        short = _shared_text(sheet, candidate, own, others)
        if short:
            return short
    besides, _ = _besides(sheet, candidate, own, others)
    if besides:
        return besides
    if len(own) == len(others) == 1 and operations[0] == operations[1]:
        taken, theirs = (
            _other_names(candidate, others[0], sheet, own[0]),
            _other_names(sheet, own[0], candidate, others[0]),
        )
        if taken and theirs and taken != theirs:
            return f"{sheet.where(own[0])} takes {taken} of the candidate, for {theirs} of the reference"
    texts = [_calls_text(list(side)) for side in calls]
    if texts[0] == texts[1] and len(calls[0]) == 1:  # one call, which its arguments tell from the other one
        texts = [called(view.graph.trace.calls[view.nodes[nodes[0]].about]) for view, nodes in sides]
    return f"the candidate calls {texts[1]}, where the reference calls {texts[0]}"


def _functions(sheet: FormulaView, candidate: FormulaView, own: Sequence[int], others: Sequence[int]) -> Both[Any]:
    """Return the functions of some calls of both sides, as values of a cause."""
    sides = Both((sheet, own), (candidate, others))
    calls = sides.map(
        lambda side: {side[0].where(k): side[0].function(k) for k in side[1] if side[0].nodes[k].operation}
    )
    return calls.map(lambda functions: tuple((function, {}) for function in functions.values()))


def _besides(sheet: FormulaView, candidate: FormulaView, own: Sequence[int], others: Sequence[int]) -> tuple[str, str]:
    """Return the calls that one side alone makes as text, empty if there are others; and the activation, if it is one
    that the candidate alone calls.
    """
    unshared, after = _unshared_calls(sheet, candidate, own, others)
    if bool(unshared.reference) == bool(unshared.candidate) or after is None:
        return "", ""
    view, nodes = (sheet, unshared.reference) if unshared.reference else (candidate, unshared.candidate)
    surplus = [*dict.fromkeys(map(view.where, nodes))]
    if view is sheet:
        return f"the candidate leaves out {_calls_text(surplus)}, before {sheet.where(after[0])}", ""
    node = view.nodes[nodes[0]]
    if len(surplus) == 1 and node.operation == "act":
        activation = _activation(node.how)
        text = f"the candidate has the activation {activation} ({surplus[0]}), the reference none"
        return text, activation if len(nodes) == 1 else ""
    return f"the candidate calls {_calls_text(surplus)} besides, before {candidate.where(after[1])}", ""


def _unshared_calls(
    sheet: FormulaView, candidate: FormulaView, own: Sequence[int], others: Sequence[int]
) -> tuple[Both[list[int]], tuple[int, int] | None]:
    """Return the calls of both sides without those that both begin or end with, and the first call that both end with.

    Calls that only reshape are left out.
    """
    calls = Both(sheet, candidate).zip(Both(own, others))
    first, second = calls.map(lambda side: [k for k in side[1] if side[0].nodes[k].operation not in ("", "reshape")])

    def is_shared(k: int, n: int) -> bool:
        is_one = sheet.nodes[k].operation == candidate.nodes[n].operation
        return is_one and not _of_one_call(sheet, candidate, k, n)

    after = None
    while first and second and is_shared(first[-1], second[-1]):
        after = first.pop(), second.pop()
    while first and second and is_shared(first[0], second[0]):
        del first[0], second[0]
    return Both(first, second), after


def _other_names(view: FormulaView, k: int, partner: FormulaView, partner_node: int) -> str:
    """Return the names of a call's operands that are none of the partner's call."""
    values = [partner.formula.values[g] for g in partner.nodes[partner_node].given]
    operands = (g for g in view.nodes[k].given if not any(_equal(view.formula.values[g], value) for value in values))
    return " and ".join(dict.fromkeys(view.named(g) for g in operands))


def _calls_text(calls: list[str]) -> str:
    """Return calls as text; the place that all of them are in is named once, and of many calls their number."""
    places = {place for _, _, place in (call.rpartition(" in ") for call in calls)}
    if len(calls) > 1 and len(places) == 1 and all(" in " in call for call in calls):
        heads, more = [call.rpartition(" in ")[0] for call in calls], len(calls) - _FEW
        few = [*heads[:_FEW], f"{more} more"] if more > 1 else heads
        return f"{', then '.join(few)} in {places.pop()}"
    return ", then ".join(calls)


def _shared_text(sheet: FormulaView, candidate: FormulaView, own: Sequence[int], others: Sequence[int]) -> str:
    """Return the difference of many calls, most of which both sides make: what is given otherwise, and what is more.

    Empty if there is more than a few of either.
    """
    reference, other = (
        {view.where(k): k for k in nodes if view.nodes[k].operation}
        for view, nodes in ((sheet, own), (candidate, others))
    )
    given: dict[str, list[str]] = {}
    for where in reference:
        differences = _of_one_call(sheet, candidate, reference[where], other[where]) if where in other else []
        if differences:
            given.setdefault(" and ".join(differences), []).append(where)
    missing, surplus = ([where for where in a if where not in b] for a, b in ((reference, other), (other, reference)))
    # One author's layer calls what the other's loop calls.
    functions = {sheet.function(reference[where]) for where in missing}
    moved = functions & {candidate.function(other[where]) for where in surplus}
    for where in missing:
        partners = [
            other[each] for each in surplus if candidate.function(other[each]) == sheet.function(reference[where])
        ]
        differences = min((_of_one_call(sheet, candidate, reference[where], k) for k in partners), key=len, default=[])
        if differences:
            given.setdefault(" and ".join(differences), []).append(where)
    missing = [where for where in missing if sheet.function(reference[where]) not in moved]
    surplus = [where for where in surplus if candidate.function(other[where]) not in moved]
    if max(len(missing), len(surplus), len(given)) > _FEW:
        return ""
    texts = [f"{text} ({first_few(calls, 2)})" for text, calls in given.items()]
    texts += [f"left out: {', '.join(missing)}"] * bool(missing) + [f"added: {', '.join(surplus)}"] * bool(surplus)
    return "; ".join(texts)


# Names of settings of nodes that stand for arguments of several names.
_SPELLED = {"by": "the reduction"}


def _of_one_call(sheet: FormulaView, candidate: FormulaView, k: int, other: int) -> list[str]:
    """Return the arguments and numbers that differ in two calls of one function; empty for other functions."""
    node, other_node = sheet.nodes[k], candidate.nodes[other]
    if node.operation != other_node.operation or len(node.given) != len(other_node.given):
        return []
    if is_loss(sheet.function(k)) != is_loss(candidate.function(other)):
        return []  # a part of a loss function is no call of its own
    if node.operation == "act":
        names = [_activation(each.how) for each in (other_node, node)]
        return [] if names[0] == names[1] else [f"the activation is {names[0]} for the reference's {names[1]}"]
    if node.operation == "huber" and {**node.how, "divided": 0} == {**other_node.how, "divided": 0}:
        own_name, other_name = (_HUBER[bool(each.how["divided"])] for each in (node, other_node))
        return [f"the loss function is {other_name} for the reference's {own_name}"] if own_name != other_name else []
    texts = [
        f"{_SPELLED.get(name, name)} is {_value(other_node.how.get(name))} for the reference's "
        f"{_value(node.how.get(name))}"
        for name in {**node.how, **other_node.how}
        if node.how.get(name) != other_node.how.get(name)
        if not _one_meaning(sheet, candidate, name, k, other)
    ]
    if node.operation in ("cat", "stack"):
        order = _order(sheet, candidate, node.given, other_node.given)
        texts += [f"the parts are in the order {order}"] if order else []
    texts += _other_axes(sheet, candidate, k, other)
    numbers = _other_number(sheet, candidate, k, other)
    if numbers is not None:
        number, other_number = numbers
        if _scales_scores(sheet, k):
            texts.append(f"the scale before a softmax is {other_number:.6g} for the reference's {number:.6g}")
        else:
            texts.append(f"the number is {other_number:.6g} for the reference's {number:.6g}")
    return texts


def _other_number(sheet: FormulaView, candidate: FormulaView, k: int, other: int) -> Both[float] | None:
    """Return the numbers of two calls in the same place that differ, of both formulas; `None` if all are equal."""
    for operand, theirs in zip(sheet.nodes[k].given, candidate.nodes[other].given):
        if _is_constant(sheet, operand) and _is_constant(candidate, theirs):
            values = (view.formula.values[n] for view, n in ((sheet, operand), (candidate, theirs)))
            numbers = Both(*(float(np.ravel(each)[0]) for each in values))
            if not math.isclose(*numbers, rel_tol=1e-9):
                return numbers
    return None


def _other_axes(sheet: FormulaView, candidate: FormulaView, k: int, other: int) -> Iterator[str]:
    """Yield texts on operands of two calls that are broadcast along other axes."""
    shape = sheet.shape(k)
    for operand, theirs in zip(sheet.nodes[k].given, candidate.nodes[other].given):
        own_shape, their_shape = sheet.shape(operand), candidate.shape(theirs)
        if shape != candidate.shape(other) or not len(own_shape) == len(their_shape) == len(shape):
            continue
        if own_shape != their_shape and [n for n in own_shape if n > 1] == [n for n in their_shape if n > 1]:
            what = "mask" if candidate.formula.values[theirs].dtype.kind == "b" else "operand"
            shapes = [f"({', '.join(map(str, each))})" for each in (their_shape, own_shape)]
            yield f"the {what} of shape {shapes[0]} for the reference's {shapes[1]} is broadcast along other axes"


def _is_constant(sheet: FormulaView, k: int) -> bool:
    """Return True if a tensor is one number of the code: a literal, `full`, or a product with `ones`."""
    node, value = sheet.nodes[k], sheet.formula.values[k]
    if value.dtype.kind not in "fiu" or not value.size or np.ptp(value):
        return False
    return node.name in (CONSTANT, MADE) or (bool(node.operation) and all(_is_constant(sheet, g) for g in node.given))


def _scales_scores(sheet: FormulaView, k: int) -> bool:
    """Return True if a product or quotient goes into a softmax, through a mask at most."""
    below = sheet.below(k, 2)
    return sheet.nodes[k].operation in ("mul", "div") and any(sheet.nodes[n].operation == "softmax" for n in below)


def _order(sheet: FormulaView, candidate: FormulaView, given: Sequence[int], others: Sequence[int]) -> str:
    """Return the places, in the reference's call, of the parts of the candidate's; empty if they are not the same."""
    places: list[int] = []
    for other in others:
        value = candidate.formula.values[other]
        fitting = (n for n, k in enumerate(given) if n not in places and _equal(sheet.formula.values[k], value))
        place = next(fitting, None)
        if place is None:
            return ""
        places.append(place)
    return ", ".join(map(str, places)) if places != sorted(places) else ""


def _one_meaning(sheet: FormulaView, candidate: FormulaView, name: str, k: int, partner: int) -> bool:
    """Return True if an argument is one axis, counted from different ends, or one shape, with extents left out."""

    def counted(view: FormulaView, node: int) -> object:
        axis, ndim = view.nodes[node].how.get(name), len(view.shape(view.nodes[node].given[0]))
        return axis % ndim if isinstance(axis, int) and ndim else axis

    if name == "shape":
        return sheet.shape(k) == candidate.shape(partner)
    return name == "axis" and counted(sheet, k) == counted(candidate, partner)


def _activation(how: Mapping[str, Any]) -> str:
    number = how.get("number")
    what = ACTIVATION_NUMBERS.get(how["function"], "number")
    return str(how["function"]) if number is None else f"{how['function']} of {what} {number:.6g}"


def _activations(sheet: FormulaView, candidate: FormulaView, k: int, partner: int) -> Both[str] | None:
    """Return the names of two activations; `None` if one of the nodes is none."""
    nodes = Both(sheet.nodes[k], candidate.nodes[partner])
    return nodes.map(lambda node: _activation(node.how)) if {node.operation for node in nodes} == {"act"} else None


def _value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "not set" if value is None else str(value)


# -- code in words -----------------------------------------------------------------------------------------------------

# The longest text of one side's code, the deepest one that is tried, and the most steps from the end of it.
_LONGEST, _DEEPEST, _DOWN = 110, 9, 40
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "matmul": "@", "pow": "**", "rsub": "-", "rdiv": "/", "rpow": "**",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "logical_and": "&", "logical_or": "|",
}  # fmt: skip
_NEUTRAL = {"add": 0, "mul": 1}
_SUMMING = frozenset({"add", "sub", "neg", "sum", "mean"})
_SECOND = frozenset({"other", "y", "exponent", "1"})
_TARGETS = re.compile(r"\s*((?:[A-Za-z_]\w*\s*,\s*)*[A-Za-z_]\w*)\s*=(?!=)")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
# Values of a tensor of a trace; `None` if they are not known.
_Values = Callable[[int], "np.ndarray | None"]


def other_code(graphs: Both[Graph], values: Both[_Values], ends: Both[int]) -> Cause | None:
    """Return the cause that the code of both sides is not the same, with the code from tensors that agree to two
    tensors that differ; `None` if the traces do not show it.

    Args:
        graphs: the traces.
        values: returns the values of a tensor of either trace.
        ends: the tensors that differ.
    """
    if not _are_apart(values, ends):
        return None
    agreement = _agreeing(graphs, values, ends)
    agreeing = agreement.partners
    surplus = _only_there(graphs, agreement, ends)
    ends = _first_apart(graphs, agreement, ends) or _narrowed(graphs, values, agreement, ends)
    calls = ends.zip(graphs).map(lambda side: side[1].producers.get(side[0]))
    if calls.reference is None or calls.candidate is None:
        return None
    codes = [_Code(graph) for graph in graphs]
    lines = {call.line.code for graph in graphs for call in graph.trace.calls if call.line is not None}
    used = {name for line in lines for name in _IDENTIFIER.findall(line)}
    letters = (letter for letter in "abcdefghijklmnopqrstuvwxyz" if letter not in used)
    names: Both[dict[int, str]] = Both({}, {})
    for candidate, reference in agreeing.items():
        variables = codes[0].variable(reference), codes[1].variable(candidate)
        names.reference[reference] = names.reference.get(reference) or variables[0] or variables[1]
        names.candidate[candidate] = variables[1] or variables[0]
    for code, side, others in zip(codes, names, names.swapped()):
        code.names, code.letters = side, letters
        code.partners = agreeing if others is names.reference else {r: c for c, r in agreeing.items()}
        code.others = others
    makers = surplus.zip(graphs).map(lambda side: None if side[0] is None else side[1].producers[side[0]])
    for code, name, tensor in zip(codes, ("reference", "candidate"), surplus):
        if tensor is not None:
            text = f"other code: only the {name} computes `{code.source_text(tensor)}`"
            return Cause("code", text, lines=makers.map(lambda call: None if call is None else call.line))
    texts = [code.source_text(end) for code, end in zip(codes, ends)]
    if not all(texts) or len({*map(_plain, texts)}) == 1 or not codes[0].unwritten.isdisjoint(codes[1].unwritten):
        return None  # the code that differs may be that of a variable
    text = f"other code: the candidate computes `{texts[1]}`, where the reference computes `{texts[0]}`"
    data = [sorted(code.data & {*_IDENTIFIER.findall(shown)}) for code, shown in zip(codes, texts)]
    if all(data):
        note = (
            f"`{data[1][0]}` holds other values than `{data[0][0]}`: other labels or data, or a table that is made "
            "otherwise"
        )
        text = f"{text}; {note}"
    return Cause("code", text, lines=calls.map(lambda call: None if call is None else call.line))


@dataclass
class _Agreement:
    """Tensors of both traces with the same values.

    Attributes:
        partners: tensors of the candidate that agree with one of the reference's, also with rows in another order.
        twins: tensors of the reference that agree with one of the candidate's, each with the first one of its values.
        opposites: tensors of the reference and of the candidate that agree except for the sign, or are inverted masks.
    """

    partners: dict[int, int]
    twins: dict[int, int]
    opposites: Both[set[int]]


def _agreeing(graphs: Both[Graph], values: Both[_Values], ends: Both[int]) -> _Agreement:
    """Return the tensors that agree, of those that two ends are computed from."""
    by_size: dict[int, list[tuple[int, np.ndarray, float]]] = {}
    for tensor in _behind(graphs.reference, ends.reference):
        value = values.reference(tensor)
        if value is not None and value.size:
            by_size.setdefault(value.size, []).append((tensor, value, _largest(value)))
    agreement = _Agreement({}, {}, Both(set(), set()))
    for tensor in _behind(graphs.candidate, ends.candidate):
        value = values.candidate(tensor)
        if value is None or not value.size or tensor == ends.candidate:
            continue
        largest = _largest(value)
        near = [
            (partner, theirs)
            for partner, theirs, size in by_size.get(value.size, ())
            if abs(size - largest) <= _AGREE * size and partner != ends.reference
        ]
        alike = [partner for partner, theirs in near if _agree(theirs, value, largest)]
        call = graphs.candidate.producers.get(tensor)
        if not alike and value.size >= _ENOUGH and largest and not _is_data(graphs.candidate, tensor):
            ordered = np.sort(np.ravel(value))
            alike = [partner for partner, theirs in near if _agree(np.sort(np.ravel(theirs)), ordered, largest)]
        if alike:
            makers = ((partner, graphs.reference.producers.get(partner)) for partner in alike)
            same = (partner for partner, maker in makers if maker and call and same_name(maker, call))
            agreement.partners[tensor] = next(same, alike[0])
            for partner in alike:
                agreement.twins.setdefault(partner, agreement.twins.get(alike[0], alike[0]))
        elif value.dtype.kind in "fb" and largest:
            opposites = [
                partner
                for partner, theirs in near
                if theirs.dtype.kind in "fb" and _agree(_opposite(theirs), value, largest)
            ]
            agreement.opposites.reference.update(opposites)
            agreement.opposites.candidate.update([tensor] if opposites else [])
    return agreement


def _opposite(values: np.ndarray) -> np.ndarray:
    """Return values with the other sign; a mask inverted."""
    return 1.0 - values if is_mask(values) else -values


def _first_apart(graphs: Both[Graph], agreement: _Agreement, ends: Both[int]) -> Both[int] | None:
    """Return the outputs of the first calls of both sides that compute something else of the same tensors; `None` if
    some first call has no partner.
    """
    firsts, inputs = _first_calls(graphs, agreement, ends)
    pairs = [
        Both(reference, candidate)
        for reference, takes in zip(firsts.reference, inputs.reference)
        for candidate, others in zip(firsts.candidate, inputs.candidate)
        if sorted(takes) == sorted(others) and -1 not in takes
    ]
    pairs = [
        calls
        for calls in pairs
        if not same_name(*calls) or given_otherwise(calls, calls.zip(graphs).map(lambda side: axes_of(*side)))
    ]
    paired = {id(call) for calls in pairs for call in calls}
    if not pairs or any(id(call) not in paired for calls in firsts for call in calls):
        return None
    return pairs[0].map(lambda call: call.outputs[0].tensor)


def _only_there(graphs: Both[Graph], agreement: _Agreement, ends: Both[int]) -> Both[int | None]:
    """Return what one side makes of agreeing tensors where the other side takes these themselves; `None` elsewhere."""
    firsts, _ = _first_calls(graphs, agreement, ends)
    computing = firsts.map(lambda calls: [call for call in calls if not is_looking(call)])
    if bool(computing.reference) == bool(computing.candidate):
        return Both(None, None)
    agreeing = Both(agreement.twins.keys(), agreement.partners.keys())
    graph, (end, stops) = graphs.zip(ends.zip(agreeing)).swapped(not computing.reference).candidate
    if any(not call.inputs for call in graph.back(end, stops.__contains__)):
        return Both(None, None)  # the other side makes something of its own instead
    results: list[int | None] = []
    for graph, end, calls in zip(graphs, ends, computing):
        reached = {operand.tensor for call in calls for operand in call.outputs}
        results.append(None)
        for call in graph.back(end, lambda _: False) if reached else ():
            if results[-1] is None and not reached.isdisjoint(operand.tensor for operand in call.inputs):
                reached |= {operand.tensor for operand in call.outputs}
                results[-1] = call.outputs[0].tensor if len(call.inputs) > 1 else None
    # Where the other side takes parts of a tensor, what this side makes stands for the tensor as a whole.
    for place, (others, graph) in enumerate(zip(firsts.swapped(), graphs.swapped())):
        parts = {graph.size(c.inputs[0].tensor) for c in others if is_looking(c) and not _is_whole(c, graph)}
        result = results[place]
        if parts and result is not None and (graphs.candidate if place else graphs.reference).size(result) not in parts:
            results[place] = None
    return Both(*results)


def _is_whole(call: TracedCall, graph: Graph) -> bool:
    """Return True if a call hands all values of its input on: a part of a tensor is not the tensor."""
    return is_looking(call) and graph.size(call.outputs[0].tensor) >= graph.size(call.inputs[0].tensor)


def _first_calls(
    graphs: Both[Graph], agreement: _Agreement, ends: Both[int]
) -> tuple[Both[list[TracedCall]], Both[list[list[int]]]]:
    """Return the calls before two ends whose inputs all agree and whose outputs do not, and the inputs of each call as
    tensors of the reference; -1 for one that agrees except for the sign. None if something else goes in, too.
    """
    firsts: Both[list[TracedCall]] = Both([], [])
    inputs: Both[list[list[int]]] = Both([], [])
    partners = Both({tensor: tensor for tensor in agreement.twins}, agreement.partners)
    for graph, end, same, opposites, calls, rows in zip(graphs, ends, partners, agreement.opposites, firsts, inputs):
        agreeing = same.keys() | opposites
        for call in graph.back(end, agreeing.__contains__):
            tensors = [operand.tensor for operand in call.inputs]
            if not {*tensors} <= agreeing | graph.producers.keys():
                return Both([], []), Both([], [])  # other data, or the same in other tensors
            if call.function and tensors and agreeing.issuperset(tensors):
                calls.append(call)
                rows.append([agreement.twins.get(same.get(tensor, -1), -1) for tensor in tensors])
    return firsts, inputs


def _is_data(graph: Graph, tensor: int) -> bool:
    """Return True if no traced call computes a tensor: in another order it holds other data."""
    call = graph.producers.get(tensor)
    while call is not None and is_looking(call) and call.inputs:
        call = graph.producers.get(call.inputs[0].tensor)
    return call is None


# The fewest numbers that agree in another order by no chance.
_ENOUGH = 6


def _behind(graph: Graph, end: int) -> list[int]:
    """Return a tensor and those that it is computed from."""
    calls = graph.back(end, lambda _: False)
    return [*dict.fromkeys([end, *(o.tensor for call in calls for o in (*call.inputs, *call.outputs))])]


def _narrowed(graphs: Both[Graph], values: Both[_Values], agreement: _Agreement, ends: Both[int]) -> Both[int]:
    """Return the tensors nearest to those that agree, from which both sides compute two tensors alike."""

    def first_root(tensor: int) -> int:
        tensor = _root(graphs.reference, tensor)
        return agreement.twins.get(tensor, tensor)

    agreeing = {candidate: first_root(reference) for candidate, reference in agreement.partners.items()}
    for _ in range(_DOWN):
        terms = graphs.zip(ends).map(lambda side: _terms(*side))
        terms = replace(terms, reference=[*map(first_root, terms.reference)])
        differing = _without_partners(terms, agreeing)
        if min(differing.map(len)) == 0 or max(differing.map(len)) > 1:
            return ends
        after = differing.map(lambda side: side[0])
        calls = after.zip(graphs).map(lambda side: side[1].producers.get(side[0]))
        if after != ends:
            if not _are_apart(values, after):
                return ends
            ends = after  # one term of a sum differs
            continue
        if calls.reference is None or calls.candidate is None or not same_name(calls.reference, calls.candidate):
            return ends
        makers = Both(calls.reference, calls.candidate)
        if given_otherwise(makers, makers.zip(graphs).map(lambda side: axes_of(*side))):
            return ends
        operands = makers.map(lambda call: [operand.tensor for operand in call.inputs])
        operands = replace(operands, reference=[*map(first_root, operands.reference)])
        differing = _without_partners(operands, agreeing)
        if differing.map(len) != Both(1, 1) or len(operands.reference) != len(operands.candidate):
            return ends
        after = differing.map(lambda side: side[0])
        if not _are_apart(values, after):
            return ends
        ends = after
    return ends


def terms_apart(graphs: Both[Graph], values: Both[_Values], ends: Both[int]) -> Both[int]:
    """Return the first terms that differ of two sums that agree, as the terms cancel; the sums if no terms differ."""
    waiting = [ends]
    for pair in islice(waiting, _DOWN):
        if _are_apart(values, pair):
            return pair
        makers = pair.zip(graphs).map(lambda side: side[1].producers.get(side[0]))
        if makers.reference is None or makers.candidate is None or not same_name(makers.reference, makers.candidate):
            continue
        if makers.reference.function in _SUMMING:
            calls = Both(makers.reference, makers.candidate)
            waiting += _term_pairs(values, calls.map(lambda call: [operand.tensor for operand in call.inputs]))
    return ends


def _term_pairs(values: Both[_Values], terms: Both[list[int]]) -> list[Both[int]]:
    """Return the pairs of terms that agree, and the two that are left if there is one on each side."""
    pairs, rest = [], [*terms.candidate]
    alone = []
    for term in terms.reference:
        value = values.reference(term)
        theirs = [(other, values.candidate(other)) for other in rest]
        partner = next((k for k, v in theirs if value is not None and v is not None and _equal(value, v)), None)
        if partner is None:
            alone.append(term)
        else:
            rest.remove(partner)
            pairs.append(Both(term, partner))
    return [*pairs, Both(alone[0], rest[0])] if len(alone) == len(rest) == 1 else pairs


def _are_apart(values: Both[_Values], ends: Both[int]) -> bool:
    """Return True if two tensors of one size are known to differ."""
    reference, candidate = (values_of(end) for values_of, end in zip(values, ends))
    if reference is None or candidate is None or reference.size != candidate.size:
        return False
    return not _equal(reference, candidate)


def _without_partners(tensors: Both[list[int]], agreeing: Mapping[int, int]) -> Both[list[int]]:
    """Return the tensors of either side that agree with none of the other side's."""
    reference = [*tensors.reference]
    candidate = []
    for tensor in tensors.candidate:
        if agreeing.get(tensor) in reference:
            reference.remove(agreeing[tensor])
        else:
            candidate.append(tensor)
    return Both(reference, candidate)


def _root(graph: Graph, tensor: int) -> int:
    """Return the tensor that a sum with 0 and a product with 1 are made of, such as those of `sum`."""
    for _ in range(_DOWN):
        call = graph.producers.get(tensor)
        number = None if call is None or len(call.inputs) != 1 else _NEUTRAL.get(str(call.function))
        if call is None or number is None or [*call.arguments.values()] != [number]:
            break
        tensor = call.inputs[0].tensor
    return tensor


def _terms(graph: Graph, tensor: int) -> list[int]:
    """Return the terms of a sum; the tensor alone if it is no sum."""
    call = graph.producers.get(tensor)
    if call is None or call.function != "add" or len(call.inputs) != 2:
        return [_root(graph, tensor)]
    return [term for operand in call.inputs for term in _terms(graph, operand.tensor)]


class _Code:
    """The code of one side as text.

    Args:
        graph: the trace.

    Attributes:
        names: the names of tensors that agree with the other side's.
        data: the names of tensors that no traced call returns and that do not agree.
        unwritten: the names in the last text of tensors that do not agree, for whose code there is no room.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        #: The positions of the calls that return a tensor, a function's and those of the layers around it.
        self._makers: dict[int, list[int]] = {}
        for place, call in enumerate(graph.trace.calls):
            for operand in call.outputs:
                self._makers.setdefault(operand.tensor, []).append(place)
        self.names: dict[int, str] = {}
        self.data: set[str] = set()
        self.unwritten: set[str] = set()
        self.others: dict[int, str] = {}
        self.partners: Mapping[int, int] = {}
        self.letters: Iterator[str] = iter(())

    def source_text(self, end: int) -> str:
        """Return the code of a tensor: as deep as there is room for."""
        best, unwritten = "", self.unwritten
        for depth in range(1, _DEEPEST):
            self.unwritten = set()
            text = self._of(end, depth, True)
            if best and len(text) > _LONGEST:
                break
            best, unwritten = text, self.unwritten
        self.unwritten = unwritten
        return best

    def variable(self, tensor: int) -> str:
        """Return the name of the variable that a tensor is assigned to, as its line of code shows it; else empty."""
        calls = self._graph.trace.calls
        for place in reversed(self._makers.get(tensor, ())):
            call, line = calls[place], calls[place].line
            match = None if line is None else _TARGETS.match(line.code)
            after = calls[place + 1].line if place + 1 < len(calls) else None
            if line is None or match is None or (after is not None and after[:2] == line[:2]):
                continue  # a part of what the line computes
            targets = [target.strip() for target in match[1].split(",")]
            places = [operand.tensor for operand in call.outputs]
            if len(targets) == len(places):
                return targets[places.index(tensor)]
        return ""

    def _of(self, tensor: int, depth: int, outermost: bool = False) -> str:
        if tensor in self.names or (not outermost and self._graph.producers.get(tensor) is None):
            return self._named(tensor)
        call = self._graph.producers.get(tensor)
        if call is None or (depth <= 0 and not is_looking(call)):
            name = "" if call is None else self.variable(tensor)
            self.unwritten |= {name} - {""}
            return name or "..."
        inner = [self._of(operand.tensor, depth - (not is_looking(call))) for operand in call.inputs]
        slots = [operand.slot for operand in call.inputs]
        inner = [f"{slot}={text}" if "mask" in slot else text for slot, text in zip(slots, inner)]
        inner += [name.rpartition("/")[2] for name in call.parameters if call.function]
        if is_looking(call) and call.function != "detach" and inner and (len(inner) == 1 or call.function == "getitem"):
            part = any(o.tensor in self.names for o in call.inputs[:1]) and not _is_whole(call, self._graph)
            key = call.arguments.get("key", call.arguments.get("item") if part else None)
            if not (outermost or part) or key is None:
                return inner[0]  # the same values, or their rows in another order
            return f"{inner[0]}[{', '.join(map(str, key)) if isinstance(key, list) else key}]"
        if not call.function:
            return f"{call.layer_type}({', '.join(inner)})"
        sign = _INFIX.get(call.function)
        number = next((each for each in call.arguments.items() if type(each[1]) in (int, float)), None)
        if call.function in ("full", "tensor") and not inner:
            return self._named(tensor) if number is None else str(number[1])
        if sign and len(inner) == 1 and number is not None:
            first = number[0] not in _SECOND or call.function in ("rsub", "rdiv", "rpow")
            inner = [f"{number[1]:.6g}", *inner] if first else [*inner, f"{number[1]:.6g}"]
        if sign and len(inner) == 2:
            return f"{_part(inner[0])} {sign} {_part(inner[1])}"
        if call.function == "neg" and inner:
            return f"-{_part(inner[0])}"
        return f"{call.function}({', '.join([*inner, *arguments_text(call, usual=False)])})"

    def _named(self, tensor: int) -> str:
        if not self.names.get(tensor):
            partner = self.partners.get(tensor)
            name = (self.others.get(partner, "") if partner is not None else "") or next(self.letters, "x")
            self.names[tensor] = name
            if partner is not None:
                self.others[partner] = name
            else:
                self.data.add(name)
        return self.names[tensor]


def _plain(text: str) -> str:
    """Return a text of code in which a layer is spelled as the function that it calls."""
    return re.sub(r", \w+=[^,()]*|_", "", text).lower()


def _part(text: str) -> str:
    """Return the code of an operand, in parentheses if it is a sum or a product itself."""
    depth = 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == " " and not depth:
            return f"({text})"
    return text
