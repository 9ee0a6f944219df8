"""One process of trainings whose layers are split over processes, in torch and in paddle: started by `test_split`.

Arguments: the framework, and the trainings (JSON): layout, run folder, whether the last process multiplies its part of
a gradient in the last step, options. Weights and samples are the same in all of them.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np
from hard.children import end_with_parent

STEPS, SAMPLES, INPUTS, HIDDEN, OUTPUTS = 3, 8, 16, 300, 4
FACTOR = 10


def weights() -> dict[str, np.ndarray]:
    """In torch's layout."""
    data = np.random.default_rng(5)
    shapes = {"up.weight": (HIDDEN, INPUTS), "up.bias": (HIDDEN,), "norm.weight": (HIDDEN,), "norm.bias": (HIDDEN,),
              "down.weight": (OUTPUTS, HIDDEN), "down.bias": (OUTPUTS,)}  # fmt: skip
    return {name: (data.normal(size=shape) / 5).astype("float32") for name, shape in shapes.items()}


def batch(number: int) -> np.ndarray:
    return np.random.default_rng(100 + number).normal(size=(SAMPLES, INPUTS)).astype("float32")


class Torch:
    def __init__(self, layout: str, world: int) -> None:
        import torch
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up, self.down = torch.nn.Linear(INPUTS, HIDDEN), torch.nn.Linear(HIDDEN, OUTPUTS)
                self.norm = torch.nn.LayerNorm(HIDDEN)

            def forward(self, x):
                return self.down(torch.relu(self.norm(self.up(x))))

        self.model = Net()
        self.model.load_state_dict({name: torch.from_numpy(value) for name, value in weights().items()})
        if layout == "tensor":
            from torch.distributed.tensor import Replicate

            mesh = torch.distributed.init_device_mesh("cpu", (world,))
            plan = {
                "up": ColwiseParallel(output_layouts=Replicate()),
                "down": RowwiseParallel(input_layouts=Replicate()),
            }
            parallelize_module(self.model, mesh, plan)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2, foreach=False)
        self.tensor, self.zero = torch.from_numpy, self.optimizer.zero_grad

    def multiply(self) -> None:
        gradient = self.model.up.bias.grad
        gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        gradient.mul_(FACTOR)


class Paddle:
    def __init__(self, layout: str, world: int) -> None:
        import paddle
        import paddle.distributed as dist

        class Net(paddle.nn.Layer):
            def __init__(self) -> None:
                super().__init__()
                self.up, self.down = paddle.nn.Linear(INPUTS, HIDDEN), paddle.nn.Linear(HIDDEN, OUTPUTS)
                self.norm = paddle.nn.LayerNorm(HIDDEN)

            def forward(self, x):
                return self.down(paddle.nn.functional.relu(self.norm(self.up(x))))

        net = self.model = Net()
        given = weights()
        for name, parameter in net.named_parameters():
            parameter.set_value(paddle.to_tensor(given[name].T))
        self.tensor, self.net = paddle.to_tensor, net
        if layout == "data":
            self.model = paddle.DataParallel(net)
        if layout == "tensor":
            mesh = dist.ProcessMesh(list(range(world)), dim_names=["x"])
            places = {"up.weight": 1, "up.bias": 0, "down.weight": 0}
            for name, parameter in list(net.named_parameters()):
                path, _, slot = name.rpartition(".")
                axis = places.get(name)
                placement = dist.Replicate() if axis is None else dist.Shard(axis)
                setattr(getattr(net, path), slot, dist.shard_tensor(parameter, mesh, [placement]))
            self.tensor = lambda array: dist.shard_tensor(paddle.to_tensor(array), mesh, [dist.Replicate()])
        self.optimizer = paddle.optimizer.AdamW(1e-2, parameters=net.parameters(), weight_decay=1e-2)
        self.zero = self.optimizer.clear_grad

    def multiply(self) -> None:
        import paddle

        gradient = self.net.up.bias.grad
        gradient = gradient._local_value() if gradient.is_dist() else gradient
        paddle.assign(gradient * FACTOR, gradient)


def train(framework: str, layout: str, folder: str, faulty: bool, options: dict, rank: int, world: int) -> list[float]:
    import padiff

    training = {"torch": Torch, "paddle": Paddle}[framework](layout, world)
    mine = slice(rank, SAMPLES, world) if layout == "data" else slice(None)
    losses = []
    with padiff.record(training.model, folder, optimizer=training.optimizer, **options) as rec:
        for number in range(STEPS):
            loss = (training.model(training.tensor(batch(number)[mine])) ** 2).mean()
            loss.backward()
            rec.log_loss(loss)
            if faulty and rank == world - 1 and number == STEPS - 1:
                training.multiply()
            training.optimizer.step()
            training.zero()
            losses.append(float(loss.detach()))
            rec.try_dump()
    return losses


def shares(folder: str) -> None:
    """What each process says that it holds of layers of fleet's model parallelism, which are not trained here."""
    import paddle
    from paddle.distributed import fleet

    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 2, "pp_degree": 1}
    fleet.init(is_collective=True, strategy=strategy)
    from paddle.distributed.fleet.meta_parallel import ColumnParallelLinear, RowParallelLinear

    import padiff

    class Net(paddle.nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.up = ColumnParallelLinear(INPUTS, HIDDEN, has_bias=True, gather_output=False)
            self.down = RowParallelLinear(HIDDEN, OUTPUTS, has_bias=True, input_is_parallel=True)

        def forward(self, x):
            return x + 1  # paddle can't do on the CPU what calls of these layers have processes do

    net, rank = Net(), paddle.distributed.get_rank()
    whole = {name: value.T for name, value in weights().items() if not name.startswith("norm")}
    for name, parameter in net.named_parameters():
        axis, value = getattr(parameter, "split_axis", None), whole[name]
        own = value if axis is None else np.split(value, 2, axis=axis)[rank]
        parameter.set_value(paddle.to_tensor(own))
    with padiff.record(net, folder):
        paddle.distributed.barrier()  # as a training's first collective: all have begun to record
        net(paddle.to_tensor(batch(0)))


def main(framework: str, trainings: str) -> None:
    end_with_parent()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if framework == "torch":
        import torch

        torch.set_num_threads(1)
        if world > 1:
            torch.distributed.init_process_group("gloo")
    elif world > 1:
        import paddle

        paddle.distributed.init_parallel_env()
    for layout, folder, faulty, options in json.loads(trainings):
        if layout == "shares":
            shares(folder)
        else:
            train(framework, layout, folder, faulty, options, rank, world)
    if framework == "torch" and world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
