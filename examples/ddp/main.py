"""DistributedDataParallel on two processes, against one process that has the whole batch.

    python main.py [FOLDER]

Each process records its own part, and the parts of a step are put together. The fault comes second: a distributed
sampler that was forgotten, so that both processes train on the same samples.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import torch

import padiff

STEPS, BATCH = 3, 16


def train(rank: int, world: int, port: int, folder: Path, sharded: bool) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    model = net
    if world > 1:
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
        model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with padiff.record(model, folder, optimizer=optimizer, existing="overwrite") as rec:
        for step in range(STEPS):
            data = torch.Generator().manual_seed(step)
            inputs, labels = torch.randn(BATCH, 16, generator=data), torch.randint(0, 4, (BATCH,), generator=data)
            own = slice(rank if sharded else 0, None, world)
            torch.nn.functional.cross_entropy(model(inputs[own]), labels[own]).backward()
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()
    if world > 1:
        torch.distributed.destroy_process_group()


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("localhost", 0))
        return trial.getsockname()[1]


def main(folder: Path) -> None:
    for name, world, sharded in (("one", 1, True), ("two", 2, True), ("two_alike", 2, False)):
        given = (world, free_port(), folder / name, sharded)
        torch.multiprocessing.start_processes(train, given, nprocs=world, start_method="fork")
    for reference, candidate in (("one", "two"), ("two", "two_alike")):
        report = padiff.compare_runs(folder / reference, folder / candidate)
        print(f"\n{reference} against {candidate}:\n{report.text()}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"))
