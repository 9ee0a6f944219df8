"""Two training loops of your own, one in each framework, recorded and compared.

    python main.py [FOLDER]

The port has a fault: its LayerNorm has an epsilon of 1e-3 where the reference has 1e-5.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import paddle
import torch

import padiff


def torch_model() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.LayerNorm(32, eps=1e-5), torch.nn.GELU(), torch.nn.Linear(32, 4)
    )


def paddle_model() -> paddle.nn.Layer:
    return paddle.nn.Sequential(
        paddle.nn.Linear(16, 32), paddle.nn.LayerNorm(32, epsilon=1e-3), paddle.nn.GELU(), paddle.nn.Linear(32, 4)
    )


def train_torch(model: torch.nn.Module, data: np.ndarray, labels: np.ndarray, folder: Path) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with padiff.record(model, folder, every_n_steps=5, optimizer=optimizer, existing="overwrite") as rec:
        for x, y in zip(data, labels):
            loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))
            loss.backward()
            rec.log_loss(loss)
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()


def train_paddle(model: paddle.nn.Layer, data: np.ndarray, labels: np.ndarray, folder: Path) -> None:
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=model.parameters())
    with padiff.record(model, folder, every_n_steps=5, optimizer=optimizer, existing="overwrite") as rec:
        for x, y in zip(data, labels):
            loss = paddle.nn.functional.cross_entropy(model(paddle.to_tensor(x)), paddle.to_tensor(y))
            loss.backward()
            rec.log_loss(loss)
            optimizer.step()
            optimizer.clear_grad()
            rec.try_dump()


def main(folder: Path) -> padiff.Report:
    chance = np.random.default_rng(0)
    data = chance.normal(size=(20, 8, 16)).astype(np.float32)
    labels = chance.integers(0, 4, (20, 8))
    torch.manual_seed(0)
    reference, candidate = torch_model(), paddle_model()
    padiff.assign_weight(reference, candidate)
    train_torch(reference, data, labels, folder / "torch")
    train_paddle(candidate, data, labels, folder / "paddle")
    report = padiff.compare_runs(folder / "torch", folder / "paddle")
    print(report.first_diff.message if report.first_diff else "The runs match.")
    return report


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"))
