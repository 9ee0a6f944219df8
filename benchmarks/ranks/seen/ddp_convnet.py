"""A convnet with batch norms and dropout in DistributedDataParallel, as a class that trains: one author's hand."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..kit import EVENT, STEPS, Planted, Program

PROGRAM = Program(
    "ddp_convnet",
    "torch",
    2,
    (
        Planted("skipped sync", rank=1, places=r"stem|head|norm", words=("not reduced", "by one rank alone")),
        Planted("same shard", step=0, words=("same batch", "same data")),
        Planted("same dropout", step=0, places="drop", words=("dropout", "mask")),
        Planted("other seed", step=0, rank=1, places="stem", words=("begin", "start", "seed")),
        Planted("batch norm of each", step=0, places="norm", words=("SyncBatchNorm", "own samples")),
        Planted("times world size", alone=False, step=0, words=(r"\b2\b", "times")),
        Planted("drifting weight", step=EVENT, rank=1, places=r"head\W+bias", words=("one rank", "update", "rank 1")),
        Planted("accumulates unsynchronised", step=0, rank=1, words=("not reduced",), twin="accumulates"),
    ),
    ("", "accumulates", "bucket views", "static graph"),
)


class SyncedNorm(nn.BatchNorm2d):
    """torch's own is for GPUs only."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        from torch.distributed.nn.functional import all_reduce

        count = x.numel() // x.shape[1] * dist.get_world_size()
        mean = all_reduce(x.sum((0, 2, 3))) / count
        centred = x - mean[:, None, None]
        variance = all_reduce((centred**2).sum((0, 2, 3))) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
            self.num_batches_tracked += 1
        return (
            centred / (variance + self.eps).sqrt()[:, None, None] * self.weight[:, None, None]
            + self.bias[:, None, None]
        )


class Net(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.norm = norm(8)
        self.mix = nn.Conv2d(8, 8, 3, stride=2)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(self.mix(x)).mean((2, 3))
        return self.head(self.drop(x))


class Trainer:
    def __init__(self, name, rank, world):
        self.name, self.rank, self.world = name, rank, world
        torch.manual_seed(7 + rank if name == "other seed" else 7)
        net = Net(nn.BatchNorm2d if name == "batch norm of each" else SyncedNorm)
        torch.manual_seed(99 if name == "same dropout" else 99 + rank)
        options = {"init_sync": False} if name == "other seed" else {}
        options |= {"gradient_as_bucket_view": True} if name == "bucket views" else {}
        options |= {"static_graph": True} if name == "static graph" else {}
        self.model = DistributedDataParallel(net, **options)
        if name == "times world size":
            self.model.register_comm_hook(None, self._sum)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.micro = 2 if "accumulates" in name else 1

    @staticmethod
    def _sum(_, bucket):
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda future: future.value()[0])

    def batches(self, number):
        data = np.random.default_rng(number)
        x = data.normal(size=(16, 3, 9, 9)).astype("float32")
        y = data.integers(0, 5, 16)
        own = slice(0, 16 // self.world) if self.name == "same shard" else slice(self.rank, None, self.world)
        x, y = torch.from_numpy(x[own]), torch.from_numpy(y[own])
        return list(zip(x.chunk(self.micro), y.chunk(self.micro)))

    def unsynchronised(self, number, micro):
        if (self.name == "skipped sync" and number == EVENT) or self.name == "accumulates unsynchronised":
            return self.model.no_sync()
        return self.model.no_sync() if micro < self.micro - 1 else nullcontext()

    def fit(self, record):
        with record(self.model, optimizer=self.optimizer) as recording:
            for number in range(STEPS):
                self.optimizer.zero_grad()
                total = 0.0
                for micro, (x, y) in enumerate(self.batches(number)):
                    with self.unsynchronised(number, micro):
                        loss = nn.functional.cross_entropy(self.model(x), y) / self.micro
                        loss.backward()
                    total += loss.detach()
                if self.name == "drifting weight" and number == EVENT and self.rank == 1:
                    with torch.no_grad():
                        self.model.module.head.bias += 1e-3
                self.optimizer.step()
                if recording is not None:
                    recording.log_loss(total)
                    recording.try_dump()


def train(name, rank, world, record):
    Trainer(name, rank, world).fit(record)
