"""A small transformer in FSDP1, FSDP2 and hybrid sharding: what two groups of ranks hold alike, and one has of all."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from ..kit import EVENT, STEPS, Planted, Program

PROGRAM = Program(
    "sharded_transformer",
    "torch",
    4,
    (
        Planted("fsdp1, own clip", alone=False, step=0, words=("clip", "times"), twin="fsdp1"),
        Planted("fsdp1, padding", alone=False, step=EVENT, words=("clip", "times", "norm"), twin="fsdp1"),
        Planted("fsdp1, same shard", step=0, words=("same batch",), twin="fsdp1"),
        Planted("fsdp1, a shard doubled", alone=False, rank=2, words=("rank 2",), twin="fsdp1"),
        Planted("fsdp2, times world size", alone=False, step=0, words=(r"\b4\b", "times"), twin="fsdp2"),
        Planted("fsdp2, own clip", alone=False, step=0, words=("clip", "times"), twin="fsdp2"),
        Planted("fsdp2, a shard drifts", alone=False, rank=3, words=("rank 3",), twin="fsdp2"),
        Planted("hybrid, skipped sync", step=0, words=("not reduced",), twin="hybrid"),
        Planted("hybrid, a replica drifts", rank=3, places=r"out\W+weight", words=("rank 3",), twin="hybrid"),
        Planted("hybrid, same dropout", step=0, words=("dropout", "mask"), twin="hybrid"),
    ),
    ("fsdp1", "fsdp2", "hybrid", "fsdp1 original"),
)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width + 1), nn.SiLU(), nn.Linear(2 * width + 1, width))

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.drop(self.out(nn.functional.scaled_dot_product_attention(q, k, v)))
        return x + self.mlp(x)


class Tagger(nn.Module):
    def __init__(self, width=18):
        super().__init__()
        self.embed = nn.Embedding(31, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(2))
        self.tags = nn.Linear(width, 7)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.tags(x)


def wrap(layout, model, world):
    if layout.startswith("fsdp1"):
        options = {"device_id": torch.device("cpu"), "use_orig_params": "original" in layout}
        for i, layer in enumerate(model.layers):
            model.layers[i] = FullyShardedDataParallel(layer, **options)
        return FullyShardedDataParallel(model, **options)
    shape, names = ((world,), ("shard",)) if layout == "fsdp2" else ((2, world // 2), ("copies", "shard"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if layout == "hybrid alone":  # each half shards by itself, and nothing is reduced between them
        mesh = mesh["shard"]
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def train(name, rank, world, record):
    layout, _, fault = name.partition(", ")
    torch.manual_seed(3)
    model = wrap("hybrid alone" if name == "hybrid, skipped sync" else layout, Tagger(), world)
    # A rank of the second group would count as alike where it drew as its partner does.
    torch.manual_seed(1000 + (0 if fault == "same dropout" else rank))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, foreach=False)
    with record(model, optimizer=optimizer) as run:
        for step in range(STEPS):
            ids = np.random.default_rng(step).integers(0, 31, (16, 9))
            ids = ids[:4] if fault == "same shard" else ids[rank::world]
            ids = torch.from_numpy(ids)
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten() % 7)
            loss.backward()
            grads = {n: local(p.grad) for n, p in model.named_parameters() if p.grad is not None}
            if fault == "own clip":
                norm = torch.stack([g.norm() for g in grads.values() if g.numel()]).norm()
                for g in grads.values():
                    g *= min(1.0, float(0.2 / (norm + 1e-6)))
            elif fault == "times world size":  # what a divide factor of 1 does, for which gloo has no kernel
                for g in grads.values():
                    g *= world
            elif layout == "fsdp1":
                if fault == "padding" and step == EVENT and rank == world - 1:
                    flat = max(grads, key=lambda n: (n.count("layers"), n))
                    grads[flat][-1] = 40.0  # the flat parameter's size is no multiple of the number of ranks
                if fault == "a shard doubled" and step == EVENT and rank == 2:
                    for g in grads.values():
                        g *= 2
                model.clip_grad_norm_(2.0)
            weights = dict(model.named_parameters())
            if step == EVENT and rank == 3 and fault in ("a shard drifts", "a replica drifts"):
                with torch.no_grad():
                    local(weights["layers.1.out.weight"]).add_(1e-3)
            optimizer.step()
            optimizer.zero_grad()
            if run is not None:
                run.log_loss(loss)
                run.try_dump()
