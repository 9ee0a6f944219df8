"""A convnet of paddle in DataParallel, and gradients that a script of paddle reduces by itself."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np

from ..kit import EVENT, STEPS, Planted, Program

PROGRAM = Program(
    "paddle_parallel",
    "paddle",
    2,
    (
        Planted("skipped sync", rank=1, words=("not reduced",)),
        Planted("same shard", step=0, words=("same batch",)),
        Planted("same dropout", step=0, places="drop", words=("dropout", "mask"), twin="dropout"),
        Planted("other seed", step=0, rank=1, words=("begin", "start", "seed"), twin="by hand"),
        Planted("batch norm of each", step=0, places="norm", words=("SyncBatchNorm", "own samples")),
        Planted("times world size", alone=False, step=0, words=(r"\b2\b", "times"), twin="by hand"),
        Planted("own clip", step=0, rank=1, words=("clip", "factor of its own"), twin="by hand"),
        Planted("drifting weight", rank=1, places=r"head\W+bias", words=("rank 1",)),
        Planted("accumulates unsynchronised", step=0, rank=1, words=("not reduced",), twin="accumulates"),
        Planted("sums every micro-batch", alone=False, step=0, words=("grad",), twin="accumulates"),
        Planted("a split layer without its sum", step=0, rank=1, words=("differs", "reduc"), twin="split"),
    ),
    ("", "by hand", "accumulates", "dropout", "split"),
)


def build(name, rank):
    import paddle
    from paddle import nn

    class Net(nn.Layer):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2D(3, 6, 3)
            self.norm = nn.BatchNorm2D(6) if name == "batch norm of each" else nn.GroupNorm(2, 6)
            self.wide, self.narrow = nn.Linear(6, 10), nn.Linear(10, 6)
            self.drop = nn.Dropout(0.3 if "dropout" in name else 0.0)
            self.head = nn.Linear(6, 4)

        def forward(self, x):
            x = paddle.nn.functional.relu(self.norm(self.stem(x))).mean([2, 3])
            x = x + self.narrow(paddle.nn.functional.relu(self.wide(x)))
            return self.head(self.drop(x))

    paddle.seed(8 + rank if name == "other seed" else 8)
    net = Net()
    paddle.seed(100 if name == "same dropout" else 100 + rank)
    return net


def train(name, rank, world, record):
    import paddle
    import paddle.distributed as dist

    net = build(name, rank)
    hand = name in ("by hand", "other seed", "times world size", "own clip", "sums every micro-batch")
    split = "split" in name
    if split:  # every second hidden unit is another process's, and each says so as layers of fleet do
        halves = {"wide.weight": 1, "wide.bias": 0, "narrow.weight": 0}
        for path, parameter in list(net.named_parameters()):
            if path in halves:
                value = np.split(parameter.numpy(), world, halves[path])[rank]
                layer, slot = path.split(".")
                own = paddle.create_parameter(
                    value.shape, "float32", default_initializer=paddle.nn.initializer.Assign(value)
                )
                own.is_distributed, own.split_axis = True, halves[path]
                setattr(getattr(net, layer), slot, own)
        bias = net.narrow.bias

        def summed(layer, given, out):
            if name == "a split layer without its sum":
                return out
            return _Sum.apply(out - bias) + bias

        class _Sum(paddle.autograd.PyLayer):
            @staticmethod
            def forward(ctx, x):
                x = x.clone()
                dist.all_reduce(x)
                return x

            @staticmethod
            def backward(ctx, grad):
                return grad

        class _Enter(paddle.autograd.PyLayer):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                grad = grad.clone()
                dist.all_reduce(grad)
                return grad

        net.narrow.register_forward_post_hook(summed)
        net.wide.register_forward_pre_hook(lambda layer, given: (_Enter.apply(given[0]),))
    model = net if hand or split else paddle.DataParallel(net)
    optimizer = paddle.optimizer.Momentum(0.05, parameters=net.parameters())
    micro = 2 if name in ("accumulates", "accumulates unsynchronised", "sums every micro-batch") else 1

    def reduce(scale):
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
            paddle.assign(parameter.grad * scale, parameter.grad)

    with record(model, optimizer=optimizer) as run:
        for step in range(STEPS):
            data = np.random.default_rng(step)
            x, y = data.normal(size=(16, 3, 7, 7)).astype("float32"), data.integers(0, 4, 16)
            own = slice(None) if split else slice(0, 8) if name == "same shard" else slice(rank, None, world)
            x, y = x[own], y[own]
            total = 0.0
            for number, (a, b) in enumerate(zip(np.split(x, micro), np.split(y, micro))):
                alone = (name == "skipped sync" and step == EVENT) or name == "accumulates unsynchronised"
                alone = alone or (number < micro - 1)
                with model.no_sync() if alone and model is not net else nullcontext():
                    logits = model(paddle.to_tensor(a))
                    loss = paddle.nn.functional.cross_entropy(logits, paddle.to_tensor(b)) / micro
                    if name == "sums every micro-batch":
                        (loss / world).backward()
                        reduce(1.0)
                    else:
                        loss.backward()
                total = total + loss.detach()
            if name == "own clip":
                norm = np.sqrt(sum(float((p.grad**2).sum()) for p in net.parameters()))
            if hand and name != "sums every micro-batch":
                reduce(1.0 if name == "times world size" else 1.0 / world)
            if name == "own clip":
                for p in net.parameters():
                    paddle.assign(p.grad * min(1.0, 0.2 / norm), p.grad)
            if name == "drifting weight" and step == EVENT and rank == 1:
                net.head.bias.set_value(net.head.bias + 1e-3)
            optimizer.step()
            optimizer.clear_grad()
            if run is not None:
                run.log_loss(total)
                run.try_dump()
