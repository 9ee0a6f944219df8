"""Why losses part whose model's outputs agree: other labels, another setting, another function.

What went into the loss functions is recorded, so that the candidate's loss can be computed with something that is the
reference's: where that gives the reference's loss, the cause is proven.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from padiff.compare.declared.fixes import loss_fix
from padiff.compare.declared.optimizers import same
from padiff.compare.declared.run import OF_LAYOUT
from padiff.compare.diagnose.hypotheses.scene import Scene
from padiff.compare.diagnose.values import ratio_of, round_ratio, same_values, times
from padiff.compare.measure.losses import RecordedLoss, loss_of, loss_settings, recorded_losses
from padiff.compare.measure.operands import operands
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.frameworks.known import FRAMEWORKS
from padiff.frameworks.spelled import SPELLINGS
from padiff.records import (
    Both,
    Cause,
    Diff,
    Problem,
    Rule,
    RunInfo,
    Step,
    is_loss,
    is_of_loss,
    loss_role,
    setting_text,
    settings_at,
)

# What counts as computed to be the same: so many times nearer than what was recorded, and this near. Chosen.
_NEARER, _NEAR = 30.0, 2e-3
_LABELS = ("labels", "target")
_WEIGHTS = ("weight", "pos_weight")
_KINDS = {
    "function": "loss_function",
    "reduction": "loss_reduction",
    "label_smoothing": "label_smoothing",
    "ignore_index": "ignore_index",
    "weight": "loss_weight",
    "pos_weight": "loss_weight",
}


@dataclass(frozen=True)
class LossCall:
    """One side's call of a loss function.

    Attributes:
        framework: the run's.
        loss: what was recorded of it.
        settings: what the function was set to.
        inputs: what went in; `None` where it can't be read.
        output: what it gave.
    """

    framework: str
    loss: RecordedLoss
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, np.ndarray] | None = None
    output: np.ndarray | None = None

    def computed(self, **other: Any) -> np.ndarray | None:
        """What it gives in float64, with some things replaced by others."""
        call = replace(self, **other)
        if call.inputs is None:
            return None
        return loss_of(
            str(call.settings.get("function", call.loss.function)), call.inputs, call.settings, call.framework
        )

    def gives(self, expected: np.ndarray | None, **other: Any) -> bool:
        """Whether it would give that with some things replaced, and does not without."""
        found, own = self.computed(**other), self.output
        if found is None or expected is None or own is None or found.size != expected.size:
            return False
        size = float(np.linalg.norm(expected))
        off = float(np.linalg.norm(found.ravel() - expected.ravel()))
        without = float(np.linalg.norm(own.ravel() - expected.ravel())) if own.size == expected.size else np.inf
        return off <= _NEAR * size and off * _NEARER <= without


def loss_cause(scene: Scene) -> Cause | None:
    """The cause of a first diff that is a loss, or what went into a loss function; `None` where nothing shows it."""
    diff = scene.diff
    if diff.pair.stage != "loss" or not diff.pair.complete or isinstance(operands(diff.pair), Problem):
        return None
    try:
        calls = calls_of(scene)
        if is_of_loss(diff.pair.anchor):
            role = loss_role(diff.pair.anchor.slot)
            if role in _LABELS:
                return _labels(diff, role, calls)
            if role in _WEIGHTS:
                return _weights(diff, role, calls)
            if role != "0":
                return _input(diff, calls)
        return _loss(scene, calls)
    except (RunFolderError, SketchOnlyError):
        return None


# -- what was recorded -------------------------------------------------------------------------------------------------


def calls_of(scene: Scene) -> Both[LossCall] | None:
    """The two calls that a scene's diff is of; `None` where that is not one on either side."""
    sides = scene.sides(scene.number)
    if sides is None:
        return None
    found = []
    for record, step, run in zip(scene.diff.pair.sides, sides, scene.runs):
        losses = recorded_losses(step.records)
        if record is None:
            return None
        if is_of_loss(record):
            function = record.slot.partition("()")[0]
            losses = [loss for loss in losses if (loss.function, loss.call) == (function, record.call)]
        else:
            losses = [loss for loss in losses if loss.call == record.call]
        if len(losses) != 1:
            return None
        found.append(_read(losses[0], step, run.info))
    return Both(*found)


def loss_calls(step: Step, info: RunInfo) -> list[LossCall]:
    """All calls of loss functions of a step."""
    return [_read(loss, step, info) for loss in recorded_losses(step.records)]


def _read(loss: RecordedLoss, step: Step, info: RunInfo) -> LossCall:
    call = LossCall(info.framework, loss)
    try:
        output = loss.records["0"].value.astype(np.float64) if "0" in loss.records else None
        call = replace(call, output=output)
        call = replace(call, inputs=loss.inputs())
    except (SketchOnlyError, RunFolderError):
        pass
    options = loss_settings(settings_at(info.settings, step.settings), loss.function)
    fitting = [settings for settings in options if _is_near(call.computed(settings=settings), call.output)]
    return replace(call, settings=next(iter(fitting or options), {"function": loss.function}))


def _is_near(found: np.ndarray | None, expected: np.ndarray | None) -> bool:
    if found is None or expected is None or found.size != expected.size:
        return False
    return bool(np.linalg.norm(found.ravel() - expected.ravel()) <= _NEAR * np.linalg.norm(expected))


# -- what went in ------------------------------------------------------------------------------------------------------


def _sides(diff: Diff) -> Both[np.ndarray] | None:
    found = operands(diff.pair)
    return None if isinstance(found, Problem) else found.values()


def _labels(diff: Diff, role: str, calls: Both[LossCall] | None) -> Cause:
    sides = _sides(diff)
    proven, evidence = _proof_by_input(role, calls)
    if sides is None:
        return Cause("labels", "the loss is of other labels", proven, evidence)
    reference, candidate = sides
    if any(not record.dtype.startswith(("int", "uint", "bool")) for record in diff.pair.sides if record is not None):
        ratio = ratio_of(reference, candidate)
        what = "labels" if role == "labels" else "targets"
        text = f"the loss is of other {what}"
        if ratio is not None:
            text = f"the {what} that the loss is of are {times(ratio)}: another normalisation"
        elif same_values(reference, candidate):
            text = f"the {what} that the loss is of are in another order than the model's inputs"
        return Cause("labels", text, proven, evidence)
    differ = reference != candidate
    count, among = int(differ.sum()), reference.size
    place = tuple(int(k) for k in np.argwhere(differ)[0]) if count else ()
    one, other = (int(side[place]) for side in sides)
    text = f"the loss is of other labels: {count} of {among} differ, the first at {list(place)}, {one} against {other}"
    pattern = _pattern(reference.astype(np.int64), candidate.astype(np.int64), differ, _ignored(calls))
    return Cause("labels", f"{text}: {pattern}" if pattern else text, proven, evidence)


def _ignored(calls: Both[LossCall] | None) -> Both[int]:
    if calls is None:
        return Both(-100, -100)
    return calls.map(lambda call: int(call.settings.get("ignore_index", -100)))


def _pattern(reference: np.ndarray, candidate: np.ndarray, differ: np.ndarray, ignored: Both[int]) -> str:
    """What is regular about how labels differ."""
    offsets = np.unique((candidate - reference)[differ])
    out = Both((reference == ignored.reference) | (reference < 0), (candidate == ignored.candidate) | (candidate < 0))
    if bool((out.reference != out.candidate)[differ].all()):
        if not out.reference[differ].any():
            return "all of these are ignored in the candidate only"
        if not out.candidate[differ].any():
            return "all of these are ignored in the reference only"
    if len(offsets) == 1 and bool(differ[~out.reference].all()):
        return f"the candidate's are {int(offsets[0]):+d}, as if classes were counted from another number on"
    if reference.ndim and reference.shape[-1] > 2:
        if np.array_equal(candidate[..., :-1], reference[..., 1:]):
            return "the candidate's are shifted: each place has the label of the one after it"
        if np.array_equal(candidate[..., 1:], reference[..., :-1]):
            return "the candidate's are shifted: each place has the label of the one before it"
    if np.array_equal(np.sort(candidate, axis=None), np.sort(reference, axis=None)):
        return "the same labels in another order, than the model's inputs are in"
    return ""


def _proof_by_input(role: str, calls: Both[LossCall] | None) -> tuple[bool, str]:
    """Whether the candidate's loss is the reference's with what is the reference's of one role."""
    if calls is None:
        return False, ""
    reference, candidate = calls
    if reference.inputs is None or candidate.inputs is None or reference.output is None:
        return False, ""
    given = {**candidate.inputs, role: reference.inputs[role].reshape(candidate.inputs[role].shape)}
    if not candidate.gives(reference.output, inputs=given):
        return False, ""
    return True, f"with the reference's the candidate's loss is the reference's, {_number(reference.output)}"


def _number(output: np.ndarray | None) -> str:
    if output is None:
        return "unknown"
    return f"{float(output.ravel()[0]):.6g}" if output.size == 1 else "element by element"


def _weights(diff: Diff, role: str, calls: Both[LossCall] | None) -> Cause:
    proven, evidence = _proof_by_input(role, calls)
    values = Both("others", "others") if calls is None else calls.map(lambda call: _text(call.settings.get(role)))
    sentence = f"the loss weighs classes differently: {role} {values.reference} against {values.candidate}"
    fix = "" if calls is None else _fix(calls, {role: calls.reference.settings.get(role)})
    return Cause("loss_weight", sentence, proven, evidence, fix)


def _input(diff: Diff, calls: Both[LossCall] | None) -> Cause:
    role = loss_role(diff.pair.anchor.slot)
    what = role.replace("_", " ")
    sides = _sides(diff)
    if sides is not None and calls is not None and role == "logits" and _is_softmax(calls):
        call = f"{_functions(calls.candidate.framework)}{_spelled(calls.candidate.framework, 'cross_entropy')}"
        text = "the candidate takes the softmax of the logits before the loss function, which takes it itself"
        return Cause(
            "softmax_twice", text, True, "what goes in is the softmax of the reference's", f"{call}(logits, ...)"
        )
    ratio = ratio_of(*sides) if sides is not None else None
    if ratio is not None:
        text = f"the {what} that go into the loss are {times(ratio)}, where the model's outputs agree: a temperature"
        return Cause("loss_input", text)
    text = f"the {what} that go into the loss differ where the model's outputs agree: what the loop does in between"
    return Cause("loss_input", text)


def _is_softmax(calls: Both[LossCall]) -> bool:
    if calls.reference.inputs is None or calls.candidate.inputs is None:
        return False
    logits, given = (call.inputs["logits"].astype(np.float64) for call in calls if call.inputs is not None)
    if logits.shape != given.shape:
        return False
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return bool(np.allclose(shifted / shifted.sum(-1, keepdims=True), given, rtol=0, atol=1e-3))


# -- what came out -----------------------------------------------------------------------------------------------------


def _loss(scene: Scene, calls: Both[LossCall] | None) -> Cause | None:
    if calls is None:
        return None
    reference, candidate = calls
    known = [d for d in scene.step if is_of_loss(d.pair.anchor) and d.pair.stage == "loss" and d.compared]
    if is_loss(scene.diff.pair.anchor) and any(loss_role(d.pair.anchor.slot) == "0" and _agrees(d) for d in known):
        return _after(scene.diff)
    differing = _differing(calls)
    if "function" in differing:
        return _other_function(calls)
    if not any(_agrees(d) for d in known):
        return None
    ignoring = _ignored_rows(calls)
    if ignoring is not None:
        return ignoring
    if differing:
        return _set_differently(calls, differing)
    shapes = calls.map(lambda call: {role: r.shape for role, r in call.loss.records.items() if role != "0"})
    broadcast = shapes.map(lambda side: "target" in side and side["prediction"] != side["target"])
    if broadcast.candidate != broadcast.reference:
        side, one = ("candidate", shapes.candidate) if broadcast.candidate else ("reference", shapes.reference)
        text = (
            f"the {side}'s prediction {one['prediction']} and target {one['target']} are broadcast against each other"
        )
        fix = "give both the same shape" if broadcast.candidate else ""
        return Cause("loss_shapes", text, True, "the loss has as many terms as that makes", fix)
    for side, call in (("reference", reference), ("candidate", candidate)):
        own = call.computed()
        if own is None or call.output is None or not own.size == call.output.size == 1:
            continue
        if not _is_near(own, call.output):
            text = f"the loss function itself: the {side}'s is {_number(call.output)}, in float64 {_number(own)}"
            return Cause("loss_function", f"{text} from what went in")
    return Cause("loss_function", "the loss function itself: what goes into it agrees, and what it is set to")


def loss_cause_of(scene: Scene, calls: Both[LossCall]) -> Cause | None:
    """Why a loss function gives something else in the candidate, given both calls with the same inputs."""
    return _loss(scene, calls)


def labels_in_order(scene: Scene) -> Cause | None:
    """Of labels that differ: their cause, if they are the reference's in another order, or counted from another number
    on; so no model made them.
    """
    calls = calls_of(scene)
    sides = _sides(scene.diff)
    if sides is None or not all(np.all(side == np.round(side)) for side in sides):
        return None
    reference, candidate = (side.astype(np.int64) for side in sides)
    differ = reference != candidate
    if not _pattern(reference, candidate, differ, _ignored(calls)):
        return None
    return _labels(scene.diff, "labels", calls)


def _agrees(diff: Diff) -> bool:
    return diff.passed and (diff.judgement is None or diff.judgement.rule is not Rule.WRITTEN_OTHERWISE)


def _after(diff: Diff) -> Cause:
    sides = _sides(diff)
    ratio = ratio_of(*sides) if sides is not None else None
    text = (
        "what the loss functions give agrees, so what is made of it afterwards: a factor, a mean, a term that is added"
    )
    if ratio is not None and round_ratio(ratio):
        text = f"what the loss functions give agrees, and the loss is {times(ratio)}: another factor, or another mean"
    return Cause("loss_scale", text)


def _differing(calls: Both[LossCall]) -> dict[str, Both[Any]]:
    """The settings that differ."""
    sides = calls.map(lambda call: call.settings)
    names = dict.fromkeys((*sides.reference, *sides.candidate))
    found = {name: Both(sides.reference.get(name), sides.candidate.get(name)) for name in names}
    optional = (*_WEIGHTS, "function")
    return {
        name: values
        for name, values in found.items()
        if name not in OF_LAYOUT and (None not in values or name in optional) and not same(*values)
    }


def _set_differently(calls: Both[LossCall], differing: Mapping[str, Both[Any]]) -> Cause:
    reference, candidate = calls
    given = {**candidate.settings, **{name: values.reference for name, values in differing.items()}}
    inputs = dict(candidate.inputs or {})
    for role in set(_WEIGHTS) & differing.keys():
        inputs.pop(role, None)
        if reference.inputs is not None and role in reference.inputs:
            inputs[role] = reference.inputs[role]
    proven = candidate.inputs is not None and candidate.gives(reference.output, settings=given, inputs=inputs)
    texts = [f"{n} {_text(values.reference)} against {_text(values.candidate)}" for n, values in differing.items()]
    evidence = ""
    if proven and reference.output is not None:
        evidence = f"set as the reference's, the candidate's loss is the reference's, {_number(reference.output)}"
    kind = _KINDS.get(next(iter(differing)), "loss_setting")
    fix = _fix(calls, {name: values.reference for name, values in differing.items()})
    sentence = f"the losses are set differently: {candidate.loss.function} with {', '.join(texts)}"
    return Cause(kind, sentence, proven, evidence, fix)


def _other_function(calls: Both[LossCall]) -> Cause:
    names = calls.map(lambda call: call.loss.function)
    written = names.zip(calls).map(lambda side: _spelled(side[1].framework, side[0]))
    as_written = f" ({written.candidate} of {calls.candidate.framework})" * (written.candidate != names.candidate)
    sentence = f"the losses are others: {names.reference} against {names.candidate}{as_written}"
    proven = calls.candidate.gives(calls.reference.output, settings=calls.reference.settings)
    evidence = f"with the reference's function the candidate's loss is {_number(calls.reference.output)}" * proven
    own = {n: v for n, v in calls.reference.settings.items() if n in ("beta", "delta")}
    return Cause("loss_function", sentence, proven, evidence, _fix(calls, own, names.reference))


def _ignored_rows(calls: Both[LossCall]) -> Cause | None:
    """Whether it is that one framework counts the rows whose labels are ignored, and the other does not."""
    counting = calls.map(lambda call: call.framework in FRAMEWORKS and FRAMEWORKS[call.framework].counts_ignored)
    if counting.reference == counting.candidate or calls.candidate.loss.function != "cross_entropy":
        return None
    reference, candidate = calls
    if candidate.inputs is None or not candidate.gives(reference.output, framework=reference.framework):
        return None
    labels, ignored = candidate.inputs["labels"], int(candidate.settings.get("ignore_index", -100))
    among, rest = labels.size, int((labels != ignored).sum())
    counts = Both(among, rest) if counting.reference else Both(rest, among)
    counter = (reference if counting.reference else candidate).framework
    text = (
        f"{among - rest} of {among} labels are ignored, and the reference's mean is over {counts.reference} rows, the "
        f"candidate's over {counts.candidate}: {counter} counts ignored rows where ignore_index is negative"
    )
    evidence = f"counted as the reference's, the candidate's loss is {_number(reference.output)}"
    function = f"{_functions(candidate.framework)}cross_entropy"
    fix = (
        f'{function}(..., reduction="sum") / (labels != {ignored}).sum()'
        if counting.candidate
        else f'{function}(..., reduction="sum") / labels.numel()'
    )
    return Cause("ignored_rows", text, True, evidence, fix)


# -- words -------------------------------------------------------------------------------------------------------------


def _text(value: Any) -> str:
    return setting_text(value)


def _functions(framework: str) -> str:
    spelling = SPELLINGS.get(framework)
    return f"{spelling.layers}.functional." if spelling is not None else ""


def _spelled(framework: str, function: str) -> str:
    spelling = SPELLINGS.get(framework)
    return function if spelling is None else spelling.losses.get(function, (function, ""))[0]


def _fix(calls: Both[LossCall], settings: Mapping[str, Any], function: str = "") -> str:
    """The candidate's call with settings as the reference has them."""
    candidate = calls.candidate
    return loss_fix(candidate.framework, function or candidate.loss.function, settings)
