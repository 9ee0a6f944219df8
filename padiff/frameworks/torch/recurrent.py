"""Dropout between the layers of torch's recurrent networks.

torch draws it in C++, from the generator of all dropout, layer by layer. So what it kept is drawn again from the same
state, and believed where the layers, computed one by one with it, give the network's output. A mask has the shape of
what a layer gives, time first, whatever ``batch_first`` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from padiff.frameworks.listening import Heard

#: What `torch.nn.modules.rnn` calls.
FUNCTIONS = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@dataclass(frozen=True)
class Recurrent:
    """A call of one of these functions.

    Attributes:
        sizes: how many sequences are still going on at each time, where they are packed; else `None`.
        states: of all layers, one tensor or, of an LSTM, two.
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
    def of(cls, heard: Heard) -> Recurrent:
        args = [*heard.args, *heard.kwargs.values()]
        packed = isinstance(args[3], (list, tuple))
        sizes = args.pop(1) if packed else None
        data, states, weights, *more = args
        states = (states,) if isinstance(states, torch.Tensor) else tuple(states)
        return cls(heard.function, data, sizes, states, list(weights), *more)

    @property
    def between(self) -> int:
        """How many times it drops."""
        return self.layers - 1 if self.training else 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what a layer gives."""
        width = self.states[0].shape[-1] * (2 if self.both_ways else 1)
        if self.sizes is not None:
            return (self.data.shape[0], width)
        batch, time = self.data.shape[:2] if self.batch_first else self.data.shape[1::-1]
        return (time, batch, width)

    def drawn(self) -> np.ndarray:
        """What it would keep if it was called now."""
        ones = torch.ones(self.shape, dtype=self.data.dtype, device=self.data.device)
        masks = [torch.dropout(ones, self.rate, True) > 0 for _ in range(self.between)]
        found: np.ndarray = torch.stack(masks).cpu().numpy()
        return found

    def keeping(self, masks: np.ndarray) -> tuple[Any, ...]:
        """What it gives where it keeps these elements."""
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
            found: tuple[Any, ...] = self.function(self.data, self.sizes, states, self.weights, *more)
        else:
            found = self.function(self.data, states, self.weights, *more, self.batch_first)
        return found
