"""paddle's dropout and that of recurrent networks; see `feeding` and `base.Masks` of `padiff.frameworks`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import paddle
from paddle.nn import functional

from padiff.frameworks.feeding import DropoutCall, MaskObserver, MasksFed, MaskSource, MasksSeen
from padiff.frameworks.hooking import Handle
from padiff.frameworks.interception import InterceptedCall
from padiff.frameworks.paddle import environment, tensors

#: The function that `paddle.nn.layer.rnn` calls.
FUNCTION = "rnn"


@dataclass(frozen=True)
class Recurrent:
    """A call of the kernel, with its arguments in its order."""

    function: Any
    data: Any
    states: Sequence[Any]
    weights: Sequence[Any]
    lengths: Any
    scratch: Any
    rate: float
    both_ways: bool
    inputs: int
    hidden: int
    layers: int
    mode: str
    seed: int
    testing: bool

    @classmethod
    def from_call(cls, heard: InterceptedCall) -> Recurrent:
        data, states, *more = [*heard.args, *heard.kwargs.values()]
        call = cls(heard.function, data, [states] if isinstance(states, paddle.Tensor) else list(states), *more)
        # The network's own scratch tensor holds data for its backward.
        return replace(call, scratch=paddle.empty([1], "uint8"))

    @property
    def between(self) -> int:
        """The number of dropouts: one between every two layers in training, else 0."""
        return 0 if self.testing else self.layers - 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a layer's output: time, batch, features."""
        return (*self.data.shape[:2], self.hidden * (2 if self.both_ways else 1))

    def drawn(self) -> np.ndarray:
        """Draw and return the masks that the call would draw from the current state of the generator."""
        # paddle draws once for all layers.
        mask = paddle.rand(self.shape, "float32").numpy() >= np.float32(self.rate)
        return np.stack([mask] * self.between)

    def keeping(self, masks: np.ndarray) -> tuple[Any, ...]:
        """Return the output of the call with these masks."""
        ways = 2 if self.both_ways else 1
        # Two matrices per layer and direction; after all matrices, as many biases.
        half = 2 * ways
        data, ended = self.data, []
        for layer in range(self.layers):
            start = layer * half
            matrices = list(self.weights[start : start + half])
            biases = list(self.weights[len(self.weights) // 2 + start :][:half])
            states = [state[layer * ways : (layer + 1) * ways] for state in self.states]
            layer_call = replace(self, data=data, states=states, weights=matrices + biases, inputs=data.shape[-1])
            data, reserve, last = replace(layer_call, rate=0.0, layers=1)._call()
            ended.append(last)
            if layer < self.between:
                mask = paddle.to_tensor(masks[layer]).astype(data.dtype)
                data = data * (mask * (1 / (1 - self.rate)))
        return data, reserve, [paddle.concat(parts) for parts in zip(*ended)]

    def _call(self) -> tuple[Any, ...]:
        outputs: tuple[Any, ...] = self.function(
            self.data, self.states, self.weights, self.lengths, self.scratch, self.rate, self.both_ways, self.inputs,
            self.hidden, self.layers, self.mode, self.seed, self.testing,
        )  # fmt: skip
        return outputs


state, restore = environment.state, environment.restore

_ALPHA = ("alpha_dropout", "feature_alpha_dropout")
# The limit of SELU for large negative inputs.
_SATURATION = -1.7580993408473766
# The largest relative distance between the output of a recurrent network and the output computed with masks, for these
# masks to be accepted as the ones that were used.
_ALIKE = 0.1


def functions() -> Iterator[tuple[Any, str, str]]:
    for name in ("dropout", "dropout2d", "dropout3d", *_ALPHA):
        if hasattr(functional, name):
            yield functional, name, name
    yield paddle._C_ops, FUNCTION, FUNCTION


def about(name: str, heard: InterceptedCall) -> DropoutCall | None:
    if not paddle.in_dynamic_mode():
        return None
    if name == FUNCTION:
        call = Recurrent.from_call(heard)
        drops = 0 < call.rate < 1 and call.between
        return DropoutCall(call.mode.lower(), call.rate, call.shape, call.between) if drops else None
    arguments = heard.arguments()
    rate = float(arguments["p"]) if arguments["training"] else 0.0
    return DropoutCall(name, rate, tuple(arguments["x"].shape)) if 0.0 < rate < 1.0 else None


def kept(name: str, heard: InterceptedCall, output: Any, before: Any) -> np.ndarray | None:
    with paddle.no_grad():
        if name == FUNCTION:
            environment.restore(before)
            masks = Recurrent.from_call(heard).drawn()
            expected = Recurrent.from_call(heard).keeping(masks)[0].astype("float32")
            apart = paddle.linalg.norm(expected - output[0].detach().astype("float32"))
            return masks if float(apart) <= _ALIKE * float(paddle.linalg.norm(expected)) else None
        ones = paddle.ones_like(heard.arguments()["x"].detach())
        environment.restore(before)
        mask = _on_ones(heard, ones) > 0
    return tensors.copy(mask)


def draw(name: str, heard: InterceptedCall) -> None:
    with paddle.no_grad():
        if name == FUNCTION:
            Recurrent.from_call(heard).drawn()
            return
        _on_ones(heard, paddle.ones_like(heard.arguments()["x"].detach()))


def handed_on(name: str, heard: InterceptedCall) -> None:
    return None


def _on_ones(heard: InterceptedCall, ones: Any) -> Any:
    arguments = heard.arguments()
    # All arguments except `inplace` and `name`.
    more = {key: arguments[key] for key in ("p", "axis", "training", "mode", "data_format") if key in arguments}
    return heard.function(ones, **more)


def keeping(name: str, heard: InterceptedCall, mask: np.ndarray) -> Any:
    if name == FUNCTION:
        return Recurrent.from_call(heard).keeping(mask)
    arguments = heard.arguments()
    source, rate = arguments["x"], float(arguments["p"])
    if name in _ALPHA:
        scale = 1 / math.sqrt((_SATURATION**2 * rate + 1) * (1 - rate))
        shift = np.where(mask, 0.0, scale * _SATURATION) - scale * _SATURATION * rate
        return source * tensors.like(source, mask * scale) + tensors.like(source, shift)
    if arguments.get("mode") == "downscale_in_infer" or arguments.get("axis") is not None or name != "dropout":
        scale = 1.0 if arguments.get("mode") == "downscale_in_infer" else 1 / (1 - rate)
        output = source * tensors.like(source, mask * scale)
    else:
        # Divide, as paddle's kernel does. The CPU has no division for dtypes narrower than float32.
        wide = source if source.dtype in (paddle.float32, paddle.float64) else source.astype("float32")
        output = (wide / tensors.like(wide, np.where(mask, 1 - rate, np.inf))).astype(source.dtype)
    return paddle.assign(output, source) if arguments.get("inplace") else output


def unfed(layer: Any) -> bool:
    if isinstance(layer, paddle.nn.RReLU):
        return True
    # Fused layers apply dropout in C++.
    rates = [value for name, value in vars(layer).items() if "dropout" in name or name == "p"]
    fused = any(kind.__module__.startswith("paddle.incubate.nn") for kind in type(layer).__mro__)
    return fused and any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)


def see(observer: MaskObserver) -> Handle:
    return MasksSeen(sys.modules[__name__], observer)


def feed(source: MaskSource) -> Handle:
    return MasksFed(sys.modules[__name__], source)
