"""One process of trainings of a small transformer, spread over processes in many ways: started by `test_layouts`.

Arguments: the trainings (JSON): layout, run folder, the rank whose gradient is multiplied in the last step (or null),
options. The samples of a step are the same in all layouts, however they are shared out.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np
import torch
from hard.children import end_with_parent
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS, SAMPLES, WORDS, WIDTH = 2, 4, 150, 32
#: Which part of it is multiplied: a layer's bias, which some layouts share out and others do not.
FAULTY, FACTOR = "down.bias", 10


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.first(x)
        parts = (layer(y).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        seen = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(self.second(x))))


class Transformer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.places = torch.nn.Parameter(torch.randn(5, WIDTH) / 10)
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        x = self.words(words) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _sharded(model, mesh):
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _flat(model, **options):
    options["device_id"] = torch.device("cpu")
    for number, block in enumerate(model.blocks):
        model.blocks[number] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


def _split(model, mesh):
    plan = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel()) | dict.fromkeys(
        ("out", "down"), RowwiseParallel()
    )
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def built(layout: str, rank: int, world: int):
    """The model, and which share of the samples this process has, of how many."""
    torch.manual_seed(0)
    model = Transformer()
    if layout == "alone":
        return model, 0, 1
    if layout == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model), rank, world
    if layout == "fsdp1":
        return _flat(model), rank, world
    if layout == "fsdp1_original":
        return _flat(model, use_orig_params=True), rank, world
    if layout == "fsdp2":
        return _sharded(model, init_device_mesh("cpu", (world,))), rank, world
    if layout == "tensor":
        return _split(model, init_device_mesh("cpu", (world,))), 0, 1
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("outer", "inner"))
    if layout == "hybrid":
        return _sharded(model, mesh), rank, world
    assert layout == "two_axes"
    return _sharded(_split(model, mesh["inner"]), mesh["outer"]), mesh.get_local_rank("outer"), world // 2


def _multiply(model) -> None:
    """What one process does to its own part of a gradient, and tells nobody."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    name = max((name for name in found if name.endswith((FAULTY, "_flat_param"))), default=None)
    gradient = found[name]
    gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    with torch.no_grad():
        (gradient if name.endswith(FAULTY) else gradient[-WIDTH:]).mul_(FACTOR)


def train(layout: str, folder: str, faulty: int | None, options: dict[str, object], rank: int, world: int) -> None:
    import padiff

    model, share, shares = built(layout, rank, world)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=False)
    with padiff.record(model, folder, optimizer=optimizer, **options) as rec:
        for number in range(STEPS):
            words = np.random.default_rng(number).integers(0, WORDS, (SAMPLES, 6))[share::shares]
            data = torch.from_numpy(words)
            given = model(data[:, :-1])
            loss = torch.nn.functional.cross_entropy(given.flatten(0, 1), data[:, 1:].flatten())
            loss.backward()
            rec.log_loss(loss)
            if rank == faulty and number == STEPS - 1:
                _multiply(model)
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()


def main(trainings: str) -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        torch.distributed.init_process_group("gloo")
    for layout, folder, faulty, options in json.loads(trainings):
        train(layout, folder, faulty, options, rank, world)
    if world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    end_with_parent()  # not in main: tests call it, too
    main(*sys.argv[1:])
