"""Causes of a diff that the records show, and causes that are guessed from the values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from padiff.align import Alignment, LayerPair
from padiff.compare.diagnose.between import cause_in_place
from padiff.compare.diagnose.place import Place
from padiff.compare.diagnose.settings import cause_around, cause_in_settings
from padiff.compare.diagnose.stages import cause_by_stage
from padiff.compare.judge.missing_records import whole_stage_missing
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.records import SIDES, Both, Cause, Diff, Difference, Kind, Pair
from padiff.system.naming import first_few


def recorded_cause(
    diff: Diff, step: Sequence[Diff], alignment: Alignment, declared: Sequence[Difference], place: Place
) -> Cause | None:
    """Return the cause of a diff if the records of its step show it; else `None`.

    Args:
        diff: the first diff that did not pass.
        step: the diffs of its step.
        alignment: the pairs of layers and parameters.
        declared: the settings that differ between the runs in this step.
        place: where in the code the diff comes from.
    """
    pair = diff.pair
    by_settings = cause_in_settings(pair, declared) if place.inside is not False else cause_around(place, declared)
    if not pair.complete:
        return by_settings or _missing(diff, step)
    shapes = diff.problem is not None and diff.problem.kind is Kind.SHAPES
    if by_settings and (not diff.problem or shapes):
        return by_settings
    if shapes and place.inside is not False:
        return Cause("sizes", "the layers have other sizes, or the tensor another layout")
    if diff.problem and place.inside is not False:
        return Cause("overflow", "an overflow, a division by zero or a log of zero on one side")
    if any(place.lone):
        return _lone_input(pair, place.lone)
    surplus = _surplus(step, alignment) if pair.stage not in ("input", "weight") else ""
    return Cause("surplus_layers", surplus) if surplus else cause_in_place(place)


def guess(diff: Diff, step: Sequence[Diff], alignment: Alignment, excluded: tuple[str, ...]) -> Cause | None:
    """Return the likely cause of a diff that no hypothesis explains, judged by the values of its stage.

    Args:
        diff: the first diff that did not pass.
        step: the diffs of its step.
        alignment: the pairs of layers and parameters.
        excluded: hypotheses that were tried and ruled out.

    Returns:
        The cause; `None` if one side's record is missing or the values can no longer be read.
    """
    if not diff.pair.complete:
        return None
    try:
        cause = cause_by_stage(diff, step, _layers(diff.pair, alignment))
    except (RunFolderError, SketchOnlyError):
        return None  # the values can't be read any more; the figures remain valid
    return replace(cause, excluded=excluded)


def _layers(pair: Pair, alignment: Alignment) -> LayerPair | None:
    return next((p for p in alignment.pairs if p.reference.path == pair.anchor.layer), None)


def _surplus(step: Sequence[Diff], alignment: Alignment) -> str:
    """Return a text that names layers with parameters that ran on one side and are absent on the other; else empty."""
    ran = [d.pair.anchor.layer for d in step if d.pair.stage == "forward" and not d.compared]
    described = []
    for name, other_side, surplus in zip(SIDES, SIDES.swapped(), alignment.surplus):
        paths = [p for p in surplus if any(r == p or r.startswith(f"{p}.") for r in ran)]
        if paths:
            described.append(f"the {name} has layers that the {other_side} has not: {first_few(paths, 3)}")
    return "; ".join(described)


def _lone_input(pair: Pair, lone: Both[tuple[str, ...]]) -> Cause:
    side, other = SIDES if lone.reference else SIDES.swapped()
    slots = [slot.removeprefix("input.") for slot in lone.reference or lone.candidate]
    names = " and ".join(f"`{name}`" for name in slots[:3])
    text = f"the {side} gives `{pair.anchor.layer}` {names}, the {other} does not: a state, a mask or positions"
    return Cause("lone_input", text)


def _missing(diff: Diff, step: Sequence[Diff]) -> Cause | None:
    pair = diff.pair
    side, _ = SIDES.swapped() if pair.candidate is None else SIDES
    if pair.stage in ("forward", "backward") and whole_stage_missing(diff, step):
        if pair.stage == "forward":
            return Cause("not_called", f"the {side}'s model was not called in this step, as it was in others")
        if pair.stage == "backward":
            return Cause("no_backward", f"no backward ran on the {side} in this step, as it did in others")
    if pair.stage == "weight":
        return Cause("not_owned", f"the {side}'s layer does not own this tensor")
    if pair.stage in ("grad", "update"):
        text = f"on the {side} the parameter gets no gradient: frozen, detached, unused, or not in its optimizer"
        return Cause("no_gradient", text)
    return None
