"""What recording costs, as ratios within one run.

For a ResNet-18 in torch and in paddle, interleaved in one process, the median seconds of a training step

* plain: no recording at all;
* not due: inside ``padiff.record``, a step that is not due;
* every step: inside ``padiff.record``, every step written to a run folder;
* floor: the plain step, and then each tensor that padiff would record copied by numpy and saved by ``np.save``, one
  after the other, into new files, in the loop.

    python benchmarks/recording.py [--size 64] [--batch 8] [--rounds 7] [--dir FOLDER] [--frameworks torch paddle]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np

warnings.filterwarnings("ignore")

import padiff


class TorchTraining:
    def __init__(self, batch: int, size: int) -> None:
        import torch
        from models import ResNet18

        torch.manual_seed(0)
        self._torch = torch
        self.model = ResNet18()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)
        self._x, self._y = torch.randn(batch, 3, size, size), torch.randint(0, 1000, (batch,))

    def step(self) -> None:
        loss = self._torch.nn.functional.cross_entropy(self.model(self._x), self._y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class PaddleTraining:
    def __init__(self, batch: int, size: int) -> None:
        import paddle

        paddle.seed(0)
        self._paddle = paddle
        self.model = paddle.vision.models.resnet18()
        self.optimizer = paddle.optimizer.Momentum(0.01, 0.9, parameters=self.model.parameters())
        self._x, self._y = paddle.randn([batch, 3, size, size]), paddle.randint(0, 1000, (batch,))

    def step(self) -> None:
        loss = self._paddle.nn.functional.cross_entropy(self.model(self._x), self._y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()


TRAININGS = {"torch": TorchTraining, "paddle": PaddleTraining}


def seconds(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(name: str, batch: int, size: int, rounds: int, steps: int, where: str | None) -> dict[str, float]:
    training = TRAININGS[name](batch, size)
    for _ in range(3):
        training.step()
    with padiff.record(training.model, optimizer=training.optimizer) as rec:
        training.step()
        rec.try_dump()
    # One copy of what a step records is what the floor copies and saves.
    tensors = [np.array(record.value) for record in rec.run.steps(0)[0].records]
    times: dict[str, list[float]] = {"plain": [], "not due": [], "every step": [], "floor": []}
    folder = Path(tempfile.mkdtemp(prefix="padiff-bench-", dir=where))
    try:
        for turn in range(rounds):
            times["plain"].append(seconds(lambda: [training.step() for _ in range(steps)]) / steps)
            times["not due"].append(_recorded(training, None, steps, padiff.Schedule(steps=[10**9])))
            times["every step"].append(_recorded(training, folder / f"run{turn}", steps, padiff.Schedule()))
            times["floor"].append(seconds(lambda: [_floor(training, tensors, folder) for _ in range(steps)]) / steps)
            for made in folder.iterdir():
                shutil.rmtree(made)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    medians = {key: statistics.median(values) for key, values in times.items()}
    medians["megabytes"] = sum(t.nbytes for t in tensors) / 1e6
    medians["tensors"] = len(tensors)
    return medians


def _recorded(training, folder: Path | None, steps: int, schedule: padiff.Schedule) -> float:
    def loop() -> None:
        with padiff.record(training.model, folder, optimizer=training.optimizer, every_n_steps=schedule) as rec:
            for _ in range(steps):
                training.step()
                rec.try_dump()

    return seconds(loop) / steps


def _floor(training, tensors: list[np.ndarray], folder: Path) -> None:
    training.step()
    # New files for every step, as a run folder has them.
    target = Path(tempfile.mkdtemp(prefix="floor", dir=folder))
    for index, tensor in enumerate(tensors):
        np.save(target / f"{index}.npy", tensor.copy())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dir", help="where to write; the file system matters (default: the temporary folder)")
    parser.add_argument("--frameworks", nargs="*", default=list(TRAININGS))
    args = parser.parse_args()
    print(
        f"ResNet-18, batch {args.batch}, {args.size} x {args.size}; "
        f"medians of {args.rounds} rounds of {args.steps} steps"
    )
    for name in args.frameworks:
        m = measure(name, args.batch, args.size, args.rounds, args.steps, args.dir)
        plain, cost = m["plain"], m["every step"] - m["plain"]
        floor = m["floor"] - plain
        print(
            f"{name:7} plain step {plain * 1e3:.0f} ms; {m['tensors']:.0f} tensors, {m['megabytes']:.0f} MB a step\n"
            f"        not due    / plain  {m['not due'] / plain:.3f}\n"
            f"        every step / plain  {m['every step'] / plain:.2f}\n"
            f"        recording's cost / numpy's copy and np.save in the loop  {cost / floor:.2f}"
        )


if __name__ == "__main__":
    main()
