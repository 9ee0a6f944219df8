"""Hypotheses on constant ratios, and the numbers of the run that explain them: 4 micro-batches, 2 processes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from padiff.compare.diagnose.hypotheses.accumulation_scale import division_text, divisors
from padiff.compare.diagnose.hypotheses.diff_context import DiffContext
from padiff.compare.diagnose.hypotheses.hypothesis import Hypothesis, Prediction
from padiff.records import is_of_loss, loss_role

#: Largest relative difference of a ratio from a number of the run; ratios are measured more exactly than this.
NEAR = 2e-5
# Usual loss scales (powers of two), and the one from which on a ratio can only be a loss scale.
_SCALES, _SURELY = tuple(2.0**k for k in range(7, 25)), 1024.0


@dataclass(frozen=True)
class Fact:
    """A number of the run that a ratio may be equal to.

    Attributes:
        value: the number.
        kind: machine-readable name of the cause for such a ratio.
        times: explanation of a candidate that is the reference times this number.
        share: explanation of a candidate that is the reference divided by this number.
    """

    value: float
    kind: str
    times: str
    share: str


@dataclass(frozen=True)
class Recognised:
    """A ratio that is equal to a number of the run.

    Attributes:
        ratio: the exact number.
        kind: machine-readable name of the cause.
        text: the explanation of the ratio.
        sure: True if no other kind of number of the run has the same value.
    """

    ratio: float
    kind: str
    text: str
    sure: bool = True


def facts(scene: DiffContext) -> list[Fact]:
    """Return the numbers of the run that gradients and losses may be multiplied by."""
    numbers: list[Fact] = []
    sides = scene.sides(scene.number)
    if sides is not None:
        several = sorted({step.micro_batches for step in sides} - {0, 1})
        divided = divisors(scene) if several else None
        for count in several:
            division = division_text(count, divided)
            numbers.append(
                Fact(
                    count,
                    "accumulation",
                    f"{count} micro-batches are accumulated: "
                    + (division or "the candidate does not divide by their number, or the reference does so twice"),
                    f"{count} micro-batches are accumulated: "
                    + (division or "the candidate divides by their number, the reference not, or once less"),
                )
            )
            square = f"{count} micro-batches are accumulated, and {count * count} is {count} times {count}"
            twice = "divides by their number twice, the"
            numbers.append(
                Fact(
                    count * count,
                    "accumulation",
                    f"{square}: {division or f'the reference {twice} candidate not at all'}",
                    f"{square}: {division or f'the candidate {twice} reference not at all'}",
                )
            )
        # A host that divides gradients by the count of micro-batches after backward declares the count as loss scale.
        counts = {float(step.micro_batches) for step in sides}
        for scale in sorted({step.loss_scale for step in sides} - {1.0} - counts):
            text = f"it is the loss scale, {scale:g}"
            numbers.append(Fact(scale, "loss_scale", f"{text}: not undone in the candidate", f"{text}: undone twice"))
        for size in (
            ()
            if _loss_agrees(scene)
            else sorted({r.shape[0] for step in sides for r in step.records if r.stage == "input" and r.shape})
        ):
            if size > 1:
                numbers.append(
                    Fact(
                        size,
                        "loss_reduction",
                        f"the batch has {size} samples: the candidate's loss is their sum, the reference's their mean",
                        f"the batch has {size} samples: the candidate's loss is their mean, the reference's their sum",
                    )
                )
    for size in sorted({run.info.world_size for run in scene.runs} - {1}):
        text = f"{size} processes train"
        numbers.append(Fact(size, "world_size", f"{text}: summed over, not averaged", f"{text}: averaged, not summed"))
    return numbers


def _loss_agrees(scene: DiffContext) -> bool:
    """Return True if losses are recorded and agree, so that both sides reduce the loss in the same way."""
    losses = [diff for diff in scene.step if diff.pair.stage == "loss" and diff.compared]
    return bool(losses) and all(diff.passed for diff in losses)


def recognised(ratio: float, known: Sequence[Fact], near: float = NEAR) -> Recognised | None:
    """Return the number of the run that a ratio is equal to, or `None`.

    Args:
        known: the numbers of the run.
        near: largest relative difference of the ratio from the number.
    """
    matches: list[Recognised] = []
    for fact in known:
        for value, text in ((fact.value, fact.times), (1 / fact.value, fact.share)):
            if _is(ratio, value, near):
                matches.append(Recognised(value, fact.kind, f"{_share(fact.value, value)} = {text}"))
    if not matches:
        for scale in _SCALES:
            if _is(ratio, scale, near) or _is(ratio, 1 / scale, near):
                how = "not undone in the candidate" if ratio > 1 else "not undone in the reference"
                return Recognised(ratio, "loss_scale", f"{ratio:.6g} = a loss scale, {how}", scale >= _SURELY)
        if _is(ratio, -1.0, near):
            return Recognised(-1.0, "sign", "-1: the sign is flipped")
        return None
    kinds = {match.kind for match in matches}
    text = "; or ".join(dict.fromkeys(match.text for match in matches))
    return Recognised(matches[0].ratio, matches[0].kind, text, len(kinds) == 1)


def counts(scene: DiffContext) -> frozenset[int]:
    """Return counts of the run: of samples, of labels, and of labels that are not ignored."""
    sizes: set[int] = set()
    for step in scene.sides(scene.number) or ():
        for record in step.records:
            if record.stage == "input" and record.shape:
                sizes.add(record.shape[0])
            elif is_of_loss(record) and loss_role(record.slot) == "labels" and not record.source.sketched:
                labels = record.value
                sizes |= {labels.size, int((labels >= 0).sum())}
    return frozenset(sizes - {0, 1})


def fraction(ratio: float, known: Collection[int]) -> str:
    """Return a ratio as text, with the fraction of two counts that equals the ratio, if any: ``0.8333 = 5 / 6``."""
    for below in sorted(known):
        above = round(ratio * below)
        if above in known and above != below and _is(ratio, above / below):
            return f"{ratio:.5g} = {above} / {below}"
    return f"{ratio:.5g}"


def ratio_of(tensors: Iterable[Prediction]) -> float | None:
    """Return the factor from the tensors without fault to the recorded ones, by least squares; `None` if undefined."""
    square = product = 0.0
    for tensor in tensors:
        noise = np.asarray(tensor.noise)
        square += float(np.sum(np.square(tensor.without / noise)))
        product += float(np.sum(tensor.without * tensor.actual / np.square(noise)))
    return product / square if square > 0 and math.isfinite(product) else None


def scaled(tensors: Sequence[Prediction], ratio: float) -> Iterator[Prediction]:
    """Yield the predictions that all tensors are multiplied by a ratio."""
    for tensor in tensors:
        # Numbers that are far smaller than the reference's have smaller rounding errors.
        noise = tensor.noise * min(1.0, abs(ratio))
        yield Prediction(tensor.site, tensor.actual, ratio * tensor.without, tensor.without, noise, tensor.limit)


def ratio_hypotheses(
    tensors: Sequence[Prediction],
    what: str,
    kind: str,
    known: Sequence[Fact],
    counted: Collection[int] = (),
    near: float = NEAR,
) -> Iterator[Hypothesis]:
    """Yield the hypothesis that all tensors are multiplied by the same number, named if it is a number of the run.

    Args:
        tensors: tensors of the step; `Prediction.without` holds the reference's.
        what: plural noun for the tensors.
        kind: kind of the cause if the ratio is no number of the run.
        known: the numbers of the run.
        counted: the counts of the run.
        near: largest relative difference of the ratio from a number of the run; larger for coarse dtypes.
    """
    ratio = ratio_of(tensors)
    if ratio is None or ratio == 0 or abs(ratio - 1) < 1e-4:
        return
    number = recognised(ratio, known, near)
    if number is not None:
        yield Hypothesis(
            number.kind,
            "a number of the run",
            f"{what} are {number.ratio:.5g} times the reference's: {number.text}",
            lambda: scaled(tensors, number.ratio),
            what,
            tried=2 * len(known) + 2 * len(_SCALES),
            telling=number.sure,
        )
    else:
        text = f"{what} are {fraction(ratio, counted)} times the reference's"
        yield Hypothesis(kind, "a constant ratio", text, lambda: scaled(tensors, ratio), what, free=1, telling=False)


def _is(ratio: float, value: float, near: float = NEAR) -> bool:
    return abs(ratio - value) <= near * abs(value)


def _share(fact: float, value: float) -> str:
    return f"{fact:g}" if value == fact else f"{value:.5g} = 1 / {fact:g}"
