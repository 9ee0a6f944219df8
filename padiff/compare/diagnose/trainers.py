"""Differences in how trainers treat labels and losses, as the computed cause of a loss that differs."""

from __future__ import annotations

import math

import numpy as np

from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.hypotheses.ratios import facts, recognised
from padiff.compare.diagnose.loss_calls import loss_calls
from padiff.compare.measure.labels import labels_by_call
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.records import Both, Cause, Difference, is_loss, is_of_loss

# The largest relative error of a computed loss. Chosen: far beyond rounding, and below the effect of other counts.
_NEAR = 1e-4
# The fewest tokens of a sequence whose labels show a shift.
_SHORTEST = 3
_OVER_TOKENS = "over the tokens of a step"


def trainer_cause(scene: DiffContext) -> Cause | None:
    """Return the cause of a first diff that is a loss, labels of a loss, or the gradient norm that clipping measured.

    `None` if the recorded values do not show the cause.
    """
    pair = scene.diff.pair
    if pair.stage == "grad" and pair.complete and is_of_loss(pair.anchor):
        return _norm(scene)
    # A model may return its loss as an output.
    gives_loss = pair.stage == "forward" and pair.anchor.shape == ()
    if not (pair.stage == "loss" or gives_loss) or not pair.complete:
        return None
    try:
        return _unshifted(scene) or (_mean(scene) if is_loss(pair.anchor) else None)
    except (RunFolderError, SketchOnlyError):
        return None


def _norm(scene: DiffContext) -> Cause | None:
    figures = scene.diff.figures
    if figures is None or not figures.reference_l2:
        return None
    ratio = figures.candidate_l2 / figures.reference_l2
    text = (
        f"before they are clipped, all gradients together are {ratio:.5g} times the reference's: clipping to a norm "
        "hides what they are multiplied by"
    )
    number = recognised(ratio, facts(scene))
    return Cause("gradient_scale", f"{text}; {number.text}" if number is not None else text)


def _declared(scene: DiffContext, name: str) -> Difference | None:
    return next(
        (difference for difference in scene.declared if difference.kind == "trainer" and difference.name == name), None
    )


def _unshifted(scene: DiffContext) -> Cause | None:
    """Return a cause if the labels of one side are the other side's labels shifted by one token; else `None`."""
    sides = scene.sides(scene.number)
    if sides is None:
        return None
    reference, candidate = sides.map(lambda step: labels_by_call(step.records))
    # Token ids: integers in rows, as many as there are labels.
    token_ids = [d.pair.anchor for d in scene.step if d.pair.stage == "input" and d.pair.anchor.dtype.startswith("int")]
    sizes = {math.prod(record.shape) for record in reference.values()}
    lengths = {record.shape[-1] for record in token_ids if len(record.shape) == 2 and math.prod(record.shape) in sizes}
    if len(lengths) != 1:
        return None
    (length,) = lengths
    ways = set()
    for call in reference.keys() & candidate.keys():
        reference_labels, candidate_labels = reference[call].value.ravel(), candidate[call].value.ravel()
        if reference_labels.size != candidate_labels.size or reference_labels.size % length or length < _SHORTEST:
            return None
        ways.add(_way(reference_labels.reshape(-1, length), candidate_labels.reshape(-1, length)))
    if len(ways) != 1 or None in ways:
        return None
    (behind,) = ways
    later, fix = ("candidate", "labels[:, :-1] = labels[:, 1:]; labels[:, -1] = -100")
    if behind == "reference":
        later, fix = "reference", ""
    text = (
        f"the {later}'s labels are not shifted: its loss is of the tokens that go in, the other's of the tokens that "
        "follow them"
    )
    declared = _declared(scene, "labels are shifted")
    note = f"; {declared.note}" if declared is not None else ""
    return Cause("labels_shifted", text, True, f"moved on by one place, all labels are the same{note}", fix)


def _way(reference: np.ndarray, candidate: np.ndarray) -> str | None:
    """Return the side whose labels are one place behind the other's; `None` if neither is."""
    if np.array_equal(reference, candidate):
        return None
    for behind, labels, other_labels in (("candidate", candidate, reference), ("reference", reference, candidate)):
        if _alike(labels[:, 1:], other_labels[:, :-1]):
            return behind
    return None


def _alike(first: np.ndarray, second: np.ndarray) -> bool:
    counted = (first >= 0) | (second >= 0)
    return bool(counted.any() and (first == second)[counted].all())


def _mean(scene: DiffContext) -> Cause | None:
    """Return a cause if one trainer averages the loss over the tokens of a step, the other over each micro-batch."""
    difference = _declared(scene, "the loss is a mean")
    sides = scene.sides(scene.number)
    if difference is None or sides is None:
        return None
    losses = sides.map(lambda step: [float(np.ravel(r.value)[0]) for r in step.records if is_loss(r)])
    calls = sides.zip(scene.runs).map(lambda side: loss_calls(side[0], side[1].info))
    counts: Both[list[int]] = calls.map(
        lambda some: [
            int((call.inputs["labels"] >= 0).sum()) for call in some if call.inputs and "labels" in call.inputs
        ]
    )
    if not counts.reference or counts.reference != counts.candidate:
        return None
    tokens = counts.reference
    if any(len(side) != len(tokens) for side in losses) or not all(tokens):
        return None
    shares = [sum(tokens) / (len(tokens) * count) for count in tokens]
    factor = [1 / share for share in shares] if difference.values.candidate == _OVER_TOKENS else shares
    proven = np.allclose(np.multiply(losses.reference, factor), losses.candidate, rtol=_NEAR, atol=0)
    cause = difference.cause()
    evidence = f"the micro-batches have {', '.join(map(str, tokens))} labels that count"
    if proven:
        evidence += ", and counted as the candidate counts, the reference's losses are the candidate's"
    return Cause(cause.kind, cause.sentence, bool(proven), f"{evidence}; {difference.note}", cause.fix)
