import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import numpy as np
import paddle
from kit import begin_paddle, spoil, times
from paddle import nn

FAULTS = ("weight", "scale", "loss", "constant", "lr")
begin_paddle()


class Reader(nn.Layer):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(90, 24)
        self.reader = nn.LSTM(24, 40)
        self.mix = nn.Conv1D(40, 40, 3, padding=1)
        self.norm = nn.BatchNorm1D(40)
        self.head = nn.Linear(40, 4)

    def forward(self, ids):
        states, _ = self.reader(self.words(ids))
        x = self.norm(self.mix(states.transpose([0, 2, 1])))
        x = nn.functional.leaky_relu(x, 0.01 * times("constant")) * times("scale")
        return self.head(x.max(-1))


net = Reader()
spoil("weight", net.mix.weight)
optimizer = paddle.optimizer.SGD(0.1 * times("lr"), parameters=net.parameters())
rng = np.random.default_rng(2)
for _ in range(3):
    ids, labels = paddle.to_tensor(rng.integers(0, 90, (12, 16))), paddle.to_tensor(rng.integers(0, 4, 12))
    loss = nn.functional.cross_entropy(net(ids), labels) * times("loss")
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
