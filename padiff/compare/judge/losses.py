"""Excuse differences in the arguments and results of loss functions, and in norms before clipping.

The same loss can be written in different ways: ignore labels of -100 or multiply by a mask, smooth the labels before
the call or by an argument, take the mean or divide the sum. If losses and gradients agree, such a difference is no
diff.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from padiff.compare.judge import limits
from padiff.compare.judge.site_facts import SiteFacts, coarsest
from padiff.compare.measure.labels import labels_by_call, same_labels
from padiff.compare.measure.operands import elements
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.records import LOOP, Both, Diff, Figure, Judgement, Rule, is_loss, is_of_loss
from padiff.records.step_diffs import StepDiffs

# Share of a difference that shows in gradients if it has an effect. Chosen: another way to write a loss leaves none.
_SHOWN = 0.1
# Slots of labels among a model's inputs.
_LABELS = frozenset({"input.labels", "input.label"})


def confirmed(diffs: StepDiffs) -> StepDiffs:
    """Return a step's judged diffs, with harmless differences in arguments and results of loss functions passed.

    Labels that the model receives also pass, if its loss functions receive equal labels: language models of one library
    shift labels themselves, those of another library expect shifted labels.
    """
    if diffs.passed:
        return diffs
    diffs = _with_prepared(diffs)
    facts = diffs.sites.fact(SiteFacts)
    if not (facts.of_loss & ~diffs.rows["passed"]).any():
        return diffs
    compared = [diff for diff in diffs if diff.compared]
    after = [*(diff for diff in compared if is_loss(diff.pair.anchor)), *_first_gradients(compared)]
    grads = [diff for diff in compared if diff.pair.stage == "grad" and diff.pair.anchor.layer != LOOP]
    after = after or grads
    noise = limits.allowed(coarsest(facts.dtypes, ("input", "weight", "forward")), "forward")
    exact = facts.exact.tolist()

    def counts(place: int, diff: Diff) -> bool:
        if diff.passed or not is_of_loss(diff.pair.anchor):
            return True
        evidence = grads if diff.pair.stage == "grad" else after
        if not evidence:
            return diff.pair.stage == "loss"
        if diff.pair.stage == "grad" and _hidden(diff, grads):
            return True
        if any(not witness.passed for witness in evidence):
            return not exact[place] or _other_labels(diff) > 0
        if not exact[place] and not any(is_loss(witness.pair.anchor) for witness in evidence):
            return diff.pair.stage == "loss" and _shows(diff, evidence, noise)
        return diff.pair.stage == "loss" and exact[place] and _tells(_other_labels(diff), evidence, noise)

    return diffs.replaced([diff if counts(place, diff) else _excused(diff) for place, diff in enumerate(diffs)])


def _with_prepared(diffs: StepDiffs) -> StepDiffs:
    exact = diffs.sites.fact(SiteFacts).exact
    label_places = [
        place for place in np.flatnonzero(exact & ~diffs.rows["passed"]).tolist() if _is_given(diffs[place])
    ]
    if not label_places:
        return diffs
    sides = zip(*(diff.pair.sides for diff in diffs if is_of_loss(diff.pair.anchor)))
    used = [labels_by_call([record for record in side if record is not None]) for side in sides]
    if len(used) != 2:
        return diffs
    alike = {call for call in used[0].keys() & used[1].keys() if same_labels(used[0][call], used[1][call])}
    result = list(diffs)
    for place in label_places:
        if result[place].pair.anchor.call in alike:
            result[place] = _excused(result[place], Rule.PREPARED)
    return diffs.replaced(result)


def _is_given(diff: Diff) -> bool:
    """Return True if the diff is of integer labels that the model receives."""
    anchor = diff.pair.anchor
    return anchor.stage == "input" and anchor.slot in _LABELS and diff.compared


def _hidden(diff: Diff, grads: Sequence[Diff]) -> bool:
    """Return True if a norm before clipping differs, and clipping on both sides hides this in the gradients."""
    figures = diff.figures
    if figures is None or not all(diff_of_grad.passed and diff_of_grad.figures for diff_of_grad in grads):
        return False
    sides = [diff_of_grad.figures for diff_of_grad in grads if diff_of_grad.figures is not None]
    norms_after = Both(math.hypot(*(f.reference_l2 for f in sides)), math.hypot(*(f.candidate_l2 for f in sides)))
    before = Both(figures.reference_l2, figures.candidate_l2)
    return all(norm > limits.CLIPPED * after > 0 for norm, after in zip(before, norms_after))


def _first_gradients(diffs: Iterable[Diff]) -> list[Diff]:
    """Return for each call the gradient that backward computes first: it depends on the loss alone."""
    first: dict[int, Diff] = {}
    for diff in diffs:
        if diff.pair.stage == "backward":
            first.setdefault(diff.pair.anchor.call, diff)
    return list(first.values())


def _other_labels(diff: Diff) -> float:
    """Return the share of labels that differ; all negative numbers count as one ignored label."""
    try:
        sides: Both[np.ndarray] | None = elements(diff.pair)
    except (RunFolderError, SketchOnlyError):
        return 1.0
    if sides is None or not sides.reference.size:
        return 1.0
    differ = (sides.reference != sides.candidate) & ~((sides.reference < 0) & (sides.candidate < 0))
    return float(differ.mean())


def _tells(share: float, diffs: Sequence[Diff], noise: float) -> bool:
    """Return True if a gradient that is within its limit is off by as much as a share of different labels explains."""
    least = max(limits.OF_LABELS * math.sqrt(share), noise)
    gradients = [diff.figures for diff in diffs if diff.pair.stage == "backward"]
    return share > 0 and any(figures is not None and figures.rel_l2 >= least for figures in gradients)


def _shows(diff: Diff, gradients: Sequence[Diff], noise: float) -> bool:
    """Return True if gradients that are within their limits are off about as far as what went into the loss."""
    least = max(_SHOWN * diff.figures.rel_l2, noise) if diff.figures is not None else math.inf
    return any(gradient.figures is not None and gradient.figures.rel_l2 >= least for gradient in gradients)


def _excused(diff: Diff, rule: Rule = Rule.WRITTEN_OTHERWISE) -> Diff:
    judged = diff.judgement
    figure, value = (judged.figure, judged.value) if judged is not None else (Figure.REL_L2, 0.0)
    limit = max(value, judged.limit if judged is not None else 0.0)
    figures = diff.figures
    if figures is not None and (figures.floor is not None or figures.third is not None):
        figures = replace(figures, floor=None, third=None)  # measured for another quantity
    return Diff(diff.pair, figures, True, Judgement(figure, value, limit, rule), diff.problem)
