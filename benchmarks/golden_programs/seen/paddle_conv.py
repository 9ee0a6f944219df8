import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import numpy as np
import paddle
from kit import begin_paddle, spoil, times
from paddle import nn

FAULTS = ("weight", "scale", "lr", "constant")
begin_paddle()


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2D(3, 16, 3, padding=1), nn.BatchNorm2D(16)
        self.conv2, self.norm2 = nn.Conv2D(16, 24, 3, padding=1), nn.BatchNorm2D(24)
        self.head = nn.Linear(24, 10)

    def forward(self, x):
        x = nn.functional.relu(self.norm1(self.conv1(x)))
        x = nn.functional.relu(self.norm2(self.conv2(x))) * times("scale")
        return self.head(x.mean([2, 3]))


net = Net()
spoil("weight", net.conv2.weight)
optimizer = paddle.optimizer.Momentum(0.1 * times("lr"), 0.9, parameters=net.parameters(), weight_decay=1e-4)
rng = np.random.default_rng(0)
for _ in range(3):
    images = paddle.to_tensor(rng.random((16, 3, 14, 14), dtype=np.float32))
    labels = paddle.to_tensor(rng.integers(0, 10, 16))
    loss = nn.functional.cross_entropy(net((images - 0.5 * times("constant")) / 0.25), labels)
    loss.backward()
    optimizer.step()
    optimizer.clear_grad()
