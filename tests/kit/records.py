"""Runs made by hand, from numpy alone: records, layers, steps, a small training, and sketches in a tensor's place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from padiff.dump import RunWriter
from padiff.recorder.output import MemoryRun
from padiff.records import LOOP, ROOT, InMemory, Layer, Pair, Parameter, Record, Run, RunInfo, Sketched, Step
from padiff.sketches.sketch import sketch_of

Plant = Callable[[Record, int], "np.ndarray | None"]


def record(layer: str, stage: str, slot: str, values: Any, **rest: Any) -> Record:
    """A record in memory; lists become float32, arrays keep their dtype."""
    array = values if isinstance(values, np.ndarray) else np.asarray(values, np.float32)
    rest.setdefault("dtype", array.dtype.name)
    return Record(layer, stage, slot, InMemory(array), shape=array.shape, **rest)


def pair(reference: Any, candidate: Any, stage: str = "forward", slot: str = "output.0", **rest: Any) -> Pair:
    """A pair of two tensors of the layer ``fc``; None for a missing side."""
    sides = [None if values is None else record("fc", stage, slot, values) for values in (reference, candidate)]
    return Pair(rest.pop("step", 0), sides[0], sides[1], **rest)


def in_order(records: Iterable[Record]) -> tuple[Record, ...]:
    return tuple(replace(r, order=k) for k, r in enumerate(records))


def step(number: int, records: Iterable[Record], **rest: Any) -> Step:
    return Step(number, in_order(records), **rest)


def parameter(slot: str, *shape: int, **rest: Any) -> Parameter:
    return Parameter(slot, shape, rest.pop("dtype", "float32"), **rest)


def linear(path: str, inputs: int, outputs: int, paddle: bool = False, **rest: Any) -> Layer:
    shape, layout = ((inputs, outputs), "in_out") if paddle else ((outputs, inputs), "out_in")
    parameters = (parameter("weight", *shape, layout=layout), parameter("bias", outputs))
    return Layer(path, "Linear", "linear", parameters, **rest)


def norm(path: str, channels: int, paddle: bool = False, **settings: Any) -> Layer:
    names = ("_mean", "_variance") if paddle else ("running_mean", "running_var")
    owned = [parameter("weight", channels), parameter("bias", channels)]
    owned += [parameter(name, channels, role="buffer") for name in names]
    if not paddle:
        owned.append(Parameter("num_batches_tracked", (), "int64", role="buffer"))
    kind = "batchnorm2d"
    return Layer(path, "BatchNorm2D" if paddle else "BatchNorm2d", kind, tuple(owned), settings)


def plain(path: str, kind: str, children: int = 0, **rest: Any) -> Layer:
    """A layer without parameters."""
    return Layer(path, kind.capitalize(), kind, children=children, **rest)


def root(children: int, kind: str = "net") -> Layer:
    return plain(ROOT, kind, children)


def info(*layers: Layer, **rest: Any) -> RunInfo:
    rest.setdefault("framework", "torch")
    rest.setdefault("framework_version", "2.0")
    return RunInfo(layers=layers, **rest)


def memory_run(run_info: RunInfo, *steps: Step) -> MemoryRun:
    run = MemoryRun(run_info)
    for one in steps:
        run.add_step(one)
    run.close()
    return run


def write_run(path: Path, run_info: RunInfo, steps: Sequence[Step], finished: bool = True, **rest: Any) -> Path:
    writer = RunWriter(path, run_info, **rest)
    for one in steps:
        writer.add_step(one)
    writer.close(finished=finished)
    return path


TORCH_LAYERS = (root(3), linear("fc1", 4, 8), plain("act", "relu"), linear("fc2", 8, 2))
PADDLE_LAYERS = (
    root(2),
    plain("body", "sequential", 2),
    linear("body.0", 4, 8, paddle=True),
    plain("body.1", "relu"),
    linear("head", 8, 2, paddle=True),
)


def toy_info(paddle: bool = False, **rest: Any) -> RunInfo:
    """The tree of `toy_steps`: two linear layers and a ReLU, named and nested differently in the two frameworks."""
    rest.setdefault("name", "paddle" if paddle else "torch")
    layers = PADDLE_LAYERS if paddle else TORCH_LAYERS
    return info(*layers, framework="paddle" if paddle else "torch", **rest)


def toy_steps(
    numbers: Iterable[int], paddle: bool = False, rate: float = 0.1, plant: Plant | None = None
) -> list[Step]:
    """Steps of a training run of plain SGD, computed in float64 and recorded in float32.

    Args:
        paddle: names, nesting and layout of `toy_info`'s other tree, and rounding noise on every float.
        rate: the learning rate.
        plant: given a record and its step, other values for it, or None.
    """
    weights_rng = np.random.default_rng(0)
    w1, b1 = weights_rng.normal(size=(8, 4)) / 2, np.zeros(8)
    w2, b2 = weights_rng.normal(size=(2, 8)) / 3, np.zeros(2)
    names = ("body.0", "body.1", "head") if paddle else ("fc1", "act", "fc2")
    numbers = list(numbers)
    steps = []
    for number in range(max(numbers) + 1):
        rng = np.random.default_rng(100 + number)
        x, y = rng.normal(size=(16, 4)), rng.normal(size=(16, 2))
        h = x @ w1.T + b1
        a = np.maximum(h, 0)
        out = a @ w2.T + b2
        d_out = 2 * (out - y) / out.size
        d_a = d_out @ w2
        d_h = d_a * (h > 0)
        grads = {
            (0, "weight"): d_h.T @ x,
            (0, "bias"): d_h.sum(0),
            (2, "weight"): d_out.T @ a,
            (2, "bias"): d_out.sum(0),
        }
        owned = {(0, "weight"): w1, (0, "bias"): b1, (2, "weight"): w2, (2, "bias"): b2}
        found = [record(ROOT, "input", "input.x", x)]
        found += [record(names[k], "weight", slot, v) for (k, slot), v in owned.items()]
        found += [record(names[k], "forward", "output.0", v) for k, v in enumerate((h, a, out))]
        found += [record(ROOT, "forward", "output.0", out)]
        found += [record(LOOP, "loss", "loss", np.asarray(np.mean((out - y) ** 2)))]
        found += [record(names[k], "backward", "output.0", v) for k, v in ((2, d_out), (1, d_a), (0, d_h))]
        found += [record(names[k], "grad", slot, v) for (k, slot), v in grads.items()]
        found += [record(names[k], "update", slot, -rate * v) for (k, slot), v in grads.items()]
        found += [record(LOOP, "update", "learning_rate", np.asarray(rate))]
        w1, b1 = w1 - rate * grads[0, "weight"], b1 - rate * grads[0, "bias"]
        w2, b2 = w2 - rate * grads[2, "weight"], b2 - rate * grads[2, "bias"]
        if number in numbers:
            steps.append(step(number, [_recorded(r, number, paddle, plant) for r in found]))
    return steps


def _recorded(seen: Record, number: int, paddle: bool, plant: Plant | None) -> Record:
    values = seen.value
    if paddle:
        values = values * (1 + 1e-7 * np.random.default_rng(number).choice([-1, 1], size=values.shape))
        if seen.slot == "weight":
            values = values.T
    values = np.asarray(values, np.float32)
    planted = plant(replace(seen, source=InMemory(values)), number) if plant else None
    values = values if planted is None else np.asarray(planted)
    return replace(seen, source=InMemory(values), dtype=values.dtype.name, shape=values.shape)


def planted(site: str, change: Callable[[np.ndarray], np.ndarray], at: int = 0) -> Plant:
    """A plant that changes the values of one site at one step."""

    def plant(seen: Record, number: int) -> np.ndarray | None:
        return change(seen.value).astype(np.float32) if number == at and seen.site == site else None

    return plant


def toy_run(numbers: Iterable[int] = (0, 1, 2), paddle: bool = False, **rest: Any) -> MemoryRun:
    return memory_run(toy_info(paddle), *toy_steps(numbers, paddle, **rest))


def toy_folder(
    path: Path, numbers: Iterable[int] = (0, 1, 2), paddle: bool = False, existing: str = "error", **rest: Any
) -> Path:
    return write_run(path, toy_info(paddle), toy_steps(numbers, paddle, **rest), existing=existing)


# -- sketches in the place of tensors ----------------------------------------------------------------------------------


def as_sketch(full: Record, turned: bool = False) -> Record:
    """The record with a sketch in the place of its tensor."""
    sketch = sketch_of(full.value, turned)
    return replace(full, source=Sketched(sketch.row(), sketch.size, turned))


def sketched_run(run: Run, which: Callable[[Record], bool] = lambda _: True) -> MemoryRun:
    """A run of which sketches are kept; matrices of a linear layer that lie (in, out) are looked at transposed."""
    turned = {(layer.path, p.slot) for layer in run.info.layers for p in layer.parameters if p.layout == "in_out"}
    steps = []
    for number in run.numbers():
        (one,) = run.steps(number)
        records = tuple(
            as_sketch(r, (r.layer, r.slot) in turned) if which(r) and r.layer != "(loop)" else r for r in one.records
        )
        steps.append(replace(one, records=records))
    return memory_run(run.info, *steps)


WAYS = ("both sketched", "reference full", "candidate full")


def kept(
    reference: Any, candidate: Any, way: str = "both sketched", stage: str = "forward", turned: str = "", **rest: Any
) -> Pair:
    """A pair of tensors of which sketches are kept; ``turned`` names the sides that were looked at transposed."""
    sides = []
    for name, values in (("reference", reference), ("candidate", candidate)):
        one = record("fc", stage, "output.0", values if isinstance(values, np.ndarray) else np.float32(values))
        sides.append(one if way == f"{name} full" else as_sketch(one, name in turned))
    return Pair(0, sides[0], sides[1], **rest)
