"""Cause of a difference in compiled code: a region that its compiler computes otherwise than eager code does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from padiff.records import ROOT, SIDES, Both, Cause, FirstDiff, Report
from padiff.records.regions import Region
from padiff.system.frames import Frame

# Operations and kernels that are named.
_FEW = 3


#: Compiled regions of a run, with the number of the step, in order.
RegionsOfSteps = list[tuple[int, tuple[Region, ...]]]


def with_regions(report: Report, recorded: Both[RegionsOfSteps]) -> Report:
    """Return a report with what the runs' compiled regions show: notes, and the cause of the first diff.

    Args:
        report: the report.
        recorded: the regions of the compared steps of each run.
    """
    first = report.first_diff
    last = math.inf if first is None else first.step
    regions = [(side, *_regions([each for each in steps if each[0] <= last])) for side, steps in zip(SIDES, recorded)]
    notes = [note for side, step, each in regions for note in _notes(side, step, each, first is not None)]
    # The candidate's regions first: the reference is the run to trust.
    wrong = next(((side, step, each) for side, step, found in reversed(regions) for each in found if each.failed), None)
    if wrong is not None:
        side, step, region = wrong
        cause = _cause(side, region, first)
        if first is None:
            first = _of_region(step, region, cause)
            report = replace(report, moved=None)
        elif first.diff is not None and _explains(first):
            if first.cause is not None and first.cause.proven:
                cause = replace(cause, evidence=f"{cause.evidence}; {first.cause.sentence}")
            first = replace(first, cause=cause)
    return replace(report, first_diff=first, regions=tuple(notes)) if notes else report


def _regions(steps: RegionsOfSteps) -> tuple[int, tuple[Region, ...]]:
    """Return the regions of the first step in which one differs, else those of the last step."""
    failed = (each for each in steps if any(region.failed for region in each[1]))
    return next(failed, steps[-1] if steps else (0, ()))


def _notes(side: str, step: int, regions: Sequence[Region], differs: bool) -> list[str]:
    if not regions:
        return []
    measured = [region for region in regions if region.measured]
    wrong = [region for region in measured if region.failed]
    notes = []
    if measured and not wrong:
        notes.append(
            f"Compiled regions of the {side} against eager code on the same inputs, in step {step}: {len(measured)}, "
            "with rounding only; the difference was not made there"
            if differs
            else f"Compiled regions of the {side} against eager code on the same inputs, in step {step}: "
            f"{len(measured)}, with rounding only"
        )
    for region in wrong[:_FEW]:
        tensor = region.failed
        assert tensor is not None
        notes.append(
            f"Compiled region {region.number} of the {side} ({_place(region)}), {tensor.name}: relative error "
            f"{tensor.error:.2g}, eager code {tensor.eager:.2g}, on the same inputs in step {step}"
        )
        if region.kernels:
            notes.append(f"Kernels of compiled region {region.number}: {_listed(region.kernels)}")
    missed = [region for region in regions if region.note and not region.failed]
    for region in missed[:_FEW]:
        notes.append(
            f"Compiled region {region.number} of the {side}: its gradients were not run again, as {region.note}"
            if region.measured
            else f"Compiled region {region.number} of the {side}: it was not run again, as {region.note}"
        )
    return notes


def _explains(first: FirstDiff) -> bool:
    """Return True if a region that computes otherwise can be the cause of a diff, before any other cause.

    Whatever formula fits the values: run eagerly, the same code does not compute them.
    """
    if first.stage in ("input", "weight"):
        return False  # the runs were not equal before the region was called
    return first.stage in ("forward", "loss", "backward") or first.cause is None or not first.cause.proven


def _of_region(step: int, region: Region, cause: Cause) -> FirstDiff:
    """Return a first diff that no compared tensor shows: a region that is beyond rounding on its own inputs."""
    stage = "forward" if any(not each.passed for each in region.outputs) else "backward"
    layer = region.wrong.layer if region.wrong is not None else next(iter(region.layers), "")
    layer = layer or ROOT
    return FirstDiff(
        step,
        stage,
        layer,
        layer,
        slot=f"compiled region {region.number}",
        cause=cause,
        statement=f"Step {step}, stage {stage}, {layer}: {cause.sentence}; compared tensors stay within their limits.",
    )


def _cause(side: str, region: Region, first: FirstDiff | None) -> Cause:
    tensor, wrong = region.failed, region.wrong
    assert tensor is not None
    number = region.number
    if wrong is not None and wrong.layer:
        sentence = (
            f"the {side}'s compiler ({region.compiler}) computes {wrong.name} of `{wrong.layer}` otherwise than eager "
            f"code, in compiled region {number}: relative error {wrong.error:.2g}, eager code {wrong.eager:.2g}"
        )
    elif wrong is not None:
        sentence = (
            f"the {side}'s compiler ({region.compiler}) computes {wrong.name} otherwise than eager code, in compiled "
            f"region {number}: relative error {wrong.error:.2g}, eager code {wrong.eager:.2g}"
        )
    else:
        sentence = (
            f"the {side}'s compiler ({region.compiler}) computes compiled region {number} otherwise than eager code "
            f"({_listed(region.operations)}): relative error {tensor.error:.2g}, eager code {tensor.eager:.2g}"
        )
    frame: Frame | None = region.frame if wrong is None or wrong.frame is None else wrong.frame
    diff = None if first is None else first.diff
    total = None if diff is None or diff.figures is None else diff.figures.rel_l2
    evidence = "the region was run again eagerly on its own inputs"
    if first is not None and total is not None:
        evidence += f"; the relative error of {first.slot} is {total:.2g} in all"
    lines = Both(frame, None) if side == SIDES.reference else Both(None, frame)
    return Cause("compiled", sentence, proven=True, evidence=evidence, lines=lines)


def _place(region: Region) -> str:
    layers = [layer for layer in region.layers if layer]
    span = "" if not layers else layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}"
    line = "" if region.frame is None else f"{region.frame.file}:{region.frame.line}"
    return ", ".join(filter(None, (span, line))) or _listed(region.operations)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_FEW]) + (", ..." if len(names) > _FEW else "")
