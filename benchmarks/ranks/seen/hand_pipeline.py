"""A small language model cut in two by hand: `send` and `recv` between two stages, micro-batches, tied embeddings."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from ..kit import EVENT, STEPS, Planted, Program

WORDS, WIDTH, ROWS, LENGTH = 19, 12, 3, 7

PROGRAM = Program(
    "hand_pipeline",
    "torch",
    2,
    (
        Planted("gradients in reverse", alone=False, step=0, rank=0, words=("grad",)),
        Planted("tied and not summed", alone=False, step=0, places="embed|out", words=("grad",), twin="tied"),
        Planted("a gradient is dropped", alone=False, step=EVENT, rank=0, places="embed|lower", words=("grad",)),
        Planted("a stale activation", alone=False, step=EVENT, rank=1, places="upper", words=("forward", "input")),
        Planted("loss not averaged", alone=False, step=0, rank=1, words=(r"\b3\b", "times")),
        Planted("upper stage in eval", alone=False, step=0, rank=1, places="drop", words=("eval", "dropout")),
        Planted("lower stage's rate", step=0, rank=0, words=("rate",)),
        Planted("lower stage alone clips", alone=False, step=0, rank=0, words=("clip", "times")),
    ),
    ("", "tied", "one micro-batch"),
)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.mix(self.norm(x))))


class Lower(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.lower = nn.Sequential(Block(), Block())

    def forward(self, ids):
        return self.lower(self.embed(ids))


class Upper(nn.Module):
    def __init__(self):
        super().__init__()
        self.upper = nn.Sequential(Block(), Block())
        self.out = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x):
        return self.out(self.upper(x))


def train(name, rank, world, record):
    torch.manual_seed(5)
    lower, upper = Lower(), Upper()
    tied = name.startswith("tied")
    if tied:
        with torch.no_grad():
            upper.out.weight.copy_(lower.embed.weight)
    stage = lower if rank == 0 else upper
    torch.manual_seed(60 + rank)
    if name == "upper stage in eval":
        upper.eval()
    rate = 6e-2 if name == "lower stage's rate" and rank == 0 else 3e-2
    optimizer = torch.optim.SGD(stage.parameters(), rate, momentum=0.8)
    micros = 1 if name == "one micro-batch" else 3
    with record(stage, optimizer=optimizer) as run:
        for step in range(STEPS):
            made = torch.Generator().manual_seed(300 + step)
            ids = torch.randint(0, WORDS, (3 * ROWS, LENGTH + 1), generator=made).chunk(micros)
            optimizer.zero_grad()
            total = torch.zeros(())
            if rank == 0:
                sent = [stage(each[:, :-1]) for each in ids]
                for each in sent:
                    dist.send(each.detach().contiguous(), 1)
                back = [torch.empty_like(each) for each in sent]
                for each in back:
                    dist.recv(each, 1)
                if name == "gradients in reverse":
                    back.reverse()
                for micro, (each, grad) in enumerate(zip(sent, back)):
                    if name == "a gradient is dropped" and step == EVENT and micro == 1:
                        continue
                    each.backward(grad)
            else:
                got, losses = [], []
                for each in ids:
                    x = torch.empty(len(each), LENGTH, WIDTH)
                    dist.recv(x, 0)
                    got.append(x)
                if name == "a stale activation" and step == EVENT:
                    got[2] = got[1].clone()
                for x, each in zip(got, ids):
                    x.requires_grad_(True)
                    loss = nn.functional.cross_entropy(stage(x).flatten(0, 1), each[:, 1:].flatten())
                    losses.append(loss if name == "loss not averaged" else loss / micros)
                    losses[-1].backward()
                for x in got:
                    dist.send(x.grad, 0)
                total = torch.stack(losses).sum().detach()
            if tied and name != "tied and not summed":
                dist.all_reduce((stage.embed if rank == 0 else stage.out).weight.grad)
            if name == "lower stage alone clips" and rank == 0:
                nn.utils.clip_grad_norm_(stage.parameters(), 0.05)
            optimizer.step()
            dist.broadcast(total, 1)
            if run is not None:
                run.log_loss(total)
                run.try_dump()
