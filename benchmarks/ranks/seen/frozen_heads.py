"""Adapters on a frozen backbone, two heads in turn, micro-batches: DDP with unused parameters, ZeRO-1 and `Join`."""

from __future__ import annotations

import copy
from contextlib import ExitStack, nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from ..kit import EVENT, STEPS, Planted, Program

MICRO = 3

PROGRAM = Program(
    "frozen_heads",
    "torch",
    3,
    (
        Planted("no_sync around the last", step=0, places="adapter|heads", words=("not reduced",), twin="all touched"),
        Planted("another backbone", step=0, rank=2, places="backbone", words=("begin", "start", "seed")),
        Planted("rank 1 decays", step=0, rank=1, places="adapter|heads", words=("decay", "update")),
        Planted("rank 2 steps twice", step=EVENT, rank=2, places="adapter|heads", words=("update",)),
        Planted("rank 1's schedule lags", step=EVENT, rank=1, words=("rate",)),
        Planted("zero, rank 2's rate", step=0, rank=2, words=("rate",), twin="zero"),
        Planted("zero, rank 0 does not hear", step=EVENT, rank=0, words=("update",), twin="zero"),
        Planted("rank 1 takes the other head", alone=False, step=EVENT, rank=1, places="heads"),
        Planted("same rows again", step=EVENT, words=("same batch", "same data")),
    ),
    ("", "zero", "averaged on rank 0", "whole batches", "join", "all touched"),
)


class Adapted(nn.Module):
    def __init__(self, touches):
        super().__init__()
        self.touches = touches  # the other head as well, for nothing, as DDP wants it that looks for no unused ones
        self.backbone = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 16), nn.Tanh())
        self.backbone.requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(16, 6), nn.ReLU(), nn.Linear(6, 16))
        self.heads = nn.ModuleDict({"coarse": nn.Linear(16, 3), "fine": nn.Linear(16, 8)})

    def forward(self, x, which):
        x = self.backbone(x)
        x = x + self.adapter(x)
        y = self.heads[which](x)
        return y + 0.0 * sum(head(x).sum() for head in self.heads.values()) if self.touches else y


def rows(step: int, rank: int, world: int):
    made = torch.Generator().manual_seed(40 + step)
    x, y = torch.randn(world * 12, 12, generator=made), torch.randint(0, 24, (world * 12,), generator=made)
    return x[rank * 12 : rank * 12 + 12], y[rank * 12 : rank * 12 + 12]


def train(name, rank, world, record):
    torch.manual_seed(21)
    touches = name in ("all touched", "no_sync around the last")
    net = Adapted(touches)
    model = DistributedDataParallel(net, find_unused_parameters=not touches)
    if name == "another backbone" and rank == 2:
        with torch.no_grad():  # it loads an older file, after DDP has sent rank 0's weights
            net.backbone[2].weight.mul_(1.01)
    trained = [p for p in model.parameters() if p.requires_grad]
    lag = name == "rank 1's schedule lags" and rank == 1
    if name.startswith("zero"):
        rate = 2e-2 if name == "zero, rank 2's rate" and rank == 2 else 1e-2
        optimizer = ZeroRedundancyOptimizer(trained, torch.optim.AdamW, lr=rate)
    else:
        decay = 0.3 if name == "rank 1 decays" and rank == 1 else 0.0
        optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 0.5 if done >= EVENT + lag else 1.0)
    averaged = copy.deepcopy(net) if name == "averaged on rank 0" and rank == 0 else None
    micros = 1 if name == "whole batches" else MICRO
    steps = STEPS - 1 if name == "join" and rank == 2 else STEPS
    with ExitStack() as stack:
        run = stack.enter_context(record(model, optimizer=optimizer))
        if name == "join":
            stack.enter_context(Join([model]))
        for step in range(steps):
            which = "fine" if step % 2 else "coarse"
            if name == "rank 1 takes the other head" and step == EVENT and rank == 1:
                which = "fine"
            x, y = rows(step, 0 if name == "same rows again" and step == EVENT and rank == 1 else rank, world)
            total = 0.0
            for micro, (a, b) in enumerate(zip(x.chunk(micros), y.chunk(micros))):
                held = micro == micros - 1 if name == "no_sync around the last" else micro < micros - 1
                with model.no_sync() if held else nullcontext():
                    loss = nn.functional.cross_entropy(model(a, which), b % (8 if which == "fine" else 3)) / micros
                    loss.backward()
                total += loss.detach()
            kept = [p.detach().clone() for p in trained]
            optimizer.step()
            if name == "rank 2 steps twice" and step == EVENT and rank == 2:
                optimizer.step()
            if name == "zero, rank 0 does not hear" and step == EVENT and rank == 0:
                with torch.no_grad():
                    for p, old in zip(trained, kept):
                        p.copy_(old)
            schedule.step()
            optimizer.zero_grad()
            if averaged is not None:
                with torch.no_grad():
                    for mean, p in zip(averaged.parameters(), net.parameters()):
                        mean.lerp_(p, 0.1)
                    averaged.eval()(x, which), net.eval()(x, which)
                net.train()
            if run is not None:
                run.log_loss(total)
                run.try_dump()
    dist.barrier()
