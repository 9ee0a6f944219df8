"""The transformer of the benchmarks, written in paddle; its ResNet-18 comes from paddle.vision."""

from __future__ import annotations

import paddle
from paddle import nn


class _Layer(nn.Layer):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.act = nn.GELU(approximate=True)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.ln_1(x)).reshape([batch, length, 3, self.heads, width // self.heads]).unbind(2)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.reshape([batch, length, width]))
        return x + self.down(self.act(self.up(self.ln_2(x))))


class GPT2(nn.Layer):
    """A GPT-2 small: 124 M parameters with 12 layers. Input ``(batch, length)`` of token ids."""

    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12, words: int = 50257) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(1024, width)
        self.h = nn.LayerList([_Layer(width, heads) for _ in range(layers)])
        self.ln_f = nn.LayerNorm(width)

    def forward(self, ids: paddle.Tensor) -> paddle.Tensor:
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for layer in self.h:
            x = layer(x)
        return self.ln_f(x) @ self.wte.weight.T
