"""Trainings under conditions that real ones have: one loop for both frameworks, with and without recording.

A `Training` says how it is built and how one of its steps goes; the loop around it is the same for all.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from kit.frameworks import Kit
from kit.nets import mlp

import padiff
from padiff.records import is_of_loss

#: What `padiff.record` is called with besides; every condition holds for each of them.
OPTIONS: dict[str, dict[str, Any]] = {"full": {}, "sketch": {"detail": "sketch"}}

STEPS = 4


@dataclass
class Result:
    """What a training left."""

    losses: list[float]
    state: dict[str, np.ndarray]
    drawn: np.ndarray
    run: Any = None


class Training:
    """A training under one condition. ``fault`` plants the mistake that people make under it."""

    steps = STEPS

    def __init__(self, kit: Kit, fault: bool = False) -> None:
        self.kit, self.fault = kit, fault
        kit.seed(1)
        self.model = self.build()
        fill(kit, self.model)
        self.optimizers = self.optimize()

    def build(self) -> Any:
        return mlp(self.kit)

    def optimize(self) -> list[Any]:
        return [self.kit.sgd(trainable(self.model), 0.1)]

    def step(self, number: int, log: Any) -> float:
        """One optimizer step; ``log`` takes the loss of each micro-batch."""
        loss = self.loss(number)
        loss.backward()
        log(loss)
        self.update()
        return float(loss.detach())

    def batch(self, number: int, shape: tuple[int, ...] = (6, 4), classes: int = 3) -> tuple[Any, Any]:
        data = np.random.default_rng(number)
        x, y = data.normal(size=shape), data.integers(0, classes, shape[0])
        return self.kit.tensor(x), self.kit.tensor(y, "int64")

    def loss(self, number: int) -> Any:
        x, y = self.batch(number)
        return self.kit.cross_entropy(self.model(x), y)

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            self.kit.zero(optimizer)


def trainable(model: Any) -> list[Any]:
    return [p for p in model.parameters() if not getattr(p, "stop_gradient", not getattr(p, "requires_grad", True))]


def fill(kit: Kit, model: Any, seed: int = 11) -> None:
    """The same weights in both frameworks, drawn by numpy in the order of the layers."""
    data = np.random.default_rng(seed)
    for layer in kit.layers(model):
        for name in ("weight", "bias"):
            tensor = getattr(layer, name, None)
            if not hasattr(tensor, "shape") or not hasattr(tensor, "numpy"):
                continue
            linear = isinstance(layer, kit.Linear) and name == "weight"
            shape = tuple(tensor.shape)[::-1] if linear and kit.name == "paddle" else tuple(tensor.shape)
            value = data.normal(size=shape) * 0.5
            value = np.ascontiguousarray(value.T if linear and kit.name == "paddle" else value)
            kit.set(tensor, value)


def train(training: Training, folder: Any = None, options: dict[str, Any] | None = None, **more: Any) -> Result:
    """The loop: plain without a folder, recorded with one."""
    losses: list[float] = []
    with ExitStack() as stack:
        rec = None
        if folder is not None:
            given = {"optimizer": training.optimizers, **(options or {}), **more}
            rec = stack.enter_context(padiff.record(training.model, folder, **given))
        for number in range(training.steps):
            losses.append(training.step(number, rec.log_loss if rec is not None else lambda loss: None))
            if rec is not None:
                rec.try_dump()
    run = padiff.open_run(folder) if folder is not None else None
    return Result(losses, training.kit.state(training.model), training.kit.drawn(), run)


def assert_neutral(plain: Result, recorded: Result) -> None:
    """The same losses, parameters, buffers and random state, to the bit."""
    assert recorded.losses == plain.losses
    assert set(recorded.state) == set(plain.state)
    for name, value in plain.state.items():
        np.testing.assert_array_equal(recorded.state[name], value, err_msg=name)
    np.testing.assert_array_equal(recorded.drawn, plain.drawn)


def counts(run: Any, number: int) -> dict[str, int]:
    """How many records a step has of each stage; learning rates apart."""
    (step,) = run.steps(number)
    return counts_of(step)


def counts_of(step: Any) -> dict[str, int]:
    """How many records a step of one rank has of each stage, without those of loss functions; learning rates apart."""
    found: dict[str, int] = {}
    for record in step.records:
        if is_of_loss(record):
            continue
        stage = "rate" if record.slot.startswith("learning_rate") else record.stage
        found[stage] = found.get(stage, 0) + 1
    return found
