"""What comparing many small sketches costs: processor time of one process.

Of synthetic sketches in three shapes: a deep model, a small one for 10,000 steps, and as many tensors as a ResNet-18
has for 500. And of three steps of a deep model that torch trained, which have nearly twice as many tensors for each
layer, the first one in full.

    python benchmarks/sketched.py [--dir FOLDER] [--write]
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import tempfile
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import numpy as np
from performance_page import CHINESE, ENGLISH, keep, table, write
from synthetic import STAGES, made, run_of, timed

import padiff
from padiff.records import Record, Sketched, Step
from padiff.sketches.sketch import sketch_of

# Noise on each value of the candidate.
NOISE = 1e-7
# Steps and layers, each with five sketches: of a model of 5,000 layers, of a small one, and of as many as a ResNet-18.
SHAPES = {"5,000 layers": (3, 5000), "10,000 steps": (10_000, 10), "500 steps of 85 layers": (500, 85)}
# Three steps of `layers.Training`, recorded.
RECORDED = "5,000 layers, recorded"


def measured_in(folder: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    sides = ("a", 0.0), ("b", NOISE)
    for name, (steps, layers) in SHAPES.items():
        compared(name, [write_sketched(folder / side, steps, layers, off) for side, off in sides], found)
    for side, off in sides:
        # In another process: torch makes the garbage collector look at more.
        child = multiprocessing.get_context("spawn").Process(target=write_recorded, args=(folder / side, off))
        child.start()
        child.join()
    compared(RECORDED, [folder / side for side, _ in sides], found)
    return found


def compared(name: str, runs: list[Path], found: dict[str, float]) -> None:
    """Compare two runs, and add the figures to those that were found."""
    reports = []
    wall, cpu = timed(lambda: reports.append(padiff.compare_runs(*runs, workers=1)))
    pairs = len(reports[0].diffs)
    print(f"{name}: {pairs:,} pairs, {cpu:.1f} s of processor time ({wall:.1f} s), {cpu / pairs * 1e6:.0f} us a pair")
    found[f"{name}, seconds"], found[f"{name}, us a pair"] = cpu, cpu / pairs * 1e6
    for run in runs:
        shutil.rmtree(run)


def write_recorded(folder: Path, noise: float) -> None:
    """Train three steps of 5,000 layers, and record them."""
    import torch
    from layers import Training

    training = Training(5000)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(1 + noise * torch.randn(()))
    with padiff.record(training.model, folder, optimizer=training.optimizer, detail="sketch") as rec:
        for _ in range(3):
            training.step()
            rec.try_dump()


_ROWS = {
    ENGLISH: {
        "5,000 layers": "3 steps of 5,000 layers",
        "10,000 steps": "10,000 steps of 10 layers",
        "500 steps of 85 layers": "500 steps of 85 layers, as many tensors as a ResNet-18 has",
        RECORDED: "3 steps of 5,000 layers, recorded in torch",
    },
    CHINESE: {
        "5,000 layers": "3 个 step，5,000 层",
        "10,000 steps": "10,000 个 step，10 层",
        "500 steps of 85 layers": "500 个 step，85 层，张量数与 ResNet-18 相同",
        RECORDED: "3 个 step，5,000 层，由 torch 训练录制",
    },
}
_HEAD = {
    ENGLISH: ["", "seconds of the processor", "us a pair"],
    CHINESE: ["", "处理器时间，秒", "每一对 us"],
}
_FOOT = {
    ENGLISH: "One process, five sketches for each layer, noise of 1e-7 on each; of recorded layers eight tensors each, "
    "noise of 1e-7 on the weights; up to {runs} runs; {machine}.",
    CHINESE: "一个进程，每层五个摘要，各带 1e-7 的噪声；"
    "录制的每层八个张量，权重带 1e-7 的噪声；最多 {runs} 次运行；{machine}。",
}


def written(measured: Mapping[str, float]) -> None:
    """Keep what was measured of sketches, and write the pages anew."""
    figures = keep("sketched", measured)
    runs = max(map(len, figures.values.values()))

    def page(language: str) -> str:
        rows = [
            [title, figures.text(f"{name}, seconds", language, 1), figures.text(f"{name}, us a pair", language, 0)]
            for name, title in _ROWS[language].items()
        ]
        foot = _FOOT[language].format(runs=runs, machine=figures.measured_on(language))
        return f"{table(_HEAD[language], rows)}\n\n{foot}"

    write("sketched", page)


def write_sketched(folder: Path, steps: int, layers: int, noise: float, size: int = 4096) -> Path:
    """Write a run of sketches: those of one step, made larger or smaller by the noise."""
    writer, paths = run_of(folder, layers, size, pack=True)
    rows = [sketch_of(record.value).row() for record in made(0, paths, size, 0.0).records]
    rng = np.random.default_rng(0)
    for number in range(steps):
        factors = 1 + noise * rng.standard_normal(len(rows))
        records = [
            Record(path, stage, slot, Sketched(rows[k] * factors[k], size), "float32", (size,), order=k)
            for k, ((stage, slot), path) in enumerate(product(STAGES, paths))
        ]
        writer.add_step(Step(number, tuple(records)))
    writer.close()
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", help="where to write; the file system matters (default: the temporary folder)")
    parser.add_argument("--write", action="store_true", help="keep the figures, and write them into the pages")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        found = measured_in(Path(folder))
    if args.write:
        written(found)


if __name__ == "__main__":
    main()
