"""How far clean torch / paddle twins drift apart: what the default limits were measured on.

Trains pairs of twins from equal weights on equal batches, records every n-th step in memory, and prints for every
stage the largest relative L2 error and how close it came to its limit. A share of 1 or more would be a false alarm.

    python benchmarks/noise.py [--steps 60] [--every 5] [--batch 16] [--detail full] [PAIR ...]
"""

from __future__ import annotations

import argparse
import warnings
from collections import defaultdict

import numpy as np

warnings.filterwarnings("ignore")

import paddle
import torch
from models import ResNet18

import padiff
from padiff.compare import RunComparison


def carry_over(source: torch.nn.Module, target: paddle.nn.Layer) -> None:
    """Copy torch's parameters to paddle's, in order of definition; linear matrices are transposed."""
    linear = {id(m.weight) for m in source.modules() if isinstance(m, torch.nn.Linear)}
    given = list(source.parameters())
    taking = [p for p in target.parameters() if not p.stop_gradient]
    assert len(given) == len(taking)
    for p, q in zip(given, taking):
        value = p.detach().numpy()
        q.set_value(value.T.copy() if id(p) in linear else value.copy())


class TorchBlock(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (torch.nn.Linear(width, width) for _ in range(4))
        self.norm2 = torch.nn.LayerNorm(width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x):
        y = self.norm1(x)
        b, n, w = y.shape
        q, k, v = (f(y).reshape(b, n, 4, w // 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = torch.softmax(q @ k.transpose(-1, -2) / (w // 4) ** 0.5, -1)
        x = x + self.out((a @ v).transpose(1, 2).reshape(b, n, w))
        return x + self.mlp(self.norm2(x))


class PaddleBlock(paddle.nn.Layer):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_a = paddle.nn.LayerNorm(width)
        self.query, self.key, self.value, self.proj = (paddle.nn.Linear(width, width) for _ in range(4))
        self.ln_b = paddle.nn.LayerNorm(width)
        self.ffn = paddle.nn.Sequential(
            paddle.nn.Linear(width, 4 * width), paddle.nn.GELU(), paddle.nn.Linear(4 * width, width)
        )

    def forward(self, x):
        y = self.ln_a(x)
        b, n, w = y.shape
        q, k, v = (f(y).reshape([b, n, 4, w // 4]).transpose([0, 2, 1, 3]) for f in (self.query, self.key, self.value))
        a = paddle.nn.functional.softmax(q @ k.transpose([0, 1, 3, 2]) / (w // 4) ** 0.5, -1)
        x = x + self.proj((a @ v).transpose([0, 2, 1, 3]).reshape([b, n, w]))
        return x + self.ffn(self.ln_b(x))


def mlp():
    t, p = torch.nn, paddle.nn
    return (
        t.Sequential(t.Linear(64, 128), t.ReLU(), t.Linear(128, 128), t.Tanh(), t.Linear(128, 10)),
        p.Sequential(p.Linear(64, 128), p.ReLU(), p.Linear(128, 128), p.Tanh(), p.Linear(128, 10)),
        (64,),
    )


def cnn(bias: bool):
    t, p = torch.nn, paddle.nn
    keep = {} if bias else {"bias_attr": False}
    return (
        t.Sequential(
            t.Conv2d(1, 16, 3, padding=1, bias=bias), t.BatchNorm2d(16), t.ReLU(inplace=True), t.MaxPool2d(2),
            t.Conv2d(16, 32, 3, padding=1, bias=bias), t.BatchNorm2d(32), t.ReLU(inplace=True), t.AdaptiveAvgPool2d(1),
            t.Flatten(), t.Linear(32, 10),
        ),
        p.Sequential(
            p.Conv2D(1, 16, 3, padding=1, **keep), p.BatchNorm2D(16), p.ReLU(), p.MaxPool2D(2),
            p.Conv2D(16, 32, 3, padding=1, **keep), p.BatchNorm2D(32), p.ReLU(), p.AdaptiveAvgPool2D(1),
            p.Flatten(), p.Linear(32, 10),
        ),
        (1, 16, 16),
    )  # fmt: skip


def bn1d():
    t, p = torch.nn, paddle.nn
    return (
        t.Sequential(
            t.Linear(64, 128), t.BatchNorm1d(128), t.ReLU(),
            t.Linear(128, 64), t.BatchNorm1d(64), t.ReLU(), t.Linear(64, 10),
        ),
        p.Sequential(
            p.Linear(64, 128), p.BatchNorm1D(128), p.ReLU(),
            p.Linear(128, 64), p.BatchNorm1D(64), p.ReLU(), p.Linear(64, 10),
        ),
        (64,),
    )  # fmt: skip


def transformer():
    class T(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inp = torch.nn.Linear(16, 64)
            self.blocks = torch.nn.ModuleList(TorchBlock(64) for _ in range(4))
            self.norm, self.head = torch.nn.LayerNorm(64), torch.nn.Linear(64, 10)

        def forward(self, x):
            x = self.inp(x)
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x).mean(1))

    class P(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.embed = paddle.nn.Linear(16, 64)
            self.layers = paddle.nn.LayerList(PaddleBlock(64) for _ in range(4))
            self.final, self.fc = paddle.nn.LayerNorm(64), paddle.nn.Linear(64, 10)

        def forward(self, x):
            x = self.embed(x)
            for block in self.layers:
                x = block(x)
            return self.fc(self.final(x).mean(1))

    return T(), P(), (12, 16)


def resnet():
    return ResNet18(), paddle.vision.models.resnet18(), (3, 32, 32)


def _slow_sgd(t, p):
    return torch.optim.SGD(t, 0.01, momentum=0.9), paddle.optimizer.Momentum(0.01, 0.9, parameters=p)


def _sgd(t, p):
    return torch.optim.SGD(t, 0.1, momentum=0.9), paddle.optimizer.Momentum(0.1, 0.9, parameters=p)


def _adam(t, p):
    return torch.optim.Adam(t, 1e-3), paddle.optimizer.Adam(1e-3, parameters=p)


def _adamw(t, p):
    return (
        torch.optim.AdamW(t, 1e-3, weight_decay=0.01),
        paddle.optimizer.AdamW(1e-3, parameters=p, weight_decay=0.01),
    )


PAIRS = {
    "mlp-sgd": (mlp, _sgd),
    "mlp-adam": (mlp, _adam),
    "cnn-sgd": (lambda: cnn(False), _sgd),
    "cnn-adam": (lambda: cnn(False), _adam),
    "cnn-bias-sgd": (lambda: cnn(True), _sgd),
    "cnn-bias-adam": (lambda: cnn(True), _adam),
    "bn1d-adam": (bn1d, _adam),
    "transformer-sgd": (transformer, _sgd),
    "transformer-adamw": (transformer, _adamw),
    "resnet18-sgd": (resnet, _slow_sgd),
    "resnet18-adamw": (resnet, _adamw),
}


def train_pair(name: str, steps: int, every: int, batch: int = 16, detail: str = "full") -> RunComparison:
    """Train both twins with recording in memory."""
    make, optimizers = PAIRS[name]
    torch.manual_seed(0)
    reference, candidate, shape = make()
    carry_over(reference, candidate)
    opt_t, opt_p = optimizers(reference.parameters(), candidate.parameters())
    data = np.random.default_rng(0)
    centres = data.normal(size=(10, *shape))
    labels = data.integers(0, 10, (steps, batch))
    inputs = (centres[labels] + data.normal(size=(steps, batch, *shape)) * 2).astype(np.float32)
    with padiff.record(reference, every_n_steps=every, optimizer=opt_t, detail=detail) as rec_t:
        for x, y in zip(inputs, labels):
            loss = torch.nn.functional.cross_entropy(reference(torch.from_numpy(x)), torch.from_numpy(y))
            loss.backward()
            rec_t.log_loss(loss)
            opt_t.step()
            opt_t.zero_grad()
            rec_t.try_dump()
    with padiff.record(candidate, every_n_steps=every, optimizer=opt_p, detail=detail) as rec_p:
        for x, y in zip(inputs, labels):
            loss = paddle.nn.functional.cross_entropy(candidate(paddle.to_tensor(x)), paddle.to_tensor(y))
            loss.backward()
            rec_p.log_loss(loss)
            opt_p.step()
            opt_p.clear_grad()
            rec_p.try_dump()
    return RunComparison(rec_t.run, rec_p.run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="*", default=list(PAIRS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--detail", choices=["full", "sketch"], default="full")
    args = parser.parse_args()
    print(f"{'pair':18} {'stage':9} {'first step':>10} {'worst':>10} {'of limit':>9}  where")
    for name in args.pairs:
        comparison = train_pair(name, args.steps, args.every, args.batch, args.detail)
        worst = defaultdict(lambda: (0.0, 0.0, ""))
        first = defaultdict(float)
        for number in comparison.common():
            for diff in comparison.diffs(number):
                if diff.figures is None or not diff.judged[0]:
                    continue
                site = f"{diff.pair.anchor.site} step {number}"
                if number == 0:
                    first[diff.pair.stage] = max(first[diff.pair.stage], diff.judged[1])
                if diff.excess >= worst[diff.pair.stage][0]:
                    worst[diff.pair.stage] = (diff.excess, diff.judged[1], site)
        for stage, (excess, figure, site) in worst.items():
            print(f"{name:18} {stage:9} {first[stage]:10.2g} {figure:10.2g} {excess:9.3f}  {site}")


if __name__ == "__main__":
    main()
