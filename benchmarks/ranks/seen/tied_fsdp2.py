"""A language model whose output shares the embedding's weight, under FSDP2, with torch's clipping and accumulation."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ..kit import EVENT, STEPS, Planted, Program

PROGRAM = Program(
    "tied_fsdp2",
    "torch",
    4,
    (
        Planted("never synchronised", alone=False, step=0, words=("grad",), twin="accumulates"),
        Planted("the tie is broken", alone=False, step=0, places="embed|out", words=("tied", "share", "own")),
        Planted("rank 3's labels", alone=False, step=EVENT, rank=3, words=("loss", "label")),
        Planted("rank 2's rate", step=0, rank=2, words=("rate",)),
        Planted("rank 1 forgets its moments", alone=False, step=EVENT, rank=1, words=("update",)),
        Planted("two ranks read one shard", step=EVENT, words=("same batch", "same data")),
        Planted("rank 1's positions", alone=False, step=0, rank=1, places="positions|\\bplace"),
        Planted("own clip", step=0, words=("clip",)),
        Planted("one rank's own clip", rank=2, step=EVENT, words=("clip",)),
        Planted("same dropout later", step=EVENT, places="drop", words=("dropout", "mask")),
    ),
    ("", "accumulates", "kept whole", "bfloat16", "own norm is small"),
)


class Attend(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attend = nn.MultiheadAttention(width, heads, batch_first=True)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wide = nn.Linear(width, 3 * width)
        self.drop = nn.Dropout(0.15)
        self.narrow = nn.Linear(3 * width, width)

    def forward(self, x, mask):
        y = self.first(x)
        x = x + self.attend(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.narrow(self.drop(nn.functional.gelu(self.wide(self.second(x)))))


class Writer(nn.Module):
    def __init__(self, words=23, width=16, length=10, tie=True):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.positions = nn.Embedding(length + 1, width)
        self.layers = nn.ModuleList(Attend(width, 4) for _ in range(2))
        self.out = nn.Linear(width, words, bias=False)
        if tie:
            self.out.weight = self.embed.weight
        else:
            with torch.no_grad():
                self.out.weight.copy_(self.embed.weight)

    def forward(self, ids, begin=0):
        place = torch.arange(ids.shape[1]) + begin
        x = self.embed(ids) + self.positions(place)
        mask = torch.full((ids.shape[1],) * 2, float("-inf")).triu(1).to(x.dtype)
        for layer in self.layers:
            x = layer(x, mask)
        return self.out(x)


def local_norm(model):
    pieces = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    return torch.stack([piece.norm() for piece in pieces if piece.numel()]).norm()


def clip(model, name, step, rank):
    """torch's own, which knows of shards; and what people write who port from one process."""
    bound = 100.0 if name == "own norm is small" else 0.3
    own = name in ("own clip", "own norm is small")
    if own or (name == "one rank's own clip" and rank == 2 and step == EVENT):
        if name == "one rank's own clip":  # the others wait for it in the sum
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        factor = min(1.0, bound / (float(local_norm(model)) + 1e-6))
        for p in model.parameters():
            if p.grad is not None:
                p.grad.to_local().mul_(factor)
        return
    nn.utils.clip_grad_norm_(model.parameters(), bound)


def train(name, rank, world, record):
    torch.manual_seed(17)
    model = Writer(tie=name != "the tie is broken")
    options = {"mesh": init_device_mesh("cpu", (world,))}
    if name == "bfloat16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if name == "kept whole":
        options["reshard_after_forward"] = False
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    torch.manual_seed(900 + rank)
    rate = 8e-3 if name == "rank 2's rate" and rank == 2 else 4e-3
    optimizer = torch.optim.Adam(model.parameters(), rate, betas=(0.8, 0.95))
    micros = 2 if name in ("accumulates", "never synchronised") else 1
    with record(model, optimizer=optimizer) as run:
        for step in range(STEPS):
            if name == "same dropout later" and step == EVENT:
                torch.manual_seed(step)
            made = torch.Generator().manual_seed(70 + step)
            ids = torch.randint(0, 23, (4 * world, 10), generator=made)
            shard = 2 if name == "two ranks read one shard" and step == EVENT and rank == 3 else rank
            ids = ids[shard::world]
            total = 0.0
            for micro, part in enumerate(ids.chunk(micros)):
                model.set_requires_gradient_sync(micro == micros - 1 and name != "never synchronised")
                logits = model(part[:, :-1], 1 if name == "rank 1's positions" and rank == 1 else 0)
                label = part[:, :-1] if name == "rank 3's labels" and step == EVENT and rank == 3 else part[:, 1:]
                loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), label.flatten()) / micros
                loss.backward()
                total += loss.detach()
            if name != "never synchronised":
                clip(model, name, step, rank)
            if name == "rank 1 forgets its moments" and step == EVENT and rank == 1:
                optimizer.state.clear()
            optimizer.step()
            optimizer.zero_grad()
            if run is not None:
                run.log_loss(total)
                run.try_dump()
