"""A router: a call that chooses, its scores, and the weights of what it chose, as functions of its output."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from padiff.compare.diagnose.traced import Graph
from padiff.frameworks.api_names import row_axis
from padiff.records import ROOT, TracedCall
from padiff.system.frames import Frame

# Functions that a router applies to its scores one by one, or along a row.
_ON_THE_WAY = frozenset(
    [
        "softmax",
        "sigmoid",
        "add",
        "sub",
        "mul",
        "div",
        "true_divide",
        "masked_fill",
        "where",
        "float",
        "to",
        "cast",
        "view",
        "reshape",
        "clone",
        "contiguous",
        "flatten",
        "astype",
        "squeeze",
        "unsqueeze",
        "type",
        "float32",
        "bfloat16",
        "half",
        "tanh",
        "softplus",
        "sqrt",
        "log_softmax",
        "clip",
        "clamp",
    ]
)
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
    """

    words: str
    factor: float = 1.0
    line: Frame | None = None

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
    """

    def __init__(self, graph: Graph, call: TracedCall) -> None:
        self._graph, self.call = graph, call
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
        return np.atleast_2d(source.read()).astype(np.int64)

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
            if len(before) > 1:  # noise, or a table, that is added to what layers made
                before = [tensor for tensor in before if self._is_of_layers(tensor)]
            if len(before) != 1 or before[0] in tensors:
                break  # the router's output is put together here
            tensors.append(before[0])
        return tensors[::-1]

    def _is_of_layers(self, tensor: int) -> bool:
        """Return True if a tensor is computed from parameters."""
        calls = self._graph.back(tensor, lambda _: False)
        return any(not call.function or call.parameters for call in calls)

    @cached_property
    def output(self) -> np.ndarray | None:
        """The router's output: the first tensor on the way whose values are recorded."""
        return next((table for table in map(self._table, self.way) if table is not None), None)

    @cached_property
    def scores(self) -> np.ndarray | None:
        """The scores by which the call chooses; NaN where they are not recorded."""
        whole = self._table(self.way[-1])
        if whole is not None:
            return whole
        sources = [self._graph.trace.tensors[k].source for k in (self._choice.scores, self._choice.places)]
        if None in sources:
            return None
        best, places = (np.atleast_2d(source.read()) for source in sources if source is not None)
        table = np.full((self.rows, self._width), np.nan)
        rows = self.numbers[:, None]
        table[rows, places.astype(np.int64)] = best
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
            return {} if self.scores is None else {"the scores": self.scores}
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
        bases = dict(self.bases)
        scale = self._temperature(scores)
        if scale is not None:
            bases[f"softmax of {scale:.3g} times the router's output"] = softmax(scale * self.output)
        for words, base in bases.items():
            best = None
            for masked in (~known, ~known | (scores == 0.0)):
                left = ~masked & known
                added = np.where(left, scores - base, np.nan)
                if not left.any():
                    continue
                error, size = np.nanmax(np.abs(added)), np.abs(base[left]).max()
                if error <= rounding(self.dtype) * size:
                    return Found(words, line=line), None, masked & (known | np.isinf(scores))
                with np.errstate(all="ignore"):
                    columns = np.array(
                        [np.nanmedian(column) if np.isfinite(column).any() else 0.0 for column in added.T]
                    )
                    rest = np.nanmax(np.abs(added - columns))
                if rest <= rounding(self.dtype) * max(size, np.abs(columns).max()) and best is None:
                    best = Found(words, line=line), columns, masked & (known | np.isinf(scores))
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
            if traced.source is None or traced.source.sketched or math.prod(traced.shape) != self.rows * chosen:
                continue
            values = np.asarray(traced.source.read(), np.float64)
            axis = self._axis if len(traced.shape) > 1 and traced.shape[self._axis] == chosen else -1
            table = np.moveaxis(values, axis, -1).reshape(-1, chosen)[self.numbers]
            match = self._function(table, traced.dtype)
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

    def _function(self, weights: np.ndarray, dtype: str) -> tuple[str, float] | None:
        bases = dict(self.bases)
        if self.score is not None and self.score[1] is not None:
            bases[f"{self.score[0].words} with the bias"] = bases[self.score[0].words] + self.score[1]
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
                factor = factor_between(values, weights, 4 * rounding(dtype))
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
