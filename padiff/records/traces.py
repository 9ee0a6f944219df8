"""The calls of a step: which tensors went into layers and functions, and which came out of which.

A trace is no part of what is compared and judged: it tells where in the code a diff comes from. Two models may compute
the same in other ways, so what differs in their traces is no diff by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from padiff.records.sources import TensorSource


class Operand(NamedTuple):
    """A tensor that goes into a call, or comes out of it.

    Attributes:
        slot: which of the call's tensors: ``input.x``, ``output.0``; of a function its parameter's name or place.
        tensor: its number in the trace: the same wherever the same tensor, unchanged, is seen.
    """

    slot: str
    tensor: int


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """A tensor of a trace.

    Attributes:
        source: where its values, or a sketch of them, are; `None` where nothing was kept of it.
        dtype, shape: its own.
    """

    source: TensorSource | None
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TracedCall:
    """The call of a layer, or of a function or an operator by a layer's own code.

    Attributes:
        layer: path of the layer; of a function's call, of the innermost layer that was being called.
        call: which of the layer's calls within the step, counted from 0.
        function: the function's common name (``softmax``); empty for the call of the layer itself.
        nth: of a function, which of the calls of this name that the layer's call made, counted from 0.
        inputs: tensors that went in, in order; parameters are not among them.
        outputs: tensors that came out.
        arguments: what else a function was given, as far as it is plain: numbers, texts, lists of them, by the names of
            its parameters, or by their places (``"1"``) where it does not tell names.
        parameters: ``layer/slot`` of parameters that went into a function.
        layer_type: class name of the layer.
        stack: lines of the user's code that it comes from, ``file:line function``, the innermost first; empty where
            functions were not looked at.
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
    stack: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """The calls of a step, in the order in which they ended, and the tensors that they are about.

    Attributes:
        tensors: by number.
        calls: those of layers that compute, in every step; in some steps those of all layers, and of the functions and
            operators that their code calls.
        functions: whether functions were looked at.
    """

    tensors: Sequence[TracedTensor] = ()
    calls: Sequence[TracedCall] = ()
    functions: bool = False


#: Of steps of which no calls are known.
NO_TRACE = Trace()
