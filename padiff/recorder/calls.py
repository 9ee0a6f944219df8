"""The calls of layers in a step, their plain arguments, and what calls that choose have chosen."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from padiff.frameworks.base import Tensors
from padiff.frameworks.catalog import first_rank, is_descending, pooled_axes, row_axis
from padiff.model.selection import Node
from padiff.records import Evaluation
from padiff.system.frames import Frame

# Number of different input shapes of evaluation calls that a step keeps.
_SHAPES = 20


@dataclass(slots=True)
class Call:
    """A running call of a layer."""

    node: Node
    number: int
    training: bool
    recomputed: bool
    #: True inside of a function transform: the call is then not recorded.
    transformed: bool = False
    #: Inputs: each slot followed by its tensor's number in the trace; None if the inputs are not traced.
    inputs: tuple[Any, ...] | None = None
    #: Python stack of the call; empty if stacks are not traced.
    stack: tuple[Frame, ...] = ()


class Calls:
    """The calls of a step so far.

    Attributes:
        running: stack of the running calls, the outermost first.
    """

    def __init__(self) -> None:
        self.running: list[Call] = []
        # Number of calls by path and mode (True for training).
        self._numbers: dict[tuple[str, bool], int] = {}
        self._recomputed: dict[tuple[str, bool], int] = {}
        self._outermost: Counter[tuple[str, bool]] = Counter()
        #: Number of outermost calls without gradients, by path and mode.
        self._without_gradients: Counter[tuple[str, bool]] = Counter()
        self._functions: Counter[tuple[str, str, bool, bool]] = Counter()
        self._transformed: set[str] = set()
        #: Number of evaluation calls that are only counted, by path and input shapes.
        self._evaluations: Counter[tuple[str, tuple[tuple[int, ...], ...]]] = Counter()
        self._evaluated_with_gradients = False

    def begin(self, node: Node, training: bool, recomputed: bool, learning: bool = True) -> Call:
        """Begin a layer's call and number the call among the layer's calls of its mode.

        Recomputed calls have numbers of their own.

        Args:
            learning: False for an outermost call that computes no gradients, which is no micro-batch.
        """
        numbers = self._recomputed if recomputed else self._numbers
        key = node.path, training
        number = numbers.get(key, 0)
        numbers[key] = number + 1
        call = Call(node, number, training, recomputed)
        if not self.running and not recomputed:
            self._outermost[key] += 1
            self._without_gradients[key] += not learning
        self.running.append(call)
        return call

    def begin_transformed(self, node: Node, training: bool, recomputed: bool) -> None:
        """Begin a call inside of a function transform; the call gets no number."""
        self.running.append(Call(node, 0, training, recomputed, transformed=True))
        self._transformed.add(node.path)

    def end(self, node: Node) -> Call | None:
        """End a layer's call and return the call, or None if no such call is running."""
        while self.running:
            # Above this call there may be one that ended in an exception which the model caught.
            call = self.running.pop()
            if call.node is node:
                return call
        return None

    def count(self, calls: Iterable[tuple[tuple[str, bool], int]]) -> None:
        """Set the number of calls so far by (path, mode), for calls that were not begun and ended one by one."""
        self._numbers.update(calls)

    def count_evaluation(self, path: str, shapes: tuple[tuple[int, ...], ...], learning: bool) -> None:
        """Count a call in evaluation mode that is not recorded.

        Args:
            learning: True if gradients were enabled in the call.
        """
        if len(self._evaluations) >= _SHAPES and (path, shapes) not in self._evaluations:
            shapes = ()
        self._evaluations[path, shapes] += 1
        self._evaluated_with_gradients = self._evaluated_with_gradients or learning

    def function(self, inside: Call, name: str) -> Call:
        """Return a copy of the layer's call around a function call, numbered among the calls of this function there."""
        key = (inside.node.path, name, inside.training, inside.recomputed)
        self._functions[key] += 1
        return replace(inside, number=self._functions[key] - 1)

    @property
    def any(self) -> bool:
        """Return True if any layer was called."""
        return bool(self._numbers or self._transformed)

    @property
    def paths(self) -> frozenset[str]:
        """Return the paths of the layers that were called."""
        return frozenset([path for path, _ in self._numbers]) | self._transformed

    @property
    def recomputed(self) -> frozenset[str]:
        """Return the paths of the layers whose forward ran again inside of a backward."""
        return frozenset(path for path, _ in self._recomputed)

    @property
    def in_both_modes(self) -> bool:
        """Return True if the model was called both in training mode and in evaluation mode."""
        return self.has_trained and (self._has_evaluated or bool(self._evaluations))

    @property
    def mixed(self) -> bool:
        """Return True if there may be records of calls in both modes."""
        return self.has_trained and (self._has_evaluated or self._evaluated_with_gradients)

    @property
    def has_trained(self) -> bool:
        """Return True if the model was called in training mode."""
        return any(training for _, training in self._outermost)

    @property
    def _has_evaluated(self) -> bool:
        return not all(training for _, training in self._outermost)

    @property
    def evaluations(self) -> int:
        """Return the number of calls in evaluation mode that are left out of the step.

        These are the calls that were only counted. In a step that has calls in training mode, these are all calls in
        evaluation mode.
        """
        skipped = sum(n for (_, training), n in self._outermost.items() if not training) if self.has_trained else 0
        return skipped + sum(self._evaluations.values())

    @property
    def evaluated(self) -> tuple[Evaluation, ...]:
        """Return the evaluation calls that are left out of the step; shapes are known of counted ones only."""
        counted = Counter(self._evaluations)
        if self.has_trained:
            counted.update({(path, ()): n for (path, training), n in self._outermost.items() if not training})
        return tuple(Evaluation(path, n, shapes) for (path, shapes), n in counted.items())

    @property
    def micro_batches(self) -> int:
        """Return the largest number of outermost calls of a layer: the step's number of micro-batches.

        Calls without gradients (the targets of a network that is trained) count only if there are no others.
        """
        trained = self.has_trained
        calls = {key: n for key, n in self._outermost.items() if key[1] or not trained}
        learning = max((n - self._without_gradients[key] for key, n in calls.items()), default=0)
        return learning or max(calls.values(), default=1)

    def trained(self, path: str) -> int:
        """Return the number of outermost calls of a layer in training mode."""
        return self._outermost[path, True]


# Limits of plain values: items of a list, letters of a text, levels of nesting. Larger values are no settings.
_ITEMS, _LETTERS, _DEEPEST = 16, 60, 4
# Names of the parameters that are an index, and most numbers of an array of indices that are kept.
_KEYS, _INDICES = frozenset({"key", "item"}), 512


class _OmittedError(Exception):
    """A value is not plain, so its argument is omitted."""


def plain_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain arguments as JSON values.

    Arguments that are `None`, private names (leading underscore) and ``name`` are left out.
    """
    plain = {}
    for name, value in arguments.items():
        if value is None or name == "name" or name.startswith("_"):
            continue
        if name in _KEYS and not isinstance(value, tuple):
            value = (value,) if hasattr(value, "__len__") and not isinstance(value, str) else value
        try:
            plain[name] = _plain(value, 0)
        except _OmittedError:
            if isinstance(value, (list, tuple)) and len(value) <= _ITEMS:
                plain.update(_plain_items(name, value))
    return plain


def _plain_items(name: str, items: Sequence[Any]) -> dict[str, Any]:
    """Return the plain items of a list that holds other values, too, as those of an index of tensors and numbers."""
    plain = {}
    for k, item in enumerate(items):
        try:
            plain[f"{name}.{k}"] = _plain(item, 1)
        except _OmittedError:
            continue
    return plain


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    kind = type(value)
    if kind is int or kind is float or isinstance(value, (int, float)):
        return _number(value)
    if isinstance(value, str):
        if len(value) > _LETTERS:
            raise _OmittedError
        return value
    if value is Ellipsis:
        return "..."
    if isinstance(value, slice):
        parts = [value.start, value.stop] if value.step is None else [value.start, value.stop, value.step]
        return ":".join("" if part is None else str(_plain(part, depth + 1)) for part in parts)
    if isinstance(value, range) and depth and len(value) <= _INDICES:
        return [*value]  # rows of an index: `x[range(n), labels]`
    if isinstance(value, (list, tuple)):
        if len(value) > _ITEMS or depth >= _DEEPEST:
            raise _OmittedError
        return [_plain(item, depth + 1) for item in value]
    text = str(value) if kind.__name__ in ("dtype", "DataType", "VarType") else ""
    if text:
        return text.rpartition(".")[2]
    if kind.__module__ == "numpy" and hasattr(value, "item"):
        if value.shape == ():
            return _number(value.item())
        if depth and value.ndim == 1 and value.dtype.kind in "iub" and value.size <= _INDICES:
            return value.tolist()
    raise _OmittedError


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return int(value) if abs(int(value)) < 2**63 else str(int(value))


#: Functions that choose the best places of each row of scores, or the place at one rank.
RANKING = frozenset(["topk", "argmax", "argmin", "sort", "argsort", "max", "min", "kthvalue", "median", "quantile"])
#: Functions that choose a place of each window.
POOLING = frozenset(f"{kind}max_pool{n}d" for kind in ("", "adaptive_", "fractional_") for n in (1, 2, 3))
#: Functions that compare each element with a threshold, or with several.
THRESHOLDS = frozenset(
    (
        "gt", "ge", "lt", "le", "eq", "ne", "round", "floor", "ceil", "trunc", "sign", "heaviside", "floor_divide",
        "bucketize", "searchsorted",
    )
)  # fmt: skip
#: Those that round.
ROUNDINGS = frozenset(["round", "floor", "ceil", "trunc", "floor_divide", "cast"])
#: Functions that draw a place, which the largest of scores times random numbers is.
DRAWS = frozenset(["multinomial", "gumbel_softmax"])
#: Functions that round to the multiples of a number.
QUANTISERS = frozenset(["fake_quantize_per_tensor_affine", "fake_quantize_per_channel_affine"])
#: Functions that hold values between bounds: beyond them, no gradient passes.
BOUNDING = frozenset(["clamp", "clamp_min", "clamp_max", "relu6", "hardtanh"])
#: Functions that take the nearest element of a picture at the places of a grid, unless they interpolate.
SAMPLING = frozenset(["grid_sample"])
#: Functions that choose, by their common names.
CHOOSING = RANKING | THRESHOLDS | POOLING | DRAWS | QUANTISERS | BOUNDING | SAMPLING

#: Ranks that are kept beyond the chosen ones: where several scores nearly tie, the other side may choose any of them.
BEYOND = 4
#: Largest number of recorded scores of a call, and of its recorded rows where the layer's tensors are sketched. Chosen:
#: 512 rows of eight experts take 37 kB.
MOST, SKETCHED_ROWS = 1 << 20, 512
# Scores of whole rows are kept, which is quicker than to rank them, if they are at most as many times the best ones:
# these are kept with their places, in eight bytes each. Chosen.
_WHOLE = 4
#: Number of elements that are kept nearest to a threshold.
NEAREST = 1024


class Ranks(NamedTuple):
    """Places that a call chooses.

    Attributes:
        axis: axis of the scores; `None` for all elements.
        chosen: number of places.
        largest: True if the largest scores are chosen.
        first: rank of the first chosen place.
    """

    axis: int | None
    chosen: int
    largest: bool
    first: int = 0


def ranks_of(name: str, arguments: Mapping[str, Any], shape: Sequence[int]) -> Ranks | None:
    """Return what a ranking call chooses; `None` if it chooses nothing.

    Args:
        name: common name of the function.
        arguments: its plain arguments by parameter name.
        shape: shape of the scores.
    """
    axis = row_axis(name, arguments)
    if name in ("max", "min") and axis is None:
        return None  # one place of all
    if not (axis is None or isinstance(axis, int)) or not shape or math.prod(shape) == 0:
        return None
    if axis is not None and not -len(shape) <= axis < len(shape):
        return None
    size = math.prod(shape) if axis is None else shape[axis]
    if name in ("kthvalue", "median", "quantile"):
        first = first_rank(name, arguments, size)
        return None if first is None else Ranks(axis, 1, False, first)
    chosen = arguments.get("k", 1) if name == "topk" else size if name in ("sort", "argsort") else 1
    if not isinstance(chosen, int) or not 0 < chosen <= size:
        return None
    return Ranks(axis, chosen, is_descending(name, arguments))


def above(name: str, value: Any, other: Any) -> Any:
    """Return how far each element lies above the threshold of a function, below it for ``lt`` and ``le``.

    Args:
        value, other: the function's first two arguments; ``other`` is `None` if there is one only.
    """
    if name == "round":
        return value - value.floor() - 0.5
    if name == "floor_divide":
        value = value / other
    if name in ("floor", "ceil", "trunc", "floor_divide"):
        return value - value.round()
    if other is None:
        return value
    return other - value if name in ("lt", "le") else value - other


class Seen(NamedTuple):
    """Scores that a call is about to choose from, as tensors of the framework.

    Attributes:
        ranks: places that the call chooses; `None` for a threshold, or for bounds.
        rows: number of rows of the scores; 0 for bounds.
        every: every n-th row is kept.
        scores, places: see `padiff.records.Choice`; no places for whole rows.
        step: inverse of a quantiser's step, and its zero point, as tensors or numbers.
        drawn: True if the scores hold random numbers.
        picked: what the call chooses, if its output does not tell.
    """

    ranks: Ranks | None
    rows: int
    every: int
    scores: Any
    places: Any
    step: tuple[Any, Any] | None = None
    drawn: bool = False
    picked: Any = None


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
    if name == "searchsorted":
        scores, other = other, scores
    if not tensors.is_tensor(scores) or not tensors.dtype(scores).startswith(("float", "bfloat")):
        return None
    if name in DRAWS:
        return _drawn(tensors, name, given, sketched)
    if name in SAMPLING:
        return _sampled(tensors, scores, other, given) if given.get("mode") == "nearest" else None
    step = _step_of(tensors, name, scores, given) if name in QUANTISERS else None
    if step is not None:
        scores, name = (scores.detach() * step[0] + step[1]).clip(given["quant_min"], given["quant_max"]), "round"
    if name in THRESHOLDS or name in BOUNDING:
        if name in ("eq", "ne") and not tensors.is_tensor(other):
            return None  # a mask, not a choice by scores
        if name in ("bucketize", "searchsorted"):
            row = _from_boundaries(tensors, scores, other)
        else:
            given_bounds = _bounds(name, given) if name in BOUNDING else None
            apart = above(name, scores.detach(), other) if given_bounds is None else _inside(scores, *given_bounds)
            row = tensors.rows(apart, None)
        if row is None:
            return None
        size = tensors.shape(row)[1]
        if not size:
            return None
        _, places = tensors.ranked(row.abs(), min(NEAREST, size), False)
        return Seen(None, int(name not in BOUNDING), 1, tensors.along(row, places), places, step)
    axes = pooled_axes(name, arguments)
    if axes:
        return _pooled(tensors, scores, axes, sketched)
    ranks = ranks_of(name, arguments, tensors.shape(scores))
    if name not in RANKING or ranks is None:
        return None
    return _ranked(tensors, scores, ranks, sketched)


def _ranked(tensors: Tensors, scores: Any, ranks: Ranks, sketched: bool) -> Seen | None:
    """Return the best scores of each row, and some beyond; or whole rows that are not much longer."""
    shape = tensors.shape(scores)
    is_table = len(shape) == 2 and ranks.axis in (-1, 1)
    rows, size = tensors.shape(scores if is_table else tensors.rows(scores, ranks.axis))
    count = min(ranks.first + ranks.chosen + BEYOND, size)
    every = -(-rows // SKETCHED_ROWS) if sketched else 1
    recorded = -(-rows // every)
    is_whole = not ranks.first and size <= _WHOLE * count and recorded * size <= MOST
    if is_whole and is_table and every == 1:
        return Seen(ranks, rows, every, scores, None)  # the operand itself
    if recorded * count > MOST:
        return None
    table = tensors.rows(scores, ranks.axis)[::every]
    if is_whole:
        return Seen(ranks, rows, every, table, None)
    best, places = tensors.ranked(table, count, ranks.largest)
    start = before_first(ranks.first)
    return Seen(ranks, rows, every, best[:, start:], places[:, start:])


def _sampled(tensors: Tensors, values: Any, grid: Any, given: Mapping[str, Any]) -> Seen:
    """Return how far each place of a grid lies beyond the nearest border of two elements, as a share of the picture."""
    elements = grid.detach()[..., 0] * 0
    margins = elements + 1
    for axis, size in enumerate(tensors.shape(values)[:1:-1]):
        at = grid.detach()[..., axis] + 1
        place = (at / 2 * (size - 1) if given.get("align_corners") else (at * size - 1) / 2).clip(-1, size)
        margin = (place - place.floor() - 0.5) / size
        nearer = (margin.abs() < margins.abs()) * 1.0
        margins = margin * nearer + margins * (1 - nearer)
        elements = elements + place.round() * float(1 << 10 * axis)
    row = margins.reshape([1, -1])
    _, places = tensors.ranked(row.abs(), min(NEAREST, tensors.shape(row)[1]), False)
    return Seen(None, 1, 1, tensors.along(row, places), places, picked=tensors.along(elements.reshape([1, -1]), places))


def before_first(first: int) -> int:
    """Return the rank of the first kept score: some before the chosen one are kept, too."""
    return max(0, first - BEYOND)


def _drawn(tensors: Tensors, name: str, given: Mapping[str, Any], sketched: bool) -> Seen | None:
    """Return the scores by which a function is about to draw, if it hands on the place of the best one."""
    count = given.get("num_samples", 1)
    if (name == "multinomial" and count > 1 and given.get("replacement")) or (
        name == "gumbel_softmax" and not given.get("hard")
    ):
        return None
    scores = tensors.drawn(name, given)
    if scores is None:
        return None
    best = _ranked(tensors, scores, Ranks(given.get("dim", -1), count, True), sketched)
    return None if best is None else best._replace(drawn=True)


def _step_of(tensors: Tensors, name: str, values: Any, given: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the inverse of a quantiser's step, with which it multiplies, and its zero point.

    Both are numbers, or tensors that broadcast to its input.
    """
    step, zero = given["scale"], given["zero_point"]
    if not tensors.is_tensor(step):  # in float32, as the quantiser has it
        return float(np.float32(1) / np.float32(step)), zero
    if not name.endswith("per_channel_affine"):
        return 1 / step.detach(), zero
    shape = [-1 if k == given["axis"] % values.ndim else 1 for k in range(values.ndim)]
    return 1 / step.detach().reshape(shape), zero.detach().reshape(shape)


def _bounds(name: str, given: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the bounds of a function of `BOUNDING`: numbers, tensors, or `None`."""
    if name == "relu6":
        return 0.0, 6.0
    if name == "hardtanh":
        return tuple(given.get(f"{end}_val", given.get(end, one)) for end, one in (("min", -1.0), ("max", 1.0)))
    least, largest = given.get("min"), given.get("max")
    _, other, *_ = (*given.values(), None, None)
    return (other, None) if name == "clamp_min" else (None, other) if name == "clamp_max" else (least, largest)


def _inside(values: Any, least: Any, largest: Any) -> Any:
    """Return how far each value lies inside of the nearer bound; below zero outside."""
    values = values.detach()
    if least is None or largest is None:
        return largest - values if least is None else values - least
    return (values - least).minimum(largest - values)


def _pooled(tensors: Tensors, scores: Any, axes: int, sketched: bool) -> Seen | None:
    """Return the planes from which a pooling function takes a place of each window."""
    shape = tensors.shape(scores)
    rows, size = math.prod(shape[:-axes]), math.prod(shape[-axes:])
    if not rows * size or size > MOST:
        return None
    every = max(-(-rows // SKETCHED_ROWS) if sketched else 1, -(-rows * size // MOST))
    table = scores.detach().reshape([rows, size])[::every]
    return Seen(Ranks(-1, 0, True), rows, every, *tensors.ranked(table, size, True))


def _from_boundaries(tensors: Tensors, values: Any, boundaries: Any) -> Any:
    """Return how far each value lies above the nearest of the boundaries, as one row; `None` if there are too many."""
    if not tensors.is_tensor(boundaries) or len(tensors.shape(boundaries)) != 1:
        return None
    count, size = math.prod(tensors.shape(values)), math.prod(tensors.shape(boundaries))
    if not 0 < count * size <= MOST:
        return None
    apart = values.detach().reshape([-1, 1]) - boundaries.detach().reshape([1, -1])
    _, nearest = tensors.ranked(apart.abs(), 1, False)
    return tensors.along(apart, nearest).reshape([1, -1])


def picked(tensors: Tensors, before: Seen, outputs: Sequence[Any]) -> Any:
    """Return what the call chose: the places of each kept row, best first; for a threshold, its output at the places.

    A call that returns values only has chosen the best places. `None` if the call returned no places that are known.

    Args:
        outputs: tensors that the call returned.
    """
    if before.picked is not None:
        return before.picked
    if before.ranks is None and not before.rows:
        return before.scores >= 0
    if before.ranks is None:
        output = outputs[0] if before.step is None else (outputs[0] * before.step[0] + before.step[1]).round()
        return tensors.along(tensors.rows(output, None), before.places)
    places = [output for output in outputs if tensors.dtype(output).startswith("int")]
    if before.drawn:
        values = tensors.rows(outputs[0], before.ranks.axis)[:: before.every]
        table = tensors.rows(places[0], -1)[:: before.every] if places else tensors.ranked(values, 1, True)[1]
        return table if bool((table == _best(tensors, before)).all()) else None  # the function draws otherwise
    axis, chosen = before.ranks.axis, before.ranks.chosen
    if not chosen:  # windows
        return places[-1].detach().reshape([before.rows, -1])[:: before.every] if places else None
    if not places:
        return _best(tensors, before)
    if axis is None or math.prod(tensors.shape(places[-1])) != before.rows * chosen:
        return None if axis is not None else places[-1].detach().reshape([1, 1])
    shape = tensors.shape(places[-1])
    if shape == (before.rows, chosen) and axis in (-1, 1) and before.every == 1:
        return places[-1]
    holds_axis = chosen > 1 and shape[axis] == chosen
    table = tensors.rows(places[-1], axis) if holds_axis else places[-1].detach().reshape([-1, chosen])
    return table[:: before.every]


def _best(tensors: Tensors, before: Seen) -> Any:
    """Return the best places of each row, of scores that were kept before the call."""
    assert before.ranks is not None
    chosen, start = before.ranks.chosen, before.ranks.first - before_first(before.ranks.first)
    if before.places is None:
        return tensors.ranked(before.scores.detach(), chosen, before.ranks.largest)[1]
    return before.places[:, start : start + chosen]
