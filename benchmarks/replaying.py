"""What it costs to replay a packed step: a multiple of the plain step, measured in one process.

A plain step is forward, loss, backward, clipping and AdamW. A replayed one is that, and all that the replay does for
it: weights, states and masks are set, the step is recorded and written. Both are done in turns, so that other work on
the machine meets both; the figure is the ratio of the medians. With ``--packing``, a step that is recorded with a pack,
too. The transformer has dropout in its layers and its attention.

    python benchmarks/replaying.py [--framework torch|paddle] [--steps 7] [--width 256] [--depth 4] [--tokens 128]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")

import padiff

CLASSES, BATCH, DROP = 10, 8, 0.1


def of_torch(width: int, depth: int, tokens: int) -> tuple[Any, Any, Callable[..., None], Callable[[], Any]]:
    import torch

    torch.manual_seed(0)
    block = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, DROP, batch_first=True)
    net = torch.nn.Sequential(torch.nn.TransformerEncoder(block, depth), torch.nn.Linear(width, CLASSES))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)

    def step(x: Any, y: Any) -> None:
        torch.nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return net, optimizer, step, lambda: (torch.randn(BATCH, tokens, width), torch.randint(0, CLASSES, (BATCH, tokens)))


def of_paddle(width: int, depth: int, tokens: int) -> tuple[Any, Any, Callable[..., None], Callable[[], Any]]:
    import paddle

    paddle.seed(0)
    block = paddle.nn.TransformerEncoderLayer(width, 4, 4 * width, DROP)
    net = paddle.nn.Sequential(paddle.nn.TransformerEncoder(block, depth), paddle.nn.Linear(width, CLASSES))
    clip = paddle.nn.ClipGradByGlobalNorm(1.0)
    optimizer = paddle.optimizer.AdamW(1e-3, parameters=net.parameters(), grad_clip=clip)

    def step(x: Any, y: Any) -> None:
        paddle.nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
        optimizer.clear_grad()

    return (
        net,
        optimizer,
        step,
        lambda: (
            paddle.randn([BATCH, tokens, width]),
            paddle.randint(0, CLASSES, [BATCH, tokens]),
        ),
    )


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", choices=("torch", "paddle"), default="torch")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    make = {"torch": of_torch, "paddle": of_paddle}[options.framework]
    net, optimizer, step, batch = make(options.width, options.depth, options.tokens)
    _, _, plainly, _ = make(options.width, options.depth, options.tokens)
    plain, packed, replayed = [], [], []
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        place = Path(folder)
        step(*batch())
        plainly(*batch())
        with padiff.record(net, place / "there", optimizer=optimizer, replay_every_n_steps=1) as rec:

            def recorded() -> None:
                step(*batch())
                rec.try_dump()

            for _ in range(options.steps):
                packed.append(seconds(recorded))
        size = sum(path.stat().st_size for path in (place / "there" / "packs").rglob("*") if path.is_file())
        with padiff.replay(place / "there", net, place / "here", optimizer=optimizer) as replay:
            steps = iter(replay)
            given = next(steps)
            for _ in range(options.steps - 1):

                def again() -> None:
                    nonlocal given
                    step(*given.inputs, *given.labels)
                    given = next(steps)

                replayed.append(seconds(again))
                plain.append(seconds(lambda: plainly(*batch())))
            step(*given.inputs, *given.labels)
            assert next(steps, None) is None
    base = statistics.median(plain)
    print(
        f"{options.framework}: {sum(p.numel() if callable(p.numel) else p.size for p in net.parameters()):,} parameters"
    )
    print(f"plain step    {base:.3f} s")
    for name, found in (("packed step", packed), ("replayed step", replayed)):
        print(f"{name:13} {statistics.median(found):.3f} s, {statistics.median(found) / base:.2f} times the plain one")
    print(f"a pack has {size / options.steps / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
