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

STEPS, SAMPLES, INPUTS, HIDDEN, OUTPUTS = 2, 8, 16, 300, 4
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
        if layout == "fleet":
            net.up, net.down = fleet_layers()
        for name, parameter in net.named_parameters():
            axis, value = getattr(parameter, "split_axis", None), given[name].T
            own = value if axis is None else np.split(value, world, axis=axis)[dist.get_rank()]
            parameter.set_value(paddle.to_tensor(own))
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
        if layout == "sharding":
            begin_fleet(sharding_degree=world)
            self.model = paddle_fleet().distributed_model(net)
            self.optimizer = paddle_fleet().distributed_optimizer(self.optimizer)
        self.zero = self.optimizer.clear_grad

    def multiply(self) -> None:
        import paddle

        gradient = self.net.up.bias.grad
        gradient = gradient._local_value() if gradient.is_dist() else gradient
        paddle.assign(gradient * FACTOR, gradient)


def paddle_fleet():
    from paddle.distributed import fleet

    return fleet


def begin_fleet(**degrees: int) -> None:
    fleet = paddle_fleet()
    fleet.base.topology._HYBRID_PARALLEL_GROUP = None  # it begins but once in a process, and two trainings need it here
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"dp_degree": 1, "mp_degree": 1, "pp_degree": 1, **degrees}
    fleet.init(is_collective=True, strategy=strategy)


def fleet_layers():
    """Two layers of fleet's model parallelism. Paddle has no kernels on the CPU for what their calls have processes do:
    here gloo does it.
    """
    import paddle
    import paddle.distributed as dist
    from paddle.distributed.fleet.layers.mpu import mp_ops

    begin_fleet(mp_degree=2)
    from paddle.distributed.fleet.meta_parallel import ColumnParallelLinear, RowParallelLinear

    def added(x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    class Identity(paddle.autograd.PyLayer):
        forward = staticmethod(lambda ctx, x: x.clone())
        backward = staticmethod(lambda ctx, grad: added(grad))

    class Sum(paddle.autograd.PyLayer):
        forward = staticmethod(lambda ctx, x: added(x))
        backward = staticmethod(lambda ctx, grad: grad.clone())

    class Gather(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, x):
            ctx.width = x.shape[-1]
            found: list = []
            dist.all_gather(found, x.contiguous())
            return paddle.concat(found, -1)

        @staticmethod
        def backward(ctx, grad):
            return grad.split(grad.shape[-1] // ctx.width, -1)[dist.get_rank()].clone()

    class Split(paddle.autograd.PyLayer):
        @staticmethod
        def forward(ctx, x):
            return x.split(dist.get_world_size(), -1)[dist.get_rank()].clone()

        @staticmethod
        def backward(ctx, grad):
            found: list = []
            dist.all_gather(found, grad.contiguous())
            return paddle.concat(found, -1)

    mp_ops._c_identity = lambda x, *_, **__: Identity.apply(x)
    mp_ops._mp_allreduce = lambda x, *_, **__: Sum.apply(x)
    mp_ops._c_concat = lambda x, *_, **__: Gather.apply(x)
    mp_ops._c_split = lambda x, *_, **__: Split.apply(x)
    up = ColumnParallelLinear(INPUTS, HIDDEN, has_bias=True, gather_output=True)
    down = RowParallelLinear(HIDDEN, OUTPUTS, has_bias=True, input_is_parallel=False)
    return up, down


def train(framework: str, layout: str, folder: str, faulty: bool, options: dict, rank: int, world: int) -> list[float]:
    import padiff

    training = {"torch": Torch, "paddle": Paddle}[framework](layout, world)
    own = slice(rank, SAMPLES, world) if layout in ("data", "sharding") else slice(None)
    losses = []
    with padiff.record(training.model, folder, optimizer=training.optimizer, **options) as rec:
        for number in range(STEPS):
            loss = (training.model(training.tensor(batch(number)[own])) ** 2).mean()
            loss.backward()
            rec.log_loss(loss)
            if faulty and rank == world - 1 and number == STEPS - 1:
                training.multiply()
            training.optimizer.step()
            training.zero()
            losses.append(float(loss.detach()))
            rec.try_dump()
    return losses


def main(framework: str, trainings: str) -> None:
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
        train(framework, layout, folder, faulty, options, rank, world)
    if framework == "torch" and world > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    end_with_parent()  # not in main: tests call it, too
    main(*sys.argv[1:])
