"""A small ResNet over small batches with momentum: a training that amplifies rounding."""

from __future__ import annotations

import numpy as np
import paddle
import torch

WIDTH, CLASSES, BATCH = 8, 4, 8


class TorchBlock(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = (torch.nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = torch.nn.BatchNorm2d(width), torch.nn.BatchNorm2d(width)

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(x + self.bn2(self.conv2(out)))


class TorchResNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = torch.nn.Conv2d(3, WIDTH, 3, padding=1, bias=False), torch.nn.BatchNorm2d(WIDTH)
        self.blocks = torch.nn.Sequential(*(TorchBlock(WIDTH) for _ in range(3)))
        self.fc = torch.nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.fc(self.blocks(torch.relu(self.norm(self.stem(x)))).mean((2, 3)))


class PaddleBlock(paddle.nn.Layer):
    def __init__(self, width):
        super().__init__()
        self.conv_a, self.conv_b = (
            paddle.nn.Conv2D(width, width, 3, padding=1, bias_attr=False),
            paddle.nn.Conv2D(width, width, 3, padding=1, bias_attr=False),
        )
        self.bn_a, self.bn_b = paddle.nn.BatchNorm2D(width), paddle.nn.BatchNorm2D(width)
        self.slope = 0.0

    def forward(self, x):
        out = paddle.nn.functional.leaky_relu(self.bn_a(self.conv_a(x)), self.slope)
        return paddle.nn.functional.relu(x + self.bn_b(self.conv_b(out)))


class PaddleResNet(paddle.nn.Layer):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = paddle.nn.Conv2D(3, WIDTH, 3, padding=1, bias_attr=False), paddle.nn.BatchNorm2D(WIDTH)
        self.stages = paddle.nn.Sequential(*(PaddleBlock(WIDTH) for _ in range(3)))
        self.classifier = paddle.nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.classifier(self.stages(paddle.nn.functional.relu(self.bn(self.conv(x)))).mean((2, 3)))


def batch(number):
    random = np.random.RandomState(number)
    return random.randn(BATCH, 3, 8, 8).astype("float32"), random.randint(0, CLASSES, BATCH)
