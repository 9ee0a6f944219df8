"""Contrastive learning: a DDP encoder inside a plain module, a target that follows it, embeddings of all ranks."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as reducing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..kit import EVENT, STEPS, Planted, Program

PROGRAM = Program(
    "contrasting",
    "torch",
    3,
    (
        Planted("one norm forgotten", step=0, places=r"second", words=("SyncBatchNorm", "own samples")),
        Planted("gathered without gradients", alone=False, step=0, words=("grad",)),
        Planted("rank 1's target follows faster", step=EVENT, rank=1, places="target"),
        Planted("temperature outside of DDP", step=0, places="temperature", words=("not reduced",)),
        Planted("dropout of one seed", step=0, words=("dropout", "mask")),
        Planted("seeded anew on all", step=EVENT, words=("dropout", "mask")),
        Planted("rank 2 reads rank 1's", step=EVENT, words=("same batch", "same data")),
        Planted("rank 2 forgets a view", alone=False, step=EVENT, rank=2, words=("input", "forward")),
        Planted("rank 0's projector drifts", step=EVENT, rank=0, places="project", words=("rank 0", "update", "alone")),
    ),
    ("", "averaged on rank 0", "constant inputs", "no dropout"),
)


class Norm(nn.Module):
    """A batch norm over all ranks, or over this rank's samples."""

    def __init__(self, width, synced=True):
        super().__init__()
        self.gain, self.shift, self.synced = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width)), synced
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("square", torch.ones(width))

    def forward(self, x):
        world = dist.get_world_size() if self.synced else 1
        sums = torch.stack([x.sum(0), (x * x).sum(0)])
        sums = reducing.all_reduce(sums) if self.synced else sums
        mean, square = sums / (len(x) * world)
        with torch.no_grad():
            self.mean.lerp_(mean, 0.1)
            self.square.lerp_(square, 0.1)
        return (x - mean) / (square - mean * mean + 1e-4).sqrt() * self.gain + self.shift


class Encoder(nn.Module):
    def __init__(self, keep, forgotten):
        super().__init__()
        self.lift, self.first = nn.Linear(10, 16), Norm(16)
        self.turn, self.second = nn.Linear(16, 16), Norm(16, synced=not forgotten)
        self.keep = keep

    def forward(self, x):
        x = nn.functional.dropout(nn.functional.relu(self.first(self.lift(x))), 1 - self.keep, self.training)
        return nn.functional.relu(self.second(self.turn(x)))


class Contrast(nn.Module):
    def __init__(self, name):
        super().__init__()
        forgotten = name == "one norm forgotten"
        encoder = nn.Sequential()
        encoder.add_module("encode", Encoder(1.0 if name == "no dropout" else 0.75, forgotten))
        encoder.add_module("project", nn.Linear(16, 6))
        self.temperature = nn.Parameter(torch.zeros(()))
        self.target = copy.deepcopy(encoder).requires_grad_(False)
        self.encoder = DistributedDataParallel(encoder, broadcast_buffers=False)
        self.gather = self.plain if name == "gathered without gradients" else self.differentiable

    @staticmethod
    def differentiable(x):
        return torch.cat(reducing.all_gather(x))

    @staticmethod
    def plain(x):
        all_of_it = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(all_of_it, x.detach())
        return torch.cat(all_of_it)

    def forward(self, first, second):
        queries = self.gather(nn.functional.normalize(self.encoder(first), dim=1))
        with torch.no_grad():
            keys = self.plain(nn.functional.normalize(self.target(second), dim=1))
        logits = queries @ keys.T * (2 + self.temperature.exp())
        own = slice(dist.get_rank() * len(first), (dist.get_rank() + 1) * len(first))
        return nn.functional.cross_entropy(logits[own], torch.arange(len(keys))[own])

    @torch.no_grad()
    def follow(self, momentum):
        for slow, fast in zip(self.target.parameters(), self.encoder.parameters()):
            slow.lerp_(fast, momentum)


def train(name, rank, world, record):
    torch.manual_seed(12)
    model = Contrast(name)
    torch.manual_seed(1 if name == "dropout of one seed" else 1 + rank)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.RMSprop(trained, 2e-3)
    averaged = None
    with record(model, optimizer=optimizer) as run:
        for step in range(STEPS):
            if name == "seeded anew on all" and step == EVENT:
                torch.manual_seed(step)
            reads = 1 if name == "rank 2 reads rank 1's" and step >= EVENT and rank == 2 else rank
            made = torch.Generator().manual_seed(1000 + 10 * step + reads)
            x = torch.randn(8, 10, generator=made)
            x = torch.ones(8, 10) * x[:, :1].sign() if name == "constant inputs" else x
            views = [x + 0.1 * torch.randn(8, 10, generator=made) for _ in range(2)]
            if name == "constant inputs":
                views = [x, torch.zeros_like(x)]
            if name == "rank 2 forgets a view" and rank == 2 and step == EVENT:
                views[1] = x
            model.follow(0.5 if name == "rank 1's target follows faster" and rank == 1 and step == EVENT else 0.05)
            loss = model(*views)
            loss.backward()
            if name != "temperature outside of DDP":
                dist.all_reduce(model.temperature.grad)
                model.temperature.grad /= world
            if name == "rank 0's projector drifts" and rank == 0 and step == EVENT:
                with torch.no_grad():
                    model.encoder.module.project.bias += 1e-3
            optimizer.step()
            optimizer.zero_grad()
            if name == "averaged on rank 0" and rank == 0:
                averaged = copy.deepcopy(model.encoder.module) if averaged is None else averaged
                with torch.no_grad():
                    for mean, p in zip(averaged.parameters(), model.encoder.parameters()):
                        mean.lerp_(p, 0.2)
                    averaged.project(torch.relu(averaged.encode.lift(x[:, :10])))
            if run is not None:
                run.log_loss(loss)
                run.try_dump()
