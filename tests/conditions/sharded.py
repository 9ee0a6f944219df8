"""One process of two that share a model's parameters out: started by `test_sharded`, rank in the environment.

Arguments: the trainings (JSON): the kind, the run folder (empty: unrecorded), options, where the result goes.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS = 2
LINEAR = ("0", "1.up", "1.down", "2.up", "2.down", "3")


class Block(torch.nn.Module):
    """Adds to what it is given; so what the layer below gives can be calculated from its input and its output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def plain() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), Block(), Block(), torch.nn.Linear(16, 4))


def fully_sharded(mesh, **options):
    model = plain()
    for part in (model[1], model[2], model):
        fully_shard(part, mesh=mesh, **options)
    return model


def half(mesh):
    return fully_sharded(mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def flattened(mesh, original=False):
    """FSDP of the first generation, whose parameters are views of flat ones whose memory comes and goes."""
    more = {"use_orig_params": original, "device_id": torch.device("cpu")}
    model = plain()
    model[1], model[2] = (FullyShardedDataParallel(model[k], **more) for k in (1, 2))
    return FullyShardedDataParallel(model, **more)


def original(mesh):
    return flattened(mesh, True)


def tensor_parallel(mesh, **options):
    """`down` gives what a collective that is still under way will give."""
    model = plain()
    for block in (model[1], model[2]):
        parallelize_module(block, mesh, {"up": ColwiseParallel(**options), "down": RowwiseParallel()})
    return model


def distributed_outputs(mesh):
    return tensor_parallel(mesh, use_local_output=False)


def replicated(mesh):
    """One layer's parameters are on both, whole, but distributed tensors."""
    model = plain()
    parallelize_module(model[0], mesh, ColwiseParallel(output_layouts=Replicate()))
    return model


KINDS = {
    make.__name__: make
    for make in (fully_sharded, half, flattened, original, tensor_parallel, distributed_outputs, replicated)
}
#: Kinds in which each process has a batch of its own.
DATA_PARALLEL = frozenset({"fully_sharded", "half", "flattened", "original", "wrapped_later"})


def train(kind: str, folder: str, options: dict[str, object], result: str, mesh) -> None:
    import padiff

    rank = torch.distributed.get_rank()
    model = recorded = KINDS[kind](mesh) if kind in KINDS else plain()
    unknown = options.pop("without_optimizer", False)
    outputs = set()
    losses = []
    with ExitStack() as stack:
        rec = None
        if kind not in KINDS:  # the model is wrapped when the recorder has looked at it
            rec = stack.enter_context(padiff.record(recorded, folder, **options)) if folder else None
            model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        optimizer = torch.optim.Adam(model.parameters(), 1e-2, foreach=False)
        given = {} if unknown else {"optimizer": optimizer}
        if kind in KINDS and folder:
            rec = stack.enter_context(padiff.record(recorded, folder, **given, **options))
        for layer in model.modules():
            layer.register_forward_hook(lambda _, args, output: outputs.add(type(output).__name__))
        for number in range(STEPS):
            torch.manual_seed(100 * number + (rank if kind in DATA_PARALLEL else 0))
            loss = model(torch.randn(6, 8)).pow(2).mean()
            loss.backward()
            if rec is not None:
                rec.log_loss(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if rec is not None:
                rec.try_dump()
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    state = {f"p{k}": p.detach().numpy().copy() for k, p in enumerate(local)}
    np.savez(f"{result}.{rank}.npz", losses=np.array(losses), outputs=np.array(sorted(outputs)), **state)


def main(trainings: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    for kind, folder, options, result in json.loads(trainings):
        train(kind, folder, options, result, mesh)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
