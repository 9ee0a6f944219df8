"""The calls at which two formulas of one tensor diverge, found by the values of their nodes.

Nodes of both sides whose values agree are the same. A call of the candidate that has the same operands as the
reference's, and another value, is where the code differs: if its result in the reference's formula gives the
candidate's tensor, nothing else does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any

import numpy as np

from padiff.compare.diagnose.computing.edit import Edit, FormulaView
from padiff.compare.diagnose.computing.formula import Change, Formula, Get, UnknownError
from padiff.compare.diagnose.computing.operations import OPERATIONS
from padiff.compare.diagnose.computing.solving import ACTIVATION_NUMBERS
from padiff.compare.diagnose.computing.writing import CONSTANT

# Largest relative error of values that agree. Chosen: above rounding, below a fault that can be seen.
_AGREE = 1e-4
# The most nodes after a divergence that may be part of it, on each side, and the most places.
_AFTER, _PLACES = 5, 3


def divergences(sheet: FormulaView, candidate: FormulaView) -> Iterator[Edit]:
    """Yield edits that put calls of the candidate into the reference's formula, the fewest calls first.

    Args:
        sheet: the reference's formula.
        candidate: the candidate's formula of the same tensor.
    """
    same, agreeing = _same_nodes(sheet, candidate)
    own = _sources(sheet, agreeing)
    others = _sources(candidate, {*same})
    if not own or not others or len(own) > _PLACES or len(others) > _PLACES:
        return
    together = [(own, others)]
    apart = [([k], [other]) for k, other in zip(own, others)] if len(own) == len(others) else together
    for groups in (apart, together) if len(own) > 1 else (apart,):
        ends = [(_after(sheet, first), _after(candidate, other_first)) for first, other_first in groups]
        for steps in sorted(product(range(_AFTER), repeat=2), key=sum):
            if any(step >= len(nodes) for pair in ends for step, nodes in zip(steps, pair)):
                continue
            cuts = [(after[steps[0]], other_after[steps[1]]) for after, other_after in ends]
            if any(sheet.shape(k) != candidate.shape(other) for k, other in cuts):
                continue
            texts = [
                _text(sheet, candidate, _between(sheet, first, k), _between(candidate, other_first, other))
                for (first, other_first), (k, other) in zip(groups, cuts)
            ]
            changes = {k: _graft(candidate.formula, other, same) for k, other in cuts}
            for k, other, differences in _later(sheet, candidate, same, dict(cuts)):
                operands = zip(candidate.nodes[other].given, sheet.nodes[k].given)
                changes[k] = _graft(candidate.formula, other, {**same, **dict(operands)})
                texts.append(f"{' and '.join(differences)} ({sheet.where(k)})")
            text = "; ".join(dict.fromkeys(texts))
            activation = len(texts) == 1 and sheet.nodes[cuts[0][0]].operation == "act" and not sum(steps)
            kind = "activation" if activation else "code"
            yield Edit(kind, "other code", text, changes, 4 + sum(steps), at=cuts[0][0], other=cuts[0][1])


def _same_nodes(sheet: FormulaView, candidate: FormulaView) -> tuple[dict[int, int], set[int]]:
    """Return the candidate's nodes whose values agree with a node of the reference's, with that node; and all nodes of
    the reference's with such values.
    """
    by_shape: dict[tuple[tuple[int, ...], bool], list[tuple[int, float]]] = {}
    for k, value in enumerate(sheet.formula.values):
        key = value.shape, bool(sheet.nodes[k].operation)
        by_shape.setdefault(key, []).append((k, _largest(value)))
    same: dict[int, int] = {}
    agreeing: set[int] = set()
    for k, value in enumerate(candidate.formula.values):
        operation, largest = candidate.nodes[k].operation, _largest(value)
        alike = [
            other
            for other, size in by_shape.get((value.shape, bool(operation)), ())
            # Most values differ in the largest one already.
            if abs(size - largest) <= _AGREE * size and _agree(sheet.formula.values[other], value, size)
        ]
        # Of several nodes with these values, one of the same operation, each once.
        used = {*same.values()}
        alike.sort(key=lambda other: (sheet.nodes[other].operation != operation, other in used, other))
        agreeing.update(alike)
        if alike:
            same[k] = alike[0]
    return same, agreeing


def _largest(value: np.ndarray) -> float:
    """Return the largest absolute value; NaN for other than numbers."""
    return float(np.max(np.abs(value), initial=0.0)) if value.dtype.kind in "fiub" else math.nan


def _agree(value: np.ndarray, other: np.ndarray, size: float) -> bool:
    with np.errstate(all="ignore"):
        return bool(np.all(np.abs(value.astype(np.float64) - other) <= _AGREE * size))


def _sources(sheet: FormulaView, agreeing: set[int]) -> list[int]:
    """Return the nodes that do not agree, of operands that do."""

    def agrees(k: int) -> bool:
        return k in agreeing or sheet.is_number(k)

    needed = {*sheet.formula.above(sheet.formula.end)}
    return [
        k
        for k in sorted(needed)
        if not agrees(k) and sheet.nodes[k].operation not in ("", "slopes") and all(map(agrees, sheet.nodes[k].given))
    ]


def _after(sheet: FormulaView, nodes: Sequence[int]) -> list[int]:
    """Return the first nodes that are computed from all of some nodes; one node alone is its own first."""
    common = set.intersection(*(sheet.formula.below([k]) for k in nodes))
    return [*islice((n for n in sorted(common) if sheet.nodes[n].operation != "slopes"), _AFTER)]


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
    for k in sorted(sheet.formula.below(partners)):
        node = sheet.nodes[k]
        for other in sorted(later):
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


def _graft(formula: Formula, k: int, same: dict[int, int]) -> Change:
    """Return a change that computes a node of another formula, from the values of the nodes that agree.

    It raises `UnknownError` where the node is also computed from other inputs: then the code is not all that differs.
    """

    def change(get: Get, own: Any) -> np.ndarray:
        known: dict[int, np.ndarray] = {}

        def value(n: int, top: bool = False) -> np.ndarray:
            if n in known:
                return known[n]
            node = formula.nodes[n]
            if node.name == CONSTANT:
                known[n] = formula.values[n]
            elif n in same and not top:
                known[n] = get(same[n])
            elif not node.operation:
                raise UnknownError(node.name)
            else:
                known[n] = np.asarray(OPERATIONS[node.operation](*map(value, node.given), **node.how))
            return known[n]

        return value(k, True)

    return change


# -- words -------------------------------------------------------------------------------------------------------------


def _text(sheet: FormulaView, candidate: FormulaView, own: Sequence[int], others: Sequence[int]) -> str:
    """Return the difference of some calls as text."""
    if len(own) == len(others) == 1:
        differences = _of_one_call(sheet, candidate, own[0], others[0])
        if differences:
            return f"{' and '.join(differences)} ({sheet.where(own[0])})"
    calls = _calls(sheet, own), _calls(candidate, others)
    return f"the candidate calls {calls[1]}, where the reference calls {calls[0]}"


def _of_one_call(sheet: FormulaView, candidate: FormulaView, k: int, other: int) -> list[str]:
    """Return the arguments and numbers that differ in two calls of one function; empty for other functions."""
    node, other_node = sheet.nodes[k], candidate.nodes[other]
    if node.operation != other_node.operation or len(node.given) != len(other_node.given):
        return []
    if node.operation == "act":
        names = [_activation(each.how) for each in (other_node, node)]
        return [] if names[0] == names[1] else [f"the activation is {names[0]} for the reference's {names[1]}"]
    texts = [
        f"{name} is {_value(other_node.how.get(name))} for the reference's {_value(node.how.get(name))}"
        for name in {**node.how, **other_node.how}
        if node.how.get(name) != other_node.how.get(name)
    ]
    for operand, theirs in zip(node.given, other_node.given):
        if sheet.is_number(operand) and candidate.is_number(theirs):
            numbers = (
                float(np.ravel(view.formula.values[n])[0]) for view, n in ((sheet, operand), (candidate, theirs))
            )
            number, other_number = numbers
            if not math.isclose(number, other_number, rel_tol=1e-9):
                texts.append(f"the number is {other_number:.6g} for the reference's {number:.6g}")
    return texts


def _activation(how: Mapping[str, Any]) -> str:
    number = how.get("number")
    what = ACTIVATION_NUMBERS.get(how["function"], "number")
    return str(how["function"]) if number is None else f"{how['function']} of {what} {number:.6g}"


def _value(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "not set" if value is None else str(value)


def _calls(sheet: FormulaView, nodes: Sequence[int]) -> str:
    names = [sheet.where(k) for k in nodes if sheet.nodes[k].operation]
    return ", then ".join(dict.fromkeys(names))
