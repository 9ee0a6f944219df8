"""Name the call that chose otherwise, beyond rounding, before the first tensor that differs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from padiff.compare.choices import Flips, flips_of, paired
from padiff.compare.diagnose.evidence import Evidence
from padiff.compare.judge.drift import RELATIVE
from padiff.compare.judge.flipped_rows import within_rounding
from padiff.compare.judge.limits import allowed
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.records import LOOP, ROOT, Both, Cause, Diff, Step, TracedCall

#: Kind of the cause that a call chose otherwise because its scores differ.
CHOICE = "choice"
#: Kind of the cause that another function chooses from the same values.
OTHER_FUNCTION = "choice_function"
# Functions that give the same in the other order of their arguments, or by another name.
_MIRRORED = {"lt": "gt", "le": "ge", "argsort": "sort", "max": "argmax", "min": "argmin"}
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
        for position, pair in paired(steps.map(lambda step: step.trace), evidence.alignment):
            names = pair.map(lambda call: _MIRRORED.get(call.function, call.function))
            if position >= end or names.reference == names.candidate or not _same(steps, pair, "inputs"):
                continue
            threshold = pair.reference.choice is not None and not pair.reference.choice.chosen
            if any(each.position == position for each in flips) or (threshold and not _same(steps, pair, "outputs")):
                text = f"{_name(pair)}, of the same values"
                return Cause(OTHER_FUNCTION, text, lines=pair.map(lambda call: call.line))
    except (RunFolderError, SketchOnlyError):
        return None
    limit = _limit(diff, step)
    before: list[Flips] = []
    for each in flips:
        if not within_rounding(each, limit, before):
            return _cause(each)
        before.append(each)
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


def _name(calls: Both[TracedCall]) -> str:
    where = {ROOT: "the model", LOOP: "the loop"}.get(calls.reference.layer, calls.reference.layer)
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
