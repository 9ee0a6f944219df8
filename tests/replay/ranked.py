"""One of two processes that record a training, or do its packed steps again; started by `test_ranks`.

Arguments: the framework, the folder to record into, and the folder to replay, or nothing; last, whether rank 1 replays
with a fault.
"""

from __future__ import annotations

import json
import os
import sys

import numpy as np
from conditions.ranked import batch
from hard.children import end_with_parent

SAMPLES = 8


class Torch:
    def __init__(self, seed):
        import torch

        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        torch.manual_seed(seed)
        nn = torch.nn
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
        self.model = nn.parallel.DistributedDataParallel(net)
        self.optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        self.loss, self.tensor, self.zero = nn.functional.cross_entropy, torch.from_numpy, self.optimizer.zero_grad


class Paddle:
    def __init__(self, seed):
        import paddle

        paddle.distributed.init_parallel_env()
        paddle.seed(seed)
        nn = paddle.nn
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
        self.model = paddle.DataParallel(net)
        self.optimizer = paddle.optimizer.Momentum(0.1, 0.9, parameters=net.parameters())
        self.loss, self.tensor, self.zero = nn.functional.cross_entropy, paddle.to_tensor, self.optimizer.clear_grad


def train(framework, folder, reference, faulty):
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    side = {"torch": Torch, "paddle": Paddle}[framework](100 * bool(reference) + rank)
    import padiff

    if not reference:
        with padiff.record(side.model, folder, optimizer=side.optimizer, replay_every_n_steps=2) as rec:
            for number in range(3):
                x, y = (side.tensor(part[rank:SAMPLES:world]) for part in batch(number))
                side.loss(side.model(x), y).backward()
                side.optimizer.step()
                side.zero()
                rec.try_dump()
    else:
        with padiff.replay(reference, side.model, folder, optimizer=side.optimizer) as replay:
            for step in replay:
                x, y = (part[rank:SAMPLES:world] for part in batch(step.number))
                np.testing.assert_array_equal(np.asarray(step.inputs[0].numpy()), x)
                loss = side.loss(side.model(*step.inputs), *step.labels)
                (loss * 1.05 if faulty == "faulty" and rank == 1 else loss).backward()
                side.optimizer.step()
                side.zero()
        report = replay.report
        first = report.first_diff
        found = {"passed": report.passed, "steps": report.coverage.steps, "stage": first and first.stage}
        with open(f"{folder}.{rank}.json", "w") as file:
            json.dump({**found, "text": str(report)[:2000], "notes": list(replay.notes)}, file)


def main(framework, folder, reference, faulty):
    end_with_parent()
    # In a function of its own: to free the wrapped model after its process group was left may wait for ever.
    train(framework, folder, reference, faulty)
    if framework == "torch":
        import torch

        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
