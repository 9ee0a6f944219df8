"""What many small layers cost to record: a model of 5,000 of them, 8 units wide, in torch.

In turns within one process, medians of several rounds, by the time of the loop's thread, of all threads and by the
clock:

* plain: no recording;
* hooks: with hooks that do nothing, before and after each layer and on each output's gradient: no recorder can do less;
* sketch: ``detail="sketch"``, every step; the first two steps of a run, of which more is kept, are not
  counted.

And what opening a recorder takes, of this model and of a ResNet-18, beside walking and describing its layers, which
`run.json` needs.

    python benchmarks/layers.py [--layers 5000] [--rounds 5] [--steps 4] [--write]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before a framework is imported
warnings.filterwarnings("ignore")

import numpy as np
import performance_page as pages
import torch
from models import ResNet18

import padiff
from padiff.frameworks import framework_of
from padiff.model.tree import describe, walk

CLOCKS = "thread", "processor", "clock"


def now() -> np.ndarray:
    return np.array([time.thread_time(), time.process_time(), time.perf_counter()])


class Training:
    """Many small layers, one step at a time."""

    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(layers)])
        for layer in self.model:
            torch.nn.init.orthogonal_(layer.weight)  # else nothing is left of the input after some hundred layers
        # At 1e-5 so deep a chain still overshoots, from 1e-4 on all is NaN within some steps.
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-6)
        self._x = torch.randn(8, 8)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._x).square().mean().backward()
        self.optimizer.step()


def hooked(model: torch.nn.Module) -> Callable[[], None]:
    """Hooks that do nothing; returns what takes them off."""

    def after(layer: torch.nn.Module, args: object, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: None)

    handles = [
        handle
        for layer in model
        for handle in (layer.register_forward_pre_hook(lambda layer, args: None), layer.register_forward_hook(after))
    ]
    return lambda: [handle.remove() for handle in handles] and None


def steps_of(training: Training, steps: int) -> np.ndarray:
    before = now()
    for _ in range(steps):
        training.step()
    return (now() - before) / steps


def recorded(training: Training, folder: Path, steps: int) -> np.ndarray:
    with padiff.record(training.model, folder, optimizer=training.optimizer, detail="sketch") as rec:
        for _ in range(2):
            training.step()
            rec.try_dump()
        rec.flush()
        before = now()
        for _ in range(steps):
            training.step()
            rec.try_dump()
        rec.flush()
        return (now() - before) / steps


def opening(model: torch.nn.Module, folder: Path, rounds: int) -> tuple[float, float]:
    """Milliseconds of opening a recorder, and of walking and describing the model."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    framework = framework_of(model)
    opened, walked = [], []
    for turn in range(rounds):
        before = time.thread_time()
        nodes = walk(model, framework)
        describe(nodes, framework, frozenset(node.path for node in nodes))
        walked.append(time.thread_time() - before)
        before = time.thread_time()
        recorder = padiff.record(model, folder / f"open-{turn}", optimizer=optimizer, detail="sketch")
        with recorder:
            opened.append(time.thread_time() - before)
    return statistics.median(opened) * 1e3, statistics.median(walked) * 1e3


def measure(layers: int, rounds: int, steps: int) -> dict[str, float]:
    training = Training(layers)
    folder = Path(tempfile.mkdtemp(prefix="padiff-bench-"))
    times: dict[str, list[np.ndarray]] = {"plain": [], "hooks": [], "sketch": []}
    try:
        steps_of(training, 2)
        for turn in range(rounds):
            times["plain"].append(steps_of(training, steps))
            take_off = hooked(training.model)
            times["hooks"].append(steps_of(training, steps))
            take_off()
            times["sketch"].append(recorded(training, folder / f"run-{turn}", steps))
            shutil.rmtree(folder / f"run-{turn}")
        found = {"plain": float(np.median([each[0] for each in times["plain"]]) * 1e3)}
        for kind in ("hooks", "sketch"):
            ratios = np.median([a / b for a, b in zip(times[kind], times["plain"])], axis=0)
            found |= {f"{kind} {clock}": float(ratio) for clock, ratio in zip(CLOCKS, ratios)}
        for name, model in (("layers", training.model), ("resnet18", ResNet18())):
            found[f"open {name}"], found[f"walk {name}"] = opening(model, folder / name, rounds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


_HEAD = {
    pages.ENGLISH: ("5,000 layers, step / plain step", "the loop's thread", "all threads", "by the clock"),
    pages.CHINESE: ("5,000 层，step / 普通 step", "循环线程", "所有线程", "按时钟"),
}
_ROWS = {
    pages.ENGLISH: {"hooks": "hooks that do nothing", "sketch": "sketch"},
    pages.CHINESE: {"hooks": "什么也不做的 hook", "sketch": "摘要"},
}
_OPENING = {
    pages.ENGLISH: ("opening a recorder, ms", "opening", "of which walking and describing the layers"),
    pages.CHINESE: ("打开录制器，ms", "打开", "其中遍历并描述各层"),
}
_MODELS = {
    pages.ENGLISH: {"resnet18": "ResNet-18", "layers": "5,000 layers"},
    pages.CHINESE: {"resnet18": "ResNet-18", "layers": "5,000 层"},
}
_SAID = {
    pages.ENGLISH: "A plain step takes {plain} ms of the loop's thread. Ranges over up to {most} runs of medians; "
    "{where}, which others used at the same time; torch on one thread.",
    pages.CHINESE: "普通 step 占循环线程 {plain} ms。最多 {most} 次运行的中位数的范围；"
    "{where}，同时有其他人使用；torch 使用一个线程。",
}


def block(language: str, kept: pages.Figures) -> str:
    """What stands in the page."""
    ratios = [
        [title, *(kept.text(f"{kind} {clock}", language) for clock in CLOCKS)]
        for kind, title in _ROWS[language].items()
    ]
    opened = [
        [title, kept.text(f"open {name}", language, 1), kept.text(f"walk {name}", language, 1)]
        for name, title in _MODELS[language].items()
    ]
    said = _SAID[language].format(
        plain=kept.text("plain", language, 0), most=pages.MOST, where=kept.measured_on(language)
    )
    return "\n\n".join([pages.table(_HEAD[language], ratios), pages.table(_OPENING[language], opened), said])


def show(found: Mapping[str, float]) -> None:
    for name, value in found.items():
        print(f"{name:20} {value:8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--write", action="store_true", help="keep the figures, and write them into the pages")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(args.layers, args.rounds, args.steps)
    show(found)
    if args.write:
        kept = pages.keep("layers", found)
        pages.write("layers", lambda language: block(language, kept))


if __name__ == "__main__":
    main()
