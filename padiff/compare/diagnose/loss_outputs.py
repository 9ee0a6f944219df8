"""Causes of a difference in the output of a loss function whose inputs agree: a setting, another function, ignored
rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from padiff.compare.declared.optimizers import same
from padiff.compare.declared.run import OF_LAYOUT
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.loss_calls import (
    WEIGHTS,
    LossCall,
    fixed,
    functions_of,
    is_near,
    number_text,
    sides_of,
    spelled,
)
from padiff.compare.diagnose.loss_divisors import divisor_cause
from padiff.compare.diagnose.stages import weight_in_loss
from padiff.compare.diagnose.values import ratio_of, round_ratio, times
from padiff.frameworks.conventions import conventions_of
from padiff.records import ROOT, Both, Cause, Diff, Rule, is_loss, is_of_loss, loss_role, setting_text

# Relative distance below which two gradients differ alike: rows that chose otherwise are part of some.
_LIKE = 0.1
_KINDS = {
    "function": "loss_function",
    "reduction": "loss_reduction",
    "label_smoothing": "label_smoothing",
    "ignore_index": "ignore_index",
    "weight": "loss_weight",
    "pos_weight": "loss_weight",
}


def output_cause(scene: DiffContext, calls: Both[LossCall] | None) -> Cause | None:
    if calls is None:
        return None
    reference, candidate = calls
    compared = [d for d in scene.step if is_of_loss(d.pair.anchor) and d.pair.stage == "loss" and d.compared]
    if is_loss(scene.diff.pair.anchor) and any(loss_role(d.pair.anchor.slot) == "0" and _agrees(d) for d in compared):
        return _term(scene) or divisor_cause(scene) or _after(scene.diff)
    differing = _differing(calls)
    if "function" in differing:
        return _other_function(calls)
    if not any(_agrees(d) for d in compared):
        return None
    ignoring = _ignored_rows(calls)
    if ignoring is not None:
        return ignoring
    if differing:
        return _set_differently(calls, differing)
    shapes = calls.map(lambda call: {role: r.shape for role, r in call.loss.records.items() if role != "0"})
    broadcast = shapes.map(lambda side: "target" in side and side["prediction"] != side["target"])
    if broadcast.candidate != broadcast.reference:
        side, shape = ("candidate", shapes.candidate) if broadcast.candidate else ("reference", shapes.reference)
        text = (
            f"the {side}'s prediction {shape['prediction']} and target {shape['target']} are broadcast against "
            "each other"
        )
        fix = "give both the same shape" if broadcast.candidate else ""
        return Cause("loss_shapes", text, True, "the loss has as many terms as that makes", fix)
    for side, call in (("reference", reference), ("candidate", candidate)):
        exact = call.computed()
        if exact is None or call.output is None or not exact.size == call.output.size == 1:
            continue
        if not is_near(exact, call.output):
            text = (
                f"the loss function itself: the {side}'s is {number_text(call.output)}, in float64 {number_text(exact)}"
            )
            return Cause("loss_function", f"{text} from what went in")
    return Cause("loss_function", "the loss function itself: what goes into it agrees, and what it is set to")


def _term(scene: DiffContext) -> Cause | None:
    """Return the cause that a scalar output of the model has another weight in the loss: its gradient is the weight.

    `None` if the gradients of all outputs differ alike.
    """
    grads = [d for d in scene.step if d.pair.stage == "backward" and d.pair.anchor.layer == ROOT and d.compared]
    sizes = {
        d.pair.anchor.slot: d.figures.candidate_l2 / d.figures.reference_l2
        for d in grads
        if d.figures is not None and d.figures.reference_l2 > 0
    }
    scalars = [d for d in grads if d.pair.anchor.slot in sizes and math.prod(d.pair.anchor.shape) == 1]
    for diff in scalars:
        slot = diff.pair.anchor.slot
        if all(math.isclose(sizes[slot], size, rel_tol=_LIKE) for other, size in sizes.items() if other != slot):
            continue
        if not math.isclose(sizes[slot], 1.0, rel_tol=_LIKE):
            return weight_in_loss(diff)
    return None


def _agrees(diff: Diff) -> bool:
    return diff.passed and (diff.judgement is None or diff.judgement.rule is not Rule.WRITTEN_OTHERWISE)


def _after(diff: Diff) -> Cause:
    sides = sides_of(diff)
    ratio = ratio_of(*sides) if sides is not None else None
    text = (
        "what the loss functions give agrees, so what is made of it afterwards: a factor, a mean, a term that is added"
    )
    if ratio is not None and round_ratio(ratio):
        text = f"what the loss functions give agrees, and the loss is {times(ratio)}: another factor, or another mean"
    return Cause("loss_scale", text)


def _differing(calls: Both[LossCall]) -> dict[str, Both[Any]]:
    """Return the values of the settings that differ, by name."""
    sides = calls.map(lambda call: call.settings)
    names = dict.fromkeys((*sides.reference, *sides.candidate))
    values_by_name = {name: Both(sides.reference.get(name), sides.candidate.get(name)) for name in names}
    optional = (*WEIGHTS, "function")
    return {
        name: values
        for name, values in values_by_name.items()
        if name not in OF_LAYOUT and (None not in values or name in optional) and not same(*values)
    }


def _set_differently(calls: Both[LossCall], differing: Mapping[str, Both[Any]]) -> Cause:
    reference, candidate = calls
    settings = {**candidate.settings, **{name: values.reference for name, values in differing.items()}}
    inputs = dict(candidate.inputs or {})
    for role in set(WEIGHTS) & differing.keys():
        inputs.pop(role, None)
        if reference.inputs is not None and role in reference.inputs:
            inputs[role] = reference.inputs[role]
    proven = candidate.inputs is not None and candidate.gives(reference.output, settings=settings, inputs=inputs)
    texts = [
        f"{name} {setting_text(values.reference)} against {setting_text(values.candidate)}"
        for name, values in differing.items()
    ]
    evidence = ""
    if proven and reference.output is not None:
        evidence = f"set as the reference's, the candidate's loss is the reference's, {number_text(reference.output)}"
    kind = _KINDS.get(next(iter(differing)), "loss_setting")
    fix = fixed(calls, {name: values.reference for name, values in differing.items()})
    sentence = f"the losses are set differently: {candidate.loss.function} with {', '.join(texts)}"
    return Cause(kind, sentence, proven, evidence, fix)


def _other_function(calls: Both[LossCall]) -> Cause:
    names = calls.map(lambda call: call.loss.function)
    spellings = names.zip(calls).map(lambda side: spelled(side[1].framework, side[0]))
    as_written = f" ({spellings.candidate} of {calls.candidate.framework})" * (spellings.candidate != names.candidate)
    sentence = f"the losses are others: {names.reference} against {names.candidate}{as_written}"
    proven = calls.candidate.gives(calls.reference.output, settings=calls.reference.settings)
    evidence = f"with the reference's function the candidate's loss is {number_text(calls.reference.output)}" * proven
    settings = {n: v for n, v in calls.reference.settings.items() if n in ("beta", "delta")}
    return Cause("loss_function", sentence, proven, evidence, fixed(calls, settings, names.reference))


def _ignored_rows(calls: Both[LossCall]) -> Cause | None:
    """Return a cause if only one of the frameworks counts rows with ignored labels in the mean; else `None`."""
    counting = calls.map(lambda call: conventions_of(call.framework).counts_ignored)
    if counting.reference == counting.candidate or calls.candidate.loss.function != "cross_entropy":
        return None
    reference, candidate = calls
    if candidate.inputs is None or not candidate.gives(reference.output, framework=reference.framework):
        return None
    labels, ignored = candidate.inputs["labels"], int(candidate.settings.get("ignore_index", -100))
    count, counted = labels.size, int((labels != ignored).sum())
    counts = Both(count, counted) if counting.reference else Both(counted, count)
    counter = (reference if counting.reference else candidate).framework
    text = (
        f"{count - counted} of {count} labels are ignored, and the reference's mean is over {counts.reference} rows, "
        f"the candidate's over {counts.candidate}: {counter} counts ignored rows where ignore_index is negative"
    )
    evidence = f"counted as the reference's, the candidate's loss is {number_text(reference.output)}"
    function = f"{functions_of(candidate.framework)}cross_entropy"
    fix = (
        f'{function}(..., reduction="sum") / (labels != {ignored}).sum()'
        if counting.candidate
        else f'{function}(..., reduction="sum") / labels.numel()'
    )
    return Cause("ignored_rows", text, True, evidence, fix)
