"""A loop in torch, and its port to paddle.Model, which starts from the recorded weights and gets the recorded batches.

    python main.py [FOLDER]

The fault: the port's BatchNorm was given torch's momentum. Paddle counts it the other way round.
"""

from __future__ import annotations

import sys
from pathlib import Path

import paddle
import torch

import padiff
from padiff_hapi import PaDiffCallback


def train_torch(folder: Path) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32, momentum=0.1), torch.nn.ReLU(), torch.nn.Linear(32, 4)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with padiff.record(net, folder, optimizer=optimizer, existing="overwrite") as rec:
        for _ in range(5):
            loss = torch.nn.functional.cross_entropy(net(torch.randn(8, 16)), torch.randint(0, 4, (8,)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()


def train_paddle(folder: Path, reference: Path) -> None:
    net = paddle.nn.Sequential(
        paddle.nn.Linear(16, 32), paddle.nn.BatchNorm1D(32, momentum=0.1), paddle.nn.ReLU(), paddle.nn.Linear(32, 4)
    )
    model = paddle.Model(net)
    model.prepare(paddle.optimizer.SGD(0.1, parameters=net.parameters()), paddle.nn.CrossEntropyLoss())
    batches = paddle.io.DataLoader(
        padiff.batches(reference, framework="paddle").dataset(), batch_size=None, shuffle=False
    )
    callback = PaDiffCallback(folder, existing="overwrite", start_from=reference)
    model.fit(batches, epochs=1, verbose=0, callbacks=[callback])


def main(folder: Path) -> None:
    train_torch(folder / "torch")
    train_paddle(folder / "paddle", folder / "torch")
    report = padiff.compare_runs(folder / "torch", folder / "paddle")
    print(report.first_diff.message if report.first_diff else "The runs match.")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"))
