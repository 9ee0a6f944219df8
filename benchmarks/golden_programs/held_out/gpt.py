import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import math

import torch
from kit import begin_torch, times
from torch import nn

FAULTS = ("position", "lr", "decay", "tie")
begin_torch()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x, mask):
        y = self.ln1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class Gpt(nn.Module):
    def __init__(self, vocabulary=80, width=48):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        length = ids.shape[1]
        x = self.tokens(ids) * math.sqrt(48) + self.places(torch.arange(length)) * times("position")
        mask = torch.full((length, length), float("-inf")).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x)) / math.sqrt(48) * times("tie")


net = Gpt()
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-4 * times("lr"), weight_decay=0.1 * times("decay"))
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)
for _ in range(3):
    ids = torch.randint(0, 80, (6, 25))
    loss = nn.functional.cross_entropy(net(ids[:, :-1]).transpose(1, 2), ids[:, 1:])
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    warmup.step()
