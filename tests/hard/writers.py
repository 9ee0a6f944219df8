"""Processes that record until they are killed; what they write is a known function of the step's number.

    python -m tests.hard.writers KIND FOLDER [--existing resume] [--last N] [--options JSON]

prints ``recording`` once the folder is open, and ``done`` after the last step. It ends with the process that
started it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from padiff.dump import RunWriter, open_run
from padiff.dump.storage import Storage
from padiff.records import ROOT, InMemory, Layer, Record, RunInfo, Step

from .children import end_with_parent

LAYERS = tuple(f"layer{number}" for number in range(6))
WIDTH = 300


def ready() -> None:
    print("recording", flush=True)


def first_missing(folder: Path) -> int:
    """The step to go on with, as a training goes on from its last checkpoint: a few steps back."""
    numbers = open_run(folder).numbers() if (folder / "run.json").exists() else []
    return max(0, numbers[-1] - 1) if numbers else 0


def values(step: int, layer: int) -> np.ndarray:
    """What the numpy writer records of a layer."""
    return np.arange(WIDTH, dtype=np.float64) + 1000 * layer + 1_000_000 * step


def by_numpy(folder: Path, existing: str, last: int, options: dict[str, Any]) -> None:
    layers = (Layer(ROOT, "Net", "net", children=len(LAYERS)), *(Layer(path, "Fc", "fc") for path in LAYERS))
    writer = RunWriter(folder, RunInfo("torch", "2", layers), existing=existing, storage=Storage(**options))
    ready()
    for number in range(0 if existing == "overwrite" else first_missing(folder), last):
        records = [
            Record(path, "forward", "output.0", InMemory(values(number, k)), "float64", (WIDTH,), order=k)
            for k, path in enumerate(LAYERS)
        ]
        writer.add_step(Step(number, tuple(records)))
    writer.close()


def check_numpy(step: Step) -> None:
    assert len(step.records) == len(LAYERS)
    for k, record in enumerate(step.records):
        np.testing.assert_array_equal(record.value, values(step.number, k))


# A linear layer with all weights 1/2 and a learning rate of 0, fed with the step's number: output = 2 * step, loss
# = their sum (8 * 100 outputs), gradient of the outputs 1, of the weight 8 * step.
_FACTORS = {"input": 1, "forward": 2, "loss": 1600, "weight": None, "grad": 8, "backward": None, "update": 0}


def check_trained(step: Step) -> None:
    assert {record.stage for record in step.records} >= set(_FACTORS) - {"loss"}
    for record in step.records:
        factor = _FACTORS[record.stage]
        expected = {"weight": 0.5, "backward": 1.0}[record.stage] if factor is None else factor * step.number
        np.testing.assert_array_equal(record.value, np.full(record.shape, expected, record.value.dtype))


def by_framework(framework: str, folder: Path, existing: str, last: int, options: dict[str, Any]) -> None:
    from kit.frameworks import KITS

    import padiff

    kit = KITS[framework]
    model = kit.Sequential(kit.linear(4, 100, bias=False))
    kit.set_weight(model[0], np.full((100, 4), 0.5, np.float32))
    optimizer = kit.sgd(model.parameters(), 0.0)
    start = 0 if existing == "overwrite" else first_missing(folder)
    with padiff.record(model, folder, optimizer=optimizer, existing=existing, start_step=start, **options) as rec:
        ready()
        for number in range(start, last):
            loss = model(kit.tensor(np.full((8, 4), number))).sum()
            rec.log_loss(loss)
            loss.backward()
            optimizer.step()
            kit.zero(optimizer)
            rec.try_dump()


def by_lightning(folder: Path, existing: str, last: int, options: dict[str, Any]) -> None:
    import warnings

    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    import torch

    from padiff_lightning import PaDiffCallback

    torch.set_num_threads(1)
    start = 0 if existing == "overwrite" else first_missing(folder)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(4, 100, bias=False)
            torch.nn.init.constant_(self.fc.weight, 0.5)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.fc(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.0)

        def on_train_start(self) -> None:
            ready()

    batches = [torch.full((8, 4), float(number)) for number in range(start, last)]
    pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[PaDiffCallback(folder, existing=existing, start_step=start, **options)],
    ).fit(Module(), torch.utils.data.DataLoader(batches, batch_size=None))


def by_hapi(folder: Path, existing: str, last: int, options: dict[str, Any]) -> None:
    import paddle

    from padiff_hapi import PaDiffCallback

    start = 0 if existing == "overwrite" else first_missing(folder)
    half = paddle.ParamAttr(initializer=paddle.nn.initializer.Constant(0.5))
    model = paddle.Model(paddle.nn.Sequential(paddle.nn.Linear(4, 100, weight_attr=half, bias_attr=False)))
    optimizer = paddle.optimizer.SGD(0.0, parameters=model.parameters())
    model.prepare(optimizer, lambda output, label: output.sum())

    class Numbers(paddle.io.Dataset):
        def __getitem__(self, index: int) -> Any:
            return np.full((4,), start + index // 8, np.float32), np.zeros(1, np.float32)

        def __len__(self) -> int:
            return 8 * (last - start)

    class Ready(paddle.callbacks.Callback):
        def on_train_batch_begin(self, step: int, logs: Any = None) -> None:
            if step == 0:
                ready()

    callback = PaDiffCallback(folder, existing=existing, start_step=start, **options)
    model.fit(Numbers(), batch_size=8, shuffle=False, verbose=0, callbacks=[callback, Ready()])


WRITERS: dict[str, tuple[Callable[[Path, str, int, dict[str, Any]], None], Callable[[Step], None]]] = {
    "numpy": (by_numpy, check_numpy),
    "torch": (partial(by_framework, "torch"), check_trained),
    "paddle": (partial(by_framework, "paddle"), check_trained),
    "lightning": (by_lightning, check_trained),
    "hapi": (by_hapi, check_trained),
}


def check_folder(folder: Path, kind: str) -> list[int]:
    """Read every step that is there, whole, and look at every value; returns the steps' numbers."""
    run = open_run(folder)
    for number in run.numbers():
        for step in run.steps(number):
            assert step.number == number
            WRITERS[kind][1](step)
    return run.numbers()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=WRITERS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--existing", default="error")
    parser.add_argument("--last", type=int, default=20_000)
    parser.add_argument("--options", type=json.loads, default={})
    args = parser.parse_args(arguments)
    end_with_parent()
    WRITERS[args.kind][0](args.folder, args.existing, args.last, args.options)
    print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
