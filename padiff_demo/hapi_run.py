"""The candidate of the demo: the same CNN as another person's port, trained by paddle.Model (hapi)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import paddle
from paddle import nn

from padiff_demo.data import LEARNING_RATE
from padiff_hapi import PaDiffCallback


class Digits(nn.Layer):
    """The CNN with other names and nesting than the reference. Input ``(batch, 1, 8, 8)``, output ``(batch, 10)``."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2D(1, 16, 3, padding=1, bias_attr=False)
        self.bn1 = nn.BatchNorm2D(16, momentum=momentum)
        self.act1 = nn.ReLU()
        self.conv2 = nn.Conv2D(16, 32, 3, padding=1, bias_attr=False)
        self.bn2 = nn.BatchNorm2D(32, momentum=momentum)
        self.act2 = nn.ReLU()
        self.pool = nn.MaxPool2D(2)
        self.fc = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.act2(self.bn2(self.conv2(x)))
        return self.fc(self.pool(x).flatten(1))


# The reference's tensor that initialises each of the candidate's.
_FROM = {
    "conv1.weight": "stem.0.weight",
    "bn1.weight": "stem.1.weight",
    "bn1.bias": "stem.1.bias",
    "conv2.weight": "body.0.weight",
    "bn2.weight": "body.1.weight",
    "bn2.bias": "body.1.bias",
    "fc.weight": "classifier.weight",
    "fc.bias": "classifier.bias",
}


class _Batches(paddle.io.Dataset):  # type: ignore[misc]
    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self._images, self._labels = images.reshape(-1, 1, 8, 8), labels.reshape(-1, 1)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self._images[index], self._labels[index]

    def __len__(self) -> int:
        return len(self._images)


def train(
    weights: dict[str, np.ndarray],
    images: np.ndarray,
    labels: np.ndarray,
    dir_path: Path,
    momentum: float = 0.9,
    **options: Any,
) -> None:
    """Train on the given batches, in order, with a `PaDiffCallback` that records into ``dir_path``.

    Args:
        momentum: momentum of the BatchNorms in paddle's convention: 0.9 is torch's 0.1.
    """
    network = Digits(momentum)
    state = network.state_dict()
    for name, source in _FROM.items():
        value = weights[source]
        state[name].set_value(value.T.copy() if name == "fc.weight" else value)
    model = paddle.Model(network)
    optimizer = paddle.optimizer.Adam(learning_rate=LEARNING_RATE, parameters=network.parameters())
    model.prepare(optimizer, nn.CrossEntropyLoss())
    callback = PaDiffCallback(dir_path, **options)
    data = _Batches(images, labels)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="To copy construct from a tensor|When training, we now always")
        model.fit(data, batch_size=labels.shape[1], epochs=1, shuffle=False, verbose=0, callbacks=[callback])
