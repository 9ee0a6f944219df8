"""Dropout between the layers of torch's recurrent networks.

torch draws these masks in C++, from the generator of all dropout, layer by layer. So padiff draws the masks again from
the same state, and accepts them if the layers, computed one by one with these masks, reproduce the network's output. A
mask has the shape of a layer's output, time first, whatever ``batch_first`` is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from padiff.frameworks.interception import InterceptedCall

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
