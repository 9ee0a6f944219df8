"""How long the hypotheses on a failing ResNet-50 run take: torch against paddle, each fault by itself.

    python benchmarks/causes.py [--detail full|sketch] [--only NAME ...] [--size 64] [--batch 2]

Printed is, for each fault, the seconds of reading and judging the steps, of looking for the first diff's cause (which
is what has to stay below 5 s), and of what is put together at the end, with second faults. Both models are written of
plain layers, as neither torchvision nor paddle's own has the other's. The weights are torch's, carried over.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

for _threads in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_threads}_NUM_THREADS", "1")
os.environ.setdefault("GLOG_minloglevel", "3")
warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout's padiff

import numpy as np
import paddle
import torch

import padiff
from padiff.compare.comparison import RunComparison
from padiff.compare.coverage import Findings
from padiff.dump import open_run
from padiff.records import Both

torch.set_num_threads(1)
paddle.set_device("cpu")

BLOCKS, STEPS, RATE = (3, 4, 6, 3), 2, 0.01


def torch_resnet() -> Any:
    """ResNet-50 in torch: bottlenecks, the stride in the 3x3 convolution."""
    nn = torch.nn

    class Bottleneck(nn.Module):
        def __init__(self, given: int, width: int, stride: int) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(given, width, 1, bias=False), nn.BatchNorm2d(width)
            self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(width)
            self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
            self.relu, self.down = nn.ReLU(), None
            if stride > 1 or given != 4 * width:
                self.down = nn.Sequential(nn.Conv2d(given, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

        def forward(self, x: Any) -> Any:
            y = self.relu(self.bn1(self.conv1(x)))
            y = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(y)))))
            return self.relu(y + (x if self.down is None else self.down(x)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
            self.relu, self.pool = nn.ReLU(), nn.MaxPool2d(3, 2, 1)
            made, given = [], 64
            for k, count in enumerate(BLOCKS):
                width = 64 * 2**k
                blocks = []
                for n in range(count):
                    blocks.append(Bottleneck(given, width, 2 if k and not n else 1))
                    given = 4 * width
                made.append(nn.Sequential(*blocks))
            self.layers = nn.Sequential(*made)
            self.mean, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(given, 1000)

        def forward(self, x: Any) -> Any:
            x = self.layers(self.pool(self.relu(self.bn1(self.conv1(x)))))
            return self.fc(self.mean(x).flatten(1))

    return Net()


def paddle_resnet(fault: str) -> Any:
    """The same in paddle, with a fault in its second stage's last block."""
    nn = paddle.nn

    class Residual(nn.Layer):
        def __init__(self, given: int, width: int, stride: int, faulty: bool) -> None:
            super().__init__()
            self.fault = fault if faulty else ""
            self.conv1, self.bn1 = nn.Conv2D(given, width, 1, bias_attr=False), nn.BatchNorm2D(width)
            self.conv2 = nn.Conv2D(width, width, 3, stride, 1, bias_attr=False)
            self.bn2 = nn.BatchNorm2D(width, epsilon=1e-3 if self.fault == "eps" else 1e-5)
            self.conv3, self.bn3 = nn.Conv2D(width, 4 * width, 1, bias_attr=False), nn.BatchNorm2D(4 * width)
            self.relu, self.down = nn.ReLU(), None
            if stride > 1 or given != 4 * width:
                self.down = nn.Sequential(
                    nn.Conv2D(given, 4 * width, 1, stride, bias_attr=False), nn.BatchNorm2D(4 * width)
                )

        def forward(self, x: Any) -> Any:
            y = self.relu(self.bn1(self.conv1(x)))
            y = self.bn2(self.conv2(y))
            if self.fault == "activation":
                y = nn.functional.leaky_relu(y, 0.1)
            elif self.fault != "no_activation":
                y = self.relu(y)
            y = self.bn3(self.conv3(y))
            if self.fault == "branch_scale":
                y = 0.7 * y
            if self.fault == "no_residual":
                return self.relu(y)
            if self.fault == "unknown":  # nothing that padiff has a hypothesis on
                y = y + 0.1 * paddle.sin(37 * y) * paddle.roll(y, 3, 1)
            return self.relu(y + (x if self.down is None else self.down(x)))

    class Net(nn.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2D(3, 64, 7, 2, 3, bias_attr=False), nn.BatchNorm2D(64)
            self.relu, self.pool = nn.ReLU(), nn.MaxPool2D(3, 2, 1)
            if fault == "pool":
                self.pool = nn.AvgPool2D(3, 2, 1)
            made, given = [], 64
            for k, count in enumerate(BLOCKS):
                width = 64 * 2**k
                blocks = []
                for n in range(count):
                    blocks.append(Residual(given, width, 2 if k and not n else 1, (k, n) == (1, count - 1)))
                    given = 4 * width
                made.append(nn.Sequential(*blocks))
            self.layers = nn.Sequential(*made)
            self.mean, self.fc = nn.AdaptiveAvgPool2D(1), nn.Linear(given, 1000)

        def forward(self, x: Any) -> Any:
            x = self.layers(self.pool(self.relu(self.bn1(self.conv1(x)))))
            return self.fc(self.mean(x).flatten(1))

    return Net()


def batches(batch: int, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """A batch for each step."""
    rng = np.random.default_rng(0)
    return [
        (rng.standard_normal((batch, 3, size, size)).astype("float32"), rng.integers(0, 1000, batch))
        for _ in range(STEPS)
    ]


def record_torch(model: Any, folder: Path, feed: list[Any], **options: Any) -> None:
    """Train in torch, recorded."""
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9)
    with padiff.record(model, folder, optimizer=optimizer, **options) as rec:
        for x, y in feed:
            loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))
            loss.backward()
            rec.log_loss(loss)
            optimizer.step()
            optimizer.zero_grad()
            rec.try_dump()


def record_paddle(model: Any, folder: Path, feed: list[Any], fault: str, **options: Any) -> None:
    """Train in paddle, recorded."""
    smoothing = 0.1 if fault == "smoothing" else 0.0
    momentum = 0.8 if fault == "momentum" else 0.9
    optimizer = paddle.optimizer.Momentum(RATE, momentum, parameters=model.parameters())
    with padiff.record(model, folder, optimizer=optimizer, **options) as rec:
        for x, y in feed:
            outputs = model(paddle.to_tensor(x))
            loss = paddle.nn.functional.cross_entropy(outputs, paddle.to_tensor(y), label_smoothing=smoothing)
            if fault == "hand_loss":
                picked = paddle.nn.functional.log_softmax(outputs) * paddle.nn.functional.one_hot(
                    paddle.to_tensor(y), 1000
                )
                loss = -picked.sum() / 1000
            loss.backward()
            rec.log_loss(loss)
            if fault == "gradients":
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad.set_value(p.grad.numpy() * np.float32(0.5))
            optimizer.step()
            optimizer.clear_grad()
            rec.try_dump()


FAULTS = (
    "eps", "activation", "no_activation", "branch_scale", "no_residual", "unknown", "pool", "smoothing", "hand_loss",
    "gradients", "momentum",
)  # fmt: skip


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """What a call gives, and its seconds of this process, so that a machine that others use tells the same."""
    began = time.process_time()
    return run(), time.process_time() - began


def compared(reference: Path, candidate: Path) -> tuple[Any, float, float, float]:
    """The report; and the seconds of judging, of the first diff, and of the rest, as `compare_runs` does them."""
    runs = Both(open_run(str(reference)), open_run(str(candidate)))
    comparison = RunComparison(*runs)
    findings, first, judging, causes = None, None, 0.0, 0.0
    for number in comparison.common():
        ranks, spent = timed(lambda number=number: comparison.rank_diffs(Both(number, number)))
        judging += spent
        if findings is None:
            findings = Findings(comparison.alignment, runs)
        findings.add(ranks, Both(number, number))
        if first is None:
            first, spent = timed(lambda ranks=ranks: comparison.first([d for rank in ranks for d in rank]))
            causes += spent
    assert findings is not None
    report, rest = timed(lambda: comparison.report_of(findings, first, comparison.common(), Both((), ())))
    return report, judging, causes, rest


def main() -> None:
    """Time what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--detail", choices=("full", "sketch"), default="full")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    given = parser.parse_args()
    feed = batches(given.batch, given.size)
    torch.manual_seed(0)
    start = torch_resnet().state_dict()
    print(f"ResNet-50, batch {given.batch}, {given.size} x {given.size}, {given.detail}")
    print(f"{'fault':14} {'judging':>8} {'cause':>8} {'rest':>8}  first diff")
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        own = torch_resnet()
        own.load_state_dict(start)
        options = {"detail": given.detail, **({"pack": True} if given.detail == "full" else {})}
        record_torch(own, Path(folder, "torch"), feed, **options)
        own.load_state_dict(start)
        for fault in FAULTS:
            if given.only and fault not in given.only:
                continue
            model = paddle_resnet(fault)
            padiff.assign_weight(own, model)
            path = Path(folder, fault)
            record_paddle(model, path, feed, fault, **options)
            report, judging, causes, rest = compared(Path(folder, "torch"), path)
            worst = max(worst, causes + rest)
            print(f"{fault:14} {judging:8.2f} {causes:8.2f} {rest:8.2f}  {report.first_diff}", flush=True)
            for other in report.independent:
                print(f"{'':40} {other}")
    print(f"worst: {worst:.2f} s for causes and what follows")


if __name__ == "__main__":
    main()
