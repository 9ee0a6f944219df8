"""What comparing costs, as ratios within one run.

For two run folders of synthetic steps, written by numpy alone, medians of several rounds, interleaved:

* compare / floor: ``padiff.compare_runs``, everything included, beside loading each pair of files with ``np.load`` and
  taking ``np.abs(a - b).max()``, one after the other; by wall clock, and by the processor time of this process; and
  the same of runs whose steps are packed into one file each, beside the same floor;
* alignment: pairing the layers, as a share of the comparison;
* watch: from the appearance of a step in both folders to its report, beside the floor of that step;
* growth: how the time of a comparison grows when there are more steps, more layers, larger tensors.

The candidate is the reference with rounding noise on every value, so nothing is equal to the bit (``--equal``: all is).

    python benchmarks/comparing.py [--rounds 5] [--workers N] [--dir FOLDER] [--equal]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import padiff
from padiff.align import align
from padiff.dump import RunWriter, open_run
from padiff.dump.storage import Storage
from padiff.records import ROOT, InMemory, Layer, Parameter, Record, RunInfo, Step
from padiff_hooks.paired import PairedRuns

# Steps, layers, elements of each tensor; a layer has an output and a weight, and what belongs to them.
SHAPES = {
    "large tensors": (3, 20, 1 << 20),
    "medium tensors": (6, 60, 40_000),
    "many small tensors": (10, 80, 256),
}
STAGES = (("forward", "output.0"), ("backward", "output.0"), ("weight", "w"), ("grad", "w"), ("update", "w"))


def write(folder: Path, steps: int, layers: int, size: int, noise: float, pack: bool = False) -> Path:
    paths = [f"layer{k}" for k in range(layers)]
    owned = (Parameter("w", (size,), "float32"),)
    tree = (Layer(ROOT, "Net", "net", children=layers), *(Layer(p, "Scale", "scale", owned) for p in paths))
    info = RunInfo("torch", "2.0", tree, name=folder.name)
    writer = RunWriter(folder, info, storage=Storage(pack=pack))
    for number in range(steps):
        writer.put(made(number, paths, size, noise))
    writer.close()
    return folder


def made(number: int, paths: list[str], size: int, noise: float) -> Step:
    rng = np.random.default_rng(number)
    records = []
    for stage, slot in STAGES:
        for path in paths:
            values = rng.standard_normal(size, np.float32)
            values *= 1 + np.float32(noise) * rng.integers(-2, 3, size, np.int8)
            source = InMemory(values)
            records.append(
                Record(path, stage, slot, source, "float32", (size,), order=len(records), layer_type="Scale")
            )
    return Step(number, tuple(records))


def floor(pairs: list[tuple[Path, Path]]) -> None:
    for ours, theirs in pairs:
        a, b = np.load(ours), np.load(theirs)
        np.abs(a - b).max()


def files(reference: Path, candidate: Path, number: int | None = None) -> list[tuple[Path, Path]]:
    step = "*" if number is None else f"{number:08d}"
    found = sorted(reference.glob(f"steps/{step}/rank_*/*/*.npy"))
    return [(path, candidate / path.relative_to(reference)) for path in found]


def timed(call: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu


def medians(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float]]:
    """Seconds by wall clock and by processor of each call; all are called once before, so that files are warm."""
    for call in calls.values():
        call()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(timed(call))
    return {name: (statistics.median(w for w, _ in t), statistics.median(c for _, c in t)) for name, t in times.items()}


def ratios(folder: Path, name: str, noise: float, rounds: int, workers: int | None) -> None:
    steps, layers, size = SHAPES[name]
    a = write(folder / "a", steps, layers, size, 0.0)
    b = write(folder / "b", steps, layers, size, noise)
    pairs = files(a, b)
    infos = [open_run(path).info for path in (a, b)]
    packed = [write(folder / f"packed_{side}", steps, layers, size, n, True) for side, n in (("a", 0.0), ("b", noise))]
    m = medians(
        {
            "floor": lambda: floor(pairs),
            "compare": lambda: padiff.compare_runs(a, b, workers=workers),
            "one": lambda: padiff.compare_runs(a, b, workers=1),
            "packed": lambda: padiff.compare_runs(*packed, workers=workers),
            "align": lambda: align(*infos),
        },
        rounds,
    )
    megabytes = sum(path.stat().st_size for pair in pairs for path in pair) / 1e6
    speed = megabytes / m["compare"][0]
    print(
        f"{name}: {len(pairs)} pairs of {size:,} elements, {megabytes:,.0f} MB, {speed:,.0f} MB/s\n"
        f"        compare / floor                  {m['compare'][0] / m['floor'][0]:.2f}  "
        f"(processor time {m['compare'][1] / m['floor'][1]:.2f})\n"
        f"        compare with one worker / floor  {m['one'][0] / m['floor'][0]:.2f}\n"
        f"        compare packed runs / floor      {m['packed'][0] / m['floor'][0]:.2f}\n"
        f"        alignment's share of comparing   {m['align'][0] / m['compare'][0]:.3f}"
    )
    watch(folder, name, noise, rounds)
    for path in (a, b, *packed):
        shutil.rmtree(path)


def watch(folder: Path, name: str, noise: float, rounds: int) -> None:
    """Steps come one by one; the first one, which finds the layers' partners, is not counted."""
    _, layers, size = SHAPES[name]
    paths = [f"layer{k}" for k in range(layers)]
    runs = [write(folder / f"watched_{side}", 1, layers, size, n) for side, n in (("a", 0.0), ("b", noise))]
    tree = open_run(runs[0]).info
    paired = PairedRuns(*runs)
    list(paired.poll())
    latency, least = [], []
    for number in range(1, rounds + 1):
        for run, n in zip(runs, (0.0, noise)):
            whole = write_aside(folder / "aside", tree, made(number, paths, size, n))
            whole.rename(run / "steps" / whole.name)
            shutil.rmtree(folder / "aside")
        latency.append(timed(lambda: list(paired.poll()))[0])
        pairs = files(runs[0], runs[1], number)
        least.append(timed(lambda pairs=pairs: floor(pairs))[0])
    seconds = statistics.median(latency)
    print(
        f"        watch: step to report / floor    {seconds / statistics.median(least):.2f}  ({seconds * 1e3:.0f} ms)"
    )
    for run in runs:
        shutil.rmtree(run)


def write_aside(folder: Path, info: RunInfo, step: Step) -> Path:
    writer = RunWriter(folder, info)
    writer.put(step)
    writer.close()
    return folder / "steps" / f"{step.number:08d}"


def growth(folder: Path, noise: float, rounds: int, workers: int | None) -> None:
    base = (4, 20, 4096)
    print("growth of a comparison's time, from 4 steps of 20 layers with tensors of 4,096 elements:")
    for axis, what in enumerate(("steps", "layers", "elements")):
        calls, made_runs = {}, []
        for times in (1, 4, 16):
            shape = [n * times if k == axis else n for k, n in enumerate(base)]
            a = write(folder / f"a{times}", *shape, 0.0)
            b = write(folder / f"b{times}", *shape, noise)
            made_runs += [a, b]
            calls[str(times)] = lambda a=a, b=b: padiff.compare_runs(a, b, workers=workers)
        m = medians(calls, rounds)
        print(f"        {what:9} x4: {m['4'][0] / m['1'][0]:5.1f}   x16: {m['16'][0] / m['1'][0]:5.1f}")
        for run in made_runs:
            shutil.rmtree(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, help="processes that measure (default: as many as pay)")
    parser.add_argument("--dir", help="where to write; the file system matters (default: the temporary folder)")
    parser.add_argument("--equal", action="store_true", help="compare runs that are equal to the bit")
    args = parser.parse_args()
    noise = 0.0 if args.equal else 1e-7
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        for shape in SHAPES:
            ratios(Path(name), shape, noise, args.rounds, args.workers)
        growth(Path(name), noise, args.rounds, args.workers)


if __name__ == "__main__":
    main()
