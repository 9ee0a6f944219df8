"""PaDiff's own flow: proxies that dump every 10 steps, checked afterwards; then the same proxies in a recorder.

    python main.py [FOLDER]

The port's attention has three matrices for the reference's one, and an auxiliary head is not ported: a layer map and a
black list say so. The fault: the port's optimizer has no weight decay.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import paddle
import torch

import padiff

WIDTH, STEPS = 16, 20
CFG = {"atol": 1e-5, "rtol": 1e-5, "compare_mode": "strict"}


class TorchAttention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return torch.softmax(q @ k.transpose(-1, -2) / WIDTH**0.5, dim=-1) @ v


class TorchNet(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = TorchAttention(), torch.nn.LayerNorm(WIDTH)
        self.head, self.auxiliary = torch.nn.Linear(WIDTH, 4), torch.nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + self.attention(x))
        self.auxiliary(x.detach())
        return self.head(x)


class PaddleAttention(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (paddle.nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        scores = self.q(x) @ self.k(x).transpose([0, 2, 1]) / WIDTH**0.5
        return paddle.nn.functional.softmax(scores, axis=-1) @ self.v(x)


class PaddleNet(paddle.nn.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = PaddleAttention(), paddle.nn.LayerNorm(WIDTH)
        self.head = paddle.nn.Linear(WIDTH, 4)

    def forward(self, x: paddle.Tensor) -> paddle.Tensor:
        return self.head(self.norm(x + self.attention(x)))


def proxies() -> tuple[Any, Any]:
    """Make both models, equal, with what is to be compared of them."""
    torch.manual_seed(0)
    base, raw = padiff.create_model(TorchNet(), name="torch"), padiff.create_model(PaddleNet(), name="paddle")
    base.update_black_list([base.model.auxiliary], "all")
    # In this order they answer to each other; what is inside of them is left out.
    base.set_layer_map([base.model.attention, base.model.norm, base.model.head])
    raw.set_layer_map([raw.model.attention, raw.model.norm, raw.model.head])
    # One matrix here, three there: these are carried over by hand.
    qkv = base.model.attention.qkv
    parts = zip((raw.model.attention.q, raw.model.attention.k, raw.model.attention.v), qkv.weight.chunk(3))
    for (linear, weight), bias in zip(parts, qkv.bias.chunk(3)):
        linear.weight.set_value(weight.detach().numpy().T)
        linear.bias.set_value(bias.detach().numpy())
    for name in ("norm", "head"):
        one, other = getattr(base.model, name), getattr(raw.model, name)
        other.weight.set_value(one.weight.detach().numpy().T)
        other.bias.set_value(one.bias.detach().numpy())
    return base, raw


def optimizers(base: Any, raw: Any) -> tuple[Any, Any]:
    return (
        torch.optim.SGD(base.model.parameters(), lr=0.1, weight_decay=0.1),
        paddle.optimizer.SGD(0.1, parameters=raw.model.parameters()),
    )


def data() -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng(0)
    return chance.normal(size=(STEPS, 8, 6, WIDTH)).astype(np.float32), chance.integers(0, 4, (STEPS, 48))


def loss_of(proxy: Any, x: np.ndarray, y: np.ndarray) -> Any:
    if proxy.framework == "torch":
        return torch.nn.functional.cross_entropy(proxy(torch.from_numpy(x)).reshape(-1, 4), torch.from_numpy(y))
    return paddle.nn.functional.cross_entropy(proxy(paddle.to_tensor(x)).reshape([-1, 4]), paddle.to_tensor(y))


def dumped(folder: Path) -> None:
    """Dump every 10 steps with the proxies themselves, and check what they dumped."""
    padiff.set_dump_root_path(folder / "dumps")
    base, raw = proxies()
    for proxy, optimizer in zip((base, raw), optimizers(base, raw)):
        for x, y in zip(*data()):
            proxy.backward(loss_of(proxy, x, y))
            optimizer.step()
            proxy.try_dump(per_step=10)  # steps 9 and 19
            optimizer.zero_grad() if proxy is base else optimizer.clear_grad()
    for check in (padiff.check_report, padiff.check_params):
        report = check(base.dump_path, raw.dump_path, CFG)
        print(f"{check.__name__}: {bool(report)}, first at step {report.first_diff.step}")
    raw.update_white_list([raw.model.head], "self")  # void makes the black list: the white list is all there is
    print(f"recorded with the white list: {', '.join(sorted(raw.padiff_chosen))}")


def recorded(folder: Path) -> padiff.Report:
    """Do the same inside of a recorder: it sees the optimizer too, and so the cause."""
    base, raw = proxies()
    runs = []
    for proxy, optimizer in zip((base, raw), optimizers(base, raw)):
        runs.append(folder / "runs" / proxy.name)
        with padiff.record(proxy, optimizer=optimizer, existing="overwrite") as rec:
            for x, y in zip(*data()):
                loss_of(proxy, x, y).backward()
                optimizer.step()
                optimizer.zero_grad() if proxy is base else optimizer.clear_grad()
                rec.try_dump(per_step=10, dir_path=runs[-1])  # steps 0 and 10
    for check in (padiff.check_report, padiff.check_params):
        print(f"{check.__name__}: {bool(check(*runs, CFG))}")
    report = padiff.compare_runs(*runs)
    print(report.first_diff.message if report.first_diff else "The runs match.")
    return report


if __name__ == "__main__":
    place = Path(sys.argv[1] if len(sys.argv) > 1 else "runs")
    dumped(place)
    recorded(place)
