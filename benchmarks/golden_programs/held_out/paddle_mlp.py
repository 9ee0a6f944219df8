import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import numpy as np
import paddle
from kit import begin_paddle, spoil, term, times
from paddle import nn

FAULTS = ("weight", "scale", "lr", "term")
begin_paddle()


class Mixer(nn.Layer):
    def __init__(self, places, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.places, self.channels = nn.Linear(places, places), nn.Linear(width, width)

    def forward(self, x):
        x = x + self.places(self.norm1(x).transpose([0, 2, 1])).transpose([0, 2, 1]) * times("scale")
        return x + nn.functional.gelu(self.channels(self.norm2(x))) + term("term") * x * x


net = nn.Sequential(nn.Linear(12, 32), Mixer(10, 32), Mixer(10, 32), nn.LayerNorm(32), nn.Linear(32, 3))
spoil("weight", net[1].channels.weight)
optimizer = paddle.optimizer.AdamW(1e-3 * times("lr"), parameters=net.parameters(), weight_decay=0.05)
rng = np.random.default_rng(1)
for _ in range(3):
    x = paddle.to_tensor(rng.normal(size=(8, 10, 12)).astype("float32"))
    y = paddle.to_tensor(rng.normal(size=(8, 10, 3)).astype("float32"))
    loss = ((net(x) - y) ** 2).mean()
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
