"""Records, steps and runs of which sketches are kept, made from ones with full tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from core.making import memory_run, record

from padiff.recorder.memory import MemoryRun
from padiff.records import Pair, Record, Run, Sketched
from padiff.sketches.sketch import sketch_of


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
