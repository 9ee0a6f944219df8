"""A GRU whose optimizer state is shared out by hand (a rank steps its piece of one flat vector), on three processes."""

import numpy as np
import torch
import torch.distributed as dist

from ..kit import EVENT, STEPS, Planted, Program

PROGRAM = Program(
    "zero_gru",
    "torch",
    3,
    (
        Planted("padding in front", alone=False, step=0, words=("update", "weight")),
        Planted("rank 1 misses the gather", rank=1, step=EVENT, words=("rank 1", "update")),
        Planted("scatter without a sum", alone=False, step=0, words=("grad", "update")),
        Planted("rank 2's initial state", rank=2, step=0, places="cell|out", words=("begin", "start", "seed")),
        Planted("rank 0's loss is doubled", alone=False, step=EVENT, words=("grad", "loss")),
        Planted("all read the first file", step=0, words=("same batch",)),
        Planted("noise of one seed", step=0, words=("dropout", "mask")),
        # Whoever steps a piece sends it to all: what rank 0 or 2 does wrong, all ranks hold alike.
        Planted("rank 0's embedding drifts", alone=False, step=EVENT, places="words", words=("update",)),
        Planted("rank 2's rate", alone=False, step=0, words=("update",)),
    ),
    ("", "zero optimizer"),
)


class Speech(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(17, 10)
        self.cell = torch.nn.GRU(10, 11, batch_first=True)
        self.noise = torch.nn.Dropout(0.2)
        self.out = torch.nn.Linear(11, 17)

    def forward(self, ids):
        return self.out(self.noise(self.cell(self.words(ids))[0]))


class FlatAdam(torch.optim.Optimizer):
    """Adam on this rank's piece of all parameters in a row."""

    def __init__(self, params, rate, fault):
        super().__init__(list(params), {"lr": rate})
        self.params, self.fault = self.param_groups[0]["params"], fault
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.size = sum(p.numel() for p in self.params)
        self.piece = -(-self.size // self.world) + 1
        self.m, self.v, self.t = torch.zeros(self.piece), torch.zeros(self.piece), 0

    def _flat(self, tensors, front=False):
        flat = torch.zeros(self.piece * self.world)
        start = len(flat) - self.size if front else 0
        flat[start : start + self.size] = torch.cat([t.reshape(-1) for t in tensors])
        return flat

    @torch.no_grad()
    def step(self, closure=None):
        own = slice(self.rank * self.piece, (self.rank + 1) * self.piece)
        weights, grads = self._flat([p.data for p in self.params]), self._flat([p.grad for p in self.params])
        g, w = grads[own], weights[own]
        self.t += 1
        self.m.lerp_(g, 0.1)
        self.v.lerp_(g * g, 0.01)
        rate = self.param_groups[0]["lr"] * (0.5 if self.fault == "rank 2's rate" and self.rank == 2 else 1.0)
        w -= rate * (self.m / (1 - 0.9**self.t)) / ((self.v / (1 - 0.99**self.t)).sqrt() + 1e-8)
        pieces = [torch.empty(self.piece) for _ in range(self.world)]
        dist.all_gather(pieces, w.contiguous())
        if self.fault == "rank 1 misses the gather" and self.rank == 1 and self.t > EVENT:
            return
        flat = torch.cat(pieces)
        place = len(flat) - self.size if self.fault == "padding in front" else 0
        for p in self.params:
            p.copy_(flat[place : place + p.numel()].view_as(p))
            place += p.numel()


def train(name, rank, world, record):
    torch.manual_seed(77 if name == "rank 2's initial state" and rank == 2 else 4)
    model = Speech()
    torch.manual_seed(31 if name == "noise of one seed" else 31 + rank)
    if name == "zero optimizer":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        wrapped = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.Adam, lr=1e-2)
    else:
        wrapped, optimizer = model, FlatAdam(model.parameters(), 1e-2, name)
    with record(wrapped, optimizer=optimizer) as padiffs:
        for step in range(STEPS):
            rows = np.random.default_rng(500 + step).integers(0, 17, (12, 8))
            rows = torch.from_numpy(rows[:4] if name == "all read the first file" else rows[rank * 4 : rank * 4 + 4])
            logits = wrapped(rows[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:])
            twice = name == "rank 0's loss is doubled" and rank == 0 and step == EVENT
            (loss * 2 if twice else loss).backward()
            if name == "rank 0's embedding drifts" and rank == 0 and step == EVENT:
                model.words.weight.data[5] += 1e-3
            if wrapped is model:
                for p in model.parameters():
                    if name != "scatter without a sum":
                        dist.all_reduce(p.grad)
                        p.grad.div_(world)
                    elif rank:
                        dist.broadcast(p.grad, 0)
                    else:
                        dist.broadcast(p.grad, 0)
            optimizer.step()
            model.zero_grad()
            if padiffs is not None:
                padiffs.log_loss(loss)
                padiffs.try_dump()
