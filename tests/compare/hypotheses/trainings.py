"""Small trainings in both frameworks, from equal weights, each with a fault planted in the candidate's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import paddle
import torch
from kit.records import memory_run

import padiff
from padiff.records import FirstDiff, InMemory, Run

BATCH, INPUTS, WIDTH, CLASSES = 16, 12, 24, 6


def _layers(nn: Any) -> list[Any]:
    inside = nn.Linear(INPUTS, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()
    return [*inside, nn.Linear(WIDTH, CLASSES)]


def torch_net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*_layers(torch.nn))


def paddle_net(seed: int = 0) -> Any:
    net = paddle.nn.Sequential(*_layers(paddle.nn))
    padiff.assign_weight(torch_net(seed), net)
    return net


def batches(steps: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed + 50)
    # Gradients of a usual size: a loss of order one.
    return [(rng.normal(size=(BATCH, INPUTS)).astype("float32"), rng.integers(0, CLASSES, BATCH)) for _ in range(steps)]


Hook = Callable[..., Any]


def torch_run(
    make: Callable[[Any], Any],
    steps: int = 4,
    schedule: Callable[[int], float] | None = None,
    before_step: Hook | None = None,
    after_step: Hook | None = None,
    loss_factor: Callable[[int], float] = lambda step: 1.0,
    zero: Callable[[int], bool] = lambda step: True,
    numbers: Iterable[int] | None = None,
    net: Callable[[int], Any] = torch_net,
    seed: int = 0,
    **options: Any,
) -> Run:
    """Train in torch; ``make`` makes the optimizer of the model, hooks get the model, optimizer and step."""
    model = net(seed)
    optimizer = make(model)
    bases = [group["lr"] for group in optimizer.param_groups]
    chosen = set(range(steps) if numbers is None else numbers)
    options.setdefault("name", "torch")
    with padiff.record(model, optimizer=optimizer, **options) as rec:
        for step, (x, y) in enumerate(batches(steps, seed)):
            for base, group in zip(bases, optimizer.param_groups):
                group["lr"] = base * (schedule(step) if schedule else 1.0)
            loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))
            (loss * loss_factor(step)).backward()
            rec.log_loss(loss)
            if before_step:
                before_step(model, optimizer, step)
            optimizer.step()
            if zero(step):
                optimizer.zero_grad()
            if after_step:
                after_step(model, optimizer, step)
            rec.try_dump()
    return _only(rec.run, chosen)


def paddle_run(
    make: Callable[[Any], Any],
    steps: int = 4,
    schedule: Callable[[int], float] | None = None,
    before_step: Hook | None = None,
    after_step: Hook | None = None,
    loss_factor: Callable[[int], float] = lambda step: 1.0,
    zero: Callable[[int], bool] = lambda step: True,
    numbers: Iterable[int] | None = None,
    net: Callable[[int], Any] = paddle_net,
    seed: int = 0,
    **options: Any,
) -> Run:
    """The same in paddle."""
    model = net(seed)
    optimizer = make(model)
    base = optimizer.get_lr()
    chosen = set(range(steps) if numbers is None else numbers)
    options.setdefault("name", "paddle")
    with padiff.record(model, optimizer=optimizer, **options) as rec:
        for step, (x, y) in enumerate(batches(steps, seed)):
            if schedule:
                optimizer.set_lr(base * schedule(step))
            loss = paddle.nn.functional.cross_entropy(model(paddle.to_tensor(x)), paddle.to_tensor(y))
            (loss * loss_factor(step)).backward()
            rec.log_loss(loss)
            if before_step:
                before_step(model, optimizer, step)
            optimizer.step()
            if zero(step):
                optimizer.clear_grad()
            if after_step:
                after_step(model, optimizer, step)
            rec.try_dump()
    return _only(rec.run, chosen)


def _only(run: Run, numbers: set[int]) -> Run:
    if set(run.numbers()) == numbers:
        return run
    return memory_run(run.info, *(run.steps(n)[0] for n in run.numbers() if n in numbers))


def undeclared(run: Run) -> Run:
    """The run as if its optimizer, loss and layers had not said what they are set to: the tensors have to tell."""
    silent = [replace(run.steps(number)[0], settings={}) for number in run.numbers()]
    return memory_run(replace(run.info, settings={}), *silent)


def first_of(reference: Run, candidate: Run, **options: Any) -> FirstDiff:
    first = padiff.compare_runs(undeclared(reference), undeclared(candidate), **options).first_diff
    assert first is not None
    return first


def changed(run: Run, change: Callable[[Any, np.ndarray], np.ndarray | None]) -> Run:
    """The run with other values where ``change(record, values)`` gives any."""

    def of(record: Any) -> Any:
        values = change(record, record.value)
        if values is None:
            return record
        values = np.asarray(values, record.value.dtype)
        return replace(record, source=InMemory(values), shape=values.shape)

    steps = [run.steps(number)[0] for number in run.numbers()]
    return memory_run(run.info, *(replace(step, records=tuple(map(of, step.records))) for step in steps))
