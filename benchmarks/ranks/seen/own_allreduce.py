"""A multi-layer perceptron whose gradients a script reduces by hand, on four processes: another author's hand."""

from __future__ import annotations

import numpy as np
import torch
import torch.distributed as dist

from ..kit import EVENT, STEPS, Planted, Program

PROGRAM = Program(
    "own_allreduce",
    "torch",
    4,
    (
        Planted("skipped for the head", step=0, places=r"^4\W|4\W*bias", words=("not reduced",)),
        Planted("rank 2 skips its share", rank=None, alone=False, step=EVENT, words=("grad",)),
        Planted("own clip after", step=0, words=("clip", "factor of its own")),
        Planted("own clip before", alone=False, step=0, words=("clip", "times", "norm")),
        Planted("rank 3 has rank 1's shard", step=0, rank=3, words=("same batch",)),
        Planted("rank 2's seed", step=0, rank=2, words=("begin", "start", "seed")),
        Planted("rank 0 drifts", rank=0, places=r"2\W+weight", words=("rank 0",)),
        Planted("rank 3's rate", step=EVENT, rank=3, words=("rate", "update")),
        Planted("rank 1 decays", step=0, rank=1, words=("decay", "update")),
        Planted("sums", alone=False, step=0, words=(r"\b4\b", "times")),
        Planted("sums every micro-batch", alone=False, step=0, words=("grad",), twin="accumulates"),
    ),
    ("", "accumulates", "broadcasts every step"),
)


def train(name, rank, world, record):
    torch.manual_seed(12 if name == "rank 2's seed" and rank == 2 else 5)
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )
    decay = 0.3 if name == "rank 1 decays" and rank == 1 else 0.01
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=decay)
    pieces = 2 if name in ("accumulates", "sums every micro-batch") else 1

    def reduce(factor):
        for path, p in net.named_parameters():
            if name == "skipped for the head" and path.startswith("4."):
                continue
            dist.all_reduce(p.grad)
            p.grad *= factor

    with record(net, optimizer=opt) as rec:
        for i in range(STEPS):
            rng = np.random.default_rng(40 + i)
            x, y = rng.normal(size=(32, 6)).astype("f"), rng.normal(size=(32, 1)).astype("f")
            part = 1 if name == "rank 3 has rank 1's shard" and rank == 3 else rank
            x, y = torch.tensor(x[part::world]), torch.tensor(y[part::world])
            if name == "broadcasts every step":
                for p in net.parameters():
                    dist.broadcast(p.data, 0)
            opt.zero_grad()
            for a, b in zip(x.chunk(pieces), y.chunk(pieces)):
                loss = ((net(a) - b) ** 2).mean() / pieces
                if name == "sums every micro-batch":
                    (loss / world).backward()
                    reduce(1)
                else:
                    loss.backward()
            if name == "rank 2 skips its share" and i == EVENT and rank == 2:
                for p in net.parameters():
                    p.grad.zero_()
            if name == "own clip before":
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.3)
            if name == "own clip after":
                norm = torch.cat([p.grad.flatten() for p in net.parameters()]).norm()
            if name == "sums":
                reduce(1)
            elif name != "sums every micro-batch":
                reduce(1 / world)
            if name == "own clip after":
                for p in net.parameters():
                    p.grad *= min(1.0, float(0.3 / norm))
            if name == "rank 0 drifts" and i == EVENT and rank == 0:
                net[2].weight.data[3, 3] += 1e-4
            if name == "rank 3's rate" and i >= EVENT and rank == 3:
                opt.param_groups[0]["lr"] = 2e-2
            opt.step()
            if rec is not None:
                rec.log_loss(loss * pieces)
                rec.try_dump()
