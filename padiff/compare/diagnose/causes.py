"""The first diff in words, and its likely cause."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from padiff.align import Alignment, LayerPair
from padiff.compare.diagnose.environments import environment_cause
from padiff.compare.diagnose.settings import cause_in_settings
from padiff.compare.diagnose.shifted import shift_cause
from padiff.compare.judge.absent import optimizer_steps, whole_stage_missing
from padiff.compare.judge.drift import key_of
from padiff.compare.measure.operands import operands
from padiff.errors import RunFolderError, SketchOnlyError
from padiff.model import equivalents
from padiff.records import LOOP, SIDES, Both, Diff, FirstDiff, Kind, Pair, Problem, Run, RunInfo, is_functional

# Relative spread below which a ratio of two tensors counts as one constant.
_CONSTANT = 1e-3


def first_diff(diffs: Sequence[Diff], alignment: Alignment, runs: Both[Run]) -> FirstDiff | None:
    """The first diff that did not pass, in one sentence; `None` if all passed.

    Args:
        runs: the reference and the candidate, where other steps may be looked at.
    """
    diff = next((diff for diff in diffs if not diff.passed), None)
    if diff is None:
        return None
    pair = diff.pair
    reference, candidate = _paths(pair, alignment)
    infos = runs.map(lambda run: run.info)
    reason = (
        shift_cause(diff, runs)
        or environment_cause(diff, infos)
        or cause(diff, [d for d in diffs if d.pair.step == pair.step], alignment, infos)
    )
    return FirstDiff(pair.step, pair.stage, reference, candidate, pair.anchor.slot, diff, reason)


def cause(diff: Diff, step: Sequence[Diff], alignment: Alignment, infos: Both[RunInfo]) -> str:
    """The likely cause of a diff, or an empty string where nothing speaks for one."""
    pair = diff.pair
    if not pair.complete:
        return _missing(diff, step)
    layers = next((p for p in alignment.pairs if p.reference.path == pair.anchor.layer), None)
    by_settings = cause_in_settings(pair, layers)
    shapes = diff.problem is not None and diff.problem.kind is Kind.SHAPES
    if by_settings and (not diff.problem or shapes):
        return by_settings
    if shapes:
        return "the layers have other sizes, or the tensor another layout"
    if diff.problem:
        return "an overflow, a division by zero or a log of zero on one side"
    surplus = _surplus(step, alignment) if pair.stage not in ("input", "weight") else ""
    if surplus:
        return surplus
    try:
        return _by_stage(diff, step, layers, infos)
    except (RunFolderError, SketchOnlyError):
        return ""  # the values are no longer there to look at; the figures stand


def _surplus(step: Sequence[Diff], alignment: Alignment) -> str:
    """Layers with parameters that ran on one side, and that the other side has not."""
    ran = [d.pair.anchor.layer for d in step if d.pair.stage == "forward" and not d.compared]
    described = []
    for name, other, surplus in zip(SIDES, SIDES.swapped(), alignment.surplus):
        more = [p for p in surplus if any(r == p or r.startswith(f"{p}.") for r in ran)]
        if more:
            rest = f" and {len(more) - 3} more" if len(more) > 3 else ""
            described.append(f"the {name} has layers that the {other} has not: {', '.join(more[:3])}{rest}")
    return "; ".join(described)


def _by_stage(diff: Diff, step: Sequence[Diff], layers: LayerPair | None, infos: Both[RunInfo]) -> str:
    reference, candidate = _values(diff.pair)
    stage = diff.pair.stage
    if stage == "input":
        return _input(reference, candidate)
    if stage == "weight":
        return _weight(diff, reference, candidate)
    if stage == "forward":
        slot = diff.pair.anchor.slot
        kind = slot.partition("()")[0] if is_functional(slot) else layers.reference.kind if layers else ""
        return _forward(reference, candidate, kind, layers)
    ratio = _ratio(reference, candidate)
    if stage == "loss":
        # Two numbers always have a ratio; only a round one speaks for another reduction.
        if ratio is not None and _round(ratio):
            return f"the loss is {_times(ratio)}: another reduction (mean, sum), weighting or scaling"
        return (
            "the model's outputs agree, so the labels of this batch, or the loss function: its reduction, weights, "
            "label smoothing or ignored labels"
        )
    if stage == "backward":
        if ratio is not None:
            return (
                f"the gradient is {_times(ratio)}: another reduction of the loss, another number of accumulated "
                "batches it is divided by, or a loss scale"
            )
        return "forward agrees here, so the backward of what follows this layer, or of the loss"
    if stage == "grad":
        return _grad(ratio, step)
    return _update(diff, reference, candidate, ratio, step)


def _input(reference: np.ndarray, candidate: np.ndarray) -> str:
    if _same_values(reference, candidate):
        return "the same values in another order: shuffling, or another layout of the batch"
    ratio = _ratio(reference, candidate)
    if ratio is not None:
        return f"the inputs are {_times(ratio)}: another normalisation"
    return "other batches: another order of the data, augmentation or normalisation"


def _weight(diff: Diff, reference: np.ndarray, candidate: np.ndarray) -> str:
    slot = equivalents.slot(diff.pair.anchor.slot)
    if diff.pair.step == 0:
        if reference.ndim == 2 and reference.shape[0] == reference.shape[1] and np.allclose(reference, candidate.T):
            return "the matrix is transposed: carried over without regard to (in, out) against (out, in)"
        return "the runs start from different weights: copy them over (or load one checkpoint) before training"
    if slot.startswith("running_"):
        return "the layers' running statistics are fed differently (momentum, other batches, train or eval mode)"
    return (
        "small differences of the updates before that added up (betas, weight decay, learning rate schedule, steps "
        "that were not recorded), or rounding that this training amplifies: see how the diffs of the steps before grew"
    )


def _forward(reference: np.ndarray, candidate: np.ndarray, kind: str, layers: LayerPair | None) -> str:
    drops = "dropout" in kind and not _drops_nothing(layers)
    if drops or ("dropout" not in kind and _masked_apart(reference, candidate)):
        return "dropout: each run draws its own random mask; train with rate 0 (or record in eval mode) to compare"
    ratio = _ratio(reference, candidate)
    if ratio is not None:
        return f"the output is {_times(ratio)}"
    if reference.ndim > 1 and _same_values(reference, candidate):
        return "the same values in another order: another layout, axis or interpolation of indices"
    if "norm" in kind:
        return "a normalisation: its epsilon, its axes, or statistics of the batch against running ones (train, eval)"
    if kind in ("gelu",):
        return "exact GELU against its tanh approximation"
    return "the computation at this very place: what goes in agrees up to here"


def _drops_nothing(layers: LayerPair | None) -> bool:
    """Whether two dropout layers have a rate of 0, both."""
    return layers is not None and layers.reference.settings.get("p") == layers.candidate.settings.get("p") == 0


def _masked_apart(reference: np.ndarray, candidate: np.ndarray) -> bool:
    """Whether both are zero in many places, but not in the same ones, and agree in the others."""
    zeros, others = reference == 0, candidate == 0
    few = 0.02 * reference.size
    if reference.shape != candidate.shape or min(zeros.sum(), others.sum(), (zeros != others).sum()) <= few:
        return False
    return _agree(reference[~zeros & ~others], candidate[~zeros & ~others])


def _grad(ratio: float | None, step: Sequence[Diff]) -> str:
    grads = [d for d in step if d.pair.stage == "grad" and d.compared and d.figures and d.figures.reference_l2 > 0]
    if ratio is not None and len(grads) > 1:
        largest = max(d.figures.reference_l2 / d.figures.size**0.5 for d in grads if d.figures)
        # Gradients of pure noise (a bias before a normalisation) follow no ratio.
        sizes = [
            d.figures.candidate_l2 / d.figures.reference_l2
            for d in grads
            if d.figures and d.figures.reference_l2 / d.figures.size**0.5 > 1e-4 * largest
        ]
        if np.ptp(sizes) <= _CONSTANT * abs(np.mean(sizes)):
            return (
                f"all gradients are {_times(ratio)}: clipping by norm on one side, another number of accumulated "
                "batches, or gradients that are still scaled"
            )
    if ratio is not None:
        return f"the gradient is {_times(ratio)}"
    return "activation gradients agree up to here: clipping, accumulation, a shared parameter, or amplified rounding"


def _update(diff: Diff, reference: np.ndarray, candidate: np.ndarray, ratio: float | None, step: Sequence[Diff]) -> str:
    rates = _rates(step)
    if rates:
        return rates
    if ratio is not None:
        same = "at the same gradient and learning rate"
        return f"the update is {_times(ratio)} {same}: optimizer settings (momentum, betas)"
    weight = next((d for d in step if d.pair.stage == "weight" and d.compared and key_of(d) == key_of(diff)), None)
    if weight is not None:
        values, _ = _values(weight.pair)
        rest = (candidate - reference).ravel()
        norm = float(np.linalg.norm(values) * np.linalg.norm(rest))
        if norm and abs(np.vdot(values.ravel(), rest)) > 0.99 * norm:
            return "the updates differ by a multiple of the weight: weight decay (its size, coupled or decoupled)"
    return "the gradients agree, so the optimizer: weight decay, betas, epsilon, momentum, bias correction, state"


def _rates(step: Sequence[Diff]) -> str:
    """The learning rates of a step, by parameter group, if the two runs have others; else empty."""
    rates: Both[list[float]] = Both([], [])
    equal = True
    for diff in step:
        if diff.pair.anchor.layer == LOOP and diff.pair.stage == "update" and diff.figures is not None:
            equal = equal and diff.compared and diff.passed
            for side, record, value in zip(rates, diff.pair.sides, diff.figures.values):
                if record is not None:
                    side.append(value)
    texts = rates.map(lambda side: [f"{rate:.6g}" for rate in side])
    # One group here may be several there, with one rate.
    if equal or not all(texts) or set(texts.reference) == set(texts.candidate):
        return ""
    by_group = " (by parameter group)" if max(map(len, texts)) > 1 else ""
    return f"the learning rates differ: {' against '.join(map(', '.join, texts))}{by_group}"


def _missing(diff: Diff, step: Sequence[Diff]) -> str:
    pair = diff.pair
    side, other = SIDES.swapped() if pair.candidate is None else SIDES
    if pair.stage in ("forward", "backward", "grad", "update") and whole_stage_missing(diff, step):
        return {
            "forward": f"the {side}'s model was not called in this step, as it was in others",
            "backward": f"no backward ran on the {side} in this step, as it did in others",
        }.get(pair.stage, f"the {side}'s optimizer did not step in this step, as it did in others")
    if pair.stage == "weight":
        return f"the {side}'s layer does not own this tensor"
    if pair.stage in ("grad", "update"):
        steps = optimizer_steps(step)
        here, there = steps.swapped() if pair.candidate is None else steps
        if pair.anchor.call and here < there:
            return f"the {other}'s optimizer stepped {_often(there)} in this step, the {side}'s {_often(here)}"
        return f"on the {side} the parameter gets no gradient: frozen, detached, unused, or not in its optimizer"
    return ""


def _often(times: int) -> str:
    return {0: "not at all", 1: "once", 2: "twice"}.get(times, f"{times} times")


def _values(pair: Pair) -> Both[np.ndarray]:
    """Both sides in one layout, or their projections, whose ratios and angles are those of the tensors.

    Raises:
        SketchOnlyError: there is neither.
    """
    found = operands(pair)
    values = None if isinstance(found, Problem) else found.values()
    if values is None:
        raise SketchOnlyError(pair.anchor.site)
    return values


def _ratio(reference: np.ndarray, candidate: np.ndarray) -> float | None:
    """The constant that the candidate is of the reference, if it is one."""
    r, c = reference.ravel(), candidate.ravel()
    square = float(np.real(np.vdot(r, r)))
    if r.size == 0 or square == 0 or not np.isfinite(c).all() or not np.isfinite(r).all():
        return None
    ratio = float(np.real(np.vdot(r, c))) / square
    rest = float(np.linalg.norm(c - ratio * r))
    if ratio == 0 or rest > _CONSTANT * abs(ratio) * math.sqrt(square) or abs(ratio - 1) < 10 * _CONSTANT:
        return None
    return ratio


def _round(ratio: float) -> bool:
    """Whether a ratio, or its inverse, is a whole number that a batch or a class count could be."""
    whole = max(abs(ratio), 1 / abs(ratio))
    return whole < 1e5 and abs(whole - round(whole)) < 1e-4 * whole and round(whole) > 1


def _times(ratio: float) -> str:
    return f"{ratio:.5g} times the reference's"


def _same_values(a: np.ndarray, b: np.ndarray) -> bool:
    return a.size > 1 and a.size == b.size and _agree(np.sort(a, axis=None), np.sort(b, axis=None))


def _agree(a: np.ndarray, b: np.ndarray) -> bool:
    return a.size > 0 and bool(np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(a))


def _paths(pair: Pair, alignment: Alignment) -> Both[str | None]:
    """Paths of both layers; where one side's record is missing, the layer that would have had it."""
    reference, candidate = pair.sides.map(lambda record: record.layer if record is not None else None)
    for layers in alignment.pairs:
        if reference is None and layers.candidate.path == candidate:
            reference = layers.reference.path
        elif candidate is None and layers.reference.path == reference:
            candidate = layers.candidate.path
    return Both(reference, candidate)
