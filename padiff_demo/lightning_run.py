"""The reference of the demo: a small CNN for 8 x 8 digits, trained by Lightning."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from padiff_demo.data import LEARNING_RATE
from padiff_lightning import PaDiffCallback, packages

# The installed one of Lightning's two packages.
pl: Any = packages.one()


class DigitNet(nn.Module):
    """Two convolutions with BatchNorm, and a classifier. Input ``(batch, 1, 8, 8)``, output ``(batch, 10)``."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.body = nn.Sequential(
            nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(inplace=True)
        )
        self.pool = nn.MaxPool2d(2)
        self.classifier = nn.Linear(32 * 4 * 4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.pool(self.body(self.stem(images)))
        return self.classifier(features.flatten(1))


class DigitModule(pl.LightningModule):
    """DigitNet with its loss and optimizer."""

    def __init__(self, net: DigitNet, learning_rate: float) -> None:
        super().__init__()
        self.net = net
        self.learning_rate = learning_rate

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


def initial_weights(seed: int) -> dict[str, np.ndarray]:
    """Return a new DigitNet's parameters and buffers by torch's names. torch's random state is restored."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return {name: value.numpy().copy() for name, value in DigitNet().state_dict().items()}


def train(
    weights: dict[str, np.ndarray], images: np.ndarray, labels: np.ndarray, dir_path: Path, **options: Any
) -> None:
    """Train on the given batches, in order, with a `PaDiffCallback` that records into ``dir_path``."""
    for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    net = DigitNet()
    net.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in weights.items()})
    data = torch.utils.data.TensorDataset(
        torch.from_numpy(images.reshape(-1, 1, 8, 8)), torch.from_numpy(labels.reshape(-1))
    )
    loader = torch.utils.data.DataLoader(data, batch_size=labels.shape[1], shuffle=False)
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[PaDiffCallback(dir_path, **options)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*num_workers.*|.*does not have many workers.*")
        warnings.filterwarnings("ignore", category=FutureWarning)
        trainer.fit(DigitModule(net, LEARNING_RATE), loader)
