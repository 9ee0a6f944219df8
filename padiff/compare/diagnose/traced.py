"""Traces of both runs side by side: the calls that computed a tensor, in words, and the tensors that agree."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from enum import Enum
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from padiff.compare.judge.drift import RELATIVE
from padiff.compare.judge.limits import SURE
from padiff.compare.judge.policy import Policy
from padiff.compare.measure.pairs import measure_pair
from padiff.errors import PadiffError
from padiff.frameworks.catalog import LOOKING
from padiff.pair.joined_calls import is_joined, layout_between, lengths_of, square_layout, with_places_of
from padiff.records import (
    LOOP,
    RESHAPED,
    SAME,
    Both,
    Diff,
    Figure,
    Kind,
    Layer,
    Pair,
    Record,
    Rule,
    Sketched,
    Trace,
    TracedCall,
)
from padiff.sketches.sketch import ELEMENTS, sketch_of
from padiff.system.terminal import first_few

# A value this large stands for infinity: additive masks are filled with such values, which hide all others in a sum.
_INFINITE = 5e3
# The largest factor by which the code between two layers can amplify a relative error.
_AMPLIFIED = 100
#: The most tensors of a trace that are visited on the way back from a tensor.
MOST = 400


class Relation(Enum):
    """The result of comparing two tensors that should be equal."""

    AGREE = "they agree"
    DIFFER = "they differ"
    UNKNOWN = "it is not known"


# Relative error from which two tensors differ, whatever the policy. Judging takes milliseconds for each pair.
_APART = 0.5

# Largest difference of values that agree, as a share of the largest value.
_SAME_VALUES = 1e-4


class Graph:
    """The calls of a trace, indexed by the tensors that the calls return.

    Args:
        trace: the trace.
        layers: the layers of the run.

    Attributes:
        trace: the trace; calls of layers have the layer's settings as arguments.
        producers: the innermost call that returned a tensor, by the tensor's number.
        paths: the paths of the layers.
    """

    def __init__(self, trace: Trace, layers: Iterable[Layer] = ()) -> None:
        settings = {layer.path: layer.settings for layer in layers}
        calls = [
            call if call.function else replace(call, arguments=settings.get(call.layer, {})) for call in trace.calls
        ]
        self.trace, self.paths = replace(trace, calls=calls), frozenset(settings)
        self.producers: dict[int, TracedCall] = {}
        for call in calls:
            input_tensors = {operand.tensor for operand in call.inputs}
            for operand in call.outputs:
                if operand.tensor not in input_tensors:  # a call that returns its input did not compute it
                    self.producers.setdefault(operand.tensor, call)

    @cached_property
    def layers(self) -> dict[tuple[str, int], TracedCall]:
        """The calls of layers, by path and number of the call."""
        return {(call.layer, call.call): call for call in self.trace.calls if not call.function}

    @cached_property
    def places(self) -> dict[int, int]:
        """The position of a call in the trace, by the id of the call."""
        return {id(call): place for place, call in enumerate(self.trace.calls)}

    def of_record(self, record: Record) -> TracedCall | None:
        """Return the layer call that a record belongs to; `None` if the trace lacks the call."""
        return self.layers.get((record.layer, record.call))

    def tensor_of(self, record: Record) -> int | None:
        """Return the number, in the trace, of the layer's output or input that a record holds; `None` if it is not
        traced.
        """
        call = self.of_record(record)
        operands = () if call is None else call.inputs if record.stage == "input" else call.outputs
        return next((operand.tensor for operand in operands if operand.slot == record.slot), None)

    def values(self, tensor: int) -> np.ndarray | None:
        """Return the values of a tensor; `None` if they were not kept in full."""
        source = self.trace.tensors[tensor].source
        try:
            return None if source is None or source.sketched else np.asarray(source.read())
        except PadiffError:
            return None

    def holds(self, expected: np.ndarray) -> bool:
        """Return True if a tensor of the trace has these values, in whatever shape."""
        near = _SAME_VALUES * np.max(np.abs(expected), initial=0.0)
        for number, traced in enumerate(self.trace.tensors):
            if math.prod(traced.shape) == expected.size:
                values = self.values(number)
                if values is not None and np.allclose(values.ravel(), expected.ravel(), rtol=0, atol=near):
                    return True
        return False

    def scalar(self, tensor: int) -> float:
        """Return the value of a tensor of one number; NaN if the value was not kept."""
        values = self.values(tensor)
        return math.nan if values is None or values.size != 1 else float(values.reshape(()))

    @cached_property
    def noted(self) -> dict[str, list[int]]:
        """The first tensors of the loop's calls, in order, by function, such as ``backward``."""
        tensors: dict[str, list[int]] = {}
        for call in self.trace.calls:
            if call.layer == LOOP and call.inputs:
                tensors.setdefault(call.function, []).append(call.inputs[0].tensor)
        return tensors

    @cached_property
    def by_size(self) -> dict[int, list[int]]:
        """The numbers of the tensors, by element count."""
        tensors: dict[int, list[int]] = {}
        for tensor in range(len(self.trace.tensors)):
            tensors.setdefault(self.size(tensor), []).append(tensor)
        return tensors

    def size(self, tensor: int) -> int:
        """Return the number of elements of a tensor."""
        return math.prod(self.trace.tensors[tensor].shape)

    def is_zero(self, tensor: int) -> bool:
        """Return True if a tensor of floats has no other element than zero."""
        traced = self.trace.tensors[tensor]
        if traced.source is None or not traced.dtype.startswith(("float", "bfloat")):
            return False
        return traced.source.sketch.l2 == 0 if traced.source.sketch is not None else not np.any(traced.source.read())

    def back(self, start: int, stop: Callable[[int], bool]) -> list[TracedCall]:
        """Return the calls that computed a tensor, in the order of the trace.

        Args:
            start: the number of the tensor.
            stop: returns True for a tensor whose own inputs are not followed.
        """
        visited, waiting = {start}, deque([start])
        calls: dict[int, TracedCall] = {}
        while waiting and len(visited) < MOST:
            tensor = waiting.popleft()
            call = self.producers.get(tensor)
            if call is None or stop(tensor):
                continue
            calls[self.places[id(call)]] = call
            for operand in call.inputs:
                if operand.tensor not in visited:
                    visited.add(operand.tensor)
                    waiting.append(operand.tensor)
        return [calls[place] for place in sorted(calls)]

    def record(self, tensor: int, like: Record) -> Record | None:
        """Return a tensor of the trace as a record of the same layer as another record; `None` if its values were not
        kept.

        Args:
            tensor: the number of the tensor.
            like: the other record.
        """
        traced = self.trace.tensors[tensor]
        if traced.source is None:
            return None
        return replace(like, source=traced.source, dtype=traced.dtype, shape=traced.shape)


class Relations:
    """Comparison of tensors of two traces, no stricter than the judgement of the output that differs.

    Args:
        first: the diff of that output.
        graphs: the graphs of the two traces.
        policy: judges tensors if the output was not judged by its relative error.
    """

    def __init__(self, first: Diff, graphs: Both[Graph], policy: Policy) -> None:
        self._first, self._graphs, self._policy = first, graphs, policy
        self._known: dict[tuple[int, int, bool], Relation] = {}
        #: The records, possibly as sketches, for comparisons that need not be exact.
        self._small: Both[dict[int, Record | None]] = Both({}, {})
        self._found: dict[bool, dict[int, bool]] = {True: {}, False: {}}
        judged, figures = first.judgement, first.figures
        #: The limit of the relative error; `None` if the policy judges.
        self._limit: float | None = None
        if judged is not None and judged.figure in RELATIVE and figures is not None:
            # A tensor with a far smaller error does not explain the diff.
            far = figures.rel_l2 / _AMPLIFIED
            self._limit = max(judged.limit, far if math.isfinite(far) else 0.0)

    def between(self, reference: int, candidate: int, exact: bool = False) -> Relation:
        """Return whether a tensor of the reference and a tensor of the candidate agree.

        Args:
            reference, candidate: the numbers of the tensors in the traces.
            exact: True to compare large tensors in full instead of by their sketches.
        """
        key = reference, candidate, exact
        if key not in self._known:
            self._known[key] = self._related(*self._records(reference, candidate, exact))
        return self._known[key]

    def are_equal(self, reference: int, candidate: int) -> bool:
        """Return True if two tensors agree to the limit of the output that differs, not only to a share of its error.

        Args:
            reference, candidate: the numbers of the tensors in the traces.
        """
        judged, (first, second) = self._first.judgement, self._records(reference, candidate, False)
        if self._limit is None or judged is None or first is None or second is None:
            return True
        cut = with_places_of(Both(first, second), self._first.pair.sides)
        figures = measure_pair(self._pair(*cut), self._policy.elementwise).figures
        return figures is None or figures.rel_l2 <= judged.limit * (1 + SURE * figures.spread)

    def diff(self, reference: int, candidate: int, slots: Both[str]) -> Diff:
        """Return the judged diff of two tensors that differ, as an input of the layer whose output differs.

        Args:
            reference, candidate: the numbers of the tensors in the traces.
            slots: the input slots of the layer on either side.
        """
        sides = self._records(reference, candidate, True).zip(slots).map(lambda side: _in_slot(*side))
        reference_record, candidate_record = sides
        assert reference_record is not None and candidate_record is not None
        cut = with_places_of(Both(reference_record, candidate_record), self._first.pair.sides)
        diff = measure_pair(self._pair(*cut), self._policy.elementwise)
        figures, judged = diff.figures, self._first.judgement
        if diff.problem is not None or figures is None:
            return replace(diff, passed=False)
        if self._limit is None or judged is None:
            return replace(self._policy.judge([diff])[0], passed=False)
        if figures.reference_l2 > 0:
            return diff.judged(False, Figure.REL_L2, figures.rel_l2, judged.limit, judged.rule)
        return diff.judged(False, Figure.L2, figures.l2, 0.0, Rule.EQUAL)

    def is_found(self, tensor: int, of_reference: bool) -> bool:
        """Return True if the other side's trace has a tensor, at any place, that agrees with a tensor."""
        results = self._found[of_reference]
        if tensor not in results:
            results[tensor] = self._look_for(tensor, of_reference)
        return results[tensor]

    def _look_for(self, tensor: int, of_reference: bool) -> bool:
        graph, other_graph = self._graphs if of_reference else self._graphs.swapped()
        length, partner_length = lengths_of(self._first.pair.sides).swapped(not of_reference)
        size = graph.size(tensor)
        # Tensors of attention have the sequences' places along two axes.
        sizes = sorted({size * partner_length**k // length**k for k in range(3) if size % length**k == 0})
        for number in chain.from_iterable(other_graph.by_size.get(size, ()) for size in sizes):
            pair = (tensor, number) if of_reference else (number, tensor)
            if self.between(*pair) is Relation.AGREE:
                return True
        return False

    def _records(self, reference: int, candidate: int, exact: bool) -> Both[Record | None]:
        """Return the tensors as records of the layer whose output differs; large tensors as sketches unless `exact`."""
        records = []
        for graph, small, tensor, like in zip(
            self._graphs, self._small, (reference, candidate), self._first.pair.sides
        ):
            if not exact and tensor in small:
                records.append(small[tensor])
                continue
            assert like is not None
            record = graph.record(tensor, like)
            if not exact and record is not None and not record.source.sketched and math.prod(record.shape) > ELEMENTS:
                sketch = sketch_of(record.value)
                record = replace(record, source=Sketched(sketch.row(), sketch.size))
            if not exact:
                small[tensor] = record
            records.append(record)
        return Both(*records)

    def _pair(self, first: Record, second: Record) -> Pair:
        usual = self._first.pair.layout
        if math.prod(first.shape) != math.prod(second.shape):
            layout = SAME
        elif first.shape == second.shape:
            layout = square_layout(first.shape, [usual]) if usual else SAME
        else:
            layout = layout_between(first.shape, second.shape) or RESHAPED
        return Pair(self._first.pair.step, first, second, layout)

    def _related(self, first: Record | None, second: Record | None) -> Relation:
        if first is None or second is None or _kind(first) != _kind(second):
            return Relation.UNKNOWN
        first, second = with_places_of(Both(first, second), self._first.pair.sides)
        if math.prod(first.shape) != math.prod(second.shape):
            # A call that takes a part of what the other side's takes has other sizes, and may agree.
            parts = any(record is not None and is_joined(record) for record in self._first.pair.sides)
            return Relation.UNKNOWN if parts else Relation.DIFFER
        diff = measure_pair(self._pair(first, second), self._policy.elementwise)
        figures = diff.figures
        if figures is None or figures.size == 0:
            return Relation.UNKNOWN
        if _stands_for_infinity(first) or _stands_for_infinity(second):
            return self._masked(first, second)
        if diff.problem is not None:
            return Relation.DIFFER if diff.problem.kind is Kind.NONFINITE else Relation.UNKNOWN
        if not self._passes(diff):
            # If the shapes differ, the axes may be in another order.
            sure = first.shape == second.shape or layout_between(first.shape, second.shape)
            return Relation.DIFFER if sure else Relation.UNKNOWN
        return Relation.UNKNOWN if figures.basis == "moments" else Relation.AGREE

    def _masked(self, first: Record, second: Record) -> Relation:
        """Return whether two tensors with values that stand for infinity agree in the remaining values."""
        if first.source.sketched or second.source.sketched or first.shape != second.shape:
            return Relation.UNKNOWN
        reference, candidate = (np.asarray(record.value, np.float64) for record in (first, second))
        with np.errstate(all="ignore"):
            plain = [np.isfinite(values) & (np.abs(values) < _INFINITE) for values in (reference, candidate)]
        if not np.array_equal(plain[0], plain[1]):
            return Relation.DIFFER
        unmasked = [values[plain[0]] for values in (reference, candidate)]
        norm, error = float(np.linalg.norm(unmasked[0])), float(np.linalg.norm(unmasked[1] - unmasked[0]))
        limit = self._limit if self._limit is not None else 1e-4
        return Relation.AGREE if error <= limit * norm else Relation.DIFFER

    def _passes(self, diff: Diff) -> bool:
        figures = diff.figures
        assert figures is not None
        if figures.l2 == 0:
            return True
        if _kind(diff.pair.anchor) != "f":
            return False
        if figures.rel_l2 > _APART:
            return False
        if self._limit is None:
            return self._policy.judge([diff])[0].passed
        return figures.rel_l2 <= self._limit * (1 + SURE * figures.spread)


def _in_slot(record: Record | None, slot: str) -> Record | None:
    return None if record is None else replace(record, slot=slot)


def _kind(record: Record) -> str:
    """Return the kind of a tensor's dtype: ``f`` for float and complex, ``b`` for bool, ``i`` for integers."""
    if record.dtype.startswith(("float", "bfloat", "complex")):
        return "f"
    return "b" if record.dtype.startswith("bool") else "i"


def _stands_for_infinity(record: Record) -> bool:
    """Return True if some values are so large that they can only mark masked places."""
    sketch = record.sketch
    if sketch is not None:
        return max(abs(sketch.minimum), abs(sketch.maximum)) >= _INFINITE or sketch.nonfinite > 0
    if _kind(record) != "f":
        return False
    values = np.asarray(record.value, np.float64)
    with np.errstate(all="ignore"):
        return bool((~np.isfinite(values) | (np.abs(values) >= _INFINITE)).any())


_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
# The most arguments, and the most calls, that a sentence names.
_ARGUMENTS, _CALLS = 4, 6

# Common names of parameters, by the names that the frameworks use.
_NAMES = {
    "axis": "dim",
    "keepdims": "keepdim",
    "y": "other",
    "x": "input",
    "perm": "dims",
    "start_axis": "start_dim",
    "stop_axis": "end_dim",
    "end_axis": "end_dim",
    "epsilon": "eps",
    "p": "p",
    "dropout_p": "p",
    "fill_value": "value",
    "negative_slope": "slope",
}
_AXES = frozenset({"dim", "dim0", "dim1", "start_dim", "end_dim", "dims"})
# Default values of arguments, by function.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gelu": {"approximate": False},
    "softmax": {"dim": -1},
    "log_softmax": {"dim": -1},
    "scaled_dot_product_attention": {"is_causal": False, "p": 0.0, "training": True},
    "leaky_relu": {"slope": 0.01},
    "elu": {"alpha": 1.0},
    "layer_norm": {"eps": 1e-5},
    "sum": {"keepdim": False},
    "mean": {"keepdim": False},
    "matmul": {"transpose_x": False, "transpose_y": False},
}
# Arguments without an effect on the computed values.
_IDLE = frozenset(
    {"inplace", "training", "dtype", "name", "fixed_seed_offset", "return_softmax", "device", "data_format"}
)


def called(call: TracedCall) -> str:
    """Return a call as code, e.g. ``softmax(dim=-1)``; the call of a layer is named by the layer's type and path."""
    arguments = arguments_text(call)
    arguments += [operand.slot for operand in call.inputs[1:] if "mask" in operand.slot]
    text = ", ".join(arguments[:_ARGUMENTS]) + (", ..." if len(arguments) > _ARGUMENTS else "")
    return f"{call.function}({text})" if call.function else f"{call.layer_type}({text}) in `{call.layer}`"


def call_value(call: TracedCall) -> tuple[str, dict[str, Any]]:
    """Return a call as a value of a cause: its function, or the type of its layer, and the arguments that count."""
    arguments = {name: value for name, value in call.arguments.items() if name not in _IDLE}
    return call.function or call.layer_type, arguments


def arguments_text(call: TracedCall, usual: bool = True) -> list[str]:
    """Return the arguments of a call that are no tensors, each as code.

    Args:
        usual: False to leave out arguments that are not set, or False.
    """
    _, arguments = call_value(call)
    unset = {name for name, value in arguments.items() if value is None or value is False or value == "none"}
    return [_given(*each) for each in arguments.items() if usual or each[0] not in unset]


def calls_text(calls: Iterable[TracedCall]) -> str:
    """Return several calls as one text, in their order."""
    texts = [called(call) for call in calls]
    return first_few(texts, _CALLS) or "nothing"


def place_of(call: TracedCall, trace: Trace) -> str:
    """Return the position of a call in its layer as text, e.g. ``the second add() in `blocks.0` ``."""
    if not call.function:
        return f"`{call.layer}`"
    same_function = sum(sibling.full_name == call.full_name for sibling in trace.calls)
    ordinal = _ORDINALS[call.nth] if call.nth < len(_ORDINALS) else f"{call.nth + 1}th"
    function = f"the {ordinal} {call.function}()" if same_function > 1 else f"{call.function}()"
    return f"{function} in {'the loop' if call.layer == LOOP else f'`{call.layer}`'}"


def is_looking(call: TracedCall) -> bool:
    """Return True if a call only rearranges, selects or hands on values of its input, such as a reshape."""
    return call.function in LOOKING


def axes_of(call: TracedCall, graph: Graph) -> int:
    """Return the number of axes of a call's first input; 0 without inputs."""
    return len(graph.trace.tensors[call.inputs[0].tensor].shape) if call.inputs else 0


def given_otherwise(calls: Both[TracedCall], axes: Both[int]) -> bool:
    """Return True if two calls of one function have different arguments.

    Args:
        calls: the call of the reference and the call of the candidate.
        axes: the number of axes of the first tensor of each call, to count negative axes from the front.
    """
    counted = axes if axes.reference == axes.candidate else Both(0, 0)  # else an axis is the same as it is written
    reference, candidate = calls.zip(counted).map(lambda side: _canonical(*side))
    return any(
        name not in reference or name not in candidate or not _equal(reference[name], candidate[name])
        for name in {*reference, *candidate}
    )


def take_alike(calls: Both[TracedCall]) -> bool:
    """Return False if one call takes a tensor where the other takes a number: these have other purposes."""
    tensors = calls.map(lambda call: {_NAMES.get(operand.slot, operand.slot) for operand in call.inputs})
    numbers = calls.map(lambda call: {_NAMES.get(name, name) for name in call.arguments})
    return not (tensors.reference & numbers.candidate or tensors.candidate & numbers.reference)


def given_in_common(calls: Both[TracedCall]) -> bool:
    """Return True if an argument that both calls name has different values."""
    names = calls.map(lambda call: {_NAMES.get(name, name): value for name, value in call.arguments.items()})
    common = (names.reference.keys() & names.candidate.keys()) - _IDLE
    return any(not _equal(names.reference[name], names.candidate[name]) for name in common)


def _canonical(call: TracedCall, axes: int) -> dict[str, Any]:
    function = _common(call)
    arguments = dict(_DEFAULTS.get(function, {}))
    for name, value in call.arguments.items():
        if name in _IDLE:
            continue
        common = _NAMES.get(name, name)
        if common == "approximate":
            value = value in ("tanh", True)
        elif common in _AXES and axes:
            value = (
                [v % axes if isinstance(v, int) else v for v in value]
                if isinstance(value, list)
                else _axis(value, axes)
            )
        arguments[common] = value
    for name in _AXES & arguments.keys():
        arguments[name] = _axis(arguments[name], axes)
    if call.function == "div" and isinstance(arguments.get("other"), float | int) and arguments["other"]:
        arguments["other"] = 1 / arguments["other"]
    return arguments


def _axis(value: Any, axes: int) -> Any:
    """Return an axis, or a list of axes, counted from the front."""
    if isinstance(value, list):
        return [_axis(each, axes) for each in value]
    return value % axes if isinstance(value, int) and axes else value


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, (int, float)) and isinstance(second, (int, float)):
        return math.isclose(first, second, rel_tol=1e-6)
    if isinstance(first, list) and not isinstance(second, list):
        return len(first) == 1 and _equal(first[0], second)
    if isinstance(second, list) and not isinstance(first, list):
        return _equal(second, first)
    return bool(first == second)


def _given(name: str, value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if name.isdecimal() or name == "other" else f"{name}={text}"


def same_name(one: TracedCall, other: TracedCall) -> bool:
    """Return True if two calls are of the same function, whatever each framework calls the function."""
    return _common(one) == _common(other)


def slope_of(call: TracedCall) -> float | None:
    """Return the slope below zero of a leaky ReLU; `None` if a call is no leaky ReLU, or computes its slope."""
    slope = call.arguments.get("negative_slope", call.arguments.get("slope", _DEFAULTS["leaky_relu"]["slope"]))
    return float(slope) if _common(call) == "leaky_relu" and isinstance(slope, int | float) else None


def _common(call: TracedCall) -> str:
    if call.function == "div" and isinstance(call.arguments.get("other"), float | int):
        return "mul"  # by a number
    return call.function or _OF_LAYERS.get(call.layer_type.lower(), call.layer_type.lower())


# Functions that compute the same as a layer, by the layer's class.
_OF_LAYERS: Mapping[str, str] = {
    "silu": "swish",
    "logsoftmax": "log_softmax",
    "leakyrelu": "leaky_relu",
    "maxpool2d": "max_pool2d",
    "avgpool2d": "avg_pool2d",
    "layernorm": "layer_norm",
}
