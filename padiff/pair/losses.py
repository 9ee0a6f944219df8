"""Pairing of the inputs and results of loss functions, by their roles in the loss, call by call.

The same loss can be written in different ways, so only tensors that are certainly the same quantity are paired: calls
of a function that both sides call equally often, and tensors of these calls with equally many elements.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from padiff.errors import RunFolderError, SketchOnlyError
from padiff.pair.layouts import layout_between
from padiff.pair.parameters import RecordPair, alone
from padiff.records import BROADCAST, RESHAPED, SAME, Both, Layout, Record, is_of_loss, loss_role

# Largest relative distance of two tensors of the same quantity, while the runs still agree. Chosen.
_ALIKE = 0.1
#: Roles that distinguish one call from another: the labels in most losses, else the predictions.
_TELLING = ("labels", "target", "logits", "prediction", "log_probabilities", "probabilities", "scores", "first")
_INTEGERS = ("int", "uint", "bool")
# Labels have the same meaning for all loss functions.
_LABELS = "labels"


@dataclass(frozen=True, eq=False)
class _Call:
    """Call of a loss function: its records by role; role ``0`` is the result."""

    function: str
    roles: Mapping[str, Record]


def pair_losses(records: Both[Sequence[Record]]) -> list[RecordPair]:
    """Pair the records of the loss functions of a step."""
    calls = records.map(_calls)
    pairs: list[RecordPair] = []
    waiting: Both[list[_Call]] = Both([], [])
    for function in dict.fromkeys(call.function for side in calls for call in side):
        same = Both(*([call for call in side if call.function == function] for side in calls))
        matched = _matched(same) if len(same.reference) == len(same.candidate) else []
        for reference, candidate in matched:
            pairs += _pair_roles(reference, candidate)
        for unmatched, side, matched_calls in zip(waiting, same, zip(*matched) if matched else ((), ())):
            unmatched += [call for call in side if all(call is not call_matched for call_matched in matched_calls)]
    labels = waiting.map(lambda side: [call for call in side if _LABELS in call.roles])
    if len(labels.reference) == len(labels.candidate) == 1:
        # One function may take logits, the other log-probabilities: the labels are the same quantity.
        (reference,), (candidate,) = labels
        pairs += _pair_roles(reference, candidate, only=_LABELS)
        waiting = waiting.zip(labels).map(lambda side: [call for call in side[0] if call is not side[1][0]])
    return pairs + alone(waiting.map(lambda side: [record for call in side for record in call.roles.values()]))


def identified_by_values(records: Iterable[Record]) -> bool:
    """Return True if values are needed to pair a step's loss calls: one function is called several times."""
    functions = [call.function for call in _calls([record for record in records if is_of_loss(record)])]
    return len(set(functions)) < len(functions)


def _calls(records: Sequence[Record]) -> list[_Call]:
    roles_by_call: dict[tuple[str, int], dict[str, Record]] = defaultdict(dict)
    for record in records:
        roles_by_call[record.slot.partition("()")[0], record.call][loss_role(record.slot)] = record
    return [_Call(function, roles) for (function, _), roles in roles_by_call.items()]


def _matched(calls: Both[list[_Call]]) -> list[tuple[_Call, _Call]]:
    """Return pairs of calls: in order, unless their inputs show another pairing."""
    in_order = list(zip(*calls))
    if len(in_order) == 1:
        return in_order
    if all(_alike(a, b) for a, b in in_order):
        return in_order
    candidates, matches = list(calls.candidate), []
    for call in calls.reference:
        partner = next((candidate for candidate in candidates if _alike(call, candidate)), None)
        if partner is not None:
            candidates.remove(partner)
            matches.append((call, partner))
    return matches


def _alike(a: _Call, b: _Call) -> bool:
    """Return True if the distinguishing inputs of two calls agree approximately."""
    for role in _TELLING:
        expected, actual = a.roles.get(role), b.roles.get(role)
        if expected is not None and actual is not None:
            return _agree(expected, actual)
    return False


def _agree(a: Record, b: Record) -> bool:
    layout = _layout(a.shape, b.shape)
    if layout is None:
        return False
    try:
        if a.sketch is not None or b.sketch is not None:
            return a.sketch is not None and b.sketch is not None and _near(a.sketch.projection, b.sketch.projection)
        expected, actual = a.value, layout.apply(b.value, a.shape).reshape(a.shape)
    except (RunFolderError, SketchOnlyError):
        return False
    if expected.dtype.kind in "iub" and actual.dtype.kind in "iub":
        return bool(np.array_equal(expected, actual))
    return _near(expected.astype(np.float64), actual.astype(np.float64))


def _near(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.linalg.norm(a - b) <= _ALIKE * np.linalg.norm(a))


def _pair_roles(reference: _Call, candidate: _Call, only: str = "") -> list[RecordPair]:
    pairs: list[RecordPair] = []
    for role in dict.fromkeys((*reference.roles, *candidate.roles)):
        a, b = reference.roles.get(role), candidate.roles.get(role)
        layout = _layout(a.shape, b.shape) if a is not None and b is not None else None
        if layout is None or (only and role != only) or not _of_one_kind(a, b):
            pairs += alone(Both([a] if a is not None else [], [b] if b is not None else []))
        else:
            pairs.append(RecordPair(a, b, layout))
    return pairs


def _of_one_kind(a: Record | None, b: Record | None) -> bool:
    """Return True if both records are integers (class numbers), or neither is."""
    return a is not None and b is not None and a.dtype.startswith(_INTEGERS) == b.dtype.startswith(_INTEGERS)


def _layout(reference: tuple[int, ...], candidate: tuple[int, ...]) -> Layout | None:
    """Return the layout from a candidate's shape to the reference's; `None` if the shapes are of different
    quantities.
    """
    if math.prod(reference) != math.prod(candidate):
        return None
    if reference == candidate:
        return SAME
    layout = layout_between(reference, candidate)
    if layout and layout != BROADCAST:
        return layout
    few, many = sorted((reference, candidate), key=len)
    if len(few) == len(many):
        return Layout(("transpose",)) if len(few) == 2 and few == many[::-1] else None
    if len(few) <= 1 or few[-1] == many[-1]:
        return RESHAPED  # all rows in one row, classes last in both
    if few == reference and len(many) > 2 and few[-1] == many[1]:
        # Classes are the second axis on the other side, and the last axis on this side.
        return Layout(((0, *range(2, len(many)), 1), "reshape"))
    return None
