"""One process of trainings on two: started by `test_ranks`, with its rank in the environment as a launcher sets it.

Arguments: the framework, and the trainings (JSON): run folder, what is wrong (or ``nothing``), where the result goes.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext

import numpy as np
from hard.children import end_with_parent

STEPS, SAMPLES = 3, 8


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    """All processes' samples of a step."""
    data = np.random.default_rng(number)
    return data.normal(size=(SAMPLES, 4)).astype("float32"), data.integers(0, 3, SAMPLES)


def weights() -> list[np.ndarray]:
    """In torch's layout."""
    data = np.random.default_rng(11)
    return [data.normal(size=shape).astype("float32") for shape in ((8, 4), (8,), (3, 8), (3,))]


class Torch:
    def __init__(self, world: int) -> None:
        import torch

        torch.set_num_threads(1)
        if world > 1 and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        self.inner = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        with torch.no_grad():
            for parameter, value in zip(self.inner.parameters(), weights()):
                parameter.copy_(torch.from_numpy(value))
        self.model = torch.nn.parallel.DistributedDataParallel(self.inner) if world > 1 else self.inner
        self.optimizer = torch.optim.SGD(self.inner.parameters(), lr=0.1)
        self.loss, self.tensor = torch.nn.functional.cross_entropy, torch.from_numpy

    def zero(self) -> None:
        self.optimizer.zero_grad()

    def parameters(self) -> list[np.ndarray]:
        return [p.detach().numpy() for p in self.inner.parameters()]

    def unsynchronised(self):
        return self.model.no_sync()


class Paddle:
    def __init__(self, world: int) -> None:
        import paddle

        if world > 1 and not paddle.distributed.is_initialized():
            paddle.distributed.init_parallel_env()
        self.inner = paddle.nn.Sequential(paddle.nn.Linear(4, 8), paddle.nn.ReLU(), paddle.nn.Linear(8, 3))
        for parameter, value in zip(self.inner.parameters(), weights()):
            parameter.set_value(paddle.to_tensor(value.T))
        self.model = paddle.DataParallel(self.inner) if world > 1 else self.inner
        self.optimizer = paddle.optimizer.SGD(0.1, parameters=self.inner.parameters())
        self.loss, self.tensor = paddle.nn.functional.cross_entropy, paddle.to_tensor

    def zero(self) -> None:
        self.optimizer.clear_grad()

    def parameters(self) -> list[np.ndarray]:
        return [p.numpy() for p in self.inner.parameters()]

    def unsynchronised(self):
        return self.model.no_sync()


def train(name: str, folder: str, fault: str, result: str, rank: int = 0, world: int = 1) -> None:
    """Train, recording unless the folder is empty."""
    training = {"torch": Torch, "paddle": Paddle}[name](world)
    import padiff

    recording = nullcontext()
    if folder:
        recording = padiff.record(training.model, folder, optimizer=training.optimizer)
    losses = []
    with recording as rec:
        for number in range(STEPS):
            x, y = batch(number)
            own = slice(rank, SAMPLES, world) if fault != "same samples" else slice(0, SAMPLES // world)
            # A backward outside of the wrapper's synchronisation: each process steps by its own gradient.
            alone = world > 1 and fault == "not synchronised" and number == 1
            with training.unsynchronised() if alone else nullcontext():
                loss = training.loss(training.model(training.tensor(x[own])), training.tensor(y[own]))
                loss.backward()
            training.optimizer.step()
            training.zero()
            losses.append(float(loss.detach()))
            if rec is not None:
                rec.log_loss(loss)
                if fault == "one ends early" and rank == 1 and number == STEPS - 1:
                    break
                rec.try_dump()
    np.savez(
        f"{result}.{rank}.npz", losses=np.array(losses), **{f"p{i}": p for i, p in enumerate(training.parameters())}
    )


def main(name: str, trainings: str) -> None:
    end_with_parent()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for folder, fault, result in json.loads(trainings):
        train(name, folder, fault, result, rank, world)
    if name == "torch":
        import torch

        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
