"""Calls of a step with their tensors, regions of compiled code, and packs to repeat a step elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from padiff.errors import UsageError
from padiff.records.sources import TensorSource
from padiff.system.frames import Frame

#: The path that step-wide scalars (loss, learning rate) are recorded under, and calls of the loop.
LOOP = "(loop)"


class Operand(NamedTuple):
    """A tensor that is an input or an output of a call.

    Attributes:
        slot: name of the tensor within the call: ``input.x``, ``output.0``; for a function, the name or position of its
            parameter.
        tensor: number of the tensor in the trace: the same wherever the same, unchanged tensor occurs.
    """

    slot: str
    tensor: int


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """A tensor of a trace.

    Attributes:
        source: source of its values or its sketch; `None` if neither was recorded.
        dtype, shape: dtype and shape of the tensor.
    """

    source: TensorSource | None
    dtype: str
    shape: tuple[int, ...]


class Choice(NamedTuple):
    """Choice of a call: what it picked in each row of scores, and the best scores with their places.

    A call that compares elements with a threshold has one row: the elements nearest to the threshold.

    Attributes:
        chosen: number of places that each row chooses; 0 for a threshold.
        rows: number of rows of the scores; 0 for bounds, inside of which a value passes on its gradient.
        every: only every n-th row was recorded.
        scores: number of the traced tensor with the scores, best first, of shape (recorded rows, ranks); for a
            threshold, how far the elements lie above it.
        places: number of the traced tensor with their places along the row; the number of the scores if these are whole
            rows, in the order of their places.
        picked: number of the traced tensor with what the call chose: places of shape (recorded rows, chosen), best
            first; for a threshold, its output at the elements.
    """

    chosen: int
    rows: int
    every: int
    scores: int
    places: int
    picked: int


@dataclass(frozen=True, slots=True)
class TracedCall:
    """Call of a layer, or of a function or an operator that a layer's own code calls.

    Attributes:
        layer: path of the layer; for a function, of the innermost layer whose forward was running.
        call: number of the layer's call within the step, counted from 0.
        function: the function's common name (``softmax``); empty for the call of the layer itself.
        nth: for a function, number of its call among those of the same name in the layer's call, counted from 0.
        inputs: input tensors in order, without parameters.
        outputs: output tensors in order.
        arguments: further arguments of a function that are plain values (numbers, texts, lists of them), by parameter
            name, or by position (``"1"``) if the function has no names.
        parameters: ``layer/slot`` of parameters that are inputs of a function.
        layer_type: class name of the layer.
        stack: stack of the call, outermost line first; empty if not recorded.
        choice: for a function that chooses (``topk``, ``argmax``, ``gt``), its choice; else `None`.
        cut: True for a function of tensors that train, called without a graph (``no_grad``): no gradient passes.
    """

    layer: str
    call: int
    function: str = ""
    nth: int = 0
    inputs: tuple[Operand, ...] = ()
    outputs: tuple[Operand, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    layer_type: str = ""
    stack: tuple[Frame, ...] = ()
    choice: Choice | None = None
    cut: bool = False

    @property
    def full_name(self) -> tuple[str, int, str]:
        """Return the layer, the number of its call, and the function: what further calls of the function share."""
        return self.layer, self.call, self.function

    @property
    def numbered_name(self) -> tuple[str, int, str, int]:
        """Return the full name with the number of the call among those that share it."""
        return *self.full_name, self.nth

    @property
    def chooses(self) -> bool:
        """Return True if the call chooses values, and does not only hold them within bounds."""
        return self.choice is not None and self.choice.rows > 0

    @property
    def line(self) -> Frame | None:
        """Return the line of the user's code that makes the call; `None` if not recorded."""
        return self.stack[-1] if self.stack else None


@dataclass(frozen=True, slots=True)
class Trace:
    """Calls of a step, in the order in which they returned, and their tensors.

    Attributes:
        tensors: the tensors by number.
        calls: calls of layers that compute, in every step; in some steps also the calls of all other layers, and of the
            functions and operators that their code calls. In the other steps, of functions only those that choose.
        functions: True if calls of functions were recorded.
    """

    tensors: Sequence[TracedTensor] = ()
    calls: Sequence[TracedCall] = ()
    functions: bool = False

    @property
    def backwards(self) -> int:
        """Return the number of backwards that the loop runs."""
        return sum((call.layer, call.function) == (LOOP, "backward") for call in self.calls)


def without_code(trace: Trace) -> Trace:
    """Return a trace whose stacks have no text of the code."""
    calls = [
        replace(call, stack=tuple(frame._replace(code="") for frame in call.stack)) if call.stack else call
        for call in trace.calls
    ]
    return replace(trace, calls=calls)


#: Trace of a step without known calls.
NO_TRACE = Trace()


# Most entries of each list of a region.
#: Note of a compiled region whose random numbers are others than those of eager code.
DRAWS = "it draws random numbers"
MOST = 40


@dataclass(frozen=True, slots=True)
class RegionTensor:
    """A tensor that leaves a region: an output, or the gradient of an input.

    Attributes:
        name: name of the tensor in the graph.
        dtype, shape: dtype and shape of the tensor.
        norm: L2 norm of the tensor.
        error: relative L2 error of the compiled code, against the same code in float64 on the same inputs.
        eager: the same error of the eager code.
        limit: largest error of compiled code that is rounding.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    norm: float
    error: float
    eager: float
    limit: float

    @property
    def passed(self) -> bool:
        """Return True if the compiled code differs from eager code by rounding only."""
        return self.error <= self.limit


@dataclass(frozen=True, slots=True)
class RegionOperation:
    """The first operation of a region that its compiler computes otherwise than eager code.

    Attributes:
        name: name of the operation (``gelu``).
        layer: path of the layer whose code calls it, as the compiler names it; may be empty.
        frame: line of code that calls it; `None` if not known.
        error, eager: relative L2 errors of its output, as in `RegionTensor`; those of gradients if only these differ.
    """

    name: str
    layer: str
    frame: Frame | None
    error: float
    eager: float


@dataclass(frozen=True, slots=True)
class Region:
    """A call of a region of compiled code.

    Attributes:
        number: number of the region among those that the step called, counted from 0.
        calls: number of its calls in the step; the first one is run again.
        compiler: name of the compiler's backend.
        layers: paths of the layers whose code is in the region.
        operations: operations of the region's graph, in order.
        kernels: kernels that the compiler made of the operations, as far as it names them.
        frame: first line of code in the region; `None` if not known.
        inputs: number of tensors that enter the region.
        outputs, gradients: tensors that leave it in forward and in backward, as far as they could be measured.
        wrong: the operation that is computed otherwise; `None` if none is, or if it was not found.
        note: why something could not be measured; else empty.
    """

    number: int
    calls: int = 1
    compiler: str = ""
    layers: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    frame: Frame | None = None
    inputs: int = 0
    outputs: tuple[RegionTensor, ...] = ()
    gradients: tuple[RegionTensor, ...] = ()
    wrong: RegionOperation | None = None
    note: str = ""

    @property
    def failed(self) -> RegionTensor | None:
        """Return the first tensor beyond rounding; `None` if there is none."""
        return next((each for each in (*self.outputs, *self.gradients) if not each.passed), None)

    @property
    def measured(self) -> bool:
        """Return True if anything of the region was measured."""
        return bool(self.outputs or self.gradients)


def regions_to_json(regions: Iterable[Region]) -> list[dict[str, Any]]:
    """Return the JSON entries of a step's compiled regions. Numbers that are not finite are texts."""
    return [_plain(asdict(region)) for region in regions]


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value - value != 0:
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def regions_from_json(entries: Iterable[Any]) -> tuple[Region, ...]:
    """Undo `regions_to_json`.

    Raises:
        ValueError, TypeError, KeyError, OverflowError, AttributeError: an entry is malformed.
    """
    return tuple(
        Region(
            number=int(each["number"]),
            calls=int(each["calls"]),
            compiler=str(each["compiler"]),
            layers=_texts(each["layers"]),
            operations=_texts(each["operations"]),
            kernels=_texts(each["kernels"]),
            frame=_frame(each["frame"]),
            inputs=int(each["inputs"]),
            outputs=_tensors(each["outputs"]),
            gradients=_tensors(each["gradients"]),
            wrong=None if each["wrong"] is None else _operation(each["wrong"]),
            note=str(each["note"]),
        )
        for each in entries
    )


def _texts(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(str(each) for each in [*values][:MOST])


def _frame(value: Any) -> Frame | None:
    if value is None:
        return None
    file, line, function, code = value
    return Frame(str(file), int(line), str(function), str(code))


def _tensors(entries: Iterable[Any]) -> tuple[RegionTensor, ...]:
    return tuple(
        RegionTensor(
            str(each["name"]),
            str(each["dtype"]),
            tuple(int(length) for length in each["shape"]),
            *(float(each[name]) for name in ("norm", "error", "eager", "limit")),
        )
        for each in entries
    )


def _operation(each: Any) -> RegionOperation:
    return RegionOperation(
        str(each["name"]), str(each["layer"]), _frame(each["frame"]), float(each["error"]), float(each["eager"])
    )


# Names of an optimizer's tensors for one parameter; each has the parameter's shape and axis order.
FIRST_MOMENT = "first_moment"
SECOND_MOMENT = "second_moment"
MAX_SECOND_MOMENT = "max_second_moment"
INFINITY_NORM = "infinity_norm"
#: SGD's and RMSProp's buffer, in units of a gradient: the learning rate is no factor of it.
MOMENTUM = "momentum"
SQUARE_SUM = "square_sum"
SQUARE_AVERAGE = "square_average"
GRADIENT_AVERAGE = "gradient_average"
UPDATE_AVERAGE = "update_average"
PREVIOUS_GRADIENT = "previous_gradient"
STEP_SIZE = "step_size"
#: The parameter in float32, if the model has it in a lower precision.
MASTER_WEIGHT = "master_weight"

# Names of an optimizer's scalars for one parameter.
#: Number of steps that the optimizer has taken with the parameter.
STEPS = "steps"
#: NAdam's product of all momenta so far.
MU_PRODUCT = "mu_product"

#: Prefix of a name that an optimizer with an unknown update rule uses.
OWN = "own."

_WRONG = "an optimizer's state is a rule, parameters with tensors and numbers, and rates"


@dataclass(frozen=True)
class ParameterState:
    """State of an optimizer for one parameter.

    Attributes:
        tensors: tensors by the names above; each has the parameter's shape, in the axis order of its framework.
        numbers: scalars by the names above.
    """

    tensors: Mapping[str, np.ndarray] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Rate:
    """Parameters that an optimizer updates with one learning rate.

    Attributes:
        value: the rate of the next step, including the factors of groups and parameters.
        parameters: sites of the parameters, ``layer/slot``.
    """

    value: float
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class OptimizerState:
    """State of an optimizer between two steps.

    Attributes:
        rule: the update rule, as named by `padiff.frameworks.hooking.OptimizerSettings`.
        parameters: state by site, ``layer/slot``; parameters that the optimizer has not updated yet are absent.
        rates: the learning rates of the next step.
    """

    rule: str
    parameters: Mapping[str, ParameterState] = field(default_factory=dict)
    rates: tuple[Rate, ...] = ()

    def rate(self, site: str) -> float | None:
        """Return the learning rate of a parameter; `None` if the optimizer does not update it."""
        return next((rate.value for rate in self.rates if site in rate.parameters), None)

    @property
    def sites(self) -> Iterator[str]:
        """Yield the sites of the parameters that the optimizer updates."""
        for rate in self.rates:
            yield from rate.parameters

    # -- in files ------------------------------------------------------------------------------------------------

    def arrays(self) -> dict[str, np.ndarray]:
        """Return all tensors by flat names, ``layer/slot:first_moment``."""
        return {
            f"{site}:{name}": array for site, state in self.parameters.items() for name, array in state.tensors.items()
        }

    def plain(self) -> dict[str, Any]:
        """Return everything except the tensors, as a value for JSON."""
        return {
            "rule": self.rule,
            "parameters": {
                site: {"tensors": [*state.tensors], "numbers": dict(state.numbers)}
                for site, state in self.parameters.items()
            },
            "rates": [{"value": rate.value, "parameters": [*rate.parameters]} for rate in self.rates],
        }

    @classmethod
    def from_plain(cls, plain: Any, arrays: Mapping[str, np.ndarray]) -> OptimizerState:
        """Return the state from the results of `plain` and `arrays`.

        Args:
            plain: the parsed JSON; it names the arrays to look up.
            arrays: tensors by flat name; further entries are ignored.

        Raises:
            UsageError: `plain` has another form, or a number that is not finite.
            KeyError: an array is missing.
        """
        try:
            loaded = cls(
                str(plain["rule"]),
                {
                    str(site): ParameterState(
                        {str(name): arrays[f"{site}:{name}"] for name in state["tensors"]},
                        {str(name): float(number) for name, number in state["numbers"].items()},
                    )
                    for site, state in plain["parameters"].items()
                },
                tuple(Rate(float(r["value"]), tuple(map(str, r["parameters"]))) for r in plain["rates"]),
            )
        except (TypeError, AttributeError, ValueError, LookupError) as error:
            if isinstance(error, KeyError) and ":" in str(error):
                raise
            raise UsageError(f"{_WRONG} ({error!r})") from None
        numbers = [number for state in loaded.parameters.values() for number in state.numbers.values()]
        if not all(math.isfinite(number) for number in (*numbers, *(rate.value for rate in loaded.rates))):
            raise UsageError(f"{_WRONG}: not all of its numbers are finite")
        return loaded


def rates_of(values: Iterable[tuple[str, float]]) -> tuple[Rate, ...]:
    """Return rates from the ``(site, rate)`` of each parameter."""
    together: dict[float, list[str]] = {}
    for site, value in values:
        together.setdefault(value, []).append(site)
    return tuple(Rate(value, tuple(sites)) for value, sites in together.items())


@dataclass(frozen=True, slots=True)
class Unkept:
    """Placeholder for an object in a batch that a pack cannot store.

    Attributes:
        kind: class of the object, in words.
    """

    kind: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one micro-batch.

    Values are nested: tuples, lists and dicts of tensor sources, of plain values, and of `Unkept`.

    Attributes:
        args, kwargs: positional and keyword arguments of the model's call.
        labels: inputs of the loss functions that do not come from the model, in order; `None`: not recorded.
        whole: the batch as the host passed it; `None` if there is no host.
        seen: True if the arguments of the model's call are known.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[Any, ...] | None = None
    whole: Any = None
    seen: bool = True

    @property
    def sources(self) -> Iterator[TensorSource]:
        """Yield all tensor sources, those of the arguments first."""
        for part in (self.args, self.kwargs, self.labels, self.whole):
            yield from leaves(part)


@dataclass(frozen=True, slots=True)
class Mask:
    """Mask of one call of a dropout function.

    Attributes:
        layer: the innermost layer whose code made the call.
        batch: number of the micro-batch, counted from 0.
        function: common name of the function.
        rate: share of elements that it drops.
        shape: shape of its input (for an attention, of the weights).
        bits: the mask, eight elements to a byte, as `numpy.packbits` returns it.
    """

    layer: str
    batch: int
    function: str
    rate: float
    shape: tuple[int, ...]
    bits: TensorSource

    def kept(self) -> np.ndarray:
        """Return a boolean array that is True for each element that dropout kept."""
        size = int(np.prod(self.shape, dtype=np.int64))
        return np.unpackbits(self.bits.read(), count=size).astype(bool).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Drawn:
    """Random numbers that were drawn but not recorded, so that a replay cannot reproduce them.

    Attributes:
        layer: the innermost layer that drew the numbers.
        what: class of the layer, or name of the function.
    """

    layer: str
    what: str


@dataclass(frozen=True)
class Pack:
    """A recorded step with everything that is needed to repeat it elsewhere.

    Attributes:
        step: number of the step.
        framework, framework_version: the framework that recorded the step.
        weights: parameters and buffers before the step, by path of the layer and slot; a tied one under its first path.
        optimizers: state of each optimizer before the step, with the rates that the step used; empty: none was
            recorded.
        batches: the micro-batches, in order.
        masks: the masks of dropout, in order.
        loss_scale: factor by which the loss was scaled.
        unseen: random numbers that other functions drew and that were not recorded.
        seeds: states of the random generators before the step, by name (``python``, ``numpy``, ``torch.cpu``).
        rank: number of the process of a distributed run.
        notes: sentences about things that could not be stored.
    """

    step: int
    framework: str
    framework_version: str
    weights: Mapping[tuple[str, str], TensorSource]
    optimizers: tuple[OptimizerState, ...] = ()
    batches: tuple[Batch, ...] = ()
    masks: tuple[Mask, ...] = ()
    loss_scale: float = 1.0
    unseen: tuple[Drawn, ...] = ()
    seeds: Mapping[str, TensorSource] = field(default_factory=dict)
    rank: int = 0
    notes: tuple[str, ...] = ()

    @property
    def learning_rates(self) -> tuple[tuple[float, ...], ...]:
        """Return the different learning rates of each optimizer."""
        return tuple(tuple(rate.value for rate in optimizer.rates) for optimizer in self.optimizers)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes that the pack holds in memory."""
        sources = [*self.weights.values(), *self.seeds.values(), *(mask.bits for mask in self.masks)]
        sources += [source for batch in self.batches for source in batch.sources]
        arrays = [array for source in sources for array in source.arrays]
        arrays += [array for optimizer in self.optimizers for array in optimizer.arrays().values()]
        return sum({id(array): array.nbytes for array in arrays}.values())


def leaves(value: Any) -> Iterator[TensorSource]:
    """Yield the tensor sources of a nested value, in order."""
    if isinstance(value, TensorSource):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from leaves(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from leaves(inner)


def with_leaves(value: Any, new: Callable[[TensorSource], Any]) -> Any:
    """Return the nested value with each tensor source replaced by the result of `new`."""
    if isinstance(value, TensorSource):
        return new(value)
    if isinstance(value, Mapping):
        return {key: with_leaves(inner, new) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(with_leaves(inner, new) for inner in value)
    return [with_leaves(inner, new) for inner in value] if isinstance(value, list) else value


def unkept(value: Any) -> Iterator[Unkept]:
    """Yield the `Unkept` placeholders of a nested value, in order."""
    if isinstance(value, Unkept):
        yield value
    elif isinstance(value, (Mapping, tuple, list)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from unkept(inner)
