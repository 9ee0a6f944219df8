"""Layers split over processes by ``parallelize_module``: what the others hold whole, they must hold alike."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ..kit import EVENT, STEPS, Planted, Program

PROGRAM = Program(
    "split_layers",
    "torch",
    2,
    (
        Planted("no reduction", step=0, rank=1, words=("reduced", "reduction", "differs")),
        Planted("gradient not reduced", step=0, rank=1, places=r"norm", words=("not reduced",)),
        Planted("own clip", step=0, rank=1, places="norm|last", words=("clip", "factor of its own")),
        Planted("a replica drifts", rank=1, places=r"last\W+weight", words=("rank 1",)),
        Planted("other seed", step=0, rank=1, places="norm|last", words=("begin", "start", "seed")),
        Planted("same seed in split dropout", step=0, places="drop", words=("dropout", "mask")),
        Planted("other batch", step=0, rank=1, words=("batch", "input")),
    ),
)


class Unreduced(RowwiseParallel):
    """Takes each process's partial sum for the sum."""

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, mod, outputs, mesh):
        return outputs.to_local() if isinstance(outputs, DTensor) else outputs


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.up, self.down = nn.Linear(12, 40), nn.Linear(40, 12)
        self.drop = nn.Dropout(0.25)
        self.last = nn.Linear(12, 4)

    def forward(self, x):
        return self.last(x + self.down(self.drop(torch.relu(self.up(self.norm(x))))))


def own(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train(name, rank, world, record):
    torch.manual_seed(21 + rank if name == "other seed" else 21)
    model = Mix()
    torch.manual_seed(55 if name == "same seed in split dropout" else 55 + rank)
    mesh = init_device_mesh("cpu", (world,))
    rows = Unreduced() if name == "no reduction" else RowwiseParallel()
    columns = ColwiseParallel()
    if name == "gradient not reduced":  # the input's gradient is each process's own part of a sum
        columns = ColwiseParallel(input_layouts=Replicate())
        plain = model.up

        def enter(_, given):
            return (DTensor.from_local(given[0], mesh, [Replicate()], run_check=False),)

        model = parallelize_module(model, mesh, {"up": columns, "down": rows})
        plain._forward_pre_hooks.clear()

        class Enter(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return DTensor.from_local(x, mesh, [Replicate()], run_check=False)

            @staticmethod
            def backward(ctx, grad):
                return grad.to_local() if isinstance(grad, DTensor) else grad

        plain.register_forward_pre_hook(lambda _, given: (Enter.apply(given[0]),))
    else:
        model = parallelize_module(model, mesh, {"up": columns, "down": rows})
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5, foreach=False)
    with record(model, optimizer=optimizer) as run:
        for step in range(STEPS):
            rng = np.random.default_rng(step + (1000 * rank if name == "other batch" else 0))
            x = torch.from_numpy(rng.normal(size=(10, 12)).astype("float32"))
            y = torch.from_numpy(rng.normal(size=(10, 4)).astype("float32"))
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            if name == "own clip":
                norm = torch.stack([own(p.grad).norm() for p in model.parameters()]).norm()
                for p in model.parameters():
                    own(p.grad).mul_(min(1.0, float(0.1 / norm)))
            if name == "a replica drifts" and step == EVENT and rank == 1:
                with torch.no_grad():
                    own(model.last.weight)[0] *= 1.01
            optimizer.step()
            optimizer.zero_grad()
            if run is not None:
                run.log_loss(loss)
                run.try_dump()


_ = Partial, Shard
