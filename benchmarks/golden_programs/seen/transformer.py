import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from kit import begin_torch, spoil, term, times
from torch import nn

FAULTS = ("weight", "constant", "beta", "term", "clip")
begin_torch()


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 * times("constant"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        hidden = nn.functional.gelu(self.up(self.norm2(x)))
        return x + self.down(hidden) + term("term") * x.square()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.layers = nn.ModuleList([Layer(64, 4) for _ in range(3)])
        self.head = nn.Linear(64, 100)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


net = Net()
spoil("weight", net.layers[1].up.weight)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9 * times("beta"), 0.999))
for _ in range(3):
    tokens = torch.randint(0, 100, (4, 17))
    loss = nn.functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5 * times("clip"))
    optimizer.step()
    optimizer.zero_grad()
