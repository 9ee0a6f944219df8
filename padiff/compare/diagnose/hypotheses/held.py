"""Why a parameter has no gradient or update on one side: frozen, not reached by the backward, not held, not stepped."""

from __future__ import annotations

import math
from collections.abc import Iterator

from padiff.compare.diagnose.hypotheses import mending
from padiff.compare.diagnose.hypotheses.scene import Scene
from padiff.compare.judge.absent import optimizer_steps, whole_stage_missing
from padiff.model import equivalents
from padiff.records import LOOP, SIDES, Cause, Pair, Parameter, Record, RunInfo, Step

# Layers whose parameters get a gradient wherever their output does.
_SIMPLE = frozenset({"linear", "conv", "norm", "embedding"})


def causes(scene: Scene) -> Iterator[Cause]:
    """Of a first diff that is a missing gradient or update: what the records say of it."""
    pair = scene.diff.pair
    if pair.complete or pair.stage not in ("grad", "update") or pair.anchor.layer == LOOP:
        return
    side, other = SIDES.swapped() if pair.candidate is None else SIDES
    sides = scene.sides(scene.number)
    if sides is None:
        return
    own, others = getattr(sides, side), getattr(sides, other)
    if whole_stage_missing(scene.diff, scene.step):
        yield _skipped(scene, side, own)
        return
    steps = optimizer_steps(scene.step)
    if pair.anchor.call and getattr(steps, side) < getattr(steps, other):
        yield _repeated(scene, side, other)
        return
    found = _owned(scene, pair, side)
    if found is None:
        return
    layer, parameter = found
    sites = [f"{record.layer}/{record.slot}" for record in own.records if record.stage == pair.stage]
    name, found_at = f"{layer}/{parameter.slot}", (layer, parameter.slot)
    if not parameter.trainable:
        text = f"{name} is frozen on the {side} (it does not require a gradient), and trains on the {other}"
        fix = mending.training(getattr(scene.frameworks, side)) if side == "candidate" else ""
        yield Cause("frozen", text, True, "the run says so of the parameter", fix)
        return
    if not sites:
        return
    unsaid = (
        f"{name} requires a gradient on the {side}, and has none: its optimizer does not hold it, or what is computed "
        "with it does not reach the loss"
    )
    back = [r for r in own.records if r.stage == "backward" and r.layer == layer]
    ran = [r for r in own.records if r.stage == "forward" and r.layer == layer]
    back_there = [r for r in others.records if r.stage == "backward" and r.layer == pair.anchor.layer]
    kind = _kind(getattr(scene.runs, side).info, layer)
    if ran and not back and back_there and any(r.stage == "backward" for r in own.records):
        text = f"no gradient comes back to layer {layer} on the {side}: detached, or what it gives is not used"
        yield Cause("detached", text, True, "the other side's layer gets one in this step, and both ran")
    elif back and kind in _SIMPLE and any(_is_there(record) for record in back):
        text = (
            f"the {side}'s optimizer does not hold {name}: its layer's output gets a gradient, so the parameter has "
            "one, and others are updated"
        )
        weight = next((r for r in own.records if r.stage == "weight" and (r.layer, r.slot) == found_at), None)
        # Of what is zero, outputs that agree do not show that it is used at all.
        used = weight is not None and _is_there(weight)
        evidence = "gradients of the layer's output are recorded, the parameter requires one, and outputs agree with it"
        fix = mending.holding(getattr(scene.frameworks, side))
        if used:
            yield Cause("not_in_optimizer", text, True, evidence, fix)
        else:
            yield Cause("not_in_optimizer", f"{text}; or the layer does not use it (it is zeros yet)", fix=fix)
    else:
        yield Cause("no_gradient", unsaid)


def _skipped(scene: Scene, side: str, own: Step) -> Cause:
    """A step in which an optimizer did nothing at all."""
    text = f"the {side}'s optimizer did not step in this step, as it did in others"
    back = [r for r in own.records if r.stage == "backward"]
    overflowed = [d for d in scene.step if d.figures is not None and d.figures.nonfinite + d.figures.overflowed]
    if not back or overflowed:
        return Cause("step_skipped", text)  # a scaler skips a step whose gradients overflowed
    return Cause("step_skipped", text, True, "its backward ran, and no gradient overflowed")


def _repeated(scene: Scene, side: str, other: str) -> Cause:
    steps = optimizer_steps(scene.step)
    here, there = getattr(steps, side), getattr(steps, other)
    text = f"the {other}'s optimizer stepped {_often(there)} in this step, the {side}'s {_often(here)}"
    return Cause("step_repeated", text, True, "each step's updates are recorded")


def _often(times: int) -> str:
    return {0: "not at all", 1: "once", 2: "twice"}.get(times, f"{times} times")


def is_frozen(scene: Scene, pair: Pair, side: str) -> bool:
    """Whether the parameter of a side that has no record is one that does not train."""
    found = _owned(scene, pair, side)
    return found is not None and not found[1].trainable


def _owned(scene: Scene, pair: Pair, side: str) -> tuple[str, Parameter] | None:
    """The layer and parameter of the side that has no record."""
    anchor = pair.anchor
    other = "candidate" if side == "reference" else "reference"
    for parts in scene.alignment.parameters:
        if any(
            (part.layer, part.slot) == (anchor.layer, anchor.slot.partition("[")[0]) for part in getattr(parts, other)
        ):
            for part in getattr(parts, side):
                for layer in getattr(scene.runs, side).info.layers:
                    if layer.path == part.layer:
                        found = next((p for p in layer.parameters if p.slot == part.slot), None)
                        if found is not None:
                            return layer.path, found
    return None


def _kind(info: RunInfo, path: str) -> str:
    layer = next((layer for layer in info.layers if layer.path == path), None)
    return equivalents.group_of_kinds(equivalents.kind(layer)) if layer is not None else ""


def _is_there(record: Record) -> bool:
    """Whether a gradient is more than zeros."""
    sketch = record.sketch
    if sketch is not None:
        return sketch.l2 > 0
    size = math.prod(record.shape)
    return bool(size) and bool(record.value.any())
