"""Mixed precision with a gradient scaler, and four micro-batches a step; against the same in float32.

    python main.py [FOLDER]

Autocast alone makes no diff: what it rounds is allowed, and the verdict says that the precisions differ. The fault
comes third: the loss is divided by the number of micro-batches twice.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import padiff

MICRO_BATCHES, STEPS = 4, 3


def train(folder: Path, autocast: bool, divided: int = 1) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=autocast, init_scale=2.0**12)
    with padiff.record(net, folder, optimizer=optimizer, existing="overwrite") as rec:
        for _ in range(STEPS):
            rec.loss_scale = scaler.get_scale()  # gradients of activations are compared without it
            for _ in range(MICRO_BATCHES):
                inputs, labels = torch.randn(8, 16), torch.randint(0, 4, (8,))
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = torch.nn.functional.cross_entropy(net(inputs), labels) / MICRO_BATCHES**divided
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 10.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            rec.try_dump()


def main(folder: Path) -> None:
    train(folder / "float32", autocast=False)
    train(folder / "amp", autocast=True)
    train(folder / "divided_twice", autocast=True, divided=2)
    for candidate in ("amp", "divided_twice"):
        report = padiff.compare_runs(folder / "float32", folder / candidate)
        print(f"\nfloat32 against {candidate}:\n{report.text()}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"))
