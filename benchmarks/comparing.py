"""What comparing costs, as ratios within one run.

For two run folders of synthetic steps, written by numpy alone, medians of several rounds, interleaved:

* compare / floor: ``padiff.compare_runs`` in one process, everything included (aligning, reading, measuring, judging,
  the report), beside numpy's floor: ``np.load(a) - np.load(b)`` of each pair of files, one after the other. By
  processor time and by wall clock, for steps in single files and for packed ones, in a process that did nothing before
  and in one that trained with torch, whose memory is there already; with the extra ``fast``, once it is loaded (small
  tensors alone never load it), and without it;
* the same with as many processes as pay, by wall clock;
* alignment: pairing the layers, as a share of the comparison;
* watch: from the appearance of a step in both folders to its report, beside the floor of that step;
* growth: how the time of a comparison grows when there are more steps, more layers, larger tensors.

The candidate is the reference with rounding noise on every value, so nothing is equal to the bit (``--equal``: all is).
Files are warm: each call is made once before.

    python benchmarks/comparing.py [--rounds 5] [--workers N] [--dir FOLDER] [--equal] [--only large]
    python benchmarks/comparing.py --write        the first of these figures only, into docs/performance.md
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from performance_page import CHINESE, ENGLISH, Figures, keep, table
from performance_page import write as write_page
from synthetic import made, timed, write

import padiff
from padiff.align import align
from padiff.compare.measure import sums
from padiff.dump import RunWriter, open_run
from padiff.records import RunInfo, Step
from padiff_hooks.paired import PairedRuns

# Steps, layers, elements of each tensor; a layer has an output and a weight, and what belongs to them.
SHAPES = {
    "large tensors": (3, 10, 1_000_000),
    "medium tensors": (5, 40, 40_000),
    "many small tensors": (5, 80, 256),
}
STORED = ("packed", "files")
# What was in a process before, and whether it has the extra `fast`.
PROCESSES = {
    "fresh, fast": (),
    "trained, fast": ("--trained",),
    "fresh": ("--without-fast",),
    "trained": ("--trained", "--without-fast"),
}


def floor(pairs: list[tuple[Path, Path]]) -> None:
    for ours, theirs in pairs:
        np.load(ours) - np.load(theirs)


def files(reference: Path, candidate: Path, number: int | None = None) -> list[tuple[Path, Path]]:
    step = "*" if number is None else f"{number:08d}"
    found = sorted(reference.glob(f"steps/{step}/rank_*/*/*.npy"))
    return [(path, candidate / path.relative_to(reference)) for path in found]


def medians(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float]]:
    """Seconds by wall clock and by processor of each call; all are called once before, so that files are warm."""
    for call in calls.values():
        call()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(timed(call))
    return {name: (statistics.median(w for w, _ in t), statistics.median(c for _, c in t)) for name, t in times.items()}


def in_processes(folder: Path, name: str, noise: float, rounds: int) -> dict[str, float]:
    """Comparing in a process of each kind, in multiples of the floor there: by processor time and by the clock."""
    shape = SHAPES[name]
    for side, off in (("a", 0.0), ("b", noise)):
        write(folder / f"files_{side}", *shape, off)
        write(folder / f"packed_{side}", *shape, off, True)
    found = {}
    for kind, options in PROCESSES.items():
        command = [sys.executable, __file__, "--one", str(folder), "--rounds", str(rounds), *options]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        for stored, (cpu, wall) in json.loads(done.stdout).items():
            found[f"{name}, {stored}, {kind}"] = cpu
            found[f"{name}, {stored}, {kind}, by the clock"] = wall
            print(f"{name}, {stored}, {kind}: {cpu:.2f} times the floor's processor time, {wall:.2f} by the clock")
    for path in folder.iterdir():
        shutil.rmtree(path)
    return found


def one_process(folder: Path, rounds: int, trained: bool, fast: bool) -> None:
    """What `in_processes` starts."""
    if trained:
        train()
    if not fast:
        sys.modules["numba"] = None  # type: ignore[assignment]
    pairs = files(folder / "files_a", folder / "files_b")
    # Small tensors never load it. With numba in memory the garbage collector has more to look at, in each comparison.
    if fast and np.load(pairs[0][0]).size >= sums.LEAST and sums.load() is None:
        raise SystemExit("the extra `fast` is not installed, or does not work: pip install numba")
    calls: dict[str, Callable[[], object]] = {"floor": lambda: floor(pairs)}
    for stored in STORED:
        sides = folder / f"{stored}_a", folder / f"{stored}_b"
        calls[stored] = lambda sides=sides: padiff.compare_runs(*sides, workers=1)
    m = medians(calls, rounds)
    print(json.dumps({s: [m[s][1] / m["floor"][1], m[s][0] / m["floor"][0]] for s in STORED}))


def train() -> None:
    """Some steps of torch, after which memory that was freed stays with the process."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4096, 512)).square().mean().backward()
        optimizer.step()


_ROWS = {
    ENGLISH: {
        "many small tensors": "256 elements",
        "medium tensors": "40,000 elements",
        "large tensors": "1,000,000 elements",
        "packed": "packed steps",
        "files": "single files",
    },
    CHINESE: {
        "many small tensors": "256 个元素",
        "medium tensors": "40,000 个元素",
        "large tensors": "1,000,000 个元素",
        "packed": "每个 step 一个文件",
        "files": "每个张量一个文件",
    },
}
_HEAD = {
    ENGLISH: ["", "with `fast`, fresh", "with `fast`, trained", "without, fresh", "without, trained"],
    CHINESE: ["", "有 `fast`，新进程", "有 `fast`，训练过", "没有，新进程", "没有，训练过"],
}
_FOOT = {
    ENGLISH: "Processor time, {runs} runs, each a median of 5 rounds in turns; {machine}, with other work beside it.",
    CHINESE: "处理器时间，{runs} 次运行，每次取 5 轮交替测量的中位数；{machine}，同时有其他任务在运行。",
}
_README = {ENGLISH: ["", "with `fast`", "machine"], CHINESE: ["", "有 `fast`", "机器"]}


def written(measured: Mapping[str, float]) -> None:
    """Keep what was measured, and write the pages anew."""
    figures = keep("comparing", measured)
    runs = max(map(len, figures.values.values()))

    def page(language: str) -> str:
        names = _ROWS[language]
        rows = [
            [f"{names[size]}, {names[stored]}" if language == ENGLISH else f"{names[size]}，{names[stored]}"]
            + [figures.text(f"{size}, {stored}, {kind}", language) for kind in PROCESSES]
            for size in reversed(SHAPES)
            for stored in STORED
        ]
        foot = _FOOT[language].format(runs=runs, machine=figures.measured_on(language))
        return f"{table(_HEAD[language], rows)}\n\n{foot}"

    def readme(language: str) -> str:
        names = _ROWS[language]
        kinds = [kind for kind in PROCESSES if "fast" in kind]
        rows = []
        for size in ("medium tensors", "large tensors"):
            values = [v for kind in kinds for v in figures.values[f"{size}, packed, {kind}"]]
            both = Figures(figures.machine, {size: values})
            cores = "{cores} cores of an {name}" if language == ENGLISH else "{name} 的 {cores} 个核"
            rows.append([names[size], both.text(size, language), cores.format(**figures.machine)])
        return table(_README[language], rows)

    write_page("comparing", page)
    write_page("comparing", readme, "README.md")


def ratios(folder: Path, name: str, noise: float, rounds: int, workers: int | None) -> None:
    steps, layers, size = SHAPES[name]
    a = write(folder / "a", steps, layers, size, 0.0)
    b = write(folder / "b", steps, layers, size, noise)
    pairs = files(a, b)
    infos = [open_run(path).info for path in (a, b)]
    m = medians(
        {
            "floor": lambda: floor(pairs),
            "compare": lambda: padiff.compare_runs(a, b, workers=workers),
            "align": lambda: align(*infos),
        },
        rounds,
    )
    megabytes = sum(path.stat().st_size for pair in pairs for path in pair) / 1e6
    speed = megabytes / m["compare"][0]
    print(
        f"{name}: {len(pairs)} pairs of {size:,} elements, {megabytes:,.0f} MB, {speed:,.0f} MB/s\n"
        f"        compare with processes that pay / floor, by the clock  {m['compare'][0] / m['floor'][0]:.2f}\n"
        f"        alignment's share of comparing   {m['align'][0] / m['compare'][0]:.3f}"
    )
    watch(folder, name, noise, rounds)
    for path in (a, b):
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
    writer.add_step(step)
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
    parser.add_argument("--only", help="part of the name of a size")
    parser.add_argument("--write", action="store_true", help="only the comparisons in one process; write the pages")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--trained", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--without-fast", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one_process(Path(args.one), args.rounds, args.trained, not args.without_fast)
        return
    noise = 0.0 if args.equal else 1e-7
    measured: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        for shape in SHAPES:
            if args.only and args.only not in shape:
                continue
            measured.update(in_processes(Path(name), shape, noise, args.rounds))
            if not args.write:
                ratios(Path(name), shape, noise, args.rounds, args.workers)
        if not args.write:
            growth(Path(name), noise, args.rounds, args.workers)
    if args.write:
        written(measured)


if __name__ == "__main__":
    main()
