"""Recognise calls that choose, and copy what they chose: the best places of each row of scores, with their scores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from padiff.frameworks.api_names import row_axis
from padiff.frameworks.values import Tensors

#: Functions that choose the best places of each row of scores.
RANKING = frozenset({"topk", "argmax", "argmin", "sort", "argsort", "max", "min"})
#: Functions that compare each element with a threshold.
THRESHOLDS = frozenset({"gt", "ge", "lt", "le", "round", "floor", "ceil", "sign"})
#: Functions that choose, by their common names.
CHOOSING = RANKING | THRESHOLDS

#: Ranks that are kept beyond the chosen ones: where several scores nearly tie, the other side may choose any of them.
BEYOND = 4
#: Largest number of recorded scores of a call, and of its recorded rows where the layer's tensors are sketched. Chosen:
#: 512 rows of eight experts take 37 kB.
MOST, SKETCHED_ROWS = 1 << 20, 512
#: Number of elements that are kept nearest to a threshold.
NEAREST = 1024


class Ranks(NamedTuple):
    """Places that a call chooses.

    Attributes:
        axis: axis of the scores; `None` for all elements.
        chosen: number of places.
        largest: True if the largest scores are chosen.
    """

    axis: int | None
    chosen: int
    largest: bool


def ranks_of(name: str, arguments: Mapping[str, Any], shape: Sequence[int]) -> Ranks | None:
    """Return what a ranking call chooses; `None` if it chooses nothing.

    Args:
        name: common name of the function.
        arguments: its plain arguments by parameter name.
        shape: shape of the scores.
    """
    axis = row_axis(name, arguments)
    if name in ("max", "min") and "dim" not in arguments:
        return None  # returns the maximum without its place
    if not (axis is None or isinstance(axis, int)) or not shape or math.prod(shape) == 0:
        return None
    if axis is not None and not -len(shape) <= axis < len(shape):
        return None
    size = math.prod(shape) if axis is None else shape[axis]
    chosen = arguments.get("k", 1) if name == "topk" else size if name in ("sort", "argsort") else 1
    if not isinstance(chosen, int) or not 0 < chosen <= size:
        return None
    if name == "topk":
        largest = bool(arguments.get("largest", True))
    else:
        largest = name in ("argmax", "max") or (name in ("sort", "argsort") and bool(arguments.get("descending")))
    return Ranks(axis, chosen, largest)


def above(name: str, value: Any, other: Any) -> Any:
    """Return how far each element lies above the threshold of a function, below it for ``lt`` and ``le``.

    Args:
        value, other: the function's first two arguments; ``other`` is `None` if there is one only.
    """
    if name == "round":
        return value - value.floor() - 0.5
    if name in ("floor", "ceil"):
        return value - value.round()
    if other is None:
        return value
    return other - value if name in ("lt", "le") else value - other


class Seen(NamedTuple):
    """Scores that a call is about to choose from, as tensors of the framework.

    Attributes:
        ranks: places that the call chooses; `None` for a threshold.
        rows: number of rows of the scores.
        every: every n-th row is kept.
        scores, places: see `padiff.records.Choice`.
    """

    ranks: Ranks | None
    rows: int
    every: int
    scores: Any
    places: Any


def seen(
    tensors: Tensors, name: str, given: Mapping[str, Any], arguments: Mapping[str, Any], sketched: bool
) -> Seen | None:
    """Return what a function of `CHOOSING` is about to choose from; `None` if it does not choose by real scores.

    Args:
        given: all arguments by parameter name.
        arguments: those that are plain values.
        sketched: True to keep `SKETCHED_ROWS` evenly spaced rows only.
    """
    scores, other, *_ = (*given.values(), None, None)
    if not tensors.is_tensor(scores) or not tensors.dtype(scores).startswith(("float", "bfloat")):
        return None
    if name in THRESHOLDS:
        row = tensors.rows(above(name, scores.detach(), other), None)
        size = tensors.shape(row)[1]
        if not size:
            return None
        _, places = tensors.ranked(row.abs(), min(NEAREST, size), False)
        return Seen(None, 1, 1, tensors.along(row, places), places)
    ranks = ranks_of(name, arguments, tensors.shape(scores))
    if ranks is None:
        return None
    table = tensors.rows(scores, ranks.axis)
    rows, size = tensors.shape(table)
    count = min(ranks.chosen + BEYOND, size)
    every = -(-rows // SKETCHED_ROWS) if sketched else 1
    if -(-rows // every) * count > MOST:
        return None
    return Seen(ranks, rows, every, *tensors.ranked(table[::every], count, ranks.largest))


def picked(tensors: Tensors, before: Seen, outputs: Sequence[Any]) -> Any:
    """Return what the call chose: the places of each kept row, best first; for a threshold, its output at the places.

    `None` if the call returned no places.

    Args:
        outputs: tensors that the call returned.
    """
    if before.ranks is None:
        return tensors.along(tensors.rows(outputs[0], None), before.places)
    places = [output for output in outputs if tensors.dtype(output).startswith("int")]
    if not places:
        return None
    axis, chosen = before.ranks.axis, before.ranks.chosen
    if axis is None or math.prod(tensors.shape(places[-1])) != before.rows * chosen:
        return None if axis is not None else places[-1].detach().reshape([1, 1])
    shape = tensors.shape(places[-1])
    holds_axis = chosen > 1 and shape[axis] == chosen
    table = tensors.rows(places[-1], axis) if holds_axis else places[-1].detach().reshape([-1, chosen])
    return table[:: before.every]
