"""Name the call that chose otherwise, beyond rounding, before the first tensor that differs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from padiff.compare.choices import WHOLE, Flips, falls, flips_of, paired, taken
from padiff.compare.diagnose.between import cause_of_calls
from padiff.compare.diagnose.evidence import Evidence
from padiff.compare.diagnose.place import calls_before, graphs_of
from padiff.compare.judge.drift import RELATIVE
from padiff.compare.judge.flipped_rows import SINGLE, within_rounding
from padiff.compare.judge.limits import allowed
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.records import LOOP, ROOT, Both, Cause, Diff, Step, Trace, TracedCall

#: Kind of the cause that a call chose otherwise because its scores differ.
CHOICE = "choice"
#: Kind of the cause that another function chooses from the same values.
OTHER_FUNCTION = "choice_function"
# Functions that give the same in the other order of their arguments, or by another name.
_MIRRORED = {"lt": "gt", "le": "ge", "argsort": "sort", "max": "argmax", "min": "argmin"}
# Functions that compare with a number.
_COMPARISONS = frozenset({"gt", "ge", "lt", "le"})
# Largest relative distance of the same values.
_SAME = 1e-3


def choice_cause(diff: Diff, step: Sequence[Diff], evidence: Evidence) -> Cause | None:
    """Return the cause that a call chose otherwise beyond rounding, before a diff; `None` if no call did.

    Args:
        diff: the first diff of the step, an output.
        step: the judged diffs of the step.
    """
    steps, record = evidence.steps, diff.pair.reference
    if steps is None or record is None or diff.pair.stage not in ("forward", "loss"):
        return None
    infos = evidence.runs.map(lambda run: run.info)
    try:
        calls = steps.reference.trace.calls
        end = max(
            (
                k
                for k, call in enumerate(calls)
                if not call.function and (call.layer, call.call) == (record.layer, record.call)
            ),
            default=len(calls),
        )
        flips = [each for each in flips_of(steps, evidence.alignment, infos) if each.position < end]
        traces = steps.map(lambda step: step.trace)
        threshold_cause = _thresholds(traces, end)
        if threshold_cause is not None:
            return threshold_cause
        for position, pair in paired(traces, evidence.alignment):
            ranking = _ranking(traces, pair) if position < end else None
            if ranking is not None:
                return ranking
            if all(call.choice is not None and call.choice.chosen for call in pair):
                continue  # rankings by several names take the same places from the same end
            names = pair.map(lambda call: _MIRRORED.get(call.function, call.function))
            if position >= end or names.reference == names.candidate or not _same(steps, pair, "inputs"):
                continue
            threshold = pair.reference.choice is not None and not pair.reference.choice.chosen
            if any(each.position == position for each in flips) or (threshold and not _same(steps, pair, "outputs")):
                text = f"{_name(pair)}, of the same values"
                return Cause(OTHER_FUNCTION, text, lines=pair.map(lambda call: call.line))
    except (RunFolderError, SketchOnlyError):
        return None
    beyond = _beyond(flips, _limit(diff, step))
    return None if beyond is None else _cause(beyond)


def scores_cause(diff: Diff, step: Sequence[Diff], evidence: Evidence) -> Cause | None:
    """Return the cause that the code before a call which chose otherwise makes other scores; `None` if there is none.

    Args:
        diff, step: see `choice_cause`, which has returned a cause of kind `CHOICE`.
    """
    steps = evidence.steps
    if steps is None:
        return None
    infos, limit = evidence.runs.map(lambda run: run.info), _limit(diff, step)
    try:
        flips = _beyond(flips_of(steps, evidence.alignment, infos), limit)
        alike = flips.error[~flips.flipped] if flips is not None else np.zeros(0)
        if flips is None or not alike.size or float(np.sqrt((alike**2).mean())) <= SINGLE * limit * flips.size:
            return None
        calls = calls_before(flips.calls, diff, step, graphs_of(steps, infos), evidence.policy)
    except (RunFolderError, SketchOnlyError):
        return None
    return cause_of_calls(calls) if calls is not None else None


def _beyond(flips: Sequence[Flips], limit: float) -> Flips | None:
    """Return the first call that chose otherwise beyond rounding."""
    for number, each in enumerate(flips):
        if not within_rounding(each, limit, flips[:number]):
            return each
    return None


def _thresholds(traces: Both[Trace], end: int) -> Cause | None:
    """Return the cause that a layer's code compares with another number; `None` if it does not."""
    sides = Both(traces.reference.calls[:end], traces.candidate.calls).map(_numbers)
    for layer, numbers in sides.reference.items():
        others = sides.candidate.get(layer, {})
        only, instead = (
            [each for each in one if each not in two] for one, two in ((numbers, others), (others, numbers))
        )
        if len(only) == len(instead) == 1:
            calls = Both(numbers[only[0]], others[instead[0]])
            text = (
                f"{calls.candidate.function}() in `{_place(layer)}` compares with {instead[0]:.6g}, the reference's "
                f"{calls.reference.function}() with {only[0]:.6g}"
            )
            lines = calls.map(lambda call: call.line)
            kind = OTHER_FUNCTION if calls.reference.function != calls.candidate.function else "choice_threshold"
            return Cause(kind, text, fix=f"compare with {only[0]:.6g}", lines=lines)
    return None


def _numbers(calls: Sequence[TracedCall]) -> dict[str, dict[float, TracedCall]]:
    """Return the numbers that each layer's code compares tensors with, with a call for each."""
    numbers: dict[str, dict[float, TracedCall]] = {}
    for call in calls:
        if call.function in _COMPARISONS:  # of scores, or of counts: a capacity
            values = [value for value in call.arguments.values() if isinstance(value, (int, float))]
            if len(values) == 1:
                numbers.setdefault(call.layer, {}).setdefault(float(values[0]), call)
    return numbers


def _ranking(traces: Both[Trace], pair: Both[TracedCall]) -> Cause | None:
    """Return the cause that one side takes another number of places, or the other end; `None` if it does not.

    A call of one side may rank all places, and its code takes the first ones.
    """
    if pair.reference.function == pair.candidate.function and pair.reference.function not in WHOLE:
        return None
    sides = traces.zip(pair)
    ends, counts = sides.map(lambda side: falls(*side)), sides.map(lambda side: taken(*side))
    lines = pair.map(lambda call: call.line)
    names = pair.map(lambda call: call.function)
    where = _place(pair.reference.layer)
    if None not in ends and ends.reference != ends.candidate:
        words = ends.map(lambda first: "largest" if first else "least")
        text = (
            f"{names.candidate}() in `{where}` puts the {words.candidate} scores first, the reference's "
            f"{names.reference}() the {words.reference}"
        )
        return Cause("choice_order", text, lines=lines)
    if all(counts) and not counts.reference & counts.candidate:
        numbers = counts.map(min)
        text = (
            f"the code takes {numbers.candidate} places of each row of {names.candidate}() in `{where}`, the "
            f"reference's {numbers.reference} of {names.reference}()"
        )
        return Cause("choice_count", text, lines=lines)
    return None


def chose_labels(diff: Diff, cause: Cause) -> bool:
    """Return True if a diff is of labels, and a cause says that a call of the loop chose otherwise."""
    return diff.pair.stage == "loss" and "int" in diff.pair.anchor.dtype and cause.kind.startswith(CHOICE)


def _same(steps: Both[Step], calls: Both[TracedCall], what: str) -> bool:
    """Return True if two calls have the same first input or output.

    Args:
        what: ``inputs`` or ``outputs``.
    """
    tensors = steps.zip(calls).map(lambda side: side[0].trace.tensors[getattr(side[1], what)[0].tensor])
    if any(tensor.source is None or tensor.source.sketched for tensor in tensors):
        return what == "outputs"
    reference, candidate = tensors.map(lambda tensor: tensor.source.read().astype(np.float64))  # type: ignore[union-attr]
    return reference.shape == candidate.shape and bool(
        np.linalg.norm(candidate - reference) <= _SAME * np.linalg.norm(reference)
    )


def _place(layer: str) -> str:
    return {ROOT: "the model", LOOP: "the loop"}.get(layer, layer)


def _name(calls: Both[TracedCall]) -> str:
    where = _place(calls.reference.layer)
    if calls.reference.function == calls.candidate.function:
        return f"{calls.reference.function}() in `{where}`"
    return f"{calls.candidate.function}() for the reference's {calls.reference.function}() in `{where}`"


def _limit(diff: Diff, step: Sequence[Diff]) -> float:
    """Return the limit of the last output that agrees before a diff."""
    limit = allowed(diff.pair.anchor.dtype, "forward")
    for each in step:
        if each is diff:
            break
        if each.passed and each.pair.stage == "forward" and each.judgement and each.judgement.figure in RELATIVE:
            limit = each.judgement.limit
    return limit


def _cause(flips: Flips) -> Cause:
    calls, chosen = flips.calls, flips.chosen
    name = _name(calls)
    lines = calls.map(lambda call: call.line)
    if chosen.reference != chosen.candidate:
        text = f"{name} chooses {chosen.candidate} places of each row, the reference's {chosen.reference}"
        fix = f"k={chosen.reference}" if calls.candidate.function == "topk" else ""
        return Cause("choice_count", text, fix=fix, lines=lines)
    if flips.ties.any():
        tied = int(flips.ties.sum())
        text = (
            f"{name}: {tied:,} of {len(flips.recorded):,} rows choose otherwise between scores that are equal to the "
            "bit: the two sides break ties by another rule"
        )
        return Cause("choice_ties", text, lines=lines)
    alike = flips.error[~flips.flipped]
    noise = float(np.sqrt((alike**2).mean())) if alike.size else 0.0
    moved = float(flips.moved[flips.flipped].max())
    if noise > 0 and np.isfinite(moved) and moved / noise > 10:
        far = f"their scores differ up to {moved / noise:,.0f} times as far as those of the other rows"
    else:
        far = f"their scores differ by up to {moved:.2g}, where all scores are about {flips.size:.2g}"
    return Cause(
        CHOICE,
        f"{name}: {flips.count:,} of {len(flips.recorded):,} rows choose otherwise, and not by rounding: {far}",
        lines=lines,
    )
