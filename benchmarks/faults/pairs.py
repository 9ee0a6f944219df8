"""Recording one pair as a user would: weights carried over, both trainings, the comparison."""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import paddle_loop
import torch
import torch_loop
from kit import STEPS, Batch, Clean, Fault, Program, Recipe, Side, Trace

import padiff

_LOOPS: Mapping[str, Any] = {"torch": torch_loop, "paddle": paddle_loop}

#: What `padiff.record` is given in each condition.
OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {"pack": True},  # a file for each tensor is only slower
    "sketch": {"detail": "sketch"},
    "bfloat16": {"pack": True},
    "every3": {"every_n_steps": 3, "pack": True},
}


@dataclass(frozen=True)
class Made:
    """A pair that was recorded and compared. `error` is what was raised instead of a report."""

    first: Any
    reference: Trace
    candidate: Trace
    milliseconds: float
    error: str = ""
    outcome: str = ""


def micro_batches(program: Program, recipe: Recipe, seed: int) -> list[list[Batch]]:
    """The micro-batches of each step; a feed sees them in one row."""
    rng = np.random.default_rng(seed + 100)
    row = list(program.data(rng, STEPS * recipe.accumulate))
    if recipe.feed is not None:
        row = list(recipe.feed(row))
    n = recipe.accumulate
    return [row[k * n : (k + 1) * n] for k in range(STEPS)]


def stacked(values: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """The reference's value for a name: ``a|b`` stacks two, ``qkv[1].weight`` is the second third of ``qkv.weight``."""
    if "|" in name:
        return np.concatenate([stacked(values, part) for part in name.split("|")])
    part = re.search(r"\[(\d)(?:/(\d))?\]", name)
    if part is None:
        return values[name]
    return np.split(values[name.replace(part[0], "")], int(part[2] or 3))[int(part[1])]


class Pairs:
    """Makes pairs, in a folder of its own; a reference is recorded once for all candidates that go with it."""

    def __init__(self, folder: Path, condition: str) -> None:
        self.folder, self.condition = folder, condition
        self.precision = "bfloat16" if condition == "bfloat16" else "float32"
        self._made: dict[Any, tuple[Path, Trace, dict[str, np.ndarray]]] = {}
        self._count = 0

    def can(self, program: Program) -> bool:
        """Whether the condition exists for the program: paddle has no bfloat16 kernels on the CPU."""
        return self.precision == "float32" or program.reference.framework == program.candidate.framework == "torch"

    def _train(
        self, program: Program, side: Side, model: Any, recipe: Recipe, seed: int, fault: str
    ) -> tuple[Path, Trace]:
        self._count += 1
        folder = self.folder / f"{self._count}"
        torch.manual_seed(seed + 7)
        with contextlib.redirect_stderr(io.StringIO()):  # "recorded 8 steps"
            trace = _LOOPS[side.framework].train(
                program, side, model, recipe, micro_batches(program, recipe, seed), fault, folder,
                self.precision, **OPTIONS[self.condition],
            )  # fmt: skip
        return folder, trace

    def _reference(self, program: Program, recipe: Recipe, seed: int) -> tuple[Path, Trace, dict[str, np.ndarray]]:
        key = (program.name, recipe, seed)
        if key not in self._made:
            torch.manual_seed(seed)
            model = program.reference.build("", "")
            start = torch_loop.arrays(model)
            self._made[key] = (*self._train(program, program.reference, model, recipe, seed, ""), start)
        return self._made[key]

    def candidate(
        self, program: Program, recipe: Recipe, values: Mapping[str, np.ndarray], seed: int, fault: str, variant: str
    ) -> tuple[Path, Trace]:
        """Train the candidate from the reference's weights."""
        side = program.candidate
        torch.manual_seed(seed + 1)
        model = side.build(fault, variant)
        given = {own: stacked(values, side.names(own)) for own in names_of(side, model)}
        if recipe.restarted:
            rng = np.random.default_rng(3)
            for own, value in given.items():
                if re.search(recipe.restarted, own):
                    given[own] = value + 0.1 * rng.standard_normal(value.shape).astype("float32")
        _LOOPS[side.framework].load(model, given)
        return self._train(program, side, model, recipe, seed, fault)

    def fault(self, program: Program, fault: Fault) -> Made:
        """Record and compare a pair with a fault."""
        recipe = replace(program.recipe, **fault.start)
        return self._pair(program, recipe, replace(recipe, **fault.recipe), 0, fault.name, "")

    def clean(self, program: Program, clean: Clean) -> Made:
        """Record and compare a clean pair."""
        recipe = replace(program.recipe, **clean.start)
        return self._pair(program, recipe, replace(recipe, **clean.recipe), clean.seed, "", clean.variant)

    def without(self, program: Program, fault: Fault) -> Trace:
        """The candidate's training without the fault."""
        recipe = replace(program.recipe, **fault.start)
        key = (program.name, "candidate", recipe)
        if key not in self._made:
            values = self._reference(program, recipe, 0)[2]
            self._made[key] = (*self.candidate(program, recipe, values, 0, "", ""), values)
        return self._made[key][1]

    def _pair(self, program: Program, recipe: Recipe, other: Recipe, seed: int, fault: str, variant: str) -> Made:
        reference, trace, values = self._reference(program, recipe, seed)
        folder, own_trace = self.candidate(program, other, values, seed, fault, variant)
        began, error, report = time.perf_counter(), "", None
        try:
            report = padiff.compare_runs(str(reference), str(folder), workers=1)
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}"
        spent = 1000 * (time.perf_counter() - began)
        first = report.first_diff if report is not None else None
        made = Made(first, trace, own_trace, spent, error, report.outcome if report is not None else "")
        shutil.rmtree(folder, ignore_errors=True)
        return made

    def release(self) -> None:
        """Remove the references; the next program has its own."""
        for folder, *_ in self._made.values():
            shutil.rmtree(folder, ignore_errors=True)
        self._made.clear()


def names_of(side: Side, model: Any) -> list[str]:
    """The names of what is carried over."""
    if side.framework == "torch":
        return [name for name, _ in model.named_parameters()]
    return list(paddle_loop.trained(model))
