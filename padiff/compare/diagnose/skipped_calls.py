"""Calls of a step that one run makes in evaluation mode, so that only the other run recorded them."""

from __future__ import annotations

from collections.abc import Sequence

from padiff.align import Alignment
from padiff.compare.declared.layers import has_modes, modes_of
from padiff.compare.judge.missing_records import whole_stage_missing
from padiff.compare.measure.pairs import measure_pair
from padiff.errors import PadiffError
from padiff.records import SAME, SIDES, Both, Cause, Diff, Difference, FirstDiff, Pair, Record, Run, Step, settings_at

# Largest relative difference of equal inputs.
_EQUAL = 1e-6


def evaluated_calls(first: FirstDiff, runs: Both[Run], alignment: Alignment) -> list[tuple[int, Difference]]:
    """Return the difference of modes that makes a run's recorded calls fewer than the other's, with its step.

    A step with calls in training mode records no call in evaluation mode. If one side evaluates what the other side
    trains, the next call gets the number of the call that is missing, and its inputs are another call's.

    Args:
        first: the first tensor that differs; only inputs show such calls.
        runs: the reference and the candidate.
        alignment: the pairs of layers.
    """
    diff = first.diff
    if diff is None or first.stage != "input" or not diff.pair.complete:
        return []
    try:
        ranks = list(zip(*runs.map(lambda run: run.steps(first.step))))
        steps = Both(*ranks[first.rank or 0])
        inputs = steps.zip(diff.pair.sides).map(lambda side: _inputs(*side))
        evaluating, training = SIDES.swapped() if len(inputs.reference) > len(inputs.candidate) else SIDES
        fewer, more = getattr(inputs, evaluating), getattr(inputs, training)
        missing = _missing(fewer, more)
    except (PadiffError, OSError, KeyError, IndexError):
        return []  # deleted meanwhile, or damaged
    evaluated = sum(calls.calls for calls in getattr(steps, evaluating).evaluations)
    if not missing or evaluated < len(missing):
        return []
    layers = next((pair for pair in alignment.pairs if any(has_modes(layer) for layer in pair)), None)
    if layers is None:
        return []
    values = Both("eval", "train") if evaluating == "reference" else Both("train", "eval")
    calls = ", ".join(str(k + 1) for k in missing)
    note = f"the {evaluating} makes call {calls} of the step in evaluation mode, the {training} in training mode"
    about = " against ".join(f"{layer.path} ({layer.type})" for layer in layers)
    paths = layers.map(lambda layer: (layer.path,))
    fix = f"model.{values.reference}()"
    return [(first.step, Difference("mode", values, "forward", "mode", about, fix=fix, layers=paths, note=note))]


def evaluation_cause(diff: Diff, step: Sequence[Diff], runs: Both[Run]) -> Cause | None:
    """Return the cause of a step without outputs if that side trains in evaluation mode; else `None`.

    The calls of a recording's first step are not recorded in evaluation mode: they may be those of a validation. The
    next step shows that the loop trains with them.

    Args:
        diff: the first diff.
        step: the diffs of its step.
        runs: the reference and the candidate.
    """
    pair = diff.pair
    if pair.complete or pair.stage != "forward" or not whole_stage_missing(diff, step):
        return None
    side, other = SIDES.swapped() if pair.candidate is None else SIDES
    try:
        later = next((number for number in getattr(runs, side).numbers() if number > pair.step), None)
        trains = [later is None or _trains(getattr(runs, side), later), _trains(getattr(runs, other), pair.step)]
    except (PadiffError, OSError, IndexError):
        return None
    if trains != [False, True]:
        return None
    text = f"the {side}'s model trains in evaluation mode, the {other}'s in training mode"
    return Cause("mode", text, fix="model.train()" if side == "candidate" else "model.eval()")


def _trains(run: Run, number: int) -> bool | None:
    """Return the mode of a run's model in a step; `None` if not recorded."""
    modes = modes_of(settings_at(run.info.settings, run.steps(number)[0].settings))
    return None if modes is None else modes[0]


def _inputs(step: Step, record: Record | None) -> list[Record]:
    """Return the inputs of a step at a record's site, by call."""
    assert record is not None
    site = record.layer, record.stage, record.slot
    return sorted((r for r in step.records if (r.layer, r.stage, r.slot) == site), key=lambda r: r.call)


def _missing(fewer: Sequence[Record], more: Sequence[Record]) -> list[int]:
    """Return the places of the inputs that one side lacks; empty unless all its inputs are the other's, in order."""
    missing, waiting = [], list(fewer)
    for place, record in enumerate(more):
        if waiting and _equal(record, waiting[0]):
            waiting.pop(0)
        else:
            missing.append(place)
    return [] if waiting or not fewer else missing


def _equal(first: Record, second: Record) -> bool:
    diff = measure_pair(Pair(0, first, second, SAME)) if first.shape == second.shape else None
    return diff is not None and diff.problem is None and diff.figures is not None and diff.figures.rel_l2 <= _EQUAL
