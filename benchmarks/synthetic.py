"""Runs of synthetic steps, written by numpy alone; and what something takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from padiff.dump import RunWriter
from padiff.dump.storage import Storage
from padiff.records import ROOT, InMemory, Layer, Parameter, Record, RunInfo, Step

# A layer has an output and a weight, and what belongs to them.
STAGES = (("forward", "output.0"), ("backward", "output.0"), ("weight", "w"), ("grad", "w"), ("update", "w"))


def run_of(folder: Path, layers: int, size: int, pack: bool) -> tuple[RunWriter, list[str]]:
    """A run of so many layers, each with a parameter of so many elements: what writes it, and the layers' paths."""
    paths = [f"layer{k}" for k in range(layers)]
    owned = (Parameter("w", (size,), "float32"),)
    tree = (Layer(ROOT, "Net", "net", children=layers), *(Layer(p, "Scale", "scale", owned) for p in paths))
    return RunWriter(folder, RunInfo("torch", "2.0", tree, name=folder.name), storage=Storage(pack=pack)), paths


def write(folder: Path, steps: int, layers: int, size: int, noise: float, pack: bool = False) -> Path:
    """Write a run of full tensors, the same for a noise of 0."""
    writer, paths = run_of(folder, layers, size, pack)
    for number in range(steps):
        writer.add_step(made(number, paths, size, noise))
    writer.close()
    return folder


def made(number: int, paths: list[str], size: int, noise: float) -> Step:
    """A step of it."""
    rng = np.random.default_rng(number)
    records = []
    for stage, slot in STAGES:
        for path in paths:
            values = rng.standard_normal(size, np.float32)
            values *= 1 + np.float32(noise) * rng.integers(-2, 3, size, np.int8)
            source = InMemory(values)
            records.append(
                Record(path, stage, slot, source, "float32", (size,), order=len(records), layer_type="Scale")
            )
    return Step(number, tuple(records))


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the clock and of the processor."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - wall, time.process_time() - cpu
