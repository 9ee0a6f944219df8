"""Calls of a step: the layers and functions that were called, with their input and output tensors.

A trace is not compared and judged: it only locates a diff in the code. Two models may compute the same in different
ways, so a difference between their traces is no diff.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from padiff.records.sources import TensorSource
from padiff.system.frames import Frame


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
        rows: number of rows of the scores.
        every: only every n-th row was recorded.
        scores: number of the traced tensor with the scores, best first, of shape (recorded rows, ranks); for a
            threshold, how far the elements lie above it.
        places: number of the traced tensor with their places along the row.
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


def without_code(trace: Trace) -> Trace:
    """Return a trace whose stacks have no text of the code."""
    calls = [
        replace(call, stack=tuple(frame._replace(code="") for frame in call.stack)) if call.stack else call
        for call in trace.calls
    ]
    return replace(trace, calls=calls)


#: Trace of a step without known calls.
NO_TRACE = Trace()
