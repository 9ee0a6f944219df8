"""What recording costs, as ratios within one run.

For a ResNet-18 and a GPT-2 small, in torch and in paddle, interleaved in one process, the median of a step's seconds,
by the processor's time of the whole process and by the clock

* before: no recording at all, before a recorder was opened in the process;
* plain: no recording at all, in turns with those that follow;
* not due: inside ``padiff.record``, a step that is not due;
* sketch: ``detail="sketch"``, every step;
* packed: full tensors of every step, in one file for each step; files: the same in a file for each tensor;
* floor: the plain step, and then each tensor that a full step records copied by numpy and saved by ``np.save``, one
  after the other, into new files, in the loop.

Beside them: bytes and files of a step, and how much more memory the process had at most.

    python benchmarks/recording.py [--models resnet18 gpt2] [--frameworks torch paddle] [--rounds 7] [--dir FOLDER]
                                   [--device cpu] [--size 64] [--batch 8] [--length 64] [--layers 12] [--steps 6]
                                   [--threads 1] [--growth] [--lines] [--choices] [--write]

The C library gives back what is free at the end of its memory, and a framework's largest gradients come from there or
not, as it happens: from process to process a step of torch has none to 13,800 page faults of 2 us.

``--lines`` measures what the lines of code cost: the first step of a recording, whose calls are traced, with
``sources=True`` by the same with ``sources=False``, in turns, with nothing of the source read before.

``--choices`` measures what the choices cost: a recorded step of a mixture of experts in torch by the same step of a
recorder that knows no function which chooses, in turns.

``--growth`` shows how a sketched step grows with layers and with the size of tensors. ``--write`` keeps the figures and
writes the table of docs/performance.md and the lines of the README, in both languages (`performance_page`).
"""

from __future__ import annotations

import argparse
import linecache
import os
import shutil
import tempfile
import threading
import time
import warnings
from pathlib import Path

import numpy as np

warnings.filterwarnings("ignore")

import performance_page as pages

import padiff
from padiff.system import construction, frames

NEVER = padiff.Schedule(steps=[10**9])
KINDS = {
    "not due": {"every_n_steps": NEVER},
    "sketch": {"detail": "sketch"},
    "packed": {"detail": "full", "pack": True},
    "files": {"detail": "full", "pack": False},
}


class TorchTraining:
    """A model and an optimizer, one step at a time."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        import torch
        from models import GPT2, ResNet18

        torch.manual_seed(0)
        self._torch, self._name = torch, name
        if name == "gpt2":
            self.model = GPT2(args.layers, args.width)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
            self._x = torch.randint(0, 50257, (args.batch, args.length))
            self._y = torch.randint(0, 50257, (args.batch, args.length))
        else:
            self.model = ResNet18()
            self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01, momentum=0.9)
            self._x = torch.randn(args.batch, 3, args.size, args.size)
            self._y = torch.randint(0, 1000, (args.batch,))
        self._device = torch.device(args.device)
        # In place: the optimizer has the parameters already.
        self.model.to(self._device)
        self._x, self._y = self._x.to(self._device), self._y.to(self._device)

    def wait(self) -> None:
        if self._device.type == "cuda":
            self._torch.cuda.synchronize()

    def device_memory(self) -> int:
        """The largest memory of the device since the last call, in bytes."""
        if self._device.type != "cuda":
            return 0
        peak = self._torch.cuda.max_memory_allocated()
        self._torch.cuda.reset_peak_memory_stats()
        return peak

    def step(self) -> None:
        out = self.model(self._x)
        loss = self._torch.nn.functional.cross_entropy(out.flatten(0, -2), self._y.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class PaddleTraining:
    """The same in paddle."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        import paddle
        from paddle_models import GPT2

        paddle.set_device("gpu" if args.device == "cuda" else args.device)
        paddle.seed(0)
        self._paddle, self._device = paddle, args.device
        if name == "gpt2":
            self.model = GPT2(args.layers, args.width)
            self.optimizer = paddle.optimizer.AdamW(1e-4, parameters=self.model.parameters())
            self._x = paddle.randint(0, 50257, (args.batch, args.length))
            self._y = paddle.randint(0, 50257, (args.batch, args.length))
        else:
            self.model = paddle.vision.models.resnet18()
            self.optimizer = paddle.optimizer.Momentum(0.01, 0.9, parameters=self.model.parameters())
            self._x = paddle.randn([args.batch, 3, args.size, args.size])
            self._y = paddle.randint(0, 1000, (args.batch,))

    def wait(self) -> None:
        if self._device == "cuda":
            self._paddle.device.synchronize()

    def device_memory(self) -> int:
        """The largest memory of the device since the last call, in bytes."""
        if self._device != "cuda":
            return 0
        peak = self._paddle.device.cuda.max_memory_allocated()
        self._paddle.device.cuda.reset_max_memory_allocated()
        return peak

    def step(self) -> None:
        loss = self._paddle.nn.functional.cross_entropy(self.model(self._x), self._y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.clear_grad()


TRAININGS = {"torch": TorchTraining, "paddle": PaddleTraining}


class Peak:
    """The largest resident memory while it is open, in bytes beyond what there was."""

    def __enter__(self) -> Peak:
        self._before = self.bytes = _resident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.bytes = max(self.bytes, _resident()) - self._before

    def _look(self) -> None:
        while not self._over.wait(0.02):
            self.bytes = max(self.bytes, _resident())


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def seconds(call) -> np.ndarray:
    """By the processor, of all threads, and by the clock."""
    processor, clock = time.process_time(), time.perf_counter()
    call()
    return np.array([time.process_time() - processor, time.perf_counter() - clock])


def _steps(training, count: int) -> None:
    for _ in range(count):
        training.step()
    training.wait()


def measure(training, args: argparse.Namespace, kinds: list[str]) -> dict[str, dict[str, float]]:
    """For each kind of recording: median seconds of a step, bytes, files, extra memory."""
    for _ in range(2):
        training.step()
    before = [seconds(lambda: _steps(training, args.steps)) / args.steps for _ in range(args.rounds)]
    tensors = []
    if {"packed", "files"} & {*kinds}:
        with padiff.record(training.model, optimizer=training.optimizer, detail="full") as rec:
            training.step()
            rec.try_dump()
        tensors = [np.array(record.value) for record in rec.run.steps(0)[0].records]
        del rec
    times: dict[str, list[np.ndarray]] = {kind: [] for kind in ("plain", *kinds, "floor")}
    about: dict[str, dict[str, float]] = {kind: {} for kind in times}
    folder = Path(tempfile.mkdtemp(prefix="padiff-bench-", dir=args.dir))
    try:
        for turn in range(args.rounds):
            training.device_memory()
            with Peak():  # it is a thread, which costs something too
                times["plain"].append(seconds(lambda: _steps(training, args.steps)) / args.steps)
            device = training.device_memory()
            for kind in kinds:
                run = folder / f"{kind.replace(' ', '-')}-{turn}"
                with Peak() as peak:
                    times[kind].append(_recorded(training, run, args.steps, KINDS[kind]))
                about[kind] |= {"memory": peak.bytes, "device": training.device_memory() - device, **_stored(run)}
                shutil.rmtree(run)
            if tensors:
                times["floor"].append(
                    seconds(lambda: [_floor(training, tensors, folder) for _ in range(args.steps)]) / args.steps
                )
                for made in folder.iterdir():
                    shutil.rmtree(made)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for kind, found in times.items():
        if found:
            about[kind]["seconds"], about[kind]["by the clock"] = np.median(found, axis=0)
            # Each round beside its own plain step: the machine's moods cancel.
            ratios = [a / b for a, b in zip(found, times["plain"])]
            about[kind]["ratio"], about[kind]["clock ratio"] = np.median(ratios, axis=0)
            if tensors and kind in ("packed", "files"):
                costs = zip(found, times["floor"], times["plain"])
                about[kind]["of numpy"], about[kind]["of numpy by the clock"] = np.median(
                    [(a - plain) / np.maximum(floor - plain, 1e-9) for a, floor, plain in costs], axis=0
                )
    about["floor"]["tensors"] = len(tensors)
    about["before"] = {"seconds": float(np.median(before, axis=0)[0])}
    return about


def _recorded(training, folder: Path, steps: int, options) -> np.ndarray:
    """Seconds of a step, until the last one is on the disk. Opening a run is not counted, nor are its first two steps:
    of the first more is kept, and the second is the first that those after it are like.
    """
    with padiff.record(training.model, folder, optimizer=training.optimizer, **options) as rec:
        for _ in range(2):
            training.step()
            rec.try_dump()
        training.wait()
        rec.flush()

        def loop() -> None:
            for _ in range(steps):
                training.step()
                rec.try_dump()
            training.wait()
            rec.flush()

        return seconds(loop) / steps


def of_lines(training, args: argparse.Namespace) -> tuple[float, float, float]:
    """Median seconds of a traced step without lines; that with them by it, by the processor and by the clock."""
    training.step()
    folder = Path(tempfile.mkdtemp(prefix="padiff-bench-", dir=args.dir))
    pairs = []
    try:
        for turn in range(args.rounds + 1):
            costs = {}
            for sources in (True, False) if turn % 2 else (False, True):
                for cache in (construction._parse, frames._code, frames._about):
                    cache.cache_clear()  # as in the only recording of a process
                linecache.clearcache()
                run = folder / f"{turn}-{sources}"
                with padiff.record(training.model, run, optimizer=training.optimizer, sources=sources) as rec:

                    def first(rec=rec) -> None:
                        training.step()
                        rec.try_dump()
                        rec.flush()

                    costs[sources] = seconds(first)
                shutil.rmtree(run)
            pairs.append((costs[True], costs[False]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    pairs = pairs[1:]  # the first recording of a process warms it up
    ratio, clock = np.median([given / left for given, left in pairs], axis=0)
    return float(np.median([left[0] for _, left in pairs])), ratio, clock


class Experts:
    """A training of a mixture of experts in torch: four blocks of eight experts, of which each token takes two."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        torch.manual_seed(0)
        width, tokens = 256, args.batch * args.length

        class Block(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.router = torch.nn.Linear(width, 8, bias=False)
                self.experts = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(8))

            def forward(self, x):
                weights, places = self.router(x).softmax(-1).topk(2, -1)
                for number, expert in enumerate(self.experts):
                    rows, ranks = (places == number).nonzero(as_tuple=True)
                    x = x.index_add(0, rows, expert(x[rows]).relu() * weights[rows, ranks, None])
                return x

        self.model = torch.nn.Sequential(*(Block() for _ in range(4)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 1e-3)
        self._x = torch.randn(tokens, width)

    def wait(self) -> None:
        pass

    def step(self) -> None:
        self.model(self._x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def of_choices(args: argparse.Namespace) -> None:
    """Print what a recorded step costs by the same step without choices, and by the plain step."""
    from padiff.recorder import tracer

    training, functions = Experts(args), tracer.CHOOSING
    folder = Path(tempfile.mkdtemp(prefix="padiff-bench-", dir=args.dir))
    print(f"torch, a mixture of experts, {args.batch * args.length} tokens: steps with choices", flush=True)
    try:
        for kind in ("sketch", "packed"):
            rounds = []
            for turn in range(args.rounds + 1):
                plain, costs = seconds(lambda: _steps(training, args.steps)) / args.steps, {}
                for choosing in (functions, frozenset()) if turn % 2 else (frozenset(), functions):
                    tracer.CHOOSING, run = choosing, folder / f"{kind}-{turn}-{len(choosing)}"
                    costs[bool(choosing)] = _recorded(training, run, args.steps, KINDS[kind])
                    shutil.rmtree(run)
                rounds.append((costs[True] / costs[False], costs[True] / plain))
            (ratio, clock), (step, _) = np.median(rounds[1:], axis=0)
            print(
                f"  {kind:8} / without choices  {ratio:6.3f} (by the clock {clock:.3f}); / plain  {step:6.3f}",
                flush=True,
            )
    finally:
        tracer.CHOOSING = functions
        shutil.rmtree(folder, ignore_errors=True)


def _stored(run: Path) -> dict[str, float]:
    """Bytes and files of a step, as the middle one of them has."""
    files = [[f for f in step.rglob("*") if f.is_file()] for step in (run / "steps").iterdir()]
    sizes = [sum(f.stat().st_size for f in some) for some in files]
    return {"bytes": float(np.median(sizes or 0)), "files": float(np.median([len(some) for some in files] or 0))}


def _floor(training, tensors: list[np.ndarray], folder: Path) -> None:
    training.step()
    # New files for every step, as a run folder has them.
    target = Path(tempfile.mkdtemp(prefix="floor", dir=folder))
    for index, tensor in enumerate(tensors):
        np.save(target / f"{index}.npy", tensor.copy())


def show(title: str, about: dict[str, dict[str, float]]) -> None:
    plain = about["plain"]["seconds"]
    clock = about["plain"]["by the clock"]
    print(f"{title}: plain step {plain * 1e3:.0f} ms of the processor, {clock * 1e3:.0f} ms by the clock", end="; ")
    print(f"{about['before']['seconds'] * 1e3:.0f} ms of the processor before a recorder was opened", flush=True)
    for kind, found in about.items():
        if "seconds" not in found or kind in ("before", "plain", "floor"):
            continue
        text = f"  {kind:8} / plain  {found['ratio']:6.3f} (by the clock {found['clock ratio']:.3f})"
        if found.get("files"):
            text += f"   {found['bytes'] / 1e6:9.2f} MB in {found['files']:4.0f} files a step"
            text += f", {found['memory'] / 1e6:6.0f} MB more memory"
            text += f", {found['device'] / 1e6:6.0f} MB of the device" if found["device"] else ""
        if "of numpy" in found:
            text += f"; cost / numpy's copy and np.save  {found['of numpy']:.2f}"
            text += f" (by the clock {found['of numpy by the clock']:.2f})"
        print(text, flush=True)


#: A row of the page: the framework, the model, the size of a picture.
ROWS = (("torch", "resnet18", 64), ("torch", "resnet18", 224), ("torch", "gpt2", 64))
ROWS += tuple(("paddle", *row[1:]) for row in ROWS)
_MODELS = {
    ("resnet18", pages.ENGLISH): "ResNet-18, {size} x {size}",
    ("resnet18", pages.CHINESE): "ResNet-18，{size} x {size}",
    ("gpt2", pages.ENGLISH): "GPT-2 small, 64 tokens",
    ("gpt2", pages.CHINESE): "GPT-2 small，64 个 token",
}
_HEAD = {
    pages.ENGLISH: (
        "step / plain step",
        "plain, ms of the processor",
        "not due",
        "sketch",
        "sketch, by the clock",
        "sketch / plain step before a recorder was opened",
        "MB a step",
        "packed full tensors / numpy's copy and save, ext4",
        "the same, tmpfs",
    ),
    pages.CHINESE: (
        "step / 普通 step",
        "普通 step，处理器时间 ms",
        "不录制的 step",
        "摘要",
        "摘要，按时钟",
        "摘要 / 打开录制器之前的普通 step",
        "每个 step 的 MB",
        "打包的完整张量 / numpy 的拷贝与保存，ext4",
        "同左，tmpfs",
    ),
}
_SAID = {
    pages.ENGLISH: "Measured on {where}, which others used at the same time; frameworks on one thread; processor time, "
    "the writer's thread included, where nothing else is said. The first two steps of each run, of which more is kept, "
    "are not counted. Each figure is the range over up to {most} runs, each the median of its rounds.",
    pages.CHINESE: "测量环境：{where}，同时有其他人使用；框架使用一个线程；除注明外均为处理器时间，包括写入线程。"
    "每次录制的前两个 step 保留的内容更多，不计在内。"
    "每个数字是最多 {most} 次运行的范围，每次取各轮的中位数。",
}


def file_system(folder: str) -> str:
    """What kind of file system a folder is on."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    path = Path(folder).resolve()
    return max((len(at), kind) for at, kind in mounts if path.is_relative_to(at))[1]


def figures(name: str, model: str, size: int, about: dict[str, dict[str, float]], on: str) -> dict[str, float]:
    """What is kept of a measurement, whose runs were written to this kind of file system."""
    row = f"{name} {model} {size if model == 'resnet18' else 64}"
    found = {f"{row} plain": about["plain"]["seconds"] * 1e3}
    for kind in about:
        for what in ("ratio", "clock ratio", "of numpy", "of numpy by the clock"):
            if kind in KINDS and what in about[kind]:
                where = f" {on}" if what.startswith("of numpy") else ""
                found[f"{row} {kind} {what}{where}"] = float(about[kind][what])
    if "sketch" in about:
        found[f"{row} sketch of before"] = about["sketch"]["seconds"] / about["before"]["seconds"]
    if "sketch" in about and about["sketch"].get("files"):
        found[f"{row} sketch MB"] = about["sketch"]["bytes"] / 1e6
    return found


def block(language: str, kept: pages.Figures) -> str:
    """The table of the page."""
    rows = []
    for name, model, size in ROWS:
        row = f"{name} {model} {size}"
        if f"{row} plain" not in kept.values:
            continue
        title = _MODELS[model, language].format(size=size)
        of = ("plain", 0), ("not due ratio", 2), ("sketch ratio", 2), ("sketch clock ratio", 2)
        of += ("sketch of before", 2), ("sketch MB", 2)
        cells = [
            kept.text(f"{row} {what}", language, digits)
            for what, digits in (*of, ("packed of numpy ext4", 2), ("packed of numpy tmpfs", 2))
        ]
        rows.append([f"{name}{'，' if language == pages.CHINESE else ', '}{title}", *cells])
    said = _SAID[language].format(where=kept.measured_on(language), most=pages.MOST)
    return pages.table(_HEAD[language], rows) + "\n\n" + said


_README = {
    pages.ENGLISH: ("step / plain step", "not due", "sketch", "MB a step", "machine"),
    pages.CHINESE: ("step / 普通 step", "不录制的 step", "摘要", "每个 step 的 MB", "机器"),
}
_CORES = {pages.ENGLISH: "{cores} cores of an {name}", pages.CHINESE: "{name} 的 {cores} 个核"}


def lines(language: str, kept: pages.Figures) -> str:
    """The lines of the README."""
    rows = []
    for name, model, size in (("torch", "resnet18", 64), ("torch", "gpt2", 64)):
        title = _MODELS[model, language].format(size=size)
        cells = [
            kept.text(f"{name} {model} {size} {what}", language)
            for what in ("not due ratio", "sketch ratio", "sketch MB")
        ]
        machine = _CORES[language].format(**kept.machine)
        rows.append([f"{name}{'，' if language == pages.CHINESE else ', '}{title}", *cells, machine])
    return pages.table(_README[language], rows)


def growth(name: str, args: argparse.Namespace) -> None:
    """How the cost of sketching a step grows with layers and with the size of tensors."""
    print(f"{name}: milliseconds that sketching adds to a step, and for each layer")
    for layers, width in ((2, 64), (4, 64), (8, 64), (16, 64), (32, 64), (8, 128), (8, 256), (8, 512)):
        some = argparse.Namespace(**{**vars(args), "layers": layers, "width": width, "length": 16})
        about = measure(TRAININGS[name]("gpt2", some), some, ["sketch"])
        added = (about["sketch"]["seconds"] - about["plain"]["seconds"]) * 1e3
        print(f"  {layers:3} layers of width {width:4}: {added:7.2f} ms, {added / layers:6.2f} a layer", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["resnet18", "gpt2"])
    parser.add_argument("--frameworks", nargs="*", default=list(TRAININGS))
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--device", default="cpu", help="cpu (default), or cuda: a GPU")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="of a framework (default: 1; several wait for each other by turning round, which counts as work)",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dir", help="where to write; the file system matters (default: the temporary folder)")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--choices", action="store_true", help="measure what calls that choose cost in a step")
    parser.add_argument("--lines", action="store_true", help="measure what the lines of code cost in a traced step")
    parser.add_argument("--write", action="store_true", help="keep the figures, and write them into the pages")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # before a framework is imported
    if args.choices:
        of_choices(args)
        return
    for name in args.frameworks:
        if args.growth:
            growth(name, args)
            continue
        for model in args.models:
            if args.lines:
                without, ratio, clock = of_lines(TRAININGS[name](model, args), args)
                print(
                    f"{name}, {model}: traced step {without * 1e3:.0f} ms of the processor; with lines / without ",
                    end="",
                )
                print(f"{ratio:.3f} (by the clock {clock:.3f}), medians of {args.rounds} pairs", flush=True)
                continue
            about = measure(TRAININGS[name](model, args), args, args.kinds)
            show(f"{name}, {model}, batch {args.batch}, medians of {args.rounds} x {args.steps} steps", about)
            if args.write:
                kept = pages.keep(
                    "recording", figures(name, model, args.size, about, file_system(args.dir or tempfile.gettempdir()))
                )
                pages.write("recording", lambda language, kept=kept: block(language, kept))
                pages.write("recording", lambda language, kept=kept: lines(language, kept), "README.md")


if __name__ == "__main__":
    main()
