"""Causes in calls that choose: a router, its scores, and the weights of what it chose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile

import numpy as np

from padiff.align import Alignment
from padiff.compare.choices import (
    WHOLE,
    Flips,
    at_other_places,
    bounds_of,
    flips_of,
    masked,
    masks_of,
    moved_threshold,
    number,
    opposed,
    paired,
    part_taken,
    parts_taken,
    places_of,
    pooled,
    ranks_taken,
    shape_and_axis,
    tables_of,
    taken,
)
from padiff.compare.diagnose.causes import cause_of_calls
from padiff.compare.diagnose.place import Evidence, calls_before, graphs_of
from padiff.compare.diagnose.traced import Graph, called, given_in_common
from padiff.compare.judge.drift import RELATIVE
from padiff.compare.judge.flipped_rows import WHOLLY, split_rows, within_rounding
from padiff.compare.judge.limits import SINGLE, allowed
from padiff.compare.measure.operands import Arrays, operands
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.frameworks.catalog import is_descending, row_axis
from padiff.recorder.calls import QUANTISERS
from padiff.records import LOOP, ROOT, Both, Cause, Diff, Step, Trace, TracedCall
from padiff.system.frames import Frame

# Functions that a router applies to its scores one by one, or along a row.
_ON_THE_WAY = frozenset((
    "softmax", "sigmoid", "add", "sub", "mul", "div", "true_divide", "masked_fill", "where", "float", "to", "cast",
    "view", "reshape", "clone", "contiguous", "flatten", "astype", "squeeze", "unsqueeze", "type", "float32",
    "bfloat16", "half", "tanh", "softplus", "sqrt", "log_softmax", "clip", "clamp",
))  # fmt: skip
# Number of calls after a choice among which the weights of the chosen places are looked for.
_MOST_CALLS = 80
# Number of masks of rows that are tried.
_MOST_MASKS = 4
# Limit of a sum of probabilities and of a fitted factor; largest correlation of noise with what it is added to.
_COARSE, _UNLIKE = 1e-3, 0.2


@dataclass(frozen=True)
class Found:
    """A tensor as a function of the router's output.

    Attributes:
        words: the function in words.
        factor: factor by which it is multiplied.
        line: the line of code that makes the tensor.
        scale: factor of the router's output in it.
    """

    words: str
    factor: float = 1.0
    line: Frame | None = None
    scale: float = 1.0

    @property
    def sentence(self) -> str:
        return self.words if self.factor == 1.0 else f"{self.words}, times {self.factor:.3g}"

    def same(self, other: Found) -> bool:
        return self.words == other.words and math.isclose(self.factor, other.factor, rel_tol=1e-3)


class Router:
    """A call that chooses, with the tensors around it.

    Args:
        graph: the trace of its side.
        call: the call.
        by_scores: True if the other side ranks other places: what makes the scores of both is not compared.
    """

    def __init__(self, graph: Graph, call: TracedCall, by_scores: bool = False) -> None:
        self._graph, self.call, self._by_scores = graph, call, by_scores
        assert call.choice is not None
        self._choice = call.choice
        self._axis = row_axis(call.function, call.arguments)
        shape = graph.trace.tensors[call.inputs[0].tensor].shape
        if not isinstance(self._axis, int) or not shape:
            raise ValueError("no rows")
        self._width = shape[self._axis]
        #: Number of rows of the scores.
        self.rows = call.choice.rows

    def _table(self, tensor: int) -> np.ndarray | None:
        """Return a tensor with the shape of the scores as rows; `None` unless its values are recorded."""
        traced = self._graph.trace.tensors[tensor]
        if traced.source is None or traced.source.sketched or len(traced.shape) < 2:
            return None
        if traced.shape[self._axis] != self._width:
            return None
        values = np.moveaxis(traced.source.read(), self._axis, -1)
        return np.asarray(values.reshape(-1, self._width), np.float64)

    @cached_property
    def picked(self) -> np.ndarray:
        """The chosen places of each recorded row."""
        source = self._graph.trace.tensors[self._choice.picked].source
        if source is None:
            raise ValueError("not recorded")
        picked = np.atleast_2d(source.read()).astype(np.int64)
        mask = masked(self._graph.trace, self.call)
        start, count = part_taken(self._graph.trace, self.call, mask) or (0, picked.shape[1])
        return picked[:, start : start + count]

    @cached_property
    def numbers(self) -> np.ndarray:
        """The numbers of the recorded rows."""
        return np.arange(0, self.rows, self._choice.every)[: len(self.picked)]

    @cached_property
    def way(self) -> list[int]:
        """The tensors from the router's output to the scores, in the order in which they were computed."""
        tensors = [self.call.inputs[0].tensor]
        count = self._graph.size(tensors[0])
        while len(tensors) < _MOST_CALLS:
            call = self._graph.producers.get(tensors[-1])
            if call is None or call.function not in _ON_THE_WAY:
                break
            before = [operand.tensor for operand in call.inputs if self._graph.size(operand.tensor) == count]
            before = [tensor for tensor in before if not self._graph.trace.tensors[tensor].dtype.startswith("bool")]
            if len(before) > 1:  # noise, or a table, that is added to what layers made; a mask
                before = [tensor for tensor in before if self._is_of_layers(tensor) and not self._is_mask(tensor)]
            if len(before) != 1 or before[0] in tensors:
                break  # the router's output is put together here
            tensors.append(before[0])
        return tensors[::-1]

    def _is_of_layers(self, tensor: int) -> bool:
        """Return True if a tensor is computed from parameters."""
        calls = self._graph.back(tensor, lambda _: False)
        return any(not call.function or call.parameters for call in calls)

    def _is_mask(self, tensor: int) -> bool:
        """Return True if a tensor holds zeros and ones only."""
        table = self._table(tensor)
        return table is not None and bool(((table == 0) | (table == 1)).all())

    @cached_property
    def output(self) -> np.ndarray | None:
        """The router's output: the first tensor on the way whose values are recorded."""
        return (
            None
            if self._by_scores
            else next((table for table in map(self._table, self.way) if table is not None), None)
        )

    @cached_property
    def scores(self) -> np.ndarray | None:
        """The scores by which the call chooses; NaN where they are not recorded."""
        whole = self._table(self.way[-1])
        if whole is not None:
            return whole
        tables = tables_of(self._graph.trace, self.call)
        if tables is None:
            return None
        table = np.full((self.rows, self._width), np.nan)
        table[self.numbers[:, None], tables.places.astype(np.int64)] = tables.scores
        return table

    @cached_property
    def masks(self) -> dict[str, np.ndarray]:
        """Masks of the rows that a mean may be taken over, in words: all of them, and those that the code masks."""
        masks = {"": np.ones(self.rows, np.bool_)}
        for tensor in self._graph.by_size.get(self.rows, ()):
            source = self._graph.trace.tensors[tensor].source
            if source is None or source.sketched or len(masks) > _MOST_MASKS:
                continue
            values = source.read().reshape(-1)
            if ((values == 0) | (values == 1)).all() and 0 < (count := int((values != 0).sum())) < self.rows:
                masks.setdefault(f" over {count} of {self.rows} rows", values != 0)
        return masks

    @property
    def dtype(self) -> str:
        return self._graph.trace.tensors[self.way[-1]].dtype

    @cached_property
    def narrow(self) -> str:
        """The narrowest dtype on the way that holds the scores: a cast to a wider one restores nothing."""
        dtypes = {self._graph.trace.tensors[tensor].dtype for tensor in self.way}
        narrow = next((name for name in ("bfloat16", "float16") if name in dtypes), "")
        if narrow or self.output is None:
            return narrow
        with np.errstate(over="ignore"):
            output = self.output.astype(np.float32)
            if output.any() and not (output.view(np.uint32) & 0xFFFF).any():
                return "bfloat16"
        return ""

    @cached_property
    def bases(self) -> dict[str, np.ndarray]:
        """Functions of the router's output that may be its scores, in words."""
        output = self.output
        if output is None:
            scores = self.scores
            return {} if scores is None else {"the scores": scores, "sigmoid of the scores": 1 / (1 + np.exp(-scores))}
        return {
            "softmax": softmax(output),
            "sigmoid": 1 / (1 + np.exp(-output)),
            "softmax over another axis": softmax(output.T).T,
            "the router's output": output,
        }

    @cached_property
    def score(self) -> tuple[Found, np.ndarray | None, np.ndarray] | None:
        """The scores as a function of the router's output, what is added to each column (`None` for nothing), and a
        mask of the places that are left out; `None` if no function gives them.
        """
        scores = self.scores
        if scores is None or self.output is None:
            return None
        made = self._graph.producers.get(self.way[-1])
        line = (made or self.call).line
        known = np.isfinite(scores)
        bases = [(words, base, 1.0) for words, base in self.bases.items()]
        scale = self._temperature(scores)
        if scale is not None:
            bases.append((f"softmax of {scale:.3g} times the router's output", softmax(scale * self.output), scale))
        elif known.all() and (scale := factor_between(self.output, scores, rounding(self.dtype))) is not None:
            bases.append((f"{scale:.3g} times the router's output", scale * self.output, scale))
        for words, base, scale in bases:
            best = None
            for without in (~known, ~known | (scores == 0.0)):
                left = ~without & known
                added = np.where(left, scores - base, np.nan)
                if not left.any():
                    continue
                error, size = np.nanmax(np.abs(added)), np.abs(base[left]).max()
                if error <= rounding(self.dtype) * size:
                    return Found(words, line=line, scale=scale), None, without & (known | np.isinf(scores))
                with np.errstate(all="ignore"):
                    columns = np.array(
                        [np.nanmedian(column) if np.isfinite(column).any() else 0.0 for column in added.T]
                    )
                    rest = np.nanmax(np.abs(added - columns))
                if rest <= rounding(self.dtype) * max(size, np.abs(columns).max()) and best is None:
                    best = Found(words, line=line), columns, without & (known | np.isinf(scores))
            if best is not None:
                return best
        return None

    def _temperature(self, scores: np.ndarray) -> float | None:
        """Return the factor of the router's output whose softmax the scores seem to be; `None` if they do not."""
        assert self.output is not None
        if not (np.isfinite(scores).all() and (scores > 0).all() and np.abs(scores.sum(1) - 1).max() < _COARSE):
            return None
        logs = np.log(scores)
        logs, output = (table - table.mean(axis=1, keepdims=True) for table in (logs, self.output))
        return factor_between(output, logs, _COARSE)

    @property
    def noise(self) -> float | None:
        """The root mean square of what seems to be added to the router's output at random before a softmax; `None` if
        nothing seems to be.
        """
        scores, output = self.scores, self.output
        if scores is None or output is None or not (np.isfinite(scores).all() and (scores > 0).all()):
            return None
        rest = np.log(scores) - output
        rest -= rest.mean(axis=1, keepdims=True)
        spread, size = float(np.sqrt((rest**2).mean())), float(output.std())
        unlike = abs(np.corrcoef(rest.ravel(), output.ravel())[0, 1]) < _UNLIKE
        return spread if unlike and np.abs(rest.mean(axis=0)).max() < spread / 2 and spread < size else None

    @cached_property
    def weight(self) -> tuple[Found, np.ndarray] | None:
        """The weights of the chosen places as a function of the router's output; `None` if no function gives them."""
        found = None
        chosen = self.picked.shape[1]
        for tensor, call in self._after():
            traced = self._graph.trace.tensors[tensor]
            if traced.source is None or traced.source.sketched:
                continue
            rows = np.ones(len(self.numbers), np.bool_)
            if math.prod(traced.shape) == self.rows * chosen:
                values = np.asarray(traced.source.read(), np.float64)
                axis = self._axis if len(traced.shape) > 1 and traced.shape[self._axis] == chosen else -1
                table = np.moveaxis(values, axis, -1).reshape(-1, chosen)[self.numbers]
                if chosen == 1 and (table == table[0]).all():
                    continue  # any constant is the one weight divided by itself
            else:  # of all places, with zeros at those that are not chosen; a mask may choose more of equal scores
                whole = self._table(tensor) if chosen < self._width else None
                if whole is None or len(whole) != self.rows:
                    continue
                table = np.take_along_axis(whole[self.numbers], self.picked, 1)
                rows = np.count_nonzero(whole[self.numbers], 1) == chosen
                if 2 * rows.sum() <= len(rows) or not table[rows].all() or (table[rows] == 1).all():
                    continue  # others, or a mask
            match = self._function(table, traced.dtype, rows)
            if match is not None:
                found = Found(*match, line=call.line), table
        return found

    def _after(self) -> Iterator[tuple[int, TracedCall]]:
        """Yield the real tensors that the layers around the choice compute after it."""
        start = self._graph.places[id(self.call)]
        around = {self.call.layer, self.call.layer.rpartition(".")[0] or ROOT}
        for call in self._graph.trace.calls[start : start + _MOST_CALLS]:
            if call.function and call.layer in around:
                for operand in call.outputs:
                    if self._graph.trace.tensors[operand.tensor].dtype.startswith(("float", "bfloat")):
                        yield operand.tensor, call

    def _function(self, weights: np.ndarray, dtype: str, rows: np.ndarray) -> tuple[str, float] | None:
        bases = dict(self.bases)
        if self.score is not None and self.score[1] is not None:
            bases[f"{self.score[0].words} with the bias"] = bases[self.score[0].words] + self.score[1]
        if self.output is not None and self.score is not None and self.score[0].scale != 1.0:
            scaled = self.score[0].scale * self.output
            bases[self.score[0].words] = softmax(scaled) if self.score[0].words.startswith("softmax") else scaled
        for words, base in bases.items():
            chosen = np.take_along_axis(base[self.numbers], self.picked, 1)
            if not np.isfinite(chosen).all():
                continue
            with np.errstate(all="ignore"):
                ways = {
                    f"{words} of the chosen": chosen,
                    f"{words} of the chosen, divided by their sum": chosen / chosen.sum(1, keepdims=True),
                    f"softmax over the chosen of {words}": softmax(chosen),
                    f"softmax over the chosen of {words}, divided by their sum": softmax(
                        chosen / chosen.sum(1, keepdims=True)
                    ),
                    f"{words} of the chosen, divided by the sum of all": chosen
                    / np.nansum(base[self.numbers], 1, keepdims=True),
                    f"{words} of the chosen, divided by the root of their sum": chosen
                    / np.sqrt(np.abs(chosen.sum(1, keepdims=True))),
                }
            for text, values in ways.items():
                factor = factor_between(values[rows], weights[rows], 4 * rounding(dtype))
                if factor is not None:
                    return text, factor
        return None


def factor_between(values: np.ndarray, result: np.ndarray, limit: float) -> float | None:
    """Return the factor between two tables; `None` if there is none."""
    if not np.isfinite(values).all() or not values.any():
        return None
    factor = float((values * result).sum() / (values * values).sum())
    if factor <= 0 or np.abs(factor * values - result).max() > limit * np.abs(result).max():
        return None
    return 1.0 if abs(factor - 1) < max(limit, 1e-5) else factor


def softmax(scores: np.ndarray) -> np.ndarray:
    """Return the softmax along the last axis."""
    with np.errstate(all="ignore"):
        exponential = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return np.asarray(exponential / exponential.sum(axis=-1, keepdims=True))


def rounding(dtype: str) -> float:
    """Return the relative error below which two tensors of a dtype count as the same function of a router's output."""
    return {"bfloat16": 1e-2, "float16": 2e-3}.get(dtype, 2e-5)


# Functions that rank the places of a row alike.
_RANKS_ALIKE = frozenset({"softmax", "sigmoid", "the router's output"})
# Least number of rows that prove which rows are left out, and largest share of them.
_LEAST_ROWS, _LARGEST_SHARE = 2, 0.9
# Least share of the rows that choose a place which differ, if all of them are computed otherwise: a weight may be tiny.
_MOSTLY = 0.9
# Usual coefficients of a loss that balances the load, besides the numbers of places.
_COEFFICIENTS = (1.0, 0.1, 0.01, 0.001, 0.02, 0.05, 0.005, 0.5)


def routing_cause(diff: Diff, step: Sequence[Diff], evidence: Evidence) -> Cause | None:
    """Return what a router computes otherwise before an output that differs; `None` if no router is found to.

    Args:
        diff: the first diff of the step: an output, or the gradient of one.
        step: the judged diffs of the step.
    """
    steps, record = evidence.steps, diff.pair.reference
    if steps is None or record is None or not diff.pair.complete or diff.pair.stage not in ("forward", "backward"):
        return None
    try:
        graphs = graphs_of(steps, evidence.runs.map(lambda run: run.info))
        of_gradient = diff.pair.stage == "backward"
        in_one_dtype = len({each.dtype for each in diff.pair.sides if each is not None}) == 1  # or all is as coarse
        end = len(graphs.reference.trace.calls) if of_gradient else _end(graphs.reference, record.layer, record.call)
        routers = []
        for position, parts in paired(graphs.map(lambda graph: graph.trace), evidence.alignment):
            calls = parts.map(lambda side: side[0])
            choices = calls.map(lambda call: call.choice)
            if (
                max(map(len, parts)) == 1
                and position < end
                and all(choice is not None and choice.chosen for choice in choices)
            ):
                routers.append(Both(*(Router(graph, call) for graph, call in zip(graphs, calls))))

        others = [] if of_gradient else at_other_places(graphs.map(lambda graph: graph.trace), evidence.alignment)
        for calls in (each.calls for each in others if each.position < end):
            cause = _weights(Both(*(Router(graph, call, True) for graph, call in zip(graphs, calls))), diff)
            if cause is not None:
                return cause

        def precision(sides: Both[Router]) -> Cause | None:
            return _precision(sides, routers[:-1]) if in_one_dtype and sides is routers[-1] else None

        if of_gradient:  # of a scalar that differs by no more than rows which chose otherwise explain
            causes = [_auxiliary(some, each) for each in _scalars(step) for some in (routers[-1:], routers) if some]
            agreeing = (each for each in routers[-1:] if _agree(*each.map(lambda side: side.output)))
            causes += [_scores(sides) or precision(sides) for sides in agreeing]
            return next((cause for cause in causes if cause is not None), None)
        for sides in reversed(routers):  # the last one before the difference
            if not _agree(*sides.map(lambda side: side.output)):
                continue
            cause = _weights(sides, diff) or _scores(sides) or precision(sides)
            cause = cause or (_rows(sides, diff) if sides is routers[-1] else None)
            if cause is not None:
                return cause
        if routers and math.prod(diff.pair.anchor.shape) == 1:
            return _auxiliary([routers[-1]], diff) or _auxiliary(routers, diff)
    except (RunFolderError, SketchOnlyError, ValueError, IndexError):
        pass  # the values can no longer be read, or are those of another kind of choice
    return None


def _scalars(step: Sequence[Diff]) -> list[Diff]:
    """Return the diffs of scalar outputs that are not equal."""
    return [
        diff
        for diff in step
        if diff.pair.stage == "forward" and diff.compared and math.prod(diff.pair.anchor.shape) == 1
        if diff.figures is not None and diff.figures.l2
    ]


def _agree(reference: np.ndarray | None, candidate: np.ndarray | None) -> bool:
    """Return False if the outputs of two routers differ by more than rounding in half precision."""
    if reference is None or candidate is None:
        return True
    return reference.shape == candidate.shape and bool(
        np.linalg.norm(candidate - reference) <= rounding("bfloat16") * np.linalg.norm(reference)
    )


def _end(graph: Graph, layer: str, number: int) -> int:
    call = graph.layers.get((layer, number))
    return len(graph.trace.calls) if call is None else graph.places[id(call)]


def _precision(sides: Both[Router], before: Sequence[Both[Router]]) -> Cause | None:
    """Return the cause that a side computes its scores in a narrower dtype; `None` if routers before, whose outputs
    agree, do so, too.
    """
    narrow = sides.map(lambda side: side.narrow)
    if narrow.candidate == narrow.reference or any(each.map(lambda side: side.narrow) == narrow for each in before):
        return None
    names = narrow.map(lambda name: name or "float32")
    where, lines = _where(sides.reference), sides.map(lambda side: side.call.line)
    text = f"the scores of {where} are computed in {names.candidate} for the reference's {names.reference}"
    return Cause("routing_precision", text, fix=f"compute the scores in {names.reference}", lines=lines)


def _scores(sides: Both[Router]) -> Cause | None:
    """Return a cause in what the call chooses by."""
    where, scores = _where(sides.reference), sides.map(lambda side: side.score)
    lines = sides.map(lambda side: side.call.line)
    for side, one, other in (("candidate", *scores), ("reference", *scores.swapped())):
        noise = getattr(sides, side).noise if one is not None and other is None else None
        if one is not None and noise is not None:
            text = (
                f"{where}: the {side} adds noise of about {noise:.2g} to the router's output before the {one[0].words}"
            )
            return Cause("routing_noise", text, lines=lines)
    if scores.reference is None or scores.candidate is None:
        return None
    (a, shift_a, out_a), (b, shift_b, out_b) = scores.reference, scores.candidate
    lines = Both(a.line, b.line)
    if shift_a is None and shift_b is None and not math.isclose(a.scale, b.scale, rel_tol=_COARSE):
        text = f"{where} chooses by {b.sentence} for the reference's {a.sentence}"
        return Cause("routing_scores", text, fix=f"scale the scores by {a.scale / b.scale:.3g}", lines=lines)
    alike = {a.words, b.words} <= _RANKS_ALIKE or 1.0 not in (a.scale, b.scale)  # scaled alike, or a softmax of it
    ranks_alike = alike and shift_a is None and shift_b is None
    if not a.same(b) and not ranks_alike:
        text = f"{where} chooses by {b.sentence} for the reference's {a.sentence}"
        return Cause("routing_scores", text, lines=lines)
    if (shift_a is None) != (shift_b is None):
        with_bias, without = ("reference", "candidate") if shift_b is None else ("candidate", "reference")
        text = f"{where}: the {with_bias} adds a bias to the scores that it chooses by, the {without} does not"
        return Cause("routing_bias", text, lines=lines)
    if shift_a is not None and shift_b is not None and len(shift_a) == len(shift_b):
        error = np.abs(shift_a - shift_b).max()
        if error > 1e-3 * np.abs(shift_a).max():
            return Cause("routing_bias", f"{where} selects with another bias of the scores", lines=lines)
    kept = [int((~out).sum(1).max()) for out in (out_a, out_b)]
    if kept[0] != kept[1] and (out_a.any() or out_b.any()):
        text = f"{where} chooses among {kept[1]} places of each row for the reference's {kept[0]}"
        return Cause("routing_groups", text, lines=lines)
    return None


def _weights(sides: Both[Router], diff: Diff) -> Cause | None:
    """Return a cause in the weights of the chosen places; proven if each row's output is as much larger as its weights
    are.
    """
    if (sides.reference.output is None) != (sides.candidate.output is None):
        return None
    weights = sides.map(lambda side: side.weight)
    if weights.reference is None or weights.candidate is None:
        return None
    (a, values_a), (b, values_b) = weights.reference, weights.candidate
    if a.same(b) or (values_a.shape == values_b.shape and np.allclose(values_a, values_b, rtol=1e-4, atol=1e-6)):
        return None
    text = f"the weights of {_where(sides.reference)} are {b.sentence}; the reference's are {a.sentence}"
    fix = ""
    if a.words == b.words:
        fix = f"multiply the weights by {a.factor / b.factor:.3g}"
    elif a.words == f"{b.words}, divided by their sum":
        fix = "divide the weights by their sum over the chosen"
    elif b.words == f"{a.words}, divided by their sum":
        fix = "do not divide the weights by their sum"
    cause = Cause("routing_weights", text, fix=fix, lines=Both(a.line, b.line))
    remaining = _left_over(sides, values_a, values_b, diff)
    if remaining is None:
        return cause
    evidence = f"explains the difference: each row is as much larger or smaller as its weights, to {remaining:.2g}"
    return replace(cause, proven=True, evidence=evidence)


def _left_over(sides: Both[Router], reference: np.ndarray, candidate: np.ndarray, diff: Diff) -> float | None:
    """Return the relative error that is left of the rows of an output with the weights' ratio; `None` if the ratio does
    not explain the difference.
    """
    both = operands(diff.pair)
    count = len(sides.reference.numbers)
    if not isinstance(both, Arrays) or reference.shape != candidate.shape or both.reference.size % count:
        return None
    if count != sides.reference.rows or sides.reference.picked.shape != sides.candidate.picked.shape:
        return None
    with np.errstate(all="ignore"):
        ratios = candidate / reference
    alike = (sides.reference.picked == sides.candidate.picked).all(axis=1) & np.isfinite(ratios).all(axis=1)
    ratio = ratios[:, :1]
    spread = np.abs(ratios - ratio)[alike].max(initial=0.0)
    if not alike.any() or spread > 4 * rounding(diff.pair.anchor.dtype) * np.abs(ratio[alike]).max():
        return None
    rows = both.values().map(lambda array: array.reshape(count, -1)[alike])
    size = np.linalg.norm(rows.reference)
    before = float(np.linalg.norm(rows.candidate - rows.reference) / size)
    after = float(np.linalg.norm(rows.candidate - ratio[alike] * rows.reference) / size)
    return after if after < min(rounding(diff.pair.anchor.dtype) * 4, before / 10) else None


def _auxiliary(routers: Sequence[Both[Router]], diff: Diff) -> Cause | None:
    """Return a cause in a loss that balances the load: what each side counts, averages and multiplies."""
    both = operands(diff.pair)
    if not isinstance(both, Arrays):
        return None
    values = both.values().map(lambda array: float(array.reshape(-1)[0]))
    sides = Both([pair.reference for pair in routers], [pair.candidate for pair in routers])
    terms = Both(*map(_balance, sides, values))
    if terms.reference is None or terms.candidate is None or terms.reference.same(terms.candidate):
        return None
    where, texts = _where(routers[-1].reference), (terms.candidate.sentence, terms.reference.sentence)
    text = f"the auxiliary loss of {where} is {texts[0]}; the reference's is {texts[1]}"
    return Cause("routing_auxiliary", text, lines=routers[-1].map(lambda side: side.call.line))


def _balance(routers: Sequence[Router], value: float) -> Found | None:
    """Return a loss as a function of what routers chose, and of their scores; `None` if no known function gives it."""
    terms: dict[str, float] = {}
    for router in routers:
        if router.output is None or len(router.numbers) != router.rows:
            return None
        width, chosen = router.output.shape[1], router.picked.shape[1]
        top = router.output.max(axis=1)
        logs = top + np.log(np.exp(router.output - top[:, None]).sum(axis=1))
        for over, mask in router.masks.items():
            rows = float(mask.sum())
            counts = {
                "all choices": np.bincount(router.picked[mask].ravel(), minlength=width) / rows,
                "first choices": np.bincount(router.picked[mask, 0], minlength=width) / rows,
            }
            new = {"the mean square of logsumexp": float((logs[mask] ** 2).mean())}
            for count, shares in counts.items():
                for words in ("softmax", "sigmoid"):
                    mean = router.bases[words][mask].mean(axis=0)
                    new[f"the shares of {count} times the mean of {words}"] = float((shares * mean).sum())
            for text, term in new.items():
                terms[text + over] = terms.get(text + over, 0.0) + term
    counts_of = (1.0, width, chosen, width / chosen, width * chosen, 1 / chosen)
    usual = [float(a * b) for a in counts_of for b in _COEFFICIENTS]
    for text, term in terms.items():
        for layers in (1, len(routers)):
            factor = next((x for x in usual if math.isclose(x * term / layers, value, rel_tol=rounding(""))), None)
            if factor is not None:
                return Found(text, factor / layers)
    return None


def _rows(sides: Both[Router], diff: Diff) -> Cause | None:
    """Return a cause in whom the candidate leaves out: the rows that differ tell."""
    both = operands(diff.pair)
    if not isinstance(both, Arrays):
        return None
    picked, count = sides.reference.picked, len(sides.reference.picked)
    if picked.shape != sides.candidate.picked.shape:
        return None
    alike = (np.sort(picked) == np.sort(sides.candidate.picked)).all(axis=1)
    if 2 * alike.sum() <= count:
        return None
    values = both.values()
    if count < _LEAST_ROWS or values.reference.size % count or "rows" in diff.pair.layout.steps:
        return None
    rows = values.map(lambda array: array.reshape(count, -1))
    sizes = np.linalg.norm(rows.reference, axis=1)
    errors = np.linalg.norm(rows.candidate - rows.reference, axis=1)
    differs = errors > 50 * allowed(diff.pair.anchor.dtype, "forward") * max(float(np.median(sizes)), 1e-30)
    differs, picked, count = differs[alike], picked[alike], int(alike.sum())
    rows = rows.map(lambda side: side[alike])
    if not _LEAST_ROWS <= differs.sum() <= _LARGEST_SHARE * count:
        return None
    where, lines = _where(sides.reference), sides.map(lambda side: side.call.line)
    for order in ("C", "F"):
        capacity = _capacity(picked, differs, order)
        if capacity is not None:
            less = np.linalg.norm(rows.candidate[differs]) <= np.linalg.norm(rows.reference[differs])
            side = "candidate" if less else "reference"
            text = (
                f"the {side} drops {int(differs.sum())} of {count} rows of {where}: those beyond {capacity} rows for a "
                "place (its capacity)"
            )
            return Cause("routing_capacity", text, lines=lines)
    places = [k for k in np.unique(picked).tolist() if differs[(picked == k).any(axis=1)].mean() >= _MOSTLY]
    inside = np.isin(picked, places).any(axis=1)
    if places and len(places) <= max(2, len(np.unique(picked)) // 4) and not differs[~inside].any():
        names = ", ".join(map(str, places))
        text = f"only the rows differ that choose {'place' if len(places) == 1 else 'places'} {names} in {where}"
        if len(places) == 2:
            text += ": the two are exchanged, or computed otherwise"
        return Cause("routing_places", text, lines=lines)
    return None


def _capacity(picked: np.ndarray, differs: np.ndarray, order: str) -> int | None:
    """Return the number of rows beyond which a place takes no more, if just the rows that differ lie beyond it.

    Args:
        order: ``C`` if a row's choices count one after the other, ``F`` if all rows' first choices count first.
    """
    ranks = np.empty(picked.shape, np.int64)
    flat = picked.reshape(-1, order=order)  # type: ignore[call-overload]
    for place in np.unique(flat):
        at = np.flatnonzero(flat == place)
        row, column = np.unravel_index(at, picked.shape, order=order)  # type: ignore[call-overload]
        ranks[row, column] = np.arange(len(at))
    worst = ranks.max(axis=1)
    capacity = int(worst[differs].min())
    return capacity if ((worst >= capacity) == differs).all() else None


def _where(router: Router) -> str:
    layer = router.call.layer
    return f"{router.call.function}() in {'the model' if layer == ROOT else f'`{layer}`'}"


#: Kind of the cause that a call chose otherwise because its scores differ.
CHOICE = "choice"
#: Kind of the cause that another function chooses from the same values.
OTHER_FUNCTION = "choice_function"
#: Kinds of causes that say which places of its scores the code takes.
OF_RANKS = frozenset({"choice_count", "choice_order", "choice_part", "choice_axis"})
# Functions that give the same in the other order of their arguments, or by another name.
_MIRRORED = {"lt": "gt", "le": "ge", "argsort": "sort", "max": "argmax", "min": "argmin"}
# Comparisons of which one is true where the other is not.
_NEGATED = ({"lt", "ge"}, {"gt", "le"})
# Largest relative distance of the same values.
_SAME = 1e-3


def choice_cause(diff: Diff, step: Sequence[Diff], evidence: Evidence) -> Cause | None:
    """Return the cause that a call chose otherwise beyond rounding, before a diff; `None` if no call did.

    Args:
        diff: the first diff of the step, an output.
        step: the judged diffs of the step.
    """
    steps, record = evidence.steps, diff.pair.reference
    if steps is None or record is None or diff.pair.stage not in ("weight", "forward", "loss", "backward", "grad"):
        return None
    infos = evidence.runs.map(lambda run: run.info)
    try:
        if diff.pair.stage == "weight":
            return _written(diff, step, evidence)
        if diff.pair.stage in ("backward", "grad"):
            return _hidden(steps, evidence, step)
        calls = steps.reference.trace.calls
        end = max(
            (
                k
                for k, call in enumerate(calls)
                if not call.function and (call.layer, call.call) == (record.layer, record.call)
            ),
            default=len(calls),
        )
        flips = [each for each in flips_of(steps, evidence.alignment, infos) if each.position < end]
        traces = steps.map(lambda step: step.trace)
        threshold_cause = _thresholds(traces, evidence.alignment, end)
        if threshold_cause is not None:
            return threshold_cause
        for position, parts in paired(traces, evidence.alignment):
            pair = parts.map(lambda side: side[0])
            ranking = _other_axis(steps, pair) or _ranking(traces, parts) if position < end else None
            if (
                ranking is not None
                and ranking.kind == "choice_order"
                and not any(_most_flip(each, pair) for each in flips)
            ):
                ranking = None  # of a similarity, and of a distance
            if ranking is not None:
                return ranking
            if all(call.choice is not None and call.choice.chosen for call in pair):
                continue  # rankings by several names take the same places from the same end
            names = pair.map(lambda call: _MIRRORED.get(call.function, call.function))
            if position >= end or names.reference == names.candidate or not _same(steps, pair, "inputs"):
                continue
            threshold = pair.reference.choice is not None and not pair.reference.choice.chosen
            place = next((k for k, each in enumerate(flips) if each.position == position), None)
            if place is None:
                chose_otherwise = threshold and not _same(steps, pair, "outputs")
            else:
                chose_otherwise = not within_rounding(flips[place], _limit(diff, step), flips[:place])
            if chose_otherwise:
                text = f"{_name(pair)}, of the same values"
                return Cause(OTHER_FUNCTION, text, lines=pair.map(lambda call: call.line))
    except (RunFolderError, SketchOnlyError):
        return None
    limit = _limit(diff, step)
    for each in at_other_places(traces, evidence.alignment, beyond=True):
        if each.position < end and not within_rounding(each, limit, ()):
            return _cause(each) if each.chosen.reference != each.chosen.candidate else _other_places(each)
    beyond = _beyond(flips, limit)
    if beyond is None or (beyond.ties.any() and _differs_elsewhere(diff, beyond, limit)):
        return None
    if pooled(beyond.calls.reference) and given_in_common(beyond.calls):  # other windows
        text = " against ".join(beyond.calls.map(called))
        return Cause("call_arguments", text, lines=beyond.calls.map(lambda call: call.line))
    among = Both(0, 0) if not all(beyond.chosen) else traces.zip(beyond.calls).map(lambda side: places_of(*side))
    if among.reference != among.candidate:
        where = f"{beyond.calls.candidate.function}() in `{_place(beyond.calls.reference.layer)}`"
        text = f"{where} chooses among {among.candidate} places of each row for the reference's {among.reference}"
        return Cause("choice_among", text, lines=beyond.calls.map(lambda call: call.line))
    return _cause(beyond)


def scores_cause(
    diff: Diff, step: Sequence[Diff], evidence: Evidence, code: Callable[[Both[int]], Cause | None]
) -> Cause | None:
    """Return the cause that the code before a call which chose otherwise makes other scores; `None` if there is none.

    Args:
        diff, step: see `choice_cause`, which has returned a cause of kind `CHOICE`.
        code: returns the code of both sides that makes two tensors, by their numbers in the traces.
    """
    steps = evidence.steps
    if steps is None:
        return None
    infos, limit = evidence.runs.map(lambda run: run.info), _limit(diff, step)
    try:
        flips = _beyond(flips_of(steps, evidence.alignment, infos), limit)
        alike = np.zeros(0) if flips is None else flips.error[flips.flipped.all() | ~flips.flipped]
        if flips is None or not alike.size or not all(call.inputs for call in flips.calls):
            return None  # of a parameter
        if float(np.sqrt((alike**2).mean())) <= SINGLE * limit * flips.size:
            return None
        calls = calls_before(flips.calls, diff, step, graphs_of(steps, infos), evidence.policy)
        called = None if calls is None else cause_of_calls(calls)
        if called is not None:
            return called
        of_scores = code(flips.calls.map(lambda call: call.inputs[0].tensor))
    except (RunFolderError, SketchOnlyError):
        return None
    cause = _cause(flips)
    return of_scores and replace(cause, sentence=f"{cause.sentence}; {of_scores.sentence}")


def _written(diff: Diff, step: Sequence[Diff], evidence: Evidence) -> Cause | None:
    """Return the cause that the step before chose otherwise what the code writes into a buffer."""
    layer, slot = diff.pair.anchor.layer, diff.pair.anchor.slot
    trained = any(
        (each.pair.stage, each.pair.anchor.layer, each.pair.anchor.slot) == ("update", layer, slot) for each in step
    )
    if trained or not all(diff.pair.step - 1 in run.numbers() for run in evidence.runs):
        return None
    before = evidence.runs.map(lambda run: run.steps(diff.pair.step - 1))
    return None if any(len(side) != 1 for side in before) else _hidden(before.map(lambda side: side[0]), evidence, ())


def _most_flip(flips: Flips, calls: Both[TracedCall]) -> bool:
    """Return True if most rows of two calls choose otherwise."""
    return flips.calls.reference is calls.reference and 2 * flips.count > len(flips.recorded)


def _hidden(steps: Both[Step], evidence: Evidence, step: Sequence[Diff]) -> Cause | None:
    """Return the cause that a call chose otherwise beyond rounding, where outputs agree and gradients do not."""
    flips = flips_of(steps, evidence.alignment, evidence.runs.map(lambda run: run.info))
    calls = steps.reference.trace.calls
    for place, beyond in enumerate(flips):
        # Scores are held against the outputs before them, whatever the dtype of the gradient.
        earlier = {(call.layer, call.call) for call in calls[: beyond.position] if not call.function}
        before = [diff for diff in step if (diff.pair.anchor.layer, diff.pair.anchor.call) in earlier]
        limit = _last_limit(before, allowed(beyond.dtype, "forward"))
        if beyond.calls.reference.chooses and not within_rounding(beyond, limit, flips[:place]):
            break
    else:
        beyond = None
    traces = steps.map(lambda step: step.trace)
    if beyond is None:
        pairs = (parts.map(lambda side: side[0]) for _, parts in paired(traces, evidence.alignment))
        causes = (_rank(traces, pair) for pair in pairs)
        return next((cause for cause in causes if cause is not None), None) or _thresholds(traces, evidence.alignment)
    if not all(beyond.chosen):
        return _thresholds(traces, evidence.alignment)
    ranking = _ranking(traces, beyond.calls.map(lambda call: (call,)))
    if ranking is not None and (ranking.kind != "choice_order" or _most_flip(beyond, beyond.calls)):
        return ranking
    return None if beyond.ties.any() else _cause(beyond)


def _differs_elsewhere(diff: Diff, flips: Flips, limit: float) -> bool:
    """Return True if a tensor also differs in rows that chose alike."""
    sides = operands(diff.pair) if diff.pair.complete and diff.problem is None else None
    rows = split_rows(sides.values(), [flips]) if isinstance(sides, Arrays) and sides.reference.size else None
    if rows is None or rows[1].all():  # elements above a threshold: by more than the share of the flipped ones?
        explained = max(WHOLLY * math.sqrt(flips.count / flips.rows), SINGLE * limit)
        return not any(flips.chosen) and diff.figures is not None and diff.figures.rel_l2 > explained
    reference, candidate = rows[0].map(lambda side: side[~rows[1]])
    return bool(np.linalg.norm(candidate - reference) > SINGLE * limit * np.linalg.norm(reference))


def _beyond(flips: Sequence[Flips], limit: float) -> Flips | None:
    """Return the first call that chose otherwise beyond rounding; not a quantiser that the other side writes out."""
    for place, each in enumerate(flips):
        if len({call.function in QUANTISERS for call in each.calls}) > 1:
            continue
        if each.calls.reference.chooses and not within_rounding(each, limit, flips[:place]):
            return each
    return None


def _thresholds(traces: Both[Trace], alignment: Alignment, end: int | None = None) -> Cause | None:
    """Return the cause that a layer's code compares with another number; `None` if it does not.

    Args:
        end: the position of the first of the reference's calls that are left out; all count if `None`.
    """
    ends = Both(end, None)
    sides = traces.zip(ends).map(lambda side: _numbers(side[0], side[0].calls[: side[1]]))
    partners = {pair.reference.path: pair.candidate.path for pair in alignment.pairs}
    for (layer, compares), numbers in sides.reference.items():
        others = sides.candidate.get((partners.get(layer, layer), compares), {})
        only, instead = (
            [each for each in one if each not in two] for one, two in ((numbers, others), (others, numbers))
        )
        one_call = len({id(numbers[each]) for each in only}) == len({id(others[each]) for each in instead}) == 1
        if one_call and len(only) == len(instead) <= 2 - compares:
            calls = Both(numbers[only[0]], others[instead[0]])
            sizes = {math.prod(side[0].tensors[side[1].outputs[0].tensor].shape) for side in traces.zip(calls)}
            moved = _moved(traces.reference.calls[:end], traces, calls.candidate, layer) if compares else None
            if len(sizes) > 1 and 1 not in sizes and moved is None:
                continue  # other tensors; the code may compare their elements one by one
            names = calls.map(lambda call: call.function)
            name = f"{names.candidate}() in `{_place(layer)}`"
            if moved is not None and not moved[0]:
                continue  # another number for a distance to the other end: they compare the same
            value, expected = (" and ".join(f"{each:.6g}" for each in side) for side in (instead, only))
            text = (
                f"{name} compares with {value}, the reference's {names.reference}() with {expected}"
                if compares
                else f"{name} holds values within {value}, the reference's {names.reference}() within {expected}"
            )
            fix = f"compare with {expected}" if compares else ""
            if moved is not None and not math.isclose(
                instead[0] + moved[0], only[0], rel_tol=_SAME, abs_tol=_SAME * abs(moved[0])
            ):
                alike = f"{instead[0] + moved[0]:.6g}"
                fix = f"compare with {alike}"
                text = f"{name} compares with {value}; with {alike} it is the reference's {moved[1].function}()"
            kind = OTHER_FUNCTION if names.reference != names.candidate else "choice_threshold"
            return Cause(kind, text, fix=fix, lines=calls.map(lambda call: call.line))
    return None


def _moved(
    calls: Sequence[TracedCall], traces: Both[Trace], call: TracedCall, layer: str
) -> tuple[float, TracedCall] | None:
    """Return the call of the reference that compares the same elements as a candidate's, and what its number lacks."""
    table, moves = tables_of(traces.candidate, call), []
    for each in calls:
        expected = tables_of(traces.reference, each) if number(each) is not None and each.layer == layer else None
        moved = moved_threshold(Both(expected, table)) if expected is not None and table is not None else None
        if moved is not None:
            moves.append((moved if call.function in ("lt", "le") else -moved, each))
    return min(moves, key=lambda move: abs(move[0]), default=None)


def _numbers(trace: Trace, calls: Sequence[TracedCall]) -> dict[tuple[str, bool], dict[float, TracedCall]]:
    """Return the numbers that each layer's code compares tensors with (`True`), or holds them within, with a call for
    each.
    """
    numbers: dict[tuple[str, bool], dict[float, TracedCall]] = {}
    for call in calls:
        value = number(call)  # of scores, or of counts: a capacity
        for each in bounds_of(trace, call) if value is None else [value]:
            numbers.setdefault((call.layer, value is not None), {}).setdefault(each, call)
    return numbers


def _ranking(traces: Both[Trace], parts: Both[tuple[TracedCall, ...]]) -> Cause | None:
    """Return the cause that one side takes another number of places, or the other end; `None` if it does not.

    A call of one side may rank all places, and its code takes the first ones.
    """
    pair = parts.map(lambda side: side[0])
    masks = masks_of(traces, pair)
    if any(call.function in ("kthvalue", "median", "quantile") and mask is None for call, mask in zip(pair, masks)):
        return _rank(traces, pair)
    if not all(call.choice is not None and call.choice.chosen for call in pair):
        return None
    sides = traces.zip(pair)
    ends = pair.zip(masks).map(
        lambda side: side[1].largest if side[1] else is_descending(side[0].function, side[0].arguments)
    )
    counts, starts = sides.zip(masks).map(lambda side: taken(*side[0], side[1])), parts_taken(traces, pair, masks)
    if starts.reference and starts.reference == starts.candidate:
        counts = Both(frozenset({starts.reference[1]}), frozenset({starts.reference[1]}))
    lines = pair.map(lambda call: call.line)
    names = pair.map(lambda call: call.function)
    where = _place(pair.reference.layer)
    if ends.reference != ends.candidate and not opposed(traces, parts):
        words = ends.map(lambda first: "largest" if first else "least")
        text = (
            f"{names.candidate}() in `{where}` puts the {words.candidate} scores first, the reference's "
            f"{names.reference}() the {words.reference}"
        )
        return Cause("choice_order", text, lines=lines)
    by_one_name = names.reference == names.candidate and names.reference not in WHOLE  # such a call has its `k`
    if not by_one_name and not all(trace.functions for trace in traces):
        return None  # what the code takes is known of steps with calls of functions only
    plain_masks = sides.map(lambda side: masked(*side))
    if any(plain_masks) and all(counts) and not counts.reference & counts.candidate and not opposed(traces, parts):
        sizes = sides.zip(plain_masks).map(lambda side: taken(*side[0], side[1]))  # as many, from the other end
        if sizes.reference & sizes.candidate:
            first = plain_masks.candidate.largest if plain_masks.candidate else ends.candidate
            words = Both(*("least", "largest") if first else ("largest", "least"))
            text = (
                f"the code takes the {min(sizes.candidate)} {words.candidate} scores of each row of "
                f"{names.candidate}() in `{where}`, the reference the {words.reference} of {names.reference}()"
            )
            return Cause("choice_part", text, lines=lines)
    if all(counts) and not counts.reference & counts.candidate and not by_one_name:
        numbers = counts.map(min)
        text = (
            f"the code takes {numbers.candidate} places of each row of {names.candidate}() in `{where}`, the "
            f"reference's {numbers.reference} of {names.reference}()"
        )
        return Cause("choice_count", text, lines=lines)
    if starts.reference and starts.candidate and starts.reference[0] != starts.candidate[0]:
        text = (
            f"the code takes the places of each row of {names.candidate}() in `{where}` from number "
            f"{starts.candidate[0]} on, the reference's of {names.reference}() from number {starts.reference[0]} on"
        )
        return Cause("choice_part", text, lines=lines)
    return None


def _rank(traces: Both[Trace], pair: Both[TracedCall]) -> Cause | None:
    """Return the cause that one side hands on the score of another rank; `None` if it does not."""
    ranks, names = traces.zip(pair).map(lambda side: ranks_taken(*side)), pair.map(lambda call: call.function)
    places = traces.zip(pair).map(lambda side: places_of(*side) if side[1].inputs else 0)
    if not all(ranks) or ranks.reference & ranks.candidate or places.reference != places.candidate:
        return None
    words = ranks.map(lambda side: " and ".join(map(str, sorted(side))))
    text = (
        f"{names.candidate}() in `{_place(pair.reference.layer)}` gives the score of rank {words.candidate} of each "
        f"row, counted from the least, the reference's {names.reference}() that of rank {words.reference}"
    )
    return Cause("choice_part", text, lines=pair.map(lambda call: call.line))


def _other_axis(steps: Both[Step], pair: Both[TracedCall]) -> Cause | None:
    """Return the cause that one side ranks the same scores along another axis; `None` if it does not."""
    if not all(call.inputs for call in pair):
        return None
    (shape, axis), (shape_of_other, axis_of_other) = steps.zip(pair).map(
        lambda side: shape_and_axis(side[0].trace, side[1])
    )
    if shape != shape_of_other or axis is None or axis_of_other is None or axis == axis_of_other:
        return None
    if shape[axis] == shape[axis_of_other] and not _same(steps, pair, "inputs"):
        return None  # a table may be transposed
    where, names = _place(pair.reference.layer), pair.map(lambda call: call.function)
    text = (
        f"{names.candidate}() in `{where}` chooses along axis {axis_of_other} of the scores, the reference's "
        f"{names.reference}() along axis {axis}"
    )
    return Cause("choice_axis", text, fix=f"axis {axis}", lines=pair.map(lambda call: call.line))


def chose_labels(diff: Diff, cause: Cause) -> bool:
    """Return True if a diff is of labels, and a cause says that a call of the loop chose otherwise."""
    return diff.pair.stage == "loss" and "int" in diff.pair.anchor.dtype and cause.kind.startswith(CHOICE)


def matched_otherwise(diff: Diff, cause: Cause, evidence: Evidence) -> Cause | None:
    """Return the cause that the loop gives the model's outputs other labels, by places that no recorded call chooses.

    Args:
        cause: the cause that the labels differ.
    """
    steps, sides = evidence.steps, operands(diff.pair) if diff.pair.complete else None
    if steps is None or not isinstance(sides, Arrays) or not steps.reference.trace.functions:
        return None
    record = diff.pair.anchor
    by_keys = steps.map(lambda step: _by_keys(step.trace, record.slot, record.call))
    if True not in by_keys or None in by_keys:
        return None
    values = sides.values()
    count, among = int((values.reference != values.candidate).sum()), values.reference.size
    text = (
        f"the loop gives the model's outputs other labels, by places that no recorded call chooses: {count:,} of "
        f"{among:,} differ, and not only where outputs are equal within rounding"
    )
    return Cause("matching", text, lines=cause.lines)


def _by_keys(trace: Trace, slot: str, number: int) -> bool | None:
    """Return True if labels are put together by places that code outside of the trace chose, after the model's call;
    False if that code makes the labels; `None` if it does neither.
    """
    model = next((k for k, call in enumerate(trace.calls) if call.layer == ROOT and not call.function), None)
    name = slot.partition("()")[0]
    losses = [call for call in trace.calls if call.layer == LOOP and call.function == name]
    if model is None or number >= len(losses):
        return None
    labels = {operand.tensor for operand in losses[number].inputs[1:]}
    after = [call for call in trace.calls[model + 1 :] if call.function]
    by_key = False
    for call in reversed(after):  # a call may change its input, and return it
        if labels & {operand.tensor for operand in call.outputs}:
            by_key = by_key or any(operand.slot.startswith(("key", "index")) for operand in call.inputs)
            labels |= {operand.tensor for operand in call.inputs}
    makers = {operand.tensor: call for call in reversed(after) for operand in call.outputs}
    is_host = any(maker is None or maker.function == "tensor" for maker in map(makers.get, labels))
    return by_key if is_host else None


def _same(steps: Both[Step], calls: Both[TracedCall], what: str) -> bool:
    """Return True if two calls have the same first input or output.

    Args:
        what: ``inputs`` or ``outputs``.
    """
    if not all(getattr(call, what) for call in calls):  # of parameters alone, which are no operands
        return what == "outputs"
    tensors = steps.zip(calls).map(lambda side: side[0].trace.tensors[getattr(side[1], what)[0].tensor])
    if any(tensor.source is None or tensor.source.sketched for tensor in tensors):
        return what == "outputs"
    if len({tensor.dtype.startswith("bool") for tensor in tensors}) > 1:
        return what == "outputs"  # a mask, and signs
    reference, candidate = tensors.map(lambda tensor: tensor.source.read().astype(np.float64))  # type: ignore[union-attr]
    if {call.function for call in calls} in _NEGATED and np.array_equal(reference, 1 - candidate):
        return True  # one side asks which elements lie above a threshold, the other which do not
    return reference.shape == candidate.shape and bool(
        np.linalg.norm(candidate - reference) <= _SAME * np.linalg.norm(reference)
    )


def _place(layer: str) -> str:
    return {ROOT: "the model", LOOP: "the loop"}.get(layer, layer)


def _name(calls: Both[TracedCall]) -> str:
    where = _place(calls.reference.layer)
    if calls.reference.function == calls.candidate.function:
        return f"{calls.reference.function}() in `{where}`"
    return f"{calls.candidate.function}() for the reference's {calls.reference.function}() in `{where}`"


def _limit(diff: Diff, step: Sequence[Diff]) -> float:
    """Return the limit of the last output that agrees before a diff."""
    before = takewhile(lambda each: each is not diff, step)
    return _last_limit(before, allowed(diff.pair.anchor.dtype, "forward"))


def _last_limit(diffs: Iterable[Diff], limit: float) -> float:
    """Return the limit of the last output that agrees; ``limit`` if there is none."""
    for each in diffs:
        if each.passed and each.pair.stage == "forward" and each.judgement and each.judgement.figure in RELATIVE:
            limit = each.judgement.limit
    return limit


def _other_places(flips: Flips) -> Cause:
    """Return the cause that the code makes other places of those that a call chose, by scores that agree."""
    text = (
        f"{_name(flips.calls)}: the scores of the chosen agree, but the places that the code makes of these differ in "
        f"{flips.count:,} of {len(flips.recorded):,} rows, beyond near ties"
    )
    return Cause("choice_places", text, lines=flips.calls.map(lambda call: call.line))


def _cause(flips: Flips) -> Cause:
    calls, chosen = flips.calls, flips.chosen
    name = _name(calls)
    lines = calls.map(lambda call: call.line)
    if chosen.reference != chosen.candidate:
        text = f"{name} chooses {chosen.candidate} places of each row, the reference's {chosen.reference}"
        fix = f"k={chosen.reference}" if calls.candidate.function == "topk" else ""
        return Cause("choice_count", text, fix=fix, lines=lines)
    if flips.ties.any() and not flips.others:
        tied, rows, rules = f"{int(flips.ties.sum()):,}", f"{len(flips.recorded):,}", flips.rules
        text = (
            f"{name}: {tied} of {rows} rows choose otherwise between scores that are equal to the bit: the two sides "
            "break ties by another rule"
            if rules is None
            else f"{name}: {tied} of {rows} rows choose otherwise between scores that are equal to the bit: of these "
            f"the candidate takes {rules.candidate}, the reference {rules.reference}"
        )
        return Cause("choice_ties", text, lines=lines)
    alike = flips.error[~flips.flipped]
    noise = float(np.sqrt((alike**2).mean())) if alike.size else 0.0
    moved = float(flips.moved[flips.flipped].max())
    if noise > 0 and np.isfinite(moved) and moved / noise > 10:
        far = f"their scores differ up to {moved / noise:,.0f} times as far as those of the other rows"
    else:
        far = f"their scores differ by up to {moved:.2g}, where all scores are about {flips.size:.2g}"
    return Cause(
        CHOICE,
        f"{name}: {flips.count:,} of {len(flips.recorded):,} rows choose otherwise, and not by rounding: {far}",
        lines=lines,
    )
