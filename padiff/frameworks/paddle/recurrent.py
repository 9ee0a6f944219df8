"""Dropout between the layers of paddle's recurrent networks; see `padiff.frameworks.torch.recurrent`.

One kernel of paddle computes all layers and draws the masks: on the CPU from the generator of all dropout, in the same
order as `paddle.rand`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import paddle

from padiff.frameworks.interception import InterceptedCall

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
