"""Causes of a missing gradient or update: frozen, not reached by the backward, not in the optimizer, not stepped."""

from __future__ import annotations

import math
from collections.abc import Iterator

from padiff.compare.diagnose.hypotheses import fix_snippets
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.judge.missing_records import optimizer_steps, whole_stage_missing
from padiff.model import equivalents
from padiff.records import LOOP, SIDES, Cause, Pair, Parameter, Record, RunInfo, Step

# Kinds of layers whose parameters have a gradient whenever the output has one.
_SIMPLE = frozenset({"linear", "conv", "norm", "embedding"})


def causes(scene: DiffContext) -> Iterator[Cause]:
    """Yield the cause of a first diff that is a missing gradient or update, as the records show it."""
    pair = scene.diff.pair
    if pair.complete or pair.stage not in ("grad", "update") or pair.anchor.layer == LOOP:
        return
    side, other_side = SIDES.swapped() if pair.candidate is None else SIDES
    sides = scene.sides(scene.number)
    if sides is None:
        return
    step, other_step = getattr(sides, side), getattr(sides, other_side)
    if whole_stage_missing(scene.diff, scene.step):
        yield _skipped(scene, side, step)
        return
    steps = optimizer_steps(scene.step)
    if pair.anchor.call and getattr(steps, side) < getattr(steps, other_side):
        yield _repeated(scene, side, other_side)
        return
    owner = _owned(scene, pair, side)
    if owner is None:
        return
    layer, parameter = owner
    sites = [f"{record.layer}/{record.slot}" for record in step.records if record.stage == pair.stage]
    name, key = f"{layer}/{parameter.slot}", (layer, parameter.slot)
    if not parameter.trainable:
        text = f"{name} is frozen on the {side} (it does not require a gradient), and trains on the {other_side}"
        fix = fix_snippets.training(getattr(scene.frameworks, side)) if side == "candidate" else ""
        yield Cause("frozen", text, True, "the run says so of the parameter", fix)
        return
    if not sites:
        return
    unsaid = (
        f"{name} requires a gradient on the {side}, and has none: its optimizer does not hold it, or what is computed "
        "with it does not reach the loss"
    )
    back = [r for r in step.records if r.stage == "backward" and r.layer == layer]
    ran = [r for r in step.records if r.stage == "forward" and r.layer == layer]
    back_there = [r for r in other_step.records if r.stage == "backward" and r.layer == pair.anchor.layer]
    kind = _kind(getattr(scene.runs, side).info, layer)
    if ran and not back and back_there and any(r.stage == "backward" for r in step.records):
        text = f"no gradient comes back to layer {layer} on the {side}: detached, or what it gives is not used"
        yield Cause("detached", text, True, "the other side's layer gets one in this step, and both ran")
    elif back and kind in _SIMPLE and any(_is_there(record) for record in back):
        text = (
            f"the {side}'s optimizer does not hold {name}: its layer's output gets a gradient, so the parameter has "
            "one, and others are updated"
        )
        weight = next((r for r in step.records if r.stage == "weight" and (r.layer, r.slot) == key), None)
        # For a weight of zeros, equal outputs do not show that the layer uses the weight.
        used = weight is not None and _is_there(weight)
        evidence = "gradients of the layer's output are recorded, the parameter requires one, and outputs agree with it"
        fix = fix_snippets.holding(getattr(scene.frameworks, side))
        if used:
            yield Cause("not_in_optimizer", text, True, evidence, fix)
        else:
            yield Cause("not_in_optimizer", f"{text}; or the layer does not use it (it is zeros yet)", fix=fix)
    else:
        yield Cause("no_gradient", unsaid)


def _skipped(scene: DiffContext, side: str, step: Step) -> Cause:
    """Return the cause of a step in which an optimizer updated nothing."""
    if "@zeroed" in getattr(scene.runs, side).info.lines:
        text = f"the {side} clears its gradients between backward and step: its optimizer has nothing to step with"
        clear = "clear_grad" if scene.frameworks.candidate == "paddle" else "zero_grad"
        fix = f"optimizer.step(); optimizer.{clear}()" if side == "candidate" else ""
        return Cause("step_skipped", text, True, "the source clears them there, and nothing is updated", fix)
    text = f"the {side}'s optimizer did not step in this step, as it did in others"
    back = [r for r in step.records if r.stage == "backward"]
    overflowed = [d for d in scene.step if d.figures is not None and d.figures.nonfinite + d.figures.overflowed]
    if not back or overflowed:
        return Cause("step_skipped", text)  # a scaler skips a step whose gradients overflowed
    return Cause("step_skipped", text, True, "its backward ran, and no gradient overflowed")


def _repeated(scene: DiffContext, side: str, partner: str) -> Cause:
    steps = optimizer_steps(scene.step)
    count, other_count = getattr(steps, side), getattr(steps, partner)
    text = f"the {partner}'s optimizer stepped {_often(other_count)} in this step, the {side}'s {_often(count)}"
    return Cause("step_repeated", text, True, "each step's updates are recorded")


def _often(times: int) -> str:
    return {0: "not at all", 1: "once", 2: "twice"}.get(times, f"{times} times")


def is_frozen(scene: DiffContext, pair: Pair, side: str) -> bool:
    """Return True if the parameter without a record on this side does not train."""
    owner = _owned(scene, pair, side)
    return owner is not None and not owner[1].trainable


def _owned(scene: DiffContext, pair: Pair, side: str) -> tuple[str, Parameter] | None:
    """Return the layer and parameter on the side that has no record; `None` if the alignment has none."""
    anchor = pair.anchor
    other_side = "candidate" if side == "reference" else "reference"
    for parts in scene.alignment.parameters:
        if any(
            (part.layer, part.slot) == (anchor.layer, anchor.slot.partition("[")[0])
            for part in getattr(parts, other_side)
        ):
            for part in getattr(parts, side):
                for layer in getattr(scene.runs, side).info.layers:
                    if layer.path == part.layer:
                        parameter = next((p for p in layer.parameters if p.slot == part.slot), None)
                        if parameter is not None:
                            return layer.path, parameter
    return None


def _kind(info: RunInfo, path: str) -> str:
    layer = next((layer for layer in info.layers if layer.path == path), None)
    return equivalents.group_of_kinds(equivalents.kind(layer)) if layer is not None else ""


def _is_there(record: Record) -> bool:
    """Return True if a gradient has an element other than zero."""
    sketch = record.sketch
    if sketch is not None:
        return sketch.l2 > 0
    size = math.prod(record.shape)
    return bool(size) and bool(record.value.any())
