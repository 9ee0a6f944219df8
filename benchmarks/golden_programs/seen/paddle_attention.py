import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import numpy as np
import paddle
from kit import begin_paddle, spoil, times
from paddle import nn

FAULTS = ("weight", "scale", "loss", "beta")
begin_paddle()


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(60, 32)
        self.attention, self.norm = nn.MultiHeadAttention(32, 4), nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.head = nn.Linear(32, 6)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.norm(x + self.attention(x) * times("scale"))
        x = x + self.down(nn.functional.gelu(self.up(x)))
        return self.head(x.mean(1))


net = Net()
spoil("weight", net.up.weight)
optimizer = paddle.optimizer.Adam(2e-3, beta1=0.9 * times("beta"), parameters=net.parameters())
rng = np.random.default_rng(0)
for _ in range(3):
    tokens = paddle.to_tensor(rng.integers(0, 60, (8, 12)))
    labels = paddle.to_tensor(rng.integers(0, 6, 8))
    loss = nn.functional.cross_entropy(net(tokens), labels) * times("loss")
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
