"""What recording costs, as ratios within one run.

For a ResNet-18 and a GPT-2 small, in torch and in paddle, interleaved in one process, the median seconds of a step

* plain: no recording at all;
* not due: inside ``padiff.record``, a step that is not due;
* sketch: ``detail="sketch"``, every step;
* full: full tensors of every step; packed: the same in one file for each step;
* floor: the plain step, and then each tensor that a full step records copied by numpy and saved by ``np.save``, one
  after the other, into new files, in the loop.

Beside them: bytes and files of a step, and how much more memory the process had at most.

    python benchmarks/recording.py [--models resnet18 gpt2] [--frameworks torch paddle] [--rounds 7] [--dir FOLDER]
                                   [--size 64] [--batch 8] [--length 64] [--layers 12] [--steps 6] [--growth]

``--growth`` shows how a sketched step grows with layers and with the size of tensors.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from pathlib import Path

import numpy as np

warnings.filterwarnings("ignore")

import padiff

NEVER = padiff.Schedule(steps=[10**9])
KINDS = {
    "not due": {"every_n_steps": NEVER},
    "sketch": {"detail": "sketch"},
    "full": {},
    "packed": {"pack": True},
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

        paddle.seed(0)
        self._paddle = paddle
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


def seconds(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(training, args: argparse.Namespace, kinds: list[str]) -> dict[str, dict[str, float]]:
    """For each kind of recording: median seconds of a step, bytes, files, extra memory."""
    for _ in range(2):
        training.step()
    tensors = []
    if "full" in kinds:
        with padiff.record(training.model, optimizer=training.optimizer) as rec:
            training.step()
            rec.try_dump()
        tensors = [np.array(record.value) for record in rec.run.steps(0)[0].records]
        del rec
    times: dict[str, list[float]] = {kind: [] for kind in ("plain", *kinds, "floor")}
    about: dict[str, dict[str, float]] = {kind: {} for kind in times}
    folder = Path(tempfile.mkdtemp(prefix="padiff-bench-", dir=args.dir))
    try:
        for turn in range(args.rounds):
            with Peak():  # it is a thread, which costs something too
                times["plain"].append(seconds(lambda: [training.step() for _ in range(args.steps)]) / args.steps)
            for kind in kinds:
                run = folder / f"{kind.replace(' ', '-')}-{turn}"
                with Peak() as peak:
                    times[kind].append(_recorded(training, run, args.steps, KINDS[kind]))
                about[kind] |= {"memory": peak.bytes, **_stored(run, args.steps)}
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
            about[kind]["seconds"] = statistics.median(found)
            # Each round beside its own plain step: the machine's moods cancel.
            about[kind]["ratio"] = statistics.median(a / b for a, b in zip(found, times["plain"]))
    about["floor"]["tensors"] = len(tensors)
    return about


def _recorded(training, folder: Path, steps: int, options) -> float:
    """Seconds of a step, until the last one is on the disk; opening a run, which is done once, is not counted."""
    with padiff.record(training.model, folder, optimizer=training.optimizer, **options) as rec:

        def loop() -> None:
            for _ in range(steps):
                training.step()
                rec.try_dump()
            rec.flush()

        return seconds(loop) / steps


def _stored(run: Path, steps: int) -> dict[str, float]:
    files = [entry for entry in (run / "steps").rglob("*") if entry.is_file()]
    return {"bytes": sum(f.stat().st_size for f in files) / steps, "files": len(files) / steps}


def _floor(training, tensors: list[np.ndarray], folder: Path) -> None:
    training.step()
    # New files for every step, as a run folder has them.
    target = Path(tempfile.mkdtemp(prefix="floor", dir=folder))
    for index, tensor in enumerate(tensors):
        np.save(target / f"{index}.npy", tensor.copy())


def show(title: str, about: dict[str, dict[str, float]]) -> None:
    plain = about["plain"]["seconds"]
    print(f"{title}: plain step {plain * 1e3:.0f} ms", flush=True)
    for kind, found in about.items():
        if "seconds" not in found or kind in ("plain", "floor"):
            continue
        text = f"  {kind:8} / plain  {found['ratio']:6.3f}"
        if found.get("files"):
            text += f"   {found['bytes'] / 1e6:9.2f} MB in {found['files']:4.0f} files a step"
            text += f", {found['memory'] / 1e6:6.0f} MB more memory"
        if kind in ("full", "packed") and "seconds" in about["floor"]:
            floor = (found["seconds"] - plain) / max(about["floor"]["seconds"] - plain, 1e-9)
            text += f"; cost / numpy's copy and np.save  {floor:.2f}"
        print(text, flush=True)


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
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--dir", help="where to write; the file system matters (default: the temporary folder)")
    parser.add_argument("--growth", action="store_true")
    args = parser.parse_args()
    for name in args.frameworks:
        if args.growth:
            growth(name, args)
            continue
        for model in args.models:
            about = measure(TRAININGS[name](model, args), args, args.kinds)
            show(f"{name}, {model}, batch {args.batch}, medians of {args.rounds} x {args.steps} steps", about)


if __name__ == "__main__":
    main()
