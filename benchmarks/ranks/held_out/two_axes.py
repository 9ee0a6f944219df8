"""Attention split over two processes, sharded over two more: what goes wrong in one group of a mesh of two axes."""

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ..kit import EVENT, STEPS, Planted, Program

PROGRAM = Program(
    "two_axes",
    "torch",
    4,
    (
        Planted("a replicated norm drifts on rank 3", rank=3, places="norm", words=("rank 3",)),
        Planted("a split weight drifts on rank 2", rank=2, alone=False, words=("rank 2",)),
        Planted("own clip", step=0, alone=False, words=("clip", "times", "factor")),
        Planted("one file for both", step=0, words=("same batch",)),
        Planted("ranks 2 and 3 skip", alone=False, step=EVENT, words=("grad",)),
        Planted("times world size", alone=False, step=0, words=(r"\b2\b", "times")),
        Planted("a partner reads other words", step=0, rank=1, words=("batch", "input")),
    ),
)


class Unit(nn.Module):
    def __init__(self, size=24):
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.k, self.o = nn.Linear(size, 2 * size), nn.Linear(2 * size, size)

    def forward(self, x):
        return x + self.o(torch.tanh(self.k(self.norm(x))))


def part(t):
    return t.to_local() if hasattr(t, "to_local") else t


def train(name, rank, world, record):
    torch.manual_seed(1)
    net = nn.Sequential(Unit(), Unit(), nn.Linear(24, 6))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "split"))
    for unit in net[:2]:
        parallelize_module(unit, mesh["split"], {"k": ColwiseParallel(), "o": RowwiseParallel()})
        fully_shard(unit, mesh=mesh["data"])
    fully_shard(net, mesh=mesh["data"])
    outer = mesh.get_local_rank("data")
    opt = torch.optim.AdamW(net.parameters(), 2e-3, foreach=False)
    with record(net, optimizer=opt) as rec:
        for i in range(STEPS):
            rng = np.random.default_rng((i, 9 if name == "a partner reads other words" and rank == 1 else 0))
            x, y = rng.normal(size=(8, 24)).astype("float32"), rng.normal(size=(8, 6)).astype("float32")
            own = slice(0, 4) if name == "one file for both" else slice(outer * 4, outer * 4 + 4)
            loss = ((net(torch.from_numpy(x[own])) - torch.from_numpy(y[own])) ** 2).mean()
            loss.backward()
            own = {n: part(p.grad) for n, p in net.named_parameters()}
            if name == "times world size":
                for g in own.values():
                    g *= 2
            if name == "own clip":
                norm = torch.stack([g.norm() for g in own.values()]).norm()
                for g in own.values():
                    g *= min(1.0, float(0.1 / norm))
            if name == "ranks 2 and 3 skip" and i == EVENT and rank >= 2:
                for g in own.values():
                    g.zero_()
            with torch.no_grad():
                held = {n: part(p) for n, p in net.named_parameters()}
                if i == EVENT and rank == 3 and name.startswith("a replicated norm"):
                    held["1.norm.weight"] += 1e-3
                if i == EVENT and rank == 2 and name.startswith("a split weight"):
                    held["0.k.weight"] += 1e-3
            opt.step()
            opt.zero_grad()
            if rec is not None:
                rec.log_loss(loss)
                rec.try_dump()
