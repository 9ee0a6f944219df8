"""PyTorch's dropout and that of recurrent networks; see `feeding` and `base.Masks` of `padiff.frameworks`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import overrides
from torch.nn import functional

from padiff.frameworks.catalog import parameters_of
from padiff.frameworks.feeding import DropoutCall, MaskObserver, MasksFed, MaskSource, MasksSeen
from padiff.frameworks.hooking import Handle
from padiff.frameworks.interception import InterceptedCall
from padiff.frameworks.torch import environment, tensors
from padiff.frameworks.torch.calls import building, is_compiling
from padiff.frameworks.torch.tensors import transforming

#: The functions that `torch.nn.modules.rnn` calls.
FUNCTIONS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@dataclass(frozen=True)
class Recurrent:
    """A call of one of these functions.

    Attributes:
        sizes: the batch size at each time of packed sequences; else `None`.
        states: the initial states of all layers: one tensor, or two for an LSTM.
    """

    function: Any
    data: Any
    sizes: Any
    states: tuple[Any, ...]
    weights: Sequence[Any]
    biased: bool
    layers: int
    rate: float
    training: bool
    both_ways: bool
    batch_first: bool = False

    @classmethod
    def from_call(cls, heard: InterceptedCall) -> Recurrent:
        args = [*heard.args, *heard.kwargs.values()]
        packed = isinstance(args[3], (list, tuple))
        sizes = args.pop(1) if packed else None
        data, states, weights, *more = args
        states = (states,) if isinstance(states, torch.Tensor) else tuple(states)
        return cls(heard.function, data, sizes, states, list(weights), *more)

    @property
    def between(self) -> int:
        """The number of dropouts: one between every two layers in training, else 0."""
        return self.layers - 1 if self.training else 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a layer's output, time first."""
        width = self.states[0].shape[-1] * (2 if self.both_ways else 1)
        if self.sizes is not None:
            return (self.data.shape[0], width)
        batch, time = self.data.shape[:2] if self.batch_first else self.data.shape[1::-1]
        return (time, batch, width)

    def drawn(self) -> np.ndarray:
        """Draw and return the masks that the call would draw from the current state of the generator."""
        ones = torch.ones(self.shape, dtype=self.data.dtype, device=self.data.device)
        masks = [torch.dropout(ones, self.rate, True) > 0 for _ in range(self.between)]
        array: np.ndarray = torch.stack(masks).cpu().numpy()
        return array

    def keeping(self, masks: np.ndarray) -> tuple[Any, ...]:
        """Return the output of the call with these masks."""
        ways = 2 if self.both_ways else 1
        each = len(self.weights) // self.layers
        data, ended = self.data, []
        for layer in range(self.layers):
            states = tuple(state[layer * ways : (layer + 1) * ways] for state in self.states)
            weights = self.weights[layer * each : (layer + 1) * each]
            data, *last = replace(self, data=data, states=states, weights=weights, layers=1, rate=0.0)._call()
            ended.append(last)
            if layer < self.between:
                mask = torch.from_numpy(masks[layer]).to(data.device)
                mask = mask.transpose(0, 1) if self.batch_first else mask
                data = data * (mask.to(data.dtype) * (1 / (1 - self.rate)))
        return (data, *(torch.cat(parts) for parts in zip(*ended)))

    def _call(self) -> tuple[Any, ...]:
        states = self.states if len(self.states) > 1 else self.states[0]
        more = (self.biased, self.layers, self.rate, self.training, self.both_ways)
        if self.sizes is not None:
            outputs: tuple[Any, ...] = self.function(self.data, self.sizes, states, self.weights, *more)
        else:
            outputs = self.function(self.data, states, self.weights, *more, self.batch_first)
        return outputs


state, restore = environment.state, environment.restore

_ATTENTION = "scaled_dot_product_attention"
_ALPHA = ("alpha_dropout", "feature_alpha_dropout")
# The limit of SELU for large negative inputs.
_SATURATION = -1.7580993408473766
# The largest relative distance between the output of attention (or of a recurrent network) and the output computed
# with a mask, for the mask to be accepted as the one that was used.
_ALIKE = 0.1


def functions() -> Iterator[tuple[Any, str, str]]:
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", *_ALPHA, _ATTENTION):
        if hasattr(functional, name):
            yield functional, name, name
    for name in FUNCTIONS:
        yield torch._VF, name, name


def about(name: str, heard: InterceptedCall) -> DropoutCall | None:
    if is_compiling() or transforming() or building():
        return None
    if name in FUNCTIONS:
        call = Recurrent.from_call(heard)
        return DropoutCall(name, call.rate, call.shape, call.between) if 0 < call.rate < 1 and call.between else None
    arguments = _arguments(name, heard)
    if name == _ATTENTION:
        query, key, rate = arguments["query"], arguments["key"], float(arguments.get("dropout_p") or 0.0)
        shape = (*query.shape[:-1], key.shape[-2])
    else:
        rate, shape = float(arguments["p"]) if arguments["training"] else 0.0, tuple(arguments["input"].shape)
    return DropoutCall(name, rate, tuple(shape)) if 0.0 < rate < 1.0 else None


def kept(name: str, heard: InterceptedCall, output: Any, before: Any) -> np.ndarray | None:
    if name in FUNCTIONS:
        with torch.no_grad():
            environment.restore(before)
            masks = Recurrent.from_call(heard).drawn()
            return masks if _is_like(Recurrent.from_call(heard).keeping(masks)[0], output[0]) else None
    arguments = _arguments(name, heard)
    if name == _ATTENTION:
        return _kept_by_attention(heard, arguments, output, before)
    with torch.no_grad():
        ones = torch.ones_like(arguments["input"])
        environment.restore(before)
        mask = heard.function(ones, float(arguments["p"]), True) > 0
    return tensors.copy(mask)


def draw(name: str, heard: InterceptedCall) -> None:
    if name in FUNCTIONS:
        with torch.no_grad():
            Recurrent.from_call(heard).drawn()
        return
    arguments = _arguments(name, heard)
    with torch.no_grad():
        if name == _ATTENTION:
            heard.function(**arguments)
        else:
            heard.function(torch.ones_like(arguments["input"]), float(arguments["p"]), True)


def _kept_by_attention(
    heard: InterceptedCall, arguments: dict[str, Any], output: Any, before: Any
) -> np.ndarray | None:
    """Return the mask of attention weights, by calling attention with the identity matrix as values.

    The identity is passed in blocks of columns as wide as the real values. The result is `None` if attention with this
    mask does not reproduce the output.
    """
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    more = {name: arguments[name] for name in arguments if name not in ("query", "key", "value")}
    length, width = key.shape[-2], value.shape[-1]
    parts = []
    for start in range(0, length, width):
        identity = torch.zeros_like(value)
        for column in range(min(width, length - start)):
            identity[..., start + column, column] = 1
        # torch selects the kernel by which inputs require a gradient.
        again = [t.detach().requires_grad_(t.requires_grad) for t in (query, key, identity)]
        again[2].requires_grad_(value.requires_grad)
        environment.restore(before)
        # Hide the saved tensors of this call from activation checkpointing, which counts saved tensors.
        with torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is):
            parts.append(heard.function(*again, **more).detach()[..., : min(width, length - start)] != 0)
    mask = torch.cat(parts, -1)
    with torch.no_grad():
        if not _is_like(_attention(arguments, mask), output):
            return None
    return tensors.copy(mask)


def _is_like(expected: Any, output: Any) -> bool:
    apart = (expected.float() - output.detach().float()).norm()
    return bool(apart <= _ALIKE * expected.float().norm())


def handed_on(name: str, heard: InterceptedCall) -> Callable[[], Any] | None:
    # Torch function modes, such as the one that records functions, get the call first: padiff's calls here are not the
    # model's.
    owner = torch._VF if name in FUNCTIONS else functional
    values = [value for value in (*heard.args, *heard.kwargs.values()) if isinstance(value, torch.Tensor)]
    if not overrides.has_torch_function(values):
        return None
    return partial(overrides.handle_torch_function, getattr(owner, name), values, *heard.args, **heard.kwargs)


def _as_it_is(tensor: Any) -> Any:
    return tensor


def keeping(name: str, heard: InterceptedCall, mask: np.ndarray) -> Any:
    if name in FUNCTIONS:
        return Recurrent.from_call(heard).keeping(mask)
    arguments = _arguments(name, heard)
    if name == _ATTENTION:
        return _attention(arguments, torch.from_numpy(mask).to(arguments["query"].device))
    source, rate = arguments["input"], float(arguments["p"])
    if name in _ALPHA:
        scale = 1 / math.sqrt((_SATURATION**2 * rate + 1) * (1 - rate))
        shift = np.where(mask, 0.0, scale * _SATURATION) - scale * _SATURATION * rate
        factor, added = tensors.like(source, mask * scale), tensors.like(source, shift)
        return source.mul_(factor).add_(added) if arguments.get("inplace") else source * factor + added
    factor = tensors.like(source, mask * (1 / (1 - rate)))
    return source.mul_(factor) if arguments.get("inplace") else source * factor


def _attention(arguments: dict[str, Any], mask: Any) -> Any:
    """Compute attention with a mask for its weights, in place of dropout."""
    query, key, value, scale = arguments["query"], arguments["key"], arguments["value"], arguments.get("scale")
    if arguments.get("enable_gqa"):
        times = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    weights = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    allowed = arguments.get("attn_mask")
    if arguments.get("is_causal"):
        allowed = torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device).tril()
    if allowed is not None:
        no = float("-inf")
        weights = weights.masked_fill(~allowed, no) if allowed.dtype == torch.bool else weights + allowed
    rate = float(arguments["dropout_p"])
    weights = torch.softmax(weights, -1).masked_fill(~mask, 0.0)
    return (weights @ value) * (1 / (1 - rate))


def _arguments(name: str, heard: InterceptedCall) -> dict[str, Any]:
    """Return the arguments by parameter name, also for attention, whose C function has no signature."""
    names = heard.names or (*parameters_of(name), "scale", "enable_gqa")
    return {**heard.arguments(), **dict(zip(names, heard.args)), **heard.kwargs}


def unfed(layer: Any) -> bool:
    # Layers that draw random numbers without dropout.
    return isinstance(layer, (torch.nn.RReLU, torch.nn.FractionalMaxPool2d, torch.nn.FractionalMaxPool3d))


def see(observer: MaskObserver) -> Handle:
    return MasksSeen(sys.modules[__name__], observer)


def feed(source: MaskSource) -> Handle:
    return MasksFed(sys.modules[__name__], source)
